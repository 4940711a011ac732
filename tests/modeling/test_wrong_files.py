"""What a wrong download leaves in the place of weights is named by every loader."""

import shutil
from functools import partial

import pytest

from tests.eagle_models import DATA, tiny_backbone
from tests.families import family_model
from tests.modeling.heads.backbones import GOLDENS
from tests.models import tiny_model
from tokenahead import DeepSeekMTP, EagleHead, EvaByteForMTPC, MTPHeads, PTPForCausalLM, PTPStudent

LEFT = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n",
    b"<!DOCTYPE html>\n<html><head>",
    b"",
)


def saved(make):
    return lambda folder: make().save_pretrained(folder)


def exported(head, layout):
    def write(folder):
        base = tiny_backbone()
        head(base).export(folder, layout)

    return write


def copied(source):
    return lambda folder: shutil.copytree(source, folder)


DIRECTORIES = {
    "heads": (saved(lambda: MTPHeads.from_backbone(tiny_backbone())), MTPHeads.from_pretrained, "model.safetensors"),
    "eagle": (saved(lambda: EagleHead.from_backbone(tiny_backbone())), EagleHead.from_pretrained, "model.safetensors"),
    "official eagle": (copied(DATA / "eagle3_llama/official"), EagleHead.from_pretrained, "pytorch_model.bin"),
    "specforge eagle": (exported(EagleHead.from_backbone, "specforge"), EagleHead.from_pretrained, "model.safetensors"),
    "hydra": (copied(GOLDENS / "hydra_mlp/official"), MTPHeads.from_official, "hydra_lm_head.pt"),
    "gloeckle": (copied(GOLDENS / "gloeckle/official"), MTPHeads.from_official, "consolidated.pth"),
    "medusa": (
        exported(lambda base: MTPHeads.from_backbone(base, head_type="medusa"), "medusa"),
        MTPHeads.from_official,
        "medusa_lm_head.safetensors",
    ),
    "modules": (saved(lambda: family_model("deepseek_v3")), DeepSeekMTP.from_pretrained, "model.safetensors"),
    "evabyte": (saved(lambda: tiny_model(num_pred_heads=4)), EvaByteForMTPC.from_pretrained, "model.safetensors"),
    "ptp": (
        saved(lambda: PTPForCausalLM.from_backbone(tiny_backbone(), num_slots=3)),
        PTPForCausalLM.from_pretrained,
        "model.safetensors",
    ),
    "student": (
        saved(lambda: PTPStudent.from_backbone(tiny_backbone(), num_slots=3)),
        PTPStudent.from_pretrained,
        "model.safetensors",
    ),
    "official ptp": (
        copied(DATA.parent / "ptp/runs/interpolation"),
        partial(PTPForCausalLM.from_official, backbone=DATA.parent / "ptp/runs/backbone"),
        "last.ckpt",
    ),
}


@pytest.mark.by_day("heads", "hydra", "medusa", "evabyte")
@pytest.mark.parametrize("kind", DIRECTORIES)
def test_what_a_wrong_download_left_is_named(kind, tmp_path):
    write, read, file = DIRECTORIES[kind]
    write(folder := tmp_path / "read")
    assert (folder / file).is_file(), sorted(folder.iterdir())
    for content in LEFT:
        (folder / file).write_bytes(content)
        with pytest.raises(ValueError, match=str(folder)):
            read(folder)
