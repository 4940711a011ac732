"""Picks, intervals and features of uniforms against exact goldens, and their properties."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenahead.generation.tensors.sampling import interval, pick
from tokenahead.generation.tensors.uniforms import best_of, beta_shares, uniform_features, uniform_for

GOLDENS = Path(__file__).parents[2] / "data" / "ptp"
LAWS = st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any)


def distribution(weights: list[int]) -> torch.Tensor:
    counts = torch.tensor(weights, dtype=torch.float64)
    return counts / counts.sum()


@settings(max_examples=200)
@given(LAWS, st.floats(0, 1, exclude_max=True))
def test_a_pick_is_possible_and_lies_in_its_interval(weights, value):
    probs, u = distribution(weights), torch.tensor(value, dtype=torch.float64)
    token = pick(u, probs)
    low, high = interval(token, probs)
    assert probs[token] > 0 and low <= u < high


@settings(max_examples=200)
@given(LAWS, st.floats(0, 1), st.data())
def test_a_placed_uniform_picks_its_token(weights, z, data):
    probs = distribution(weights)
    token = torch.tensor(data.draw(st.integers(0, len(weights) - 1)))
    u, valid = uniform_for(token, probs, torch.tensor(z, dtype=torch.float64))
    assert u.dtype == torch.float32 and 0 <= u < 1
    assert bool(valid) == (weights[int(token)] > 0)
    if valid:
        assert pick(u, probs) == token


def test_intervals_narrower_than_float32_are_not_valid():
    probs = torch.tensor([0.5 + 1e-12, 1e-13, 0.5 - 1.1e-12], dtype=torch.float64)
    assert not uniform_for(torch.tensor(1), probs, torch.tensor(0.5))[1]


def test_intervals_cover_the_unit_once():
    probs = torch.rand(4, 9, dtype=torch.float64).softmax(-1)
    tokens = torch.arange(9).expand(4, -1)
    low, high = interval(tokens, probs[:, None].expand(-1, 9, -1))
    assert (low[:, 0] == 0).all() and (high[:, -1] == 1).all() and torch.equal(low[:, 1:], high[:, :-1])


def test_picks_follow_the_distribution():
    probs = torch.tensor([0.1, 0.0, 0.6, 0.3])
    grid = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    counts = torch.bincount(pick(grid, probs.expand(10_000, -1)), minlength=4)
    torch.testing.assert_close(counts / 10_000, probs, atol=1e-4, rtol=0)


def test_goldens_of_picks():
    for case in json.loads((GOLDENS / "pick_edge.json").read_text()):
        token = pick(torch.tensor(case["u"], dtype=torch.float64), torch.tensor(case["P"], dtype=torch.float64))
        assert not case["exact"] or int(token) == case["token"]


def test_goldens_of_features():
    bits = np.load(GOLDENS / "bits.npz")
    got = uniform_features(torch.from_numpy(bits["u"]), "bits", 32)
    assert np.array_equal(got.numpy().astype(np.uint8), bits["bits_msb_first"])
    gold = np.load(GOLDENS / "features.npz")
    u = torch.from_numpy(gold["u"])
    for kind, dim, name in (("arithmetic", 24, "ar24_strict"), ("threshold", 8, "th8"), ("threshold", 32, "th32")):
        assert np.array_equal(uniform_features(u, kind, dim).numpy().astype(np.uint8), gold[name])
    np.testing.assert_allclose(uniform_features(u, "scalar", 1).numpy()[:, 0], gold["fl"], atol=1e-7)
    weights = gold["official_linear_interp3_weights"]
    np.testing.assert_allclose(uniform_features(u, "interpolate", 3).numpy(), weights, atol=1e-7)


@pytest.mark.core
def test_beta_placements_have_the_moments_of_beta():
    probs = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
    tokens = torch.ones(40_000, dtype=torch.long)
    for moments in json.loads((GOLDENS / "beta.json").read_text())["moments"]:
        u, valid = uniform_for(tokens, probs.expand(40_000, -1), beta_shares(tokens, moments["b"]))
        z = (u.double() - 0.25) / 0.5
        assert valid.all() and abs(z.mean() - 0.5) < 0.01 and abs(z.var() - moments["var"]) < 0.005


def test_best_of_takes_the_most_central():
    for case in json.loads((GOLDENS / "best_of_m.json").read_text()):
        positions = torch.tensor(case["rel_teacher"])
        assert int(best_of(positions, torch.tensor(case["n_correct"]))) == case["argmin"]


def test_unknown_features_are_refused():
    for kind, dim in (("sine", 4), ("bits", 16), ("scalar", 2), ("threshold", 0)):
        with pytest.raises(ValueError, match="features="):
            uniform_features(torch.rand(3), kind, dim)
