"""The backbone as a teacher: its own distribution at every place that a head predicts, given the true tokens.

The distribution of x_{t+j} is that of the backbone's state at t + j - 1, so it costs no further forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..loss_options import LossOptions
from .backbone_parts import BackboneParts
from .chunks import LOGITS_PER_CHUNK
from .divergences import acceptance, divergence, head_and_rest, lumped
from .window_distribution import WindowDistribution


@dataclass
class Teacher:
    """What a head learns from depth 2 on.

    Attributes:
        options: Of the head's loss.
        backbone: The teacher's unembedding.
        arguments: Per position, what `terms` needs: states of the next n - 1 positions [B, L, (n - 1) d]; or, with
            `top_k`, ids [B, L, (n - 1) k] and log-probabilities [B, L, (n - 1) (k + 1)].
        missing: Scalar, mean mass outside the top k; None without it.
    """

    options: LossOptions
    backbone: BackboneParts
    arguments: tuple[torch.Tensor, ...]
    missing: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        options: LossOptions,
        backbone: BackboneParts | None,
        last_states: torch.Tensor | None,
        scored: torch.Tensor,
    ) -> Teacher:
        """A teacher for a batch.

        Args:
            options: Of the head's loss.
            backbone: What the head borrows of its backbone.
            last_states: [B, L, d], the backbone's last hidden states.
            scored: [B, L, n] bool, where something is scored.

        Raises:
            ValueError: There is no backbone to teach.
        """
        if last_states is None or backbone is None:
            raise ValueError("loss_target='teacher' needs the backbone's last hidden states, and none were given")
        states, window = last_states.detach(), scored.shape[-1]
        if options.top_k is None:
            return cls(options, backbone, (_ahead(states, window),))
        ids, log_probs = likeliest(backbone, states, options.top_k)
        rest = _ahead(log_probs[..., -1:].exp(), window)
        taught = scored[..., 1:]
        missing = torch.where(taught, rest, 0.0).sum() / taught.sum().clamp(min=1)
        return cls(options, backbone, (_ahead(ids, window), _ahead(log_probs, window)), missing)

    def terms(
        self, distribution: WindowDistribution, tokens: torch.Tensor, taught: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Terms of some positions and the acceptances there, [N, n] each; at depth 1 of the tokens, and 0.

        Args:
            distribution: Of the head.
            tokens: [N, n] int64.
            taught: Pieces of `arguments`.
        """
        log_probs = distribution.conditional_log_probs(tokens)
        likelihood = log_probs.gather(-1, tokens[..., None])[..., 0]
        log_q, depths = log_probs[..., 1:, :], tokens.shape[-1] - 1
        parts = [part.unflatten(-1, (depths, -1)) for part in taught]
        if self.options.top_k is None:
            with torch.no_grad():
                log_p = self.backbone.unembed(parts[0]).to(log_q.dtype).log_softmax(-1)
        else:
            log_p, log_q = parts[1].to(log_q.dtype), lumped(log_q, parts[0])
        share = self.options.label_weight
        distance = divergence(self.options.divergence, log_p, log_q)
        mixed = distance if share == 0 else (1 - share) * distance - share * likelihood[..., 1:]
        accepted = acceptance(log_p, log_q.detach())
        return torch.cat([-likelihood[..., :1], mixed], -1), nn.functional.pad(accepted, (1, 0))


@torch.no_grad()
def likeliest(backbone: BackboneParts, states: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`head_and_rest` of the distribution at every state [B, L, d], a chunk of positions at a time."""
    flat = states.flatten(0, -2)
    logits = backbone.unembed(flat[:1])
    rows = max(1, LOGITS_PER_CHUNK // logits.shape[-1])
    pieces = [head_and_rest(backbone.unembed(part).float().log_softmax(-1), k) for part in flat.split(rows)]
    ids, log_probs = (torch.cat(piece).unflatten(0, states.shape[:-1]) for piece in zip(*pieces))
    return ids, log_probs


def _ahead(values: torch.Tensor, window: int) -> torch.Tensor:
    """For every position the values [B, L, (n - 1) c] of the n - 1 positions behind it; 0 beyond the end."""
    padded = nn.functional.pad(values, (0, 0, 0, window - 1))
    return torch.cat([padded[:, k : k + values.shape[1]] for k in range(1, window)], -1)
