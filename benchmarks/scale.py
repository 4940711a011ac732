"""What it costs to train a drafter of 50M or 1B tokens on targets of 1B, 8B and 70B parameters, from their shapes.

    python benchmarks/scale.py                                          # one H100: 40 % of 989 TFLOP/s
    python benchmarks/scale.py --gpus 64 --disk 20 --answers 15000     # 64 of them, a disk of 20 GB/s

All is computed, but two lines: the bytes that a token takes in stored features of a small model, and --answers, where
that was measured (tokens/s that an engine answers with an 8B target on one GPU; other targets in proportion to size).
"""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from measuring import llama, markdown

from tokenahead import EagleHead
from tokenahead.training import cache_features

COLUMNS = (
    "target", "tokens", "heads, TB", "EAGLE-3, TB", "shards", "answers, h", "states, h", "reading, h", "GPUs, sharded"
)  # fmt: skip
STATES = {"heads": 1, "EAGLE-3": 4}
SHARD = 2**18  # tokens, as `cache_features` has them


@dataclass(frozen=True)
class Target:
    """The shape of a target: parameters, width and vocabulary."""

    name: str
    parameters: float
    width: int
    vocabulary: int

    def stored(self, tokens: float, states: int) -> float:
        """Return the bytes of states in two bytes per number."""
        return tokens * states * self.width * 2

    def gpus(self, memory: float) -> int:
        """Return how many GPUs hold it sharded: layers divided, embeddings and unembedding whole, a third left free."""
        whole = 2.0 * 2 * self.vocabulary * self.width
        return max(1, math.ceil((2 * self.parameters - whole) / (2 / 3 * memory - whole)))


TARGETS = (
    Target("1B", 1.24e9, 2048, 128256),
    Target("8B", 8.03e9, 4096, 128256),
    Target("70B", 70.6e9, 8192, 128256),
)


def rows(options: argparse.Namespace) -> list[list[str]]:
    """Return the table: hours are those of all GPUs together, by the clock."""
    table = []
    for target in TARGETS:
        for tokens in (5e7, 1e9):
            heads, eagle = (target.stored(tokens, count) for count in STATES.values())
            answered = options.gpus * options.answers * TARGETS[1].parameters / target.parameters  # tokens/s
            forward = 2 * target.parameters * tokens / (options.gpus * options.flops * options.share)
            times = tokens / answered, forward, eagle / (options.disk * 1e9)
            sizes = [f"{heads / 1e12:.3g}", f"{eagle / 1e12:.3g}", f"{math.ceil(tokens / SHARD):,}"]
            hours = [f"{seconds / 3600:.3g}" for seconds in times]
            table.append([target.name, f"{tokens / 1e6:,.0f}M", *sizes, *hours, str(target.gpus(options.memory))])
    return table


def stored_bytes() -> tuple[float, float]:
    """Return the bytes per token of stored features of a small target, measured, and those of its states alone."""
    backbone = llama(64, 4, 64).to(torch.bfloat16)
    head = EagleHead.from_backbone(backbone, aux_layers=[1, 2, 3])
    data = [{"input_ids": torch.randint(3, 64, (256,))} for _ in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        cache_features(head, data, folder)
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    return size / (16 * 256), Target("", 0, 64, 64).stored(1, 4)


def main() -> None:
    """Print the table and the measured line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="how many")
    parser.add_argument("--flops", type=float, default=989e12, help="of one GPU, bfloat16, per second")
    parser.add_argument("--share", type=float, default=0.4, help="of these that a forward reaches")
    parser.add_argument("--memory", type=float, default=80e9, help="bytes of one GPU")
    parser.add_argument("--disk", type=float, default=5.0, help="GB/s that all read together")
    parser.add_argument("--answers", type=float, default=15000.0, help="tokens/s of one GPU's engine, 8B target")
    options = parser.parse_args()
    print(markdown(COLUMNS, rows(options)))
    size, states = stored_bytes()
    print(f"\nMeasured here: {size:.0f} bytes per token of a target of width 64, of which {states:.0f} are its states.")


if __name__ == "__main__":
    main()
