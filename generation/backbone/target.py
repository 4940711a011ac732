"""The backbone as the decoding loop sees it: a forward after every sequence's own prefix, and a rollback per sequence.

Three kinds of caches: transformers' own, in which every sequence has its own end (`cache`) or which are repacked after
every verification (`backbones`), and those that store every sequence's length themselves. `target_of` chooses.

The state of a recurrent layer is s_t = F(s_{t-1}, x_t), with x_t its mixer's input at token t, and cannot be cropped.
So the states before a block are cloned, every mixer's inputs of the block are remembered and, where a row keeps only
the first c tokens, its states are restored and F is applied to x_1 .. x_c again: the mixers run alone (`Replay`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ...configuration.cache_names import CACHE, name_of_cache
from ...configuration.fields import learned_positions, rotary_border
from ..call.sequences import NewTokens
from ..contract import CacheView, DraftTree, HiddenLayers, SpeculativeCache, TargetOutput, each_state
from ..tensors.masks import cached_range
from .cache import CacheLayout, RaggedLayer, block_mask
from .special import AlignedLayer, BlockLayer, CompressedLayer, ConvolvedLayer, PositionedLayer, layer_class
from .wrapped_models import Kwargs

_STATES = ("conv_states", "recurrent_states")
_INPUTS = ("hidden_states", "input_ids")
_OF_THREAD = threading.local()  # no ContextVar: torch.compile cannot read one


class Replay:
    """The recurrent layers of a cache, and the mixers of a backbone without its head that read and write them."""

    def __init__(self, decoder: nn.Module, cache: Cache) -> None:
        self.cache = cache
        self.mixers = find_mixers(decoder, cache)
        self.before: dict[int, dict[str, dict[int, Tensor]]] = {}
        self.inputs: dict[nn.Module, dict[str, Tensor]] = {}

    @contextmanager
    def record(self) -> Iterator[None]:
        """Remembers what `keep` needs of the one backbone call that is made inside, and in this thread."""
        self.before = {index: _copies(self.cache.layers[index]) for index in self.mixers}
        _OF_THREAD.recording = self
        with ExitStack() as hooks:
            hooks.callback(setattr, _OF_THREAD, "recording", None)
            for mixer in chain.from_iterable(self.mixers.values()):
                hooks.enter_context(mixer.register_forward_pre_hook(self._remember, with_kwargs=True))
            yield

    def _remember(self, mixer: nn.Module, args: tuple[Any, ...], kwargs: Kwargs | None = None) -> None:
        # a hook that its thread removes while another one is about to call it gets no keyword arguments any more
        if kwargs is None or getattr(_OF_THREAD, "recording", None) is not self:
            return
        given = dict(zip(inspect.signature(mixer.forward).parameters, args)) | kwargs
        self.inputs[mixer] = {name: given[name] for name in _INPUTS if isinstance(given.get(name), Tensor)}

    @torch.no_grad()
    def keep(self, counts: list[int]) -> None:
        """Leaves every sequence's states after the first `counts[b]` tokens of the recorded block."""
        fed = next((inputs["hidden_states"].shape[1] for inputs in self.inputs.values()), 0)
        for count in sorted(set(counts) - {fed}):
            rows = [row for row, kept in enumerate(counts) if kept == count]
            for index, mixers in self.mixers.items():
                self._replay(index, mixers, rows, count)
        self.before, self.inputs = {}, {}

    def _replay(self, index: int, mixers: list[nn.Module], rows: list[int], count: int) -> None:
        layer = cast(LinearAttentionCacheLayerMixin, self.cache.layers[index])
        batch = len(self.inputs[mixers[0]]["hidden_states"])
        # hooks may know the place of each sequence in the batch: peft's adapters of single sequences
        is_hooked = any(module._forward_pre_hooks for mixer in mixers for module in mixer.modules())
        fed = list(range(batch)) if is_hooked else rows
        view = copy.copy(layer)
        for name, states in self.before[index].items():
            setattr(view, name, getattr(layer, name) | {i: state[fed] for i, state in states.items()})
        view.has_previous_state = dict(layer.has_previous_state)
        for mixer in mixers if count else ():
            inputs = {
                name: given[torch.tensor(fed, device=given.device), :count]  # [b, count, ...]
                for name, given in self.inputs[mixer].items()
            }
            mixer(**inputs, **{str(name_of_cache(mixer.forward)): _Only(index, view)})
        for name, states in self.before[index].items():
            for i in states:
                getattr(layer, name)[i][rows] = getattr(view, name)[i][[fed.index(row) for row in rows]]


class _Only(Cache):
    """A cache with one layer, which keeps its number."""

    def __init__(self, index: int, layer: LinearAttentionCacheLayerMixin) -> None:
        super().__init__(layers=[layer for _ in range(index + 1)])


def find_mixers(decoder: nn.Module, cache: Cache) -> dict[int, list[nn.Module]]:
    """The modules of a decoder that read and write the recurrent states of a cache, by layer.

    The innermost module whose own code updates states is the mixer. A further one also reads the token ids.
    """
    found: dict[int, nn.Module] = {}
    further: dict[int, list[nn.Module]] = {}
    for module in decoder.modules():
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or not 0 <= index < len(cache.layers) or name_of_cache(module.forward) is None:
            continue
        if not isinstance(cache.layers[index], LinearAttentionCacheLayerMixin):
            continue
        if set(_INPUTS) <= set(inspect.signature(module.forward).parameters):
            further.setdefault(index, []).append(module)
        elif index not in found or _rank(type(module)) >= _rank(type(found[index])):
            found[index] = module
    return {index: [mixer, *further.get(index, ())] for index, mixer in found.items()}


@functools.cache
def _rank(kind: type[nn.Module]) -> int:
    """Return which states the code of a class updates: 2 recurrent ones, 1 of a convolution, 0 none."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return 0
    return 2 if "update_recurrent_state" in source else int("update_conv_state" in source)


def _copies(layer: object) -> dict[str, dict[int, Tensor]]:
    """Clones of a layer's states; they are updated in place."""
    return {
        name: {i: state.clone() for i, state in getattr(layer, name).items() if state is not None} for name in _STATES
    }


_TYPES = {"token_type_ids": True, "mm_token_type_ids": False}
"""Types of tokens, and whether the last one continues; new tokens have type 0 elsewhere."""
_COPIED = 64  # columns that may be copied for every token that may follow, where ended sequences are left out


class Traits(NamedTuple):
    """What a call asks of a backbone, and its configuration tells (`configuration.fields`)."""

    table: int | None  # positions of a table; None: they are computed
    rotary_border: tuple[str, int] | None
    layer_type: type[RaggedLayer] | None  # that its attention reads; None: any
    chooses_blocks: bool
    compresses_windows: bool
    convolves: bool
    has_alibi: bool  # only distances count
    by_columns: str | None  # what takes distances from columns, so that the siblings of a tree differ; None: nothing
    weights: int  # that a token is multiplied with; 0: they are quantised or offloaded, and cost something else


def weights_of(modules: Iterable[nn.Module]) -> int:
    """Return how many weights a token is multiplied with: all but those of tables, which are looked up."""
    inner = (part for module in modules for part in module.modules() if not isinstance(part, nn.Embedding))
    return sum(weight.numel() for weight in {own for part in inner for own in part.parameters(recurse=False)})


_TRAITS: WeakKeyDictionary[PreTrainedModel, Traits] = WeakKeyDictionary()


def traits_of(model: PreTrainedModel) -> Traits:
    """Return the traits of a model, which are found once."""
    if (known := _TRAITS.get(model)) is None:
        is_usual = getattr(model, "hf_quantizer", None) is None and not hasattr(model, "_hf_hook")
        known = _TRAITS[model] = _traits(model.config, weights_of([model]) if is_usual else 0)
    return known


def _traits(config: PreTrainedConfig, weights: int) -> Traits:
    text, kind = config.get_text_config(), layer_class(config)
    blocks, windows, convolves = (kind is each for each in (BlockLayer, CompressedLayer, ConvolvedLayer))
    has_alibi = text.model_type in ("bloom", "mpt") or bool(getattr(text, "alibi", False))
    reasons = {
        "attention with short convolutions": convolves,
        "an attention to compressed windows": windows,
        "an index of blocks": blocks,
        "ALiBi": has_alibi,
        "local attention": "local" in (getattr(text, "attention_layers", None) or ()),  # GPT-Neo's
    }
    by_columns = next((reason for reason, holds in reasons.items() if holds), None)
    table, border = learned_positions(text), rotary_border(text)
    return Traits(table, border, kind, blocks, windows, convolves, has_alibi, by_columns, weights)


def note_positions(cache: Cache, position_ids: Tensor) -> None:
    """Write positions of the next block to the layer that holds them, where there is one."""
    for layer in cache.layers:
        if isinstance(layer, PositionedLayer):
            layer.note(position_ids)
            break


class Target(CacheView, Protocol):
    """A model with a filled cache, as the loop uses it."""

    cache: Cache
    supports_rollback: bool  # sequences may accept different numbers of tokens; else all take b, also ended ones
    takes_cuts: bool = False  # `align` may drop any number of tokens of any sequence
    is_steady: bool = True  # the last forward took as long as the next one of its kind will: it compiled nothing
    last_position: int | None  # the largest one, for sequences that have ended; None: there is none
    keywords: Mapping[str, Any] = MappingProxyType({})  # further ones of the next forward; the loop sets it

    def forward(self, block: Tensor, tree: DraftTree, hidden_layers: HiddenLayers) -> TargetOutput:
        """Call the backbone on a block [B, m + 1], the bonus token and the nodes, after every sequence's prefix."""
        ...

    def keep(self, kept: NewTokens, path: Tensor | None = None) -> None:
        """Leave the first `kept.counts[b]` tokens of the last block, or of its `path` [B, k + 1], in the cache."""
        ...

    def forget(self, none: NewTokens) -> None:
        """Leave nothing of the last block in the cache, nor NaN in columns after the ends; `none` are no new tokens."""
        self.keep(none)

    def align(self, columns: int) -> None:
        """End the call: lay the cache out as the first `columns` columns of the returned sequences."""

    def abandon(self) -> None:
        """End a call that failed: a user's cache keeps no layers that only our loop can use."""

    def next_positions(self) -> list[int]:
        """Return the position of the token after every sequence's prefix; read where `has_columns`."""
        return []

    def drop_finished(self, done: list[bool]) -> None:
        """Leave ended sequences out of the next forwards, where it pays: outputs are zeros then, the cache is lost."""


class OwnCacheBackbone(Target):
    """A model whose cache stores a length per sequence, so that no mask is needed."""

    supports_rollback, has_columns = True, False
    cache: SpeculativeCache
    last_position = None

    def __init__(self, model: PreTrainedModel, cache: SpeculativeCache, mask: Tensor | None = None) -> None:
        self.model, self.cache = model, cache
        self.takes_trees = bool(getattr(cache, "takes_trees", False))
        self.cache.activate_past_recording()  # a draft may be longer than what a forward leaves for rollback by itself
        self.mask = cast(Tensor, mask)  # None without padding; only sessions of such caches read it

    def forward(self, block: Tensor, tree: DraftTree, hidden_layers: HiddenLayers) -> TargetOutput:
        if not (tree.is_chain or self.takes_trees):
            raise ValueError(f"{type(self.cache).__name__} takes chains, and no trees of drafts: leave draft_tree out")
        self.count = block.shape[1]
        options = self.keywords if tree.is_chain else {**self.keywords, "draft_tree": tree}
        options = {"return_dict": True, "output_hidden_states": hidden_layers, **options}
        outputs = self.model(block, **{CACHE: self.cache}, use_cache=True, **options)
        return TargetOutput(outputs.logits, outputs.hidden_states)

    def keep(self, new: NewTokens, path: Tensor | None = None) -> None:
        self.new_tokens = new
        self.cache.keep_last(self.count, new, *(() if path is None else (path,)))

    def forget(self, none: NewTokens) -> None:
        self.keep(none)
        if (clear := getattr(self.cache, "clear_rejected", None)) is not None:
            clear()


class Continuation:
    """The inputs of a call's tokens after its prompt, which has `counts` [B] real tokens."""

    def __init__(self, model_kwargs: Kwargs, counts: Tensor) -> None:
        self.start: Tensor | None = None  # positions less the number of real tokens before them; None: 0
        if (positions := model_kwargs.get("position_ids")) is not None:
            start = positions[..., -1:].to(counts.device) + 1 - counts[:, None]  # [B, 1] or [axes, B, 1]
            # tested once, so that the usual call pays nothing in its cycles
            self.start = start if positions.dim() > 2 or bool(start.any()) else None
        self.types = {
            name: types[:, -1:] if continues else torch.zeros_like(types[:, -1:])
            for name, continues in _TYPES.items()
            if (types := model_kwargs.get(name)) is not None
        }

    def inputs(self, numbers: Tensor, last_position: int | None = None) -> dict[str, Tensor]:
        """Return the keyword arguments of a forward, by the `numbers` [B, F] of real tokens before the block's."""
        positions = numbers if self.start is None else numbers + self.start  # [B, F] or [axes, B, F]
        if last_position is not None:
            positions = positions.clamp(max=last_position)
        types = {name: types.expand(-1, numbers.shape[1]) for name, types in self.types.items()}  # [B, F]
        return {"position_ids": positions} | types

    def hold(self, hold: Callable[[str, Tensor], Tensor]) -> None:
        """Keep all that forwards read at constant addresses (`CacheView.held`)."""
        self.start = None if self.start is None else hold("inputs.start", self.start)
        self.types = {name: hold(f"inputs.{name}", types) for name, types in self.types.items()}

    def select(self, chosen: Tensor) -> None:
        """Continue with these sequences alone."""
        self.start = None if self.start is None else self.start.index_select(-2, chosen)
        self.types = {name: types[chosen] for name, types in self.types.items()}


class DynamicCacheBackbone(Target):
    """A model on transformers' caches, whose columns its sequences share.

    `cache` holds the prompt, with the padding of `mask` [B, columns]; `like` [B] is on the device of the tokens.
    """

    supports_rollback, has_columns, takes_trees = True, True, False
    last_position = None

    def __init__(
        self,
        model: PreTrainedModel,
        cache: Cache,
        like: Tensor,
        mask: Tensor | None = None,
        model_kwargs: Kwargs | None = None,
    ) -> None:
        self.model, self.cache = model, cache
        width = cache.get_seq_length()
        self.mask = torch.ones(len(like), width, dtype=torch.bool, device=like.device)  # [B, L]
        self.mask = self.mask if mask is None else mask[:, :width].to(like.device).bool()
        self.is_padded = mask is not None and not bool(self.mask.all())
        self.continuation = Continuation(model_kwargs or {}, self.mask.sum(1))
        self.replay = Replay(model.get_decoder(), cache) if is_recurrent(cache) else None
        self.takes_trees = self.takes_trees and self.replay is None

    def forward(self, block: Tensor, tree: DraftTree, hidden_layers: HiddenLayers) -> TargetOutput:
        if not (self.takes_trees or (tree.is_chain and tree.auxiliary is None)):
            raise ValueError(f"{type(self.model).__name__} takes chains, and no trees of drafts: leave draft_tree out")
        options: Kwargs = {"output_hidden_states": hidden_layers, "return_dict": True, **self.keywords}
        with nullcontext() if self.replay is None else self.replay.record():
            return self._forward(block, tree, options)

    def _forward(self, block: Tensor, tree: DraftTree, options: Kwargs) -> TargetOutput:
        outputs = self.extend(block, **options)
        return TargetOutput(outputs.logits, outputs.hidden_states)

    def extend(self, block: Tensor, **options: Any) -> Any:
        """Read tokens [B, F] after those of the last calls, which stay until `keep`."""
        raise NotImplementedError

    def next_positions(self) -> list[int]:
        positions = self.continuation.inputs(self.counts[:, None])["position_ids"]
        return positions.reshape(-1, len(self.counts)).amax(0).tolist()  # the largest of the axes


class RaggedBackbone(DynamicCacheBackbone):
    """A model on a cache that never moves; see `DynamicCacheBackbone`, and for `limit` and `span` `CacheLayout`."""

    takes_trees = True
    layout_type = CacheLayout
    open: Tensor | None = None  # [b] int64, which sequences of the batch are read; None: all of them

    def __init__(self, *args: Any, limit: int, span: int) -> None:
        super().__init__(*args)
        self.call: Callable[..., Any] = self.model
        kind = traits_of(self.model).layer_type
        self.limit, self.masks_alone = limit, kind is AlignedLayer  # the model makes its masks of blocks itself
        self.layout = self.layout_type(self.mask, self.is_padded, limit, span)
        self.layout.install_layers(self.cache, kind)
        self.takes_cuts = kind is None and not (self.replay or self.layout.window)

    @property
    def counts(self) -> Tensor:
        """Real tokens per sequence, [B] int64."""
        return self.layout.counts if self.open is None else self.ended.index_copy(0, self.open, self.layout.counts)

    def drop_finished(self, done: list[bool]) -> None:
        """Copy the cache where half of its sequences have ended since the last time, and many tokens may follow."""
        held = list(range(len(done))) if self.open is None else self.rows
        chosen = [index for index, sequence in enumerate(held) if not done[sequence]]
        is_ragged = all(isinstance(layer, RaggedLayer) for layer in self.cache.layers)
        if not chosen or 2 * len(chosen) > len(held) or not is_ragged:
            return
        if max(self.layout.lengths) > _COPIED * (self.limit - min(self.layout.lengths[index] for index in chosen)):
            return
        self.ended, self.rows = self.counts, [held[index] for index in chosen]
        self.open = torch.tensor(self.rows, device=self.ended.device)
        self.layout.select(self.cache, chosen)
        self.continuation.select(torch.tensor(chosen, device=self.ended.device))

    def _forward(self, block: Tensor, tree: DraftTree, options: Kwargs) -> TargetOutput:
        batch, of_open = len(block), self.open
        if of_open is not None:
            block = block[of_open]  # [b, F]
            tree = DraftTree(tree.tokens[of_open], tree.parents[of_open], depth=tree.depth, is_chain=tree.is_chain)
        self.layout.block_offset, auxiliary = 0, tree.auxiliary
        if auxiliary is None:
            depths = cached_range(0, block.shape[1], block.device) if tree.is_chain else tree.positions()
            outputs = self._call(block, depths, tree, self.last_position, options)
            if of_open is None:
                return TargetOutput(outputs.logits, outputs.hidden_states)

            def spread(values: Tensor) -> Tensor:  # 0 for sequences that have ended
                every = values.new_zeros(batch, *values.shape[1:])
                return every.index_copy_(0, of_open.to(values.device), values)

            return TargetOutput(spread(outputs.logits), each_state(outputs.hidden_states, spread))
        last = self.last_position if auxiliary.last_position is None else auxiliary.last_position
        outputs = self._call(block, auxiliary.positions, tree, last, options | auxiliary.inputs)  # [B, F + A, V]
        layers, count = outputs.hidden_states, block.shape[1]
        states = each_state(layers, lambda state: state[:, :count])
        of_slots = each_state(layers, lambda state: state[:, count:])
        return TargetOutput(outputs.logits[:, :count], states, outputs.logits[:, count:], of_slots)

    def extend(self, block: Tensor, **options: Any) -> Any:
        depths = cached_range(self.layout.block_offset, block.shape[1], block.device)
        outputs = self._call(block, depths, None, self.last_position, options)
        self.layout.block_offset += block.shape[1]
        return outputs

    def _call(self, block: Tensor, depths: Tensor, tree: DraftTree | None, last: int | None, options: Kwargs) -> Any:
        count, mask = depths.shape[-1], None
        if not self.masks_alone:
            config = self.model.config.get_text_config()
            mask = block_mask(self.layout, count, config, self.model.dtype, tree)
        inputs = self.continuation.inputs(self.layout.counts[:, None] + depths, last)
        note_positions(self.cache, inputs["position_ids"])
        inputs |= {"attention_mask": mask, CACHE: self.cache, "use_cache": True}
        return self.call(block, **(inputs | options))

    def keep(self, new: NewTokens, path: Tensor | None = None) -> None:
        self.new_tokens = new
        if self.replay is not None:
            self.replay.keep(new.counts)
        if self.open is not None:
            new, path = new.of(self.rows, self.open), None if path is None else path[self.open]
        if path is not None and new.longest > 1:
            self.layout.keep_path(self.cache, path[:, : new.longest])
        self.layout.keep(new)

    def forget(self, none: NewTokens) -> None:
        self.keep(none)
        for layer in self.cache.layers:
            if isinstance(layer, RaggedLayer):
                layer.clear_after_ends()

    def abandon(self) -> None:
        self.align(max(self.layout.lengths))

    def align(self, columns: int) -> None:
        for index, layer in enumerate(self.cache.layers):
            if isinstance(layer, RaggedLayer):
                self.cache.layers[index] = layer.restore(columns)


def is_recurrent(cache: Cache) -> bool:
    """Return whether any layer has a recurrent state."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
