"""Goldens of circuits, verification and losses."""

from pathlib import Path

import torch
from safetensors.torch import load_file

CIRCUITS = Path(__file__).parent / "data" / "circuits"


def golden(name: str) -> dict[str, torch.Tensor]:
    """The tensors of one golden case of circuits, verification or losses."""
    return load_file(CIRCUITS / f"{name}.safetensors")
