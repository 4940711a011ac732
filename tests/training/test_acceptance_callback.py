"""AcceptanceCallback: acceptance among the metrics, for best checkpoints and early stopping; training is untouched."""

import importlib
import sys

import pytest
import torch
from transformers import EarlyStoppingCallback

from tests.every_model import llama
from tests.training.conftest import ragged_rows, small_model, trainer_for
from tokenahead import MTPHeads
from tokenahead.training import AcceptanceCallback
from tokenahead.training.evaluation.drafts import DraftMeasures
from tokenahead.training.utils import MissingExtraError

SHORT = dict(prompts=2, prompt_tokens=6, new_tokens=8)


def batch_of(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def heads():
    torch.manual_seed(0)
    return MTPHeads.from_backbone(llama(vocab_size=320), window=3, unembedding="own")


def test_metrics_are_those_of_the_data_whatever_the_batch_size(tmp_path):
    model, rows = small_model(), ragged_rows()
    measures = DraftMeasures().add(model, batch_of(rows))
    expected, means = measures.calls["block"].tokens_per_call - 1, measures.means()
    for size in (1, 3, 8):
        trainer = trainer_for(model, tmp_path, rows, per_device_eval_batch_size=size)
        trainer.add_callback(AcceptanceCallback(rows=None, generate_every=0))
        metrics = trainer.evaluate()
        assert metrics["eval_expected_accepted"] == pytest.approx(expected, rel=1e-6)
        shares = [metrics[f"eval_accepted_{place}"] for place in (1, 2, 3)]
        assert sum(shares) == pytest.approx(expected) and "eval_generated_accepted" not in metrics
        for k in (1, 5):
            found = [metrics[f"eval_top_{k}_draft_{place}"] for place in (1, 2, 3)]
            assert found == pytest.approx(means[f"top_{k}"]) and 0 <= found[0] <= 1
        assert trainer.state.log_history[-1]["eval_expected_accepted"] == metrics["eval_expected_accepted"]


@pytest.mark.core_cases("small_model")
@pytest.mark.parametrize("make", [small_model, heads])
def test_texts_are_generated_now_and_then(make, tmp_path):
    trainer = trainer_for(make(), tmp_path, ragged_rows())
    trainer.add_callback(AcceptanceCallback(generate_every=2, **SHORT))
    found = [trainer.evaluate() for _ in range(4)]
    assert ["eval_generated_accepted" in metrics for metrics in found] == [True, False, True, False]
    assert found[0]["eval_generated_accepted"] == found[2]["eval_generated_accepted"] <= 3
    # a call yields what it accepts and a token of the model, but for the first, which drafts nothing, and the last
    assert abs(found[0]["eval_generated_tokens_per_call"] - 1 - found[0]["eval_generated_accepted"]) < 1


def test_training_sees_the_same_random_numbers(tmp_path):
    weights = []
    for callbacks in ([], [AcceptanceCallback(generate_every=1, **SHORT)]):
        model = heads()
        options = dict(max_steps=4, eval_strategy="steps", eval_steps=1, learning_rate=1e-2)
        trainer = trainer_for(model, tmp_path, ragged_rows(), **options)
        for callback in callbacks:
            trainer.add_callback(callback)
        trainer.train()
        weights.append(model.head.weight.detach().clone())
    assert torch.equal(*weights)


def test_it_chooses_the_best_checkpoint_and_stops_early(tmp_path):
    """A learning rate of 0: nothing gets better after the first evaluation."""
    model = heads()
    options = dict(
        max_steps=6, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, learning_rate=0.0,
        load_best_model_at_end=True, metric_for_best_model="expected_accepted", greater_is_better=True,
    )  # fmt: skip
    trainer = trainer_for(model, tmp_path, ragged_rows(), **options)
    trainer.add_callback(EarlyStoppingCallback(2))  # before ours, which must not matter
    trainer.add_callback(AcceptanceCallback(generate_every=0))
    trainer.train()
    assert trainer.state.global_step == 3 and trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    assert trainer.state.best_metric == pytest.approx(trainer.evaluate()["eval_expected_accepted"])


def test_acceptance_alone_is_refused_where_the_backbone_learns(tmp_path):
    options = dict(
        max_steps=2, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="expected_accepted", greater_is_better=True,
    )  # fmt: skip
    trainer = trainer_for(small_model(), tmp_path, ragged_rows(), **options)
    trainer.add_callback(AcceptanceCallback())
    with pytest.raises(ValueError, match="expected_accepted.*constrained_accepted"):
        trainer.train()


LOSSES = [2.0, 1.5, 1.52, 1.0, 1.1]
ACCEPTED = [0.9, 0.5, 0.6, 0.2, 0.3]


@pytest.mark.by_day("0.05-4", "0.6-3")
@pytest.mark.parametrize(("tolerance", "best"), [(0.0, 4), (0.05, 4), (0.15, 5), (0.6, 3), (1.0, 1)])
def test_the_best_acceptance_among_backbones_that_are_good_enough(tolerance, best, tmp_path, monkeypatch):
    options = dict(
        max_steps=5, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, learning_rate=0.0,
        load_best_model_at_end=True, metric_for_best_model="constrained_accepted", greater_is_better=True,
    )  # fmt: skip
    trainer = trainer_for(small_model(), tmp_path, ragged_rows(), **options)
    callback = AcceptanceCallback(generate_every=0, tolerance=tolerance)
    trainer.add_callback(callback)
    known = iter(zip(LOSSES, ACCEPTED))

    def measured(*_):
        loss, accepted = next(known)
        constrained = callback._constrained(trainer, loss, accepted)
        return {"backbone_loss": loss, "expected_accepted": accepted, "constrained_accepted": constrained}

    monkeypatch.setattr(callback, "_expected", measured)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    assert trainer.state.best_metric == ACCEPTED[best - 1]


def test_a_backbone_that_learns_has_its_loss_among_the_metrics(tmp_path):
    model = small_model()
    trainer = trainer_for(model, tmp_path, ragged_rows())
    trainer.add_callback(AcceptanceCallback(rows=None, generate_every=0))
    metrics = trainer.evaluate()
    assert metrics["eval_constrained_accepted"] == metrics["eval_expected_accepted"]
    batch = batch_of(ragged_rows())
    batch["labels"][:, 0] = -100  # nothing predicts it
    logits, labels = model(**{name: batch[name] for name in ("input_ids", "attention_mask")}).logits, batch["labels"]
    scored = (labels[:, 1:] != -100) & (labels[:, :-1] != -100)  # all but the first token of each text
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    assert metrics["eval_backbone_loss"] == pytest.approx(losses[scored].mean().item(), rel=1e-4)


def test_without_datasets_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.delitem(sys.modules, "tokenahead.training.acceptance_callback")
    with pytest.raises(MissingExtraError, match=r"AcceptanceCallback needs .*'datasets'.*tokenahead\[train\]"):
        importlib.import_module("tokenahead.training.acceptance_callback")
