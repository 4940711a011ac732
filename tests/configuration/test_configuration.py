import json

import pytest
from huggingface_hub.errors import StrictDataclassError

from tests.models import TRAINED, tiny_config
from tokenahead import EvaByteConfig, MTPHeadConfig


def test_official_file_loads_and_return_dict_is_ignored():
    config = EvaByteConfig.from_pretrained(TRAINED)
    assert config.return_dict is True
    assert config.rope_parameters == {"rope_theta": 100000.0, "rope_type": "default"}
    assert (config.mtp_head.head_type, config.mtp_head.window) == ("ff", 8)


def test_round_trip_keeps_unknown_fields_and_official_names(tmp_path):
    config = tiny_config(mtp_head={"window": 5}, some_future_field=7)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_theta"] == 10000.0 and written["rope_scaling"] is None
    assert written["mtp_head"] == {"head_type": "ff", "window": 5, "rank": 1, "unembedding": "own"}
    again = EvaByteConfig.from_pretrained(tmp_path)
    assert again.some_future_field == 7
    assert again.mtp_head.window == 5
    assert again.to_dict() == config.to_dict()


def test_rope_theta_survives_the_round_trip(tmp_path):
    EvaByteConfig.from_pretrained(TRAINED).save_pretrained(tmp_path)
    assert EvaByteConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"] == 100000.0


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"window_size": 30}, ["window_size=30", "chunk_size=4"]),
        ({"num_pred_heads": 0}, ["num_pred_heads=0"]),
        ({"mtp_head": {"window": 33}}, ["mtp_head.window=33", "window_size=32"]),
        ({"mtp_head": {"window": 0}}, ["window=0", "at least 1"]),
        ({"mtp_head": {"head_type": "medusa"}}, ["head_type='medusa'"]),
        ({"mtp_head": {"unembedding": "shared"}}, ["unembedding='shared'"]),
        ({"mtp_head": {"rank": 4}}, ["rank=4"]),
        ({"mtp_head": {"gamma": 0.0}}, ["decay=0.0"]),
    ],
)
def test_contradictions_are_refused_by_name(changes, names):
    with pytest.raises(StrictDataclassError) as error:
        tiny_config(**changes)
    assert all(name in str(error.value) for name in names), error.value


def test_wrong_type_is_refused():
    with pytest.raises(StrictDataclassError, match="window_size"):
        tiny_config(window_size="32")


def test_head_config_knows_its_families():
    with pytest.raises(StrictDataclassError, match="head_type=.*'x'"):
        MTPHeadConfig(head_type="x")
