"""What PTPTrainer refuses, and documents whose positions begin anywhere."""

import pytest
import torch
from transformers import TrainingArguments

from tests.ptp_models import CONFIGS, backbone, ids, student
from tokenahead import EvaByteTokenizer
from tokenahead.training import PTPTrainer
from tokenahead.training.ptp.forwards import PackedBatch, Sequences


def trainer(tmp_path, data=None, processing_class=None, **arguments):
    how = TrainingArguments(tmp_path, max_steps=1, report_to=[], use_cpu=True, save_strategy="no", **arguments)
    data = [{"input_ids": ids(8)}] * 4 if data is None else data
    given = {"train_dataset": data, "processing_class": processing_class}
    return PTPTrainer(student(), how, **given)


def test_arguments_that_would_not_do(tmp_path):
    for arguments, message in [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor is for losses of labels"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            trainer(tmp_path, **arguments)


@pytest.mark.parametrize("tokenizer", [None, EvaByteTokenizer()])
def test_rows_that_padding_would_hide(tokenizer, tmp_path):
    for rows, message in (
        ([{"input_ids": ids(8), "labels": ids(5)}] * 4, "8 input_ids and 5 labels"),
        ([{"input_ids": ids(8), "labels": ids(9)}] * 4, "8 input_ids and 9 labels"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer(tmp_path, rows, processing_class=tokenizer).train()


def test_labels_that_are_all_masked_are_an_error_and_no_loss_of_zero(tmp_path):
    rows = [{"input_ids": ids(8), "labels": torch.full((8,), -100)}] * 4
    with pytest.raises(ValueError, match="label"):
        trainer(tmp_path, rows).train()


def sequences(positions, mask=None):
    positions = torch.tensor([positions])
    inputs = {"input_ids": ids(1, positions.shape[1]), "position_ids": positions}
    return Sequences.of(inputs if mask is None else inputs | {"attention_mask": torch.tensor([mask])})


@pytest.mark.core
def test_documents_begin_where_positions_do_not_go_on():
    found = sequences([7, 8, 9, 3, 4, 0, 1])
    assert found.documents.tolist() == [[1, 1, 1, 2, 2, 3, 3]]
    assert found.positions.tolist() == [[7, 8, 9, 3, 4, 0, 1]]
    assert sequences([0, 1, 0, 1, 1], [1, 1, 1, 1, 0]).documents.tolist() == [[1, 1, 2, 2, 0]]
    assert sequences([0, 0, 0, 1, 2], [0, 0, 1, 1, 1]).documents.tolist() == [[0, 0, 1, 1, 1]]
    assert sequences([5, 6, 7, 8]).startable.tolist() == [[False, True, True, True]]


@torch.no_grad()
def test_the_teacher_reads_the_positions_that_were_given():
    """A table of learned positions tells where a document begins."""
    model = student(base=backbone(CONFIGS["gpt2"]()))
    found = sequences([9, 10, 11, 12])
    rows = PackedBatch(model, found, torch.tensor([[2]]), is_one_hot=True)
    scores = rows.read()
    want = model(found.tokens, position_ids=found.positions, output_hidden_states=-1).hidden_states[-1]
    torch.testing.assert_close(scores.states, want)
    assert rows._layout(2)[1].tolist() == [[9, 10, 11, 12, 10, 11]]
