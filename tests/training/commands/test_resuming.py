"""A run that is killed goes on from its last checkpoint, and ends with the losses of one that was not."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from tokenahead.training.commands.settings import read_settings
from tokenahead.training.commands.train import train

ROOT = Path(__file__).resolve().parents[3]
RUNS = {
    "heads": dict(drafter="heads", drafter_options={"window": 3}),
    "joint": dict(
        drafter="heads",
        drafter_options={"window": 3},
        strategy={"train": "lora", "head_warmup": 2, "loss_weight": 0.0, "loss_weight_last": 0.2,
                  "loss_weight_shape": "sine", "loss_balance": "rms"},
    ),
    "teacher": dict(
        drafter="heads", drafter_options={"window": 3}, strategy={"loss_target": "teacher", "loss_divergence": "lk"}
    ),
    "draft layers": dict(drafter="heads", drafter_options={"window": 3}, strategy={"draft_layers": 1}),
    "eagle": dict(drafter="eagle", loss_options={"steps": 2}),
    "parallel": dict(drafter="parallel", drafter_options={"num_slots": 3}),
}  # fmt: skip


def losses(trainer) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


class Stopped(Exception):
    """In the place of SIGKILL, in the same process."""


class Stop(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Stopped


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_every_strategy_goes_on_from_a_checkpoint(run, settings_of, tmp_path):
    options = dict(max_steps=4, save_strategy="steps", save_steps=1, save_total_limit=2, **run)
    whole = train(settings_of(**options, output_dir=str(tmp_path / "whole")))
    step = random.Random(str(run)).randint(2, 3)
    with pytest.raises(Stopped):
        train(settings_of(**options), callbacks=[Stop(step)])
    resumed = train(settings_of(**options, resume_from_checkpoint="true"))
    expected, found = losses(whole), losses(resumed)
    assert found == pytest.approx({step: expected[step] for step in found}, abs=1e-6) and max(found) == 4
    models = [trainer.accelerator.unwrap_model(trainer.model) for trainer in (whole, resumed)]
    for name, value in models[0].state_dict().items():
        torch.testing.assert_close(models[1].state_dict()[name], value, rtol=0, atol=1e-6)


def test_a_run_that_is_killed_goes_on(settings_of, tmp_path):
    options = dict(max_steps=4, save_strategy="steps", save_steps=1, save_total_limit=2, **RUNS["heads"])
    whole = train(settings_of(**options, output_dir=str(tmp_path / "whole")))
    settings_of(**options)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-m", "tests.training.commands.kill_client", str(tmp_path / "config.yaml"), "2"]
    killed = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    resumed = train(read_settings([str(tmp_path / "config.yaml"), "--resume_from_checkpoint", "true"], "train"))
    expected, found = losses(whole), losses(resumed)
    assert max(found) == 4 and found == pytest.approx({step: expected[step] for step in found}, abs=1e-6)
