"""All depths of a chain of modules over whole sequences, with known tokens (teacher forcing).

Up to depth D every module runs once over all rows. Beyond D the last module goes on from its own output, and it attends
as it does while drafting: row i of such a depth sees the last module's ordinary columns up to i and, of every further
depth, only its own column i. So a module that is trained unrolled meets what it will meet in `generate`.
"""

from __future__ import annotations

import torch
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from .modules import MTPModules, is_sliding


def teacher_forced(
    modules: MTPModules,
    hidden_states: torch.Tensor,
    inputs_embeds: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    depths: int,
) -> list[torch.Tensor]:
    """h^1 to h^depths; depth k has L - k rows (none where the sequence is too short).

    Args:
        modules: The chain.
        hidden_states: h^0, [B, L, H].
        inputs_embeds: Embeddings of the same L tokens.
        position_ids: [B or 1, L].
        attention_mask: [B, L], 0 for padding.
        depths: How many depths; more than D reuse the last module.

    Raises:
        ValueError: More depths than modules with an attention that takes no mask of its own.
    """
    length, states = hidden_states.shape[1], [hidden_states]
    once = depths if depths <= modules.count else modules.count - 1
    for k in range(1, min(once, length - 1) + 1):
        rows = length - k
        mask = None if attention_mask is None else attention_mask[:, :rows]
        states.append(modules.step(k, states[-1][:, :rows], inputs_embeds[:, k:], position_ids[:, :rows], mask))
    if depths > modules.count and length > modules.count:
        states += _unrolled(modules, states[-1], inputs_embeds, position_ids, attention_mask, depths)
    empty = hidden_states[:, :0]
    return (states + [empty] * depths)[1 : depths + 1]


def _unrolled(
    modules: MTPModules,
    state: torch.Tensor,
    inputs_embeds: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    depths: int,
) -> list[torch.Tensor]:
    """h^D to h^depths from h^{D-1}."""
    length, first = inputs_embeds.shape[1], modules.count
    columns = length - first
    causal = _causal_mask(modules, state[:, :columns], position_ids[:, :columns], attention_mask)
    states, earlier = [], ()
    for k in range(first, min(depths, length - 1) + 1):
        rows = length - k
        sizes = range(columns, rows - 1, -1)  # columns of depth D, D + 1, ..., k
        state, *new = modules.last(
            state[:, :rows],
            inputs_embeds[:, k:],
            earlier=earlier,
            attention_mask=_diagonals(causal, rows, sizes),
            position_ids=position_ids[:, :rows] + (k - first),
            position_embeddings=modules.rotary_emb(state[:, :rows], position_ids[:, :rows] + (k - first)),
        )
        states.append(state)
        earlier = tuple(new)
    return states


def _causal_mask(
    modules: MTPModules, states: torch.Tensor, position_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    """The mask of depth D as a tensor [B, 1, R, R], whatever form the attention would like best."""
    make_mask = create_sliding_window_causal_mask if is_sliding(modules.config) else create_causal_mask
    mask = make_mask(
        config=modules.config,
        inputs_embeds=states,
        attention_mask=None if attention_mask is None else attention_mask[:, : states.shape[1]],
        past_key_values=None,
        position_ids=position_ids,
        allow_is_causal_skip=False,
    )
    if not isinstance(mask, torch.Tensor) or mask.dim() < 4:
        raise ValueError(
            "more steps than modules need a mask of their own, which attn_implementation="
            f"{modules.config._attn_implementation!r} does not take; use 'sdpa' or 'eager'"
        )
    return mask


def _diagonals(causal: torch.Tensor, rows: int, sizes: range) -> torch.Tensor:
    """Mask of the first `rows` rows: depth D causally, and of each further depth their own column."""
    parts = [causal[..., :rows, :]]
    for size in list(sizes)[1:]:
        own = torch.eye(rows, size, dtype=torch.bool, device=causal.device)
        if causal.dtype != torch.bool:
            own = torch.zeros_like(own, dtype=causal.dtype).masked_fill(~own, torch.finfo(causal.dtype).min)
        parts.append(own.expand(*causal.shape[:2], -1, -1))
    return torch.cat(parts, dim=-1)
