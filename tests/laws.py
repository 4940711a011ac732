"""Helpers for tests about probability laws: goldens, and the chi-square test."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from scipy import stats

CIRCUITS = Path(__file__).parent / "data" / "circuits"


def golden(name: str) -> dict[str, torch.Tensor]:
    """The tensors of one golden case of circuits, verification or losses."""
    return load_file(CIRCUITS / f"{name}.safetensors")


def chi_square(cells: torch.Tensor, law: torch.Tensor) -> float:
    """p-value of drawn cell numbers [N] under `law` [C]; cells expected less than 5 times are counted as one.

    A cell that the law excludes and that was drawn gives 0.
    """
    seen = torch.bincount(cells, minlength=len(law)).double()
    if seen[law == 0].any():
        return 0.0
    expected = law.double() * len(cells)
    rare = expected < 5
    merged = [torch.cat([counts[~rare], counts[rare].sum()[None]]) for counts in (seen, expected)]
    if merged[1][-1] < 5:  # too few even together: they join the last frequent cell
        merged = [torch.cat([counts[:-2], counts[-2:].sum()[None]]) for counts in merged]
    seen, expected = merged
    return float(stats.chisquare(seen.numpy(), (expected * seen.sum() / expected.sum()).numpy()).pvalue)
