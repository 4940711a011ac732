"""Pure losses of multi-token prediction: which tokens are targets at which depth, and how depths are weighed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .chunks import chunked_terms
from .window_law import WindowLaw

IGNORE = -100
LOGITS_PER_CHUNK = 2**24
"""Budget of the head losses: leaf logits that exist at a time, 64 MiB of float32 (and a few copies in backward)."""


def window_targets(
    labels: torch.Tensor,
    window: int,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Targets of overlapping windows: the label j tokens ahead, for depths j = 1..n.

    Args:
        labels: [B, L] int64, ordinary Hugging Face labels (not shifted; -100 is ignored).
        window: n.
        attention_mask: [B, L]; a padding position predicts nothing and is no target.
        position_ids: [B or 1, L]; where positions restart, a window must not reach into the next packed document.

    Returns:
        [B, L, n] int64, -100 where there is no target.
    """
    real = None if attention_mask is None else attention_mask.bool()[:, -labels.shape[1] :]
    ahead = tokens_ahead(labels if real is None else labels.masked_fill(~real, IGNORE), window, IGNORE)
    if real is not None:
        ahead = ahead.masked_fill(~real[:, :, None], IGNORE)
    if position_ids is not None:
        depth = torch.arange(1, window + 1, device=labels.device)
        ahead = ahead.masked_fill(tokens_ahead(position_ids, window, 0) < depth, IGNORE)
    return ahead


def tokens_ahead(tokens: torch.Tensor, window: int, fill: int) -> torch.Tensor:
    """The next `window` entries after every position of tokens [B, L]: [B, L, n], `fill` beyond the end."""
    padded = torch.nn.functional.pad(tokens, (0, window), value=fill)
    return padded.unfold(1, tokens.shape[1], 1)[:, 1:].transpose(1, 2)


def discounted_mtp_loss(
    terms: torch.Tensor,
    valid: torch.Tensor,
    gamma: float = 0.9,
    normalization: str = "paper",
    counts: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Composite likelihood of overlapping windows, discounted by depth (MtPC paper, section 3, Eq. 4).

    With L_ij the sum of the valid terms of sequence i at depth j and c_ij their number:
    `"paper"`: sum_j gamma^(j-1) (1/N) sum_i L_ij / c_ij;
    `"tokens"`: [sum_j gamma^(j-1) (sum_i L_ij) / (sum_i c_ij)] / sum_j gamma^(j-1).

    Args:
        terms: [N, L, n], -log q of each target given the targets before it in its window; may be NaN where not valid.
        valid: [N, L, n], 0 where there is no target.
        gamma: Discount in (0, 1].
        normalization: `"paper"` or `"tokens"`.
        counts: For `"tokens"`: targets per depth over all micro-batches, [n] or one number for all depths, so that
            gradient accumulation is exact. Counted here if None.

    Returns:
        Scalar, in nats.

    Raises:
        ValueError: An unknown `normalization`.
    """
    valid = valid.bool()
    terms = torch.where(valid, terms, torch.zeros_like(terms))
    weights = gamma ** torch.arange(terms.shape[-1], device=terms.device, dtype=terms.dtype)
    if normalization == "paper":
        per_sequence = terms.sum(1) / valid.sum(1).clamp(min=1)
        return (per_sequence.mean(0) * weights).sum()
    if normalization != "tokens":
        raise ValueError(f"normalization={normalization!r} is unknown; choose 'paper' or 'tokens'")
    per_depth = valid.sum((0, 1)) if counts is None else torch.as_tensor(counts, device=terms.device)
    return (terms.sum((0, 1)) / per_depth.clamp(min=1) * weights).sum() / weights.sum()


def depth_means(terms: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Detached mean of the valid terms per depth, [n] in nats; NaN where a depth has no target."""
    terms = torch.where(valid.bool(), terms.detach(), torch.zeros_like(terms))
    return terms.sum((0, 1)) / valid.sum((0, 1))


def window_terms(
    law: Callable[[torch.Tensor], WindowLaw],
    head: nn.Module,
    hidden_states: torch.Tensor,
    tokens: torch.Tensor,
    logits_per_position: int,
    unknown: torch.Tensor | None = None,
) -> torch.Tensor:
    """-log q(x_{t+j} | x_{t+1..t+j-1}) for every window, in chunks that are computed again in backward.

    Beyond parameters and gradients, memory is that of one chunk, whatever the rank, the window and the vocabulary.

    Args:
        law: From hidden states [N, D] to the law of the next n tokens.
        head: The module whose parameters `law` uses.
        hidden_states: [B, L, D].
        tokens: [B, L, n] int64, the tokens of every window; any id where there is none.
        logits_per_position: Numbers that `law` makes of one hidden state, n r V.
        unknown: [B, L, n], True where a token is summed out.

    Returns:
        [B, L, n] float32, in nats.
    """

    def terms(hidden: torch.Tensor, chosen: torch.Tensor, holes: torch.Tensor | None) -> torch.Tensor:
        return -law(hidden).token_log_probs(chosen, holes)

    rows = max(1, LOGITS_PER_CHUNK // logits_per_position)
    flat = hidden_states.flatten(0, 1), tokens.flatten(0, 1), None if unknown is None else unknown.flatten(0, 1)
    return chunked_terms(terms, head, *flat, rows).view(tokens.shape)
