"""A small byte-level Llama that has learned the Python standard library's source: the backbone of other benchmarks.

    python benchmarks/byte_llama.py --minutes 5 --output demo-llama
    python benchmarks/byte_llama.py --minutes 1 --width 64 --layers 3 --output small-llama

Time is the processor's, so that a busy machine changes nothing but the wait.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from corpus import ByteWindows, load_corpus
from measuring import llama_config
from studies import LENGTH, train
from transformers import LlamaConfig, LlamaForCausalLM, Trainer


def config_of(width: int, layers: int) -> LlamaConfig:
    """A Llama over bytes, with attention heads of 32 dimensions."""
    return llama_config(width, layers, initializer_range=0.04, bos_token_id=1)


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
    data = ByteWindows(load_corpus(seed=0).train, LENGTH)
    done = train(model, Trainer, data, 60 * arguments.minutes, rate=3e-3, prints=True)
    model.save_pretrained(arguments.output)
    print(f"{done.state.global_step} steps")


if __name__ == "__main__":
    main()
