"""What a head costs in a cycle, by family: its matrix product apart from drafting and verification.

    python benchmarks/heads.py                            # demo size, n = 16, r = 32
    python benchmarks/heads.py --size 85m --rank 8 16 32
    python benchmarks/heads.py --context 0 1 3            # leaves that read so many tokens before them
    python benchmarks/heads.py --rank 8 --window 8 16 --lexicon lexicon.json --out heads.json --figure heads.png
    python benchmarks/heads.py --rank 1 2 4 8 16 32 --window 8 --heads cp --costs costs.json      # by rank

One table per window, rank and context, medians in milliseconds of the same run: `forward` is the backbone on n tokens
behind a prompt, `head` the distribution behind a token (matrix products of leaves, n r v d, and sums), `draft`
everything from it to a sampled draft with its distributions, `warped` the same with each conditional warped, `verify`
block rule. `share` is (head + draft + verify) / (forward + head + draft + verify). `weights` are the head's and the
backbone's, and `products` its multiply-adds of a cycle as a share of the backbone's on n tokens. `kernels` are the
operators of head and draft, greedy / sampled: what an accelerator would launch. `--counts` prints these three alone,
which depend on no machine. Random weights: costs do not depend on what was learned.

With `--lexicon`, the rows of `lexicon.py`, tokens per call as decoded there are added to these costs: `kept/s` is what
both make of a second, `most/s` the tokens per second if every draft was kept (MtPC's "max"). `--figure` draws tokens
per call against milliseconds per call with lines of equal speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from cycles import counted
from decoding import SIZES, evabyte, forward
from measuring import seconds_of, show
from transformers import TemperatureLogitsWarper

from tokenahead import EvaByteForMTPC
from tokenahead.generation.call.processing import Processing
from tokenahead.generation.tensors.sampling import draw
from tokenahead.generation.verification import verify
from tokenahead.training.commands.bench import frontier_figure
from tokenahead.training.results import DecodingResult, MeasuredResults
from tokenahead.training.utils import replace_file

REPEATS = 40
HEADS = ("ff", "cp", "hmm", "btree")


@torch.no_grad()
def cycle(model: EvaByteForMTPC, prompt: torch.Tensor) -> dict[str, float]:
    """Median milliseconds of the parts of a sampled cycle."""
    window = model.window
    hidden, last, length = torch.randn(1, model.config.hidden_size), torch.tensor([100]), window - 1
    distribution, processing = (
        model.distribution_after(hidden, last, length),
        Processing([TemperatureLogitsWarper(0.7)]),
    )

    def warped(probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = processing.warp(probs)
        return draw(q), q

    tokens, q = distribution.sample_with_probs(length)
    p = torch.randn(1, window, model.config.vocab_size).softmax(-1)
    calls = {
        "forward": forward(model, {"input_ids": prompt}, window),
        "head": lambda: model.distribution_after(hidden, last, length),
        "draft": lambda: distribution.sample_with_probs(length),
        "warped": lambda: distribution.draft(warped, length),
        "verify": lambda: verify(tokens, q, p),
    }
    return {name: 1e3 * seconds_of(call, REPEATS, warm_up=5) for name, call in calls.items()}


def counts(model: EvaByteForMTPC, window: int) -> tuple[str, str]:
    """The head's weights and the backbone's, and its multiply-adds relative to those of the backbone on n tokens."""
    size, backbone = (sum(p.numel() for p in part.parameters()) for part in (model.head, model.model))
    return f"{size / 1e6:.1f} M / {backbone / 1e6:.1f} M", f"{size / (window * backbone):.1%}"


@torch.no_grad()
def kernels(model: EvaByteForMTPC) -> str:
    """Operators of head and draft behind a token, greedy and sampled, as they run on an accelerator."""
    hidden, last, length = torch.randn(1, model.config.hidden_size), torch.tensor([100]), model.window - 1
    found = []
    for sampled in (False, True):
        with counted() as counts:
            distribution: Any = model.distribution_after(hidden, last, length)
            getattr(distribution, "inner", distribution).counts_launches = True
            distribution.sample_with_probs(length) if sampled else distribution.greedy(length)
        found.append(counts.kernels)
    return " / ".join(map(str, found))


def accepted(rows: list[dict[str, Any]], cell: dict[str, Any]) -> float | None:
    """Tokens per call that `lexicon.py` decoded with such a head, the mean over seeds."""
    found = [row["decoded"] for row in rows if row["cell"] == cell]
    return statistics.mean(found) if found else None


def result(method: str, tokens: float, ms: float, plain_ms: float, drafts: int | None = None) -> DecodingResult:
    """A point of the figure."""
    return DecodingResult(
        name=method, method=method, decoding="T = 1", do_sample=True, backbone_calls=1000,
        new_tokens=round(1000 * tokens), seconds=ms, plain_seconds=tokens * plain_ms, draft_length=drafts,
        tokens_per_verification=tokens, call_ms=ms,
    )  # fmt: skip


def compare(
    model: EvaByteForMTPC, window: int, rank: int, context: int, learned: list[dict[str, Any]], arguments: Any
) -> list[Any]:
    """Print the table of a window, a rank and a context; returns name, tokens per call, milliseconds and drafts of each
    head."""
    prompt, found, points, shown = torch.randint(64, 320, (1, 100)), [], [], []
    cells = [{"head_type": kind, "window": window, "rank": 1 if kind == "ff" else rank} for kind in arguments.heads]
    for cell in cells:
        cell |= {"context": context} if context else {}
        cell |= {"leaf_size": arguments.leaf_size} if arguments.leaf_size and cell["head_type"] != "ff" else {}
        model.set_head(**cell)
        facts = [cell["head_type"], *counts(model, window), kernels(model)]
        found.append((cell, facts, {} if arguments.counts else cycle(model, prompt)))
    # the forward is the same for all: what rows differ in is noise
    forward = 0.0 if arguments.counts else statistics.median(cost["forward"] for _, _, cost in found)
    for cell, facts, cost in found:
        if cost:
            cost["forward"] = forward
            rest = cost["head"] + cost["draft"] + cost["verify"]
            total = forward + rest
            facts += [*(f"{value:.2f}" for value in cost.values()), f"{total:.2f}", f"{rest / total:.1%}"]
            arguments.rows.append(cell | cost | {"cycle": total})
            tokens = accepted(learned, cell)
            if tokens is not None:
                facts += [f"{tokens:.2f}", f"{1e3 * tokens / total:.0f}", f"{1e3 * window / total:.0f}"]
                points.append((f"{cell['head_type']}, drafts of {window - 1}", tokens, total, window - 1))
        shown.append(facts)
    timed = () if arguments.counts else ("forward", "head", "draft", "warped", "verify", "cycle", "share")
    rates = ("tokens/call", "kept/s", "most/s") if learned else ()
    title = f"{arguments.size}, n = {window}, r = {rank}, context {context}, {arguments.threads} thread(s); ms"
    show(("head type", "weights", "products", "kernels", *timed, *rates), shown, title, 160)
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--model", help="directory of a checkpoint; random weights of --size otherwise")
    parser.add_argument("--window", type=int, nargs="+", default=[16])
    parser.add_argument("--rank", type=int, nargs="+", default=[32])
    parser.add_argument("--context", type=int, nargs="+", default=[0])
    parser.add_argument("--leaf-size", type=int, help="small leaves of circuits")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--counts", action="store_true", help="count weights, products and kernels; measure no times")
    parser.add_argument("--lexicon", type=Path, help="rows of lexicon.py, for tokens per call")
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=HEADS)
    parser.add_argument("--costs", type=Path, help="file for the milliseconds of every head")
    parser.add_argument("--out", type=Path, help="what was measured, as `tokenahead bench` writes it")
    parser.add_argument("--figure", type=Path, help="picture of it; without --lexicon, of the file --out names")
    arguments = parser.parse_args()
    if arguments.figure and not arguments.lexicon:
        frontier_figure(MeasuredResults.from_json(arguments.out)).savefig(arguments.figure, dpi=120)
        return
    torch.set_num_threads(arguments.threads)
    model = evabyte(arguments.model, arguments.size)
    learned, results = json.loads(arguments.lexicon.read_text()) if arguments.lexicon else [], []
    arguments.rows = []
    for window, rank, context in product(arguments.window, arguments.rank, arguments.context):
        results += compare(model, window, rank, context, learned, arguments)
    if arguments.costs:
        replace_file(arguments.costs, json.dumps(arguments.rows, indent=1))
    if results:
        plain = 1e3 * seconds_of(forward(model, {"input_ids": torch.randint(64, 320, (1, 100))}, 1), REPEATS, warm_up=5)
        points = [result(name, tokens, ms, plain, drafts) for name, tokens, ms, drafts in results]
        measured = MeasuredResults(
            results=[result("plain", 1.0, plain, plain), *points],
            dataset_name="lexicon",
            dataset_description="the source of benchmarks/lexicon.py; times of a model of random weights",
            hardware=f"{arguments.threads} thread(s)",
            dtype="float32",
            command="python benchmarks/heads.py",
            library_version=version("tokenahead"),
        )
        if arguments.out:
            measured.to_json(arguments.out)
        if arguments.figure:
            frontier_figure(measured).savefig(arguments.figure, dpi=120)


if __name__ == "__main__":
    main()
