"""Does an MTP loss make a model of bytes better? Gloeckle et al. in small: bits of the next byte, the heads dropped.

    python benchmarks/joint_bytes.py --output joint_bytes.json

Small Llamas learn the standard library's source from random weights: for the next byte, and for it jointly with layer
heads for windows of 2 and 4, whose losses weigh 1 each as in the paper. Bits per byte are those of the model alone, in
held-out windows. A model is an entry of the file, which is continued; all see the same windows in as many steps.
"""

from __future__ import annotations

import argparse
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from byte_llama import config_of
from corpus import ByteWindows, load_corpus
from measuring import resumed
from studies import LENGTH, held_out_rows, train
from transformers import LlamaForCausalLM, Trainer

from tokenahead import MTPHeads
from tokenahead.training.strategy import TrainingStrategy

SIZES = {"64 x 3": (64, 3), "128 x 6": (128, 6)}


class Study:
    """Text to learn and to measure along."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, corpus = asked, load_corpus()
        self.data, self.held_out = ByteWindows(corpus.train, LENGTH), held_out_rows(corpus, 64)

    def run(self, name: str) -> dict[str, Any]:
        """Train a model; return its bits per byte, by window."""
        size, window, seed = name.split(", ")
        begun, count, number = time.process_time(), int(window.removeprefix("n = ")), int(seed.removeprefix("seed "))
        torch.manual_seed(number)
        model: Any = LlamaForCausalLM(config_of(*SIZES[size]))
        how = {"rate": self.asked.rate, "seed": number, "steps": self.asked.steps}
        if count == 1:
            train(model, Trainer, self.data, 0, **how)
        else:
            heads = MTPHeads.from_backbone(model, count, head_type="layer")
            train(heads, TrainingStrategy(train="all"), self.data, 0, **how)
        with torch.no_grad():
            bits = [float(model.eval()(row[None], labels=row[None]).loss) / 0.693147 for row in self.held_out]
        return {"bits": [round(each, 4) for each in bits], "seconds": round(time.process_time() - begun)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("joint_bytes.json"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    names = [f"{s}, n = {n}, seed {seed}" for seed, s, n in product(asked.seeds, asked.sizes, (1, 2, 4))]
    resumed(asked.output, names, Study(asked).run)


if __name__ == "__main__":
    main()
