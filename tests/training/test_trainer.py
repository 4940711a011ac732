"""MTPTrainer: exact accumulation, losses head by head, frozen parts that stay, and what is saved."""

import copy

import pytest
import torch
from transformers import DataCollatorWithFlattening

from tests.training.conftest import ragged_rows, small_model, trainer_for
from tokenahead import EvaByteForMTPC
from tokenahead.modeling.heads.losses import window_targets


def means_per_depth(model, rows, window: int = 4) -> list[float]:
    """The plain mean of each depth over all rows, computed row by row."""
    sums, counts = torch.zeros(window, dtype=torch.double), torch.zeros(window, dtype=torch.double)
    for row in rows:
        batch = {name: value[None] for name, value in row.items()}
        with torch.no_grad():
            means = model(**batch, use_cache=False).head_losses.double()
        count = (window_targets(batch["labels"], window, batch["attention_mask"]) != -100).sum((0, 1))
        sums += torch.where(count > 0, means * count, 0.0)
        counts += count
    return (sums / counts).tolist()


def logged(trainer, prefix: str, key: str) -> list[float]:
    """`prefix` 1, 2, ... of the first log entry that has `key`."""
    entry = next(entry for entry in trainer.state.log_history if key in entry)
    depths = sorted(int(name[len(prefix) :]) for name in entry if name.startswith(prefix))
    assert depths == list(range(1, len(depths) + 1))
    return [entry[f"{prefix}{depth}"] for depth in depths]


def weights_after_one_step(model, folder, rows, size: int) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model)
    accumulation = len(rows) // size
    options = dict(optim="sgd", learning_rate=1.0, max_steps=1, gradient_accumulation_steps=accumulation)
    trainer_for(model, folder, rows, per_device_train_batch_size=size, **options).train()
    return model.state_dict()


def test_updates_are_those_of_the_loss_for_ragged_rows_however_they_are_cut(tmp_path):
    model, rows = small_model(), ragged_rows()
    whole = weights_after_one_step(model, tmp_path, rows, 8)
    reference = copy.deepcopy(model)
    reference(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}, use_cache=False).loss.backward()
    expected = model.lm_head.weight - reference.lm_head.weight.grad
    torch.testing.assert_close(whole["lm_head.weight"], expected, rtol=0, atol=1e-6)
    assert (whole["lm_head.weight"] - model.lm_head.weight).abs().max() > 1e-3
    for size in (4, 2, 1):
        split = weights_after_one_step(model, tmp_path, rows, size)
        for name, value in whole.items():
            torch.testing.assert_close(split[name], value, rtol=0, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def test_targets_of_packed_documents_are_counted_as_those_of_separate_ones(tmp_path):
    model = small_model()
    documents = [{"input_ids": list(range(70, 70 + length))} for length in (3, 9, 6)]
    packed = DataCollatorWithFlattening(return_position_ids=True)(documents)
    trainer = trainer_for(model, tmp_path, ragged_rows())
    counts = trainer._get_num_items_in_batch([packed], torch.device("cpu"))
    assert counts.tolist() == [sum(max(0, length - depth) for length in (3, 9, 6)) for depth in (1, 2, 3, 4)]
    # the same two documents in one micro-batch or in two
    separate = [DataCollatorWithFlattening(return_position_ids=True)([document]) for document in documents]
    assert trainer._get_num_items_in_batch(separate, torch.device("cpu")).tolist() == counts.tolist()


def test_heads_learn_while_backbone_and_target_stay_bit_equal(tmp_path):
    model = small_model()
    before = copy.deepcopy(model.state_dict())
    model.train_only("drafter")
    trainer_for(model, tmp_path, ragged_rows(), learning_rate=1e-2, weight_decay=0.5, max_steps=5).train()
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"draft_heads.weight"}
    moved = (before["draft_heads.weight"] != after["draft_heads.weight"]).view(3, -1).float().mean(1)
    assert (moved > 0.9).all()


@pytest.mark.by_day("2-4")
@pytest.mark.parametrize(("size", "accumulation"), [(8, 1), (2, 4), (1, 8)])
def test_log_has_plain_means_per_head_whatever_the_accumulation(tmp_path, size, accumulation):
    model, rows = small_model(), ragged_rows()
    expected = means_per_depth(model, rows)
    options = dict(learning_rate=0.0, max_steps=1, gradient_accumulation_steps=accumulation)
    trainer = trainer_for(model, tmp_path, rows, per_device_train_batch_size=size, **options)
    trainer.train()
    assert logged(trainer, "loss_head_", "loss") == pytest.approx(expected, abs=1e-5)
    weights = [0.9**depth for depth in range(4)]
    loss = sum(weight * mean for weight, mean in zip(weights, expected)) / sum(weights)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, abs=1e-5)


def test_log_starts_anew_after_each_entry(tmp_path):
    model, rows = small_model(), ragged_rows()
    trainer = trainer_for(model, tmp_path, rows, learning_rate=0.0, per_device_train_batch_size=4, max_steps=2)
    trainer.train()
    entries = [entry["loss_head_1"] for entry in trainer.state.log_history if "loss_head_1" in entry]
    assert len(entries) == 2 and entries[0] != pytest.approx(entries[1], abs=1e-6)


def test_evaluation_reports_plain_means_per_head(tmp_path):
    model, rows = small_model(), ragged_rows()
    trainer = trainer_for(model, tmp_path, rows)
    metrics = trainer.evaluate()
    means = [metrics[f"eval_loss_head_{depth}"] for depth in (1, 2, 3, 4)]
    assert means == pytest.approx(means_per_depth(model.eval(), rows), abs=1e-5)
    assert logged(trainer, "eval_loss_head_", "eval_loss") == pytest.approx(means)


def test_resuming_gives_the_weights_of_an_uninterrupted_run(tmp_path):
    rows, options = ragged_rows(), dict(learning_rate=1e-2, max_steps=4, save_strategy="steps", save_steps=2)
    whole, resumed = small_model(), small_model()
    trainer_for(whole, tmp_path, rows, **options).train()
    trainer_for(resumed, tmp_path, rows, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0, atol=1e-6)
    saved = EvaByteForMTPC.from_pretrained(tmp_path / "checkpoint-4", dtype=torch.float32)
    assert torch.equal(saved.lm_head.weight, whole.lm_head.weight)
    assert saved.config.use_cache is True


def test_replicas_of_data_parallel_each_get_all_counts(tmp_path):
    trainer = trainer_for(small_model(), tmp_path, ragged_rows())
    batch = {name: torch.stack([row[name] for row in ragged_rows()]) for name in ragged_rows()[0]}
    single = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
    trainer.args._n_gpu = 2
    double = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
    assert double.shape == (2, 4) and torch.equal(double, single.expand(2, -1))


def test_label_smoothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        trainer_for(small_model(), tmp_path, ragged_rows(), label_smoothing_factor=0.1)
