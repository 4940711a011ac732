"""Training goes on from a drafter in a published layout, in a run and in one that is resumed."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from tokenahead import EagleHead, MTPHeads
from tokenahead.training.commands.train import train


def exported(folders, folder, drafter, layout):
    base = AutoModelForCausalLM.from_pretrained(folders / "llama")
    options = {"aux_layers": [1, 2, 3]} if drafter == "eagle" else {"head_type": "medusa", "unembedding": "own"}
    {"eagle": EagleHead, "heads": MTPHeads}[drafter].from_backbone(base, **options).export(folder, layout)
    return str(folder)


@pytest.mark.parametrize(("drafter", "layout"), [("eagle", "official"), ("eagle", "speculators"), ("heads", "medusa")])
def test_a_run_begins_with_it_and_is_resumed(drafter, layout, folders, settings_of, tmp_path):
    source = exported(folders, tmp_path / "published", drafter, layout)
    options = dict(drafter=drafter, drafter_name_or_path=source, max_steps=2, save_strategy="steps", save_steps=1)
    whole = train(settings_of(**options)).model.state_dict()
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    resumed = train(settings_of(**options, resume_from_checkpoint="true"))
    assert resumed.state.global_step == 2
    for name, tensor in resumed.model.state_dict().items():
        torch.testing.assert_close(tensor, whole[name])


def test_layers_can_be_passed_and_nothing_else(folders, settings_of, tmp_path):
    source = exported(folders, tmp_path / "published", "eagle", "official")
    options = dict(drafter="eagle", drafter_name_or_path=source, max_steps=1)
    trainer = train(settings_of(**options, drafter_options={"aux_layers": [1, 2, 4]}))
    assert trainer.model.config.aux_layers == [1, 2, 4]
    with pytest.raises(ValueError, match="drafter_options .* leave one"):
        train(settings_of(**options, drafter_options={"version": 1}, output_dir=str(tmp_path / "second")))
