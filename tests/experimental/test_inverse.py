"""Training from the student's own uniforms, without a teacher."""

import pytest
import torch
from transformers import TrainingArguments

from tests.ptp_models import VOCABULARY, backbone, student
from tokenahead import PTPForCausalLM
from tokenahead.experimental import InverseTrainer
from tokenahead.generation.tensors.sampling import pick
from tokenahead.training import PTPOptions
from tokenahead.training.ptp.forwards import at_columns


def trainer(model, tmp_path, steps, **options) -> InverseTrainer:
    arguments = TrainingArguments(
        tmp_path, max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=steps, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    return InverseTrainer(model, arguments, train_dataset=rows(), **options)


def rows() -> list[dict]:
    return [{"input_ids": (torch.arange(12 - index % 4) + index) % VOCABULARY} for index in range(16)]


def test_inverse_training_finds_the_students_own_uniforms(tmp_path):
    model = student("categorical", backbone().double())
    own = trainer(model, tmp_path, 2, options=PTPOptions(completions=4, greedy_share=0.0))
    with torch.no_grad():
        found = own._task(model, own.data_collator(rows()), True)
        completions = found.completions
        u, reached = completions.uniforms, completions.reached
        # one forward confirms what was found step by step
        logits = found.packed.slots(found.inputs, lambda hidden, head: head(hidden))
        distribution = logits.softmax(-1).unflatten(1, u[..., 1:].shape[1:])
        first = at_columns(model(found.packed.sequences.tokens).logits, completions.starts - 1).softmax(-1)
    assert reached.sum() > 40
    picked = torch.cat([pick(u[..., 0], first)[..., None], pick(u[..., 1:], distribution)], dim=-1)
    assert torch.equal(picked[reached], completions.tokens[reached])


@pytest.mark.nightly
def test_inverse_training_lowers_the_loss_without_a_teacher(tmp_path):
    model = PTPForCausalLM.from_backbone(backbone(), "categorical", num_slots=3)
    model.train_only("all")
    own = trainer(model, tmp_path, 40, options=PTPOptions(base_weight=1.0), eval_dataset=rows())
    before = own.evaluate()["eval_loss"]
    own.train()
    assert own.evaluate()["eval_loss"] < before - 0.5
    assert "num_correct" not in own.state.log_history[0]


def test_what_it_cannot_learn_from(tmp_path):
    for model, options, message in [
        (student(), {}, "variant='categorical'"),
        (student("mask"), {}, "variant='categorical'"),
        (student("categorical", sampling={"top_p": 0.9}), {}, "sampling="),
        (student("categorical"), {"teacher": backbone()}, "teacher="),
        (student("categorical"), {"options": PTPOptions(loss="kl")}, "loss='ce'"),
    ]:
        with pytest.raises(ValueError, match=message):
            trainer(model, tmp_path, 1, **options)
