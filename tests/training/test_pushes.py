"""What trainers push: of a run directory and of checkpoints that an earlier training has written to, and over what."""

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi

from tests.training.conftest import ragged_rows, small_model, trainer_for
from tokenahead.training import pushing

MODEL = {"config.json", "model.safetensors"}


class Uploads(list):
    """Stands in for the client of the Hub: a pair of the directory in the repository and the files, per commit."""

    def upload_folder(self, folder_path, path_in_repo, **options):
        names = {file.relative_to(folder_path).as_posix() for file in Path(folder_path).rglob("*") if file.is_file()}
        self.append((path_in_repo, {name for name in names if not name.startswith("tokenahead_code")}))

    def run_as_future(self, call):
        future = Future()
        future.set_result(call())
        return future


@pytest.fixture
def uploads(monkeypatch):
    monkeypatch.setattr(pushing, "_API", uploads := Uploads())
    return uploads


def trained(folder, **options):
    trainer = trainer_for(
        small_model(), folder, ragged_rows(), max_steps=1, save_strategy="steps", save_steps=1, **options
    )
    trainer.train()
    trainer.hub_model_id, trainer.push_in_progress = "me/toy", None
    return trainer


def write(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint", "all_checkpoints"])
def test_a_second_training_pushes_no_rollouts_of_the_first(tmp_path, uploads, strategy):
    trainer = trained(tmp_path, hub_strategy=strategy)
    checkpoint = tmp_path / "checkpoint-1"
    write(checkpoint, "online_drafter/buffer-0.safetensors", "online_drafter/drafter/config.json", "states/0/rows.bin")
    trainer._push_from_checkpoint(str(checkpoint))
    (_, model), *whole = uploads
    assert model <= MODEL | {"generation_config.json", "README.md"}
    for _, names in whole:
        assert MODEL | {"optimizer.pt", "trainer_state.json"} <= names
    assert not [name for _, names in uploads for name in names if "online_drafter" in name]


def test_a_run_is_pushed_without_what_resuming_needs(tmp_path, uploads):
    trainer = trained(tmp_path)
    of_resuming = ("optimizer.pt", "trainer_state.json", "rng_state.pth", "online_drafter/buffer-0.safetensors")
    write(
        tmp_path,
        "metrics.json",
        "runs/log",
        "run.json",
        "features/part-0.bin",
        "adapter/adapter_config.json",
        *of_resuming,
    )
    trainer.push_to_hub()
    ((_, names),) = uploads
    assert MODEL | {"README.md", "metrics.json", "runs/log", "adapter/adapter_config.json"} <= names
    assert not [name for name in names if name.startswith(("online", "features", "run.", "checkpoint", *of_resuming))]


def test_another_model_is_not_pushed_over(tmp_path, monkeypatch, uploads):
    theirs = tmp_path / "theirs.json"
    theirs.write_text('{"model_type": "llama"}')
    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **options: SimpleNamespace(repo_id=name))
    monkeypatch.setattr(HfApi, "list_repo_files", lambda self, name: ["config.json"])
    monkeypatch.setattr(HfApi, "hf_hub_download", lambda self, *names: str(theirs))
    options = dict(push_to_hub=True, hub_model_id="me/theirs", hub_token="hf_x")
    with pytest.raises(ValueError, match="'me/theirs' holds another model: model_type"):
        trainer_for(small_model(), tmp_path / "run", ragged_rows(), max_steps=1, **options)
    assert not uploads
