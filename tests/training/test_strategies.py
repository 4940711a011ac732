"""Strategies of training: what learns and when, the same step for every division of a batch, exact resumption."""

import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM, TrainerCallback

from tests.families import family_model
from tests.training.conftest import ragged_rows, small_model, trainer_for
from tests.training.test_evaluation_loss import llama
from tokenahead import EagleHead, MTPHeads
from tokenahead.modeling.heads.joint import JointMTPModel
from tokenahead.training import TrainingStrategy


def heads(**options):
    torch.manual_seed(0)
    return MTPHeads.from_backbone(llama(num_hidden_layers=2), window=3, **options)


def modules():
    return family_model("llama", vocab_size=320, num_nextn_predict_layers=2)


def circuit(**options):
    model = small_model()
    model.set_head(head_type="cp", rank=2, window=3, **options)
    return model


def eagle(version=3, **loss):
    torch.manual_seed(0)
    head = EagleHead.from_backbone(
        llama(num_hidden_layers=3), version=version, **({"aux_layers": [1, 2]} if version == 3 else {})
    )
    for name, value in loss.items():
        setattr(head.loss_options, name, value)
    return head


CASES = {
    "heads only": (heads, {}),
    "heads, lk": (heads, dict(loss=dict(target="teacher", divergence="lk"))),
    "heads, kl and labels": (heads, dict(loss=dict(target="teacher", divergence="kl", label_weight=0.3))),
    "heads, Eq. 4": (lambda: heads(head_type="cp", rank=2, loss_options=dict(normalization="paper")), {}),
    "heads, balanced": (
        lambda: heads(head_type="medusa", loss_options=dict(weights=[0.5, 0.3, 0.4])),
        dict(loss=dict(balance="rms")),
    ),
    "heads, draft layers": (lambda: heads(head_type="cp", rank=2), dict(draft_layers=1, head_warmup=2)),
    "heads, joint": (heads, dict(train="all", head_warmup=0.5, drafter_lr_multiplier=3.0, loss_weight=0.4)),
    "medusa, joint with adapters": (
        lambda: heads(head_type="medusa"),
        dict(train="lora", lora_rank=2, loss_weight=0.0, loss_weight_last=0.2, loss_weight_shape="sine"),
    ),
    "layer, joint": (lambda: heads(head_type="layer"), dict(train="all")),
    "evabyte, joint": (small_model, dict(train="all", head_warmup=2, loss_weight=0.5)),
    "circuit, Eq. 4": (lambda: circuit(loss_options=dict(normalization="paper")), dict(train="all")),
    "circuit, reverse kl": (circuit, dict(train="all", loss=dict(target="teacher", divergence="reverse_kl"))),
    "modules, joint, tv": (modules, dict(train="all", loss=dict(target="teacher", divergence="tv"))),
    "modules with adapters": (modules, dict(train="lora", lora_rank=2, drafter_lr_multiplier=2.0)),
    "eagle 3, lk": (lambda: eagle(steps=3), dict(loss=dict(divergence="lk"))),
    "eagle 3, and labels": (lambda: eagle(steps=2), dict(loss=dict(label_weight=0.3))),
    "eagle 1": (lambda: eagle(1), {}),
    "hass": (lambda: eagle(1, objective="hass", steps=2), {}),
}


def state(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def trained(name, folder, batch=4, steps=2, rows=None, **options):
    make, fields = CASES[name]
    return trainer_for(
        make(), folder, ragged_rows(16) if rows is None else rows, per_device_train_batch_size=batch,
        gradient_accumulation_steps=4 // batch, max_steps=steps, strategy=TrainingStrategy(**fields),
        **({"learning_rate": 1e-2, "optim": "sgd"} | options),
    )  # fmt: skip


@pytest.mark.by_day("heads, balanced", "medusa, joint with adapters")
@pytest.mark.parametrize("name", CASES)
def test_two_divisions_of_a_batch_take_the_same_steps(name, tmp_path):
    whole, pieces = trained(name, tmp_path, 4), trained(name, tmp_path, 1)
    before = state(whole)
    for trainer in (whole, pieces):
        trainer.train()
    after, other = state(whole), state(pieces)
    moved = [key for key in after if not torch.equal(after[key], before[key])]
    assert moved
    for key in moved:
        torch.testing.assert_close(other[key], after[key], atol=1e-6, rtol=1e-5)
    logs = [[entry["loss"] for entry in trainer.state.log_history if "loss" in entry] for trainer in (whole, pieces)]
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)


@pytest.mark.by_day("heads, balanced")
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_training_goes_on_with_the_same_losses(name, tmp_path):
    options = dict(steps=4, optim="adamw_torch", save_strategy="steps", save_steps=3, learning_rate=1e-3)
    straight = trained(name, tmp_path, **options)
    straight.train()
    resumed = trained(name, tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    want, found = state(straight), state(resumed)
    for key, value in want.items():
        torch.testing.assert_close(found[key], value, atol=1e-7, rtol=1e-6)


@pytest.mark.core
def test_in_the_warm_up_only_the_head_learns_and_then_everything(tmp_path):
    trainer = trained("heads, joint", tmp_path, steps=4)
    seen = [state(trainer)]

    class Watch(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            seen.append(state(trainer))

    trainer.add_callback(Watch())
    trainer.train()
    for step, (old, new) in enumerate(zip(seen, seen[1:])):
        moved = {key.split(".")[0] for key in old if not torch.equal(old[key], new[key])}
        assert moved == ({"heads"} if step < 2 else {"heads", "backbone"})
    assert {group["initial_lr"] for group in trainer.optimizer.param_groups} == {1e-2, 3e-2}


def test_joint_models_are_saved_as_heads_and_backbone(tmp_path):
    trainer = trained("medusa, joint with adapters", tmp_path)
    backbone, ids = trainer.model.backbone, torch.arange(70, 90)[None]
    trainer.train()
    trainer.save_model(tmp_path / "out")
    assert isinstance(trainer.model, JointMTPModel) and trainer.model.heads.mtp_loss_weight > 0
    expected = backbone.eval()(ids).logits
    again = PeftModel.from_pretrained(llama(num_hidden_layers=2), tmp_path / "out" / "backbone").eval()
    torch.testing.assert_close(again(ids).logits, expected)
    loaded = MTPHeads.from_pretrained(tmp_path / "out").attach(again)
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(
        again.generate(input_ids=ids, assistant_model=loaded, **options), again.generate(input_ids=ids, **options)
    )
    whole = trained("heads, joint", tmp_path)
    whole.train()
    whole.save_model(tmp_path / "whole")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "whole" / "backbone")
    torch.testing.assert_close(again(ids).logits, whole.model.backbone.eval()(ids).logits)


def test_a_frozen_backbone_stays_as_it_is_and_a_teacher_shows_acceptances(tmp_path):
    trainer = trained("heads, lk", tmp_path)
    before = {name: p.clone() for name, p in trainer.model.backbone.named_parameters()}
    trainer.train()
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.backbone.named_parameters())
    entry = trainer.state.log_history[0]
    assert 0 < entry["acceptance_head_2"] <= 1 and "acceptance_head_1" not in entry
    eagles = trained("eagle 3, lk", tmp_path)
    eagles.train()
    assert 0 < eagles.state.log_history[0]["acceptance_step_3"] <= 1
    losses = []
    for size in (1, 5, 16):
        eagles.args.per_device_eval_batch_size = size
        losses.append(eagles.evaluate()["eval_loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (eagle, dict(train="all"), "train='all'.*EagleHead"),
        (eagle, dict(loss_weight=0.3), "loss_weight=.*0.3.*EagleHead"),
        (modules, dict(draft_layers=1), "draft_layers=.*1.*DeepSeekMTP"),
        (heads, dict(loss=dict(weights=[1.0])), "weights=.*window=3"),
        (heads, dict(draft_layers=1, train="all"), "draft_layers.*train='all'"),
        (lambda: heads(draft_layers=1), dict(draft_layers=1, draft_lora_rank=3), "draft_lora_rank=.*3.*8"),
        (heads, dict(loss=dict(divergence="lk")), "'divergence'.*target=.*'teacher'"),
    ],
)
def test_what_a_model_cannot_follow_is_refused_by_name(make, fields, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainer_for(make(), tmp_path, ragged_rows(), strategy=TrainingStrategy(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(train="head"), "train='head'"),
        (dict(drafter_lr_multiplier=0), "drafter_lr_multiplier=.*0.*0"),
        (dict(loss_weight_last=0.1), "loss_weight_last=.*0.1"),
        (dict(lora_targets=["q_proj"]), "lora_targets=.*'q_proj'"),
        (dict(draft_lora_rank=4), "draft_lora_rank=4"),
        (dict(loss_weight_shape="sine"), "loss_weight_shape=.*'sine'"),
    ],
)
def test_values_out_of_range_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        TrainingStrategy(**fields)
    with pytest.raises(TypeError, match="'heads_only'"):
        TrainingStrategy(heads_only=True)
