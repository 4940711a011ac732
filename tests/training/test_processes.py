"""Two processes on a CPU: the losses, metrics and weights of one, for every kind of model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training import process_client
from tests.training.conftest import ragged_rows, small_model, trainer_for
from tokenahead.training.trainer import MTPTrainer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes have written."""
    folder = tmp_path_factory.mktemp("two")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    client = ["-m", "tests.training.process_client", str(folder), "2"]
    done = subprocess.run([sys.executable, *words, *client], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", process_client.MAKERS)
def test_two_processes_do_what_one_does(name, two, tmp_path):
    """The held-out rows are no multiple of what both take at once: none counts twice in losses and acceptance."""
    process_client.run(name, tmp_path, 1, 2)
    one, other = (json.loads((folder / f"{name}.json").read_text()) for folder in (tmp_path, two))
    assert len(one) == len(other) and any("eval_loss" in entry for entry in one)
    for mine, theirs in zip(one, other):
        assert theirs == pytest.approx(mine, rel=1e-6, abs=1e-6)
    weights, others = (load_file(folder / f"{name}.safetensors") for folder in (tmp_path, two))
    for key, value in weights.items():
        torch.testing.assert_close(others[key], value, rtol=0, atol=1e-6, msg=lambda text, k=key: f"{k}: {text}")


def test_a_sharding_that_heads_cannot_follow_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(MTPTrainer, "_zero_stage", 3)
    with pytest.raises(ValueError, match="zero_stage=3 of DeepSpeed"):
        trainer_for(small_model(), tmp_path, ragged_rows())
    monkeypatch.setattr(MTPTrainer, "_zero_stage", 2)
    trainer_for(small_model(), tmp_path, ragged_rows())
