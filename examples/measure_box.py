"""Measures a trained box and writes its folder: weights, log, where its text comes from, figures and checksums.

    python examples/measure_box.py --run box-run --output model_cards/box

`--run` is the folder of `train_box.py`. Measuring has a budget of time: what is not reached is left out and said so.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from tokenahead.training.box.release import release_box


def main() -> None:
    """Reads the arguments and runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="folder of train_box.py")
    parser.add_argument("--output", type=Path, required=True, help="the box; it is written over")
    parser.add_argument("--minutes", type=float, default=10.0, help="for measuring decoding")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of PyTorch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    release_box(arguments.run, arguments.output, arguments.minutes)


if __name__ == "__main__":
    main()
