"""Goldens of circuits, verification and losses."""

from pathlib import Path

import torch
from safetensors.torch import load_file

CIRCUITS = Path(__file__).parent / "data" / "circuits"


def golden(name: str) -> dict[str, torch.Tensor]:
    """The tensors of one golden case of circuits, verification or losses."""
    return load_file(CIRCUITS / f"{name}.safetensors")


@torch.no_grad()
def enumerate_outcomes(model, prompt):
    sequences, distribution = prompt, torch.ones(1, dtype=torch.float64)
    for _ in range(4):
        values, ids = model(sequences, output_mtp_logits=False).logits[:, -1].topk(3)
        distribution = (distribution[:, None] * (values.double() / 2).softmax(-1)).flatten()
        sequences = torch.cat([sequences.repeat_interleave(3, 0), ids.flatten()[:, None]], 1)
    return sequences[:, -4:], distribution
