"""Two processes on a CPU: the losses, metrics and weights of one, for every kind of model."""

import json
import multiprocessing
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.programs import ROOT, Program
from tests.training import process_client
from tests.training.conftest import ragged_rows, small_model, trainer_for
from tokenahead.modeling.heads.joint import JointMTPModel
from tokenahead.training.trainer_base import BaseTrainer

CONFIG = ROOT / "examples" / "accelerate" / "fsdp2.yaml"
SHARDED = ["evabyte", "heads", "joint", "joint_layers", "modules", "eagle", "parallel", "masks"]


@pytest.fixture(scope="module")
def two(request, tmp_path_factory):
    """What two processes have written of the models whose tests run: of plain ones, and of sharded ones."""

    def asked(test):
        return [item.callspec.params["name"] for item in request.session.items if item.function is test]

    plain, sharded = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("sharded")
    if names := asked(test_shards_do_what_one_process_does):
        words = ["--config_file", CONFIG, "--main_process_port", "0", "-m", process_client.__name__, sharded, *names]
        Program("-m", "accelerate.commands.launch", *words).ended(600)
    if names := asked(test_two_processes_do_what_one_does):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([process_client.__name__])  # it is imported once for both
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            port = server.getsockname()[1]
        started = [context.Process(target=process_client.join, args=(each, port, plain, names)) for each in range(2)]
        for process in started:
            process.start()
        for process in started:
            process.join(600)
        assert [process.exitcode for process in started] == [0, 0]
    return plain, sharded


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process writes, by model."""
    folder = tmp_path_factory.mktemp("one")

    def run(name):
        if not (folder / f"{name}.json").exists():
            process_client.run(name, folder, 1, 2)
        return _history(folder, name), load_file(folder / f"{name}.safetensors")

    return run


def _history(folder: Path, name: str) -> list[dict[str, float]]:
    return json.loads((folder / f"{name}.json").read_text())


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6, msg=lambda text, k=key: f"{k}: {text}")


@pytest.mark.by_day("circuit")
@pytest.mark.parametrize("name", process_client.MAKERS)
def test_two_processes_do_what_one_does(name, two, alone):
    """The held-out rows are no multiple of what both take at once: none counts twice in losses and acceptance."""
    history, weights = alone(name)
    other = _history(two[0], name)
    steps = [entry["loss"] for entry in history if "loss" in entry]
    assert len(steps) == 3 and all(steps) and any("eval_loss" in entry for entry in history)
    assert len(history) == len(other)
    for mine, theirs in zip(history, other):
        assert theirs == pytest.approx(mine, rel=1e-6, abs=1e-6)
    _same(load_file(two[0] / f"{name}.safetensors"), weights)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SHARDED)
def test_shards_do_what_one_process_does(name, two, alone):
    """Two steps, a sharded checkpoint, a third step after resuming from it; the directory at the end is whole."""
    history, weights = alone(name)
    for mine, theirs in zip(history, _history(two[1], name), strict=True):
        assert theirs == pytest.approx({key: mine[key] for key in theirs}, rel=1e-6, abs=1e-6)
    _same(load_file(two[1] / f"{name}.safetensors"), weights)
    whole = process_client.MAKERS[name]()
    if name.startswith("joint"):
        whole = JointMTPModel(whole)
        whole.load_checkpoint(two[1] / f"{name}_whole")
    else:
        whole = type(whole).from_pretrained(two[1] / f"{name}_whole")
    _same(dict(whole.state_dict()), weights)


def test_a_sharding_that_heads_cannot_follow_is_refused(tmp_path, monkeypatch):
    """What DeepSpeed is asked for is known before it does anything; here nobody asks for it really."""
    make = BaseTrainer.create_accelerator_and_postprocess

    def asked(trainer):
        make(trainer)
        trainer.is_deepspeed_enabled = True
        trainer.accelerator.state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3))

    monkeypatch.setattr(BaseTrainer, "create_accelerator_and_postprocess", asked)
    with pytest.raises(ValueError, match="zero_stage=.*3.*DeepSpeed"):
        trainer_for(small_model(), tmp_path, ragged_rows())
