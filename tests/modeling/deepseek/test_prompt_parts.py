"""What modules read of a prompt with images: positions of rotary embeddings, whatever was padded."""

import torch

from tokenahead.modeling.deepseek.session import PromptParts


def test_positions_are_the_images_own_and_go_on_behind_the_prompt():
    """Three kinds of positions for two rows of 6 and 4 real tokens, asked for in text order and beyond the end."""
    length, counts = 6, [6, 4]
    rotated = torch.randint(0, 9, (3, 2, length), generator=torch.Generator().manual_seed(0))
    parts = PromptParts(torch.zeros(2, length, 4), rotated, torch.tensor(counts))
    asked = torch.tensor([[0, 3, 5, 6, 7], [0, 1, 3, 4, 6]])
    found = parts.positions(asked)
    for row, count in enumerate(counts):
        real = rotated[:, row, length - count :]
        for column, place in enumerate(asked[row].tolist()):
            behind = torch.full((3,), int(real.max()) + 1 + place - count)
            assert found[:, row, column].tolist() == (real[:, place] if place < count else behind).tolist()
