"""`benchmarks/gpu.py` on a tiny shape, and acceptance by plan."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.benchmark_modules import gpu, planned
from tokenahead import EagleHead

NEW = 24


@pytest.mark.nightly
def test_a_smoke_run_writes_every_row(tmp_path, capsys):
    gpu.main(["--smoke", "--drafts", "none", "n-grams", "EAGLE-3", "HMM", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == 2 * 3 * 4 and not any(row["error"] for row in rows)
    rates = {(row["batch"], row["calls"][-1]["tokens_per_call"]) for row in rows if row["drafts"] in ("EAGLE-3", "HMM")}
    assert len(rates) == 2, "the plan is that of the batch, whoever drafts"
    assert "ms per token" in capsys.readouterr().out


def test_heads_of_evabyte_are_timed(tmp_path, capsys):
    words = ["--smoke", "--evabyte", "--json", str(tmp_path / "cells.json")]
    gpu.main(words)
    cells = json.loads((tmp_path / "cells.json").read_text())["rows"]
    recorded = [cell for cell in cells if cell["mode"] == "recorded"]
    assert all(cell["cycle"] > 0 == cell["draft"] for cell in recorded)
    cells = [cell for cell in cells if cell["mode"] == "eager"]
    kinds = [cell["kind"] for cell in cells[::2]]
    assert kinds == ["ff", "cp", "hmm", "btree", "ff", "ff", "hmm", "hmm"]
    assert [cell["context"] for cell in cells[::2]] == [0] * 4 + [1, 3] * 2
    assert all(0 < cell["draft"] + cell["verify"] < cell["cycle"] for cell in cells)
    assert "verification" in capsys.readouterr().out


def test_rows_without_time_are_left_out(capsys):
    gpu.main(["--smoke", "--drafts", "none", "--seconds", "0"])
    assert capsys.readouterr().out.count("left out") == 6


def test_a_row_that_fails_leaves_the_others(monkeypatch, tmp_path):
    def fails(model):
        raise ValueError("no head")

    monkeypatch.setitem(gpu.DRAFTERS, "HMM", fails)
    with pytest.raises(SystemExit):
        gpu.main(["--smoke", "--drafts", "none", "HMM", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [bool(row["error"]) for row in rows] == [False] * 3 + [True] * 3 + [False] * 3 + [True] * 3


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"do_sample": True, "top_k": 0}])
@pytest.mark.parametrize("batch", [1, 3])
def test_planned_acceptance_is_what_the_statistics_say(batch, options):
    torch.manual_seed(0)
    shape = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2)
    model = LlamaForCausalLM(LlamaConfig(**shape, eos_token_id=None, pad_token_id=0)).eval()
    head = EagleHead.from_backbone(model, version=1)
    plan, clock = planned.plan_of(0.7, NEW, batch), planned.Clock(model.device)
    ids = torch.randint(1, 64, (batch, 8))
    with planned.planned(head, plan, clock) as made:
        common = dict(attention_mask=torch.ones_like(ids), max_new_tokens=NEW, return_dict_in_generate=True)
        out = model.generate(ids, assistant_model=head, num_assistant_tokens=3, **common, **options)
    stats = out.speculation
    assert len(clock.milliseconds()) == stats.backbone_calls - 1
    for accepted, wanted in zip(stats.rows_accepted, plan.clamp(max=3).T.tolist()):
        assert accepted[:-2] == wanted[: len(accepted) - 2]  # the length limit cuts the last ones
    verifications = sum(map(len, stats.rows_accepted))
    assert made[-1].tokens_per_call(NEW) == pytest.approx(batch * (NEW - 1) / verifications)
    assert "make_verifier" not in vars(head)
