"""Training goes on from a drafter in a published layout, in a run and in one that is resumed."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from tokenahead.generation.drafter import DRAFTERS
from tokenahead.training.commands.train import train

OPTIONS = {
    "eagle": {"aux_layers": [1, 2, 3]},
    "heads": {"head_type": "medusa", "unembedding": "own"},
    "block": {"law": "independent", "layers": 1, "block_size": 4},
}


def exported(folders, folder, drafter, layout):
    base = AutoModelForCausalLM.from_pretrained(folders / "llama")
    DRAFTERS[drafter].from_backbone(base, **OPTIONS[drafter]).export(folder, layout)
    return f"{'eagle' if drafter == 'eagle' else 'auto'}:{folder}"


@pytest.mark.nightly
@pytest.mark.parametrize(("drafter", "layout"), [("eagle", "speculators"), ("heads", "medusa"), ("block", "deepspec")])
def test_a_run_begins_with_it_and_is_resumed(drafter, layout, folders, settings_of, tmp_path):
    source = exported(folders, tmp_path / "published", drafter, layout)
    options = dict(drafter=source, max_steps=2, save_strategy="steps", save_steps=1)
    whole = train(settings_of(**options)).model.state_dict()
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    resumed = train(settings_of(**options, resume_from_checkpoint="true"))
    assert resumed.state.global_step == 2
    for name, tensor in resumed.model.state_dict().items():
        torch.testing.assert_close(tensor, whole[name])


def test_layers_can_be_passed_and_nothing_else(folders, settings_of, tmp_path):
    source = exported(folders, tmp_path / "published", "eagle", "official")
    options = dict(drafter=source, max_steps=1)
    trainer = train(settings_of(**options, drafter_options={"aux_layers": [1, 2, 4]}))
    assert trainer.model.config.aux_layers == [1, 2, 4]
    with pytest.raises(ValueError, match="drafter_options: version"):
        train(settings_of(**options, drafter_options={"version": 1}, output_dir=str(tmp_path / "second")))


def test_a_kind_or_a_source_that_is_none(folders, settings_of, tmp_path):
    for name in ("egale:x", "modules:x", "eagle:", "egale"):
        with pytest.raises(ValueError, match=f"drafter='{name}'"):
            settings_of(drafter=name)
    with pytest.raises(ValueError, match="drafter .* holds .*MTPHeads"):
        train(settings_of(drafter=exported(folders, tmp_path / "heads", "heads", "medusa").replace("auto", "eagle")))
