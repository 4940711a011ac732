"""The best of several vectors of uniforms; test_lossless_parallel.py decodes with it."""

import json
from pathlib import Path

import torch

from tokenahead.experimental.best_of_m import most_central


def test_the_most_central_vector_is_taken():
    for case in json.loads((Path(__file__).parents[1] / "data/ptp/best_of_m.json").read_text()):
        positions = torch.tensor(case["rel_teacher"])
        assert int(most_central(positions, torch.tensor(case["n_correct"]))) == case["argmin"]
    assert int(most_central(torch.full((2, 3), 0.5), torch.tensor([0, 1]))) == 1  # more right drafts break ties
