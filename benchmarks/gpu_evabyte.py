"""EvaByte with the heads of MtPC's tables: milliseconds per cycle, of them drafting and verification.

    python benchmarks/gpu.py --evabyte            # the true size, 6.5B random weights, in bfloat16
    python benchmarks/gpu.py --evabyte --smoke    # a tiny shape on any machine

Where drafting and verification begin and end the host waits for the device: what is measured is what they take, and not
what launching them takes. With the acceptance of a paper's table as the other factor this is its throughput.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from itertools import product
from typing import Any

import torch
from measuring import show

from tokenahead import EvaByteConfig, EvaByteForMTPC
from tokenahead.generation.backbone.wrapped_models import untyped
from tokenahead.generation.loop import SpeculativeLoop
from tokenahead.generation.recorded import RecordedLoop
from tokenahead.modeling.heads.attached import HeadSession

TINY = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, chunk_size=16)
KINDS = "cp", "hmm", "btree"
CONTEXTS = {"ff": 1, "hmm": 8}
"""Ranks of the heads that are timed with leaves that read the bytes before, too."""


@dataclass
class Cell:
    """Medians of the cycles of one head, in milliseconds."""

    kind: str
    window: int
    rank: int
    context: int
    batch: int
    cycle: float
    draft: float
    verify: float
    tokens_per_call: float


def heads_of(windows: list[int], ranks: list[int]) -> Iterator[tuple[str, int, int, int]]:
    """Kind, window, rank and context of every head."""
    for window in windows:
        yield "ff", window, 1, 0
        yield from ((kind, window, rank, 0) for kind, rank in product(KINDS, ranks))
        yield from ((kind, window, CONTEXTS[kind], context) for kind, context in product(CONTEXTS, (1, 3)))


@contextmanager
def timed(device: torch.device, session: Any) -> Iterator[dict[str, list[float]]]:
    """Times of cycles, drafts and verifications inside."""
    times: dict[str, list[float]] = {"cycle": [], "draft": [], "verify": []}

    def waiting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            _wait(device)
            started = time.perf_counter()
            result = function(*args, **kwargs)
            _wait(device)
            times[name].append(1000 * (time.perf_counter() - started))
            return result

        return run

    kept = [(SpeculativeLoop, "_verified"), (SpeculativeLoop, "_cycle"), (RecordedLoop, "_cycle")]
    functions = [vars(kind)[name] for kind, name in kept]
    for (kind, name), function, said in zip(kept, functions, ("verify", "cycle", "cycle")):
        setattr(kind, name, waiting(said, function))
    propose = session.propose
    session.propose = waiting("draft", propose)
    try:
        yield times
    finally:
        session.propose = propose
        for (kind, name), function in zip(kept, functions):
            setattr(kind, name, function)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(model: Any, head: tuple[str, int, int, int], batch: int, length: int, new_tokens: int) -> Cell:
    """One cell of the table; `model` has the head."""
    torch.manual_seed(0)
    ids = torch.randint(64, 320, (batch, length), device=model.device)
    options = dict(do_sample=True, top_k=0, max_new_tokens=new_tokens, eos_token_id=None, return_dict_in_generate=True)
    untyped(model).generate(ids, **options | {"max_new_tokens": 8})  # kernels are loaded
    with timed(model.device, HeadSession) as times:
        out = untyped(model).generate(ids, **options)
    middle = {name: statistics.median(values) for name, values in times.items()}
    return Cell(*head, batch, **middle, tokens_per_call=out.speculation.tokens_per_call)


def run(arguments: Any, made_on: Callable[[torch.device], Any]) -> list[Cell]:
    """Measure head by head, as far as the time goes; the backbone is made once per window."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begun, cells = time.perf_counter(), list[Cell]()
    windows, ranks = ([8], [1, 4]) if arguments.smoke else ([8, 16], [1, 8, 32, 64, 128])
    for head in heads_of(windows, ranks):
        if time.perf_counter() - begun > arguments.seconds:
            print(f"left out for want of time: {head}", flush=True)
            continue
        kind, window, rank, context = head
        config = EvaByteConfig(
            **(TINY if arguments.smoke else {}), num_pred_heads=window,
            mtp_head={"head_type": kind, "rank": rank, "window": window, "context": context},
        )  # fmt: skip
        with made_on(device):
            model = EvaByteForMTPC(config).to(device).eval()
        for batch in arguments.batches:
            cells.append(measure(model, head, batch, 16 if arguments.smoke else 1024, arguments.new_tokens))
            print(asdict(cells[-1]), flush=True)
        del model
    names = "head", "n", "r", "context", "batch", "cycle, ms", "drafting", "verification", "tokens per call"
    shown = ([f"{each:.2f}" if isinstance(each, float) else each for each in astuple(cell)] for cell in cells)
    show(names, shown, "EvaByte")
    return cells
