"""Peak memory of a training step, above what stays between steps: heads by rank, EAGLE-3 by steps, modules by depth.

    python benchmarks/memory.py heads                  # btree, n = 16, V = 320, d = 192, 8192 positions
    python benchmarks/memory.py heads --head cp --counts 1 8 32
    python benchmarks/memory.py eagle                  # 1, 3 and 7 steps, vocabulary 32k, 2048 tokens
    python benchmarks/memory.py modules                # D = 1, 2, 3, vocabulary 32k, 1024 tokens, checkpointing on

Every row runs in a process of its own: two updates, then the peak over a third (peak_memory.py). `logits` of heads is
what a computation without chunks would hold in leaf logits alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from peak_memory import Memory, in_own_process, peak_of
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tokenahead import DeepSeekMTP, EagleHead, MTPHeadConfig
from tokenahead.modeling.heads.losses import head_loss
from tokenahead.modeling.heads.registry import build_head, init_head

WINDOW = 16


class Sizes(NamedTuple):
    """Sizes of a model and of its step."""

    vocab: int
    hidden: int
    tokens: int
    head: str


def peak(module: nn.Module, loss: Callable[[], torch.Tensor]) -> Memory:
    """What an update by `loss` takes."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, foreach=False, fused=True)

    def update() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return peak_of(module, update)


def llama(sizes: Sizes, layers: int) -> LlamaForCausalLM:
    """A small Llama of random weights."""
    config = LlamaConfig(
        vocab_size=sizes.vocab, hidden_size=sizes.hidden, intermediate_size=3 * sizes.hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def heads(rank: int, sizes: Sizes) -> Memory:
    """The loss of heads of a rank on random states."""
    config = MTPHeadConfig(
        head_type=sizes.head, window=WINDOW, rank=rank, hidden_size=sizes.hidden, vocab_size=sizes.vocab
    )
    head = build_head(config, sizes.hidden, sizes.vocab)
    for module in head.modules():
        init_head(module)

    def loss() -> torch.Tensor:
        states = torch.randn(1, sizes.tokens, sizes.hidden, requires_grad=True)
        targets = torch.randint(sizes.vocab, (1, sizes.tokens, WINDOW))
        return head_loss(head, config, states, targets, None)[0]

    return peak(head, loss)


def eagle(steps: int, sizes: Sizes) -> Memory:
    """The loss of an EAGLE-3 head that drafts so many steps in training."""
    head = EagleHead.from_backbone(llama(sizes, 7).eval(), loss_options={"steps": steps}).train()
    return peak(head, lambda: _own_loss(head, sizes))


def modules(depth: int, sizes: Sizes) -> Memory:
    """The loss of a model with so many modules."""
    model = DeepSeekMTP.from_backbone(llama(sizes, 4), num_modules=depth).train()
    model.activation_checkpointing_enable()
    return peak(model, lambda: _own_loss(model, sizes, logits_to_keep=1))


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
    asked = {name: value for name in ("vocab", "hidden", "tokens", "head") if (value := vars(arguments)[name])}
    sizes = sizes._replace(**asked)
    table = Table(title=f"{arguments.kind}: vocabulary {sizes.vocab}, {sizes.tokens} tokens, MiB")
    for column in (what, "parameters", "logits", "models, gradients, optimiser", "peak above", "of the first"):
        table.add_column(column, justify="right")
    first = None
    for count in arguments.counts or counts:
        parameters, kept, above = in_own_process(measure, count, sizes)
        first = first or above
        logits = sizes.tokens * WINDOW * count * sizes.vocab * 4 / 2**20
        figures = f"{kept:.0f}", f"{above:.0f}", f"{above / first:.2f}"
        shown = f"{logits:.0f}" if arguments.kind == "heads" else "-"
        table.add_row(str(count), f"{parameters / 1e6:.1f} M", shown, *figures)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
