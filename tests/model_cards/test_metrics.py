"""Metrics of `model_cards/metrics`: `evaluate` loads them offline, and they count as the bench does."""

import pytest

from tests.benchmark_modules import ROOT

evaluate = pytest.importorskip("evaluate")


@pytest.fixture
def load(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return lambda name: evaluate.load(str(ROOT / "model_cards" / "metrics" / name), cache_dir=str(tmp_path))


def test_tokens_per_call_leave_out_loops(load):
    metric, text = load("tokens_per_call"), list(range(41))
    found = metric.compute(predictions=[text, text, [7] * 41], references=[[3] * 10, [1] * 20, [3] * 10])
    assert found["tokens_per_call"] == pytest.approx(80 / 30) and found["left_out"] == pytest.approx(1 / 3)
    assert found["standard_error"] > 0
    alone = metric.compute(predictions=[[7] * 41], references=[[3] * 10])
    assert alone["tokens_per_call"] is None and alone["left_out"] == 1


def test_acceptance_ends_with_the_first_wrong_draft(load):
    metric = load("acceptance")
    found = metric.compute(predictions=[[5, 6, 7], [8, 9], [1, 2, 3]], references=[[5, 6, 1], [2, 9], [1, 2, 3, 4]])
    assert found["accepted"] == pytest.approx(5 / 3)
    assert found["by_position"] == pytest.approx([2 / 3, 2 / 3, 1 / 3])
