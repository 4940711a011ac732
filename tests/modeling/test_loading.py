"""What cannot be loaded is refused, with the file and the tensor by name."""

import json
import shutil
from itertools import product

import pytest
from safetensors.torch import load_file, save_file

import tokenahead
from tests.every_model import every_model, llama, moved_heads
from tests.models import TRAINED
from tokenahead import BlockDrafter, EagleHead, EvaByteForMTPC, EvaByteModel, MTPHeads, PTPForCausalLM


@pytest.fixture
def folder(tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TRAINED / name, tmp_path / name)
    return tmp_path


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_tensors(folder):
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.adaptive_phi"))
    with pytest.raises(ValueError, match="1.*EvaByteForMTPC.*model.layers.1.self_attn.adaptive_phi"):
        EvaByteForMTPC.from_pretrained(folder)


@pytest.mark.by_day(most=4)
@pytest.mark.parametrize("model_class", [EvaByteForMTPC, EvaByteModel, MTPHeads, PTPForCausalLM])
@pytest.mark.parametrize("options", [{}, {"mtp_head": {"window": 2}}, {"features": "scalar"}])
def test_another_architecture(model_class, options, tmp_path):
    llama().save_pretrained(tmp_path)
    wanted = f"model_type='llama', but {model_class.__name__} reads model_type="
    with pytest.raises(ValueError, match=wanted) as caught:
        model_class.from_pretrained(tmp_path, **options)
    assert str(tmp_path) in str(caught.value)


DRAFTER_CLASSES = [MTPHeads, EagleHead, BlockDrafter]


OTHERS = [pair for pair in product(DRAFTER_CLASSES, [*DRAFTER_CLASSES, PTPForCausalLM]) if pair[0] is not pair[1]]


@pytest.mark.parametrize(("drafter_class", "wanted"), OTHERS)
def test_the_folder_of_another_drafter(drafter_class, wanted, tmp_path):
    drafter_class.from_backbone(llama()).save_pretrained(tmp_path)
    name = drafter_class.__name__
    with pytest.raises(ValueError, match=f"load it with {name}.from_pretrained"):
        wanted.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["evabyte_ff", "ptp_one_hot", "heads"])
def test_folders_name_the_library_that_reads_them(name, tmp_path):
    model = moved_heads(llama()) if name == "heads" else every_model(name)
    model.save_pretrained(tmp_path / "first")
    type(model).from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    for folder in ("first", "second"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config["library_name"] == "tokenahead" and config["library_version"] == tokenahead.__version__
        assert config["architectures"] == [type(model).__name__]
