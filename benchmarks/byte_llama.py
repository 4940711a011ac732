"""A small byte-level Llama that has learned the Python standard library's source: the backbone of other benchmarks.

    python benchmarks/byte_llama.py --minutes 5 --output demo-llama
    python benchmarks/byte_llama.py --minutes 1 --width 64 --layers 3 --output small-llama

Time is the processor's, so that a busy machine changes nothing but the wait.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from corpus import ByteWindows, SourceText, load_corpus
from measuring import llama_config
from studies import LENGTH, train
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer


def config_of(width: int, layers: int) -> LlamaConfig:
    """A Llama over bytes, with attention heads of 32 dimensions."""
    return llama_config(width, layers, initializer_range=0.04, bos_token_id=1)


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


def optimizer_of(model: Any, matrix_rate: float = 0.03, rate: float = 1e-2) -> torch.optim.Optimizer:
    """Return Muon for the matrices of the layers and AdamW for the rest, both without weight decay."""
    ends = {id(p) for part in (model.get_input_embeddings(), model.get_output_embeddings()) for p in part.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() == 2 and id(p) not in ends]
    others = [p for p in trained if p.dim() != 2 or id(p) in ends]  # empty if a student's embeddings are frozen
    adam = torch.optim.AdamW([{"params": others}], lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    return JointOptimizer(torch.optim.Muon(matrices, lr=matrix_rate, weight_decay=0.0), adam)


def fit(model: nn.Module, text: SourceText, seconds: float, **options: Any) -> int:
    """Train a model of bytes for so many seconds of processor time; returns the number of steps."""
    optimizer = optimizer_of(model)
    return train(model, Trainer, ByteWindows(text, LENGTH), seconds, optimizer=optimizer, **options).state.global_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5, help="of processor time")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--output", type=Path, default=Path("demo-llama"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = LlamaForCausalLM(config_of(arguments.width, arguments.layers))
    steps = fit(model, load_corpus(seed=0).train, 60 * arguments.minutes, prints=True)
    model.save_pretrained(arguments.output)
    print(f"{steps} steps")


if __name__ == "__main__":
    main()
