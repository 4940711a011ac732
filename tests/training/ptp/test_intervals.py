"""Intervals of completions' tokens: those of a plain computation at all positions, made only where they are read."""

import pytest
import torch

from tests.ptp_models import backbone, ids, student
from tests.training.ptp.test_trainer import FOLDED, trainer
from tokenahead.generation.tensors.sampling import interval
from tokenahead.training.ptp.forwards import Sequences as CompletionSequences
from tokenahead.training.ptp.forwards import Teacher
from tokenahead.training.ptp.losses import target_probs

MASK = torch.tensor([[1] * 12, [1] * 9 + [0] * 3])


def plain_interval(token, probs):
    """Cumulative sums with a column of 0 in front, and the last possible token by a search from the end."""
    cumulative = torch.nn.functional.pad(probs.double().cumsum(-1), (1, 0))
    low, high = (cumulative.gather(-1, token[..., None] + step)[..., 0] for step in (0, 1))
    last = torch.stack([row.nonzero()[-1, 0] for row in (probs > 0).flatten(0, -2)]).view(token.shape)
    return low, torch.where(token == last, 1.0, high)


def plain_intervals(scores, tokens, read, sampling):
    """Intervals of all tokens, by one tensor over the vocabulary."""
    return plain_interval(tokens, target_probs(scores.logits(scores.states), **sampling))


def drawn(model, tmp_path, seed=3, **options):
    """The task of a step, its loss, and its gradients."""
    own = trainer(model, tmp_path, **options)
    torch.manual_seed(seed)
    found = own._task(model, {"input_ids": ids(2, 12), "attention_mask": MASK}, True)
    model.zero_grad()
    loss, _ = own._learn(model, found, *[own._counts(found)] * 2)
    loss.backward()
    return found, loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.by_day("categorical-dataset", "one_hot-student")
@pytest.mark.core_cases("categorical-dataset")
@pytest.mark.parametrize("sequences", ["dataset", "student"])
@pytest.mark.parametrize("variant", ["categorical", "one_hot"])
def test_tasks_and_gradients_are_those_of_intervals_at_all_positions(variant, sequences, tmp_path, monkeypatch):
    model = student(variant, backbone().double(), sampling=FOLDED, greedy=True)
    options = {"loss": "kl", "completions": 5, "greedy_share": 0.4, "sequences": sequences}
    found, loss, gradients = drawn(model, tmp_path, **options)
    monkeypatch.setattr("tokenahead.training.ptp.forwards.token_intervals", plain_intervals)
    plain, plain_loss, plain_gradients = drawn(model, tmp_path, **options)
    assert torch.equal(found.reached, plain.reached) and found.valid.any()
    assert torch.equal(found.u[found.reached], plain.u[plain.reached])
    torch.testing.assert_close(loss, plain_loss, rtol=1e-12, atol=0)
    for one, other in zip(gradients, plain_gradients, strict=True):
        assert (one - other).norm() <= 1e-12 * other.norm()


def test_intervals_are_made_only_where_completions_read_them(tmp_path):
    """Two sequences of 40 tokens, three completions of four tokens, one of them greedy, which reads none."""
    model, rows = student("categorical", backbone().double(), greedy=True), []
    own = trainer(model, tmp_path, completions=3, greedy_share=0.34)
    model.get_output_embeddings().register_forward_hook(lambda layer, inputs, output: rows.append(len(output)))
    found = own._task(model, {"input_ids": ids(2, 40)}, True)
    columns = found.packed.starts[:, :2, None] + torch.arange(4)  # [B, C, K]
    distinct = sum(len({column for column in each if column < 40}) for each in columns.flatten(1).tolist())
    assert (found.u[:, 2] == -1).all() and rows[0] == distinct <= 16
    assert sum(rows[1:]) == 2 * 4  # the greedy completion's chain


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_interval_is_the_padded_sums_one(dtype):
    probs = torch.rand(4, 3, 9, dtype=dtype).masked_fill(torch.rand(4, 3, 9) < 0.5, 0.0)
    probs[..., 2] = 0.3
    for token in range(9):
        tokens = torch.full((4, 3), token)
        for one, other in zip(interval(tokens, probs), plain_interval(tokens, probs), strict=True):
            assert torch.equal(one, other)


def test_pieces_where_nothing_exists_have_empty_intervals():
    model = student(base=backbone().double())
    batch = CompletionSequences.of({"input_ids": ids(2, 12), "attention_mask": MASK})
    teacher, starts = Teacher(model, {}), torch.ones(2, 3, dtype=torch.long)
    pieces = teacher.pieces(batch, teacher.of_sequences(batch), starts, torch.zeros(2, 3, dtype=torch.bool), 4)
    assert not pieces.known.any() and (pieces.low == 0).all() and (pieces.high == 0).all()
    assert not pieces.place(torch.rand(2, 3, 4))[1].any()
