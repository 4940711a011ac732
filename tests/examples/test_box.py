"""`examples/box`: a tiny box is trained, goes on after a kill, is released, and is measured again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from tests.boxes import CONFIG, HELD_OUT, ROOT, TRAIN, card, release, text, train
from tokenahead import EvaByteForMTPC
from tokenahead.model_cards import MeasuredResults
from tokenahead.training.box import BoxDamagedError, box_directory, check_box, load_box
from tokenahead.training.demo import Measurement

RECIPE = train.Recipe(
    config=CONFIG,
    phases=[(4, 32, 1), (2, 64, 1)],
    heads={"ff": {"context": 1}, "btree": {"rank": 2}},
    head_steps=2,
    save_steps=3,
)
FEW = Measurement(seconds=0.1, new_tokens=12, batch_size=2)


def packages(*_: object, only_held_out: bool = False) -> Iterator[text.Package]:
    """Stand for the packages of this machine."""
    yield HELD_OUT
    if not only_held_out:
        yield TRAIN


@pytest.fixture(autouse=True)
def two_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "collect", packages)
    monkeypatch.setattr(release, "collect", packages)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "collect", packages)
        train.train(folder, RECIPE)
    return folder


class Kill(TrainerCallback):
    """Stands for SIGKILL at a step."""

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step == 4:
            raise KeyboardInterrupt


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return EvaByteForMTPC.from_pretrained(folder).state_dict()


@pytest.mark.nightly
def test_a_killed_training_goes_on_as_if_nothing_had_been(run: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, heads={})
    with pytest.raises(KeyboardInterrupt):
        train.train(tmp_path, recipe, callbacks=[Kill()])
    (tmp_path / "checkpoints" / "backbone" / "checkpoint-5").mkdir()  # which was being written
    train.train(tmp_path, recipe)
    whole, resumed = weights(run / "backbone"), weights(tmp_path / "backbone")
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())
    before = (tmp_path / "backbone" / "model.safetensors").stat().st_mtime_ns
    train.train(tmp_path, recipe)  # nothing is left to do
    assert (tmp_path / "backbone" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.nightly
def test_heads_learn_alone(run: Path) -> None:
    backbone = weights(run / "backbone")
    for kind in ("ff", "btree"):
        learned = weights(run / kind)
        assert all(torch.equal(weight, learned[name]) for name, weight in backbone.items() if name.startswith("model."))
        assert torch.equal(learned["lm_head.weight"], backbone["lm_head.weight"])
    assert not torch.equal(weights(run / "ff")["draft_heads.weight"], backbone["draft_heads.weight"])
    lines = [json.loads(line) for line in (run / "backbone" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "held_out" in line] == [3, 6]
    assert lines[-1]["step"] == 6 and lines[-1]["bytes"] == 4 * 33 * 31 + 2 * 16 * 63


def test_matrices_of_the_layers_go_to_muon() -> None:
    model = train.new_model(RECIPE)
    muon, adam = train.backbone_optimizer(model, RECIPE).parts
    shares = [{id(p) for group in part.param_groups for p in group["params"]} for part in (muon, adam)]
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[i].split(".")[3] for i in shares[0]} == {"self_attn", "mlp"}
    assert shares[0] | shares[1] == set(names) and not shares[0] & shares[1]


@pytest.fixture(scope="module")
def box(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("released") / "box"
    folder.mkdir()
    (folder / "stale.txt").write_text("of an older box")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(release, "collect", packages)
        release.release(run, folder, {"btree": 4}, FEW)
    return folder


def test_a_released_box_is_whole_and_loads(box: Path, run: Path) -> None:
    check_box(box)
    assert "stale.txt" not in {path.name for path in box.iterdir()} and [box] == list(box.parent.iterdir())
    loaded, tokenizer = load_box("btree", box)
    assert loaded.generation_config.num_assistant_tokens == 4
    trained = weights(run / "btree")
    for name, weight in loaded.state_dict().items():
        if name != "draft_heads.weight":  # those are the FF heads'
            assert torch.equal(weight, trained[name].bfloat16().float()), name
    told = (box / "README.md").read_text()
    for words in (
        "frontier.png",
        "| held out | requests | 1 |",
        "btree 2",
        "Recipe: `{",
        "tokenahead demo --seconds 0.1 --new-tokens 12 --seed 0 --batch-size 2",
    ):
        assert words in told, words
    assert str(ROOT) not in told and str(box.parent) not in told
    assert "Apache License" in (box / "LICENSES.txt").read_text()


@pytest.mark.nightly
def test_a_box_is_measured_again_with_the_same_weights(box: Path, tmp_path: Path) -> None:
    twin = shutil.copytree(box, tmp_path / "box")
    release.measure_again(twin, {}, replace(FEW, seconds=0.2), {})
    check_box(twin)
    for name in ("model.safetensors", "btree.safetensors", "held_out.json", "training.jsonl"):
        assert (twin / name).read_bytes() == (box / name).read_bytes()
    old, new = (MeasuredResults.from_json(folder / "results.json").extra for folder in (box, twin))
    assert new[release.BEFORE] == old[release.BEFORE] and "--seconds 0.2" in (twin / "README.md").read_text()
    release.measure_again(twin, {"btree": 3}, FEW, {})
    chosen = {kind: load_box(kind, twin)[0].generation_config.num_assistant_tokens for kind in ("ff", "btree")}
    assert chosen == {"ff": release.DRAFTED, "btree": 3}
    (twin / "model.safetensors").write_bytes(b"")
    with pytest.raises(BoxDamagedError, match=r"model\.safetensors"):
        release.measure_again(twin, {}, FEW, {})
    assert [path.name for path in tmp_path.iterdir()] == ["box"]


def test_heads_of_a_box_are_replaced_and_measured(box: Path, tmp_path: Path) -> None:
    twin, other = shutil.copytree(box, tmp_path / "box"), load_box("btree", box)[0]
    with torch.no_grad():
        other.mtp_head.sum_bias.add_(1)
    other.save_pretrained(tmp_path / "head", remote_code=None)
    (tmp_path / "head" / "log.jsonl").write_text('{"stage": "head-btree, again", "step": 7}\n')
    release.measure_again(twin, {}, FEW, {"btree": str(tmp_path / "head")})
    check_box(twin)
    assert (twin / "model.safetensors").read_bytes() == (box / "model.safetensors").read_bytes()
    assert torch.equal(load_box("btree", twin)[0].mtp_head.sum_bias, other.mtp_head.sum_bias.bfloat16().float())
    card = (twin / "README.md").read_text()
    assert "Head alone: btree, again: 7 steps." in card and card.count("Head alone: btree") == 1
    with torch.no_grad():
        other.model.norm.weight.add_(1)
    other.save_pretrained(tmp_path / "head", remote_code=None)
    with pytest.raises(ValueError, match=r"norm\.weight"):
        release.measure_again(twin, {}, FEW, {"btree": str(tmp_path / "head")})


def test_a_box_survives_an_interruption_while_it_is_replaced(
    box: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights may be the only copy there is."""
    twin, rename = shutil.copytree(box, tmp_path / "box"), Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if self.suffix == ".part" and target == twin.resolve():
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(release, "_measure", lambda *arguments: None)
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        release.measure_again(twin, {}, FEW, {})
    check_box(twin)
    assert [path.name for path in tmp_path.iterdir()] == ["box"]


def test_what_must_not_be_released(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = json.loads((run / "text" / "manifest.json").read_text())
    with pytest.raises(ValueError, match="requests"):
        release.check_split(manifest | {"train": manifest["held_out"]})
    monkeypatch.setattr(release, "collect", lambda *_, **__: iter([replace(HELD_OUT, version="2")]))
    with pytest.raises(ValueError, match="requests"):
        release.release(run, tmp_path / "box", {}, FEW)
    assert not list(tmp_path.iterdir())  # nothing half-written is left


def test_the_text_of_a_machine_is_split_by_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = []
    for name in ("requests", "other", "python"):
        path = tmp_path / f"{name}.py"
        path.write_text("".join(f"def {name}_function_{i}(value):\n    return {i}\n" for i in range(50)))
        found.append((name, "1", "MIT", [path, path]))  # the second resembles the first
    monkeypatch.setattr(text, "installed", lambda refused: iter(found))
    dropped: dict[str, int] = {}
    assert [package.name for package in text.collect({}, dropped)] == ["requests", "other", "python"]
    assert dropped == {"resembles another file": 3}
    assert [package.name for package in text.collect({}, {}, only_held_out=True)] == ["requests"]


def test_packed_rows_hold_the_text() -> None:
    rows = text.pack(TRAIN.files)
    joined = (np.concatenate(rows) - 64).astype(np.uint8).tobytes()
    assert any(joined[:2000] in file for file in TRAIN.files)
    cut = text.windows(rows, 256)
    assert cut.shape == (len(rows) * (text.ROW // 255), 256) and bool((cut[:, 0] == 1).all())


def test_licences() -> None:
    names = "MIT", "Apache-2.0 OR BSD-2-Clause", "MPL-2.0 AND MIT", "LIMITED", ""
    assert [text.is_permissive(name) for name in names] == [True, True, False, False, False]


def test_excerpts_take_packages_in_turn() -> None:
    a, b = (text.Package(name, "1", "MIT", [bytes([65 + i]) * 2000 for i in range(3)]) for name in "ab")
    found = release.cut_excerpts([a, replace(b, files=[b.files[0], b"short"])], 3)
    assert [one.package for one in found] == ["a", "b", "a"] and all(isinstance(one, release.Excerpt) for one in found)
    with pytest.raises(ValueError, match="held-out"):
        release.cut_excerpts([replace(a, files=[b"short"])], 3)


def test_the_first_screen_is_filled_between_its_comments(box: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("without")
    with pytest.raises(ValueError, match="README"):
        card.fill_readme(readme, box)
    readme.write_text("before\n<!-- figures of the box: by hand -->\nold\n<!-- end of the figures -->\nafter\n")
    card.fill_readme(readme, box)
    card.fill_readme(readme, box)
    assert card.block_of(readme.read_text()) == card.first_screen(MeasuredResults.from_json(box / "results.json"))
    assert readme.read_text().startswith("before\n") and readme.read_text().endswith("\nafter\n")


def test_the_documentation_shows_the_results_of_the_released_box() -> None:
    shown = card.block_of((ROOT / "docs" / "box.md").read_text(encoding="utf-8"))
    assert shown == card.first_screen(MeasuredResults.from_json(box_directory() / "results.json"))


def test_the_card_of_the_released_box_can_be_written_again(tmp_path: Path) -> None:
    twin = shutil.copytree(box_directory(), tmp_path / "box")
    card.write_box_card(twin)
    results = [line for line in (twin / "README.md").read_text().splitlines() if line.startswith("| ff |")]
    assert results and all(line in (box_directory() / "README.md").read_text() for line in results)
