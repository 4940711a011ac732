"""Files and fields that no model can have are refused at once, and by name, by every loader."""

import json
import os
import pickle
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.eagle_models import DATA
from tests.every_model import llama
from tests.families import family_model
from tests.modeling.heads.backbones import GOLDENS
from tests.models import tiny_model
from tokenahead import (
    AssistantDrafter,
    BlockDrafter,
    DeepSeekMTP,
    EagleHead,
    EvaByteForMTPC,
    MTPHeads,
    PTPForCausalLM,
    PTPStudent,
)
from tokenahead.generation.tensors.tensor_files import read_index, read_tensors, weight_files
from tokenahead.training.loading import load_backbone


def _heads(**options):
    return lambda: MTPHeads.from_backbone(llama(), window=4, **options)


SAVED = {
    "heads": (_heads(), MTPHeads.from_pretrained),
    "medusa": (_heads(head_type="medusa"), MTPHeads.from_pretrained),
    "hydra": (_heads(head_type="hydra", arch="prefix-mlp"), MTPHeads.from_pretrained),
    "layer": (_heads(head_type="layer"), MTPHeads.from_pretrained),
    "hmm": (_heads(head_type="hmm", rank=2), MTPHeads.from_pretrained),
    "draft layers": (_heads(draft_layers=1), MTPHeads.from_pretrained),
    "eagle": (lambda: EagleHead.from_backbone(llama(), version=1), EagleHead.from_pretrained),
    "modules": (lambda: family_model("llama"), DeepSeekMTP.from_pretrained),
    "evabyte": (tiny_model, EvaByteForMTPC.from_pretrained),
    "ptp": (lambda: PTPForCausalLM.from_backbone(llama(), lora_rank=2), PTPForCausalLM.from_pretrained),
    "student": (lambda: PTPStudent.from_backbone(llama(), lora_rank=2), PTPStudent.from_pretrained),
}
LOADERS = SAVED | {
    "backbone": (llama, lambda folder: load_backbone(str(folder), "--model", "--heads")),
    "assistant": (llama, AssistantDrafter.from_pretrained),
    "block": (lambda: BlockDrafter.from_backbone(llama()), BlockDrafter.from_pretrained),
    "retrofit": (llama, DeepSeekMTP.from_backbone),
    "student's backbone": (llama, PTPForCausalLM.from_backbone),
}
ELSEWHERE = ("../{}", "{outside}/{}", "sub/{}", "sub\\{}", "C:{}", "", ".", "..", "a\nb", "a\x00b", 7, None, ["a"])


def _saved(kind, folder):
    LOADERS[kind][0]().save_pretrained(folder)
    return LOADERS[kind][1]


def _index(folder, name, file="model.safetensors.index.json"):
    names = load_file(folder / "model.safetensors")
    (folder / file).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, name)}))


@pytest.mark.by_day("heads", "eagle", "modules", "backbone")
@pytest.mark.parametrize("kind", LOADERS)
def test_an_index_that_leads_elsewhere_is_refused(kind, tmp_path):
    load = _saved(kind, folder := tmp_path / "folder")
    (outside := tmp_path / "outside").mkdir()
    shutil.copy(folder / "model.safetensors", outside / "secret.safetensors")
    _index(folder, "../outside/secret.safetensors")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="index.json.*weight_map"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="index.json.*weight_map"):
        load(folder)


@pytest.mark.parametrize("name", ELSEWHERE, ids=repr)
def test_names_in_an_index_are_plain_files(name, tmp_path):
    (tmp_path / "index.json").write_text("{}")
    name = name.format("x.safetensors", outside=tmp_path.parent) if isinstance(name, str) else name
    (tmp_path / "a.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"w": name}}))
    with pytest.raises(ValueError, match="a.index.json"):
        read_index(tmp_path / "a.index.json")


@pytest.mark.parametrize("content", ["[]", "7", "{}", '{"weight_map": {}}', '{"metadata": {}, "weight_map": []}', "{"])
def test_what_is_no_index_is_named(content, tmp_path):
    (file := tmp_path / "model.safetensors.index.json").write_text(content)
    for read in (read_index, lambda file: weight_files(file.parent)):
        with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
            read(file)


def test_an_index_that_config_json_names_is_read_with_the_same_care(tmp_path):
    load = _saved("heads", folder := tmp_path / "folder")
    _index(folder, "../outside.safetensors", "other.safetensors.index.json")
    fields = json.loads((folder / "config.json").read_text()) | {"transformers_weights": "other.safetensors.index.json"}
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"other\.safetensors\.index\.json"):
        load(folder)


def _numbers(fields, path=()):
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _numbers(value, (*path, name))
        elif type(value) is int and not name.endswith("_token_id"):
            yield *path, name


@pytest.mark.by_day("heads", "evabyte")
@pytest.mark.parametrize("kind", SAVED)
def test_absurd_numbers_in_a_config_are_refused_at_once(kind, tmp_path):
    load = _saved(kind, folder := tmp_path / "folder")
    fields = json.loads((folder / "config.json").read_text())
    for path in _numbers(fields):
        for number in (10**9, 2**70, -1):
            changed = json.loads(json.dumps(fields))
            inner = changed
            for name in path[:-1]:
                inner = inner[name]
            inner[path[-1]] = number
            (folder / "config.json").write_text(json.dumps(changed))
            try:
                load(folder)  # many fields decide nothing at loading
            except Exception as error:
                is_named = isinstance(error, (ValueError, OSError)) or type(error).__name__.startswith("StrictData")
                assert is_named, (path, number, repr(error))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("medusa", "num_blocks"),
        ("medusa", "window"),
        ("layer", "window"),
        ("eagle", "num_hidden_layers"),
        ("modules", "num_nextn_predict_layers"),
        ("evabyte", "num_hidden_layers"),
        ("student", "num_slots"),
    ],
)
def test_a_count_without_tensors_is_named(kind, name, tmp_path):
    load = _saved(kind, folder := tmp_path / "folder")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {name: 10**9}))
    with pytest.raises(ValueError, match=f"{name}={10**9}"):
        load(folder)


@pytest.mark.parametrize("layout", ["medusa", "hydra"])
@pytest.mark.parametrize("place", [0, 1])
def test_numbers_in_names_of_tensors_are_consecutive(layout, place, tmp_path):
    MTPHeads.from_backbone(llama(), window=4, head_type=layout, unembedding="own").export(tmp_path, layout)
    file = next(tmp_path.glob("*_lm_head.*"))
    tensors = read_tensors([file])
    name = next(name for name in tensors if name.endswith("linear.weight"))
    parts = name.split(".")
    parts[place + (layout == "hydra")] = "999999999"
    file.unlink()
    extra = tensors | {".".join(parts): tensors[name].clone()}
    save_file(extra, file) if file.suffix == ".safetensors" else torch.save(extra, file)
    with pytest.raises(ValueError, match=r"999999999|count"):
        MTPHeads.from_official(tmp_path)


def test_a_pickle_of_more_than_tensors_is_named_in_one_line(tmp_path):
    load = _saved("heads", folder := tmp_path / "folder")
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(os.system))
    with pytest.raises(ValueError, match="more than tensors") as caught:
        load(folder)
    assert "weights_only" not in str(caught.value)
    (folder / "pytorch_model.bin").rename(folder / "shard.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "shard.bin")}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="more than tensors") as caught:
        load(folder)
    assert "weights_only" not in str(caught.value)
    with pytest.raises(ValueError, match="weights_only=False"):
        load(folder, weights_only=False)


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
    load, file = _saved(kind, tmp_path), tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(ValueError, match=str(tmp_path)):
        load(tmp_path)


LEFT = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n",
    b"<!DOCTYPE html>\n<html><head>",
    b"",
)
RUNS = DATA.parent / "ptp/runs"
OFFICIAL = {
    "official eagle": (DATA / "eagle3_llama/official", EagleHead.from_pretrained, "pytorch_model.bin"),
    "hydra": (GOLDENS / "hydra_mlp/official", MTPHeads.from_official, "hydra_lm_head.pt"),
    "gloeckle": (GOLDENS / "gloeckle/official", MTPHeads.from_official, "consolidated.pth"),
    "ptp": (
        RUNS / "interpolation", partial(PTPForCausalLM.from_official, backbone=RUNS / "backbone"), "last.ckpt"
    ),
}  # fmt: skip
EXPORTED = {
    "medusa": (SAVED["medusa"][0], MTPHeads.from_official, "medusa_lm_head.safetensors"),
    "specforge": (
        lambda: EagleHead.from_backbone(llama(num_hidden_layers=4), aux_layers=[2, 3, 4]), EagleHead.from_pretrained,
        "model.safetensors",
    ),
}  # fmt: skip


def _downloaded(kind, folder):
    """A directory, its loader and its file of weights."""
    if kind in OFFICIAL:
        shutil.copytree(OFFICIAL[kind][0], folder)
        return OFFICIAL[kind][1:]
    if kind in EXPORTED:
        make, *found = EXPORTED[kind]
        make().export(folder, kind)
        return found
    return _saved(kind.removeprefix("our "), folder), "model.safetensors"


OURS = [f"our {kind}" for kind in ("heads", "eagle", "modules", "evabyte", "ptp", "student")]


@pytest.mark.by_day("our heads", "hydra", "medusa", "our evabyte")
@pytest.mark.parametrize("kind", [*OURS, *OFFICIAL, *EXPORTED])
def test_what_a_wrong_download_left_is_named(kind, tmp_path):
    read, file = _downloaded(kind, folder := tmp_path / "read")
    assert (folder / file).is_file(), sorted(folder.iterdir())
    for content in LEFT:
        (folder / file).write_bytes(content)
        with pytest.raises(ValueError, match=str(folder)):
            read(folder)
