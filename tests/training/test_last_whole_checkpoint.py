"""A training that was killed within a save goes on from the last whole checkpoint, and learns what it would have."""

import shutil
from contextlib import suppress

import pytest
import torch

from tests.every_model import llama
from tests.kills import Killed, before_operation
from tests.training.conftest import ragged_rows, trainer_for
from tokenahead import MTPHeads


def made(folder, steps=4):
    torch.manual_seed(0)
    heads = MTPHeads.from_backbone(llama(), window=3, unembedding="own")
    return trainer_for(heads, folder, ragged_rows(vocab_size=64), max_steps=steps, save_strategy="steps", save_steps=2)


def weights(trainer):
    return {name: each.detach().clone() for name, each in trainer.model.named_parameters()}


def killed_at(trainer, number, **options):
    """Train; the first save is killed before the operation of this number. Return how many there were."""
    save, counts = trainer._save_checkpoint, []

    def killed(*args):
        with before_operation(number, Killed()) as count:
            counts.append(count)
            save(*args)

    trainer._save_checkpoint = killed
    with suppress(Killed):
        trainer.train(**options)
    return counts[0][0]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    trainer = made(tmp_path_factory.mktemp("whole"))
    trainer.train()
    return weights(trainer)


@pytest.mark.nightly
@pytest.mark.parametrize("has_whole_one", [False, True])
def test_a_kill_within_a_save_costs_the_steps_since_the_last_whole_one(has_whole_one, tmp_path, uninterrupted):
    earlier = tmp_path / "earlier"
    if has_whole_one:
        made(earlier, steps=2).train()
    total, passed_over = killed_at(made(tmp_path / "count"), 10**6), 0
    assert total > 10
    for number in range(0, total, max(total // 4, 1)):
        folder = tmp_path / f"run-{number}"
        if has_whole_one:
            shutil.copytree(earlier, folder)
        killed_at(made(folder), number, resume_from_checkpoint=has_whole_one or None)
        again, checkpoints = made(folder), [*folder.glob("checkpoint-*")]
        passed_over += len(checkpoints) > has_whole_one
        if not checkpoints:  # as in `Trainer`
            with pytest.raises(ValueError, match="checkpoint"):
                again.train(resume_from_checkpoint=True)
            continue
        again.train(resume_from_checkpoint=True)
        assert again.state.global_step == 4
        for name, value in weights(again).items():
            torch.testing.assert_close(value, uninterrupted[name], rtol=0, atol=0)
    assert passed_over >= 3


@pytest.mark.by_day("model.safetensors")
@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors", "trainer_state.json"])
def test_a_damaged_checkpoint_is_refused_by_name_and_passed_over(name, tmp_path, uninterrupted):
    trainer = made(tmp_path)
    trainer.train()
    last = tmp_path / "checkpoint-4"
    (last / name).write_bytes((last / name).read_bytes()[:-7])
    with pytest.raises(ValueError, match=f"resume_from_checkpoint.*{name}"):
        made(tmp_path).train(resume_from_checkpoint=str(last))
    again = made(tmp_path)
    with pytest.warns(UserWarning, match=name):
        again.train(resume_from_checkpoint=True)
    assert again.state.log_history[-1]["step"] == 4 and len(again.state.log_history) > 2
    for key, value in weights(again).items():
        torch.testing.assert_close(value, uninterrupted[key], rtol=0, atol=0)
