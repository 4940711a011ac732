"""The backbone as the decoding loop sees it: a forward after every sequence's own prefix, and a rollback per sequence.

Three kinds of caches: transformers' own, of which every sequence gets an end of its own (`cache`); those of backbones
that take no dense masks, which are repacked after every verification (`repacking`); and those of backbones that know
every sequence's length themselves. `target_of` chooses. Knows neither distributions nor verification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, cast

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ...configuration.fields import masks_padding_alone
from ...modeling.masks import cached_range
from ..call.sequences import NewTokens
from ..protocols import CacheView, SpeculativeCache
from ..trees.contract import DraftTree, VerificationResult
from .cache import RowLayer, Rows, block_mask
from .indexed import layer_class, note_positions
from .replay import Replay

HiddenLayers = int | list[int] | bool | None
States = tuple[torch.Tensor | None, ...]
_TYPES = {"token_type_ids": True, "mm_token_type_ids": False}
"""Kinds of tokens, and whether the last one goes on; what is written is text, of kind 0, elsewhere."""
_COPIED = 64
"""Columns that may be copied for every token that may follow, where sequences that have ended are left out."""


def each_state(states: States | None, change: Callable[[torch.Tensor], torch.Tensor]) -> States | None:
    """Return hidden states of layers after a change; None for layers that were not asked for, or for all of them."""
    return states and tuple(None if state is None else change(state) for state in states)


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
        return each_state(self.hidden_states, lambda state: state[:, :count]) or ()

    def along(self, result: VerificationResult, tree: DraftTree) -> TargetOutput:
        """The same along the accepted path only, [B, k + 1, ...]; a chain's path is its beginning."""
        if tree.is_chain:
            return self
        take = result.path[..., None]

        def taken(values: torch.Tensor) -> torch.Tensor:
            return values.gather(1, take.to(values.device).expand(-1, -1, values.shape[-1]))

        states = each_state(self.hidden_states, taken)
        return TargetOutput(taken(self.logits), states, self.auxiliary, self.auxiliary_states)


class Target(CacheView, Protocol):
    """What the loop needs of a model with a filled cache.

    Attributes:
        supports_rollback: Whether rows keep different numbers of tokens; else all sequences keep b, those that have
            ended, too.
        keywords: What else the model is given in the next forward; the loop sets it.
        is_steady: Whether the last forward took as long as the next one of its kind will: nothing was compiled in it.
    """

    cache: Cache
    supports_rollback: bool
    is_steady: bool = True
    last_position: int | None
    keywords: Mapping[str, Any] = MappingProxyType({})

    def forward(self, block: torch.Tensor, tree: DraftTree, hidden_layers: HiddenLayers) -> TargetOutput:
        """One backbone call on block [B, m + 1], b and the nodes, after every sequence's prefix."""
        ...

    def keep(self, kept: NewTokens, path: torch.Tensor | None = None) -> None:
        """Leaves the first `kept.counts[b]` tokens of the last block in the cache.

        Args:
            kept: Tokens per sequence.
            path: [B, k + 1] int64, the places of a tree that come first (`VerificationResult.path`); None: a chain.
        """
        ...

    def align(self, columns: int) -> None:
        """Ends the call: lays the cache out as the first `columns` columns of the sequences that are returned."""
        ...

    def leave_out(self, done: list[bool]) -> None:
        """Leaves sequences that have ended out of the forwards to come, where that pays; what they give is zeros then.

        Nobody may look into the cache after that.
        """


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
            ValueError: A draft that is no chain, on a cache that takes none.
        """
        if not tree.is_chain and not getattr(self.cache, "takes_trees", False):
            raise ValueError(f"{type(self.cache).__name__} takes chains, and no trees of drafts: leave draft_tree out")
        self.fed = block.shape[1]
        outputs = self.model(
            block,
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
            output_hidden_states=hidden_layers,
            **self.keywords,
            **({} if tree.is_chain else {"draft_tree": tree}),
        )
        return TargetOutput(outputs.logits, outputs.hidden_states)

    def keep(self, kept: NewTokens, path: torch.Tensor | None = None) -> None:
        """See `Target`."""
        self.new_tokens = kept
        self.cache.keep_last(self.fed, kept, *(() if path is None else (path,)))

    def align(self, columns: int) -> None:
        """Nothing to do: every sequence starts where it ends."""


class Continuation:
    """The inputs of a call's tokens after its prompt.

    Args:
        given: Prepared keyword arguments of the prefill.
        counts: [B] int64, the real tokens of every sequence's prompt.

    Attributes:
        start: What positions have beyond the number of real tokens before them, [B, 1] or [axes, B, 1]; None: nothing.
    """

    def __init__(self, given: dict[str, Any], counts: torch.Tensor) -> None:
        self.start: torch.Tensor | None = None
        if (positions := given.get("position_ids")) is not None:
            start = positions[..., -1:].to(counts.device) + 1 - counts[:, None]
            # looked at once, so that the usual call pays nothing in its cycles
            self.start = start if positions.dim() > 2 or bool(start.any()) else None
        self.types = {
            name: types[:, -1:] if goes_on else torch.zeros_like(types[:, -1:])
            for name, goes_on in _TYPES.items()
            if (types := given.get(name)) is not None
        }

    def inputs(self, places: torch.Tensor, last_position: int | None = None) -> dict[str, torch.Tensor]:
        """Keyword arguments of a forward.

        Args:
            places: [B, F] int64, the number of real tokens before each one that is fed.
            last_position: Where positions end; those after are given this one.
        """
        positions = places if self.start is None else places + self.start
        if last_position is not None:
            positions = positions.clamp(max=last_position)
        fed = places.shape[1]
        return {"position_ids": positions} | {name: types.expand(-1, fed) for name, types in self.types.items()}

    def select(self, rows: torch.Tensor) -> None:
        """Go on with these sequences alone."""
        self.start = None if self.start is None else self.start.index_select(-2, rows)
        self.types = {name: types[rows] for name, types in self.types.items()}


class ColumnTarget(Target):
    """A model on transformers' caches, of which its sequences share the columns.

    Args:
        model: The backbone.
        cache: Its cache, with the prompt in it.
        like: A tensor [B] on the device of the tokens.
        mask: [B, columns of the cache], 0 for padding; None where there is none.
        given: Prepared keyword arguments of the prefill, of which some go on after it.

    Attributes:
        mask: [B, L] bool, the real tokens among the columns of the prompt.
        is_padded: Whether any of them is none.
        new_tokens: What the last `keep` left.
        last_position: Where the positions of sequences that have ended stop; None: nowhere.
    """

    supports_rollback, has_columns, takes_trees = True, True, False
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
        self.mask = self.mask if mask is None else mask[:, :width].to(like.device).bool()
        self.is_padded = mask is not None and not bool(self.mask.all())
        self.continuation = Continuation(given or {}, self.mask.sum(1))
        self.replay = Replay(model.get_decoder(), cache) if is_recurrent(cache) else None

    def forward(self, block: torch.Tensor, tree: DraftTree, hidden_layers: HiddenLayers) -> TargetOutput:
        """See `Target`; positions go on by real tokens.

        Raises:
            ValueError: A draft that is no chain, where all tokens are seen in a row, by recurrent layers say.
        """
        is_chain = tree.is_chain and tree.auxiliary is None
        if not is_chain and (self.replay is not None or not self.takes_trees):
            reason = "a cache that takes" if self.replay is None else "recurrent layers, which take"
            raise ValueError(
                f"{type(self.model).__name__} has {reason} chains and no trees of drafts: leave draft_tree out"
            )
        options: dict[str, Any] = {"output_hidden_states": hidden_layers, "return_dict": True, **self.keywords}
        with nullcontext() if self.replay is None else self.replay.record():
            return self._forward(block, tree, options)

    def _forward(self, block: torch.Tensor, tree: DraftTree, options: dict[str, Any]) -> TargetOutput:
        outputs = self.extend(block, **options)
        return TargetOutput(outputs.logits, outputs.hidden_states)

    def extend(self, block: torch.Tensor, **options: Any) -> Any:
        """Feeds tokens [B, F] in a row behind those of the last calls, which stay until `keep`."""
        raise NotImplementedError

    def next_positions(self) -> list[int]:
        """The position of the token after every sequence's prefix; the host waits for it."""
        positions = self.continuation.inputs(self.counts[:, None])["position_ids"]
        return positions.reshape(-1, len(self.counts)).amax(0).tolist()


class RowTarget(ColumnTarget):
    """A model on a cache that never moves.

    Args:
        *args: See `ColumnTarget`.
        limit: The longest text, prompt included.
        span: The longest block, as far as it is known.

    Attributes:
        rows: Where the sequences end that are in the cache.
        open: [b] int64, which of the batch they are; None: all of them.
    """

    takes_trees = True
    rows_type = Rows
    layer_type: type[RowLayer] | None = None
    open: torch.Tensor | None = None

    def __init__(self, *args: Any, limit: int, span: int) -> None:
        super().__init__(*args)
        self.call: Callable[..., Any] = self.model
        self.limit = limit
        self.rows = self.rows_type(self.mask, self.is_padded, limit, span)
        self.rows.take_over(self.cache, self.layer_type or layer_class(self.model.config))

    @property
    def counts(self) -> torch.Tensor:
        """Real tokens per sequence, [B] int64."""
        return self.rows.counts if self.open is None else self.ended.index_copy(0, self.open, self.rows.counts)

    def leave_out(self, done: list[bool]) -> None:
        """See `Target`: the cache is copied, so that half of its sequences must have ended since the last time.

        Beyond that, few columns for every token that may follow: what cycles move must not grow with the context.
        """
        held = list(range(len(done))) if self.open is None else self.held
        chosen = [index for index, row in enumerate(held) if not done[row]]
        if not chosen or 2 * len(chosen) > len(held) or not self.rows.holds(self.cache):
            return
        room = self.limit - min(self.rows.lengths[row] for row in chosen)
        if max(self.rows.lengths) > _COPIED * room:
            return
        self.ended, self.held = self.counts, [held[index] for index in chosen]
        self.open = torch.tensor(self.held, device=self.ended.device)
        self.rows.select(self.cache, chosen)
        self.continuation.select(torch.tensor(chosen, device=self.ended.device))

    def _forward(self, block: torch.Tensor, tree: DraftTree, options: dict[str, Any]) -> TargetOutput:
        batch = len(block)
        if self.open is not None:
            block = block[self.open]
            tree = DraftTree(tree.tokens[self.open], tree.parents[self.open], depth=tree.depth, is_chain=tree.is_chain)
        self.rows.ahead, auxiliary = 0, tree.auxiliary
        if auxiliary is None:
            outputs = self._call(block, tree.positions(), tree, self.last_position, options)
            if self.open is None:
                return TargetOutput(outputs.logits, outputs.hidden_states)
            spread = partial(_spread, rows=self.open, batch=batch)
            return TargetOutput(spread(outputs.logits), each_state(outputs.hidden_states, spread))
        last = self.last_position if auxiliary.last_position is None else auxiliary.last_position
        outputs = self._call(block, auxiliary.positions, tree, last, options | auxiliary.inputs)
        layers, fed = outputs.hidden_states, block.shape[1]
        states = each_state(layers, lambda state: state[:, :fed])
        behind = each_state(layers, lambda state: state[:, fed:])
        return TargetOutput(outputs.logits[:, :fed], states, outputs.logits[:, fed:], behind)

    def extend(self, block: torch.Tensor, **options: Any) -> Any:
        """See `ColumnTarget`."""
        places = cached_range(self.rows.ahead, block.shape[1], block.device)
        outputs = self._call(block, places, None, self.last_position, options)
        self.rows.ahead += block.shape[1]
        return outputs

    def _call(
        self,
        block: torch.Tensor,
        places: torch.Tensor,
        tree: DraftTree | None,
        last: int | None,
        options: dict[str, Any],
    ) -> Any:
        config, fed = self.model.config.get_text_config(), places.shape[-1]
        mask = None if masks_padding_alone(config) else block_mask(self.rows, fed, config, self.model.dtype, tree)
        inputs = self.continuation.inputs(self.rows.counts[:, None] + places, last)
        note_positions(self.cache, inputs["position_ids"])
        inputs |= {"attention_mask": mask, "past_key_values": self.cache, "use_cache": True}
        return self.call(block, **(inputs | options))

    def keep(self, kept: NewTokens, path: torch.Tensor | None = None) -> None:
        """See `Target`; nothing of a chain moves, and of a tree its path."""
        self.new_tokens = kept
        if self.replay is not None:
            self.replay.keep(kept.counts)
        if self.open is not None:
            kept, path = kept.of(self.held, self.open), None if path is None else path[self.open]
        if path is not None and kept.longest > 1:
            self.rows.keep_path(self.cache, path[:, : kept.longest])
        self.rows.keep(kept)

    def align(self, columns: int) -> None:
        """See `Target`: columns after a sequence's end hold arbitrary values, as padding does."""
        self.rows.give_back(self.cache, columns)


def _spread(held: torch.Tensor, rows: torch.Tensor, batch: int) -> torch.Tensor:
    """Return values [b, ...] of some sequences as those of all [B, ...], 0 for the others."""
    return held.new_zeros(batch, *held.shape[1:]).index_copy(0, rows.to(held.device), held)


def is_recurrent(cache: Cache) -> bool:
    """Whether any layer keeps a recurrent state."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
