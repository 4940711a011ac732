"""Best-of-M: several vectors of uniforms are drafted from, and the most central one is kept.

Every cycle draws M fresh vectors for the output positions to come and drafts a branch from each; the forward that
verifies the branches makes the M drafts after each of their ends. The branch to keep is chosen by where its uniforms
lie in the intervals of the *target's* picks (`best_of`). On any prefix those places are uniform and independent of the
tokens, so the choice changes no law, as long as no uniform behind the stop is used again; the paper's Eq. 18 has the
opposite sign and measures against the student. Slots cost M^2 times as much.
"""

from __future__ import annotations

from typing import Any

import torch

from ...modeling.ptp.features import best_of
from ...modeling.sampling import interval
from ..tokens import TokenRows
from ..verification import coupled_acceptance
from .parallel import ParallelDrafter, ParallelLoop, law_of
from .slots import SlotLayout


class BestOfDrafter(ParallelDrafter):
    """Reads M drafts off the slots behind the branch that was kept.

    Attributes:
        many: M.
        branches: [B, J, m] int64, the drafts to verify: M of them, or one empty one.
        vectors: [B, J, m + 1 or more], the uniforms that they and the tokens behind them are picked with.
        fresh: [B, M, n], the uniforms of the drafts to come.
        kept_branch: [B] int64.
    """

    def __init__(self, *args: Any, many: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.many = many
        self.branches: torch.Tensor | None = None
        self.vectors: torch.Tensor | None = None
        self.fresh: torch.Tensor | None = None
        self.kept_branch: torch.Tensor | None = None

    def draw(self, batch: int, generator: torch.Generator | None, device: torch.device) -> None:
        """Draws uniforms for the drafts of the next forward, and for its only pick if it verifies none."""
        drawn = torch.rand(batch, self.many, self.longest_group + 2, generator=generator, device=device)
        self.fresh = drawn[..., 1:]
        if self.branches is None:
            self.branches = torch.zeros(batch, 1, 0, dtype=torch.long, device=device)
            self.vectors = drawn[:, :1, :1]

    def propose(self, tokens: TokenRows, length: int) -> tuple[torch.Tensor, None]:
        """The branches, one after the other, of at most `length` tokens each."""
        if self.branches is None:
            return tokens.ids[:, :0], None
        self.branches = self.branches[..., :length]
        return self.branches.flatten(1), None

    @property
    def num_branches(self) -> int:
        """Drafts that the next forward verifies."""
        return self.branches.shape[1]

    def advance(self, outputs: Any, kept: list[int]) -> None:
        """Drafts from the groups behind the tokens that each row kept."""
        index, exists = self.layout.of_group([max(count - 1, 0) for count in kept], self.kept_branch)
        first = int(self.is_one_hot)  # a one-hot slot 0 predicts what the target picks itself
        index, exists = index[..., first:], exists[:, None, first:]
        self.branches = None
        if index.shape[-1] > 0:
            rows = torch.arange(len(kept), device=index.device)[:, None, None]
            self.branches, _ = self._drafts(self.logits[rows, index], self.fresh[..., : index.shape[-1]], exists)
            self.vectors = self.fresh


class BestOfLoop(ParallelLoop):
    """One call of `generate` with `best_of`; see `ParallelLoop`."""

    drafter: BestOfDrafter

    def _draft(self, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        draft, _ = super()._draft(last)
        if draft.shape[1] == 0:
            self.drafter.branches = None
        return draft, None

    def _forward(self, block: torch.Tensor) -> Any:
        self.drafter.draw(len(block), self.generator, block.device)
        return super()._forward(block)

    def _of_slots(self, layout: SlotLayout) -> torch.Tensor:
        """The shared slots read the uniform of the target's pick, the others those of their vectors."""
        picks = self.drafter.vectors[:, layout.branch, layout.group]
        own = self.drafter.fresh[:, layout.vector, (layout.place - 1).clamp(min=0)]
        return torch.where(layout.place == 0, picks, own)

    def _judge(self, draft: torch.Tensor, q: torch.Tensor | None, outputs: Any) -> tuple[torch.Tensor, ...]:
        """Verifies all branches, keeps one per row, and leaves it alone in cache and outputs."""
        drafts = self.drafter.branches
        count, length = drafts.shape[1:]
        fed = 1 + count * length
        columns = 1 + torch.arange(fed - 1, device=draft.device).view(count, length)
        columns = torch.nn.functional.pad(columns, (1, 0))
        judged = zip(*(self._judge_branch(drafts[:, j], j, outputs.logits[:, columns[j]]) for j in range(count)))
        logits, scores, accepted, picked, places = (torch.stack(parts, dim=1) for parts in judged)
        kept, rows = best_of(places, accepted), torch.arange(len(draft), device=draft.device)
        self.drafter.kept_branch, chosen = kept, columns[kept]
        self.target.select(chosen, fed)
        if outputs.hidden_states is not None:
            outputs.hidden_states = tuple(states[rows[:, None], chosen] for states in outputs.hidden_states)
        self.drafter.rates.update(length, self._of_open_rows(accepted[rows, kept]))
        return tuple(parts[rows, kept] for parts in (drafts, logits, scores, accepted, picked))

    def _judge_branch(self, draft: torch.Tensor, branch: int, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Logits, scores, accepted drafts, picks, and where the uniforms of the drafts lie in the picks' intervals."""
        logits = logits.float()
        self.tokens.write(draft)
        scores = self.processing(self.tokens, logits, self.done)
        law, uniforms = law_of(scores), self.drafter.vectors[:, branch, : logits.shape[1]]
        accepted, picked = coupled_acceptance(draft, uniforms, law)
        low, high = interval(picked, law)
        return logits, scores, accepted, picked, ((uniforms - low) / (high - low))[:, :-1]
