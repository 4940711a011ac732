"""Free draws, by one uniform and by race: they follow their weights, row by row, and say where there is no
distribution."""

import pytest
import torch

from tokenahead.generation.tensors.sampling import draw, pick, picked, raced
from tokenahead.testing import chi_square

WAYS = pytest.mark.parametrize("way", [picked, raced])


@pytest.mark.by_day(most=4)
@WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 7.0])
def test_draws_follow_their_weights(way, dtype, scale):
    distribution = torch.tensor([0.45, 0.0, 0.3, 0.15, 0.0989, 0.0011, 0.0], dtype=torch.float64)
    tokens, _ = way((distribution * scale).to(dtype).expand(200_000, -1))
    assert chi_square(tokens, distribution) > 1e-4


@WAYS
def test_rows_are_independent(way):
    """Pairs drawn in one call, [N, 2, v] at once, follow the product distribution."""
    probs = torch.rand(2, 6, dtype=torch.float64) + 0.01
    probs = probs / probs.sum(-1, keepdim=True)
    pairs, _ = way(probs.float().expand(100_000, 2, 6))
    assert pairs.shape == (100_000, 2)
    assert chi_square(pairs[:, 0] * 6 + pairs[:, 1], torch.outer(*probs).flatten()) > 1e-4
    singles = torch.stack([way(probs[0].float())[0] for _ in range(5_000)])
    assert chi_square(singles, probs[0]) > 1e-4


@WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weight_zero_is_never_drawn(way, dtype):
    weights = torch.rand(5_000, 64, dtype=dtype) * (torch.rand(5_000, 64) < 0.05)
    weights[:, 5] += torch.finfo(dtype).tiny  # the only weight of some rows
    tokens, _ = way(weights)
    assert (weights.gather(1, tokens[:, None]) > 0).all()


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_no_uniform_picks_weight_zero(uniform, monkeypatch):
    weights = torch.rand(5_000, 64, dtype=torch.float64) * (torch.rand(5_000, 64) < 0.2)
    weights[:, 5] += 1e-9
    monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.full(shape, uniform, dtype=options["dtype"]))
    tokens, _ = picked(weights)
    possible = [row.nonzero()[:, 0] for row in weights]
    edge = 0 if uniform == 0 else -1
    assert tokens.tolist() == [int(row[edge]) for row in possible]


def test_a_race_in_half_precision_has_no_arrivals_of_zero(monkeypatch):
    # float16 would round them to 0, and 0 / 0 would win
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda self, generator=None: self.fill_(1e-9))
    weights = torch.tensor([[0.0, 0.2, 0.0, 0.8], [0.0, 0.0, 1e-3, 0.0]], dtype=torch.float16)
    assert raced(weights)[0].tolist() == [3, 2]


@WAYS
def test_what_is_no_distribution_is_told_and_gives_a_token(way):
    weights = torch.tensor([[0.2, 0.8], [0.2, float("nan")], [0.0, 0.0], [float("nan"), float("nan")]])
    tokens, check = way(weights)
    assert check.isnan().tolist() == [False, True, False, True]
    assert ((tokens >= 0) & (tokens < 2)).all()


def test_processors_pick_by_one_uniform():
    """A number for every token of the vocabulary, made one after the other, would cost more than the rest of a draw."""
    weights = torch.rand(4, 3, 50)
    torch.manual_seed(5)
    tokens = draw(weights)
    torch.manual_seed(5)
    assert torch.equal(tokens, picked(weights)[0])


def test_a_uniform_beyond_a_sum_that_was_rounded_picks_the_last_possible_token():
    probs = torch.tensor([[0.25, 0.7499999, 0.0, 0.0], [0.25, 0.0, 0.0, 0.7499999]])
    assert pick(torch.full((2,), 1 - 2**-24), probs).tolist() == [1, 3]
