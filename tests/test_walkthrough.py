"""The page from a model to a served drafter: every command and block on a tiny model, but the last command."""

import json
import shutil

import pytest
import torch

from tests.test_documentation import BLOCK, ROOT
from tests.test_documented_commands import commands
from tests.training.commands.conftest import CHAT, byte_llama
from tokenahead import EvaByteTokenizer, cli

PAGE = ROOT / "docs" / "walkthrough.md"
MODEL = "Qwen/Qwen3-0.6B"
MORE = {
    "bench": ["--new-tokens", "4", "--no-expected", "--raw"],
    "doctor": ["--new-tokens", "4", "--raw"],
    "regenerate": ["--regenerate", '{"folder": "runs/eagle1-answers", "max_new_tokens": 4}'],
    "train": ["--regenerate", '{"folder": "runs/eagle1-answers", "max_new_tokens": 4}'],
}
"""What makes a command short here."""
OF_TRAINING = {"--model_name_or_path": "model", "--dataset_name": "chats.jsonl", "--max_steps": "1",
               "--eval_steps": "1", "--save_steps": "1", "--test_split_size": "0.5", "--dtype": "float32"}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    byte_llama().save_pretrained("model")
    EvaByteTokenizer().save_pretrained("model")
    shutil.copytree(ROOT / "examples" / "train", "examples/train")
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': CHAT})}\n" * 4)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def main("}\n{"prompt": "import "}\n')
    return tmp_path


def shortened(words):
    """A command of the page for the tiny model; `words` begin with `tokenahead`."""
    name = words[1]
    of_training = [word for pair in OF_TRAINING.items() for word in pair] if name in ("train", "regenerate") else []
    if name in ("train", "regenerate"):
        of_training += ["--use_cpu", "true", "--disable_tqdm", "true"]
    return ["model" if word == MODEL and "--base-model" not in words else word for word in words[1:]] + [
        *MORE.get(name, []), *of_training
    ]  # fmt: skip


@pytest.mark.slow
def test_every_step_runs(folder, capfd):
    text = PAGE.read_text(encoding="utf-8")
    asked = [words for words in commands(text) if words[0] == "tokenahead"]
    assert [words[1] for words in asked] == ["bench", "regenerate", "train", "doctor", "bench", "card"]
    for words in asked:
        with pytest.raises(SystemExit) as ended:
            cli.main(shortened(words))
        # so small a head is untrained, which the doctor says
        assert ended.value.code == (words[1] == "doctor"), (words, capfd.readouterr().err)
    log = json.loads((folder / "runs/eagle1/metrics.json").read_text())
    assert any("eval_accepted_1" in entry and "eval_expected_accepted" in entry for entry in log)
    for comment, code in BLOCK.findall(text):
        if "a test runs it" in comment:
            exec(code.replace(MODEL, "model"), {})
    assert (folder / "runs/public/README.md").is_file() and not list((folder / "runs/public").glob("checkpoint-*"))
    assert (folder / "runs/served/config.json").is_file()
