"""Values of config.json that no model can have: every loader names the directory."""

import json

import pytest

from tests.every_model import llama
from tests.training.conftest import small_model
from tokenahead import BlockDrafter, DeepSeekMTP, EagleHead, EvaByteForMTPC, MTPHeads
from tokenahead.training.loading import load_backbone

MADE = {
    "heads": (lambda: MTPHeads.from_backbone(llama(), window=3), MTPHeads.from_pretrained),
    "eagle": (lambda: EagleHead.from_backbone(llama(), version=1), EagleHead.from_pretrained),
    "block": (lambda: BlockDrafter.from_backbone(llama()), BlockDrafter.from_pretrained),
    "modules": (lambda: DeepSeekMTP.from_backbone(llama(), num_modules=1), DeepSeekMTP.from_pretrained),
    "evabyte": (small_model, EvaByteForMTPC.from_pretrained),
    "backbone": (llama, lambda folder: load_backbone(str(folder), "--model", "--heads")),
}
HOSTILE = [
    ("heads", "dtype", "float999"),
    ("heads", "vocab_size", -1),
    ("heads", "window", 0),
    ("heads", "head_type", "evil"),
    ("eagle", "num_attention_heads", "2"),
    ("block", "rope_parameters", {"rope_type": "evil", "rope_theta": 1e4}),
    ("modules", "num_key_value_heads", 0),
    ("evabyte", "hidden_size", "many"),
    ("backbone", "num_attention_heads", 0),
    ("backbone", "hidden_act", "evil"),
]


@pytest.mark.parametrize(("kind", "field", "value"), HOSTILE)
def test_a_value_that_cannot_be_is_an_error_that_names_the_directory(kind, field, value, tmp_path):
    make, load = MADE[kind]
    make().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(ValueError, match=str(tmp_path)):
        load(tmp_path)
