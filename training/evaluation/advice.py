"""What pays on a machine: the cost of a block by its length, beside what a bench says of acceptance by position."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from ..results import DecodingResult
from .bench import CONTROL, PLAIN

_CONTEXT = 200
_REPEATS = 7


@torch.no_grad()
def block_costs(model: Any, lengths: Sequence[int], batch_size: int = 1) -> dict[int, float]:
    """Return the time of a block of so many tokens over that of one token, behind 200 tokens; medians by turns."""
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.arange(_CONTEXT + max(lengths), device=model.device).remainder(vocab_size).expand(batch_size, -1)
    start = model(ids[:, :_CONTEXT], use_cache=True).past_key_values
    times: dict[int, list[float]] = {length: [] for length in (1, *lengths)}
    for number in range(1 + _REPEATS):  # the first time sets things up
        for length, found in times.items():
            cache, block = copy.deepcopy(start), ids[:, _CONTEXT : _CONTEXT + length]
            began = time.perf_counter()
            model(block, past_key_values=cache, use_cache=True).logits[0, 0, 0].item()
            if number:
                found.append(time.perf_counter() - began)
    return {length: median(found) / median(times[1]) for length, found in times.items()}


@dataclass(frozen=True)
class Advice:
    """What is expected of a method with drafts of a length.

    Attributes:
        method: Its name.
        length: Tokens per draft.
        tokens_per_call: Of a verification.
        speed_up: Over plain decoding.
        measured: The median speed-up that the bench found, with drafts as long as they were there.
    """

    method: str
    length: int
    tokens_per_call: float
    speed_up: float
    measured: float


def advice_of(row: DecodingResult, plain_ms: float, costs: dict[int, float]) -> Advice | None:
    """Return the length of drafts that pays most for a method; None where nobody counted its drafts.

    A draft of k tokens is expected to yield 1 + the shares accepted up to k, for a block of k + 1 tokens and k parts of
    the time that its drafts took.
    """
    if not row.draft_length or not row.accepted_by_position or row.is_degenerate:
        return None
    found = []
    for length in range(1, row.draft_length + 1):
        tokens = 1 + sum(row.accepted_by_position[:length])
        cost = costs[length + 1] + (row.draft_ms or 0.0) / plain_ms * length / row.draft_length
        found.append(Advice(str(row.method), length, tokens, tokens / cost, row.speed_up))
    return max(found, key=lambda each: each.speed_up)


def recommendation(model: Any, rows: Sequence[DecodingResult]) -> Iterator[str]:
    """Say for every way of decoding and batch size what pays, after blocks were timed.

    Args:
        model: The backbone.
        rows: Of a bench of this model on this machine.
    """
    lengths = range(1, 2 + max((row.draft_length or 0 for row in rows), default=0))
    for batch_size in dict.fromkeys(row.batch_size for row in rows):
        costs = block_costs(model, lengths, batch_size)
        shown = ", ".join(f"{length}: {cost:.2f}" for length, cost in costs.items())
        yield f"A block of so many tokens costs, over one token, at batch {batch_size}: {shown}."
        for mode in dict.fromkeys(row.decoding for row in rows):
            here = {row.method: row for row in rows if (row.decoding, row.batch_size) == (mode, batch_size)}
            if PLAIN in here:
                yield f"{mode}, batch {batch_size}: {_best(here, costs)}"


def _best(rows: dict[str | None, DecodingResult], costs: dict[int, float]) -> str:
    plain_ms = rows[PLAIN].call_ms or 1.0
    found = [advice_of(row, plain_ms, costs) for name, row in rows.items() if name not in (PLAIN, CONTROL)]
    best = max((each for each in found if each is not None), key=lambda each: each.speed_up, default=None)
    if best is None:
        return "nothing can be said: no drafts were counted, or texts loop."
    words = f"{best.method} with num_assistant_tokens={best.length}: {best.tokens_per_call:.2f} per call"
    words += f", {best.speed_up:.2f} x plain expected ({best.measured:.2f} x measured as it was)"
    return f"take {words}." if best.speed_up > 1 else f"decode plainly; the best is {words}."
