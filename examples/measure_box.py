"""Measures a trained box and writes its directory: weights, held-out text, log, sources, figures, figures and card.

    python examples/measure_box.py --run box-run --output model_cards/box
    python examples/measure_box.py --output model_cards/box --readme README.md --threads 1

`--run` is the directory of `train_box.py`; without it, a box that is there is measured again. Measuring has a budget of
time, and is what `tokenahead demo` does, too. The figures of README's first screen are filled in where `--readme` names
it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from tokenahead.training.box.first_screen import fill_readme
from tokenahead.training.box.release import measure_again, release_box


def main() -> None:
    """Reads the arguments and runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, help="directory of train_box.py; none: measure the box of --output again")
    parser.add_argument("--output", type=Path, required=True, help="the box; it is written over")
    parser.add_argument("--seconds", type=float, default=180.0, help="for measuring")
    parser.add_argument("--drafts", type=json.loads, default={}, help="bytes to draft by head, as JSON")
    parser.add_argument("--readme", type=Path, help="README whose first screen shows the figures")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of PyTorch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.run is None:
        measure_again(arguments.output, arguments.seconds, arguments.drafts)
    else:
        release_box(arguments.run, arguments.output, arguments.seconds, arguments.drafts)
    if arguments.readme is not None:
        fill_readme(arguments.readme, arguments.output)


if __name__ == "__main__":
    main()
