"""The files in examples/ are settings that exist, and the scripts there run on a tiny model."""

import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from tests.internals import read_settings
from tokenahead.training import TrainingStrategy

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
FILES = sorted((EXAMPLES / "train").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_file_is_understood(file, tmp_path):
    settings = read_settings([str(file), "--use_cpu", "--output_dir", str(tmp_path)])
    given = yaml.safe_load(file.read_text())
    assert settings.drafter.drafter == given["drafter"] and settings.drafter.drafter_options == given["drafter_options"]
    assert settings.training.learning_rate == given["learning_rate"] and settings.training.output_dir == str(tmp_path)
    assert settings.drafter.training_strategy() == TrainingStrategy(**given.get("strategy", {}))


def test_there_is_a_file_for_every_drafter():
    assert {yaml.safe_load(file.read_text())["drafter"] for file in FILES} == {
        "own", "heads", "eagle", "modules", "parallel"
    }  # fmt: skip


def script(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["train_heads", "train_evabyte", "train_drafters"])
def test_scripts_train(name, folders, data, tmp_path, monkeypatch):
    """As written but for the number of steps, the processor and, for a file, the data's name."""
    module, out = script(name), tmp_path / "out"
    original, load = module.SFTConfig, module.load_dataset
    quiet = dict(use_cpu=True, bf16=False, report_to="none", max_steps=2, save_strategy="no", eval_steps=2)
    monkeypatch.setattr(module, "SFTConfig", lambda folder, **given: original(folder, **(given | quiet)))
    local = str(data["chat" if name == "train_evabyte" else "text"])
    monkeypatch.setattr(module, "load_dataset", lambda *args, **given: load("json", data_files=local, split="train"))
    words = {
        "train_heads": [str(folders / "llama"), "text"],
        "train_evabyte": [str(folders / "evabyte"), local],
        "train_drafters": ["modules", str(folders / "llama"), "text"],
    }[name]
    if name == "train_evabyte":
        make = module.EvaByteForMTPC.from_pretrained
        small = {"head_type": "btree", "window": 4, "rank": 2}
        monkeypatch.setattr(module.EvaByteForMTPC, "from_pretrained", lambda path, mtp_head: make(path, mtp_head=small))
    module.main(*words, str(out))
    assert json.loads((out / "config.json").read_text())
