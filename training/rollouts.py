"""What the rollouts of a trainer gained by drafts, in its log."""

from __future__ import annotations

from collections import Counter

from transformers import Trainer

from ..generation.drafter import BaseDrafter


def log_drafts(trainer: Trainer, drafter: BaseDrafter) -> None:
    """Let everything that a trainer logs say how its rollouts drafted since it last logged.

    `drafts/tokens_per_call` are tokens per sequence and call of the policy (plain rollouts: 1), `drafts/accepted` the
    drafted tokens that a verification accepts. Processes log their own.

    Example:
        >>> log_drafts(trainer, drafter)
        >>> trainer.train()
    """
    write, drafter.totals = trainer.log, Counter[str]()

    def log(logs: dict[str, float], start_time: float | None = None) -> None:
        found, drafter.totals = drafter.totals or Counter[str](), Counter[str]()
        if found["verifications"]:
            logs["drafts/tokens_per_call"] = found["tokens"] / found["calls"]
            logs["drafts/accepted"] = found["accepted"] / found["verifications"]
        write(logs, start_time)

    trainer.log = log
