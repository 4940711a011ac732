"""Losses of parallel token prediction, and the distribution that is verified."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tokenahead.training import PTPOptions
from tokenahead.training.ptp.losses import LOSSES, slot_losses, slot_weights, target_probs

GOLDENS = Path(__file__).parents[2] / "data" / "ptp"


def test_the_verified_distribution_folds_sampling_in_the_librarys_order():
    for case in json.loads((GOLDENS / "fold_sampling.json").read_text()):
        logits = torch.tensor(case["logits"], dtype=torch.float64)
        distribution = target_probs(logits[None, None], case["temperature"], case["top_k"], case["top_p"])[0, 0]
        torch.testing.assert_close(distribution, torch.tensor(case["P_hf"], dtype=torch.float64), atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_is_least_at_the_target(kind):
    torch.manual_seed(0)
    target = torch.randn(9, dtype=torch.float64)
    distribution = target.softmax(-1)
    logits = target.clone().requires_grad_()

    def value(logits):
        if kind == "ce":  # in expectation over tokens
            return (distribution * slot_losses(logits.expand(9, -1), torch.arange(9), None, kind)).sum()
        return slot_losses(logits, torch.tensor(0), distribution, kind)

    (gradient,) = torch.autograd.grad(value(logits), logits)
    assert gradient.abs().max() < 1e-9
    least = value(target)
    assert all(value(target + 0.3 * torch.randn(9, dtype=torch.float64)) > least for _ in range(20))


def test_losses_of_certain_tokens():
    for kind in LOSSES:
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


def test_what_slots_weigh():
    valid = torch.tensor([[True, True, False], [True, False, True]])
    assert slot_weights(valid, gamma=0.5).tolist() == [[1.0, 0.5, 0.0], [1.0, 0.0, 0.25]]


@pytest.mark.parametrize(
    "sampling", [{}, {"top_p": 0.9}, {"temperature": 0.7, "top_k": 50}, {"top_k": 5, "top_p": 0.3}]
)
def test_the_verified_distribution_is_that_of_transformers_warpers(sampling):
    """Also where the nucleus is larger than what is looked at first: flat distributions over a large vocabulary."""
    logits = torch.randn(3, 5, 1000, dtype=torch.float64) * torch.tensor([0.05, 1.0, 8.0])[:, None, None]
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | sampling
    warpers = LogitsProcessorList([TemperatureLogitsWarper(settings["temperature"])])
    if settings["top_k"]:
        warpers.append(TopKLogitsWarper(settings["top_k"]))
    if settings["top_p"] < 1:
        warpers.append(TopPLogitsWarper(settings["top_p"]))
    expected = warpers(None, logits.flatten(0, 1)).softmax(-1).view_as(logits)
    torch.testing.assert_close(target_probs(logits, **settings), expected, atol=1e-12, rtol=0)


def test_bad_options():
    for options, message in [
        ({"loss": "mse"}, "loss='mse'"),
        ({"sequences": "web"}, "sequences='web'"),
        ({"completions": 0}, "completions=0.*1"),
        ({"concentration": 0.0}, "concentration=0.0.*0"),
        ({"gamma": 1.5}, "gamma=1.5.*0.*1"),
        ({"base_weight": -1.0}, "base_weight=-1.0"),
        ({"greedy_share": 1.0}, "greedy_share=.*1.0.*0.*1"),
    ]:
        with pytest.raises(ValueError, match=message):
            PTPOptions(**options)
