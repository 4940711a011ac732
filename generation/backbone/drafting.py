"""Caches of drafters: they grow, or have a fixed size where that of the backbone has one."""

from __future__ import annotations

from typing import cast

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from ..contract import CacheView
from ..tensors.masks import cached_arange
from .cache import CacheLayout, RaggedLayer
from .static import FixedLayer, FixedLayout


class DrafterLayout(FixedLayout):
    """The ends of the sequences in a drafter's cache of a fixed size; the host only knows where they began.

    Nothing of a cycle depends on how long the prompt is, so that a recorded one serves prompts of any length.

    Args:
        view: Of the backbone's cache.
        size: Columns of the prompt.
        limit: See `CacheLayout`.
        span: See `CacheLayout`.
        name: Begins the names of what the view holds for it.
    """

    def __init__(self, view: CacheView, size: int, limit: int, span: int, name: str) -> None:
        super().__init__(_last(view.mask, size), view.is_padded, limit, span)
        self.view, self.name, self.num_layers, self.lengths = view, name, 0, [0] * len(self.lengths)
        self.padding = self.prompt - view.counts  # [B]
        self.hold(view.held, name)

    def held(self, part: str, value: Tensor) -> Tensor:
        """Return a value at an address that lasts, see `CacheView.held`."""
        return self.view.held(f"{self.name}.{part}", value)

    def install_layers(self, cache: Cache, kind: type[RaggedLayer] | None = None) -> None:
        """See `CacheLayout`."""
        super().install_layers(cache, kind or DrafterLayer)

    def visible(
        self,
        count: int,
        window: int | None = None,
        chunk: int | None = None,
        new: Tensor | None = None,
        depths: Tensor | None = None,
    ) -> Tensor:
        """See `CacheLayout`; the block's slots are noted, too."""
        self.begin(count)
        return super().visible(count, window, chunk, new, depths)


class DrafterLayer(FixedLayer):
    """A layer of a drafter's cache, which its first block allocates."""

    layout: DrafterLayout

    def __init__(self, layout: DrafterLayout, origin: DynamicLayer) -> None:
        super().__init__(layout, origin)
        self.number = layout.num_layers
        layout.num_layers += 1

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        size = self.layout.size(self.is_sliding)
        if self.keys is None or self.keys.shape[2] < size:
            self._allocate("keys", key_states, size)
            self._allocate("values", value_states, size)
        return super().update(key_states, value_states)

    def _allocate(self, name: str, states: Tensor, size: int) -> None:
        """Allocate `size` columns, with what there is, and zeros: attention reads all, and 0 times NaN is NaN."""
        held = cast("Tensor | None", getattr(self, name))
        held = (
            states.new_zeros(*states.shape[:2], size, states.shape[3]) if held is None else self._grown(held, 2, size)
        )
        setattr(self, name, self.layout.held(f"{name}.{self.number}", held))


def drafter_layout(view: CacheView, size: int, limit: int, span: int, name: str) -> CacheLayout:
    """Return the layout of a drafter's cache that follows the backbone's; arguments as for `DrafterLayout`."""
    if view.is_fixed:
        return DrafterLayout(view, size, limit, span, name)
    return CacheLayout(_last(view.mask, size), view.is_padded, limit, span, view.counts)


def of_accepted(state: Tensor, new: Tensor) -> Tensor:
    """Return hidden states [B, F, D] of a block with zeros after the first `new` [B]: no rejected draft leaves NaN."""
    is_other = cached_arange(state.shape[1], state.device) >= new.to(state.device)[:, None]  # [B, F]
    return state.masked_fill(is_other[..., None], 0)


def _last(mask: Tensor, size: int) -> Tensor:
    return mask[:, mask.shape[1] - size :]
