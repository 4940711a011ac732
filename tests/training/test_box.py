"""The model in the box: what is loaded, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.boxes import HELD_OUT, release, untrained_box
from tokenahead.training.box import (
    EXCERPT,
    Box,
    BoxDamagedError,
    box_directory,
    check_box,
    excerpt_prompts,
    excerpt_windows,
    load_box,
    load_excerpts,
)


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained_box(tmp_path_factory.mktemp("box"))


def test_a_box_gives_back_its_heads(box: Path) -> None:
    loaded = Box.load(box)
    models, tokenizer = loaded.models, loaded.tokenizer
    model, other = models["btree"], models["ff"]
    assert list(models) == ["ff", "btree"] and torch.equal(model.lm_head.weight, other.lm_head.weight)
    assert model.config.mtp_head.head_type == "btree" and model.window == 16
    inputs = tokenizer("def main(", return_tensors="pt")
    drafted = model.generate(**inputs, max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
    assert max(map(len, drafted.speculation.drafts)) == 3  # as the release chose
    chosen = [load_box(kind, box)[0].generation_config.num_assistant_tokens for kind in ("ff", "btree")]
    assert chosen == [release.DRAFTED, 3]
    assert torch.equal(drafted.sequences, model.generate(**inputs, max_new_tokens=12, do_sample=False, use_mtp=False))


def test_a_damaged_box_is_refused(box: Path, tmp_path: Path) -> None:
    for damage in ("changed", "missing", "unsealed"):
        copy = shutil.copytree(box, tmp_path / damage)
        victim = copy / ("SHA256SUMS" if damage == "unsealed" else "btree.safetensors")
        if damage == "changed":
            content = bytearray(victim.read_bytes())
            content[-1] ^= 1
            victim.write_bytes(content)
        else:
            victim.unlink()
        with pytest.raises(BoxDamagedError, match=victim.name):
            load_box("ff", copy)


def test_excerpts_are_windows_and_prompts(box: Path) -> None:
    excerpts = load_excerpts(box / "held_out.json")
    ids = excerpt_windows(excerpts)
    assert ids.shape == (2, 1 + EXCERPT) and bytes((ids[0, 1:] - 64).tolist()).decode() == excerpts[0].text
    assert all(any(prompt.encode() in file for file in HELD_OUT.files) for prompt in excerpt_prompts(excerpts, 3))


def test_the_released_box_is_whole_small_and_split() -> None:
    check_box(box_directory())
    assert sum(path.stat().st_size for path in box_directory().rglob("*") if path.is_file()) < 60e6
    manifest = json.loads((box_directory() / "manifest.json").read_text())
    release.check_split(manifest)
    held_out = {source["package"] for source in manifest["held_out"]}
    assert {excerpt.package for excerpt in load_excerpts(box_directory() / "held_out.json")} <= held_out
