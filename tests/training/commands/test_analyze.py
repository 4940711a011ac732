"""`benchmarks/analyze.py`, and what is loaded to be measured: what a training has left."""

import json
from types import SimpleNamespace

import pytest
import torch

from tests.benchmark_modules import analyze, drafter_and_data
from tokenahead import EvaByteTokenizer, cli
from tokenahead.model_cards import MeasuredResults
from tokenahead.training.commands.train import train


def run(command, *words) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, *map(str, words)])
    return ended.value.code or 0


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


@pytest.mark.nightly
@pytest.mark.parametrize("learns", ["lora", "all"])
def test_what_was_trained_is_what_is_measured(learns, settings_of, folders, tmp_path):
    """Adapters and a backbone that learned with heads: the loss is that of the training's end, not of its beginning."""
    options = dict(drafter="heads", strategy={"train": learns}, eval_strategy="steps", eval_steps=4, acceptance=False)
    log = train(settings_of(**options, learning_rate=0.05)).state.log_history
    wanted = next(entry for entry in log if "eval_loss" in entry)
    settings = settings_of(drafter=f"heads:{tmp_path / 'run'}")
    settings, _, trainer = drafter_and_data(settings)
    assert trainer.evaluate()["eval_loss_head_2"] == pytest.approx(wanted["eval_loss_head_2"], rel=1e-4)
    assert (settings.adapters is None) == (learns == "all")


@pytest.mark.nightly
@pytest.mark.parametrize("learns", ["lora", "all"])
def test_heads_complete_with_the_backbone_that_they_learned_with(learns, settings_of, folders, tmp_path, capsys):
    trainer = train(settings_of(drafter="heads", strategy={"train": learns}, learning_rate=0.3))
    backbone = trainer.accelerator.unwrap_model(trainer.model).backbone.eval()
    ids = torch.tensor([EvaByteTokenizer()("import os")["input_ids"]])
    wanted = backbone.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    words = ["--heads", tmp_path / "run", "--max-new-tokens", "8", "--json", "import os"]
    capsys.readouterr()  # the entries of the log
    code = run("generate", "--model", folders / "llama", *words)
    if learns == "all":
        whole = tmp_path / "run" / "backbone"
        assert code == 1 and f"learned with these heads; name {whole} instead" in capsys.readouterr().err
        assert run("generate", "--model", whole, *words) == 0
    expected = EvaByteTokenizer().decode(wanted, skip_special_tokens=True)
    assert json.loads(capsys.readouterr().out)["text"] == expected


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
