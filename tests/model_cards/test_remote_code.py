"""Directories with their code load where tokenahead is not installed: same logits and texts, with drafts.

Everything is saved here, and loaded in one process that knows torch and transformers alone (clean_client.py).
"""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.every_model import every_model, llama, moved_heads, prompt_for
from tests.families import family_model
from tests.model_cards.clean_client import needs_peft, spoken
from tokenahead import EagleHead, EvaByteTokenizer, PTPStudent

MODELS = ("evabyte_ff", "evabyte_btree", "deepseek", "deepseek_llama", "mimo", "ptp_one_hot", "ptp_categorical")
DRAFTERS = ("heads", "heads_hydra", "eagle", "ptp_student")
TEXT = "def main("
pytestmark = pytest.mark.nightly  # by day, test_push.py loads a model by its code where tokenahead cannot be imported


def save_models(folder: Path) -> dict:
    found = {}
    for name in MODELS:
        model = family_model("mimo").eval() if name == "mimo" else every_model(name)
        found[name] = {"prompt": prompt_for(model)}
        found[name] |= spoken(model, found[name]["prompt"])
        model.save_pretrained(folder / name, remote_code="bundle")
    return found


def moved_student(backbone: torch.nn.Module) -> PTPStudent:
    """A student that has left its start."""
    student = PTPStudent.from_backbone(backbone, num_slots=3)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return student.eval()


def save_drafters(folder: Path) -> dict:
    backbone = llama()
    backbone.save_pretrained(folder / "backbone")
    drafters = {
        "heads": moved_heads(backbone),
        "heads_hydra": moved_heads(backbone, unembedding=None, head_type="hydra"),
        "eagle": EagleHead.from_backbone(backbone, aux_layers=[0, 1, 2]).eval(),
        "ptp_student": moved_student(backbone),
    }
    found = {}
    for name, drafter in drafters.items():
        found[name] = {"prompt": prompt_for(backbone)} | spoken(backbone, prompt_for(backbone), drafter)
        drafter.save_pretrained(folder / name, remote_code="bundle")
    return found


def save_tokenizer(folder: Path) -> dict:
    tokenizer, model = EvaByteTokenizer(), every_model("evabyte_ff")
    for part in (model, tokenizer):
        part.save_pretrained(folder, remote_code="bundle")
    inputs = tokenizer(TEXT, return_tensors="pt")
    written = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0]
    text = tokenizer.decode(written, skip_special_tokens=True)
    return {"text": TEXT, "ids": tokenizer(TEXT)["input_ids"], "written": text}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """What clean_client.py found, and the directory of everything."""
    folder = tmp_path_factory.mktemp("anywhere")
    expected = {"models": save_models(folder), "drafters": save_drafters(folder)}
    expected["tokenizer"] = save_tokenizer(folder / "both")
    (folder / "expected.pickle").write_bytes(pickle.dumps(expected))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PYTHON"))}
    environment |= {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    client = Path(__file__).with_name("clean_client.py")
    done = subprocess.run(
        [sys.executable, "-I", str(client), str(folder)], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


def test_nothing_else_was_there(loaded):
    assert not {"tokenahead", "trl", "datasets"} & set(loaded["imported"])


@pytest.mark.parametrize("name", MODELS)
def test_model_says_the_same_and_hands_its_code_on(loaded, name):
    found = loaded[name]
    assert isinstance(found, dict), found
    config = found.pop("config")
    assert all(found.values()), found
    assert config.startswith({"eva": "EvaByte", "dee": "", "mim": "MiMo", "ptp": "PTP"}[name[:3]])


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafter_attaches_and_says_the_same(loaded, name):
    assert isinstance(loaded["drafters"], dict), loaded["drafters"]
    assert all(loaded["drafters"][name].values()), loaded["drafters"][name]
    assert loaded["drafters"]["detached"]
    assert needs_peft(name) or all(loaded["without peft"][name].values())


def test_tokenizer_and_pipeline(loaded):
    assert loaded["tokenizer"] == {"ids": True, "handed on": True, "pipeline": True}


def test_errors_lead_to_the_card_or_name_what_is_missing(loaded):
    assert isinstance(loaded["refusals"], dict), loaded["refusals"]
    errors = loaded["refusals"]
    assert "inspect the repository content at" in errors["no trust"] and "trust_remote_code=True" in errors["no trust"]
    assert errors["plain"] == "DeepseekV3ForCausalLM"
    assert "peft" in errors["no peft"]
