"""A cache of a fixed size from the first block to the last, so that one compiled graph serves all of them.

    size      C columns, fixed for the call; attention gets all of them, and the mask hides what is not visible
    blocks    F tokens, fixed where forwards are compiled: a shorter draft is filled up with tokens that nobody sees
    inside    a tensor holds the slots of keys and values; no number of the host that changes is part of a graph

There are two graphs: of blocks, and of single tokens where an adaptive length chooses them. A later call of the same
batch and size has the same shapes and, where forwards are compiled, the same tensors: nothing is compiled or recorded
again. Masks and positions are made outside the graphs.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel

from ...configuration.cache_names import CACHE
from ..contract import DraftTree, States, TargetOutput, each_state
from ..tensors.masks import cached_range
from ..tensors.wrapped_models import Kwargs, untyped
from .cache import CacheLayout, RaggedLayer, rounded
from .target import RaggedBackbone

_WARM = 2  # forwards of a width in which graphs are compiled, and recorded
Buffers = dict[tuple[int, str], Tensor]
"""Keys and values by layer and name."""
_KEPT: weakref.WeakKeyDictionary[nn.Module, Buffers] = weakref.WeakKeyDictionary()
"""Of the last compiled call of a model that is over: a CUDA graph holds addresses, and is recorded again for others."""


class PlannedCache(DynamicCache):
    """The cache of a prompt, after which layers of a fixed size take over.

    Attributes:
        room: Columns of the static cache of transformers that this one replaces; None: the call is over.
        compiled: Makes the forward after the prompt; None: it is not compiled.
        has_singles: Whether many forwards have a single token.
    """

    room: int | None = None
    compiled: Callable[[PreTrainedModel], Callable[..., Any]] | None = None
    has_singles = False


def planned_cache(
    model: PreTrainedModel, model_kwargs: Kwargs, config: GenerationConfig, has_singles: bool
) -> PlannedCache:
    """Return the cache that replaces the static one that transformers prepared for a call; see `PlannedCache`."""
    cache = PlannedCache(config=model.config.get_text_config(decoder=True))
    cache.room = max(layer.get_max_length() for layer in model_kwargs[CACHE].layers)
    cache.has_singles = has_singles
    if untyped(model)._valid_auto_compile_criteria(model_kwargs, config):
        cache.compiled = lambda runner: runner.get_compiled_call(config.compile_config)
    return cache


class FixedLayout(CacheLayout):
    """The ends of the sequences of a batch, in a cache of a fixed size; arguments as for `CacheLayout`.

    Attributes:
        block_slots: The slots [B, 1, F] of the next block, of layers without and with a window.
    """

    def __init__(self, mask: Tensor, is_padded: bool, limit: int, span: int) -> None:
        super().__init__(mask, is_padded, limit, span)
        self.limit, self.capacity = limit, rounded(limit + span)
        self.block_slots: tuple[Tensor, ...] = ()

    def needs_mask(self, count: int) -> bool:
        """Return True: attention gets empty columns, too."""
        return True

    def install_layers(self, cache: Cache, kind: type[RaggedLayer] | None = None) -> None:
        """See `CacheLayout`; the size of the new layers is fixed."""
        super().install_layers(cache, kind or FixedLayer)

    def width(self, count: int, size: int) -> int:
        """Return all columns."""
        return size

    def begin(self, count: int) -> None:
        """Note the slots of the next block."""
        self.capacity = max(self.capacity, rounded(self.limit + count))  # where the longest block was not known
        self.reserve(count)
        columns = (self.ends[:, None] + cached_range(self.block_offset, count, self.ends.device))[:, None]  # [B, 1, F]
        self.block_slots = tuple(columns % self.size(is_ring) for is_ring in (False, True))


class FixedLayer(RaggedLayer):
    """Keys and values [B, H, C, D] of a layer, whose number of columns never changes."""

    is_compileable = True
    layout: FixedLayout

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write a block [B, H, F, D], and return all columns."""
        keys, values = cast(Tensor, self.keys), cast(Tensor, self.values)
        batch, heads = key_states.shape[:2]
        row, head = (torch.arange(count, device=key_states.device) for count in (batch, heads))  # [B], [H]
        index = row[:, None, None], head[:, None], self.layout.block_slots[int(self.is_sliding)].to(key_states.device)
        keys[index], values[index] = key_states.to(keys.dtype), value_states.to(values.dtype)
        return keys, values

    def lay_out(self, index: int, buffers: Buffers | None) -> None:
        """Allocate the final size, in the `buffers` of an earlier call where they fit: graphs need not copy them."""
        size = self.layout.size(self.is_sliding)
        for name, dim in self.states:
            if (held := getattr(self, name)) is not None:
                held = self._grown(held, dim, size) if held.shape[dim] < size else held
                if buffers is not None:
                    kept = buffers.get((index, name))
                    buffers[index, name] = held = held if kept is None or not _fits(kept, held) else kept.copy_(held)
                    torch._dynamo.mark_static_address(held, guard=False)
                setattr(self, name, held)

    def get_seq_length(self) -> Any:
        """Return the columns before the next block of the longest sequence, on the device."""
        return self.layout.ends.max() + self.layout.block_offset


class StaticBackbone(RaggedBackbone):
    """A model on a cache of a fixed size; `span` is the longest block, as far as it is known."""

    layout_type = FixedLayout
    layout: FixedLayout
    cache: PlannedCache

    def __init__(self, *args: Any, span: int) -> None:
        cache: PlannedCache = args[1]
        super().__init__(*args, limit=cache.room or 0, span=span)
        self.compiled = None if cache.compiled is None else cache.compiled(self.model)
        self.buffers: Buffers | None = None
        if self.compiled is not None:  # a call of another thread finds none, and allocates its own
            self.buffers = _KEPT.pop(self.model, {})
            weakref.finalize(self, _keep, weakref.ref(self.model), self.buffers).atexit = False
        self.has_singles, self.has_slots = cache.has_singles, False
        self.span, self.widest, self.laid_out, self.forwards = span, 1, (0, 0), Counter[int]()
        cache.room = cache.compiled = None  # who is given it decodes as with any other

    def drop_finished(self, done: list[bool]) -> None:
        """Do nothing: shapes never change."""

    def _forward(self, block: Tensor, tree: DraftTree, options: Kwargs) -> TargetOutput:
        count = self.count = block.shape[1]
        slots = 0 if tree.auxiliary is None else len(tree.auxiliary.positions) - count
        self.has_slots |= slots > 0
        # where slots ride along, a text's last block is the only one without
        is_compiled = self.compiled is not None and (slots > 0 or self.has_singles or not self.has_slots)
        self.call = self.compiled if self.compiled is not None and is_compiled else self.model
        if not is_compiled:
            return super()._forward(block, tree, options)
        block, tree = self._filled(block, tree)
        self.forwards[block.shape[1]] += 1
        self.is_steady = self.forwards[block.shape[1]] > _WARM
        outputs = super()._forward(block, tree, options)
        return TargetOutput(
            *_copied(outputs.logits, outputs.hidden_states, count),
            *_copied(outputs.auxiliary, outputs.auxiliary_states, slots),
        )

    def _filled(self, block: Tensor, tree: DraftTree) -> tuple[Tensor, DraftTree]:
        """Return a block and its tree, filled up to the width of their graph."""
        width = self._width(block.shape[1], tree)
        missing = (0, width - block.shape[1])
        auxiliary = None if tree.auxiliary is None else tree.auxiliary.filled(block.shape[1], width)
        nodes = torch.nn.functional.pad(tree.tokens, missing)
        if tree.is_chain:
            tree = DraftTree.chain(nodes, auxiliary=auxiliary)
        else:
            parents = torch.nn.functional.pad(tree.parents, missing, value=-1)
            tree = DraftTree(nodes, parents, depth=tree.depth, auxiliary=auxiliary)
        return torch.nn.functional.pad(block, missing), tree

    def _call(self, block: Tensor, depths: Tensor, tree: DraftTree | None, last: int | None, options: Kwargs) -> Any:
        if tree is not None and tree.auxiliary is None:  # what is filled in may be beyond a table of positions
            depths = torch.nn.functional.pad(depths[..., : self.count], (0, block.shape[1] - self.count))
        self.layout.begin(depths.shape[-1])
        if self.laid_out != (room := (self.layout.size(False), self.layout.size(True))):
            self.laid_out = room
            for index, layer in enumerate(self.cache.layers):
                if isinstance(layer, FixedLayer):
                    layer.lay_out(index, self.buffers)
        return super()._call(block, depths, tree, last, options)

    def _width(self, count: int, tree: DraftTree) -> int:
        """Return how many tokens a block of `count` is filled up to: those of a tree are not known before."""
        if count == 1 and self.has_singles and tree.auxiliary is None:
            return 1
        is_known = tree.is_chain and (count > 1 or tree.auxiliary is not None)
        self.widest = max(self.widest, count, self.span if is_known else 0)
        return self.widest


def _fits(kept: Tensor, held: Tensor) -> bool:
    """Return whether a tensor of an earlier call may hold the content of another one."""
    is_alike = kept.shape == held.shape and kept.dtype == held.dtype and kept.device == held.device
    return is_alike and kept.is_inference() == held.is_inference()


def _keep(model: weakref.ref[nn.Module], buffers: Buffers) -> None:
    """Keep the buffers of a call that is over, if its model is still there."""
    if (alive := model()) is not None:
        _KEPT[alive] = buffers


def _copied(logits: Tensor | None, states: States | None, count: int) -> tuple[Tensor | None, States | None]:
    """Return the outputs of the first `count` tokens; the next replay of a graph overwrites them."""

    def copied(values: Tensor) -> Tensor:
        return values[:, :count].clone()

    return None if logits is None else copied(logits), each_state(states, copied)
