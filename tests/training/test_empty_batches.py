"""Batches, and rows of batches, in which nothing is learned: a loss of 0 that backward runs through, and no more."""

import pytest
import torch
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, Trainer

from tests.backbones import word_tokenizer
from tests.every_model import llama
from tests.ptp_models import backbone, student
from tests.training.conftest import trainer_for
from tests.training.test_joined_rows import DRAFTERS as JOINED
from tests.training.test_joined_rows import eagle, heads
from tokenahead import BlockDrafter, DeepSeekMTP
from tokenahead.experimental import MuToRTrainer
from tokenahead.training import MTPTrainer, PTPOptions, PTPTrainer
from tokenahead.training.batches import Collator

NOTHING = -100
TEACHER = {"target": "teacher"}


def block(**options):
    return lambda: BlockDrafter.from_backbone(llama(num_hidden_layers=3, vocab_size=64), block_size=4, **options)


def modules(**options):
    def make():
        model = DeepSeekMTP.from_backbone(llama(num_hidden_layers=3, vocab_size=64), num_modules=2)
        model.loss_options = type(model.loss_options)(**options)
        return model

    return make


DRAFTERS = {name: JOINED[name] for name in ("independent", "medusa", "layers", "joint", "eagle over half")} | {
    "evabyte": JOINED["evabyte"],
    "eagle 1": eagle(1, loss_options={"noise": 0.0}),
    "eagle 3": eagle(loss_options={"steps": 3}),
    "eagle block": eagle(loss_options={"steps": 3, "divergence": "block"}),
    "eagle 1 block": eagle(1, loss_options={"divergence": "block"}),
    "hass": eagle(1, loss_options={"objective": "hass"}),
    "p-eagle": eagle(mask_token_id=3, loss_options={"steps": 3}),
    "paper": heads(unembedding="own", loss_options={"normalization": "paper"}),
    "rms": heads(unembedding="own", loss_options={"balance": "rms"}),
    "heads block": heads(unembedding="own", loss_options=TEACHER | {"divergence": "block"}),
    "modules": modules(unroll_steps=4),
    "modules block": modules(divergence="block", **TEACHER),
    "block": block(law="markov"),
    "block speculators": block(loss_options={"layout": "speculators"}),
    "block dpace": block(loss_options={"weights": "dpace"}),
    "one place": lambda: BlockDrafter.from_backbone(llama(num_hidden_layers=3, vocab_size=64), block_size=2),
}


def made(name):
    """A drafter in float64 whose gradients are not 0 from its beginning."""
    model = DRAFTERS[name]().double()
    if getattr(model, "is_apart", False):
        model.backbone.double()
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.05 * torch.randn_like(weight)
    return model.train()


def learning(model):
    return {name: each for name, each in model.named_parameters() if each.requires_grad and "adaptive_" not in name}


def batches(vocab_size):
    """By name; the parts of EvaByte that read other windows have nothing to read in such texts."""
    ids = torch.randint(5, vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.zeros(1, 12, dtype=torch.long)
    padded = {"attention_mask": (torch.arange(12) < 1).long().expand(2, 12)}
    return {
        "one token": {"input_ids": ids[:, :1], "labels": ids[:, :1]},
        "two tokens": {"input_ids": ids[:, :2], "labels": ids[:, :2]},
        "no labels": {"input_ids": ids, "labels": torch.full_like(ids, NOTHING)},
        "padding": {"input_ids": ids, "labels": ids.masked_fill(padded["attention_mask"] == 0, NOTHING), **padded},
        "joined": {"input_ids": ids[:1], "labels": torch.full_like(ids[:1], NOTHING), "position_ids": positions},
    }


def counts_of(model, batch):
    return model.loss_counts(*(batch.get(name) for name in ("labels", "attention_mask", "position_ids")))


@pytest.mark.by_day("layers", "evabyte", "eagle 1", "eagle block", "hass", "p-eagle", "rms", "modules", "block dpace")
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_batch_without_a_target_has_a_loss_of_0_and_gradients_of_0(name):
    model = made(name)
    found = 0
    for kind, batch in batches(model.config.get_text_config().vocab_size).items():
        model.zero_grad()
        counts = counts_of(model, batch)
        loss = model(**batch, use_cache=False, num_items_in_batch=counts + 7).loss
        loss.backward()
        gradients = {key: each.grad for key, each in learning(model).items()}
        assert None not in gradients.values(), kind
        assert all(each.isfinite().all() for each in gradients.values()) and loss.isfinite(), kind
        if not counts.any():
            found += 1
            assert loss == 0 and not any(each.any() for each in gradients.values()), kind
    assert found >= 4


@pytest.mark.by_day("joint", "evabyte", "eagle over half", "p-eagle", "paper", "block speculators")
@pytest.mark.parametrize("name", DRAFTERS)
def test_an_empty_row_among_others_changes_nothing(name):
    model = made(name).eval()
    size = model.config.get_text_config().vocab_size
    ids = torch.randint(5, size, (3, 14), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[1] = NOTHING
    rows = torch.tensor([0, 2])
    losses = [model(input_ids=each[0], labels=each[1], use_cache=False).loss for each in
              ((ids, labels), (ids[rows], labels[rows]))]  # fmt: skip
    # blocks are drawn for every row of a batch
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-9, atol=1e-9)


@pytest.mark.by_day("independent", "evabyte", "eagle 3", "paper", "modules", "block")
@pytest.mark.parametrize("name", DRAFTERS)
def test_counts_of_an_update_are_those_of_a_batch_where_it_is_all_of_it(name):
    """From `MTPTrainer`, per depth, and from `Trainer`, one number of labels; on either side of the padding."""
    model = made(name).eval()
    size = model.config.get_text_config().vocab_size
    ids = torch.randint(5, size, (3, 14), generator=torch.Generator().manual_seed(2))
    lengths = torch.tensor([[14], [9], [4]])
    for real in (torch.arange(14) < lengths, torch.arange(14) >= 14 - lengths):
        labels = ids.masked_fill(~real, NOTHING).index_fill(1, torch.tensor([6]), NOTHING)
        batch = {"input_ids": ids, "labels": labels, "attention_mask": real.long()}
        counts, number = counts_of(model, batch), (labels[:, 1:] != NOTHING).sum()
        own, by_depth, by_number, twice = (
            model(**batch, use_cache=False, num_items_in_batch=items).loss
            for items in (None, counts, number, 2 * number)
        )
        torch.testing.assert_close(by_depth, own, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(by_number, own, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(2 * twice, own, rtol=1e-6, atol=1e-6)


def rows(lengths, vocab_size, **columns):
    """Rows of these lengths, without padding."""
    draws = torch.Generator().manual_seed(4)
    made = [torch.randint(5, vocab_size, (length,), generator=draws) for length in lengths]
    return [{"input_ids": ids.tolist(), "labels": ids.tolist()} | {key: of(ids) for key, of in columns.items()}
            for ids in made]  # fmt: skip


def trained(model, folder, data, accumulated, trainer_class):
    """The weights after an update."""
    trainer_for(
        model, folder, data, trainer_class, per_device_train_batch_size=1, gradient_accumulation_steps=accumulated,
        train_sampling_strategy="sequential", max_steps=1, optim="sgd", learning_rate=0.1,
    ).train()  # fmt: skip
    return {key: each.detach().clone() for key, each in learning(model).items()}


@pytest.mark.by_day("eagle 3-MTPTrainer", "modules-Trainer")
@pytest.mark.parametrize("trainer_class", [MTPTrainer, Trainer], ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", ["independent", "eagle 3", "eagle 1", "modules", "block speculators"])
def test_an_update_is_that_of_its_rows_with_targets(name, trainer_class, tmp_path):
    model = made(name)
    before = {key: each.detach().clone() for key, each in learning(model).items()}
    data = rows((14, 1, 2 if name == "eagle 3" and trainer_class is MTPTrainer else 1), 64)
    alone = trained(model, tmp_path, data[:1], 1, trainer_class)
    model.load_state_dict(before, strict=False)
    found = trained(model, tmp_path, [data[1], data[0], data[2]], 3, trainer_class)
    assert any((alone[key] - before[key]).abs().max() > 1e-6 for key in alone)
    for key, value in alone.items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-9)


@pytest.mark.by_day("slots", "registers")
@pytest.mark.parametrize(
    "make, trainer_class, options",
    [
        (lambda: student(base=backbone()), PTPTrainer, {}),
        (lambda: student("mask", base=backbone()), PTPTrainer, {}),
        (lambda: student(base=backbone()), PTPTrainer, {"options": PTPOptions(base_weight=0.5)}),
        (backbone, MuToRTrainer, {}),
    ],
    ids=["slots", "masks", "backbone", "registers"],
)
def test_slots_and_registers_learn_nothing_from_short_rows(make, trainer_class, options, tmp_path):
    model = make()
    if options:
        model.train_only("all")
    size = model.config.vocab_size
    data = rows((1, 12, 1, 2, 1, 12), size)
    trainer = trainer_for(
        model, tmp_path, data, lambda *given, **named: trainer_class(*given, **named, **options), max_steps=3,
        per_device_train_batch_size=1, gradient_accumulation_steps=2, train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] > 0.1 and torch.tensor(losses).isfinite().all()
    assert 0.1 < trainer.evaluate()["eval_loss"] < 100
    assert all(each.isfinite().all() for each in model.parameters())


TOKENIZER = word_tokenizer()
"""With a padding token."""


@pytest.mark.by_day("True-padding", "False-seq2seq")
@pytest.mark.parametrize(
    "collator, tokenizer",
    [(None, None), (None, TOKENIZER), (DataCollatorWithPadding(TOKENIZER), TOKENIZER), (Collator(TOKENIZER), None),
     (DataCollatorForSeq2Seq(TOKENIZER), TOKENIZER)],
    ids=["none", "tokenizer", "padding", "own", "seq2seq"],
)  # fmt: skip
@pytest.mark.parametrize("positions", [False, True])
def test_rows_that_train_are_evaluated(collator, tokenizer, positions, tmp_path):
    """Ragged rows are joined for training, and padded for evaluation: the same rows have the same loss."""
    if positions and isinstance(collator, DataCollatorForSeq2Seq):
        pytest.skip("it pads no positions")
    columns = {"position_ids": lambda ids: list(range(len(ids)))} if positions else {}
    data, model = rows((9, 3, 14, 2), 64, **columns), made("independent").float()
    model.backbone.float()

    def make(model, args, **given):
        return MTPTrainer(model, args, data_collator=collator, processing_class=tokenizer, **given)

    trainer = trainer_for(model, tmp_path, data, make, max_steps=1, learning_rate=0.0, eval_strategy="steps",
                          eval_steps=1, per_device_train_batch_size=4)  # fmt: skip
    trainer.train()
    (loss,) = (entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    (measured,) = (entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    assert measured == pytest.approx(loss, rel=1e-5) and loss > 1
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-5)
    assert trainer.predict(data).metrics["test_loss"] == pytest.approx(loss, rel=1e-5)
