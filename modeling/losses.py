"""Pure losses of multi-token prediction: which tokens are targets at which depth, and how depths are weighed."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

IGNORE = -100
_LOGITS_PER_CHUNK = 2**26  # 256 MiB of float32


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
        attention_mask: [B, L]; a padding position predicts nothing.
        position_ids: [B or 1, L]; where positions restart, a window must not reach into the next packed document.

    Returns:
        [B, L, n] int64, -100 where there is no target.
    """
    length = labels.shape[1]
    ahead = torch.nn.functional.pad(labels, (0, window), value=IGNORE).unfold(1, length, 1)[:, 1:].transpose(1, 2)
    if attention_mask is not None:
        ahead = ahead.masked_fill(~attention_mask.bool()[:, -length:, None], IGNORE)
    if position_ids is not None:
        depth = torch.arange(1, window + 1, device=labels.device)
        future = torch.nn.functional.pad(position_ids, (0, window)).unfold(1, length, 1)[:, 1:].transpose(1, 2)
        ahead = ahead.masked_fill(future < depth, IGNORE)
    return ahead


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


def independent_terms(head: torch.nn.Module, hidden_states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """-log q of every target under independent heads, without holding all logits at once.

    Args:
        head: Module with `forward(hidden_states, num_heads) -> [..., num_heads, V]`.
        hidden_states: [B, L, D].
        targets: [B, L, n] int64; -100 gives 0.

    Returns:
        [B, L, n] float32, in nats.
    """
    window = targets.shape[-1]
    flat, wanted = hidden_states.flatten(0, 1), targets.flatten(0, 1)

    def chunk_terms(hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = head(hidden, window).float()
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), target.flatten(), ignore_index=IGNORE, reduction="none"
        )

    rows = max(1, _LOGITS_PER_CHUNK // (window * head.vocab_size))
    if rows >= len(flat):
        return chunk_terms(flat, wanted).view(targets.shape)
    pairs = zip(flat.split(rows), wanted.split(rows))
    return torch.cat([checkpoint(chunk_terms, *pair, use_reentrant=False) for pair in pairs]).view(targets.shape)
