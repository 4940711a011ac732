"""A cache whose room is the same from the first block to the last, so that one compiled graph serves all of them.

    room      C columns, fixed for the call; attention gets all of them, and the mask says which are seen
    blocks    F tokens, fixed where forwards are compiled: a shorter draft is filled up with tokens that nobody sees
    inside    keys and values go where a tensor says; no number of the host that changes is part of a graph

There are two graphs: of blocks, and of single tokens where an adaptive length chooses them. A later call of the same
batch and room has the same shapes, and nothing is compiled again. Masks and positions are made outside the graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel

from ...modeling.masks import cached_range
from ..trees.contract import DraftTree
from .cache import RowLayer, Rows, rounded
from .target import RowTarget, States, TargetOutput, each_state

_WARM = 2  # forwards of a width in which graphs are compiled, and recorded


class PlannedCache(DynamicCache):
    """The cache of a prompt, after which layers of fixed room take over.

    Attributes:
        room: Columns that transformers gave the static cache whose place this one takes; None: the call is over.
        compiled: Makes the forward of what comes after the prompt; None: it is not compiled.
        has_singles: Whether many forwards feed single tokens.
    """

    room: int | None = None
    compiled: Callable[[PreTrainedModel], Callable[..., Any]] | None = None
    has_singles = False


def planned_cache(
    model: PreTrainedModel, model_kwargs: dict[str, Any], config: GenerationConfig, has_singles: bool
) -> PlannedCache:
    """Return what takes the place of the static cache that transformers prepared for a call.

    Args:
        model: The backbone.
        model_kwargs: Prepared keyword arguments of the model, that cache among them.
        config: Of the call.
        has_singles: See `PlannedCache`.
    """
    cache = PlannedCache(config=model.config.get_text_config(decoder=True))
    cache.room = max(layer.get_max_length() for layer in model_kwargs["past_key_values"].layers)
    cache.has_singles = has_singles
    if model._valid_auto_compile_criteria(model_kwargs, config):
        cache.compiled = lambda runner: runner.get_compiled_call(config.compile_config)
    return cache


class FixedRows(Rows):
    """Where the sequences of a batch end, in fixed room.

    Args:
        mask: See `Rows`.
        is_padded: See `Rows`.
        limit: The longest text.
        span: The longest block, as far as it is known.

    Attributes:
        places: The slots [B, 1, F] that the next block goes to, of layers without and with a window.
    """

    def __init__(self, mask: torch.Tensor, is_padded: bool, limit: int, span: int) -> None:
        super().__init__(mask, is_padded, limit, span)
        self.limit, self.capacity = limit, rounded(limit + span)
        self.places: tuple[torch.Tensor, ...] = ()

    def needs_mask(self, fed: int) -> bool:
        """Return True: attention gets columns that hold nothing yet."""
        return True

    def take_over(self, cache: Cache, kind: type[RowLayer] | None = None) -> None:
        """See `Rows`; the room of the new layers is fixed."""
        super().take_over(cache, kind or FixedRowLayer)

    def width(self, fed: int, size: int) -> int:
        """Return all columns."""
        return size

    def begin(self, fed: int) -> None:
        """Note where the next block goes."""
        self.capacity = max(self.capacity, rounded(self.limit + fed))  # where the longest block was not known
        self.reserve(fed)
        columns = (self.ends[:, None] + cached_range(self.ahead, fed, self.ends.device))[:, None]
        self.places = tuple(columns % self.size(is_ring) for is_ring in (False, True))


class FixedRowLayer(RowLayer):
    """Keys and values [B, H, C, D] of a layer, whose number of columns stays what it is."""

    is_compileable = True
    rows: FixedRows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a block [B, H, F, D], and return all columns."""
        keys, values = cast(torch.Tensor, self.keys), cast(torch.Tensor, self.values)
        batch, heads = key_states.shape[:2]
        row, head = (torch.arange(count, device=key_states.device) for count in (batch, heads))
        index = row[:, None, None], head[:, None], self.rows.places[self.is_sliding].to(key_states.device)
        keys[index], values[index] = key_states, value_states
        return keys, values

    def lay_out(self, is_compiled: bool) -> None:
        """Make the room that there is to be; graphs need not copy it, and serve that of another call, too."""
        size = self.rows.size(self.is_sliding)
        for name, dim in self.states:
            if (held := getattr(self, name)) is not None:
                held = self._grown(held, dim, size) if held.shape[dim] < size else held
                if is_compiled:
                    torch._dynamo.mark_static_address(held, guard=False)
                setattr(self, name, held)

    def get_seq_length(self) -> Any:
        """Return the columns before the next block of the longest sequence, on the device."""
        return self.rows.ends.max() + self.rows.ahead


class FixedTarget(RowTarget):
    """A model on a cache of fixed room.

    Args:
        *args: See `ColumnTarget`.
        span: The longest block, as far as it is known.
    """

    rows_type = FixedRows
    rows: FixedRows
    cache: PlannedCache

    def __init__(self, *args: Any, span: int) -> None:
        cache: PlannedCache = args[1]
        super().__init__(*args, limit=cache.room or 0, span=span)
        self.compiled = None if cache.compiled is None else cache.compiled(self.model)
        self.has_singles, self.has_slots = cache.has_singles, False
        self.span, self.widest, self.laid_out, self.forwards = span, 1, (0, 0), Counter[int]()
        cache.room = cache.compiled = None  # who is given it decodes as with any other

    def leave_out(self, done: list[bool]) -> None:
        """See `Target`; shapes stay what they are."""

    def _forward(self, block: torch.Tensor, tree: DraftTree, options: dict[str, Any]) -> TargetOutput:
        fed = self.fed = block.shape[1]
        slots = 0 if tree.auxiliary is None else len(tree.auxiliary.positions) - fed
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
            *_copied(outputs.logits, outputs.hidden_states, fed),
            *_copied(outputs.auxiliary, outputs.auxiliary_states, slots),
        )

    def _filled(self, block: torch.Tensor, tree: DraftTree) -> tuple[torch.Tensor, DraftTree]:
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

    def _call(
        self,
        block: torch.Tensor,
        places: torch.Tensor,
        tree: DraftTree | None,
        last: int | None,
        options: dict[str, Any],
    ) -> Any:
        if tree is not None and tree.auxiliary is None:  # what is filled in may be beyond a table of positions
            places = torch.nn.functional.pad(places[..., : self.fed], (0, block.shape[1] - self.fed))
        self.rows.begin(places.shape[-1])
        if self.laid_out != (room := (self.rows.size(False), self.rows.size(True))):
            self.laid_out = room
            for layer in self.cache.layers:
                if isinstance(layer, FixedRowLayer):
                    layer.lay_out(self.compiled is not None)
        return super()._call(block, places, tree, last, options)

    def _width(self, fed: int, tree: DraftTree) -> int:
        """Return how many tokens a block of `fed` is filled up to: those of a tree are not known before."""
        if fed == 1 and self.has_singles and tree.auxiliary is None:
            return 1
        is_known = tree.is_chain and (fed > 1 or tree.auxiliary is not None)
        self.widest = max(self.widest, fed, self.span if is_known else 0)
        return self.widest


def _copied(
    logits: torch.Tensor | None, states: States | None, count: int
) -> tuple[torch.Tensor | None, States | None]:
    """Return what belongs to the first `count` tokens; the next replay of a graph writes over what this one gave."""

    def copied(values: torch.Tensor) -> torch.Tensor:
        return values[:, :count].clone()

    return None if logits is None else copied(logits), each_state(states, copied)
