"""Evaluation and single steps: a loss that no batch size changes, logits that metrics can use, one way of weighing."""

import copy

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from tests.families import family_model
from tests.training.conftest import ragged_rows, small_model, trainer_for
from tokenahead import BlockDrafter, MTPHeads
from tokenahead.training import MTPTrainer


def llama(**changes):
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=320)
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes), initializer_range=0.2)).eval()


def with_circuit(part="all"):
    model = small_model()
    model.set_head(head_type="cp", rank=2)
    with torch.no_grad():
        model.mtp_head.leaf.weight.add_(torch.randn_like(model.mtp_head.leaf.weight) * 0.3)
    model.train_only(part)
    return model


def modules(**options):
    model = family_model("llama", vocab_size=320, num_nextn_predict_layers=2)
    for name, value in options.items():
        setattr(model.loss_options, name, value)
    return model


MODELS = {
    "evabyte": small_model,
    "evabyte, circuit": lambda: with_circuit("drafter"),
    "evabyte, circuit and backbone": with_circuit,
    "modules": modules,
    "modules, divided as in the paper": lambda: modules(normalization="paper", unroll_steps=3),
    "heads apart": lambda: MTPHeads.from_backbone(llama(), window=3, unembedding="own"),
    "heads apart, other weights": lambda: MTPHeads.from_backbone(
        llama(), window=3, head_type="medusa", loss_options={"weights": [0.5, 0.3, 0.4], "balance": "rms"}
    ),
    "block drafter": lambda: BlockDrafter.from_backbone(llama(num_hidden_layers=3), layers=1, block_size=3),
    "heads apart that attend": lambda: MTPHeads.from_backbone(
        llama(num_hidden_layers=2), window=3, head_type="layer", loss_options={"target": "teacher"}
    ),
}


def batch_of(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.by_day(
    "evabyte, circuit", "modules, divided as in the paper", "heads apart, other weights", "block drafter"
)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_evaluation_loss_is_that_of_one_batch_whatever_the_batch_size(make, tmp_path):
    model, rows = make(), ragged_rows()
    with torch.no_grad():
        expected = model(**batch_of(rows), use_cache=False).loss.item()
    for size in (1, 3, 8):
        metrics = trainer_for(model, tmp_path, rows, per_device_eval_batch_size=size).evaluate()
        assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-6)
    metrics = trainer_for(model, tmp_path, rows).evaluate(metric_key_prefix="held_out")
    assert metrics["held_out_loss"] == pytest.approx(expected, rel=1e-6)


def test_the_backbones_own_loss_is_logged_where_it_learns_beside_a_circuit(tmp_path):
    model, rows = with_circuit(), ragged_rows()
    metrics = trainer_for(model, tmp_path, rows).evaluate()
    with torch.no_grad():
        ids = batch_of(rows)
        logits = model(ids["input_ids"], attention_mask=ids["attention_mask"], use_cache=False).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids["labels"][:, 1:])
    assert metrics["eval_loss_backbone"] == pytest.approx(expected.item(), rel=1e-5)
    assert "eval_loss_backbone" not in trainer_for(small_model(), tmp_path, rows).evaluate()


def test_the_backbones_own_depth_which_weighs_nothing_is_not_logged(tmp_path):
    heads = MTPHeads.from_backbone(llama(), window=3, head_type="medusa")
    trainer = trainer_for(heads, tmp_path, ragged_rows(), max_steps=1)
    trainer.train()
    shown = {name for name in trainer.state.log_history[0] if name.startswith("loss_head_")}
    assert shown == {"loss_head_2", "loss_head_3"}


def test_data_without_targets_have_no_loss(tmp_path):
    rows = [{**row, "labels": torch.full_like(row["labels"], -100)} for row in ragged_rows()]
    assert np.isnan(trainer_for(small_model(), tmp_path, rows).evaluate()["eval_loss"])


@pytest.mark.by_day(
    "evabyte-MTPTrainer", "modules-MTPTrainer", "block drafter-Trainer", "heads apart that attend-MTPTrainer"
)
@pytest.mark.parametrize("kind", [Trainer, MTPTrainer])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_metrics_see_the_logits_of_every_position(make, kind, tmp_path):
    model, rows, seen = make(), ragged_rows(), {}

    def accuracy(prediction):
        guesses, labels = np.argmax(prediction.predictions, axis=-1)[:, :-1], prediction.label_ids[:, 1:]
        seen.update(shape=prediction.predictions.shape)
        return {"accuracy": (guesses == labels)[labels != -100].mean()}

    trainer = trainer_for(model, tmp_path, rows, kind)
    trainer.compute_metrics = accuracy
    metrics = trainer.evaluate()
    assert seen["shape"] == (8, 20, 320) and 0 <= metrics["eval_accuracy"] <= 1


@pytest.mark.parametrize("kind", [Trainer, MTPTrainer])
def test_evaluation_makes_no_logits_of_modules(kind, tmp_path):
    model, outputs = modules(), []
    model.register_forward_hook(lambda module, given, output: outputs.append(output))
    trainer_for(model, tmp_path, ragged_rows(), kind).evaluate()
    assert outputs and all(output.mtp_logits is None for output in outputs)
    if kind is MTPTrainer:  # nobody asked for more than the loss
        assert all(output.logits.shape[1] == 1 for output in outputs)


@pytest.mark.by_day("evabyte, circuit and backbone", "modules", "block drafter")
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_both_trainers_take_the_same_step(make, tmp_path):
    """One batch per update: `Trainer` counts the targets of the first depth only."""
    weights, rows = [], ragged_rows()
    for kind in (Trainer, MTPTrainer):
        model = make()
        if getattr(model.config, "loss_balance", "none") == "rms":  # here whole updates are balanced, there batches
            model.config.loss_balance = "none"
        options = dict(optim="sgd", learning_rate=1.0, max_steps=1, per_device_train_batch_size=8)
        trainer_for(model, tmp_path, rows, kind, **options).train()
        weights.append(copy.deepcopy(model.state_dict()))
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=0, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def test_training_never_holds_all_logits(tmp_path, monkeypatch):
    from tokenahead.modeling.common import chunks

    monkeypatch.setattr(chunks, "LOGITS_PER_CHUNK", 7 * 320)
    model, rows = modules(), []
    model.get_output_embeddings().register_forward_hook(lambda head, given, logits: rows.append(logits[..., 0].numel()))
    given = []
    hook = model.register_forward_pre_hook(lambda model, args, batch: given.append(batch), with_kwargs=True)
    trainer_for(model, tmp_path, ragged_rows(), Trainer, max_steps=1).train()
    hook.remove()
    targets = model.loss_counts(given[0]["labels"], given[0]["attention_mask"])
    assert max(rows) == 7 and sum(rows) == targets.sum()  # every position with a target, at every depth, once
    out = model.train()(**batch_of(ragged_rows()))
    assert out.logits is None
    assert model(**batch_of(ragged_rows()), logits_to_keep=0).logits.shape == (8, 20, 320)


def test_an_evaluation_that_failed_leaves_nothing_to_the_next(tmp_path):
    trainer = trainer_for(small_model(), tmp_path, ragged_rows(), per_device_eval_batch_size=2)
    expected, step, seen = trainer.evaluate()["eval_loss"], trainer.prediction_step, []

    def failing(*args, **kwargs):
        seen.append(args)
        if len(seen) > 1:
            raise OSError("the disk is full")
        return step(*args, **kwargs)

    trainer.prediction_step = failing
    with pytest.raises(OSError, match="full"):
        trainer.evaluate()
    trainer.prediction_step = step
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
