"""What a head costs in a cycle, by family: its own matrix product apart from drafting and verification.

    python benchmarks/heads.py                            # demo size, n = 16, r = 32
    python benchmarks/heads.py --size 85m --rank 8 16 32

One table per rank, medians in milliseconds of the same run: `forward` is the backbone on n tokens behind a prompt,
`head` the distribution behind a token (matrix products of leaves, n r v d, and sums), `draft` everything from it to a
sampled draft with its distributions, `warped` the same with each conditional warped, `verify` block verification.
`share` is (head + draft + verify) / (forward + head + draft + verify). `weights` are the head's beside the backbone's,
and `products` its multiply-adds of a cycle as a share of the backbone's on n tokens; `--counts` prints these two alone,
which depend on no machine. Random weights: costs do not depend on what was learned.
"""

from __future__ import annotations

import argparse

import torch
from decoding import SIZES, load, seconds_of
from rich.console import Console
from rich.table import Table
from transformers import TemperatureLogitsWarper

from tokenahead import EvaByteForMTPC
from tokenahead.generation.call.processing import Processing
from tokenahead.generation.verification import verify
from tokenahead.modeling.sampling import draw

REPEATS = 40


@torch.no_grad()
def cycle(model: EvaByteForMTPC, prompt: torch.Tensor) -> dict[str, float]:
    """Median milliseconds of the parts of a sampled cycle."""
    window = model.window
    cache = model(prompt).past_key_values
    block = prompt[:, :window]

    def forward() -> None:
        model(block, past_key_values=cache, use_cache=True)
        cache.crop(-window)

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
        "forward": forward,
        "head": lambda: model.distribution_after(hidden, last, length),
        "draft": lambda: distribution.sample_with_probs(length),
        "warped": lambda: distribution.draft(warped, length),
        "verify": lambda: verify(tokens, q, p),
    }
    for call in calls.values():
        seconds_of(call, 5)
    return {name: 1e3 * seconds_of(call, REPEATS) for name, call in calls.items()}


def counts(model: EvaByteForMTPC, window: int) -> tuple[str, str]:
    """The head's weights beside the backbone's, and its multiply-adds relative to those of the backbone on n tokens."""
    size, backbone = (sum(p.numel() for p in part.parameters()) for part in (model.head, model.model))
    return f"{size / 1e6:.1f} M / {backbone / 1e6:.1f} M", f"{size / (window * backbone):.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--model", help="directory of a checkpoint; random weights of --size otherwise")
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--rank", type=int, nargs="+", default=[32])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--counts", action="store_true", help="count weights and products, and measure no times")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = load(arguments)
    prompt = torch.randint(64, 320, (1, 100))
    for rank in arguments.rank:
        table = Table(title=f"{arguments.size}, n = {arguments.window}, r = {rank}, {arguments.threads} thread(s); ms")
        timed = () if arguments.counts else ("forward", "head", "draft", "warped", "verify", "cycle", "share")
        for column in ("head type", "weights", "products", *timed):
            table.add_column(column, justify="right")
        for kind in ("ff", "cp", "hmm", "btree"):
            model.set_head(head_type=kind, window=arguments.window, rank=1 if kind == "ff" else rank)
            told = counts(model, arguments.window)
            if arguments.counts:
                table.add_row(kind, *told)
                continue
            cost = cycle(model, prompt)
            rest = cost["head"] + cost["draft"] + cost["verify"]
            total = cost["forward"] + rest
            shown = (*(f"{cost[name]:.2f}" for name in cost), f"{total:.2f}", f"{rest / total:.1%}")
            table.add_row(kind, *told, *shown)
        Console(width=120).print(table)


if __name__ == "__main__":
    main()
