"""PTPTrainer: gradients do not depend on how an update is cut, and evaluation is a function of model and data."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.ptp_models import VOCABULARY, Places, backbone, ids, student
from tests.training.plain_losses import check, exact_norms
from tests.training.plain_losses import gradients as all_gradients
from tests.training.ptp.test_trainer import FOLDED, texts, trainer
from tokenahead.modeling.common import chunks
from tokenahead.training.ptp.losses import LOSSES, slot_losses, target_probs


def gradients(model, tmp_path, rows, size, **options) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of one update that is made of micro-batches of `size` rows."""
    own = trainer(model, tmp_path, rows, **options)
    batches = [own.data_collator(rows[start : start + size]) for start in range(0, len(rows), size)]
    own.model_wrapped = model
    own._initial_global_step = 0  # as `train` sets it
    batches, totals = own.get_batch_samples(iter(batches), len(batches), torch.device("cpu"))
    model.zero_grad()
    losses = [own.compute_loss(model, batch, num_items_in_batch=totals) for batch in batches]
    for loss in losses:
        loss.backward()
    return sum(losses).item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def plain_loss(model, own, rows) -> torch.Tensor:
    """The definition: a row at a time, all logits at once, through autograd."""
    options, sums, counts = own.options, [], []
    for row in rows:
        task = own._task(model, own.data_collator([row]), True)
        logits = task.packed.everything(task.inputs, lambda hidden, head: head(hidden))[0]
        slots = logits[len(row["input_ids"]) :].view(*task.tokens.shape[1:], -1)
        scores = task.scores
        p = None if scores is None else target_probs(scores.logits(scores.states), **FOLDED)[0].detach()
        weights = (task.valid[0] * options.gamma ** torch.arange(slots.shape[1])).double()
        losses = slot_losses(slots, task.tokens[0], p, options.loss)
        targets = row["labels"][1:]
        own_losses = cross_entropy(logits[: len(targets)], targets, reduction="none")
        sums.append(torch.stack([torch.where(weights > 0, weights * losses, 0.0).sum(), own_losses.sum()]))
        counts.append(torch.stack([weights.sum(), (targets != -100).sum()]))
    slots_mean, own_mean = torch.stack(sums).sum(0) / torch.stack(counts).sum(0)
    return slots_mean + options.base_weight * own_mean


@pytest.mark.by_day("one_hot-ce", "categorical-kl", "learns-reverse_kl", "one_hot-bce")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("variant", ["one_hot", "categorical", "learns"])
def test_gradients_are_those_of_the_definition(variant, loss, tmp_path, monkeypatch):
    """In one batch, and accumulated over two and four, which have different numbers of slots."""
    exact_norms(monkeypatch)
    monkeypatch.setattr(chunks, "LOGITS_PER_CHUNK", 3 * VOCABULARY)
    model = student("categorical" if variant == "learns" else variant, backbone().double(), sampling=FOLDED)
    if variant == "learns":
        model.train_only("all")
    row = ids(1, 9)[0]
    rows = [{"input_ids": row[:n], "labels": row[:n].index_fill(0, torch.arange(2), -100)} for n in (9, 5, 4, 7)]
    options = {"completions": 50, "greedy_share": 0.0, "gamma": 0.7, "loss": loss}
    options["base_weight"] = 0.5 * (variant == "learns")
    monkeypatch.setattr("tokenahead.training.ptp.tasks.RandomDraws", lambda _: Places())  # however batches are cut
    whole = plain_loss(model, trainer(model, tmp_path, rows, **options), rows)
    whole.backward()
    wanted = whole.detach(), all_gradients(model)
    for size in (4, 2, 1):
        value, _ = gradients(model, tmp_path, rows, size, **options)
        check(torch.tensor(value, dtype=torch.float64), all_gradients(model), wanted, 1e-12)


def test_evaluation_repeats_itself_and_leaves_the_generator_alone(tmp_path):
    model = student(base=backbone().double(), sampling=FOLDED, greedy=True, features="scalar")  # rounding shows in bits
    rows = [*texts(backbone(), **FOLDED)[:7], {"input_ids": ids(2)}]
    found = {}
    for size in (1, 3, 8):
        own = trainer(model, tmp_path, eval_dataset=rows, completions=50, gamma=0.7)
        own.args.per_device_eval_batch_size = size
        torch.manual_seed(size)
        state = torch.get_rng_state()
        found[size] = own.evaluate()
        assert torch.equal(torch.get_rng_state(), state)
    for name in ("eval_loss", "eval_num_correct"):
        assert found[1][name] == pytest.approx(found[8][name], rel=1e-5) == pytest.approx(found[3][name], rel=1e-5)
    assert 0 <= found[1]["eval_num_correct_greedy"] <= 3


def test_evaluation_on_written_texts_repeats_itself(tmp_path):
    model, rows = student(), texts(backbone())[:5]
    own = trainer(model, tmp_path, eval_dataset=rows, sequences="student")
    state = torch.get_rng_state()
    first, second = own.evaluate()["eval_loss"], own.evaluate()["eval_loss"]
    assert first == second and torch.equal(torch.get_rng_state(), state)


@pytest.mark.core_cases("one_hot-ce")
@pytest.mark.parametrize(("variant", "loss"), [("one_hot", "ce"), ("categorical", "kl")])
def test_pieces_of_the_loss_give_what_all_of_it_gives(variant, loss, tmp_path, monkeypatch):
    """Slots and distributions three rows at a time; no tensor over the vocabulary is larger."""
    model, rows = student(variant, backbone().double(), sampling=FOLDED), texts(backbone(), **FOLDED)[:4]
    options = {"loss": loss, "completions": 4, "greedy_share": 0.5}
    torch.manual_seed(7)
    whole = gradients(model, tmp_path, rows, 4, **options)
    monkeypatch.setattr(chunks, "LOGITS_PER_CHUNK", 3 * VOCABULARY)
    seen = []
    model.get_output_embeddings().register_forward_hook(lambda layer, inputs, output: seen.append(output.numel()))
    torch.manual_seed(7)
    pieces = gradients(model, tmp_path, rows, 4, **options)
    assert pieces[0] == pytest.approx(whole[0], rel=1e-9)
    torch.testing.assert_close(pieces[1], whole[1])
    assert seen and max(seen) <= 3 * VOCABULARY


@pytest.mark.by_day("one_hot-True", "categorical-False")
@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("variant", ["one_hot", "categorical"])
def test_greedy_completions_are_the_teachers_greedy_texts(variant, is_own, tmp_path):
    model = student(variant, backbone().double(), greedy=True)
    teacher = None if is_own else backbone().double()
    own = trainer(model, tmp_path, completions=4, greedy_share=0.5, teacher=teacher)
    found = own._task(model, {"input_ids": ids(2, 8)}, True)
    assert (found.u[:, 1::2] == -1).all() and (found.u[:, ::2] >= 0).all()
    for row in range(2):
        for completion in (1, 3):
            text = ids(2, 8)[row : row + 1, : int(found.completions.starts[row, completion])]
            for token in found.completions.tokens[row, completion].tolist():
                assert int(model(text).logits[0, -1].argmax()) == token
                text = torch.cat([text, torch.tensor([[token]])], dim=1)
    torch.manual_seed(0)
    loss = own.compute_loss(model, {"input_ids": ids(2, 8)})
    loss.backward()
    assert model.uniform_embedding.greedy.weight.grad.abs().sum() > 0


def test_data_without_a_target_are_refused(tmp_path):
    row = ids(1, 6)[0]
    with pytest.raises(ValueError, match="train_dataset"):
        trainer(student(), tmp_path, [{"input_ids": row, "labels": torch.full_like(row, -100)}] * 4).train()


@pytest.mark.core
def test_the_default_rate_is_the_trainers_own(tmp_path):
    from transformers import TrainingArguments

    from tokenahead.training import PTPTrainer

    arguments = TrainingArguments(tmp_path, report_to=[], use_cpu=True)
    rows = [{"input_ids": [1, 2, 3]}]
    assert PTPTrainer(student(), arguments, train_dataset=rows).args.learning_rate == 2e-3
    assert arguments.learning_rate == 5e-5
    assert trainer(student(), tmp_path, rate=3e-4).args.learning_rate == 3e-4
