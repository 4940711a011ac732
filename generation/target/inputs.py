"""What the backbone is told of single tokens beside their ids, after the prompt: as transformers' own loop goes on.

Positions go on from that of the prompt's last token. Mostly that is the number of real tokens in a row; after an image
it may be lower, and a caller may give positions of its own. Token types go on with the last one.

What the rows of a block see of a cache and of each other: masks of trees, of auxiliary, of attention windows.

Pure functions of tensors; they know neither caches nor distributions.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ...configuration.fields import rotary_border
from ...modeling.indices import cached_arange
from ..trees.contract import DraftTree

_TYPES = {"token_type_ids": True, "mm_token_type_ids": False}
"""Kinds of tokens, and whether the last one goes on; what is written is text, of kind 0, elsewhere."""


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


def crosses_border(model: PreTrainedModel, model_kwargs: dict[str, Any], prompt: torch.Tensor, end: int) -> str | None:
    """What of a backbone's positions rules out blocks of tokens in a call: their frequencies depend on the longest one.

    A token that is fed beside later ones would be turned as they are, and not as it is alone. Up to the border that
    does not happen, and after it no more where only the border counts.

    Args:
        model: The backbone.
        model_kwargs: Prepared keyword arguments of the model.
        prompt: [B, L] int64.
        end: The longest position that the call may feed.
    """
    border = rotary_border(model.config.get_text_config())
    if border is None or end <= border[1]:
        return None
    mask = model_kwargs.get("attention_mask")
    begins = prompt.shape[1] if mask is None else int(mask.sum(1).max())
    if border[0] == "longrope" and begins > border[1]:
        return None
    return f"rope_type={border[0]!r} of {type(model).__name__}, whose frequencies change at position {border[1]}"


def last_position_of_trials(config: PreTrainedConfig, length: int, reach: int) -> int | None:
    """Where trials after a prompt must end: at the last position, and `reach` below a border of `crosses_border`.

    Args:
        config: The backbone's, of its text.
        length: Tokens of the prompt.
        reach: How far beyond the text's end a draft may go.
    """
    last, border = getattr(config, "max_position_embeddings", None), rotary_border(config)
    if border is None or length > border[1]:
        return last
    return border[1] - reach if last is None else min(last, border[1] - reach)


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
    kinds: set[str] = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
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
    if window is not None and not is_chunked:
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
