"""Index tensors, and the states whose logits are asked for."""

import pytest
import torch
from transformers.modeling_utils import slice_logits_to_keep

from tokenahead.generation.tensors.masks import selected_positions

STATES = torch.arange(24.0).view(2, 4, 3)


@pytest.mark.parametrize(
    "kept",
    [
        0,
        1,
        3,
        torch.tensor([2, 0]),
        torch.tensor([[1, 3], [0, 0]]),
        torch.tensor([[True, False, True, False], [False, False, False, True]]),
    ],
    ids=str,
)
def test_positions_are_kept_as_transformers_keeps_them(kept):
    assert torch.equal(selected_positions(STATES, kept), slice_logits_to_keep(STATES, kept))
