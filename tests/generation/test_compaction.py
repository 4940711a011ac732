"""What is left of a block of drafts in transformers' caches."""

import torch
from transformers import DynamicCache

from tests.internals import compact


def test_any_path_of_a_block_is_left():
    """The kept columns may lie behind the length of the path: a later branch of a tree."""
    states = torch.arange(7.0).view(1, 1, 7, 1).expand(2, 3, 7, 4).contiguous()
    cache = DynamicCache()
    cache.update(states, -states, 0)
    compact(cache, torch.tensor([[0, 3, 4], [0, 2, 2]]), fed=5)
    kept = cache.layers[0].keys[:, 0, :, 0]
    assert kept.tolist() == [[0, 1, 2, 5, 6], [0, 1, 2, 4, 4]]
    assert torch.equal(cache.layers[0].values, -cache.layers[0].keys)
