"""Distances of distributions: against float64 sums written out, and gradients where distributions hardly meet."""

import pytest
import torch

from tests.families import family_model
from tests.ptp_models import backbone
from tokenahead import EagleHead, MTPHeads
from tokenahead.configuration.loss_options import DIVERGENCES
from tokenahead.modeling.common.teacher import acceptance, divergence, log_acceptance

DRAFTERS = {
    "heads": lambda: MTPHeads.from_backbone(backbone(), window=3),
    "eagle": lambda: EagleHead.from_backbone(backbone(), version=3),
    "modules": lambda: family_model("llama"),
}


def probs(scale=3.0, rows=50, size=40):
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, rows, size, generator=generator, dtype=torch.float64) * scale
    return drawn.log_softmax(-1)


@pytest.mark.core
def test_values():
    log_p, log_q = probs()
    p, q = log_p.exp(), log_q.exp()
    alpha = (p + q - (p - q).abs()).sum(-1) / 2
    want = {
        "cross_entropy": -(p * log_q).sum(-1),
        "kl": (p * (p / q).log()).sum(-1),
        "reverse_kl": (q * (q / p).log()).sum(-1),
        "tv": (p - q).abs().sum(-1) / 2,
        "lk": -alpha.log(),
        "lk_kl": -alpha.log() + (-3 * alpha).exp() * (p * (p / q).log()).sum(-1),
    }
    assert set(want) == set(DIVERGENCES)
    for kind, value in want.items():
        torch.testing.assert_close(divergence(kind, log_p, log_q), value, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(acceptance(log_p, log_q), alpha)
    torch.testing.assert_close(log_acceptance(log_p, log_q).exp(), alpha)
    for kind in set(DIVERGENCES) - {"cross_entropy"}:
        assert divergence(kind, log_p, log_p).abs().max() < 1e-12


def test_gradients_are_right_and_finite_where_distributions_hardly_meet():
    for kind in DIVERGENCES:
        log_p, log_q = probs(rows=4, size=6)
        logits = log_q.clone().requires_grad_(True)
        if kind == "lk_kl":  # its fading factor is detached
            logits.detach_()
        else:
            assert torch.autograd.gradcheck(
                lambda x, kind=kind, log_p=log_p: divergence(kind, log_p, x.log_softmax(-1)), logits
            )
        far = torch.tensor([[60.0, -60.0, 0.0]], requires_grad=True)
        p = torch.tensor([[-60.0, 60.0, 0.0]]).log_softmax(-1)
        divergence(kind, p, far.log_softmax(-1)).sum().backward()
        assert far.grad.isfinite().all()


def test_an_unknown_one_is_named():
    for kind in DRAFTERS:
        model, ids = DRAFTERS[kind](), torch.arange(1, 9)[None]
        model.loss_options.target, model.loss_options.divergence = "teacher", "jsd"
        with pytest.raises(ValueError, match="divergence='jsd'.*'reverse_kl'"):
            model(ids, labels=ids)
