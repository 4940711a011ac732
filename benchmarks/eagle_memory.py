"""Peak memory of a training step of an EAGLE-3 head with 1, 3 and 7 steps of drafting, above what stays between steps.

    python benchmarks/eagle_memory.py                # vocabulary 32k, all of it drafted, 2048 tokens

Every number of steps runs in a process of its own: one update, then the peak of the resident memory over another is set
back and read (Linux). Freed memory is returned to the system at once (set before torch starts), so that peaks are those
of tensors.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os

os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "65536")
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")

import torch
from head_memory import RESET, mebibytes
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from tokenahead import EagleHead


def update(head: EagleHead, optimizer: torch.optim.Optimizer, tokens: int) -> None:
    """One update on random tokens."""
    ids = torch.randint(head.config.vocab_size, (1, tokens))
    head(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def peak(steps: int, vocab: int, tokens: int, hidden: int, results: object) -> None:
    """Puts the mebibytes that an update takes beyond what stays between updates."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    base = LlamaForCausalLM(config).eval()
    head = EagleHead.from_backbone(base, loss_options={"steps": steps}).train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-4, fused=True)
    update(head, optimizer, tokens)
    parameters = 4 * sum(p.numel() for p in head.parameters()) / 2**20
    kept = mebibytes("VmRSS") + parameters  # between updates there are no gradients
    RESET.write_text("5")
    update(head, optimizer, tokens)
    results.put((parameters, kept, mebibytes("VmHWM") - kept))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 3, 7])
    arguments = parser.parse_args()
    table = Table(title=f"vocabulary {arguments.vocab}, {arguments.tokens} tokens, MiB")
    for column in ("steps", "parameters", "models, gradients, optimiser", "peak above", "of the first"):
        table.add_column(column, justify="right")
    context, first = multiprocessing.get_context("spawn"), None
    for steps in arguments.steps:
        results = context.Queue()
        sizes = (arguments.vocab, arguments.tokens, arguments.hidden, results)
        process = context.Process(target=peak, args=(steps, *sizes))
        process.start()
        parameters, kept, above = results.get()
        process.join()
        first = first or above
        table.add_row(str(steps), f"{parameters:.0f}", f"{kept:.0f}", f"{above:.0f}", f"{above / first:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
