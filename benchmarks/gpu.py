"""Plain and speculative decoding on a GPU, eager and compiled, cycle by cycle, with acceptance by plan.

    python benchmarks/gpu.py --json gpu.json              # what nine minutes hold
    python benchmarks/gpu.py --shapes 8B --batches 1 --drafts EAGLE-3 --modes compiled
    python benchmarks/gpu.py --all --seconds 3600         # also batch 32 and contexts of 4,096
    python benchmarks/gpu.py --evabyte                    # EvaByte with the heads of MtPC's tables (`gpu_evabyte`)
    python benchmarks/gpu.py --all-parts --seconds 600    # all that a GPU is to be asked (`gpu_parts`)
    python benchmarks/gpu.py --smoke                      # a tiny shape on any machine

Random weights of true shapes, made on the GPU in bfloat16; nothing is loaded. A verification costs what it costs, and
then accepts by plan: each of 5 drafts with probability .7 if those before it are, from a fixed seed and alike for all
drafters (`planned`). A cycle lasts from one verification to the next. Every row begins with nothing compiled, and
makes a first call, in which forwards are compiled and graphs recorded, and further ones, the last of which is shown;
the JSON has the cycles of all calls. Milliseconds per token are those of the mean cycle by its tokens, per sequence.
A row that would not end in time, as the longest one of its kind says, is left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import gpu_evabyte
import gpu_parts
import torch
import transformers
from measuring import show
from planned import Clock, plan_of, planned
from torch._dynamo.callback import CallbackArgs, callback_handler
from transformers import LlamaConfig, LlamaForCausalLM

from tokenahead import BlockDrafter, EagleHead, MTPHeads, NgramDrafter
from tokenahead.generation.backbone.wrapped_models import untyped

DRAFTS, PERIOD = 5, 64
_LLAMA = {"vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8}
SHAPES: dict[str, dict[str, Any]] = {
    "1B": {**_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    "8B": {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    "tiny": {
        "vocab_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 4,
    },
}  # fmt: skip
"""Llama 3.2 1B's (which ties its embeddings), Llama 3.1 8B's, and one for tests."""
MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "recorded": {"cache_implementation": "static", "disable_compile": True},
    "compiled": {"cache_implementation": "static"},
}
"""Options of `generate`, for plain decoding and for drafts alike; the last two record the cycles of drafts."""


COLUMNS = (
    "shape", "batch", "context", "drafts", "mode", "first call, s", "cycle, ms: first", "median", "90 %", "longest",
    "tokens per call", "ms per token", *(f"x plain {mode}" for mode in MODES), "peak GiB", "compiled per call",
    "recorded per call",
)  # fmt: skip


def _few(model: LlamaForCausalLM) -> int:
    return min(32000, model.config.vocab_size // 2)


def _eagle3(model: LlamaForCausalLM) -> EagleHead:
    return EagleHead.from_backbone(model, version=3, draft_vocab_size=_few(model))


DRAFTERS: dict[str, Callable[[LlamaForCausalLM], Any]] = {
    "n-grams": lambda model: NgramDrafter(num_tokens=DRAFTS).attach(model),
    "EAGLE-3": _eagle3,
    "EAGLE-3-tree": _eagle3,
    "HMM": lambda model: MTPHeads.from_backbone(
        model, window=DRAFTS + 1, head_type="hmm", rank=8, draft_vocab_size=_few(model)
    ),
    "block": lambda model: BlockDrafter.from_backbone(
        model, law="markov", layers=3, block_size=DRAFTS, draft_vocab_size=_few(model)
    ),
    "EAGLE-1": lambda model: EagleHead.from_backbone(model, version=1),
}


@dataclass
class Call:
    """One call of `generate`; cycles in milliseconds, the prompt's own pass left out."""

    seconds: float
    cycles: list[float]
    tokens_per_call: float
    events: dict[str, int]
    graphs: dict[str, Any] | None = None


@dataclass
class Row:
    """All calls of one way to decode."""

    shape: str
    batch: int
    context: int
    drafts: str
    mode: str
    calls: list[Call] = field(default_factory=list)
    peak_gib: float = 0.0
    seconds: float = 0.0
    error: str | None = None

    @property
    def ms_per_token(self) -> float | None:
        """Of the last call."""
        return statistics.fmean(self.calls[-1].cycles) / self.calls[-1].tokens_per_call if self.calls else None


def backbone(shape: str, device: torch.device, longest: int) -> LlamaForCausalLM:
    """Random weights of a shape."""
    config = LlamaConfig(
        **SHAPES[shape], max_position_embeddings=longest, tie_word_embeddings=shape != "8B", eos_token_id=None,
        pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device).eval()


@contextmanager
def made_on(device: torch.device) -> Iterator[None]:
    """New parameters are made on the device, in bfloat16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def prompt_of(shape: str, batch: int, context: int, device: torch.device) -> torch.Tensor:
    """Texts that repeat themselves, so that look-ups find drafts."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, SHAPES[shape]["vocab_size"], (batch, PERIOD), generator=generator)
    return ids.repeat(1, -(-context // PERIOD))[:, :context].to(device)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts what PyTorch compiles and records inside, by kind."""
    counts = Counter[str]()

    def count(event: CallbackArgs) -> None:
        counts[event.callback_trigger.name.lower()] += 1

    callback_handler.register_start_callback(count)
    try:
        yield counts
    finally:
        callback_handler.remove_start_callback(count)


def decode(
    model: LlamaForCausalLM, drafter: Any, ids: torch.Tensor, plan: torch.Tensor, new_tokens: int, **options: Any
) -> Call:
    """One measured call; `drafter` None decodes plainly."""
    clock = Clock(ids.device)
    torch.manual_seed(0)
    options |= {"stopping_criteria": [clock]} if drafter is None else {"assistant_model": drafter}
    started = time.perf_counter()
    with counted() as counts, nullcontext([]) if drafter is None else planned(drafter, plan, clock) as verifiers:
        options |= {"attention_mask": torch.ones_like(ids), "return_dict_in_generate": True}
        out = untyped(model).generate(ids, max_new_tokens=new_tokens, **options)
    cycles, seconds = clock.milliseconds(), time.perf_counter() - started
    told = None if drafter is None else out.speculation.graphs
    rate = verifiers[-1].tokens_per_call(new_tokens) if verifiers else 1.0
    return Call(seconds, cycles, rate, dict(counts), None if told is None else asdict(told))


def forget(model: LlamaForCausalLM) -> None:
    """Begin as a new process does: nothing is compiled, recorded or cached."""
    torch._dynamo.reset()
    for name in ("_compiled_call", "_last_compile_config", "_previous_max_cache_length"):
        vars(model).pop(name, None)
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure(row: Row, model: LlamaForCausalLM, arguments: argparse.Namespace) -> None:
    """Fill in a row; an error ends this row alone."""
    started = time.perf_counter()
    forget(model)
    try:
        with made_on(model.device):
            drafter = None if row.drafts == "none" else DRAFTERS[row.drafts](model)
        ids = prompt_of(row.shape, row.batch, row.context, model.device)
        plan = plan_of(arguments.acceptance, arguments.new_tokens, row.batch).to(model.device)
        options = MODES[row.mode] | ({"do_sample": True, "top_k": 0} if arguments.sampled else {"do_sample": False})
        if drafter is not None:
            drafter.eval() if isinstance(drafter, torch.nn.Module) else None
            options["num_assistant_tokens"] = DRAFTS
            if row.drafts.endswith("tree"):
                options["draft_tree"] = {"depth": DRAFTS, "top_k": 4, "total_tokens": 24}
        for _ in range(arguments.calls):
            row.calls.append(decode(model, drafter, ids, plan, arguments.new_tokens, **options))
    except Exception as error:  # the other rows are worth having
        row.error = f"{type(error).__name__}: {error}"
    if model.device.type == "cuda":
        row.peak_gib = torch.cuda.max_memory_allocated() / 2**30
    row.seconds = time.perf_counter() - started


def rows_of(arguments: argparse.Namespace) -> Iterator[Row]:
    """The rows in the order of their worth: the plain ones of a cell first, small batches before large ones."""
    for context, batch, shape in product(arguments.contexts, arguments.batches, arguments.shapes):
        for drafts, mode in product(arguments.drafts, arguments.modes):
            yield Row(shape, batch, context, drafts, mode)


def speed_ups(row: Row, rows: list[Row]) -> list[float | None]:
    """Speed-ups against plain decoding of the same cell, in every mode."""
    cell = {
        other.mode: other.ms_per_token
        for other in rows
        if (other.shape, other.batch, other.context, other.drafts) == (row.shape, row.batch, row.context, "none")
    }
    return [cell[m] / row.ms_per_token if cell.get(m) and row.ms_per_token else None for m in MODES]


def shown(row: Row, rows: list[Row]) -> list[str]:
    """The cells of a row."""
    head = [row.shape, str(row.batch), str(row.context), row.drafts, row.mode]
    if row.error or not row.calls:
        return [*head, row.error or "no calls"]
    last, rate = row.calls[-1], speed_ups(row, rows)
    ordered = sorted(last.cycles)
    times = last.cycles[0], statistics.median(ordered), ordered[int(0.9 * (len(ordered) - 1))], ordered[-1]
    compiled = " + ".join(str(call.events.get("dynamo", 0)) for call in row.calls)
    ours = ((call.graphs or {}).get("recorded", 0) for call in row.calls)
    recorded = " + ".join(str(call.events.get("cudagraph_recording", 0) + own) for call, own in zip(row.calls, ours))
    return [
        *head, f"{row.calls[0].seconds:.1f}", *(f"{each:.2f}" for each in times), f"{last.tokens_per_call:.2f}",
        f"{row.ms_per_token:.2f}", *("-" if each is None else f"{each:.2f}" for each in rate), f"{row.peak_gib:.1f}",
        compiled, recorded,
    ]  # fmt: skip


def store(path: Path, facts: dict[str, Any], rows: list[Row] | list[gpu_evabyte.Cell]) -> None:
    """Write everything so far, so that a run that is ended from outside leaves it."""
    made = path.with_suffix(".tmp")
    made.write_text(json.dumps(facts | {"rows": [asdict(row) for row in rows]}))
    made.replace(path)


def facts_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What figures are worth nothing without."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    return {"card": card, "torch": torch.__version__, "transformers": transformers.__version__, "arguments": options}


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure row by row, as far as the time goes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts, begun, rows = facts_of(arguments), time.perf_counter(), list[Row]()
    longest, model, loaded = dict[tuple[str, str], float](), None, None
    for row in rows_of(arguments):
        kind = row.shape, row.mode
        if time.perf_counter() - begun + longest.get(kind, 0.0) > arguments.seconds:
            print(f"left out for want of time: {row.shape}, batch {row.batch}, {row.drafts}, {row.mode}", flush=True)
            continue
        if loaded != row.shape:
            del model
            gc.collect()
            with made_on(device):
                model = backbone(row.shape, device, max(arguments.contexts) + 2 * arguments.new_tokens)
            loaded = row.shape
        measure(row, model, arguments)
        longest[kind] = max(longest.get(kind, 0.0), row.seconds)
        rows.append(row)
        print(f"{time.perf_counter() - begun:.0f} s:", *shown(row, rows), flush=True)
        if arguments.json:
            store(arguments.json, facts, rows)
    title = f"{facts['card']}, torch {facts['torch']}, transformers {facts['transformers']}"
    show(COLUMNS, (shown(row, rows) for row in rows), title, 220)
    return rows


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1B", "8B"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512])
    parser.add_argument("--drafts", nargs="+", choices=["none", *DRAFTERS], default=["none", *DRAFTERS])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--all", action="store_true", help="also batch 32 and contexts of 4,096")
    parser.add_argument("--sampled", action="store_true", help="sample at temperature 1; greedy otherwise")
    parser.add_argument("--acceptance", type=float, default=0.7, help="of every draft, where those before it are")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--calls", type=int, default=3, help="of every row; the first one compiles")
    parser.add_argument("--seconds", type=float, default=520, help="no row begins that would not end by then")
    parser.add_argument("--json", type=Path, help="where to write the cycles of all calls")
    parser.add_argument("--all-parts", action="store_true", help="all that a GPU is to be asked, in `--seconds`")
    parser.add_argument("--windows", nargs="+", type=int, default=[8, 16], help="of EvaByte's heads")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 8, 32, 64, 128], help="of EvaByte's circuits")
    parser.add_argument("--evabyte", action="store_true", help="EvaByte with all heads of MtPC's tables, instead")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, to see that everything runs")
    arguments = parser.parse_args(words)
    if arguments.smoke:
        arguments.shapes, arguments.batches, arguments.contexts = ["tiny"], [1, 2], [16]
        arguments.new_tokens, arguments.calls, arguments.windows, arguments.ranks = 12, 2, [8], [4]
    elif not torch.cuda.is_available():
        parser.error("this machine has no GPU: --smoke runs a tiny shape")
    if arguments.all:
        arguments.batches, arguments.contexts = [1, 8, 32], [512, 4096]
    if arguments.all_parts:
        if any(part["code"] for part in gpu_parts.run(arguments).values()):
            raise SystemExit("a part failed")
        return
    if arguments.evabyte:
        facts = facts_of(arguments)
        gpu_evabyte.run(arguments, made_on, lambda cells: arguments.json and store(arguments.json, facts, cells))
        return
    if any(row.error for row in run(arguments)):
        raise SystemExit("a row failed")


if __name__ == "__main__":
    main()
