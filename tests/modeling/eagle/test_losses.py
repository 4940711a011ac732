"""Training losses against the official code's numbers, and what rows count."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from tests.eagle_models import CASES, golden_case, tiny_backbone
from tokenahead import EagleHead
from tokenahead.configuration.loss_options import EagleLossOptions
from tokenahead.modeling.eagle import losses as eagle_losses

IDS = torch.randint(2, 64, (2, 20), generator=torch.Generator().manual_seed(5))


def training_case(name):
    case = golden_case(name)
    if name == "hass_qwen2":
        case.head.loss_options.objective = "hass"
    golden = case.golden
    inputs = {"labels": golden["train_labels"], "attention_mask": golden["train_attention_mask"]}
    return case.head, golden, lambda: case.head(golden["train_input_ids"], **inputs)


@pytest.mark.by_day("eagle3_llama-5", "eagle1_llama-128", "hass_qwen2-5")
@pytest.mark.parametrize("block", [5, 128])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_the_official_ones(name, block, monkeypatch):
    monkeypatch.setattr(eagle_losses, "BLOCK", block)
    monkeypatch.setattr(eagle_losses, "LOGITS_PER_CHUNK", 700)
    head, golden, run = training_case(name)
    out = run()
    torch.testing.assert_close(out.step_losses, golden["step_losses"], atol=1e-4, rtol=0)
    torch.testing.assert_close(out.loss[None], golden["loss"], atol=1e-4, rtol=0)
    out.loss.backward()
    for key, norm in golden.items():
        if "_grad_norm." in key:
            got = dict(head.named_parameters())[key.split("_grad_norm.")[1]].grad.norm()
            torch.testing.assert_close(got[None], norm, rtol=1e-4, atol=0)


def head_and_batch(version=3, draft_ids=None, **options):
    head = EagleHead.from_backbone(tiny_backbone(), version=version, draft_ids=draft_ids, **options)
    with torch.no_grad():
        for parameter in head.layers.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    return head


def learn(head):
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(20):
        head(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


OBJECTIVES = [(3, {}), (1, {}), (1, {"objective": "hass"})]


def test_ignored_labels_do_not_count_and_are_still_read():
    head, labels = head_and_batch(loss_options={"steps": 3}), IDS.clone()
    labels[:, :10] = -100
    whole, part = head(IDS, labels=IDS).step_losses, head(IDS, labels=labels).step_losses
    assert not torch.allclose(whole, part)
    labels[:, 10:] = 5  # what is predicted is the backbone's distribution: labels only choose rows
    torch.testing.assert_close(head(IDS, labels=labels).step_losses, part)


@pytest.mark.by_day("3-options0-cross_entropy", "1-options2-block", "3-options3-cross_entropy")
@pytest.mark.parametrize("divergence", ["cross_entropy", "block"])
@pytest.mark.parametrize(("version", "options"), [*OBJECTIVES, (3, {"draft_ids": torch.arange(0, 64, 2)})])
def test_rows_without_targets_have_no_logits(version, options, divergence, monkeypatch):
    given = {"objective": options.get("objective"), "divergence": divergence}
    head = head_and_batch(version, options.get("draft_ids"), loss_options=given)
    labels, drafted, taught = IDS.clone(), [], []
    labels[:, :14], steps = -100, head(IDS, labels=IDS).step_losses.numel()

    def noted(owner, name, counts, place=0):
        own = getattr(owner, name)

        def counted(*args, **given):
            counts.append(len(args[place]))
            return own(*args, **given)

        monkeypatch.setattr(owner, name, counted)

    noted(head, "draft_logits", drafted)
    noted(eagle_losses, "product_terms", drafted, 1)
    noted(head, "backbone_logits", taught)
    with torch.no_grad():
        head(IDS, labels=labels)
    # 6 labels of each of two texts: every step predicts all of them, twice where steps are read together
    assert drafted == [12] * steps * (1 + (divergence == "block"))
    assert set(taught) <= {12}


@pytest.mark.parametrize("divergence", ["cross_entropy", "kl"])
def test_an_unembedding_with_hooks_has_the_loss_of_a_plain_one(divergence):
    """Autograd's own products, where calls of the unembedding must be seen; not all likeliest tokens are drafted."""
    head = head_and_batch(3, torch.arange(0, 64, 2), loss_options={"divergence": divergence, "label_weight": 0.3})
    learned = [parameter for parameter in head.parameters() if parameter.requires_grad]
    plain = head(IDS, labels=IDS)
    seen = head.lm_head.register_forward_hook(lambda *_: None)
    hooked = head(IDS, labels=IDS)
    seen.remove()
    torch.testing.assert_close(hooked.step_losses, plain.step_losses, atol=1e-5, rtol=1e-5)
    for one, other in zip(torch.autograd.grad(plain.loss, learned), torch.autograd.grad(hooked.loss, learned)):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-4)


def test_a_step_of_training_is_a_step_of_drafting():
    """Step 2 of the unrolled loss reads what a drafted row reads: checked on the last row of a prefix."""
    head = head_and_batch(loss_options={"steps": 3, "decay": 1.0})
    prefix = 8
    with torch.no_grad():
        states = head.backbone(IDS, output_hidden_states=True).hidden_states
        cache, features = eagle_losses.DynamicCache(), head.fuse(states)[:, :prefix]
        ids = IDS[:, 1 : prefix + 1]
        for step in range(3):
            features = head.rows(features, ids, past_key_values=cache)[:, -1:]
            ids = IDS[:, prefix + 1 + step][:, None]
        distribution = head.backbone.lm_head(states[-1][:, prefix + 2]).softmax(-1)
        expected = -(distribution * head.draft_logits(features)[:, 0].log_softmax(-1)).sum(-1).mean()
    labels = torch.full_like(IDS, -100)
    labels[:, prefix + 3] = IDS[:, prefix + 3]
    torch.testing.assert_close(head(IDS, labels=labels).step_losses[2], expected)


@pytest.mark.by_day("{'objective': 'hass'}")
@pytest.mark.parametrize("options", [{}, {"divergence": "block"}, {"objective": "hass"}], ids=str)
def test_version_1_learns_over_a_draft_vocabulary(options):
    head = head_and_batch(1, draft_ids=IDS.unique()[::2], loss_options=options)
    before = head(IDS, labels=IDS).loss
    learn(head)
    assert head.draft_logits(torch.zeros(3, 32)).shape == (3, head.config.draft_vocab_size)
    assert head(IDS, labels=IDS).loss < before - 0.05


def test_noise_is_for_training_alone_and_centred(monkeypatch):
    head = head_and_batch(version=1, loss_options={"noise": 0.2})
    quiet = head.eval()(IDS, labels=IDS).loss
    assert torch.equal(head(IDS, labels=IDS).loss, quiet)
    assert not torch.equal(head.train()(IDS, labels=IDS).loss, quiet)
    monkeypatch.setattr(torch, "rand_like", lambda like: torch.full_like(like, 0.5))
    assert torch.equal(head(IDS, labels=IDS).loss, quiet)


@pytest.mark.parametrize(("version", "options"), OBJECTIVES[1:], ids=["eagle1", "hass"])
def test_noise_is_as_wide_as_the_text_is_short(version, options, monkeypatch):
    """With any padding of a text, and with any other texts packed into its row."""
    monkeypatch.setattr(torch, "rand_like", torch.ones_like)
    head = head_and_batch(version, loss_options={"noise": 0.2} | options).train()
    short, long = IDS[:1, :9], IDS[1:, :11]
    alone = [head(ids, labels=ids).head_losses * (ids.shape[1] - 2) for ids in (short, long)]
    padded = torch.nn.functional.pad(short, (0, 11))
    mask = (torch.arange(20) < 9).long()[None]
    torch.testing.assert_close(head(padded, attention_mask=mask, labels=padded).head_losses * 7, alone[0])
    packed, positions = torch.cat([short, long], 1), torch.cat([torch.arange(9), torch.arange(11)])[None]
    labels = packed.clone()
    labels[:, 9] = -100
    found = head(packed, position_ids=positions, labels=labels).head_losses
    torch.testing.assert_close(found * 16, sum(alone))


def test_texts_too_short_for_a_pair_have_no_loss():
    head = head_and_batch()
    out = head(IDS[:, :2], labels=IDS[:, :2])
    out.loss.backward()
    assert out.loss == 0 and out.step_losses.tolist() == [0.0] * 7


def test_options_are_checked():
    for version, options, message in [
        (3, {"objective": "hass"}, "objective='hass'.*3.*'ttt'"),
        (1, {"objective": "ttt"}, "'eagle1'.*'hass'"),
        (1, {"steps": 2}, "steps=2.*1.*'eagle1'"),
        (3, {"steps": 0}, "steps=0.*1"),
        (3, {"decay": -0.1}, "decay=-0.1"),
        (1, {"objective": "hass", "topk": 0}, "topk=0"),
        (3, {"label_weight": 1.5}, "label_weight=.*1.5.*0.*1"),
    ]:
        with pytest.raises(ValueError, match=message):
            EagleLossOptions(**options).resolved(version)


@pytest.mark.by_day("official")
@pytest.mark.parametrize("layout", ["tokenahead", "official"])
def test_a_plain_trainer_trains_saves_and_resumes(layout, tmp_path):
    head = head_and_batch(loss_options={"steps": 2})
    head.config.layout = layout
    data = [{"input_ids": row, "labels": row} for row in IDS.repeat(4, 1)]
    options = dict(per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2, report_to=[])
    options |= dict(output_dir=tmp_path, save_steps=2, use_cpu=True, gradient_checkpointing=True, disable_tqdm=True)
    before = head.fc.weight.clone()
    Trainer(head, TrainingArguments(max_steps=2, **options), train_dataset=data).train()
    assert not torch.equal(head.fc.weight, before)
    kept = {name: value.clone() for name, value in head.state_dict().items()}
    again = EagleHead.from_pretrained(tmp_path / "checkpoint-2").attach(head.backbone)
    assert again.config.layout == layout and again.loss_options.steps == 2
    assert all(torch.equal(value, kept[name]) for name, value in again.state_dict().items())
    trainer = Trainer(again, TrainingArguments(max_steps=3, **options), train_dataset=data, eval_dataset=data)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3 and torch.isfinite(torch.tensor(trainer.evaluate()["eval_loss"]))


@pytest.mark.core
def test_shifted_labels_say_the_same():
    head = head_and_batch(loss_options={"steps": 2})
    labels = IDS.clone()
    labels[:, ::3] = -100
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    assert torch.equal(head(IDS, shift_labels=shifted).loss, head(IDS, labels=labels).loss)
    with pytest.raises(ValueError, match="labels.*64.*64"):
        head(IDS, labels=torch.full_like(IDS, 64))
