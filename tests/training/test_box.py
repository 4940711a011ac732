"""The model in the box: what is loaded, and what is refused."""

import json
import shutil

import pytest
import torch

from tests.boxes import HELD_OUT, release, untrained_box
from tokenahead.training.box import BoxDamagedError, box_directory, check_box, heads_in, load_box


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    return untrained_box(tmp_path_factory.mktemp("box"))


def test_a_box_gives_back_its_heads(box):
    assert heads_in(box) == ["ff", "btree"]
    (other, _), (model, tokenizer) = (load_box(head, box) for head in heads_in(box))
    assert torch.equal(model.lm_head.weight, other.lm_head.weight)
    assert model.config.mtp_head.head_type == "btree" and model.window == 16
    inputs = tokenizer("def main(", return_tensors="pt")
    drafted = model.generate(**inputs, max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
    assert max(map(len, drafted.speculation.drafts)) == 3  # as the release chose
    assert [each.generation_config.num_assistant_tokens for each in (other, model)] == [release.DRAFTED, 3]
    assert torch.equal(drafted.sequences, model.generate(**inputs, max_new_tokens=12, do_sample=False, use_mtp=False))


@pytest.mark.parametrize("damage", ["changed", "missing", "unsealed"])
def test_a_damaged_box_is_refused(box, tmp_path, damage):
    copy = shutil.copytree(box, tmp_path / damage)
    victim = copy / ("SHA256SUMS" if damage == "unsealed" else "btree.safetensors")
    content = victim.read_bytes()
    victim.unlink()
    if damage == "changed":
        victim.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(BoxDamagedError, match=victim.name):
        load_box("ff", copy)


def test_excerpts_are_windows(box):
    excerpts = release.load_excerpts(box)
    ids = release.excerpt_windows(excerpts)
    assert ids.shape == (2, 1 + release.EXCERPT) and bytes((ids[0, 1:] - 64).tolist()).decode() == excerpts[0].text
    assert ids[:, 0].tolist() == [1, 1] and any(excerpts[0].text.encode() in file for file in HELD_OUT.files)


def test_the_released_box_is_whole_small_and_split():
    check_box(box_directory())
    assert sum(path.stat().st_size for path in box_directory().rglob("*") if path.is_file()) < 60e6
    manifest = json.loads((box_directory() / "manifest.json").read_text())
    release.check_split(manifest)
    held_out = {source["package"] for source in manifest["held_out"]}
    assert {excerpt.package for excerpt in release.load_excerpts(box_directory())} <= held_out
