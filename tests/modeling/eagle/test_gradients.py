"""Gradients that the loss makes in its forward; tests/training/test_gradients.py has those of its definition."""

import pytest
import torch

from tests.eagle_models import tiny_backbone
from tokenahead import EagleHead
from tokenahead.modeling.eagle import losses as eagle_losses

IDS = torch.randint(2, 64, (2, 26), generator=torch.Generator().manual_seed(5))


def head_of(options):
    torch.manual_seed(0)
    head = EagleHead.from_backbone(tiny_backbone().double(), version=3, loss_options=options)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    return head.double().train()


def learned(head, labels=IDS):
    head.zero_grad()
    head(IDS, labels=labels).loss.backward()
    return {name: each.grad.clone() for name, each in head.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("hold", ["hook", "frozen", "norm_output"])
def test_a_head_in_another_state_has_the_same_gradients(hold, monkeypatch):
    head, called = head_of({"divergence": "kl"}), []
    if hold == "frozen":
        head.lm_head.requires_grad_(False)
    if hold == "norm_output":
        head.config.norm_output = True
    by_products = learned(head)
    if hold == "hook":
        head.lm_head.register_forward_hook(lambda *_: called.append(1))
    else:
        monkeypatch.setattr(eagle_losses, "has_products", lambda *_: False)
    by_autograd = learned(head)
    assert by_products.keys() == by_autograd.keys() and ("lm_head.weight" in by_products) == (hold != "frozen")
    for name, gradient in by_products.items():
        assert (gradient - by_autograd[name]).norm() <= 1e-6 * gradient.norm(), name
    assert bool(called) == (hold == "hook")


def test_backward_runs_once():
    head = head_of({})
    loss = head(IDS, labels=IDS).loss
    loss.backward()
    with pytest.raises(RuntimeError, match="backward ran"):
        loss.backward()


def test_rows_before_the_first_target_run_no_later_step(monkeypatch):
    monkeypatch.setattr(eagle_losses, "BLOCK", 4)
    head, rows = head_of({"steps": 3}), []
    own = head.run
    monkeypatch.setattr(head, "run", lambda features, *rest: (rows.append(features.shape[1]), own(features, *rest))[1])
    learned(head, IDS.index_fill(1, torch.arange(20), -100))
    assert rows[0] == 24 and sum(rows[1:]) <= 2 * 8  # step 0 whole, later steps near the six targets
