"""The counter-based generator: known answers of its authors, and streams that do not meet."""

import torch

from tokenahead.generation.tensors.sampling import philox, stream_uniforms
from tokenahead.generation.verification.verifiers import Uniforms, seed_streams

KNOWN = [
    ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
"""Counter, key and result of the known-answer file of Random123."""


def words(text):
    return [int(word, 16) for word in text.split()]


def test_known_answers():
    counters, keys, results = (torch.tensor([words(case[i]) for case in KNOWN]) for i in range(3))
    assert torch.equal(philox(counters, keys), results)


def test_a_number_is_a_function_of_where_it_stands():
    streams = seed_streams([3, -4, 2**64 - 5], 3)
    whole = stream_uniforms(streams, 0, 50)
    for start, count in ((0, 1), (3, 9), (4, 4), (17, 30)):
        assert torch.equal(stream_uniforms(streams, start, count), whole[:, start : start + count])
    assert torch.equal(stream_uniforms(streams[1:2], 0, 50), whole[1:2])
    assert torch.equal(streams[2:], seed_streams([-5], 1))  # the same 64 bits


def test_numbers_are_uniform_on_the_grid_of_float32_and_streams_are_unlike():
    seeds, purposes = seed_streams(11, 8), (0, 1)
    numbers = torch.cat([stream_uniforms(seeds, 0, 4096, purpose) for purpose in purposes])
    assert numbers.dtype == torch.float32 and torch.equal(numbers * 2**24, (numbers * 2**24).round())
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = torch.histc(numbers, 64, 0, 1)
    expected = numbers.numel() / 64
    assert ((counts - expected) ** 2 / expected).sum() < 120  # 63 degrees of freedom: p = 2e-5
    correlation = torch.corrcoef(torch.cat([numbers, numbers[:, 1:1].expand(16, 0)], dim=1))
    assert (correlation - torch.eye(16)).abs().max() < 0.08


def test_chunks_of_a_call_do_not_show():
    call = Uniforms(2, torch.device("cpu"), seed=5)
    assert torch.equal(
        torch.cat([call.fresh(n) for n in (3, 300, 1)], dim=1), stream_uniforms(seed_streams(5, 2), 0, 304, 1)
    )
