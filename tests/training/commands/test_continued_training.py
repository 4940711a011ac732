"""Heads whose backbone learned with them: a further training begins with that backbone, or says why it does not."""

import json
import shutil

import pytest
import torch

from tests.benchmark_modules import drafter_and_data
from tokenahead import MTPHeads
from tokenahead.training.commands.train import train

IDS = torch.arange(70, 90)[None]
STILL = {"learning_rate": 0.0, "max_steps": 1}


def backbone_of(trainer):
    return trainer.accelerator.unwrap_model(trainer.model).backbone.eval()


@pytest.fixture(params=["all", "lora"])
def first(request, settings_of, tmp_path):
    """What learned, the directory of that run, and what its backbone says."""
    trainer = train(settings_of(drafter="heads", strategy={"train": request.param}, learning_rate=0.05))
    return request.param, tmp_path / "run", backbone_of(trainer)(IDS).logits.detach()


@pytest.mark.by_day("lora-where it began")
@pytest.mark.parametrize("named", ["where it began", "nothing", "where it ended"])
def test_a_training_goes_on_with_the_backbone_that_learned(named, first, folders, settings_of, tmp_path):
    learns, run, wanted = first
    names = {"where it began": folders / "llama", "nothing": None, "where it ended": run / "backbone"}
    name = names[named] and str(names[named])
    options = dict(drafter=f"heads:{run}", strategy={"train": learns}, model_name_or_path=name)
    second = train(settings_of(**options, **STILL, output_dir=str(tmp_path / "second")))
    torch.testing.assert_close(backbone_of(second)(IDS).logits, wanted)
    third = train(
        settings_of(**options | {"drafter": f"heads:{tmp_path / 'second'}"}, output_dir=str(tmp_path / "third"))
        if named != "where it ended"
        else settings_of(**options, output_dir=str(tmp_path / "third"))
    )
    assert not torch.allclose(backbone_of(third)(IDS).logits, wanted), "it learns on"
    facts = json.loads((tmp_path / "third" / "run.json").read_text())["model"]
    assert facts["model_name_or_path"].endswith("backbone" if learns == "all" else "llama")
    assert (facts["adapters"] is None) == (learns == "all")


def test_another_backbone_than_that_which_learned(folders, settings_of, tmp_path):
    run = tmp_path / "run"
    train(settings_of(drafter="heads", strategy={"train": "all"}, max_steps=1))
    other = shutil.copytree(folders / "llama", tmp_path / "other")
    settings = settings_of(
        drafter=f"heads:{run}", strategy={"train": "all"}, model_name_or_path=str(other),
        output_dir=str(tmp_path / "second"), **STILL,
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"{other}: the backbone of {run} learned with these heads"):
        train(settings)


@pytest.mark.by_day("all")
def test_heads_alone_go_on_with_a_backbone_that_learned(first, settings_of, tmp_path, capsys):
    learns, run, wanted = first
    settings = settings_of(
        drafter=f"heads:{run}", output_dir=str(tmp_path / "second"), eval_strategy="steps",
        eval_steps=4, acceptance=False,
    )  # fmt: skip
    if learns == "lora":  # what is saved would be heads without the adapters that they learned with
        with pytest.raises(ValueError, match=f"{run / 'backbone'}: set strategy: {{train: lora}}, or merge"):
            train(settings)
        return
    trainer = train(settings)
    assert torch.equal(backbone_of(trainer)(IDS).logits, wanted)
    assert MTPHeads.from_pretrained(tmp_path / "second").config.base_model_name_or_path == str(run / "backbone")
    wanted = next(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    options = {"drafter": f"heads:{tmp_path / 'second'}", "model_name_or_path": str(run / "backbone")}
    *_, measuring = drafter_and_data(settings_of(**options))
    assert measuring.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.core
def test_adapters_are_no_backbone(settings_of, tmp_path):
    train(settings_of(drafter="heads", strategy={"train": "lora"}, max_steps=1))
    adapters = tmp_path / "run" / "backbone"
    with pytest.raises(ValueError, match=f"model_name_or_path={adapters} holds adapters of peft: merge them"):
        train(settings_of(drafter="eagle", model_name_or_path=str(adapters), output_dir=str(tmp_path / "second")))
