"""Marginals against enumeration by plain forwards, their bounds, the logit lens and the spread of the next token."""

import itertools

import pytest
import torch
from transformers import MistralConfig

from tests.modeling.heads.backbones import backbone
from tests.models import tiny_model
from tokenahead.training.analysis import layer_divergences, marginal_log_probs, next_token_spread

V = 12
PREFIX = torch.tensor([[3, 7, 5, 9, 2, 4]])


def small(family=None):
    return backbone(vocab_size=V) if family is None else backbone(family, vocab_size=V, sliding_window=4)


@torch.no_grad()
def enumerated(model, prefix, k):
    """Distribution of the k-th next token: a forward per continuation."""
    total = torch.zeros(V, dtype=torch.float64)
    for path in itertools.product(range(V), repeat=k - 1):
        text, weight = torch.cat([prefix, torch.tensor([path], dtype=torch.long)], 1), 1.0
        probs = model(text).logits[0].double().softmax(-1)
        for step, token in enumerate(path):
            weight *= float(probs[prefix.shape[1] - 1 + step, token])
        total += weight * probs[-1]
    return total


@pytest.mark.parametrize("family", [None, MistralConfig])
def test_exact_marginals_are_sums_over_all_continuations(family):
    model = small(family)
    got = marginal_log_probs(model, PREFIX, 3, mass=1.0, batch_size=50)
    for k in (1, 2, 3):
        torch.testing.assert_close(got.log_probs[0, 0, k - 1].exp(), enumerated(model, PREFIX, k), atol=1e-5, rtol=0)
    assert got.branches.tolist() == [[[1, V, V * V]]] and got.missing.max() < 1e-6


@pytest.mark.parametrize("options", [{"mass": 0.8}, {"mass": 0.5}, {"mass": 1.0, "max_branches": 5}])
def test_what_is_left_out_bounds_the_error(options):
    model = small()
    exact = marginal_log_probs(model, PREFIX, 3, mass=1.0).log_probs[0, 0].exp()
    cut = marginal_log_probs(model, PREFIX, 3, **options)
    probs, missing = cut.log_probs[0, 0].exp(), cut.missing[0, 0]
    assert ((probs - exact).abs().sum(-1) / 2 <= missing + 1e-6).all() and missing[1] > 0.01
    floor = probs * (1 - missing)[:, None]
    assert (floor <= exact + 1e-6).all() and (exact <= floor + missing[:, None] + 1e-6).all()
    if "max_branches" in options:
        assert cut.branches[0, 0].tolist() == [1, 5, 5]


@pytest.mark.core
def test_positions_and_padding():
    model = small()
    whole = marginal_log_probs(model, PREFIX, 2, mass=1.0, positions=[2, -1])
    part = marginal_log_probs(model, PREFIX[:, :3], 2, mass=1.0)
    torch.testing.assert_close(whole.log_probs[:, :1], part.log_probs, atol=1e-5, rtol=0)
    for before in (0, 2):
        padded = torch.nn.functional.pad(PREFIX, (before, 2 - before))
        mask = torch.nn.functional.pad(torch.ones_like(PREFIX), (before, 2 - before))
        got = marginal_log_probs(model, padded, 2, mass=1.0, attention_mask=mask)
        torch.testing.assert_close(got.log_probs, whole.log_probs[:, 1:], atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="must not be padding"):
        marginal_log_probs(model, padded, 2, attention_mask=mask, positions=[0])


def test_a_cache_that_cannot_branch_is_refused():
    with pytest.raises(ValueError, match="EvaByteForMTPC"):
        marginal_log_probs(tiny_model(), PREFIX)


@pytest.mark.core
@torch.no_grad()
def test_lens_and_spread_by_definition():
    model = small()
    out = model(PREFIX, output_hidden_states=True)
    distribution = out.logits.softmax(-1)
    got = layer_divergences(model, PREFIX)
    assert got.shape == (2, 1, 6)
    for layer in (1, 2):
        seen = model.lm_head(model.model.norm(out.hidden_states[layer])).softmax(-1)
        want = (seen * (seen.log() - distribution.log())).sum(-1)
        torch.testing.assert_close(got[layer - 1], want, atol=1e-5, rtol=0)
    entropy, counts = next_token_spread(model, PREFIX, masses=(0.5, 0.9))
    torch.testing.assert_close(entropy, -(distribution * distribution.log()).sum(-1), atol=1e-5, rtol=0)
    for mass, count in counts.items():
        for place, size in enumerate(count[0].tolist()):
            best = distribution[0, place].sort(descending=True).values
            assert best[:size].sum() >= mass - 1e-6 and best[: size - 1].sum() < mass
