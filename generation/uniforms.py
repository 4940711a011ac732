"""Where the uniforms of a call come from: one for every output position, or fresh ones in every cycle."""

from __future__ import annotations

import torch

from .tokens import TokenRows

_SPARE = 64


class Uniforms:
    """Uniforms of the output positions of every row.

    Args:
        shape: Rows, and positions that will be returned.
        device: Where they are needed.
        table: [B, positions] in [0, 1), given by the user.
        seed: Of a generator of their own; None: torch's global one.
        stay: The uniform of a position is the same in every cycle, whatever is drafted or rejected on the way (coupled
            verification). Otherwise every cycle draws fresh ones: a speculative rule must not use again what a
            rejected draft has used.

    Attributes:
        current: [B, n], of the positions from the next one on, as `draw` gave them last.
        generator: Source of further randomness.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        device: torch.device,
        table: torch.Tensor | None = None,
        seed: int | None = None,
        stay: bool = True,
    ) -> None:
        self.stay = stay
        self.generator = None if seed is None else torch.Generator(device).manual_seed(seed)
        self.table = table
        if table is None and stay:
            self.table = torch.rand(shape, generator=self.generator, device=device)
        self.current: torch.Tensor | None = None

    def draw(self, tokens: TokenRows, count: int) -> torch.Tensor:
        """u of the next `count` output positions of every row, [B, count]."""
        device, rows = tokens.ids.device, len(tokens.lengths)
        if not self.stay:
            self.current = torch.rand(rows, count, device=device, generator=self.generator)
            return self.current
        missing = max(tokens.lengths) - tokens.prompt_length + count - self.table.shape[1]
        if missing > 0:  # of tokens that are drafted but never returned
            more = torch.rand(rows, missing + _SPARE, generator=self.generator, device=device)
            self.table = torch.cat([self.table, more.to(self.table.dtype)], dim=1)
        if tokens.is_even:
            start = tokens.lengths[0] - tokens.prompt_length
            self.current = self.table[:, start : start + count]
        else:
            self.current = self.table.gather(1, tokens.ends[:, None] - tokens.prompt_length + tokens.steps[:count])
        return self.current
