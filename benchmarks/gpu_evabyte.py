"""EvaByte with the heads of MtPC's tables: milliseconds per cycle, of them drafting and verification.

    python benchmarks/gpu.py --evabyte            # the true size, 6.5B random weights, in bfloat16
    python benchmarks/gpu.py --evabyte --smoke    # a tiny shape on any machine

Where drafting and verification begin and end the host waits for the device: what is measured is what they take, and not
what launching them takes. With the acceptance of a paper's table as the other factor this is its throughput.
"""

from __future__ import annotations

import gc
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

TINY = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, window_size=64, chunk_size=16
)
KINDS = "cp", "hmm", "btree"
CONTEXTS = {"ff": 1, "hmm": 8}
"""Ranks of the heads that are timed with leaves that read the bytes before, too."""


@dataclass
class Cell:
    """Medians of the cycles of one head, in milliseconds; a replayed one has no parts."""

    kind: str
    window: int
    rank: int
    context: int
    batch: int
    mode: str
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
def timed(device: torch.device, session: Any, has_parts: bool) -> Iterator[dict[str, list[float]]]:
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

    parts = {
        (SpeculativeLoop, "_verified"): "verify",
        (SpeculativeLoop, "_cycle"): "cycle",
        (session, "propose"): "draft",
    }
    kept = parts if has_parts else {(RecordedLoop, "_cycle"): "cycle"}  # nobody waits within a recording
    functions = {key: vars(key[0])[key[1]] for key in kept}
    for (kind, name), said in kept.items():
        setattr(kind, name, waiting(said, functions[kind, name]))
    try:
        yield times
    finally:
        for (kind, name), function in functions.items():
            setattr(kind, name, function)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(model: Any, head: tuple[str, int, int, int], batch: int, mode: str, length: int, new_tokens: int) -> Cell:
    """One cell of the table; `model` has the head."""
    torch.manual_seed(0)
    ids = torch.randint(64, 320, (batch, length), device=model.device)
    options = dict(do_sample=True, top_k=0, max_new_tokens=new_tokens, eos_token_id=None, return_dict_in_generate=True)
    options |= {"cache_implementation": "static"} if mode == "recorded" else {}
    untyped(model).generate(ids, **options)  # kernels are loaded, and cycles recorded
    gc.collect()
    with timed(model.device, HeadSession, mode == "eager") as times:
        out = untyped(model).generate(ids, **options)
    middle = {name: statistics.median(values or [0.0]) for name, values in times.items()}
    return Cell(*head, batch, mode, **middle, tokens_per_call=out.speculation.tokens_per_call)


def run(arguments: Any, made_on: Callable[[torch.device], Any], keep: Callable[[list[Cell]], None]) -> list[Cell]:
    """Measure head by head, as far as the time goes, and `keep` all so far; the backbone is made once per window."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begun, cells = time.perf_counter(), list[Cell]()
    model, made = None, 0
    for head in heads_of(arguments.windows, arguments.ranks):
        if time.perf_counter() - begun > arguments.seconds:
            print(f"left out for want of time: {head}", flush=True)
            continue
        kind, window, rank, context = head
        with made_on(device):
            if made != window:
                model = None  # before the next one takes its room
                config = EvaByteConfig(**(TINY if arguments.smoke else {}), num_pred_heads=window)
                model, made = EvaByteForMTPC(config).to(device).eval(), window
            model.set_head(head_type=kind, rank=rank, window=window, context=context)
        for batch, mode in product(arguments.batches, ("eager", "recorded")):
            cells.append(measure(model, head, batch, mode, 16 if arguments.smoke else 1024, arguments.new_tokens))
            print(asdict(cells[-1]), flush=True)
            keep(cells)
    names = "head", "n", "r", "context", "batch", "mode", "cycle, ms", "drafting", "verification", "tokens per call"
    shown = ([f"{each:.2f}" if isinstance(each, float) else each for each in astuple(cell)] for cell in cells)
    show(names, shown, "EvaByte")
    return cells
