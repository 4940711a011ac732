"""Peak memory of the head loss from rank 1 to rank 32, above parameters, gradients and optimiser state.

    python benchmarks/head_memory.py                 # btree, n = 16, V = 320, d = 192, 8192 positions
    python benchmarks/head_memory.py --head cp --ranks 1 8 32

Every rank runs in a process of its own: two training steps with AdamW, then the peak over a third (peak_memory.py).
`logits` is what a computation without chunks would hold in leaf logits alone.
"""

from __future__ import annotations

import argparse

import torch
from peak_memory import Memory, in_own_process, peak_of
from rich.console import Console
from rich.table import Table

from tokenahead import MTPHeadConfig
from tokenahead.modeling.heads.losses import head_loss
from tokenahead.modeling.heads.registry import build_head, init_head


def step(head: torch.nn.Module, config: MTPHeadConfig, optimizer: torch.optim.Optimizer, positions: int) -> None:
    """One training step on random states and tokens."""
    hidden = torch.randn(1, positions, config.hidden_size, requires_grad=True)
    targets = torch.randint(config.vocab_size, (1, positions, config.window))
    head_loss(head, config, hidden, targets, None)[0].backward()
    optimizer.step()
    optimizer.zero_grad()


def peak(kind: str, rank: int, window: int, positions: int, hidden: int, vocab: int) -> Memory:
    """What a training step of one head takes."""
    config = MTPHeadConfig(head_type=kind, window=window, rank=rank, hidden_size=hidden, vocab_size=vocab)
    head = build_head(config, hidden, vocab)
    for module in head.modules():
        init_head(module)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-4, foreach=False, fused=True)
    return peak_of(head, lambda: step(head, config, optimizer, positions))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head", choices=("cp", "hmm", "btree"), default="btree")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--vocab", type=int, default=320)
    arguments = parser.parse_args()
    table = Table(title=f"{arguments.head}, n = {arguments.window}, {arguments.positions} positions, MiB")
    for column in ("rank", "parameters", "logits", "model, gradients, optimiser", "peak above"):
        table.add_column(column, justify="right")
    sizes = (arguments.window, arguments.positions, arguments.hidden, arguments.vocab)
    for rank in arguments.ranks:
        parameters, kept, above = in_own_process(peak, arguments.head, rank, *sizes)
        logits = arguments.positions * arguments.window * rank * arguments.vocab * 4 / 2**20
        table.add_row(str(rank), f"{parameters / 1e6:.1f} M", f"{logits:.0f}", f"{kept:.0f}", f"{above:.0f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
