"""Peak memory of a training step, above what stays between steps: heads by rank, EAGLE-3 by steps, modules by depth.

    python benchmarks/memory.py heads                  # btree, n = 16, V = 320, d = 192, 8192 positions
    python benchmarks/memory.py heads --head cp --counts 1 8 32
    python benchmarks/memory.py eagle                  # 1, 3 and 7 steps, vocabulary 32k, 2048 tokens
    python benchmarks/memory.py modules                # D = 1, 2, 3, vocabulary 32k, 1024 tokens, checkpointing on

Every row runs in a separate process: two updates, then the peak over a third. Freed memory is returned to the system at
once, so that peaks are those of tensors; the peak of the resident memory is reset and read through /proc (Linux only).
`logits` of heads is what a computation without chunks would hold in leaf logits alone.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measuring import llama, show
from torch import nn

from tokenahead import DeepSeekMTP, EagleHead, MTPHeadConfig
from tokenahead.modeling.heads.family import build_head, init_head
from tokenahead.modeling.heads.losses import head_loss

# read by the C library when the measuring processes start
os.environ |= {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}
WINDOW = 16


class Memory(NamedTuple):
    """What one process measured: a number of parameters, and MiB that stay, and that a step adds at its peak."""

    parameters: int
    kept: float
    above: float


class Sizes(NamedTuple):
    """Sizes of a model and of its step."""

    vocab: int
    hidden: int
    tokens: int
    head: str


def mebibytes(name: str) -> float:
    """A field of the process's memory: VmRSS (now) or VmHWM (the peak since it was reset)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def resident() -> float:
    """Resident memory in MiB, without what malloc holds for later."""
    ctypes.CDLL(None).malloc_trim(0)
    return mebibytes("VmRSS")


def peak_above(kept: float, run: Callable[[], Any]) -> float:
    """The peak while something runs, above what was kept before."""
    Path("/proc/self/clear_refs").write_text("5")
    run()
    return mebibytes("VmHWM") - kept


def _work(results: Any, measure: Callable[..., Memory], arguments: tuple) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results.put(tuple(measure(*arguments)))


def in_own_process(measure: Callable[..., Memory], *arguments: object) -> Memory:
    """`measure(*arguments)` in a fresh process with one thread."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_work, args=(results, measure, arguments))
    process.start()
    found = results.get()
    process.join()
    return Memory(*found)


def peak(module: nn.Module, loss: Callable[[], torch.Tensor]) -> Memory:
    """What an update by `loss` takes; two updates come first, so that the optimiser's state exists."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, foreach=False, fused=True)

    def update() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    update()
    update()
    parameters = sum(parameter.numel() for parameter in module.parameters())
    kept = mebibytes("VmRSS") + 4 * parameters / 2**20  # between steps there are no gradients
    return Memory(parameters, kept, peak_above(kept, update))


def heads(rank: int, sizes: Sizes) -> Memory:
    """The loss of heads of a rank on random states."""
    shape = {"hidden_size": sizes.hidden, "vocab_size": sizes.vocab}
    config = MTPHeadConfig(head_type=sizes.head, window=WINDOW, rank=rank, **shape)
    head = build_head(config, sizes.hidden, sizes.vocab)
    for module in head.modules():
        init_head(module)

    def loss() -> torch.Tensor:
        states = torch.randn(1, sizes.tokens, sizes.hidden, requires_grad=True)
        targets = torch.randint(sizes.vocab, (1, sizes.tokens, WINDOW))
        return head_loss(head, config, states, targets, None)[0]

    return peak(head, loss)


def backbone(sizes: Sizes, layers: int) -> Any:
    """A Llama of random weights with an unembedding apart from its embeddings."""
    shape = {"num_attention_heads": 4, "tie_word_embeddings": False}
    return llama(sizes.hidden, layers, sizes.vocab, intermediate_size=3 * sizes.hidden, **shape)


def eagle(steps: int, sizes: Sizes) -> Memory:
    """The loss of an EAGLE-3 head that drafts so many steps in training."""
    head = EagleHead.from_backbone(backbone(sizes, 7), loss_options={"steps": steps}).train()
    return peak(head, partial(_own_loss, head, sizes))


def modules(depth: int, sizes: Sizes) -> Memory:
    """The loss of a model with so many modules."""
    model = DeepSeekMTP.from_backbone(backbone(sizes, 4), num_modules=depth).train()
    model.activation_checkpointing_enable()
    return peak(model, partial(_own_loss, model, sizes, logits_to_keep=1))


def _own_loss(model: Any, sizes: Sizes, **options: Any) -> torch.Tensor:
    ids = torch.randint(sizes.vocab, (1, sizes.tokens))
    return model(ids, labels=ids, **options).loss


KINDS = {
    "heads": (heads, "rank", (1, 2, 4, 8, 16, 32), Sizes(320, 192, 8192, "btree")),
    "eagle": (eagle, "steps", (1, 3, 7), Sizes(32_000, 256, 2048, "")),
    "modules": (modules, "D", (1, 2, 3), Sizes(32_000, 256, 1024, "")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--counts", type=int, nargs="+", help="ranks, steps or depths")
    parser.add_argument("--head", choices=("cp", "hmm", "btree"), default="btree")
    for name in ("vocab", "hidden", "tokens"):
        parser.add_argument(f"--{name}", type=int)
    arguments = parser.parse_args()
    measure, what, counts, sizes = KINDS[arguments.kind]
    sizes = sizes._replace(**{name: value for name in sizes._fields if (value := vars(arguments)[name])})
    counts = arguments.counts or counts
    found = [in_own_process(measure, count, sizes) for count in counts]
    rows = []
    for count, memory in zip(counts, found):
        logits = f"{sizes.tokens * WINDOW * count * sizes.vocab * 4 / 2**20:.0f}" if measure is heads else "-"
        figures = f"{memory.kept:.0f}", f"{memory.above:.0f}", f"{memory.above / (found[0].above or 1):.2f}"
        rows.append([count, f"{memory.parameters / 1e6:.1f} M", logits, *figures])
    columns = (what, "parameters", "logits", "models, gradients, optimiser", "peak above", "of the first")
    show(columns, rows, f"{arguments.kind}: vocabulary {sizes.vocab}, {sizes.tokens} tokens, MiB")


if __name__ == "__main__":
    main()
