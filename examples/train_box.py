"""Trains the model in the box: one small byte-level EvaByte, and every head family on it.

    python examples/train_box.py --output box-run --hours 1.6

The text is the permissively licensed Python source that this machine has. First the backbone learns with FF heads; then
it is frozen, and FF, CP, HMM and BTree heads start from those FF heads and train for the same time each. The same
command goes on where an interrupted run stopped, even after SIGKILL.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from tokenahead.training.box.run import BoxRun, Plan


def main() -> None:
    """Reads the arguments and runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="directory of text, checkpoints, log and result")
    parser.add_argument("--hours", type=float, required=True, help="training time of backbone and heads together")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of PyTorch")
    parser.add_argument("--until", choices=("text", "backbone", "heads"), default="heads", help="stop after this part")
    parser.add_argument("--plan", type=json.loads, default={}, help="fields of Plan to change, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    BoxRun(arguments.output, Plan(hours=arguments.hours, **arguments.plan)).run(arguments.until)


if __name__ == "__main__":
    main()
