"""A run that is killed goes on from its last checkpoint, and ends with the losses of one that was not."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.training.commands import kill_client
from tokenahead.training.checkpoints import last_whole_checkpoint
from tokenahead.training.commands.train import train

ROOT = Path(__file__).resolve().parents[3]
HEADS = dict(drafter="heads", drafter_options={"window": 3})
RUNS = {
    "heads only": HEADS,
    "joint": dict(HEADS, strategy={"train": "all", "loss_weight": 0.0, "loss_weight_last": 0.2,
                                   "loss_weight_shape": "sine"}),
    "lora": dict(HEADS, strategy={"train": "lora", "head_warmup": 2, "loss": {"balance": "rms"}}),
    "kl": dict(HEADS, strategy={"loss": {"target": "teacher", "divergence": "kl", "label_weight": 0.2}}),
    "two stages": dict(HEADS, strategy={"draft_layers": 1, "head_warmup": 0.5}),
    "draft lora": dict(model="evabyte", strategy={"draft_layers": 1}),
    "eagle": dict(drafter="eagle", loss_options={"steps": 2}),
    "parallel": dict(drafter="parallel", drafter_options={"num_slots": 3}),
}  # fmt: skip


def losses(trainer) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


@pytest.fixture(scope="module")
def killed():
    """Trains as a file says until SIGKILL at the end of a step, in a child of one process for all runs."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-m", "tests.training.commands.kill_client"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    server = subprocess.Popen(words, cwd=ROOT, env=environment, **pipes)

    def run(config: Path, step: int) -> int:
        server.stdin.write(json.dumps({"config": str(config), "step": step}) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline())

    yield run
    server.stdin.close()
    assert server.wait() == 0


@pytest.fixture(autouse=True)
def _bare(monkeypatch):
    kill_client.leave_out_cards(monkeypatch.setattr)


@pytest.mark.by_day("heads only")
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_run_that_is_killed_goes_on(run, settings_of, killed, tmp_path):
    options = dict(max_steps=4, save_strategy="steps", save_steps=1, save_total_limit=2, **run)
    whole = train(settings_of(**options, output_dir=str(tmp_path / "whole")))
    settings_of(**options)
    step = random.Random(str(run)).randint(2, 3)
    assert killed(tmp_path / "config.yaml", step) == -signal.SIGKILL
    resumed = train(settings_of(**options, resume_from_checkpoint="true"))
    expected, found = losses(whole), losses(resumed)
    assert found == pytest.approx({step: expected[step] for step in found}, abs=1e-6) and max(found) == 4
    models = [trainer.accelerator.unwrap_model(trainer.model) for trainer in (whole, resumed)]
    for name, value in models[0].state_dict().items():
        torch.testing.assert_close(models[1].state_dict()[name], value, rtol=0, atol=1e-6)


@pytest.mark.by_day("optimizer.pt")
@pytest.mark.parametrize("lost", ["trainer_state.json", "optimizer.pt"])
def test_a_checkpoint_that_was_cut_off_is_passed_over(lost, settings_of, tmp_path):
    options = dict(max_steps=4, save_strategy="steps", save_steps=2, **HEADS)
    whole = train(settings_of(**options))
    (tmp_path / "run" / "checkpoint-4" / lost).unlink()
    with pytest.warns(UserWarning, match=f"checkpoint-4.*{lost} is missing"):
        resumed = train(settings_of(**options, resume_from_checkpoint="true"))
    assert losses(resumed) == pytest.approx(losses(whole), abs=1e-6)


def flipped(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(settings_of, tmp_path):
    options = dict(max_steps=3, save_strategy="steps", save_steps=1, **HEADS)
    train(settings_of(**options))
    folder = tmp_path / "run" / "checkpoint-3"
    files = {"config.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json"}
    assert files <= {path.name for path in folder.iterdir()}
    for name in sorted({path.name for path in folder.iterdir()} - {"checksums.json"}):
        before = (folder / name).read_bytes()
        for damage in (lambda data: data[: len(data) // 2], flipped):
            (folder / name).write_bytes(damage(before))
            with pytest.warns(UserWarning, match=f"checkpoint-3.*{name} is (damaged|missing)"):
                assert last_whole_checkpoint(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-2")
        (folder / name).write_bytes(before)
    assert last_whole_checkpoint(tmp_path / "run") == str(folder)
    (folder / "model.safetensors").write_bytes(flipped((folder / "model.safetensors").read_bytes()))
    with pytest.raises(ValueError, match=r"checkpoint-3.*model.safetensors is damaged"):
        train(settings_of(**options, resume_from_checkpoint=str(folder)))


@pytest.mark.by_day("lora")
@pytest.mark.parametrize("run", ["heads only", "lora", "parallel"])
def test_a_finished_run_makes_no_further_step(run, settings_of, tmp_path):
    options = dict(max_steps=3, save_strategy="steps", save_steps=2, lr_scheduler_type="constant", **RUNS[run])
    first = train(settings_of(**options))
    wanted = first.accelerator.unwrap_model(first.model).state_dict()
    weights = tmp_path / "run" / "model.safetensors"
    saved = weights.read_bytes()
    weights.unlink()  # as if the machine had failed just before
    with pytest.warns(UserWarning, match="3.*max_steps=.*3"):
        again = train(settings_of(**options, resume_from_checkpoint="true"))
    assert weights.read_bytes() == saved and losses(again) == losses(first)
    for name, value in again.accelerator.unwrap_model(again.model).state_dict().items():
        assert torch.equal(value, wanted[name]), name
