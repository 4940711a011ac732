"""Directories of the public PTP code: what is read, as what, and what is refused."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tokenahead import PTPForCausalLM

DATA = Path(__file__).parents[2] / "data" / "ptp"


@pytest.fixture(params=["official_binary", "official_linear_interpolation"])
def folder(request, tmp_path):
    """A copy of a directory without its weights, and the weights."""
    source = DATA / request.param
    shutil.copy(source / "config.json", tmp_path)
    with np.load(source / "weights.npz") as arrays:
        return tmp_path, {name: torch.from_numpy(arrays[name]) for name in arrays.files}, source


@torch.no_grad()
def logits(model):
    return model(torch.arange(6)[None], uniforms=torch.tensor([[0.1, 0.5, 0.9]])).logits


@pytest.mark.parametrize("name", ["last.ckpt", "model.pt"])
def test_checkpoints_are_read_as_the_arrays_are(folder, name):
    path, weights, source = folder
    torch.save({"state_dict": weights, "epoch": 3} if name == "last.ckpt" else weights, path / name)
    assert torch.equal(logits(PTPForCausalLM.from_official(path)), logits(PTPForCausalLM.from_official(source)))


def test_what_was_read_is_saved_as_our_own(folder, tmp_path):
    _, _, source = folder
    model = PTPForCausalLM.from_official(source)
    model.save_pretrained(tmp_path / "ours")
    assert torch.equal(logits(PTPForCausalLM.from_pretrained(tmp_path / "ours").eval()), logits(model))


class Intruder:
    """Would write a file if it were unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickles_that_run_code_are_refused(folder):
    path, _, _ = folder
    with (path / "last.ckpt").open("wb") as file:
        pickle.dump({"state_dict": Intruder(path / "trace")}, file)
    with pytest.raises(ValueError, match=r"last\.ckpt.*tensors"):
        PTPForCausalLM.from_official(path)
    assert not (path / "trace").exists()


@pytest.mark.core_cases("official_binary")
def test_folders_that_cannot_be_read(folder):
    path, weights, _ = folder
    with pytest.raises(FileNotFoundError, match="no weights"):
        PTPForCausalLM.from_official(path)
    lacking = {name: tensor for name, tensor in weights.items() if "norm" not in name}
    torch.save(lacking, path / "model.pt")
    with pytest.raises(ValueError, match="missing tensors .*norm"):
        PTPForCausalLM.from_official(path)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"aux_embedding": "fourier"}))
    with pytest.raises(ValueError, match="aux_embedding=.*'fourier'"):
        PTPForCausalLM.from_official(path)
