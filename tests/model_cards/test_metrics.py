"""Metrics of `model_cards/metrics`: `evaluate` loads them offline, and they count as the bench does."""

import pytest
import torch

from tests.benchmark_modules import ROOT
from tests.every_model import llama
from tokenahead import NgramDrafter

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


def test_statistics_of_a_call_are_what_they_take(load):
    model = llama(vocab_size=320)
    drafter = NgramDrafter().attach(model)
    ids = torch.randint(64, 320, (1, 12), generator=torch.Generator().manual_seed(1)).repeat(1, 2)
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    out = model.generate(ids, assistant_model=drafter, **options)
    new, accepted = out.sequences[0, ids.shape[1] :].tolist(), out.speculation.rows_accepted[0]
    found = load("tokens_per_call").compute(predictions=[new], references=[accepted])
    assert found["left_out"] == 1 or found["tokens_per_call"] == pytest.approx((len(new) - 1) / len(accepted))
