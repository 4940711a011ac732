"""What engines read: names, fields and copies; refusals; the folder still loads here and in plain transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.families import family_config, family_model, random_ids
from tokenahead import DeepSeekMTP
from tokenahead.model_cards import export as module
from tokenahead.model_cards.export import export

GOLDEN = Path(__file__).parents[1] / "data" / "deepseek_mtp" / "glm4moe_d1"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_golden_has_the_official_index(engine, tmp_path):
    model = DeepSeekMTP.from_pretrained(GOLDEN)
    model.shared_copies = False  # as if it had been read from a folder without copies
    report = export(model, tmp_path / "out", engine)
    official = set(json.loads((GOLDEN / "model.safetensors.index.json").read_text())["weight_map"])
    assert set(load_file(report.folder / "model.safetensors")) == official
    assert report.num_tensors == len(official) and report.warnings == [] and str(report.folder) in report.command
    assert model.shared_copies is False
    config, before = (json.loads((path / "config.json").read_text()) for path in (report.folder, GOLDEN))
    for name in ("rope_theta", "rope_scaling", "torch_dtype", "num_hidden_layers", "num_nextn_predict_layers"):
        assert config[name] == before[name]
    ids = random_ids()
    again, plain = DeepSeekMTP.from_pretrained(report.folder), AutoModelForCausalLM.from_pretrained(report.folder)
    out = model(ids)
    assert torch.equal(again(ids).mtp_logits[0], out.mtp_logits[0]) and torch.equal(plain(ids).logits, out.logits)


@pytest.mark.parametrize("name", module.ENGINES["vllm"])
def test_every_family_that_is_served(name, tmp_path):
    model, ids = family_model(name), random_ids()
    report = export(model, tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists() and '"num_speculative_tokens": 1' in report.command
    assert torch.equal(DeepSeekMTP.from_pretrained(tmp_path)(ids).mtp_logits[0], model(ids).mtp_logits[0])


def test_yarn_has_the_older_fields_too(tmp_path):
    rope = dict(rope_type="yarn", rope_theta=5000.0, factor=4.0, original_max_position_embeddings=32)
    model = DeepSeekMTP(family_config("deepseek_v3", rope_parameters=rope)).eval()
    export(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_theta"] == 5000.0 and config["rope_scaling"]["factor"] == 4.0
    assert config["rope_scaling"]["type"] == "yarn" and config["topk_method"] == "noaux_tc"
    ids = random_ids()
    assert torch.equal(DeepSeekMTP.from_pretrained(tmp_path)(ids).logits, model(ids).logits)


def test_more_modules_than_an_engine_runs(tmp_path):
    model = family_model("deepseek_v3", num_nextn_predict_layers=2)
    assert "module 0 only" in export(model, tmp_path).warnings[0]
    with pytest.raises(ValueError, match="exactly one module"):
        export(model, tmp_path, "sglang")


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="engine='tgi' is unknown"):
        export(family_model("deepseek_v3"), tmp_path, "tgi")
    with pytest.raises(ValueError, match="vllm has no code for modules of 'llama'"):
        export(family_model("llama"), tmp_path)
    with pytest.raises(ValueError, match="loaded without its modules"):
        export(family_model("deepseek_v3", num_nextn_predict_layers=0), tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_folder_that_lacks_something_is_noticed(tmp_path, monkeypatch):
    def forgetful(folder):
        return [name for name in load_file(Path(folder) / "model.safetensors") if "shared_head.head" not in name]

    monkeypatch.setattr(module, "tensor_dtypes", forgetful)
    with pytest.raises(RuntimeError, match=r"lacks model\.layers\.2\.shared_head\.head\.weight"):
        export(family_model("deepseek_v3"), tmp_path)
