"""Gradients that the loss makes in its forward, against autograd's through the whole unrolled head."""

import pytest
import torch

from tests.eagle_models import tiny_backbone
from tokenahead import EagleHead
from tokenahead.modeling.eagle import steps

IDS = torch.randint(2, 64, (2, 26), generator=torch.Generator().manual_seed(5))
REAL = torch.ones_like(IDS).index_fill(1, torch.arange(4), 0)
FORMS = {
    "whole": {"labels": IDS},
    "padded": {"labels": IDS.masked_fill(REAL == 0, -100), "attention_mask": REAL},
    "packed": {"labels": IDS, "position_ids": torch.cat([torch.arange(11), torch.arange(15)])[None].expand(2, -1)},
    "prompt": {"labels": IDS.index_fill(1, torch.arange(12), -100)},
}
OPTIONS = [
    {},
    {"divergence": "kl", "decay": 0.7, "steps": 3},
    {"divergence": "kl", "label_weight": 0.3},
    {"divergence": "lk", "steps": 2},
    {"divergence": "reverse_kl", "steps": 2},
    {"divergence": "tv", "label_weight": 0.3, "steps": 2},
    {"divergence": "lk_kl", "steps": 2},
]


def head_of(options, draft_ids=None, version=3):
    torch.manual_seed(0)
    given = {} if draft_ids is None else {"draft_ids": draft_ids}
    head = EagleHead.from_backbone(tiny_backbone().double(), version=version, loss_options=options, **given)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    return head.double().train()


def learned(head, arguments):
    head.zero_grad()
    out = head(IDS, **arguments)
    out.loss.backward()
    return out, {name: each.grad.clone() for name, each in head.named_parameters() if each.grad is not None}


def unrolled_loss(head, arguments):
    """The same loss, all steps of all rows at once, through autograd alone."""
    labels, options = arguments["labels"], head.loss_options.resolved(3)
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    states = head._run_backbone(IDS, mask, positions).hidden_states
    logits = head.backbone_logits(states[-1]).detach()
    batch = steps.TrainingBatch.of(IDS, labels, mask, positions, states[-1].detach())
    outputs = head._unrolled(head.fuse(states), batch, options.steps)
    total = 0.0
    for step, features in enumerate(outputs):
        rows = torch.arange(batch.num_rows) + 1 + step
        inside = rows.clamp(max=IDS.shape[1] - 1)
        log_p = logits.log_softmax(-1)[:, inside]
        known = torch.isin(log_p.argmax(-1), head.draft_ids)
        log_q = head.draft_logits(features).log_softmax(-1)
        drafted = log_p[..., head.draft_ids]
        p = drafted.softmax(-1)
        if options.divergence == "kl":
            terms = (p * (p.log() - log_q)).sum(-1) * known
        elif options.divergence in ("tv", "lk", "lk_kl"):
            log_alpha = torch.minimum(drafted, log_q).logsumexp(-1)
            terms = 1 - log_alpha.exp() if options.divergence == "tv" else -log_alpha
            if options.divergence == "lk_kl":
                kl = (drafted.exp() * (drafted - log_q)).sum(-1)
                terms = terms + (-3 * log_alpha.detach().exp()).exp() * kl
            terms = terms * known
        elif options.divergence == "reverse_kl":
            terms = (log_q.exp() * (log_q - p.log())).sum(-1) * known
        else:
            terms = -(p * log_q).sum(-1) * known
        if options.label_weight:
            target = labels[:, (inside + 1).clamp(max=IDS.shape[1] - 1)]
            likelihood = torch.where(target[..., None] == head.draft_ids, log_q, 0.0).sum(-1)
            terms = (1 - options.label_weight) * terms - options.label_weight * likelihood
        counted = batch.counted(step)
        total = total + options.decay**step * (terms * counted).sum() / counted.sum().clamp(min=1)
    return total


@pytest.mark.parametrize(
    "draft_ids", [None, torch.arange(0, 64, 2), torch.arange(62, -1, -2)], ids=["V", "Vd", "order"]
)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_the_whole_graph(form, options, draft_ids, monkeypatch):
    monkeypatch.setattr(steps, "BLOCK", 7)
    monkeypatch.setattr(steps, "LOGITS_PER_CHUNK", 600)
    head = head_of(options, draft_ids)
    out, gradients = learned(head, FORMS[form])
    head.zero_grad()
    expected = unrolled_loss(head, FORMS[form])
    expected.backward()
    torch.testing.assert_close(out.loss, expected.detach(), rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        norm = dict(head.named_parameters())[name].grad
        assert (gradient - norm).norm() <= 1e-6 * norm.norm(), name  # norms of transformers compute in float32


@pytest.mark.parametrize("hold", ["hook", "frozen", "norm_output"])
def test_a_head_in_another_state_has_the_same_gradients(hold, monkeypatch):
    head, called = head_of({"divergence": "kl"}), []
    if hold == "frozen":
        head.lm_head.requires_grad_(False)
    if hold == "norm_output":
        head.config.norm_output = True
    _, by_products = learned(head, FORMS["whole"])
    if hold == "hook":
        head.lm_head.register_forward_hook(lambda *_: called.append(1))
    else:
        monkeypatch.setattr(steps, "has_products", lambda *_: False)
    _, by_autograd = learned(head, FORMS["whole"])
    assert by_products.keys() == by_autograd.keys() and ("lm_head.weight" in by_products) == (hold != "frozen")
    for name, gradient in by_products.items():
        assert (gradient - by_autograd[name]).norm() <= 1e-6 * gradient.norm(), name
    assert bool(called) == (hold == "hook")


@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[4]], ids=["products", "autograd"])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_accumulated_gradients_are_those_of_one_batch(parts, options):
    ids = torch.cat([IDS, IDS.roll(3, 1)])
    head = head_of(options, torch.arange(0, 64, 2))
    labels = ids.masked_fill(torch.arange(26) < torch.tensor([[4], [9], [0], [15]]), -100)
    counts = head.loss_counts(labels)
    found = []
    for size in (4, 4 // parts):
        head.zero_grad()
        for some, wanted in zip(ids.split(size), labels.split(size)):
            head(some, labels=wanted, num_items_in_batch=counts).loss.backward()
        found.append({name: each.grad.clone() for name, each in head.named_parameters() if each.grad is not None})
    for name, gradient in found[0].items():
        assert (gradient - found[1][name]).norm() <= 1e-6 * gradient.norm(), name


def test_backward_runs_once():
    head = head_of({})
    loss = head(IDS, labels=IDS).loss
    loss.backward()
    with pytest.raises(RuntimeError, match="backward ran"):
        loss.backward()


def test_rows_before_the_first_target_run_no_later_step(monkeypatch):
    monkeypatch.setattr(steps, "BLOCK", 4)
    head, rows = head_of({"steps": 3}), []
    own = head.rows
    monkeypatch.setattr(head, "rows", lambda features, *rest: (rows.append(features.shape[1]), own(features, *rest))[1])
    learned(head, {"labels": IDS.index_fill(1, torch.arange(20), -100)})
    assert rows[0] == 24 and sum(rows[1:]) <= 2 * 8  # step 0 whole, later steps near the six targets
