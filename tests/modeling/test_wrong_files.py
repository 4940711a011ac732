"""What a wrong download or a renamed file leaves in a directory is named by every loader, with what to do."""

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.eagle_models import DATA, tiny_backbone
from tests.families import family_model
from tests.modeling.heads.backbones import GOLDENS
from tests.models import tiny_model
from tokenahead import DeepSeekMTP, EagleHead, EvaByteForMTPC, MTPHeads, PTPForCausalLM, PTPStudent

LEFT = {
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n", "Git LFS"),
    "page": (b"\xef\xbb\xbf\n<!DOCTYPE html>\n<html><head>", "HTML"),
    "page without a type": (b"<html lang=en>" + b" " * 200, "HTML"),
    "error": (b"Entry not found", "'Entry not found'"),
    "nothing": (b"", "empty"),
}


def saved(make):
    return lambda folder: make().save_pretrained(folder)


def exported(head, layout):
    def write(folder):
        base = tiny_backbone()
        head(base).export(folder, layout)

    return write


def copied(source):
    return lambda folder: shutil.copytree(source, folder)


DIRECTORIES = {
    "heads": (saved(lambda: MTPHeads.from_backbone(tiny_backbone())), MTPHeads.from_pretrained, "model.safetensors"),
    "eagle": (saved(lambda: EagleHead.from_backbone(tiny_backbone())), EagleHead.from_pretrained, "model.safetensors"),
    "official eagle": (copied(DATA / "eagle3_llama/official"), EagleHead.from_pretrained, "pytorch_model.bin"),
    "specforge eagle": (exported(EagleHead.from_backbone, "specforge"), EagleHead.from_pretrained, "model.safetensors"),
    "hydra": (copied(GOLDENS / "hydra_mlp/official"), MTPHeads.from_official, "hydra_lm_head.pt"),
    "gloeckle": (copied(GOLDENS / "gloeckle/official"), MTPHeads.from_official, "consolidated.pth"),
    "medusa": (
        exported(lambda base: MTPHeads.from_backbone(base, head_type="medusa"), "medusa"),
        MTPHeads.from_official,
        "medusa_lm_head.safetensors",
    ),
    "modules": (saved(lambda: family_model("deepseek_v3")), DeepSeekMTP.from_pretrained, "model.safetensors"),
    "evabyte": (saved(lambda: tiny_model(num_pred_heads=4)), EvaByteForMTPC.from_pretrained, "model.safetensors"),
    "ptp": (
        saved(lambda: PTPForCausalLM.from_backbone(tiny_backbone(), num_slots=3)),
        PTPForCausalLM.from_pretrained,
        "model.safetensors",
    ),
    "student": (
        saved(lambda: PTPStudent.from_backbone(tiny_backbone(), num_slots=3)),
        PTPStudent.from_pretrained,
        "model.safetensors",
    ),
    "official ptp": (
        copied(DATA.parent / "ptp/runs/interpolation"),
        partial(PTPForCausalLM.from_official, backbone=DATA.parent / "ptp/runs/backbone"),
        "last.ckpt",
    ),
}


@pytest.mark.by_day(most=5)
@pytest.mark.parametrize("kind", DIRECTORIES)
def test_what_a_wrong_download_left_is_named(kind, tmp_path):
    write, read, file = DIRECTORIES[kind]
    write(folder := tmp_path / "read")
    assert (folder / file).is_file(), sorted(folder.iterdir())
    for content, named in LEFT.values():
        (folder / file).write_bytes(content)
        with pytest.raises(ValueError, match=f"{file} is .*{named}"):
            read(folder)


@pytest.mark.parametrize("kind", ["modules", "evabyte"])
def test_a_wrong_shard_or_index_is_named(kind, tmp_path):
    write, read, file = DIRECTORIES[kind]
    write(tmp_path)
    tensors = load_file(tmp_path / file)
    (tmp_path / file).unlink()
    names, index = sorted(tensors), tmp_path / "model.safetensors.index.json"
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for part, held in parts.items():
        save_file({name: tensors[name] for name in held}, tmp_path / part, {"format": "pt"})
    index.write_text(json.dumps({"metadata": {}, "weight_map": {name: part for part in parts for name in parts[part]}}))
    read(tmp_path)
    (tmp_path / "model-2.safetensors").write_bytes(LEFT["pointer"][0])
    with pytest.raises(ValueError, match="model-2.safetensors is .*Git LFS"):
        read(tmp_path)
    index.write_bytes(LEFT["page"][0])
    with pytest.raises(ValueError, match="index.json is .*HTML"):
        read(tmp_path)


def test_a_config_that_is_a_page_is_named(tmp_path):
    write, read, _ = DIRECTORIES["medusa"]
    write(tmp_path)
    (tmp_path / "config.json").write_bytes(LEFT["page"][0])
    with pytest.raises(ValueError, match="config.json is .*HTML"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is damaged"):
        read(tmp_path)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next", "deepseek_v3", "exaone_moe"])
@pytest.mark.parametrize("has_index", [True, False])
def test_modules_outside_the_index_are_found(has_index, kind, tmp_path):
    model = family_model(kind)
    model.save_pretrained(tmp_path)
    file, state = tmp_path / "model.safetensors", load_file(tmp_path / "model.safetensors")
    first = f"model.layers.{model.config.num_hidden_layers}." if kind == "deepseek_v3" else "mtp."
    rest = {name: tensor for name, tensor in state.items() if not name.startswith(first)}
    save_file({name: state[name] for name in state.keys() - rest.keys()}, tmp_path / "mtp.safetensors")
    save_file(rest, file, {"format": "pt"})
    if has_index:
        file.rename(tmp_path / "model-1.safetensors")
        index = {"metadata": {}, "weight_map": dict.fromkeys(rest, "model-1.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="mtp.safetensors holds") as refusal:
        DeepSeekMTP.from_pretrained(tmp_path)
    assert "from_backbone" not in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("qwen3_5_text", ["mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"]),
        ("qwen3_next", ["mtp.fc.weight", "mtp.pre_fc_norm_hidden.weight"]),
        ("exaone_moe", ["mtp.fc.weight", "mtp.norm.weight"]),
    ],
)
@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_half_a_module_is_named_as_in_the_file(is_elsewhere, kind, lost, tmp_path):
    family_model(kind).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    half = {name: state.pop(name) for name in lost}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    if is_elsewhere:
        save_file(half, tmp_path / "more.safetensors")
    with pytest.raises(ValueError) as refusal:
        DeepSeekMTP.from_pretrained(tmp_path)
    said = str(refusal.value)
    assert str(tmp_path) in said and all(name in said for name in lost) and "eh_proj" not in said
    assert ("more.safetensors" in said) == is_elsewhere


@pytest.mark.by_day(most=3)
@pytest.mark.parametrize("kind", ["heads", "eagle", "modules", "evabyte", "ptp", "student"])
@pytest.mark.parametrize("wrap", ["module.", "_orig_mod."])
def test_names_of_a_wrapped_model_are_said(wrap, kind, tmp_path):
    write, read, file = DIRECTORIES[kind]
    write(tmp_path)
    state = {wrap + name: tensor for name, tensor in load_file(tmp_path / file).items()}
    save_file(state, tmp_path / file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"{wrap[:-1]}.*wrapped model"):
        read(tmp_path)


def test_a_pickle_of_one_tensor_is_no_text(tmp_path):
    write, read, file = DIRECTORIES["official eagle"]
    write(folder := tmp_path / "read")
    torch.save(torch.zeros(3), folder / file)
    with pytest.raises(ValueError, match="holds a Tensor"):
        read(folder)
