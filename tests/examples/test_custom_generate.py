"""The directory in the Hub's convention, from a local folder."""

from pathlib import Path

import pytest
import torch

from tests.backbones import backbone, train_heads
from tests.modeling.test_stored_drafters import written

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "hub"


@pytest.mark.parametrize("kind", ["ngrams", "stored", "attached"])
def test_a_directory_drafts(kind, tmp_path):
    model, ids = backbone(), torch.tensor([[5, 6, 7, 5, 6]])
    call = dict(attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    plain, own = model.generate(ids, **call), {}
    if kind != "ngrams":
        heads = train_heads(model, steps=1)
        heads.save_pretrained(tmp_path)
        own = {"drafter": heads if kind == "attached" else str(tmp_path)}
        if kind == "stored":
            heads.detach()
    out = model.generate(ids, **call, **own, custom_generate=str(FOLDER), trust_remote_code=True)
    assert out.equal(plain)
    if kind == "attached":
        heads.detach()


def test_heads_that_run_layers_of_the_model(tmp_path):
    """They get the model to read its layers, and leave it as it was."""
    model, _ = written("mtpc heads on draft layers", tmp_path)
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    call = dict(attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    plain, own = model.generate(ids, **call), {"custom_generate": str(FOLDER), "trust_remote_code": True}
    assert model.generate(ids, **call, **own, drafter=str(tmp_path)).equal(plain)
    assert "generate" not in vars(model)
