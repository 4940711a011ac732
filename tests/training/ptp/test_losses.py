"""Losses of parallel token prediction, and the law that is verified."""

import json
from pathlib import Path

import pytest
import torch

from tokenahead.training.ptp.losses import slot_losses, slot_mean, target_law
from tokenahead.training.ptp.options import LOSSES, PTPOptions

GOLDENS = Path(__file__).parents[2] / "data" / "ptp"


def test_the_verified_law_folds_sampling_in_the_librarys_order():
    for case in json.loads((GOLDENS / "fold_sampling.json").read_text()):
        logits = torch.tensor(case["logits"], dtype=torch.float64)
        law = target_law(logits[None, None], case["temperature"], case["top_k"], case["top_p"])[0, 0]
        torch.testing.assert_close(law, torch.tensor(case["P_hf"], dtype=torch.float64), atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_is_least_at_the_target(kind):
    torch.manual_seed(0)
    target = torch.randn(9, dtype=torch.float64)
    law = target.softmax(-1)
    logits = target.clone().requires_grad_()
    if kind == "ce":  # in expectation over tokens
        value = (law * slot_losses(logits.expand(9, -1), torch.arange(9), None, kind)).sum()
    else:
        value = slot_losses(logits, torch.tensor(0), law, kind)
    (gradient,) = torch.autograd.grad(value, logits)
    assert gradient.abs().max() < 1e-9
    for _ in range(20):
        other = target + 0.3 * torch.randn(9, dtype=torch.float64)
        if kind == "ce":
            far = (law * slot_losses(other.expand(9, -1), torch.arange(9), None, kind)).sum()
        else:
            far = slot_losses(other, torch.tensor(0), law, kind)
        assert far > value


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_of_certain_tokens(kind):
    logits = torch.randn(2, 3, 5, requires_grad=True)
    tokens = torch.randint(0, 5, (2, 3))
    certain = torch.nn.functional.one_hot(tokens, 5).double()
    losses = slot_losses(logits, tokens, None, kind)
    torch.testing.assert_close(losses, slot_losses(logits, tokens, certain, kind))
    if kind in ("ce", "kl"):
        torch.testing.assert_close(losses, -logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0])
    sure = slot_losses(1e4 * certain.float(), tokens, None, kind)
    assert sure.abs().max() < 1e-3  # all are 0 where the slot is certain too
    losses.sum().backward()
    assert logits.grad.isfinite().all()


def test_reverse_kl_stays_finite_where_the_law_excludes_tokens():
    law = torch.tensor([0.5, 0.5, 0.0])
    logits = torch.zeros(3, requires_grad=True)
    loss = slot_losses(logits, torch.tensor(0), law, "reverse_kl")
    loss.backward()
    assert loss.isfinite() and logits.grad[2] > 0  # mass leaves the excluded token


def test_the_mean_ignores_what_is_not_valid():
    losses = torch.tensor([[1.0, 2.0, float("nan")], [4.0, float("nan"), float("inf")]], requires_grad=True)
    valid = torch.tensor([[True, True, False], [True, False, False]])
    assert float(slot_mean(losses, valid)) == pytest.approx(7 / 3)
    mean = slot_mean(losses, valid, gamma=0.5)
    assert float(mean) == pytest.approx((1 + 4 + 0.5 * 2) / 2.5)
    mean.backward()
    assert torch.equal(losses.grad == 0, ~valid)
    assert float(slot_mean(losses, torch.zeros_like(valid))) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "mse"}, "loss='mse' is unknown"),
        ({"method": "guess"}, "method='guess' is unknown"),
        ({"sequences": "web"}, "sequences='web' is unknown"),
        ({"completions": 0}, "completions=0 must be at least 1"),
        ({"concentration": 0.0}, "concentration=0.0 must be above 0"),
        ({"gamma": 1.5}, r"gamma=1.5 must lie in \(0, 1\]"),
        ({"base_weight": -1.0}, "base_weight=-1.0"),
        ({"method": "inverse", "loss": "kl"}, "method='inverse' has loss='ce', not 'kl'"),
        ({"method": "inverse", "sequences": "student"}, "method='inverse' has sequences='dataset'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        PTPOptions(**options)


def test_an_unknown_loss_is_refused():
    with pytest.raises(ValueError, match="loss='mse' is unknown"):
        slot_losses(torch.zeros(3), torch.tensor(0), None, "mse")
