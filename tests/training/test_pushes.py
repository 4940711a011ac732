"""What trainers push: of a run directory and of checkpoints that an earlier training has written to, and over what."""

from concurrent.futures import Future
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from tests.training.conftest import ragged_rows, small_model, trainer_for
from tokenahead.model_cards import push
from tokenahead.training import pushing

MODEL = {"config.json", "model.safetensors"}


class Uploads(list):
    """Stands in for the client of the Hub: the names of the files, per commit."""

    def upload_folder(self, folder_path, **options):
        names = {file.relative_to(folder_path).as_posix() for file in Path(folder_path).rglob("*") if file.is_file()}
        self.append({name for name in names if not name.startswith("tokenahead_code")})

    def run_as_future(self, call):
        future = Future()
        future.set_result(call())
        return future


@pytest.fixture
def uploads(monkeypatch):
    monkeypatch.setattr(pushing, "_API", uploads := Uploads())
    monkeypatch.setattr(HfApi, "list_repo_files", lambda self, name: [])
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


PLANTED = (
    "id_rsa", "notes.json", "train.py", ".env", "env", "secret.safetensors", "model.bak", "runs/id_rsa", "run.json",
    "private/config.json", "private/model.safetensors", "backbone/id_rsa", "data.jsonl", "features/part-0.bin",
    "online_drafter/buffer-0.safetensors", "online_drafter/drafter/config.json", "states/0/rows.bin",
)  # fmt: skip
OF_RUNS = ("metrics.json", "runs/Nov28/events.out.tfevents.1")


@pytest.mark.by_day("end", "all_checkpoints")
@pytest.mark.parametrize("strategy", ["end", "every_save", "checkpoint", "all_checkpoints"])
def test_what_else_lies_in_a_run_is_not_pushed(strategy, tmp_path, uploads):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    trainer, checkpoint = trained(run, hub_strategy=strategy), run / "checkpoint-1"
    write(elsewhere, "id_rsa", "model.safetensors", "generation_config.json")
    for folder in (run, checkpoint):
        write(folder, *PLANTED, *(OF_RUNS if folder == run else ()))
        (folder / "vocab.json").symlink_to(elsewhere / "id_rsa")  # a name of the list
        (folder / "backbone" / "vocab.txt").symlink_to(elsewhere / "id_rsa")
        (folder / "runs" / "more").symlink_to(elsewhere, target_is_directory=True)
    of_resuming = {"trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth", "checksums.json"}
    if strategy == "end":
        write(run, *of_resuming)
        trainer.push_to_hub()
    else:
        trainer._push_from_checkpoint(str(checkpoint))
    (names,) = uploads
    top = {name for name in names if not name.startswith(("last-checkpoint/", "checkpoint-1/"))}
    assert top - {"README.md", "generation_config.json"} == MODEL | set(OF_RUNS if strategy == "end" else ())
    whole = {name.rpartition("/")[2] for name in names - top} - {"README.md", "generation_config.json"}
    assert whole == (MODEL | of_resuming if "checkpoint" in strategy else set())


def test_code_that_a_config_names_is_pushed_with_what_it_imports(tmp_path):
    write(tmp_path / "run", "model.safetensors", "stray.py")
    (tmp_path / "run" / "config.json").write_text('{"auto_map": {"AutoModel": "me/toy--modeling_toy.Toy"}}')
    (tmp_path / "run" / "modeling_toy.py").write_text("from .layers_toy import Layer\n")
    (tmp_path / "run" / "layers_toy.py").write_text("Layer = int\n")
    push.public_copy(tmp_path / "run", tmp_path / "copy")
    assert {each.name for each in (tmp_path / "copy").iterdir()} == {
        "config.json", "model.safetensors", "modeling_toy.py", "layers_toy.py"
    }  # fmt: skip


def test_another_model_is_not_pushed_over(tmp_path, monkeypatch, uploads):
    theirs = tmp_path / "theirs.json"
    theirs.write_text('{"model_type": "llama"}')
    monkeypatch.setattr(HfApi, "list_repo_files", lambda self, name: ["config.json"])
    monkeypatch.setattr(HfApi, "hf_hub_download", lambda self, *names: str(theirs))
    with pytest.raises(ValueError, match="model_type"):
        trained(tmp_path / "run").push_to_hub()
    assert not uploads
