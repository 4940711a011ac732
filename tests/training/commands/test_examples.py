"""The files in examples/ are settings that exist, and the scripts there run on a tiny model."""

import importlib.util
import json
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tokenahead import EagleHead
from tokenahead.training import TrainingStrategy
from tokenahead.training.commands.settings import read_settings
from tokenahead.training.commands.train import train as commands_train

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
FILES = sorted((EXAMPLES / "train").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_file_is_understood(file, tmp_path):
    settings = read_settings([str(file), "--use_cpu", "--output_dir", str(tmp_path)])
    given = yaml.safe_load(file.read_text())
    assert settings.drafter.drafter == given["drafter"] and settings.drafter.drafter_options == given["drafter_options"]
    assert settings.training.learning_rate == given["learning_rate"] and settings.training.output_dir == str(tmp_path)
    assert settings.drafter.training_strategy() == TrainingStrategy(**given.get("strategy", {}))


@pytest.mark.nightly
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_file_trains(file, folders, data, tmp_path):
    """As written but for the names of model and data, the number of steps, and tokens that so small a model lacks."""
    model, out = "evabyte" if file.stem == "evabyte" else "llama", tmp_path / "out"
    words = ["--model_name_or_path", str(folders / model), "--dataset_name", str(data["chat"]), "--max_steps", "2"]
    words += ["--drafter_options", '{"draft_vocab_size": 128}'] if file.stem == "eagle" else []
    answers = json.dumps({"folder": str(tmp_path / "answers"), "max_new_tokens": 4})
    words += ["--regenerate", answers] if file.stem == "eagle1" else []
    commands_train(read_settings([str(file), *words, "--output_dir", str(out), "--test_split_size", "0.25"]))
    assert (out / "config.json").is_file() and len(json.loads((out / "metrics.json").read_text()))


def script(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["train_heads", "train_evabyte", "train_drafters"])
def test_scripts_train(name, folders, data, tmp_path, monkeypatch):
    """As written but for the number of steps and, for a file, the data's name: where there is no accelerator, too."""
    module, out = script(name), tmp_path / "out"
    original, load = module.SFTConfig, module.load_dataset
    quiet = dict(report_to="none", max_steps=2, save_strategy="no", eval_steps=2)
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


@pytest.mark.by_day("length")
@pytest.mark.parametrize("task", ["length", "sums"])
def test_rollouts_of_grpo_are_drafted_by_a_head_that_learns(task, folders, tmp_path, monkeypatch):
    module, policy, head = script("grpo"), tmp_path / "policy", tmp_path / "head"
    backbone = AutoModelForCausalLM.from_pretrained(folders / "llama")
    EagleHead.from_backbone(backbone, version=1).save_pretrained(head)
    original = module.GRPOConfig
    quick = {"report_to": "none", "max_steps": 4, "max_completion_length": 8}
    monkeypatch.setattr(module, "GRPOConfig", lambda folder, **given: original(folder, **(given | quick)))
    module.main(str(folders / "llama"), str(head), task, str(policy))
    before, after = (load_file(folder / "model.safetensors") for folder in (head, policy / "head"))
    assert any(not before[name].equal(after[name].to(before[name].dtype)) for name in before)
    assert (policy / "adapter_model.safetensors").is_file()
