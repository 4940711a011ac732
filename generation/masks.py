"""What the rows of a block see of a cache and of each other: masks of trees, of auxiliary, of attention windows.

Pure functions of tensors; they know neither caches nor distributions.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .contract import DraftTree, cached_arange


def tree_mask(cached: torch.Tensor, tree: DraftTree, model: PreTrainedModel, held: int | None = None) -> Any:
    """What b and the nodes see: all real columns of the cache, their ancestors and themselves.

    Args:
        cached: [B, W] bool, the real columns of the cache.
        tree: The draft.
        model: The backbone; where its layers have attention windows, distances are those of columns, as in its own
            masks.
        held: The last columns of the cache that such layers still hold; None: all.

    Returns:
        [B, 1, F, W + F] in the backbone's dtype, as `dense_mask`; by kind of layer where there are several.
    """
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    full, near = dense_mask(cached, tree.mask(), model), _near(model.config.get_text_config(), kinds, cached, tree)
    if near is None:
        return full
    first = 0 if held is None else cached.shape[1] - held
    bounded = full.masked_fill(~near[:, None], torch.finfo(full.dtype).min)[..., first:]
    kind = "chunked_attention" if "chunked_attention" in kinds else "sliding_attention"
    return bounded if len(kinds) < 2 else {"full_attention": full, kind: bounded}


def _near(config: Any, kinds: set[str], cached: torch.Tensor, tree: DraftTree) -> torch.Tensor | None:
    """Which columns each place has within its attention window, [B, F, W + F]; None: all of them."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    is_chunked, width = "chunked_attention" in kinds, cached.shape[1]
    if not is_chunked and (window is None or kinds == {"full_attention"}):
        return None
    columns = torch.cat([cached_arange(width, cached.device).expand(len(cached), -1), width + tree.positions()], dim=1)
    if not is_chunked:
        return columns[:, width:, None] - columns[:, None] < window
    chunks = (columns - (cached.cumsum(1) == 0).sum(1)[:, None]) // config.attention_chunk_size  # from the first token
    return chunks[:, width:, None] == chunks[:, None]


def dense_mask(cached: torch.Tensor, new: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    """What F new rows see of a cache and of each other, as the sum that attention adds (`added_to_scores`).

    Args:
        cached: [B, W] bool.
        new: [F, F] or [B, F, F] bool.
        model: The backbone, whose dtype the mask gets.

    Returns:
        [B, 1, F, W + F].
    """
    new = new.expand(len(cached), -1, -1)
    return added_to_scores(torch.cat([cached[:, None].expand(-1, new.shape[1], -1), new], dim=2), model.dtype)


def added_to_scores(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What rows see of columns, [B, F, W] bool, as the sum that attention adds [B, 1, F, W]; no host looks at it.

    Where nothing is seen stands the least finite number, so that rows that see nothing stay finite.
    """
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
