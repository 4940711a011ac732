"""Picks, intervals and features of uniforms against exact goldens, and their properties."""

import json
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenahead.generation.tensors.sampling import interval, pick
from tokenahead.modeling.ptp.inputs import uniform_features
from tokenahead.training.ptp.forwards import RandomDraws, uniform_between

GOLDENS = Path(__file__).parents[2] / "data" / "ptp"
LAWS = st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any)


@settings(max_examples=200)
@given(LAWS, st.floats(0, 1), st.data())
def test_a_placed_uniform_picks_its_token(weights, z, data):
    probs = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    token = torch.tensor(data.draw(st.integers(0, len(weights) - 1)))
    low, high = interval(token, probs)
    u, valid = uniform_between(low, high, torch.tensor(z, dtype=torch.float64))
    assert u.dtype == torch.float32 and 0 <= u < 1
    assert bool(valid) == (weights[int(token)] > 0)
    if valid:
        assert low <= u < high and pick(u, probs) == token


def test_beta_placements_have_the_moments_of_beta_and_narrow_intervals_hold_no_float32():
    low, high = torch.tensor([0.25, 0.75], dtype=torch.float64)
    for moments in json.loads((GOLDENS / "beta.json").read_text())["moments"]:
        shares = RandomDraws(moments["b"]).shares(torch.ones(1, 1), 40_000)
        u, valid = uniform_between(low, high, shares)
        z = (u.double() - 0.25) / 0.5
        assert valid.all() and abs(z.mean() - 0.5) < 0.01 and abs(z.var() - moments["var"]) < 0.005
    assert not uniform_between(low * 2 + 1e-12, low * 2 + 1.1e-12, shares)[1].any()


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
