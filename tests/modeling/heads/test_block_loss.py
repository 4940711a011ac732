"""The block loss: expected accepted drafts and expected calls, their gradients, and every family that learns it."""

import pytest
import torch

from tests.eagle_models import tiny_backbone
from tests.families import family_model
from tests.modeling.heads.backbones import backbone
from tests.modeling.heads.test_draft_vocabularies import KEPT, TYPES, made
from tests.models import tiny_model
from tokenahead import EagleHead, MTPHeadConfig, MTPHeads
from tokenahead.configuration.loss_options import EagleLossOptions, ModuleLossOptions
from tokenahead.modeling.common.teacher import accepted_along, call_weights, cycle_starts, position_weights
from tokenahead.modeling.eagle import losses as eagle_losses
from tokenahead.training.evaluation.drafts import drafted_probs


def ratios(texts=3, length=12, drafts=3, seed=0):
    """log q [B, L, m], log p [B, L, m] of a text, and which drafts lie within it; two texts in one row."""
    generator = torch.Generator().manual_seed(seed)
    log_q, log_p = (-torch.rand(texts, length, drafts, generator=generator).double() * 2 for _ in range(2))
    places = torch.ones(texts, length, dtype=torch.bool)
    places[0, 7] = places[1, -3:] = False
    ahead = torch.nn.functional.pad(places, (0, drafts)).unfold(1, length, 1)[:, 1:].transpose(1, 2)
    return log_q, log_p, ahead & places[..., None], places


def calls(accepted, places):
    """Expected calls, each as a sum over all ways, with gradients."""
    total, reach = 0, accepted.shape[-1]
    for row, is_place in zip(accepted, places):
        starts = [torch.zeros((), dtype=torch.double) for _ in range(len(row) + reach + 1)]
        for t, here in enumerate(is_place.tolist()):
            if not here:
                starts[t] = torch.zeros((), dtype=torch.double)
                continue
            if t == 0 or not is_place[t - 1]:
                starts[t] = torch.ones((), dtype=torch.double)
            steps = [torch.ones((), dtype=torch.double), *row[t], torch.zeros((), dtype=torch.double)]
            for k in range(reach + 1):
                starts[t + k + 1] = starts[t + k + 1] + starts[t] * (steps[k] - steps[k + 1])
            total = total + starts[t]
    return total


def test_weights_of_calls_are_the_gradient_of_the_expected_calls():
    log_q, log_p, drafted, places = ratios()
    log_q.requires_grad_()
    accepted = accepted_along(log_q, log_p, drafted)
    expected = calls(accepted, places)
    torch.testing.assert_close(cycle_starts(accepted.detach(), places).sum(), expected.detach(), rtol=1e-12, atol=0)
    (wanted,) = torch.autograd.grad(expected, log_q, retain_graph=True)
    loss = -(call_weights(accepted, places) * accepted).sum()
    (found,) = torch.autograd.grad(loss, log_q)
    assert (found - wanted).abs().max() < 1e-10 and wanted.abs().max() > 0.1
    assert torch.equal(position_weights("expected_calls", accepted, places), call_weights(accepted, places))


def test_accepted_drafts_are_the_smallest_product_of_ratios_so_far():
    log_q, log_p, _, _ = ratios()
    accepted = accepted_along(log_q, log_p, torch.ones_like(log_q, dtype=torch.bool))
    for k in range(3):
        products = torch.stack([(log_q - log_p)[..., : j + 1].sum(-1).exp() for j in range(k + 1)])
        torch.testing.assert_close(accepted[..., k], products.amin(0).clamp(max=1))
    cut = accepted_along(log_q, log_p, torch.tensor([True, False, True]))
    torch.testing.assert_close(cut[..., 0], accepted[..., 0])
    assert cut[..., 1:].count_nonzero() == 0


def text():
    """Two packed documents of 9 tokens and a row whose prompt is not scored."""
    ids = torch.randint(1, 64, (2, 18), generator=torch.Generator().manual_seed(2))
    labels, positions = ids.clone(), torch.arange(18).repeat(2, 1)
    labels[1, :5], positions[0] = -100, torch.arange(9).repeat(2)
    return ids, labels, positions


def expected_terms(base, heads, ids, labels, positions):
    """m_k [B, L, m] with gradients and the positions, from the definitions, row by row."""
    log_p = base(ids, position_ids=positions, use_cache=False).logits.log_softmax(-1)
    windows = torch.nn.functional.pad(ids, (0, 4)).unfold(1, 18, 1)[:, 1:].transpose(1, 2)
    log_q = heads.distribution(ids, position_ids=positions).token_log_probs(windows)
    kept, places = torch.zeros(2, 18, 3), torch.zeros(2, 18, dtype=torch.bool)
    kept = [[[torch.zeros(())] * 3 for _ in range(18)] for _ in range(2)]
    for row in range(2):
        for t in range(18):
            inside = [
                t + 1 + c < 18 and labels[row, t + 1 + c] != -100 and positions[row, t + 1 + c] > positions[row, t]
                for c in range(4)
            ]
            places[row, t] = bool(inside[0] and inside[1])
            total, least = torch.zeros(()), torch.zeros(())
            for c in range(1, 4):
                if not all(inside[: c + 1]) or log_q[row, t, c].isinf():
                    break
                total = total + log_q[row, t, c] - log_p[row, t + c, ids[row, t + 1 + c]].detach()
                least = torch.minimum(least, total)
                kept[row][t][c - 1] = least.exp()
    return torch.stack([torch.stack([torch.stack(cell) for cell in row]) for row in kept]), places


@pytest.mark.by_day(
    "uniform-ff", "expected_calls-hmm", "expected_calls-medusa-own", "uniform-hydra++", "expected_calls-layer"
)
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("kind", ["uniform", "expected_calls"])
def test_every_family_learns_it(name, kind):
    base, heads = made(name) if name in ("cp", "hydra") else made(name, list(range(64)))
    heads.config.loss_target, heads.config.loss_divergence, heads.config.position_weighting = "teacher", "block", kind
    heads.config.validate()
    ids, labels, positions = text()
    found = heads(ids, labels=labels, position_ids=positions)
    found.loss.backward()
    gradients = [parameter.grad.clone() for parameter in heads.parameters() if parameter.grad is not None]
    heads.zero_grad()
    kept, places = expected_terms(base, heads, ids, labels, positions)
    weights = position_weights(kind, kept.detach(), places)
    counts = heads.loss_counts(labels, position_ids=positions)
    assert counts[1] == places.sum() + 1  # a target after the prompt's last token, where no cycle begins
    want = -(weights * kept).sum() / counts[1]
    torch.testing.assert_close(found.loss, want.detach(), atol=1e-5, rtol=1e-4)
    want.backward()
    others = [parameter.grad for parameter in heads.parameters() if parameter.grad is not None]
    assert len(gradients) == len(others) > 0
    for one, other in zip(gradients, others):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)
    assert all(parameter.grad is None for parameter in base.parameters())
    pooled = heads.pooled_loss(found.head_losses.nan_to_num() * counts, counts)
    torch.testing.assert_close(pooled, found.loss.detach(), atol=1e-5, rtol=1e-4)


def test_the_labels_can_be_mixed_in():
    base, heads = made("cp")
    ids, labels, positions = text()
    losses = []
    heads.config.loss_target, heads.config.loss_divergence = "teacher", "block"
    for share in (0.0, 0.25, 1.0):
        heads.config.loss_label_weight = share
        losses.append(heads(ids, labels=labels, position_ids=positions).loss.detach())
    torch.testing.assert_close(losses[1], 0.75 * losses[0] + 0.25 * losses[2])


def test_options_that_contradict_it():
    for wrong in [
        {"divergence": "block", "target": "labels"},
        {"divergence": "block", "normalization": "paper"},
        {"position_weighting": "expected_calls"},
    ]:
        assert MTPHeadConfig(loss_options={"divergence": "block"}).loss_target == "teacher"
        with pytest.raises(Exception, match="block"):
            MTPHeadConfig(loss_options=wrong)


def reference(drafter, labels, drafts, kind="uniform"):
    """Sum of the weighted terms from whole distributions of all drafts, with gradients, and m_k [B, L, m]."""
    kept = torch.zeros(*labels.shape, drafts)
    places = torch.zeros_like(labels, dtype=torch.bool)
    for part in drafted_probs(drafter, {"input_ids": labels.clamp(min=1), "labels": labels}, drafts):
        log_q, log_p = (
            values.log_softmax(-1).gather(-1, part.tokens[..., None])[..., 0]
            for values in (part.draft, part.target.detach())
        )
        found = accepted_along(log_q, log_p, part.scored & log_q.isfinite())
        kept = kept.index_put((part.rows, part.columns), found)
        places[part.rows, part.columns] = True
    return (position_weights(kind, kept.detach(), places) * kept).sum(), kept


def gradients(drafter, loss):
    drafter.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None and p.grad.any()}


def same_gradients(drafter, found, wanted):
    found, wanted = gradients(drafter, found), gradients(drafter, wanted)
    assert found.keys() == wanted.keys() and found
    for name in found:
        torch.testing.assert_close(found[name], wanted[name], atol=1e-5, rtol=1e-3)


def answers(model):
    torch.manual_seed(2)
    labels = model.generate(torch.randint(1, 64, (2, 3)), do_sample=True, top_k=0, max_new_tokens=15)
    labels[1, :5] = -100
    return labels


@pytest.mark.by_day("None-uniform", "ids1-expected_calls")
@pytest.mark.parametrize("kind", ["uniform", "expected_calls"])
@pytest.mark.parametrize("ids", [None, KEPT])
def test_eagle_steps_learn_it(ids, kind, monkeypatch):
    monkeypatch.setattr(eagle_losses, "BLOCK", 5)
    options = {"divergence": "block", "position_weighting": kind, "steps": 3}
    head = EagleHead.from_backbone(tiny_backbone(), draft_ids=None if ids is None else torch.tensor(ids))
    head.loss_options.update(**options)
    labels = answers(head.backbone)
    out = head(labels.clamp(min=1), labels=labels)
    counts = head.loss_counts(labels)
    total, kept = reference(head, labels, 3, kind)
    torch.testing.assert_close(out.loss, -total.detach() / counts[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(out.acceptances * counts, kept.detach().sum((0, 1)), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(head.pooled_loss(out.head_losses * counts, counts), out.loss.detach())
    same_gradients(head, out.loss, -total / counts[0])


@pytest.mark.parametrize("objective", ["eagle1", "hass"])
def test_steps_of_version_1_learn_it_beside_their_features(objective):
    head = EagleHead.from_backbone(tiny_backbone(), version=1)
    labels, losses = answers(head.backbone), []
    for divergence in ("block", "cross_entropy"):
        head.loss_options.update(divergence=divergence, objective=objective)
        losses.append(head(labels.clamp(min=1), labels=labels))
    counts = head.loss_counts(labels)
    total, _ = reference(head, labels, len(counts))
    torch.testing.assert_close(losses[0].step_losses @ counts.float(), -total.detach(), atol=1e-4, rtol=1e-4)
    assert losses[0].loss < losses[1].loss and gradients(head, losses[0].loss)


@pytest.mark.by_day("deepseek_v3-uniform", "qwen2-expected_calls")
@pytest.mark.parametrize("kind", ["uniform", "expected_calls"])
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen2"])
def test_modules_learn_it(name, kind):
    model = family_model(name, num_nextn_predict_layers=2)
    model.loss_options = ModuleLossOptions(
        target="teacher", divergence="block", position_weighting=kind, unroll_steps=3
    )
    model.train_only("drafter")
    labels = answers(model)
    counts = model.loss_counts(labels)
    out = model(labels.clamp(min=1), labels=labels)
    total, kept = reference(model, labels, 3, kind)
    wanted = out.head_losses[0] - 0.1 * total / counts[1]
    torch.testing.assert_close(out.loss, wanted.detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(out.acceptances[1:] * counts[1:], kept.detach().sum((0, 1)), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.pooled_loss(out.head_losses * counts, counts), out.loss.detach())
    same_gradients(model, out.loss, wanted)


def test_losses_of_drafters_refuse_what_contradicts_it():
    for wrong in ({"position_weighting": "expected_calls"}, {"divergence": "block", "position_weighting": "some"}):
        with pytest.raises(ValueError, match="position_weighting"):
            EagleLossOptions(**wrong).resolved(3)
        with pytest.raises(ValueError, match="position_weighting"):
            ModuleLossOptions(**wrong)


@pytest.mark.by_day("cp-expected_calls")
@pytest.mark.parametrize("kind", ["uniform", "expected_calls"])
@pytest.mark.parametrize("options", [{}, {"head_type": "cp", "rank": 2}], ids=["ff", "cp"])
def test_a_model_with_heads_of_its_own_learns_it(options, kind):
    model = tiny_model(3, vocab_size=64, num_pred_heads=4, window_size=8, pad_token_id=None, initializer_range=0.3)
    if options:
        model.set_head(**options)
    config = model.config.mtp_head
    config.loss_target, config.loss_divergence, config.position_weighting = "teacher", "block", kind
    labels = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(2))
    out = model(labels, labels=labels)
    counts = model.loss_counts(labels)
    total, _ = reference(model, labels, 3, kind)
    own = torch.nn.functional.cross_entropy(model(labels).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    wanted = own - model.mtp_loss_weight * total / counts[1]
    torch.testing.assert_close(out.loss, wanted.detach(), atol=1e-5, rtol=1e-4)
    out.loss.backward()
    assert model.lm_head.weight.grad.any()


def test_a_head_learns_what_is_accepted():
    """On text of the backbone's own, more drafts are accepted after a few steps than before."""
    base = backbone(initializer_range=0.4)
    torch.manual_seed(1)
    ids = base.generate(torch.randint(1, 64, (16, 1)), do_sample=True, top_k=0, max_new_tokens=30)
    options = {"head_type": "hydra", "window": 3, "loss_options": {"divergence": "block", "label_weight": 0.1}}
    heads = MTPHeads.from_backbone(base, draft_ids=None, **options)
    optimizer = torch.optim.Adam(heads.parameters(), 3e-3)
    accepted = []
    for _ in range(25):
        out = heads(ids, labels=ids)
        accepted.append(out.acceptances[1:].sum().item())
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    assert accepted[-1] > accepted[0] + 0.1 and len(KEPT)
