"""Peak memory of a training step with D = 1, 2, 3 modules, above parameters, gradients and optimiser state.

    python benchmarks/module_memory.py               # vocabulary 32k, 1024 tokens, module checkpointing on

Every D runs in a process of its own: two steps, then the peak over a third (peak_memory.py).
"""

from __future__ import annotations

import argparse

import torch
from peak_memory import Memory, in_own_process, peak_of
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from tokenahead import DeepSeekMTP


def step(model: DeepSeekMTP, optimizer: torch.optim.Optimizer, tokens: int) -> None:
    """One training step on random tokens."""
    ids = torch.randint(model.config.vocab_size, (1, tokens))
    model(ids, labels=ids, logits_to_keep=1).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def peak(depth: int, vocab: int, tokens: int, hidden: int) -> Memory:
    """What a training step takes."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    model = DeepSeekMTP.from_backbone(LlamaForCausalLM(config), num_modules=depth).train()
    model.activation_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return peak_of(model, lambda: step(model, optimizer, tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    arguments = parser.parse_args()
    table = Table(title=f"vocabulary {arguments.vocab}, {arguments.tokens} tokens, MiB")
    for column in ("D", "parameters", "model, gradients, optimiser", "peak above", "of D = 1"):
        table.add_column(column, justify="right")
    sizes, first = (arguments.vocab, arguments.tokens, arguments.hidden), None
    for depth in (1, 2, 3):
        parameters, kept, above = in_own_process(peak, depth, *sizes)
        first = first or above
        table.add_row(str(depth), f"{parameters / 1e6:.1f} M", f"{kept:.0f}", f"{above:.0f}", f"{above / first:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
