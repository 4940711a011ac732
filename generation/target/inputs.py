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
from ...modeling.masks import given_mask
from ..trees.contract import DraftTree
from .cache import Rows

_TYPES = {"token_type_ids": True, "mm_token_type_ids": False}
"""Kinds of tokens, and whether the last one goes on; what is written is text, of kind 0, elsewhere."""


_WITHOUT_COLUMNS = {"linear_attention", "conv", "moe", "mlp"}
"""Kinds of layers whose tokens are real, all of them."""


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


def block_mask(
    rows: Rows, fed: int, config: PreTrainedConfig, dtype: torch.dtype | None = None, tree: DraftTree | None = None
) -> Any:
    """Return what b and the nodes see: all real columns of the cache, their ancestors and themselves.

    Args:
        rows: Of a cache that never moves.
        fed: F, the tokens of the block.
        config: The backbone's, of its text; where layers have attention windows, distances are those of columns, as in
            its own masks.
        dtype: The backbone's; None: masks are for layers outside a model, which choose theirs from a dict.
        tree: The draft; None or a chain: in the order of the block.

    Returns:
        None where the backbone knows it without a mask, else [B, 1, F, W] (see `given_mask`); by kind of layer where
        there are several.
    """
    auxiliary = None if tree is None else tree.auxiliary
    new = None if tree is None or tree.is_chain else tree.mask()
    new = new if auxiliary is None else auxiliary.mask[None]
    rows.is_exact = new is None and not rows.needs_mask(fed)
    if rows.is_exact:
        return None
    kinds: set[str] = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    chunk = config.attention_chunk_size if "chunked_attention" in kinds else None
    near = {kind for kind in kinds or {"sliding_attention"} if kind == "chunked_attention" or "sliding" in kind}
    near = near if chunk or window else set()
    masks: dict[str, torch.Tensor | None] = dict.fromkeys(kinds & _WITHOUT_COLUMNS)
    if dtype is None or not near or kinds - near:
        full = given_mask(rows.visible(fed, new=new), config, dtype)
        masks |= dict.fromkeys({"full_attention", *kinds} - near - _WITHOUT_COLUMNS, full)
    if near:
        depths = None if new is None or tree is None else tree.positions()
        seen = rows.visible(fed, None if chunk else window, chunk, new, depths)
        masks |= dict.fromkeys(near, given_mask(seen, config, dtype))
    if dtype is None or (near and len(masks) > 1):
        return masks
    return next(mask for mask in masks.values() if mask is not None)
