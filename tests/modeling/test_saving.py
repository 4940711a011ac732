"""Directories are saved whole or not at all, with or without code, and leave no trace on the model."""

import json
import os

import pytest
import torch

from tests.every_model import every_model, llama, moved_heads
from tests.models import tiny_model
from tokenahead import EagleHead, EvaByteForMTPC, EvaByteTokenizer
from tokenahead.modeling.common.remote_code import add_code, code_when_pushed

KINDS = ("evabyte_ff", "deepseek_llama", "ptp_one_hot", "heads", "eagle", "tokenizer")


def made(kind: str):
    if kind == "tokenizer":
        return EvaByteTokenizer()
    if kind == "heads":
        return moved_heads(llama())
    if kind == "eagle":
        return EagleHead.from_backbone(llama(), aux_layers=[0, 1, 2])
    return every_model(kind)


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.by_day("evabyte_ff", "heads", "tokenizer")
@pytest.mark.parametrize("kind", KINDS)
def test_code_is_written_as_asked_and_leaves_no_trace_on_what_was_saved(kind, tmp_path):
    thing = made(kind)
    file = "tokenizer_config.json" if kind == "tokenizer" else "config.json"
    for remote_code, least, most in (("bundle", 2, 100), ("auto", 0, 0), (None, 0, 0)):
        folder = tmp_path / str(remote_code)
        thing.save_pretrained(folder, remote_code=remote_code)
        names = json.loads((folder / file).read_text()).get("auto_map", {})
        entries = [name[0] if isinstance(name, list) else name for name in names.values()]
        assert all((folder / f"{entry.rpartition('.')[0]}.py").is_file() for entry in entries)
        assert bool(entries) == bool(most)
        assert least <= len(list((folder / "tokenahead_code").glob("*.py"))) <= most if most else not entries
        assert not getattr(getattr(thing, "config", None), "auto_map", None)
    assert contents(tmp_path / "auto") == contents(tmp_path / "None")
    again = type(thing).from_pretrained(tmp_path / "bundle")
    assert not getattr(getattr(again, "config", None), "auto_map", None)
    with pytest.raises(ValueError, match="remote_code=.*'zip'.*'auto'.*'bundle'"):
        thing.save_pretrained(tmp_path / "zip", remote_code="zip")
    assert not [*(tmp_path / "zip").glob("*")]


def test_a_backbone_of_this_machine_is_named_by_its_whole_path(tmp_path, monkeypatch):
    """Elsewhere `runs/base` would be the name of a repository."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "base").mkdir(parents=True)
    heads = made("heads")
    for name, saved in (("runs/base", str(tmp_path / "runs" / "base")), ("me/base", "me/base")):
        heads.config.base_model_name_or_path = name
        heads.save_pretrained("heads")
        assert json.loads((tmp_path / "heads" / "config.json").read_text())["base_model_name_or_path"] == saved


@pytest.mark.core
def test_a_push_carries_the_code_of_models_and_none_of_drafters(tmp_path):
    model, tokenizer = tiny_model(), EvaByteTokenizer()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    os.link(tmp_path / "config.json", tmp_path / "linked.json")  # as in the copy that a trainer pushes
    for part in (model, tokenizer):
        add_code(part, tmp_path, code_when_pushed(part))
    names = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert names["AutoModelForCausalLM"].endswith("EvaByteForMTPC")
    assert "auto_map" not in (tmp_path / "linked.json").read_text()
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["auto_map"]["AutoTokenizer"][1] is None
    assert "generation_loop.py" in contents(tmp_path / "tokenahead_code")
    heads = made("heads")
    assert code_when_pushed(heads) == "auto" and code_when_pushed(heads, "bundle") == "bundle"
    assert code_when_pushed(Mine(tiny_model().config)) == "auto"


class Mine(EvaByteForMTPC):
    """A class of a user, whose code the library does not know."""


def test_classes_of_users_carry_no_code_of_ours(tmp_path):
    model = Mine(tiny_model().config)
    model.save_pretrained(tmp_path / "saved")
    assert "auto_map" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    with pytest.raises(ValueError, match="test_saving"):
        model.save_pretrained(tmp_path / "bundle", remote_code="bundle")


def test_layouts_of_others_carry_no_code(tmp_path):
    head = made("eagle")
    head.config.layout = "vllm"
    head.save_pretrained(tmp_path / "saved")
    assert set(contents(tmp_path / "saved")) == {"config.json", "model.safetensors"}
    with pytest.raises(ValueError, match="'vllm'"):
        head.save_pretrained(tmp_path / "bundle", remote_code="bundle")


def test_weights_of_an_earlier_save_are_removed_and_those_of_another_variant_kept(tmp_path):
    model = tiny_model()
    (tmp_path / "notes.txt").write_text("mine")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    model.save_pretrained(tmp_path, variant="fp32")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    model.save_pretrained(tmp_path)
    weights = {name for name in contents(tmp_path) if "safetensors" in name}
    assert weights == {"model.safetensors", "model.fp32.safetensors"} and (tmp_path / "notes.txt").exists()
    for variant in (None, "fp32"):
        loaded = EvaByteForMTPC.from_pretrained(tmp_path, variant=variant)
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
