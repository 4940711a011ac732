"""`tokenahead evaluate` and `benchmarks/analyze.py`: figures that agree with the model, files, and what is refused."""

import json
from base64 import b64encode
from types import SimpleNamespace

import pytest
import torch

from tests.benchmark_modules import analyze
from tests.internals import EvaluationArguments, decode, read_settings
from tests.internals import cli_module as cli
from tests.internals import commands_evaluate as evaluate
from tests.internals import commands_train as train
from tokenahead import EagleHead, EvaByteTokenizer, MTPHeads
from tokenahead.model_cards import MeasuredResults

from .conftest import byte_llama

SHORT = ("--rows", "100", "--use_cpu")


def run(command, *words) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, *map(str, words)])
    return ended.value.code or 0


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["evabyte", "modules", "ptp", "heads", "eagle"])
def test_every_drafter_is_measured(name, folders, data, tmp_path, capsys):
    out, words = tmp_path / "out", [folders / name]
    if name in ("heads", "eagle"):
        kind = {"heads": MTPHeads, "eagle": EagleHead}[name]
        words = [folders / "llama", "--drafter", name, "--drafter_name_or_path"]
        words.append(saved(kind.from_backbone(byte_llama()), tmp_path / "drafter"))
    words = [words[0], data["text"], *words[1:]]
    assert run("evaluate", *words, "--output_dir", out, *SHORT) == 0
    found = json.loads((out / "evaluation.json").read_text())
    if name != "ptp":
        assert [row["depth"] for row in found["depths"]] == list(range(2, len(found["depths"]) + 2))
        assert all(0 <= row["top_1"] <= row["top_5"] <= 1 for row in found["depths"])
        block, token = (found["held_out"][f"tokens_per_call_{rule}"] for rule in ("block", "token"))
        assert block == pytest.approx(1 + sum(found["held_out"]["accepted_by_position"])) and block >= token - 1e-9
        assert found["held_out"]["draft_length"] == len(found["depths"])
        assert (out / "evaluation.png").stat().st_size > 1000
    if name in ("evabyte", "modules", "heads"):
        losses = found["losses"]
        assert found["depths"][0]["loss"] == pytest.approx(losses["eval_loss_head_2"], rel=1e-4)
    assert "expected per call" in capsys.readouterr().out or name == "ptp"


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


def test_a_file_for_training_means_what_the_training_has_left(settings_of, tmp_path):
    settings_of(drafter="heads", drafter_options={"window": 3})
    heads = MTPHeads.from_backbone(byte_llama(), window=3)
    with torch.no_grad():
        heads.head.weight.add_(torch.randn_like(heads.head.weight)) if hasattr(heads.head, "weight") else None
    saved(heads, tmp_path / "run")
    words = [str(tmp_path / "config.yaml"), *SHORT]
    settings = evaluate.settings_of_drafter(read_settings(evaluate.named(words), "evaluate", EvaluationArguments))
    assert settings.drafter.drafter_name_or_path == str(tmp_path / "run") and settings.drafter.drafter_options is None


PEFT = dict(
    model="evabyte", use_peft=True, lora_target_modules=["q_proj", "v_proj"], lora_modules_to_save=["draft_heads"]
)
PARTS = {
    "peft": PEFT,
    "new head, lora": dict(model="evabyte", drafter_options={"head_type": "cp"}, strategy={"train": "lora"}),
    "new modules, lora": dict(drafter="modules", strategy={"train": "lora"}),
    "heads, lora": dict(drafter="heads", strategy={"train": "lora"}),
    "heads, all": dict(drafter="heads", strategy={"train": "all"}),
}

NEW = {
    "new head, lora": "evaluate them with its CONFIG.yaml",
    "new modules, lora": "set drafter: heads, eagle, modules",
}
"""Parts that were made for the training, which its YAML file alone knows, and what is said where it is not given."""


@pytest.mark.parametrize("name", PARTS)
def test_what_was_trained_is_what_is_measured(name, settings_of, folders, data, tmp_path, capsys):
    """Adapters and a backbone that learned with heads: the loss is that of the training's end, not of its beginning."""
    options = dict(PARTS[name], learning_rate=0.05, eval_strategy="steps", eval_steps=4, acceptance=False)
    log = train(settings_of(**options)).state.log_history
    wanted = next(entry for entry in log if "eval_loss" in entry)
    chosen = "eval_loss_head_2"
    assert run("evaluate", tmp_path / "config.yaml", *SHORT) == 0
    found = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert found["losses"][chosen] == pytest.approx(wanted[chosen], rel=1e-4)
    assert (found["adapters"] is None) == (name == "heads, all")
    assert run("evaluate", tmp_path / "run", data["text"], "--output_dir", tmp_path / "out", *SHORT) == (name in NEW)
    assert NEW.get(name, "Wrote evaluation.json") in capsys.readouterr().err


def test_a_training_that_did_not_end_is_not_measured(settings_of, tmp_path, capsys):
    settings_of(drafter="heads")
    (tmp_path / "run" / "checkpoint-2").mkdir(parents=True)
    assert run("evaluate", tmp_path / "config.yaml", *SHORT) == 1
    assert "run holds checkpoint-2 and no trained model: let the training come to its end" in capsys.readouterr().err


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
    expected = b64encode(decode(EvaByteTokenizer(), wanted.tolist())).decode()
    assert json.loads(capsys.readouterr().out)["base64"] == expected


def test_heads_that_do_not_name_their_backbone_are_refused(data, tmp_path, capsys):
    heads = MTPHeads.from_backbone(byte_llama())
    heads.config.base_model_name_or_path = None
    assert run("evaluate", saved(heads, tmp_path / "heads"), data["text"]) == 1
    assert "does not say for which model" in capsys.readouterr().err


def test_the_marginal_of_a_backbone_that_is_its_own_head(folders, data, settings_of, tmp_path):
    """New FF heads with the backbone's own distribution at every depth: known losses at depth 1, and one order of the
    others."""
    settings = settings_of("llama", "evaluate", drafter="heads", drafter_options={"window": 3})
    asked = SimpleNamespace(positions=3, depth=3, mass=1, max_branches=320)
    found = analyze(settings, asked)
    first, second, third = found["depths"]
    assert first["marginal"] == pytest.approx(first["backbone_given"], rel=1e-4)
    assert first["head"] == pytest.approx(first["backbone_given"], rel=1e-4)
    assert second["missing_mass"] < 1e-6 and second["head"] == pytest.approx(second["head_given"], rel=1e-4)
    assert len(found["layers"]) == 3 and found["spread"]["tokens_90"] <= found["spread"]["tokens_99"]
    assert (tmp_path / "run" / "analysis.png").stat().st_size > 1000
    assert settings.drafter.drafter == "heads"


@pytest.mark.parametrize(("name", "told"), [("ptp", "PTPForCausalLM"), ("evabyte", "depth=200")])
def test_drafters_without_distributions_and_rows_that_are_too_short_are_refused(name, told, settings_of):
    settings = settings_of(name, "evaluate", ("--use_cpu",))
    with pytest.raises(ValueError, match=told):
        analyze(settings, SimpleNamespace(positions=3, depth=200, mass=1, max_branches=1))
