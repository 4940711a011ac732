"""Checkpoints of goldens with other fields and tensors."""

import json
import shutil
from functools import reduce

import pytest
import torch
from safetensors.torch import load_file

from tests.modeling.block.test_golden import DATA


@pytest.fixture
def edited(tmp_path):
    """Copies a golden's drafter, with other fields by dotted paths, and without those whose value is `...`."""

    def edit(name, fields=None, tensors=None):
        folder = tmp_path / name
        shutil.copytree(DATA / name, folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        for path, value in (fields or {}).items():
            *levels, last = path.split(".")
            inner = reduce(lambda part, level: part.setdefault(level, {}), levels, config)
            inner.pop(last, None) if value is ... else inner.update({last: value})
        (folder / "config.json").write_text(json.dumps(config))
        if tensors is not None:
            state = load_file(folder / "model.safetensors")
            torch.save(tensors(state), folder / "pytorch_model.bin")
            (folder / "model.safetensors").unlink()
        return folder

    return edit
