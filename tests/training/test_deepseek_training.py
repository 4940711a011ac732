"""Modules in training: Trainer and MTPTrainer, resuming, PEFT, the schedule of the loss weight."""

from functools import partial

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer

from tests.families import family_model, random_ids
from tests.training.conftest import trainer_for
from tokenahead import DeepSeekMTP
from tokenahead.training import MTPLossWeightSchedule, MTPTrainer


def rows(count=16):
    return [{"input_ids": row, "labels": row.clone()} for row in random_ids(count, 12)]


def trainer_of(model, folder, kind=Trainer, count=16, **options):
    return trainer_for(model, folder, rows(count), kind, **({"max_steps": 4, "learning_rate": 1e-2} | options))


@pytest.mark.by_day("qwen2-MTPTrainer")
@pytest.mark.parametrize("kind", [Trainer, MTPTrainer])
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen2"])
def test_training_the_modules_alone(kind, name, tmp_path):
    model = family_model(name)
    model.train_only("drafter")
    before = {name: p.clone() for name, p in model.named_parameters()}
    trainer = trainer_of(model, tmp_path, kind, 4, max_steps=12)
    trainer.train()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all(name.startswith("mtp.") for name in changed)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    if kind is MTPTrainer:
        assert "loss_head_2" in trainer.state.log_history[0]


@pytest.mark.nightly
@pytest.mark.core_cases("deepseek_v3-5GB")
@pytest.mark.parametrize("size", ["5GB", "70KB"])
@pytest.mark.parametrize("name", ["deepseek_v3", "exaone_moe"])
def test_resuming_in_the_middle_gives_the_same_model(name, size, tmp_path, monkeypatch):
    save = DeepSeekMTP.save_pretrained
    monkeypatch.setattr(DeepSeekMTP, "save_pretrained", lambda *a, **kw: save(*a, **kw, max_shard_size=size))
    options = dict(max_steps=6, save_steps=3, save_strategy="steps")
    whole = family_model(name)
    trainer_of(whole, tmp_path / "a", MTPTrainer, **options).train()
    assert (len(list((tmp_path / "a" / "checkpoint-3").glob("model-*.safetensors"))) > 2) == (size == "70KB")
    fresh = family_model(name, seed=5)
    trainer = trainer_of(fresh, tmp_path / "b", MTPTrainer, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    for (key, a), b in zip(whole.named_parameters(), fresh.parameters()):
        torch.testing.assert_close(a, b, msg=key)
    assert fresh._loaded_so_far is None
    again = DeepSeekMTP.from_pretrained(tmp_path / "a" / "checkpoint-6")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters()))


@pytest.mark.core_cases("qwen3_next")
@pytest.mark.parametrize("name", ["qwen3_next", "mixtral"])
def test_experts_are_balanced_as_the_main_model_does(name):
    model, ids = family_model(name, output_router_logits=True, router_aux_loss_coef=0.5), random_ids()
    model.mtp_loss_weight = 0.0
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    labels = ids.where(mask.cumsum(1) > 1, -100)  # ours never predicts from padding
    ours, own = (part(ids, attention_mask=mask, labels=labels) for part in (model, model.main))
    torch.testing.assert_close(ours.aux_loss, own.aux_loss)
    torch.testing.assert_close(ours.loss, own.loss)
    text = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    model.config.output_router_logits = False
    assert text.equal(model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False))
    without = model(ids, attention_mask=mask, labels=labels)
    torch.testing.assert_close(ours.loss - without.loss, 0.5 * own.aux_loss, atol=1e-5, rtol=1e-5)
    assert without.aux_loss is None


@pytest.mark.by_day("targets0")
@pytest.mark.parametrize("targets", [["q_proj", "eh_proj"], ["lm_head", "o_proj"]])
def test_adapters_on_main_model_and_modules(targets, tmp_path):
    base, ids = family_model("llama"), random_ids(1, 10)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    trainer_of(model, tmp_path).train()
    adapted = {name for name, p in model.named_parameters() if p.requires_grad and "lora_B" in name and p.any()}
    assert any(".mtp." in name for name in adapted) and any(".main." in name for name in adapted)
    model.eval()
    expected = model(ids)
    options = dict(input_ids=ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(model.generate(**options, use_mtp=True), model.generate(**options, use_mtp=False))
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(family_model("llama"), tmp_path / "adapter")
    torch.testing.assert_close(again(ids).mtp_logits[0], expected.mtp_logits[0])
    merged = again.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    found = DeepSeekMTP.from_pretrained(tmp_path / "merged")(ids)
    torch.testing.assert_close(found.mtp_logits[0], expected.mtp_logits[0], atol=1e-5, rtol=1e-4)


def test_loss_weight_follows_the_steps(tmp_path):
    model, seen = family_model("llama"), []
    schedule = MTPLossWeightSchedule(0.3, 0.1, switch_at=0.5)

    class Watch(MTPLossWeightSchedule):
        def on_step_end(self, *args, model=None, **kwargs):
            seen.append(model.mtp_loss_weight)

        def on_step_begin(self, *args, **kwargs):
            pass

    trainer_of(model, tmp_path, partial(Trainer, callbacks=[schedule, Watch()])).train()
    assert seen == [0.3, 0.3, 0.1, 0.1]


def test_loss_weight_reaches_through_adapters_and_refuses_other_models(tmp_path):
    model = get_peft_model(family_model("llama"), LoraConfig(target_modules=["eh_proj"]))
    trainer_of(model, tmp_path, partial(Trainer, callbacks=[MTPLossWeightSchedule(0.2, 0.2)])).train()
    assert model.base_model.model.mtp_loss_weight == 0.2
    plain = family_model("llama").main
    with pytest.raises(TypeError, match="mtp_loss_weight"):
        trainer_of(plain, tmp_path, partial(Trainer, callbacks=[MTPLossWeightSchedule()])).train()
    with pytest.raises(ValueError, match="switch_at=2 "):
        MTPLossWeightSchedule(switch_at=2)
