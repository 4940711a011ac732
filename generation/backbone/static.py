"""A cache of a fixed size from the first block to the last, so that one compiled graph serves all of them.

    size      C columns, fixed for the call; attention gets all of them, and the mask hides what is not visible
    blocks    F tokens, fixed where forwards are compiled: a shorter draft is filled up with tokens that nobody sees
    inside    a tensor holds the slots of keys and values; no number of the host that changes is part of a graph

A later call of the same batch and size has the same shapes and tensors (`buffers`): nothing is compiled or recorded
again. Where the whole cycle has fixed shapes (`is_fixed`), only the device knows the ends of the sequences until the
host has read the cycle, and nothing in a cycle depends on the prompt's length.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache, CompileConfig, DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..call.sequences import NewTokens
from ..contract import CacheView, DraftTree, SpeculativeCache, States, TargetOutput, each_state
from .cache import CacheLayout, KeysAndValues, RaggedLayer, laid_out, rounded
from .target import OwnCacheBackbone, RaggedBackbone
from .wrapped_models import Kwargs, untyped


class Buffers:
    """The buffers of one call, by name; those of the last call of a model serve its next one of equal sizes."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.made = 0
        self.graphs: dict[Hashable, Any] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def hold(self, name: str, value: Tensor) -> Tensor:
        """Copy a value to the buffer of a name, and return that; the buffer itself is left as it is."""
        kept = self.tensors.get(name)
        if kept is value:
            return value
        if kept is None or not _fits(kept, value):
            with torch.inference_mode(False):  # later calls may be in another mode
                kept = self._replaced(name, torch.empty(value.shape, dtype=value.dtype, device=value.device))
        return kept.copy_(value)

    def adopt(self, name: str, value: Tensor) -> Tensor:
        """Return `hold` of a value, which itself becomes the buffer where none of its size is there yet."""
        kept = self.tensors.get(name)
        fits = kept is not None and _fits(kept, value) and kept.is_inference() == value.is_inference()
        return self.hold(name, value) if fits else self._replaced(name, value)

    def _replaced(self, name: str, value: Tensor) -> Tensor:
        if name in self.tensors:
            self.graphs.clear()
        self.tensors[name], self.made = value, self.made + 1
        return value


def _fits(kept: Tensor, value: Tensor) -> bool:
    """Return whether a buffer may hold the content of a value."""
    return kept.shape == value.shape and kept.dtype == value.dtype and kept.device == value.device


_KEPT: weakref.WeakKeyDictionary[nn.Module, Buffers] = weakref.WeakKeyDictionary()
"""Of the last call of a model that is over."""


def lend(model: nn.Module, borrower: object) -> Buffers:
    """Return the buffers of a model's last call until the borrower goes; a call of another thread finds none."""
    buffers = _KEPT.pop(model, None) or Buffers()
    weakref.finalize(borrower, _keep, weakref.ref(model), buffers).atexit = False
    return buffers


def free_buffers(model: nn.Module) -> int:
    """Free what calls with `cache_implementation="static"` keep for the next ones: caches, states, graphs.

    Returns:
        The bytes of the buffers; 0 where there were none, or a call is using them.
    """
    return _KEPT.pop(model, Buffers()).nbytes


def _keep(model: weakref.ref[nn.Module], buffers: Buffers) -> None:
    """Keep the buffers of a call that is over, if its model is still there."""
    if (alive := model()) is not None:
        _KEPT[alive] = buffers


_WARM = 2  # forwards of a width in which graphs are compiled, and recorded


class PlannedCache(DynamicCache):
    """The cache of a prompt, after which layers of a fixed size take over."""

    room: int | None = None  # columns of the static cache of transformers that it replaces; None: the call is over
    compiled: CompileConfig | None = None  # how the forward after the prompt is compiled; None: it is not
    has_singles = False  # many forwards have a single token
    is_fixed = False  # the whole cycle has fixed shapes


def planned_cache(
    model: PreTrainedModel,
    model_kwargs: Kwargs,
    config: GenerationConfig,
    has_singles: bool,
    is_fixed: bool = False,
    is_recorded: bool = False,
) -> PlannedCache:
    """Return the cache that replaces the static one that transformers prepared for a call, with room for the longest.

    Where whole cycles are recorded, the compiler makes no CUDA graphs of forwards: one graph cannot hold another.
    """
    cache, generator = PlannedCache(config=model.config.get_text_config(decoder=True)), untyped(model)
    cache.room = generator._previous_max_cache_length
    cache.has_singles, cache.is_fixed = has_singles, is_fixed
    if generator._valid_auto_compile_criteria(model_kwargs, config):
        cache.compiled = how = copy.copy(config.compile_config or CompileConfig())
        if is_recorded:
            modes = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
            how.mode = modes.get(how.mode, how.mode)
            how.options = None if how.options is None else how.options | {"triton.cudagraphs": False}
    return cache


class FixedLayout(CacheLayout):
    """The ends of the sequences of a batch, in a cache of a fixed size; arguments as for `CacheLayout`."""

    def __init__(self, mask: Tensor, is_padded: bool, limit: int, span: int) -> None:
        super().__init__(mask, is_padded, limit, span)
        self.limit, self.capacity = limit, rounded(limit + span)
        self.block_slots: tuple[Tensor, ...] = ()  # [B, 1, F] of the next block: of layers without and with a window

    def hold(self, hold: Callable[[str, Tensor], Tensor], name: str) -> None:
        """Keep all that a cycle reads at constant addresses (`CacheView.held`), under names that begin with `name`."""
        self.ends = hold(f"{name}.ends", self.ends)
        if self.mask is not None:
            self.mask = pad(self.mask, (0, self.capacity - self.mask.shape[1]), value=True)  # [B, C]
            self.mask = hold(f"{name}.mask", self.mask)
        if self.padding is not None:
            self.padding = hold(f"{name}.padding", self.padding)

    @property
    def counts(self) -> Tensor:  # a copy: `ends` change in place
        return self.ends.clone() if self.padding is None else self.ends - self.padding

    def keep(self, new: NewTokens) -> None:
        """Counts that the host has not read yet leave `lengths` behind."""
        self.ends.add_(new.on_device.to(self.ends.device))
        self.lengths = [length + count for length, count in zip(self.lengths, new.counts)] or self.lengths
        self.is_even, self.block_offset = False, 0

    def has_wrapped(self, size: int) -> bool:
        """Return whether the size is that of a ring, from the first block on."""
        return size < self.capacity

    def needs_mask(self, count: int) -> bool:
        return True  # attention gets empty columns, too

    def install_layers(self, cache: Cache, kind: type[RaggedLayer] | None = None) -> None:
        super().install_layers(cache, kind or FixedLayer)

    def width(self, count: int, size: int) -> int:
        return size  # all columns

    def begin(self, count: int) -> None:
        """Note the slots of the next block."""
        self.capacity = max(self.capacity, rounded(self.limit + count))  # where the longest block was not known
        super().reserve(count)
        columns = self.block_columns(count)[:, None]  # [B, 1, F]
        self.block_slots = tuple(columns % self.size(is_ring) for is_ring in (False, True))


class FixedLayer(RaggedLayer):
    """Keys and values [B, H, C, D] of a layer, whose number of columns never changes."""

    is_compileable = True
    layout: FixedLayout

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> KeysAndValues:
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
                    held = buffers.adopt(f"cache.{index}.{name}", held)
                    torch._dynamo.mark_static_address(held, guard=False)
                setattr(self, name, held)

    def get_seq_length(self) -> Any:
        """Return the columns before the next block of the longest sequence, on the device."""
        return self.layout.ends.max() + self.layout.block_offset


class DrafterLayout(FixedLayout):
    """The ends of the sequences in a drafter's cache of a fixed size, see `drafter_layout`; the host does not know."""

    def __init__(self, view: CacheView, size: int, limit: int, span: int, name: str) -> None:
        super().__init__(view.mask[:, view.mask.shape[1] - size :], view.is_padded, limit, span)
        self.view, self.name, self.num_layers, self.lengths = view, name, 0, [0] * len(self.lengths)
        self.padding = self.prompt - view.counts  # [B]
        self.hold(view.held, name)

    def held(self, part: str, value: Tensor) -> Tensor:
        """Return a value at an address that lasts, see `CacheView.held`."""
        return self.view.held(f"{self.name}.{part}", value)

    def install_layers(self, cache: Cache, kind: type[RaggedLayer] | None = None) -> None:
        super().install_layers(cache, kind or DrafterLayer)

    def reserve(self, count: int) -> None:
        self.begin(count)


class DrafterLayer(FixedLayer):
    """A layer of a drafter's cache, which its first block allocates."""

    layout: DrafterLayout

    def __init__(self, layout: DrafterLayout, origin: DynamicLayer) -> None:
        super().__init__(layout, origin)
        self.number = layout.num_layers
        layout.num_layers += 1

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> KeysAndValues:
        layout, size = self.layout, self.layout.size(self.is_sliding)
        for name, states in (("keys", key_states), ("values", value_states)):
            held = cast("Tensor | None", getattr(self, name))
            if held is None or held.shape[2] < size:  # to zeros: attention reads all, and 0 times NaN is NaN
                held = laid_out(states[:, :, :0], 0, 2, size) if held is None else self._grown(held, 2, size)
                setattr(self, name, layout.held(f"{name}.{self.number}", held))
        return super().update(key_states, value_states)


class HeldBuffers:
    """The buffers of a call, on whose tensors cycles of fixed shapes run.

    Attributes:
        buffers: None where neither cycles nor forwards have fixed shapes.
        made: How many tensors the buffers had made before the call.
        room: Columns of the tokens of a call.
        widest: Tokens of the widest block so far.
        marks: What shapes forwards (`graphs.fingerprint`).
    """

    buffers: Buffers | None = None
    made = room = 0
    widest = 1
    is_fixed = False
    marks: tuple[object, ...] = ()

    def held(self, name: str, value: Tensor) -> Tensor:
        return self.buffers.hold(name, value) if self.is_fixed and self.buffers is not None else value

    def buffer_use(self) -> tuple[int, int]:
        """Return the bytes of the buffers, and how many this call made."""
        return (0, 0) if self.buffers is None else (self.buffers.nbytes, self.buffers.made - self.made)

    def fits(self) -> bool:
        """Put the prompt in the buffers of an earlier call where they have its sizes, and return whether they do."""
        return True


class OwnStaticBackbone(HeldBuffers, OwnCacheBackbone):
    """A model whose own cache can be of a fixed size (`fixed_cache`), for `limit` tokens and blocks of `span`."""

    def __init__(self, model: PreTrainedModel, cache: SpeculativeCache, limit: int, span: int) -> None:
        super().__init__(model, cache)
        self.buffers, self.is_fixed = lend(model, self), True
        self.made, kept = self.buffers.made, self.buffers.tensors.get("tokens.ids")
        self.room = max(rounded(limit + span), 0 if kept is None else kept.shape[1])
        self.marks, self.takes_trees = (self.room, span), False
        self.cache = untyped(model).fixed_cache(cache, self.room, span, self.held)

    def align(self, columns: int) -> None:
        self.cache = untyped(self.cache).restored()


class StaticBackbone(HeldBuffers, RaggedBackbone):
    """A model on a cache of a fixed size; `span` is the longest block, as far as it is known."""

    layout_type = FixedLayout
    layout: FixedLayout
    cache: PlannedCache

    def __init__(self, *args: Any, span: int) -> None:
        cache: PlannedCache = args[1]
        super().__init__(*args, limit=cache.room or 0, span=span)
        how = cache.compiled
        self.compiled, self.how = None if how is None else untyped(self.model).get_compiled_call(how), repr(how)
        self.is_fixed = cache.is_fixed
        self.buffers = lend(self.model, self) if self.is_fixed or self.compiled is not None else None
        self.made = 0 if self.buffers is None else self.buffers.made
        self.has_singles, self.has_slots = cache.has_singles, False
        self.span, self.laid_out, self.forwards, self.room = span, (0, 0), Counter[int](), self.layout.capacity
        cache.room = cache.compiled = None  # who is given it decodes as with any other
        if self.is_fixed:
            self.layout.hold(self.held, "cache")
            self.continuation.hold(self.held)
        self.marks = self.layout.capacity, span, self.is_padded, self.continuation.start is None, self.how

    def fixed_layout(self, size: int, limit: int, span: int, name: str) -> DrafterLayout | None:
        return DrafterLayout(self, size, limit, span, name) if self.is_fixed else None

    def fits(self) -> bool:
        layers = [(n, layer) for n, layer in enumerate(self.cache.layers) if isinstance(layer, FixedLayer)]
        found = [(layer, self.buffers and self.buffers.tensors.get(f"cache.{n}.keys")) for n, layer in layers]
        if any(kept is None or kept.shape[2] != self.layout.size(layer.is_sliding) for layer, kept in found):
            return False
        self._lay_out()
        return True

    def _lay_out(self) -> None:
        if self.laid_out != (room := (self.layout.size(False), self.layout.size(True))):
            self.laid_out = room
            for index, layer in enumerate(self.cache.layers):
                if isinstance(layer, FixedLayer):
                    layer.lay_out(index, self.buffers)

    def keep(self, new: NewTokens, path: Tensor | None = None) -> None:
        self.new_tokens = new
        if path is not None:  # as a whole, whatever of it is accepted
            self.layout.keep_path(self.cache, path)
        self.layout.keep(new)

    def drop_finished(self, done: list[bool]) -> None:
        pass  # shapes never change

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
        nodes = pad(tree.tokens, missing)
        if tree.is_chain:
            tree = DraftTree.chain(nodes, auxiliary=auxiliary)
        else:
            parents = pad(tree.parents, missing, value=-1)
            tree = DraftTree(nodes, parents, depth=tree.depth, auxiliary=auxiliary)
        return pad(block, missing), tree

    def _call(self, block: Tensor, depths: Tensor, tree: DraftTree | None, last: int | None, options: Kwargs) -> Any:
        if tree is not None and tree.auxiliary is None:  # what is filled in may be beyond a table of positions
            depths = pad(depths[..., : self.count], (0, block.shape[1] - self.count))
        self.layout.begin(depths.shape[-1])
        self._lay_out()
        return super()._call(block, depths, tree, last, options)

    def _width(self, count: int, tree: DraftTree) -> int:
        """Return how many tokens a block of `count` is filled up to: those of a tree are not known before."""
        if count == 1 and self.has_singles and tree.auxiliary is None:
            return 1
        is_known = tree.is_chain and (count > 1 or tree.auxiliary is not None)
        self.widest = max(self.widest, count, self.span if is_known else 0)
        return self.widest


def _copied(logits: Tensor | None, states: States | None, count: int) -> tuple[Tensor | None, States | None]:
    """Return the outputs of the first `count` tokens; the next replay of a graph overwrites them."""

    def copied(values: Tensor) -> Tensor:
        return values[:, :count].clone()

    return None if logits is None else copied(logits), each_state(states, copied)
