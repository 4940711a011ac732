"""Directories of drafters in every layout: what they hold, what is read, and training that goes on from them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainingArguments

from tests import mtpc_files
from tests.eagle_models import tiny_backbone
from tokenahead import BlockDrafter, EagleHead, MTPHeads, PTPStudent
from tokenahead.model_cards.card import make_card
from tokenahead.modeling.common import loading
from tokenahead.modeling.common.loading import drafter_class, holds_drafter_alone, read_drafter
from tokenahead.training import MTPTrainer
from tokenahead.training.requests import CardRequest

IDS = torch.randint(2, 64, (4, 24), generator=torch.Generator().manual_seed(0))
OWN_UNEMBEDDING = {"head_type": "medusa", "unembedding": "own"}
CASES = {
    "tokenahead eagle": lambda base: EagleHead.from_backbone(base),
    "tokenahead heads": lambda base: MTPHeads.from_backbone(base),
    "tokenahead student": lambda base: PTPStudent.from_backbone(base, num_slots=3),
    "official eagle 1": lambda base: EagleHead.from_backbone(base, version=1),
    "official eagle": lambda base: EagleHead.from_backbone(base, draft_vocab_size=32),
    "specforge eagle": lambda base: EagleHead.from_backbone(base, draft_vocab_size=32),
    "vllm eagle": lambda base: EagleHead.from_backbone(base, draft_vocab_size=32, norm_before_residual=True),
    "sglang eagle": lambda base: EagleHead.from_backbone(base),
    "speculators eagle": lambda base: EagleHead.from_backbone(base, draft_vocab_size=32, qk_norm=True),
    "medusa heads": lambda base: MTPHeads.from_backbone(base, **OWN_UNEMBEDDING),
    "medusa heads without unembedding": lambda base: MTPHeads.from_backbone(base, head_type="medusa"),
    "vllm heads": lambda base: MTPHeads.from_backbone(base, **OWN_UNEMBEDDING),
    "hydra heads": lambda base: MTPHeads.from_backbone(base, head_type="hydra", unembedding="own"),
    "gloeckle heads": lambda base: MTPHeads.from_backbone(base, head_type="layer"),
    "z-lab block": lambda base: BlockDrafter.from_backbone(base, law="markov", layers=1, block_size=3),
    "speculators block": lambda base: BlockDrafter.from_backbone(base, layers=1, draft_ids=IDS[0].unique()),
    "deepspec block": lambda base: BlockDrafter.from_backbone(base, law="independent", layers=1),
    "mtpc heads": lambda base: MTPHeads.from_backbone(base),
    "mtpc heads on draft layers": lambda base: MTPHeads.from_backbone(base),
}


def written(name, folder):
    """A directory in a layout, and the backbone that its drafter was made for."""
    layout = name.split()[0]
    base = tiny_backbone(num_key_value_heads=4 if layout == "mtpc" else 2)
    drafter = CASES[name](base)
    if layout == "tokenahead":
        drafter.save_pretrained(folder, remote_code=None)
    elif layout == "mtpc":
        text, lora = base.config, int("layers" in name)
        sizes = dict(vocab=text.vocab_size, layers=text.num_hidden_layers, lora=lora)
        widths = dict(width=text.hidden_size, inner=text.intermediate_size)
        mtpc_files.write(folder, mtpc_files.published("hmm", **sizes, **widths), mtpc_files.settings("hmm", **sizes))
    else:
        drafter.export(folder, layout)
    return base, type(drafter.detach())


@pytest.mark.by_day(most=6)
@pytest.mark.parametrize("name", CASES)
def test_every_layout_is_named_and_read(name, tmp_path):
    base, kind = written(name, tmp_path)
    assert drafter_class(tmp_path) is kind and holds_drafter_alone(tmp_path)
    drafter = read_drafter(tmp_path, torch.float32, base)
    assert type(drafter) is kind and not drafter.is_attached
    drafter.attach(base)
    plain = base.generate(IDS[:1], max_new_tokens=12)
    assert torch.equal(base.generate(IDS[:1], max_new_tokens=12, assistant_model=drafter), plain)


@pytest.mark.by_day(most=3)
@pytest.mark.parametrize("name", [name for name in CASES if "student" not in name])
def test_training_goes_on_from_its_own_checkpoint(name, tmp_path):
    base, _ = written(name, tmp_path / "read")
    data, out = [{"input_ids": row, "labels": row} for row in IDS], tmp_path / "run"
    weights = []
    for resumed in ({}, {"resume_from_checkpoint": str(out / "checkpoint-1")}):
        drafter = read_drafter(tmp_path / "read", torch.float32, base).attach(base)
        options = TrainingArguments(out, max_steps=2, save_steps=1, report_to="none", use_cpu=True)
        MTPTrainer(drafter, options, train_dataset=data).train(**resumed)
        weights.append({key: tensor.clone() for key, tensor in drafter.state_dict().items()})
        drafter.detach()
    for key, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][key], tensor)


def test_heads_without_a_config_are_fetched_by_their_name(tmp_path, monkeypatch):
    written("mtpc heads", tmp_path)
    asked = []

    def download(name, allow_patterns, **hub):
        asked.append((name, "model@*.pt" in allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(loading, "snapshot_download", download)
    assert drafter_class("owner/heads") is MTPHeads and read_drafter("owner/heads").window == 4
    assert set(asked) == {("owner/heads", True)}


def test_draft_layers_know_their_backbone_by_its_name(tmp_path):
    """As a card needs it, without the model."""
    base, _ = written("mtpc heads on draft layers", tmp_path / "heads")
    with pytest.raises(ValueError, match="backbone"):
        read_drafter(tmp_path / "heads")
    base.config.save_pretrained(tmp_path / "base")
    config = (tmp_path / "heads" / "config.yaml").read_text()
    (tmp_path / "heads" / "config.yaml").write_text(config.replace("someone/model", str(tmp_path / "base")))
    heads, same = read_drafter(tmp_path / "heads"), read_drafter(tmp_path / "heads", backbone=base)
    assert heads.state_dict().keys() == same.state_dict().keys()
    assert "multi-token-prediction" in make_card(CardRequest(str(tmp_path / "heads"), output=tmp_path)).read_text()


@pytest.mark.parametrize("name", [name for name in CASES if "heads" in name and "tokenahead" not in name])
def test_the_loader_of_another_layout_is_named(name, tmp_path):
    written(name, tmp_path)
    with pytest.raises(ValueError, match="from_official"):
        MTPHeads.from_pretrained(tmp_path)


def test_a_model_alone_is_no_drafter(tmp_path):
    tiny_backbone().save_pretrained(tmp_path)
    assert drafter_class(tmp_path) is None and not holds_drafter_alone(tmp_path)
    with pytest.raises(ValueError, match="no drafter"):
        read_drafter(tmp_path)
    assert drafter_class(tmp_path / "nowhere") is None


@pytest.mark.by_day(each=1)
@pytest.mark.parametrize("prefix", ["medusa_head.", "module.medusa_head.", "_orig_mod.medusa_head."])
@pytest.mark.parametrize("form", ["one file", "shards", "pickle", "not in the index"])
def test_a_merged_medusa_model_that_does_not_count_its_heads(form, prefix, tmp_path):
    base, _ = written("medusa heads", tmp_path / "heads")
    heads = load_file(tmp_path / "heads" / "medusa_lm_head.safetensors")
    folder, wrap = tmp_path / "merged", prefix.removesuffix("medusa_head.")
    base.save_pretrained(folder)
    model = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    model, heads = ({wrap + name: tensor for name, tensor in part.items()} for part in
                    (model, {f"medusa_head.{name}": tensor for name, tensor in heads.items()}))  # fmt: skip
    if form == "pickle":
        torch.save(model | heads, folder / "pytorch_model.bin")
    elif form == "one file":
        save_file(model | heads, folder / "model.safetensors", {"format": "pt"})
    else:
        files = {"model-00001-of-00002.safetensors": model, "model-00002-of-00002.safetensors": heads}
        for file, tensors in files.items():
            save_file(tensors, folder / file, {"format": "pt"})
        listed = files if form == "shards" else [*files][:1]
        weight_map = {name: file for file in listed for name in files[file]}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    read = MTPHeads.from_official(folder)
    assert drafter_class(folder) is MTPHeads and not holds_drafter_alone(folder)
    expected = MTPHeads.from_official(tmp_path / "heads")
    assert all(torch.equal(tensor, expected.state_dict()[key]) for key, tensor in read.state_dict().items())


@pytest.mark.by_day(each=1)
@pytest.mark.parametrize("wrap", ["module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("name", [name for name in CASES if name.split()[0] not in ("tokenahead", "gloeckle", "mtpc")])
def test_names_of_wrapped_models_are_understood(name, wrap, tmp_path):
    written(name, tmp_path)
    expected = read_drafter(tmp_path).state_dict()
    for file in [*tmp_path.glob("*.safetensors"), *tmp_path.glob("*.pt")]:
        is_pickle = file.suffix == ".pt"
        tensors = torch.load(file, weights_only=True) if is_pickle else load_file(file)
        (torch.save if is_pickle else save_file)({wrap + key: tensor for key, tensor in tensors.items()}, file)
    read = read_drafter(tmp_path).state_dict()
    assert read.keys() == expected.keys() and all(torch.equal(read[key], expected[key]) for key in read)
