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
    """In one batch, and accumulated over two and four, which have different numbers of slots; three rows at a time."""
    exact_norms(monkeypatch)
    monkeypatch.setattr(chunks, "LOGITS_PER_CHUNK", 3 * VOCABULARY)
    model = student("categorical" if variant == "learns" else variant, backbone().double(), sampling=FOLDED)
    if variant == "learns":
        model.train_only("all")
    row = ids(1, 9)[0]
    rows = [{"input_ids": row[:n], "labels": row[:n].index_fill(0, torch.arange(2), -100)} for n in (9, 5, 4, 7)]
    options = {"completions": 50, "greedy_share": 0.0, "gamma": 0.7, "loss": loss}
    options["base_weight"] = 0.5 * (variant == "learns")
    monkeypatch.setattr("tokenahead.training.ptp.trainer.RandomDraws", lambda _: Places())  # however batches are cut
    whole = plain_loss(model, trainer(model, tmp_path, rows, **options), rows)
    whole.backward()
    wanted, seen = (whole.detach(), all_gradients(model)), []
    if variant != "learns":  # no tensor over the vocabulary is larger than a chunk
        model.get_output_embeddings().register_forward_hook(lambda layer, inputs, output: seen.append(output.numel()))
    for size in (4, 2, 1):
        value, _ = gradients(model, tmp_path, rows, size, **options)
        check(torch.tensor(value, dtype=torch.float64), all_gradients(model), wanted, 1e-12)
    assert max(seen, default=0) <= 3 * VOCABULARY


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


@pytest.mark.by_day("one_hot-True", "categorical-False")
@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("variant", ["one_hot", "categorical"])
def test_greedy_completions_are_the_teachers_greedy_texts(variant, is_own, tmp_path):
    model = student(variant, backbone().double(), greedy=True)
    teacher = None if is_own else backbone().double()
    own = trainer(model, tmp_path, completions=4, greedy_share=0.5, teacher=teacher)
    found = own._task(model, {"input_ids": ids(2, 8)}, True)
    uniforms = found.completions.uniforms
    assert (uniforms[:, 1::2] == -1).all() and (uniforms[:, ::2] >= 0).all()
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


def test_intervals_are_made_only_where_completions_read_them(tmp_path):
    """Two sequences of 40 tokens, three completions of four tokens, one of them greedy, which reads none."""
    model, rows = student("categorical", backbone().double(), greedy=True), []
    own = trainer(model, tmp_path, completions=3, greedy_share=0.34)
    model.get_output_embeddings().register_forward_hook(lambda layer, inputs, output: rows.append(len(output)))
    found = own._task(model, {"input_ids": ids(2, 40)}, True)
    columns = found.packed.starts[:, :2, None] + torch.arange(4)  # [B, C, K]
    distinct = sum(len({column for column in each if column < 40}) for each in columns.flatten(1).tolist())
    assert (found.completions.uniforms[:, 2] == -1).all() and rows[0] == distinct <= 16
    assert sum(rows[1:]) == 2 * 4  # the greedy completion's chain
