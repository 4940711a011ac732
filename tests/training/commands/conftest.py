"""What the tests of the commands share: directories of tiny models, files of text and chats, settings from a
mapping."""

import json

import pytest
import torch
import yaml

from tests.every_model import llama
from tests.families import family_model
from tests.models import tiny_model
from tokenahead import EvaByteTokenizer, PTPForCausalLM
from tokenahead.training.commands.settings import read_settings

LINES = ["def f(x):\n    return x + 1\n", "import os\n", "class A:\n    pass\n\n\nprint(A)\n", "# note\nx = [1, 2]\n"]
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    yield
    torch.set_num_threads(threads)


def byte_llama():
    model = llama(vocab_size=320, num_hidden_layers=4)
    model.generation_config.eos_token_id = None
    return model


MODELS = {
    "llama": byte_llama,
    "evabyte": lambda: tiny_model(num_pred_heads=4),
    "modules": lambda: family_model("deepseek_v3", num_nextn_predict_layers=2, vocab_size=320),
    "ptp": lambda: PTPForCausalLM.from_backbone(byte_llama(), num_slots=3),
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """By name: a directory with a tiny byte-level model and its tokenizer."""
    root = tmp_path_factory.mktemp("models")
    for name, make in MODELS.items():
        torch.manual_seed(0)
        make().save_pretrained(root / name)
        EvaByteTokenizer().save_pretrained(root / name)
    return root


@pytest.fixture
def data(tmp_path):
    """Files by name: rows of text, and of chats."""
    rows = {"text": [{"text": text * 3} for text in LINES * 6], "chat": [{"messages": CHAT}] * 12}
    files = {}
    for name, content in rows.items():
        files[name] = tmp_path / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps(row) + "\n" for row in content))
    return files


@pytest.fixture
def settings_of(folders, data, tmp_path):
    """Settings of a run of four steps, as a YAML file says; names of models and data may be those of the fixtures."""

    def make(model: str = "llama", flags: tuple[str, ...] = (), **changes):
        values = {
            "model_name_or_path": str(folders / model),
            "dataset_name": str(data["text"]),
            "test_split_size": 0.25,
            "max_length": 64,
            "max_steps": 4,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "per_device_train_batch_size": 4,
            "use_cpu": True,
            "output_dir": str(tmp_path / "run"),
        }
        values |= changes
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump({name: value for name, value in values.items() if value is not None}))
        return read_settings([str(file), *flags])

    return make
