"""The distribution of heads that read the tokens before theirs (Hydra): a product of conditionals, nothing to
normalise."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..sampling import draw
from .window_distribution import Choose, WindowDistribution, normalised_logits

NextLogits = Callable[[torch.Tensor], torch.Tensor]
"""From the embeddings [..., k, d] of the first k tokens of the window to the logits [..., V] of the next one."""


class SequentialDistribution(WindowDistribution):
    """q(x) = prod_k softmax(next_logits(e(x_1), .., e(x_{k-1})))[x_k].

    Binding a token is exact and free: every conditional is given, none is computed from a joint distribution. With
    known tokens all conditionals are evaluated without a loop over the batch or over drafts; drafting takes one step
    per token.

    Args:
        next_logits: The conditionals.
        embed: From token ids [...] to embeddings [..., d].
        window: n, positions that are still free.
        known: Embeddings [..., j, d] of the tokens that are bound already.
    """

    def __init__(
        self,
        next_logits: NextLogits,
        embed: Callable[[torch.Tensor], torch.Tensor],
        window: int,
        known: torch.Tensor,
    ) -> None:
        self.next_logits, self.embed, self.window, self.known = next_logits, embed, window, known

    @property
    def leaf_logits(self) -> torch.Tensor:
        """Logits of the first free position, [..., 1, 1, V]."""
        return self._logits(self.known)[..., None, None, :]

    def conditional_log_probs(self, tokens: torch.Tensor) -> torch.Tensor:
        """Teacher-forced: every conditional sees the given tokens before it."""
        prefix = self._extended(tokens[..., :-1])
        bound = self.known.shape[-2]
        steps = [self._logits(prefix[..., : bound + i, :]) for i in range(self.window)]
        return normalised_logits(torch.stack(torch.broadcast_tensors(*steps), -2))

    def next_log_probs(self, prefix: torch.Tensor) -> torch.Tensor:
        """The logits of the next conditional."""
        return self._logits(self._extended(prefix))

    def token_log_probs(self, tokens: torch.Tensor, unknown: torch.Tensor | None = None) -> torch.Tensor:
        """The conditionals at the tokens.

        Raises:
            ValueError: An unknown token with a known one behind it: it would have to be summed out.
        """
        chosen = self.conditional_log_probs(tokens).gather(-1, tokens[..., None])[..., 0]
        if unknown is None:
            return chosen
        if bool((unknown[..., :-1] & ~unknown[..., 1:]).any()):
            raise ValueError("unknown: a sequential distribution can sum tokens out at the end of the window only")
        return chosen.masked_fill(unknown, 0)

    def prefix_log_prob(self, tokens: torch.Tensor, unknown: torch.Tensor | None = None) -> torch.Tensor:
        """Cumulated conditionals; unknown tokens may stand at the end of the window only (`token_log_probs`)."""
        return self.token_log_probs(tokens, unknown).cumsum(-1)

    def condition(self, first: torch.Tensor) -> SequentialDistribution:
        """Binds the embedding of `first`."""
        return SequentialDistribution(self.next_logits, self.embed, self.window - 1, self._extended(first[..., None]))

    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """One token after the other."""
        return self.draft(lambda probs: (draw(probs, generator), probs))[0]

    def draft(self, choose: Choose, length: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """One token after the other."""
        distribution, tokens, draft_probs = self, [], []
        for _ in range(self.window if length is None else min(length, self.window)):
            token, probs = choose(distribution._logits(distribution.known).softmax(-1))
            tokens.append(token)
            draft_probs.append(probs)
            distribution = distribution.condition(token)
        return torch.stack(tokens, -1), torch.stack(draft_probs, -2)

    def sample_with_probs(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One token after the other; their distributions come with them."""
        return self.draft(lambda probs: (draw(probs), probs), length)

    def _logits(self, prefix: torch.Tensor) -> torch.Tensor:
        logits = self.next_logits(prefix)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _extended(self, tokens: torch.Tensor) -> torch.Tensor:
        new = self.embed(tokens).to(self.known.dtype)
        batch = torch.broadcast_shapes(new.shape[:-2], self.known.shape[:-2])
        return torch.cat([self.known.expand(*batch, -1, -1), new.expand(*batch, -1, -1)], -2)
