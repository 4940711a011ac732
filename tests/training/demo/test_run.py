"""The demo from end to end on a box of untrained weights."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.boxes import untrained_box
from tests.internals import (
    MARK,
    Box,
    BoxDamagedError,
    BoxMeasurement,
    check_output,
    run_demo,
)
from tokenahead.model_cards import MeasuredResults

FEW = {"seconds": 0.1, "new_bytes": 20, "most_prompts": 2}


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained_box(tmp_path_factory.mktemp("box"))


def test_the_demo_shows_outputs_results_and_figures(box: Path, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    threads = torch.get_num_threads()
    measured = run_demo(BoxMeasurement(batch_size=2, **FEW), tmp_path / "out", box, console=console)
    shown = " ".join(console.file.getvalue().split())
    for words in ("drafted and accepted", "greedy, head", "sampled, T=1, head", "batch 2", "--batch-size 2"):
        assert words in shown, words
    assert torch.get_num_threads() == threads
    assert MeasuredResults.from_json(tmp_path / "out" / "results.json") == measured
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"bench.png", "demo.json", "results.json", "frontier.png"}
    check_output(tmp_path / "out", overwrite=False)  # one's own may be replaced


def test_results_come_with_their_circumstances(box: Path) -> None:
    loaded = Box.load(box)
    measured, bench = BoxMeasurement(**FEW).measure(loaded)
    names = ["plain", "ff", "btree 2"]
    assert [method.name for method in bench.methods] == names
    modes = "greedy", "sampled, T=0.7", "sampled, T=1"
    assert [(row.method, row.decoding) for row in measured.results] == [
        (name, mode) for mode in modes for name in names
    ]
    assert {row.method: row.draft_length for row in measured.results} == {"plain": None, "ff": 5, "btree 2": 3}
    for row in (row for row in measured.results if row.method != "plain"):
        assert len(row.expected_by_position) == row.draft_length
        if row.decoding == "greedy":
            assert row.identical is True
            assert row.expected_tokens_per_call == pytest.approx(row.tokens_per_verification, abs=1e-4)
    assert {"torch", "transformers", "python", "processor", "threads"} <= set(measured.environment)


def test_a_damaged_file_is_named_before_anything_is_measured(box: Path, tmp_path: Path) -> None:
    weights = box / "btree.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    try:
        with pytest.raises(BoxDamagedError, match=r"btree\.safetensors"):
            run_demo(BoxMeasurement(), tmp_path / "out", box)
    finally:
        weights.write_bytes(before)
    assert not (tmp_path / "out").exists()


def test_someone_elses_directory_is_refused_unless_told_otherwise(tmp_path: Path) -> None:
    check_output(tmp_path / "new" / "deep", overwrite=False)
    check_output(tmp_path / "new" / "deep", overwrite=False)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="--overwrite"):
        check_output(tmp_path, overwrite=False)
    check_output(tmp_path, overwrite=True)
    (tmp_path / MARK).write_text("{}")
    check_output(tmp_path, overwrite=False)
    with pytest.raises(FileExistsError, match=r"notes\.txt"):
        check_output(tmp_path / "notes.txt", overwrite=True)
