"""A small byte-level Llama that has learned the Python standard library's source: the backbone of other benchmarks.

    python benchmarks/byte_llama.py --minutes 5 --output demo-llama
    python benchmarks/byte_llama.py --minutes 1 --width 64 --layers 3 --output small-llama

Time is the processor's, so that a busy machine changes nothing but the wait.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from corpus import ByteWindows, SourceText, load_corpus
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = dict(
    vocab_size=320, hidden_size=128, intermediate_size=352, num_hidden_layers=6, num_attention_heads=4,
    max_position_embeddings=2048, initializer_range=0.04, bos_token_id=1, eos_token_id=None, pad_token_id=0,
)  # fmt: skip


def config_of(width: int, layers: int) -> LlamaConfig:
    """Of another size, with heads of the same one."""
    sizes = {"hidden_size": width, "intermediate_size": 11 * width // 4, "num_attention_heads": max(1, width // 32)}
    return LlamaConfig(**CONFIG | sizes | {"num_hidden_layers": layers})


def batches(text: SourceText, rows: int, length: int = 256, seed: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    """Shuffled windows without end, the same for the same seed."""
    while True:
        generator = torch.Generator().manual_seed(seed)
        yield from DataLoader(ByteWindows(text, length), rows, shuffle=True, drop_last=True, generator=generator)
        seed += 1


class JointOptimizer(torch.optim.Optimizer):
    """Several optimizers of different parameters as one, so that one schedule changes the rates of all."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.param_groups = [group for part in parts for group in part.param_groups]

    def step(self, closure: None = None) -> None:
        """Take one step of every part."""
        for part in self.parts:
            part.step()


def optimizer_of(model: nn.Module, matrix_rate: float = 0.03, rate: float = 1e-2) -> torch.optim.Optimizer:
    """Return Muon for the matrices of the layers and AdamW for the rest, both without weight decay."""
    ends = {id(p) for part in (model.get_input_embeddings(), model.get_output_embeddings()) for p in part.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() == 2 and id(p) not in ends]
    others = [p for p in trained if p.dim() != 2 or id(p) in ends]  # none where a student's embeddings are frozen
    adam = torch.optim.AdamW([{"params": others}], lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    return JointOptimizer(torch.optim.Muon(matrices, lr=matrix_rate, weight_decay=0.0), adam)


def train(model: nn.Module, text: SourceText, seconds: float, rows: int = 4) -> int:
    """Trains for so many seconds of processor time, with rates that fall to 0; returns the number of steps."""
    optimizer, started, steps = optimizer_of(model), time.process_time(), 0
    rates = [group["lr"] for group in optimizer.param_groups]
    model.train()
    for batch in batches(text, rows):
        passed = (time.process_time() - started) / seconds
        if passed >= 1:
            break
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate * min(1.0, 0.1 + passed / 0.04) * (1 - passed)
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps % 50 == 0:
            print(f"{passed:4.0%}  step {steps}  {loss.item() / 0.6931:.3f} bits per byte", flush=True)
    model.eval()
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5, help="of processor time")
    parser.add_argument("--width", type=int, default=CONFIG["hidden_size"])
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--output", type=Path, default=Path("demo-llama"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = LlamaForCausalLM(config_of(arguments.width, arguments.layers))
    steps = train(model, load_corpus(seed=0).train, 60 * arguments.minutes)
    model.save_pretrained(arguments.output)
    print(f"{steps} steps")


if __name__ == "__main__":
    main()
