"""The backbone as the decoding loop sees it: a forward after every sequence's own prefix, and a rollback per sequence.

Two kinds of caches: one that knows every sequence's length itself, and transformers' own, whose columns all sequences
share. In the latter, sequences that keep different numbers of tokens are repacked after verification: every sequence's
tokens are right-aligned again, and its left padding grows. No hole is left between tokens, so that distances between
columns stay distances between tokens. Layers with an attention window rely on it; what they hold meanwhile, `windows`
says.

    columns of the cache     before           + block of 4, kept 4 and 2         repacked
    row 0                    . a b c          . a b c d e f g                    . a b c d e f g
    row 1                    r s t u          r s t u v w - -                    . . r s t u v w

Knows neither distributions nor verification.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from ..call.sequences import NewTokens
from ..protocols import CacheView, SpeculativeCache
from ..trees.contract import DraftTree, VerificationResult
from .cache import compact, crop, drop_first, held_columns, hold, release, shift_cache
from .inputs import Continuation, dense_mask, tree_mask
from .replay import Replay

HiddenLayers = int | list[int] | bool | None
States = tuple[torch.Tensor | None, ...]


@dataclass
class TargetOutput:
    """What one backbone call gave for a block.

    Attributes:
        logits: [B, F, v] of b and the nodes.
        hidden_states: Per layer [B, F, D] or None; those that were asked for.
        auxiliary: [B, A, v] logits of the rows that rode along.
        auxiliary_states: Their `hidden_states`.
    """

    logits: torch.Tensor
    hidden_states: tuple[torch.Tensor | None, ...] | None = None
    auxiliary: torch.Tensor | None = None
    auxiliary_states: tuple[torch.Tensor | None, ...] | None = None

    def state(self, layer: int = -1) -> torch.Tensor:
        """Return the hidden states [B, F, D] of a layer that the session asked for."""
        found = None if self.hidden_states is None else self.hidden_states[layer]
        if found is None:
            raise ValueError(f"hidden_layers: the states of layer {layer} were not asked for")
        return found

    def first(self, count: int) -> States:
        """Return the hidden states of the first `count` positions, None for layers that were not asked for."""
        return tuple(None if state is None else state[:, :count] for state in self.hidden_states or ())

    def along(self, result: VerificationResult, tree: DraftTree) -> TargetOutput:
        """The same along the accepted path only, [B, k + 1, ...]; a chain's path is its beginning."""
        if tree.is_chain:
            return self
        take = result.path[..., None]
        states = self.hidden_states and tuple(
            None if state is None else state.gather(1, take.to(state.device).expand(-1, -1, state.shape[-1]))
            for state in self.hidden_states
        )
        return TargetOutput(
            self.logits.gather(1, take.expand(-1, -1, self.logits.shape[-1])),
            states,
            self.auxiliary,
            self.auxiliary_states,
        )


class Target(CacheView, Protocol):
    """What the loop needs of a model with a filled cache.

    Attributes:
        supports_rollback: Whether rows keep different numbers of tokens; else all sequences keep b, those that have
            ended, too.
    """

    cache: Cache
    supports_rollback: bool
    last_position: int | None

    def forward(self, block: torch.Tensor, tree: DraftTree, hidden_layers: HiddenLayers) -> TargetOutput:
        """One backbone call on block [B, m + 1], b and the nodes, after every sequence's prefix."""
        ...

    def keep(self, kept: NewTokens, result: VerificationResult, tree: DraftTree) -> None:
        """Leaves b and the accepted path of the last block in the cache, `kept.counts[b]` tokens in sequence b."""
        ...

    def align(self, columns: int) -> None:
        """Ends the call: lays the cache out as the first `columns` columns of the sequences that are returned."""
        ...


class RowLengthTarget(Target):
    """A model whose cache has a length per sequence: `crop` takes a number per sequence, and no mask is needed.

    Args:
        model: The backbone.
        cache: Its cache.
        mask: [B, columns of the prompt], 0 for padding; None where there is none.

    Attributes:
        mask: The same.
        new_tokens: What the last `keep` left.
    """

    supports_rollback, has_columns = True, False
    last_position = None

    def __init__(self, model: PreTrainedModel, cache: Cache, mask: torch.Tensor | None = None) -> None:
        self.model, self.cache = model, cast(SpeculativeCache, cache)
        self.cache.activate_past_recording()  # a draft may be longer than what a forward leaves for rollback by itself
        self.mask = cast(torch.Tensor, mask)  # None without padding; only sessions of such caches read it

    def forward(self, block: torch.Tensor, tree: DraftTree, hidden_layers: HiddenLayers) -> TargetOutput:
        """See `Target`.

        Raises:
            ValueError: A draft that is no chain.
        """
        if not tree.is_chain:
            raise ValueError(f"{type(self.cache).__name__} takes chains, and no trees of drafts: leave draft_tree out")
        outputs = self.model(
            block, past_key_values=self.cache, use_cache=True, return_dict=True, output_hidden_states=hidden_layers
        )
        return TargetOutput(outputs.logits, outputs.hidden_states)

    def keep(self, kept: NewTokens, result: VerificationResult, tree: DraftTree) -> None:
        """See `Target`."""
        self.new_tokens = kept
        self.cache.keep_last(tree.tokens.shape[1] + 1, kept)

    def align(self, columns: int) -> None:
        """Nothing to do: every sequence starts where it ends."""


class RepackedTarget(Target):
    """A model on transformers' caches.

    Args:
        model: The backbone.
        cache: Its cache, with the prompt in it.
        like: A tensor [B] on the device of the tokens.
        mask: [B, columns of the cache], 0 for padding; None where there is none.
        given: Prepared keyword arguments of the prefill, of which some go on after it.

    Attributes:
        mask: [B, W] bool, the real tokens among the columns of the cache as it is laid out now.
        counts: [B] int64, real tokens.
        is_padded: Whether any column is no real token.
        shifts: Columns by which the last `keep` moved each sequence to the right, [B]; None where it moved none.
        new_tokens: What the last `keep` left.
        last_position: Where the positions of sequences that have ended stop; None: nowhere.
    """

    supports_rollback, has_columns = True, True
    last_position = None

    def __init__(
        self,
        model: PreTrainedModel,
        cache: Cache,
        like: torch.Tensor,
        mask: torch.Tensor | None = None,
        given: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.cache = model, cache
        width = cache.get_seq_length()
        self.mask = torch.ones(len(like), width, dtype=torch.bool, device=like.device)
        self.mask = self.mask if mask is None else mask[:, :width].bool()
        self.counts = self.mask.sum(1)
        self.continuation = Continuation(given or {}, self.counts)
        self.is_padded = mask is not None and not bool(self.mask.all())
        self.shifts: torch.Tensor | None = None
        self.moved: torch.Tensor | None = None
        self.is_plain = all(type(layer) is DynamicLayer for layer in cache.layers)
        self.replay = Replay(model.get_decoder(), cache) if is_recurrent(cache) else None

    def forward(self, block: torch.Tensor, tree: DraftTree, hidden_layers: HiddenLayers) -> TargetOutput:
        """See `Target`; positions go on by real tokens. AuxiliaryPositions leave the cache again at once.

        Raises:
            ValueError: A draft that is no chain, for a backbone with recurrent layers, which see all tokens in a row.
        """
        if self.replay is not None and not (tree.is_chain and tree.auxiliary is None):
            raise ValueError(
                f"{type(self.model).__name__} has recurrent layers, which take chains and no trees of drafts: leave "
                "draft_tree out"
            )
        with nullcontext() if self.replay is None else self.replay.record():
            return self._call(block, tree, hidden_layers)

    def _call(self, block: torch.Tensor, tree: DraftTree, hidden_layers: HiddenLayers) -> TargetOutput:
        fed, auxiliary = block.shape[1], tree.auxiliary
        inputs: dict[str, Any] = {} if auxiliary is None else dict(auxiliary.inputs)
        places = tree.positions() if auxiliary is None else auxiliary.positions
        last = self.last_position if auxiliary is None or auxiliary.last_position is None else auxiliary.last_position
        inputs |= self.continuation.inputs(self.counts[:, None] + places, last)
        if not self.is_plain:
            hold(self.cache)
        outputs = self.model(
            block,
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
            attention_mask=self._mask(fed, tree),
            output_hidden_states=hidden_layers,
            **inputs,
        )
        if auxiliary is None:
            return TargetOutput(outputs.logits, outputs.hidden_states)
        self._crop(fed - places.shape[-1])
        layers = outputs.hidden_states
        states, behind = (
            layers and tuple(None if state is None else state[:, part] for state in layers)
            for part in (slice(fed), slice(fed, None))
        )
        return TargetOutput(outputs.logits[:, :fed], states, outputs.logits[:, fed:], behind)

    def _mask(self, fed: int, tree: DraftTree) -> Any:
        """None or [B, W + F] for a chain, whose order the backbone knows; else what each sequence sees, dense."""
        if tree.auxiliary is not None:
            return dense_mask(self.mask, tree.auxiliary.mask, self.model)
        if not tree.is_chain:
            return tree_mask(self.mask, tree, self.model, held_columns(self.cache))
        return torch.nn.functional.pad(self.mask, (0, fed), value=True) if self.is_padded else None

    def next_positions(self) -> list[int]:
        """The position of the token after every sequence's prefix; the host waits for it."""
        positions = self.continuation.inputs(self.counts[:, None])["position_ids"]
        return positions.reshape(-1, len(self.counts)).amax(0).tolist()

    def keep(self, kept: NewTokens, result: VerificationResult, tree: DraftTree) -> None:
        """See `Target`."""
        fed, self.new_tokens = tree.tokens.shape[1] + 1, kept
        if self.replay is not None:
            self.replay.keep(kept.counts)
        if not tree.is_chain:
            compact(self.cache, result.path[:, : kept.longest], fed)
            fed = min(fed, kept.longest)
        self._crop(kept.longest - fed)
        self.mask = torch.nn.functional.pad(self.mask, (0, kept.longest), value=True)
        self.counts, self.shifts = self.counts + (kept.longest if kept.is_even else kept.on_device), None
        if not kept.is_even:
            self.shifts = kept.longest - kept.on_device
            self.moved = self.shifts if self.moved is None else self.moved + self.shifts
            self.is_padded = True
            self.mask = shift_cache(self.cache, self.shifts, self.mask)
        if not self.is_plain:
            release(self.cache)

    def _crop(self, columns: int) -> None:
        """Take the last `-columns` columns from the cache."""
        if not self.is_plain:
            crop(self.cache, columns)
        elif columns:
            for layer in self.cache.layers:
                layer.crop(columns)

    def align(self, columns: int) -> None:
        """See `Target`; columns after a sequence's end hold arbitrary values, as padding does.

        The first columns, which are padding in all sequences by now, are dropped and not the last ones, so that a
        layer with an attention window keeps as many columns as it needs.
        """
        if self.moved is not None:
            surplus = self.mask.shape[1] - columns
            drop_first(self.cache, columns)
            shift_cache(self.cache, surplus - self.moved, self.mask[:, surplus:])


class EvenTarget(RepackedTarget):
    """A model on a cache that cannot go back, a static one say: one token at a time, and never a rollback.

    Sequences that have ended go on reading what stands after them, as in transformers' own loop; nobody looks at it.
    """

    supports_rollback = False

    def keep(self, kept: NewTokens, result: VerificationResult, tree: DraftTree) -> None:
        """See `Target`; all sequences keep b."""
        self.new_tokens, self.counts = kept, self.counts + 1
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=True)
        release(self.cache)

    def align(self, columns: int) -> None:
        """Nothing was moved."""


_EMPTY = getattr(cache_utils, "DummyLayer", DynamicLayer)  # the version that vLLM pins has none


_KINDS = (
    DynamicLayer,
    DynamicIndexedLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    _EMPTY,
)


_FORGETFUL = ("jamba", "zamba")
"""Kinds whose mixers read a block of several tokens as if no state stood before it."""


def is_repackable(cache: Cache | None) -> bool:
    """Whether rows of this cache may keep different numbers of tokens: its layers can go back."""
    return cache is None or all(type(layer) in _KINDS for layer in cache.layers)


def can_roll_back(model: PreTrainedModel) -> bool:
    """Whether a model's states can go back after a rejected draft: columns are cropped, recurrent layers replayed.

    Columns are needed to tell how long a cache is, and a class that keeps states in another way than transformers'
    caches do cannot be helped.
    """
    if not type(model)._is_stateful:
        return True
    if model.config.model_type in _FORGETFUL:
        return False
    cache = DynamicCache(config=model.config)
    has_columns = any(isinstance(layer, DynamicLayer) for layer in cache.layers)
    return has_columns and is_recurrent(cache) and is_repackable(cache)


def is_recurrent(cache: Cache) -> bool:
    """Whether any layer keeps a recurrent state."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
