"""What a drafter accepts along known texts, and whether another convention accepts more of the very same ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...modeling.heads.losses import IGNORE
from ..evaluation.drafts import Batch, drafted_probs
from ..evaluation.expected import ExpectedCalls
from .trials import replaced

_LEAST, _ERRORS = 0.02, 3.0
"""Share of the calls that a convention must save to be the better one, and their least number of standard errors."""
_MORE = 1.25
"""Times the calls per token, which tell one form of prompts from the other."""


@dataclass(frozen=True)
class Drafted:
    """Expected greedy calls along texts.

    Attributes:
        calls: Of every text.
    """

    calls: ExpectedCalls

    @property
    def tokens_per_call(self) -> float:
        """Tokens of a verification."""
        return self.calls.tokens_per_call

    @property
    def by_position(self) -> list[float]:
        """Shares of verifications that accept at least 1, 2, ... drafts."""
        return self.calls.by_position


def answered(prompts: Mapping[str, Tensor], new: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Return prompts, padded on the left, and their answers as a batch that scores the answers, padded on the right."""
    rows = [ids[mask.bool()].tolist() for ids, mask in zip(prompts["input_ids"], prompts["attention_mask"])]
    length, device = max(len(row) + len(ids) for row, ids in zip(rows, new)), prompts["input_ids"].device
    made = {"input_ids": 0, "labels": IGNORE, "attention_mask": 0}
    batch = {name: torch.full((len(rows), length), fill, device=device) for name, fill in made.items()}
    for index, (row, ids) in enumerate(zip(rows, new)):
        end = len(row) + len(ids)
        batch["input_ids"][index, :end] = torch.tensor([*row, *ids], device=device)
        batch["labels"][index, len(row) : end] = batch["input_ids"][index, len(row) : end]
        batch["attention_mask"][index, :end] = 1
    return batch


def along(drafter: Any, texts: Sequence[Batch], length: int, shift: int = 0) -> Drafted:
    """Return the expected calls with drafts of `length` tokens.

    Args:
        drafter: One with distributions (`has_probs`), in evaluation mode.
        texts: Batches of the backbone's own texts (`answered`).
        length: m.
        shift: Draft j is compared with the backbone's choice for draft j + `shift`.
    """
    longest = drafter.longest_draft() or length + abs(shift)
    length = max(min(length, longest - abs(shift)), 1)
    return Drafted(_calls(_agreement(drafter, batch, length, shift) for batch in texts))


def reach(drafter: Any, texts: Sequence[Batch], length: int) -> list[float]:
    """Return the shares of verifications that would accept 1 .. m drafts, if each were made as the first one is."""
    found = []
    for batch in texts:
        agrees, positions = _agreement(drafter, batch, 1, 0)  # [B, L, 1]
        ahead = [torch.nn.functional.pad(agrees[..., 0], (0, by))[:, by:] for by in range(length)]
        found.append((torch.stack(ahead, -1), positions))
    return _calls(found).by_position


@torch.no_grad()
def _agreement(drafter: Any, batch: Batch, length: int, shift: int) -> tuple[Tensor, Tensor]:
    """Return which drafts are the backbone's own choices, [B, L, m], and the positions that drafts follow, [B, L]."""
    positions = torch.zeros(batch["input_ids"].shape, dtype=torch.bool)
    agrees = torch.zeros(*positions.shape, length, dtype=torch.float64)
    for probs in drafted_probs(drafter, batch, length + abs(shift)):
        draft, target = probs.draft.argmax(-1), probs.target.argmax(-1)  # [N, m + |shift|]
        chosen = draft[:, max(-shift, 0) :][:, :length] == target[:, max(shift, 0) :][:, :length]
        at = probs.rows.cpu(), probs.columns.cpu()
        positions[at], agrees[at] = True, chosen.double().cpu()
    return agrees, positions


def _calls(found: Iterable[tuple[Tensor, Tensor]]) -> ExpectedCalls:
    return reduce(add, (ExpectedCalls.along(agrees.cumprod(-1), positions) for agrees, positions in found))


@contextmanager
def remembered(model: PreTrainedModel) -> Iterator[None]:
    """Run a model once for every batch, with the states of all layers, for all trials along the same texts."""
    forward, known = model.forward, dict[bytes, Any]()

    def recalled(input_ids: Tensor, **options: Any) -> Any:
        key = input_ids.cpu().numpy().tobytes()
        if key not in known:
            known[key] = forward(input_ids, **options | {"output_hidden_states": True})
        return known[key]

    with replaced(model, forward=recalled):
        yield


def is_better(other: Drafted, base: Drafted) -> bool:
    """Return whether a convention saves calls of the same texts, more than chance among them would."""
    saved = base.calls.calls - other.calls.calls  # [N]
    error = float(saved.std() * len(saved) ** 0.5) if len(saved) > 1 else 0.0
    total = float(saved.sum())
    return total > _LEAST * float(base.calls.calls.sum()) and total > _ERRORS * error


def is_easier(other: Drafted, base: Drafted) -> bool:
    """Return whether other texts take fewer calls per token, more than chance among their tokens would."""
    tokens = [float(each.calls.tokens.sum()) for each in (base, other)]
    rates = [float(each.calls.calls.sum()) / count for each, count in zip((base, other), tokens)]
    error = sum(rate * (1 - rate) / count for rate, count in zip(rates, tokens)) ** 0.5
    return rates[0] > _MORE * rates[1] and rates[0] - rates[1] > _ERRORS * error
