"""What backbones of several sizes already imply of tokens further ahead (Mehra et al. 2025, Figure 1 in small).

    python benchmarks/byte_llama.py --minutes 1 --width 64 --layers 3 --output small
    python benchmarks/byte_llama.py --minutes 2 --width 96 --layers 4 --output middle
    python benchmarks/byte_llama.py --minutes 5 --output large
    python benchmarks/marginal.py small middle large

At positions of held-out text: how often the most likely token is the text's, with the tokens between summed out (the
best that heads without access to them can do), and with them known. Behind `+-` is the standard error, from the spread
between texts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from analysis import marginal_log_probs
from corpus import load_corpus
from measuring import markdown
from strategies import bits
from studies import LENGTH, held_out_rows
from transformers import LlamaForCausalLM

POSITIONS = torch.arange(32, LENGTH - 16, 4)
"""Columns behind which distributions are compared."""


def shown(right: torch.Tensor) -> str:
    """Mean of [N, S] over positions, and its standard error over texts."""
    texts = right.double().mean(1)
    return f"{float(texts.mean()):.3f} +- {float(texts.std()) / len(texts) ** 0.5:.3f}"


@torch.no_grad()
def row_of(path: Path, ids: torch.Tensor, depth: int, mass: float, branches: int) -> list[str]:
    """One backbone's figures."""
    backbone = LlamaForCausalLM.from_pretrained(path).eval()
    found = marginal_log_probs(
        backbone, ids, depth, positions=POSITIONS.tolist(), mass=mass, max_branches=branches, batch_size=branches
    )
    ahead = POSITIONS[:, None] + torch.arange(1, depth + 1)
    summed_out = found.log_probs.argmax(-1) == ids[:, ahead]
    known = backbone(ids, use_cache=False).logits[:, ahead - 1].argmax(-1) == ids[:, ahead]
    pairs = [f"{shown(summed_out[..., j])} / {shown(known[..., j])}" for j in range(1, depth)]
    missing = found.missing.mean((0, 1)).tolist()
    facts = [path.name, f"{backbone.num_parameters() / 1e6:.2f} M", f"{bits(backbone, ids):.3f}"]
    return [*facts, shown(known[..., 0]), *pairs, ", ".join(f"{m:.2f}" for m in missing[1:])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backbones", type=Path, nargs="+")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--rows", type=int, default=32, help="held-out texts")
    parser.add_argument("--mass", type=float, default=0.9)
    parser.add_argument("--branches", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ids = held_out_rows(load_corpus(seed=0), arguments.rows)
    depths = [f"depth {depth}, summed out / known" for depth in range(2, arguments.depth + 1)]
    columns = ["backbone", "parameters", "bits per byte", "depth 1", *depths, "mass left out"]
    rows = [row_of(path, ids, arguments.depth, arguments.mass, arguments.branches) for path in arguments.backbones]
    print(markdown(columns, rows), end="")


if __name__ == "__main__":
    main()
