"""`benchmarks/analyze.py`, and what is loaded to be measured: what a training has left."""

from types import SimpleNamespace

import pytest

from tests.benchmark_modules import analyze
from tests.test_cli import run
from tokenahead.model_cards import MeasuredResults


@pytest.mark.by_day("evabyte")
@pytest.mark.parametrize("name", ["evabyte", "modules", "ptp"])
def test_models_that_draft_for_themselves_are_measured_side_by_side(name, folders, tmp_path):
    (tmp_path / "prompts.txt").write_text("def f(x):\n")
    out, prompts = tmp_path / "out", ["--prompts", tmp_path / "prompts.txt", "--raw", "--new-tokens", "8"]
    options = ["--methods", "own", "ngram", "--decoding", "greedy", "T=1", "--output", out]
    assert run("bench", "--model", folders / name, *prompts, *options) == 0
    rows = {row.method: row for row in MeasuredResults.from_json(out / "results.json").results if not row.do_sample}
    own, lookup = rows["own"], rows["ngram"]
    assert own.identical and lookup.identical and own.draft_length
    if name != "ptp":
        assert own.expected_tokens_per_call == pytest.approx(own.tokens_per_verification, abs=1e-4)


@pytest.mark.core
def test_the_marginal_of_a_backbone_that_is_its_own_head(folders, data, settings_of, tmp_path):
    """New FF heads with the backbone's own distribution at every depth: known losses at depth 1, and one order of the
    others."""
    settings = settings_of("llama", drafter="heads", drafter_options={"window": 3})
    asked = SimpleNamespace(positions=3, depth=3, mass=1, max_branches=320)
    found = analyze(settings, asked)
    first, second, third = found["depths"]
    assert first["marginal"] == pytest.approx(first["backbone_given"], rel=1e-4)
    assert first["head"] == pytest.approx(first["backbone_given"], rel=1e-4)
    assert second["missing_mass"] < 1e-6 and second["head"] == pytest.approx(second["head_given"], rel=1e-4)
    assert len(found["layers"]) == 3 and found["spread"]["tokens_90"] <= found["spread"]["tokens_99"]
    assert settings.drafter.drafter == "heads"


@pytest.mark.core
@pytest.mark.parametrize(("name", "told"), [("ptp", "PTPForCausalLM"), ("evabyte", "depth=200")])
def test_drafters_without_distributions_and_rows_that_are_too_short_are_refused(name, told, settings_of):
    settings = settings_of(name)
    with pytest.raises(ValueError, match=told):
        analyze(settings, SimpleNamespace(positions=3, depth=200, mass=1, max_branches=1))
