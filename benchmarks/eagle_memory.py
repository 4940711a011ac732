"""Peak memory of a training step of an EAGLE-3 head with 1, 3 and 7 steps of drafting, above what stays between steps.

    python benchmarks/eagle_memory.py                # vocabulary 32k, all of it drafted, 2048 tokens

Every number of steps runs in a process of its own: two updates, then the peak over a third (peak_memory.py).
"""

from __future__ import annotations

import argparse

import torch
from peak_memory import Memory, in_own_process, peak_of
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


def peak(steps: int, vocab: int, tokens: int, hidden: int) -> Memory:
    """What an update takes."""
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
    return peak_of(head, lambda: update(head, optimizer, tokens))


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
    sizes, first = (arguments.vocab, arguments.tokens, arguments.hidden), None
    for steps in arguments.steps:
        parameters, kept, above = in_own_process(peak, steps, *sizes)
        first = first or above
        table.add_row(str(steps), f"{parameters / 1e6:.1f} M", f"{kept:.0f}", f"{above:.0f}", f"{above / first:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
