"""From a run to a box: what lies in it, what its figures and card say, and what is refused; and the demo on it."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from tests.internals import (
    DRAFTED,
    EXCERPT,
    FIGURES,
    HELD_OUT,
    Box,
    BoxDamagedError,
    BoxMeasurement,
    BoxRun,
    Plan,
    Source,
    box_folder,
    box_text,
    check_box,
    cut_excerpts,
    excerpt_windows,
    load_box,
    load_excerpts,
    pack,
    read_reports,
    show_box,
)
from tests.internals import box_first_screen as screen
from tests.internals import box_release as release
from tests.training.box.test_box import text

ROOT = Path(__file__).resolve().parents[3]
SOURCE = Source("requests", "1", "Apache-2.0", 1, 2)
FEW = {"new_bytes": 20, "most_prompts": 2}


def held_out() -> list[tuple[Source, list[bytes]]]:
    """One package; no bytes of `text()`."""
    body = "".join(f"def held_{i}(text: str) -> str:\n    return text * {i}\n\n\n" for i in range(300))
    return [(SOURCE, [body[:6000].encode(), body[6000:12000].encode()])]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a tiny plan."""
    folder = tmp_path_factory.mktemp("run")
    sizes = {"hidden_size": 32, "layers": 1, "attention_heads": 2, "intermediate_size": 48}
    kinds = {"ranks": {"ff": 1, "btree": 2}, "head_rows": 4}
    plan = Plan(hours=1e-3, phases=((1.0, 64, 1),), compile_step=False, **sizes, **kinds)
    pack(text(), folder / "text" / "train")
    pack({"requests": held_out()[0][1] * 40}, folder / "text" / "held_out")
    entries = {"train": [source("one"), source("two")], "held_out": [source("requests") | vars(SOURCE)]}
    (folder / "text" / "manifest.json").write_text(json.dumps(entries | {"refused": {}, "dropped": {}}))
    BoxRun(folder, plan).run()
    return folder


def source(name: str) -> dict[str, object]:
    return {"package": name, "version": "1", "licence": "MIT", "files": 1, "size": 2}


@pytest.fixture(scope="module")
def box(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The box of that run."""
    folder = tmp_path_factory.mktemp("released") / "box"
    folder.mkdir()
    (folder / "stale.txt").write_text("of an older box")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(release, "held_out_files", held_out)
        patch.setattr(release, "BoxMeasurement", lambda **options: BoxMeasurement(**options | FEW))
        release.release_box(run, folder, seconds=0.1, drafts={"btree": 4})
    return folder


def test_a_box_holds_all_that_its_card_names_and_nothing_else(box: Path) -> None:
    check_box(box)
    names = {path.name for path in box.iterdir()}
    weights = {"model.safetensors", "btree.safetensors", "config.json", "generation_config.json"}
    assert weights | {"held_out.json", "LICENSES.txt", "training.jsonl", "manifest.json", FIGURES} <= names
    assert "stale.txt" not in names and [path.name for path in box.parent.iterdir()] == ["box"]
    card = (box / "README.md").read_text()
    for shown in (
        "speed.png",
        "acceptance.png",
        "| held out | requests | 1 |",
        "tokenahead demo --seconds 0.1",
        "btree 2",
    ):
        assert shown in card, shown
    assert str(ROOT) not in card and str(box.parent) not in card
    assert "Apache License" in (box / "LICENSES.txt").read_text()


def test_figures_come_with_their_circumstances(box: Path) -> None:
    reports = read_reports(box / FIGURES)
    assert [report.name for report in reports] == ["ff", "btree 2"]
    for report in reports:
        names = [row.name for row in report.measured.results]
        assert names[:3] == ["greedy", "sampled, T=0.7", "sampled, T=1"] and names[3] == "greedy, batch 8"
        assert all(len(row.expected_by_position) == 15 for row in report.single)
        assert all(row.identical is True for row in report.measured.results if not row.do_sample)
        assert {"torch", "transformers", "python", "processor", "threads"} <= set(report.measured.environment)
        assert report.measured.bits_per_byte > 0
    assert [report.measured.extra["Drafted bytes"] for report in reports] == [DRAFTED, 4]


def test_expected_bits_are_those_of_the_excerpts(box: Path) -> None:
    loaded = Box.load(box)
    ids = excerpt_windows(loaded.excerpts)
    assert ids.shape == (2, 1 + EXCERPT) and bytes((ids[0, 1:] - 64).tolist()).decode() == loaded.excerpts[0].text
    with torch.no_grad():
        logits = loaded.models["ff"](ids).logits[:, :-1].double().log_softmax(-1)
    bits = -logits.gather(-1, ids[:, 1:, None]).mean() / torch.log(torch.tensor(2.0))
    assert read_reports(box / FIGURES)[0].measured.bits_per_byte == pytest.approx(float(bits), rel=1e-4)


def test_the_demo_shows_texts_figures_and_pictures(box: Path, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    reports = show_box(BoxMeasurement(seconds=0.1, **FEW), tmp_path / "out", box, console=console)
    shown = " ".join(console.file.getvalue().split())
    for words in ("drafted and accepted", "greedy, head", "sampled, T=1, head", "bits per byte", "The same again"):
        assert words in shown, words
    assert read_reports(tmp_path / "out" / "figures.json") == reports
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "acceptance.png", "demo.json", "figures.json", "speed.png",
    }  # fmt: skip
    show_box(BoxMeasurement(seconds=0.1, **FEW), tmp_path / "out", box, console=console)  # one's own may be replaced


def test_the_demo_names_a_damaged_file_before_it_measures(box: Path, tmp_path: Path) -> None:
    weights = box / "btree.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    try:
        with pytest.raises(BoxDamagedError, match="btree.safetensors does not have the checksum"):
            show_box(BoxMeasurement(), tmp_path / "out", box)
    finally:
        weights.write_bytes(before)
    assert not (tmp_path / "out").exists()


def test_a_box_is_measured_again_with_the_same_weights(
    box: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "BoxMeasurement", lambda **options: BoxMeasurement(**options | FEW))
    twin = shutil.copytree(box, tmp_path / "box")
    release.measure_again(twin, seconds=0.2)
    check_box(twin)
    assert [path.name for path in tmp_path.iterdir()] == ["box"]
    assert {path.name for path in twin.iterdir()} == {path.name for path in box.iterdir()}
    for name in ("model.safetensors", "btree.safetensors", "held_out.json", "training.jsonl"):
        assert (twin / name).read_bytes() == (box / name).read_bytes()
    old, new = (json.loads((folder / FIGURES).read_text()) for folder in (box, twin))
    assert new["before_rounding"] == old["before_rounding"]
    assert (
        "--seconds 0.2" in (twin / "README.md").read_text() and "--seconds 0.1" not in (twin / "README.md").read_text()
    )
    release.measure_again(twin, seconds=0.2, drafts={"btree": 3})
    chosen = {kind: load_box(kind, twin)[0].generation_config.num_assistant_tokens for kind in ("ff", "btree")}
    assert chosen == {"ff": DRAFTED, "btree": 3}
    for name in ("model.safetensors", "btree.safetensors"):
        old, new = load_file(box / name), load_file(twin / name)
        assert old.keys() == new.keys() and all(torch.equal(old[key], new[key]) for key in old)
    (twin / "model.safetensors").write_bytes(b"")
    with pytest.raises(BoxDamagedError, match="model.safetensors"):
        release.measure_again(twin, seconds=0.1)
    assert [path.name for path in tmp_path.iterdir()] == ["box"]


@pytest.mark.parametrize("when", ["before the new one", "behind the old one"])
def test_a_box_survives_an_interruption_while_it_is_replaced(
    box: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Its weights may be the only copy there is."""
    twin = shutil.copytree(box, tmp_path / "box")
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if self.suffix == ".part" and target == twin.resolve():
            if when == "behind the old one":
                raise KeyboardInterrupt
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(release, "_measure", lambda *arguments: None)
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises((KeyboardInterrupt, OSError)):
        release.measure_again(twin, seconds=0.1)
    check_box(twin)
    assert [path.name for path in tmp_path.iterdir()] == ["box"]
    with pytest.raises(BoxDamagedError, match="there is no model in the box"):
        release.measure_again(tmp_path / "none" / "box", seconds=0.1)
    assert [path.name for path in tmp_path.iterdir()] == ["box"]


def test_a_package_on_both_sides_is_refused(run: Path, tmp_path: Path) -> None:
    manifest = json.loads((run / "text" / "manifest.json").read_text())
    release.check_split(manifest)
    manifest["train"].append(source("requests"))
    with pytest.raises(ValueError, match="requests is learned from and held out"):
        release.check_split(manifest)


def test_other_versions_than_the_run_held_out_are_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = [(replace(SOURCE, version="2"), held_out()[0][1])]
    monkeypatch.setattr(release, "held_out_files", lambda: other)
    with pytest.raises(ValueError, match="requests: not installed as the run held it out"):
        release.release_box(run, tmp_path / "box", seconds=0.1)
    assert not list(tmp_path.iterdir())  # nothing half-written is left


def test_text_is_split_by_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def packages(manifest: object) -> list[tuple[str, str, str, list[Path]]]:
        found = []
        for name in (*HELD_OUT[:2], "other", "python"):
            path = tmp_path / f"{name}.py"
            path.write_text("".join(f"def {name}_function_{i}(value):\n    return {i}\n" for i in range(50)))
            found.append((name, "1", "MIT", [path]))
        return found

    monkeypatch.setattr(box_text, "_packages", packages)
    train, kept, manifest = box_text.collect()
    assert set(train) == {"other", "python"} and set(kept) == set(HELD_OUT[:2])
    again = list(box_text.held_out_files())
    assert [entry for entry, _ in again] == manifest.held_out
    assert {entry.package: files for entry, files in again} == kept


def test_excerpts_take_packages_in_turn() -> None:
    files = [bytes([65 + i]) * 2000 for i in range(3)]
    found = cut_excerpts([(("a", "1", "MIT"), files), (("b", "1", "MIT"), files[:1] + [b"short"])], 3)
    assert [one.package for one in found] == ["a", "b", "a"] and all(len(one.text) == EXCERPT for one in found)
    with pytest.raises(ValueError, match="no held-out file has 1023 bytes"):
        cut_excerpts([(("a", "1", "MIT"), [b"short"])], 3)


def test_the_first_screen_is_filled_between_its_comments(box: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("without")
    with pytest.raises(ValueError, match="the README lacks the comments"):
        screen.fill_readme(readme, box)
    readme.write_text(f"before\n{screen._BEGIN}\nold\n{screen._END}\nafter\n")
    screen.fill_readme(readme, box)
    screen.fill_readme(readme, box)
    figures = screen.block_of(readme.read_text())
    assert figures == screen.first_screen(read_reports(box / FIGURES))
    assert readme.read_text().startswith("before\n") and readme.read_text().endswith("\nafter\n")
    assert (
        "| greedy |" in figures
        and "| sampled, T=1, batch 8 |" in figures
        and "tokenahead demo --seconds 0.1" in figures
    )


@pytest.mark.skipif(not box_folder().exists(), reason="this checkout has no box; examples/measure_box.py makes one")
class TestTheBox:
    """What holds of the box that is released."""

    def test_it_is_whole_small_and_split(self) -> None:
        check_box(box_folder())
        assert sum(path.stat().st_size for path in box_folder().rglob("*") if path.is_file()) < 60e6
        release.check_split(json.loads((box_folder() / "manifest.json").read_text()))
        assert {excerpt.package for excerpt in load_excerpts(box_folder() / "held_out.json")} <= set(HELD_OUT)

    def test_the_readme_shows_its_figures(self) -> None:
        reports = read_reports(box_folder() / FIGURES)
        shown = screen.block_of((ROOT / "docs" / "box.md").read_text(encoding="utf-8"))
        assert shown == screen.first_screen(reports)
