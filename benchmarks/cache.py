"""What a verification costs by context: a cache that never moves, one that is repacked, and a plain step of one token.

    python benchmarks/cache.py
    python benchmarks/cache.py --shapes 1000x8 4000x4 --picture cache.png

A Llama of 4 layers, width 256, with grouped heads; blocks of 6 tokens, of which every sequence keeps a random number.
Processor time of one thread by turns, in milliseconds, medians; bytes are those that copying operators write.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tokenahead.generation.call.sequences import NewTokens
from tokenahead.generation.target.repacking import RepackedTarget
from tokenahead.generation.target.target import ColumnTarget, RowTarget
from tokenahead.generation.trees.contract import DraftTree

BLOCK, ROUNDS, CYCLES = 6, 9, 8
KINDS: dict[str, type[ColumnTarget]] = {"repacked": RepackedTarget, "never moves": RowTarget}
WRITES = ("copy_", "index_put_", "_index_put_impl_", "index_copy_")
COPIES = ("cat", "gather", "index", "index_select", "clone", "where", "masked_fill", "repeat", "constant_pad_nd")


class Moved(TorchDispatchMode):
    """Counts the bytes that copying operators write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name in WRITES:
            self.bytes += next(a.nbytes for a in reversed(args) if isinstance(a, torch.Tensor))
        elif name in COPIES and isinstance(out, torch.Tensor):
            self.bytes += out.nbytes
        return out


def llama() -> LlamaForCausalLM:
    """The backbone."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=16384, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def target(kind: type[ColumnTarget], model: LlamaForCausalLM, context: int, batch: int) -> ColumnTarget:
    """A target with a prompt in its cache."""
    cache, ids = DynamicCache(config=model.config), torch.randint(1, 512, (batch, context))
    model(ids, past_key_values=cache, logits_to_keep=1)
    room = {"limit": context + (ROUNDS + 2) * CYCLES * BLOCK, "span": BLOCK} if kind is RowTarget else {}
    return kind(model, cache, ids[:, 0], None, None, **room)


def cycle(made: ColumnTarget, batch: int) -> None:
    """One verification, after which sequences keep different numbers."""
    block = torch.randint(1, 512, (batch, BLOCK))
    made.forward(block, DraftTree.chain(block[:, 1:]), None)
    made.keep(NewTokens(torch.randint(1, BLOCK + 1, (batch,)).tolist(), block.device))


def plain(model: LlamaForCausalLM, context: int, batch: int) -> Callable[[], None]:
    """A step of transformers' own decoding."""
    cache, ids = DynamicCache(config=model.config), torch.randint(1, 512, (batch, context))
    model(ids, past_key_values=cache, logits_to_keep=1)

    def step() -> None:
        model(ids[:, :1], past_key_values=cache)

    return step


def measured(ways: dict[str, Callable[[], None]]) -> dict[str, tuple[float, float]]:
    """Milliseconds and megabytes of each way, by turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, run in ways.items():
            started = time.process_time()
            for _ in range(CYCLES):
                run()
            times[name].append((time.process_time() - started) * 1000 / CYCLES)
    found = {}
    for name, run in ways.items():
        with Moved() as moved:
            run()
        found[name] = statistics.median(times[name][1:]), moved.bytes / 1e6
    return found


def draw(path: str, rows: dict[tuple[int, int], dict[str, tuple[float, float]]]) -> None:
    """The cost of a cycle by context."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for batch in sorted({batch for _, batch in rows}):
        for name in next(iter(rows.values())):
            points = sorted((context, found[name][0]) for (context, own), found in rows.items() if own == batch)
            axes.plot(*zip(*points), marker="o", label=f"{name}, batch {batch}")
    axes.set(xlabel="tokens of context", ylabel="processor time of a cycle, ms")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["200x1", "200x8", "1000x8", "4000x1", "4000x4"])
    parser.add_argument("--picture", help="where to draw the cost of a cycle against the context")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, rows = llama(), {}
    table = Table("context x batch", "plain step", "repacked", "never moves", "ratio", "MB repacked", "MB never moves")
    for shape in arguments.shapes:
        context, batch = map(int, shape.split("x"))
        both = {name: target(kind, model, context, batch) for name, kind in KINDS.items()}
        ways = {name: partial(cycle, made, batch) for name, made in both.items()}
        found = measured({"plain step": plain(model, context, batch)} | ways)
        rows[context, batch] = found
        old, new = found["repacked"], found["never moves"]
        times = [f"{found[name][0]:.1f}" for name in found]
        table.add_row(shape, *times, f"{old[0] / new[0]:.2f}", f"{old[1]:.1f}", f"{new[1]:.1f}")
    Console(width=120).print(table)
    if arguments.picture:
        draw(arguments.picture, rows)


if __name__ == "__main__":
    main()
