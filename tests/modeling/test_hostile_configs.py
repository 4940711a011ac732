"""Values of config.json that no model can have: every loader names the file, the field and what would be right."""

import json

import pytest

from tests.every_model import llama
from tests.training.conftest import small_model
from tokenahead import BlockDrafter, DeepSeekMTP, EagleHead, EvaByteForMTPC, MTPHeads, PTPStudent
from tokenahead.modeling.common.stored_drafters import drafter_class
from tokenahead.training.loading import load_backbone

MADE = {
    "heads": lambda: MTPHeads.from_backbone(llama(), window=3),
    "eagle": lambda: EagleHead.from_backbone(llama(), version=1),
    "block": lambda: BlockDrafter.from_backbone(llama()),
    "modules": lambda: DeepSeekMTP.from_backbone(llama(), num_modules=1),
    "evabyte": small_model,
}
CLASSES = dict(zip(MADE, (MTPHeads, EagleHead, BlockDrafter, DeepSeekMTP, EvaByteForMTPC)))
ALL = tuple(MADE)
LAYERED = "eagle", "block", "modules"
HOSTILE = [
    (ALL, "dtype", "float999"),
    (ALL, "dtype", 3),
    (ALL, "dtype", []),
    (ALL, "dtype", "nn"),
    (ALL, "model_type", []),
    (ALL, "hidden_size", "many"),
    (ALL, "hidden_size", 0),
    (ALL, "vocab_size", -1),
    (LAYERED, "num_attention_heads", 0),
    (LAYERED, "num_attention_heads", "2"),
    (LAYERED, "num_key_value_heads", 0),
    (LAYERED, "rope_parameters", {"rope_type": "evil", "rope_theta": 1e4}),
    (LAYERED, "rope_parameters", {"rope_type": ["default"], "rope_theta": 1e4}),
    (LAYERED, "rope_parameters", "evil"),
    (LAYERED, "rms_norm_eps", "small"),
    (("heads",), "loss_options", {"a": 1}),
    (("heads",), "window", 0),
    (("heads",), "head_type", "evil"),
]
CASES = [(kind, field, value) for kinds, field, value in HOSTILE for kind in kinds]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folders = {}
    for kind, make in MADE.items():
        folders[kind] = tmp_path_factory.mktemp(kind)
        make().save_pretrained(folders[kind])
    return folders


@pytest.mark.by_day(most=12)
@pytest.mark.parametrize(("kind", "field", "value"), CASES)
def test_a_value_that_cannot_be_is_named_by_file_and_field(kind, field, value, saved):
    file = saved[kind] / "config.json"
    before = file.read_text()
    file.write_text(json.dumps(json.loads(before) | {field: value}))
    try:
        with pytest.raises(ValueError, match=f"{saved[kind]}.*config.json") as error:
            CLASSES[kind].from_pretrained(saved[kind])
        assert (next(iter(value)) if field == "rope_parameters" and isinstance(value, dict) else field) in str(
            error.value
        )
    finally:
        file.write_text(before)


BACKBONES = [
    ("dtype", "float999"),
    ("num_attention_heads", 0),
    ("rope_parameters", {"rope_type": "evil", "rope_theta": 1e4}),
    ("hidden_act", "evil"),
]


@pytest.mark.parametrize(("field", "value"), BACKBONES)
def test_a_backbone_of_a_command_is_named_by_file_and_field(field, value, tmp_path):
    llama().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(ValueError, match=f"{tmp_path}.*config.json") as error:
        load_backbone(str(tmp_path), "--model", "--heads")
    assert (field if field != "rope_parameters" else "rope_type") in str(error.value)


@pytest.mark.parametrize("value", ["evil", 3, None, ["llama"]])
def test_a_backbone_of_no_known_type_is_named(value, tmp_path):
    PTPStudent.from_backbone(llama(), lora_rank=4).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["backbone_config"]["model_type"] = value
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=rf"{tmp_path}.*config.json.*backbone_config\.model_type="):
        PTPStudent.from_pretrained(tmp_path)


def test_what_a_drafter_is_is_asked_of_a_config_that_says_it(saved):
    file = saved["heads"] / "config.json"
    before = file.read_text()
    file.write_text(json.dumps(json.loads(before) | {"model_type": ["a"]}))
    try:
        with pytest.raises(ValueError, match="config.json.*model_type"):
            drafter_class(saved["heads"])
    finally:
        file.write_text(before)


def test_errors_of_arguments_stay_what_they_are(saved):
    with pytest.raises(TypeError, match="unknown_option"):
        MTPHeads.from_pretrained(saved["heads"], unknown_option=3)
    assert MTPHeads.from_pretrained(saved["heads"]).window == 3
