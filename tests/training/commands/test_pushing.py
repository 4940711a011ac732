"""`push_to_hub: true` over real HTTP: one push at the end, and nothing in it that names a path of this machine."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests.loopback_hub import LoopbackHub
from tests.training.commands.conftest import LINES

pytestmark = pytest.mark.nightly
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def pushed(folders, tmp_path_factory):
    """The Hub after push_run_client.py, and how its runs ended."""
    folder = tmp_path_factory.mktemp("push")
    for name in ("llama", "evabyte"):
        shutil.copytree(folders / name, folder / name)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text * 3}) + "\n" for text in LINES * 2))
    settings = {"model_name_or_path": str(folder / "llama"), "dataset_name": str(folder / "text.jsonl"),
                "drafter": "heads", "drafter_options": {"window": 3}, "max_steps": 2, "logging_steps": 1,
                "save_strategy": "no", "use_cpu": True, "push_to_hub": True, "max_length": 64}  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    with LoopbackHub() as hub:
        said = hub.run(HERE / "push_run_client.py", folder)
    ended = json.loads((folder / "ended.json").read_text())
    return SimpleNamespace(hub=hub, folder=folder, ended=ended, said=said)


RUNS = {"heads": "model.safetensors", "steps": "model.safetensors", "both": "backbone/adapter_model.safetensors",
        "adapters": "adapter_model.safetensors", "taught": "model.safetensors"}  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_pushed_without_paths_of_this_machine(pushed, run):
    assert pushed.ended[run] == {"status": 0, "stepped": True}, pushed.said
    files = pushed.hub.repositories[f"me/{run}"].files
    assert {RUNS[run], "README.md", "tokenizer_config.json", "metrics.json"} <= files.keys()
    assert not {"run.json", "config.yaml", "training_args.bin"} & {Path(name).name for name in files}
    assert [name for name, blob in files.items() if str(pushed.folder).encode() in blob.data] == []
    assert (pushed.folder / run / "run.json").is_file() and (pushed.folder / run / "config.yaml").is_file()
    assert not [path.name for path in (pushed.folder / run).iterdir() if path.name.startswith(".")]


def test_the_folder_here_names_its_backbone(pushed):
    config = json.loads((pushed.folder / "heads" / "config.json").read_text())
    assert config["base_model_name_or_path"] == str(pushed.folder / "llama")


def test_a_run_is_one_commit_with_the_name_of_its_data(pushed):
    heads = pushed.hub.repositories["me/heads"]
    assert [commit.message for commit in heads.commits[1:]] == ["End of training"]
    assert b"`text.jsonl`: 8 rows." in heads.files["README.md"].data
    assert b"for 2 steps" in heads.files["README.md"].data


def test_answers_are_pushed_as_a_data_set_that_is_learned_by_its_name(pushed):
    files = pushed.hub.repositories["datasets/me/answers"].files
    assert [name for name in files if name.endswith(".parquet")] == ["data/train-00000-of-00001.parquet"]
    assert b"`me/answers`: 8 rows." in pushed.hub.repositories["me/taught"].files["README.md"].data


def test_checkpoints_are_pushed_as_models_and_whole(pushed):
    steps = pushed.hub.repositories["me/steps"]
    assert "Training in progress, step 2" in {commit.message for commit in steps.commits}
    names = steps.files.keys()
    assert {"checkpoint-1/optimizer.pt", "checkpoint-2/trainer_state.json"} <= names and "optimizer.pt" not in names
    first = next(commit for commit in steps.commits if commit.message == "Training in progress, step 1")
    assert {"tokenahead_code/README.md", "checkpoint-1/optimizer.pt", "model.safetensors"} <= first.files.keys()


def test_what_cannot_be_pushed_is_refused_before_the_first_step(pushed):
    assert pushed.ended["another's"] == {"status": 1, "stepped": False}
    assert "under the namespace of other/heads" in pushed.said


def test_the_hub_knew_every_request(pushed):
    assert pushed.hub.unknown == []
