"""Rows of real tokens: padded batches, packed documents, and the way back."""

import torch

from tokenahead.modeling.evabyte.cache import SequenceMap


def check(rows: SequenceMap, mask: torch.Tensor, want: list[list[int]]) -> None:
    """Row r must hold the columns `want[r]` of the flattened batch, from its column 0 on, and `restore` undoes it."""
    flat = torch.arange(mask.numel()).view(mask.shape)
    gathered = rows.gather(flat)
    assert rows.counts.tolist() == [len(row) for row in want]
    assert [row[:count].tolist() for row, count in zip(gathered, rows.counts)] == want
    restored = rows.restore(gathered)
    assert restored.shape == mask.shape
    assert torch.equal(restored[mask], flat[mask])


MASKS = {
    "none": [[1, 1, 1, 1], [1, 1, 1, 1]],
    "left": [[0, 0, 1, 1], [0, 1, 1, 1]],
    "right": [[1, 1, 0, 0], [1, 0, 0, 0]],
    "both": [[0, 1, 1, 0], [1, 1, 1, 1]],
    "holes": [[1, 0, 1, 0], [0, 1, 0, 1]],
    "an empty row": [[0, 0, 0, 0], [1, 1, 1, 0]],
}


def test_rows_of_a_padded_batch():
    for mask in (torch.tensor(rows).bool() for rows in MASKS.values()):
        flat = torch.arange(8).view(2, 4)
        check(SequenceMap.from_mask(mask), mask, [row[real].tolist() for row, real in zip(flat, mask)])


def documents(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def test_packed_documents_in_a_padded_batch():
    """Padding on either side belongs to no document, with any position ids."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]).bool()
    for filler in (0, 1):
        positions = torch.full((2, 6), filler)
        positions[0, 2:], positions[1, :3] = documents(1, 3), documents(2, 1)
        check(SequenceMap.from_documents(mask, positions), mask, [[2], [3, 4, 5], [6, 7], [8]])


def test_a_batch_of_padding_alone_has_rows_too():
    mask = torch.zeros(2, 3, dtype=torch.bool)
    rows = SequenceMap.from_documents(mask, torch.arange(3)[None])
    assert rows.counts.tolist() == [0, 0]
    assert rows.restore(rows.gather(torch.randn(2, 3, 4))).shape == (2, 3, 4)
