"""Batches by a budget of tokens, joined rows: what is computed, who sees which row, and what is refused."""

import math
import random
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Lfm2Config, MambaConfig

from tests.every_model import llama
from tests.ptp_models import backbone, student
from tests.training.conftest import ragged_rows, trainer_for
from tests.training.process_client import MAKERS
from tokenahead import MTPHeads
from tokenahead.training import MTPTrainer, PTPOptions, PTPTrainer, batches, cache_features
from tokenahead.training.batches import (
    Collator,
    JoinedCollator,
    ReadingCollator,
    batches_by_tokens,
    obstacle_to_joining,
    row_lengths,
)
from tokenahead.training.trainer_base import RunningMeans

DRAFTERS = {name: make for name, make in MAKERS.items() if name not in ("parallel", "masks")}
EIGHT = {"per_device_train_batch_size": 8}  # transformers' own: a budget decides
FLATTENING = partial(MTPTrainer, data_collator=DataCollatorWithFlattening())
RECURRENT = {
    "mamba": MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2),
    "lfm2": Lfm2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, layer_types=["conv", "full_attention"],
    ),
}  # fmt: skip


def log_normal_lengths(count: int, seed: int = 0) -> list[int]:
    """Lengths with a median of 400 and a mean of 550."""
    draws, spread = random.Random(seed), math.sqrt(2 * math.log(550 / 400))
    return [max(2, round(400 * math.exp(spread * draws.gauss(0, 1)))) for _ in range(count)]


def rows_of(lengths: list[int], vocab_size: int = 64) -> list[dict[str, torch.Tensor]]:
    draws = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(1, vocab_size, (length,), generator=draws)} for length in lengths]


def recurrent_heads(name: str) -> MTPHeads:
    torch.manual_seed(0)
    return MTPHeads.from_backbone(AutoModelForCausalLM.from_config(RECURRENT[name]), window=3)


def batches_of(trainer: MTPTrainer) -> list[dict[str, torch.Tensor]]:
    return list(trainer.get_train_dataloader())


def token_counts(batch: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Useful tokens of a batch, and those that are computed."""
    computed = batch["input_ids"].numel()
    return int(batch["attention_mask"].sum()) if "attention_mask" in batch else computed, computed


def share(batches: list[dict[str, torch.Tensor]]) -> float:
    """Tokens computed per useful one."""
    useful, computed = (sum(each) for each in zip(*map(token_counts, batches)))
    return computed / useful


@pytest.mark.core
def test_batches_hold_every_row_once_within_the_budget():
    lengths = log_normal_lengths(100)
    for is_padded, multiple in product((False, True), (1, 3)):
        order = sorted(range(100), key=lambda row: -lengths[row]) if is_padded else list(range(100))
        found = batches_by_tokens(lengths, max(lengths) + 1000, order, is_padded, multiple)
        assert sorted(row for batch in found for row in batch) == list(range(100))
        assert len(found) % multiple == 0
        for batch in found:
            longest, total = max(lengths[row] for row in batch), sum(lengths[row] for row in batch)
            assert (longest * len(batch) if is_padded else total) <= max(lengths) + 1000


@pytest.mark.by_day("budget-random", "budget-group_by_length", "rows-sequential")
@pytest.mark.parametrize("strategy", ["random", "group_by_length", "sequential"])
@pytest.mark.parametrize("size", [8, 4], ids=["budget", "rows"])
def test_log_normal_rows_compute_no_padding(size, strategy, tmp_path):
    rows = [row | {"labels": row["input_ids"]} for row in rows_of(log_normal_lengths(64))]
    options = dict(per_device_train_batch_size=size, train_sampling_strategy=strategy)
    trainer = trainer_for(MTPHeads.from_backbone(llama(), window=3), tmp_path, rows, **options)
    batches = batches_of(trainer)
    assert share(batches) == 1
    assert sum(token_counts(batch)[0] for batch in batches) == sum(row_lengths(rows))
    assert trainer.num_examples(trainer.get_train_dataloader()) == 64
    if size == 8:
        assert max(token_counts(batch)[1] for batch in batches) <= max(4096, *row_lengths(rows))
        assert min(token_counts(batch)[1] for batch in batches[:-1]) > 0


@pytest.mark.by_day("lfm2")
@pytest.mark.parametrize("name", RECURRENT)
def test_rows_of_a_backbone_that_mixes_them_are_padded_by_length(name, tmp_path, caplog):
    rows = [row | {"labels": row["input_ids"]} for row in rows_of(log_normal_lengths(200))]
    heads = recurrent_heads(name)
    trainer = trainer_for(heads, tmp_path, rows, per_device_train_batch_size=8)
    assert obstacle_to_joining(heads, {}, heads.device) == "it mixes documents"
    batches = batches_of(trainer)
    assert any("attention_mask" in batch for batch in batches) and all("position_ids" not in each for each in batches)
    assert share(batches) <= 1.08
    trainer = trainer_for(heads, tmp_path, rows[:4], per_device_train_batch_size=2, max_steps=1)
    trainer.train()


def test_no_drafter_has_an_obstacle_to_joining():
    for name, make in DRAFTERS.items():
        torch.manual_seed(0)
        model = make()
        assert obstacle_to_joining(model, {}, model.device) == "", name


@pytest.mark.core
def test_an_epoch_takes_the_same_batches_in_another_order(tmp_path):
    rows = [row | {"labels": row["input_ids"]} for row in rows_of(log_normal_lengths(40))]
    loader = trainer_for(
        MTPHeads.from_backbone(llama(), window=3), tmp_path, rows, per_device_train_batch_size=8
    ).get_train_dataloader()
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append([tuple(batch["input_ids"][0].tolist()) for batch in loader])
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1]) and len(loader) == len(epochs[0])


def test_a_run_that_is_resumed_within_an_epoch_ends_with_the_same_weights(tmp_path):
    rows = ragged_rows(18, 40, vocab_size=64)
    options = EIGHT | dict(num_train_epochs=2, save_strategy="steps", save_steps=1, learning_rate=0.1, optim="sgd")
    options |= dict(gradient_accumulation_steps=2)

    def trained(folder, checkpoint=None):
        torch.manual_seed(0)
        heads = MTPHeads.from_backbone(llama(), window=3, unembedding="own")
        trainer = trainer_for(heads, folder, rows, partial(MTPTrainer, tokens_per_batch=100), **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    whole = trained(tmp_path / "whole")
    assert whole.state.max_steps >= 4
    resumed = trained(tmp_path / "again", str(tmp_path / "whole" / "checkpoint-1"))
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


def test_a_budget_that_cannot_be_met_is_refused(tmp_path):
    heads = MTPHeads.from_backbone(llama(), window=3)
    for options, budget, match in (
        ({}, -1, "tokens_per_batch=-1"),
        ({"per_device_train_batch_size": 4}, 64, "per_device_train_batch_size"),
        ({"auto_find_batch_size": True}, 64, "auto_find_batch_size"),
        ({"dataloader_drop_last": True}, 64, "dataloader_drop_last"),
        ({"train_sampling_strategy": "batch_rebalance"}, 64, "batch_rebalance"),
        ({"accelerator_config": {"split_batches": True}}, 64, "split_batches"),
    ):
        make = partial(MTPTrainer, tokens_per_batch=budget)
        with pytest.raises(ValueError, match=match):
            trainer_for(heads, tmp_path, ragged_rows(4, vocab_size=64), make, **EIGHT | options)


def test_a_stream_has_rows_and_no_budget(tmp_path):
    rows = [{"input_ids": row["input_ids"].tolist()} for row in rows_of([9, 30, 7, 12])]
    stream = IterableDataset.from_generator(lambda: (row | {"labels": row["input_ids"]} for row in rows))
    heads, options = MTPHeads.from_backbone(llama(), window=3), dict(max_steps=2, per_device_train_batch_size=2)
    with pytest.raises(ValueError, match="streaming"):
        trainer_for(heads, tmp_path, stream, partial(MTPTrainer, tokens_per_batch=64), **options)
    shapes = [batch["input_ids"].shape for batch in batches_of(trainer_for(heads, tmp_path, stream, **options))]
    assert shapes == [(1, 39), (1, 19)]


def test_means_per_sequence_are_not_joined(tmp_path):
    heads = MTPHeads.from_backbone(llama(), window=3, loss_options={"normalization": "paper"})
    trainer = trainer_for(heads, tmp_path, ragged_rows(4, vocab_size=64))
    assert all(len(batch["input_ids"]) == 2 for batch in batches_of(trainer))


@pytest.mark.core
def test_joined_rows_begin_at_position_0_and_score_no_first_token():
    rows = ragged_rows(3, 10)
    batch = JoinedCollator(Collator())(rows)
    lengths = row_lengths(rows)
    assert batch.keys() == {"input_ids", "labels", "position_ids"}
    assert batch["position_ids"][0].tolist() == [place for length in lengths for place in range(length)]
    assert (batch["labels"][batch["position_ids"] == 0] == -100).all()
    assert torch.equal(batch["input_ids"][0], torch.cat([row["input_ids"][:n] for row, n in zip(rows, lengths)]))


@pytest.mark.parametrize("column", ["pixel_values", "position_ids", None])
def test_rows_that_cannot_be_joined_are_padded_and_those_of_one_length_stacked(column):
    rows = rows_of([6, 6 if column is None else 4])
    for row in rows if column else ():
        length = len(row["input_ids"])
        row[column] = torch.zeros(3, 2) if column == "pixel_values" else torch.arange(3, 3 + length)
    assert JoinedCollator(Collator())(rows)["input_ids"].shape == (2, 6)


def test_lengths_come_from_the_columns_of_a_data_set():
    for columns in ({}, {"length": [5, 3]}, {"attention_mask": [[1] * 5, [0, 1, 1, 1]]}):
        ids = [[1, 2, 3, 4, 5], [1, 2, 3, 4] if "attention_mask" in columns else [1, 2, 3]]
        data = Dataset.from_dict({"input_ids": ids} | columns)
        assert row_lengths(data) == [5, 3] == row_lengths([data[number] for number in range(2)])
        assert [row["input_ids"] for row in ReadingCollator(list, None, data)([[1, 0]])] == ids[::-1]


def test_slots_count_in_the_budget(tmp_path):
    rows, model = ragged_rows(6, 20, vocab_size=64), student(base=backbone())
    make = partial(trainer_for, model, tmp_path, rows, **EIGHT)
    besides, kind = 4 * model.config.num_slots, partial(PTPTrainer, options=PTPOptions(completions=4))
    with pytest.raises(ValueError, match=f"row 0.*{20 + besides}"):
        make(partial(kind, tokens_per_batch=19 + besides))
    trainer = make(partial(kind, tokens_per_batch=2 * (20 + besides)))
    assert [len(batch["input_ids"]) for batch in batches_of(trainer)] == [2, 2, 2]


def test_joined_rows_are_refused_where_every_sequence_gets_slots(tmp_path):
    make = partial(PTPTrainer, data_collator=DataCollatorWithFlattening())
    with pytest.raises(ValueError, match="data_collator=DataCollatorWithFlattening.*slots"):
        trainer_for(student(), tmp_path, ragged_rows(6, 20, 64), make)


def test_joined_rows_on_a_backbone_that_mixes_them_are_refused(tmp_path):
    rows = [row | {"labels": row["input_ids"]} for row in rows_of([5, 30, 7])]
    trainer = trainer_for(recurrent_heads("mamba"), tmp_path, rows, FLATTENING)
    with pytest.raises(ValueError, match="DataCollatorWithFlattening.*MambaForCausalLM.*mixes documents"):
        trainer.train()


def test_an_error_of_the_trial_is_told(tmp_path, monkeypatch, caplog):
    """Whether rows are joined by the trainer, which then pads them, or by a collator."""
    heads, rows = MTPHeads.from_backbone(llama(), window=3), [{"input_ids": [1, 2], "labels": [1, 2]}] * 2
    own, said = heads.forward, "no kernel for two documents"

    def forward(input_ids, position_ids=None, **others):
        if position_ids is not None:
            raise RuntimeError(said)
        return own(input_ids, **others)

    monkeypatch.setattr(heads, "forward", forward)
    logger = batches.logger
    monkeypatch.setattr(logger, "warning_once", logger.warning)
    monkeypatch.setattr(logger, "propagate", True)
    batches_of(trainer_for(heads, tmp_path, rows))
    assert "LlamaForCausalLM cannot be joined" in caplog.text and f"RuntimeError: {said}" in caplog.text
    trainer = trainer_for(heads, tmp_path, rows, FLATTENING)
    with pytest.raises(ValueError, match=f"DataCollatorWithFlattening.*RuntimeError: {said}"):
        trainer.get_train_dataloader()


def test_stored_states_are_joined_whatever_the_backbone(tmp_path):
    data = cache_features(recurrent_heads("mamba"), rows_of([5, 30, 7]), tmp_path / "features")
    make = partial(MTPTrainer, data_collator=data.collate, tokens_per_batch=64)
    trainer = trainer_for(recurrent_heads("mamba"), tmp_path, data, make, max_steps=1, **EIGHT)
    [batch] = batches_of(trainer)
    assert batch["cached_states"].shape[:2] == batch["position_ids"].shape == (1, 42)
    trainer.train()


def test_padding_is_no_label_and_means_are_of_what_came_since():
    batch = Collator()([{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8], "labels": [8]}])
    assert batch["labels"].tolist() == [[5, 6, 7], [8, -100, -100]] and batch["input_ids"][1].tolist() == [8, 0, 0]
    means, accelerator = RunningMeans(), SimpleNamespace(reduce=lambda totals, how: totals)
    for sums in ([1.0, 4.0], [3.0, 2.0]):
        means.add(torch.tensor(sums), torch.tensor([1, 2]))
        assert means.take(accelerator).tolist() == [sums, [1, 2]]
    assert means.take(accelerator) is None
