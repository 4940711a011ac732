"""What engines read: names, fields and copies; refusals; the directory still loads here and in plain transformers."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.families import family_config, family_model, random_ids
from tests.towers import TOWERS, tower_model
from tokenahead import DeepSeekMTP, NgramDrafter, PTPStudent
from tokenahead.configuration.mtp_families import family_of, num_layers
from tokenahead.generation.tensors.tensor_files import tensor_dtypes
from tokenahead.model_cards import export as module
from tokenahead.model_cards.export import export

GOLDEN = Path(__file__).parents[1] / "data" / "deepseek_mtp" / "glm4moe_d1"


PARTS = ("enorm", "hnorm", "eh_proj", "shared_head.norm")


def problems(folder: Path, model: DeepSeekMTP) -> list[str]:
    """Return what differs from an official directory, in words."""
    names = set(tensor_dtypes(folder))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    main, layers, count = model.main, num_layers(model.config), model.num_modules
    family = family_of(model.config)
    wanted = {
        "model_type": model.config.model_type,
        "architectures": [type(main).__name__],
        family.count: count,
    }
    if family.layers in config:  # Nemotron-H has a list of layers instead
        wanted[family.layers] = layers
    found = [f"{name} is {config.get(name)!r}" for name, value in wanted.items() if config.get(name) != value]
    found += [f"{name} is fused" for name in names if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    for k in range(count):
        lacking = sorted(module_names(names, model, k) - names)
        found += [f"lacks {name}" for name in lacking]
    modules = tuple(prefix for k in range(count) for prefix in family.prefixes(layers, k))
    known = set().union(*(module_names(names, model, k) for k in range(count)))
    if is_like_last(model):
        found += [f"{name} is unknown" for name in sorted(names - known) if name.startswith(modules)]
    return found


def is_like_last(model: DeepSeekMTP) -> bool:
    """Return whether a module's block has the tensors of the main model's last layer."""
    family = family_of(model.config)
    return family.body == "layer" and family.has_twin and not family.block


def module_names(names: set[str], model: DeepSeekMTP, k: int) -> set[str]:
    """Return the tensors of module k by official pattern: its parts, its copies, and what the last layer has."""
    family, layers = family_of(model.config), num_layers(model.config)
    ours = f"model.layers.{layers + k}."
    parts = PARTS if family.norm_before_head else PARTS[:3]
    expected = {f"{ours}{part}.weight" for part in parts}
    expected |= {ours + name for name in family.copies}
    if is_like_last(model):
        last = f"model.layers.{layers - 1}."
        expected |= {ours + name.removeprefix(last) for name in names if name.startswith(last)}
    return {family.file_name(name, layers, model.num_modules) for name in expected}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_golden_has_the_official_index(engine, tmp_path):
    model = DeepSeekMTP.from_pretrained(GOLDEN)
    model.shared_copies = False  # as if it had been read from a directory without copies
    report = export(model, tmp_path / "it's out", engine)
    served = 2 if engine == "vllm" else 4
    assert shlex.split(report.command)[served] == str(tmp_path / "it's out")
    official = set(json.loads((GOLDEN / "model.safetensors.index.json").read_text())["weight_map"])
    assert set(load_file(report.folder / "model.safetensors")) == official
    assert report.num_tensors == len(official)
    assert model.shared_copies is False
    config, before = (json.loads((path / "config.json").read_text()) for path in (report.folder, GOLDEN))
    for name in ("rope_theta", "rope_scaling", "torch_dtype", "num_hidden_layers", "num_nextn_predict_layers"):
        assert config[name] == before[name]
    ids = random_ids()
    again, plain = DeepSeekMTP.from_pretrained(report.folder), AutoModelForCausalLM.from_pretrained(report.folder)
    out = model(ids)
    assert torch.equal(again(ids).mtp_logits[0], out.mtp_logits[0]) and torch.equal(plain(ids).logits, out.logits)


@pytest.mark.core_cases("bailing_hybrid")
@pytest.mark.by_day("bailing_hybrid", "deepseek_v3", "hy_v3", "longcat_flash", "mimo", "qwen3_next")
@pytest.mark.parametrize("name", [name for name in module.ENGINES["vllm"] if name not in TOWERS])
def test_every_family_that_is_served(name, tmp_path):
    model, ids = family_model(name), random_ids()
    report = export(model, tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists() and '"num_speculative_tokens": 1' in report.command
    if name not in ("longcat_flash", "mimo"):  # whose directories are for engines alone
        assert problems(tmp_path, model) == []
        found = DeepSeekMTP.from_pretrained(tmp_path)(ids).mtp_logits[0]
        torch.testing.assert_close(found, model(ids).mtp_logits[0], atol=1e-5, rtol=0)
    assert ("were run in vLLM 0.32.0" in report.checked) == (name in module.MEASURED)


@pytest.mark.parametrize("name", ["exaone4_5", "glm_ocr", "qwen3_5", "qwen3_5_moe"])
def test_a_model_with_a_tower_is_one_directory(name, tmp_path):
    model = tower_model(name)
    report = export(model, tmp_path)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), tensor_dtypes(tmp_path)
    family = family_of(model.config)
    text = config if family.counts_outside else config["text_config"]
    assert text[family.count] == model.num_modules and config["architectures"] == [type(model.main).__name__]
    prefixes = family.prefixes(num_layers(model.config), 0)
    assert any(key.startswith(tuple(prefixes)) for key in tensors) and any("visual" in key for key in tensors)
    assert str(tmp_path) in report.command
    assert DeepSeekMTP.from_pretrained(tmp_path).num_modules == model.num_modules


FIELDS = {
    "hy_v3": {"first_k_dense_replace": 1, "qk_norm": True, "expert_hidden_dim": 16, "route_norm": True},
    "longcat_flash": {"mla_scale_q_lora": True, "zero_expert_type": "identity", "n_routed_experts": 4},
    "mimo": {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"]},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0, 1], "swa_num_key_value_heads": 2,
        "sliding_window_size": 5, "swa_rope_theta": 10_000.0, "rope_theta": 5_000_000.0,
    },
    "exaone_moe": {},
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_a_family_has_the_fields_that_vllm_reads(name, tmp_path):
    model = family_model(name)
    export(model, tmp_path)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), tensor_dtypes(tmp_path)
    wanted = FIELDS[name] or {"mtp_layer_types": model.mtp.kinds}
    assert {field: config[field] for field in wanted} == wanted
    assert not [key for key in tensors if ".experts.4." in key and name == "longcat_flash"]
    assert ("model.mtp_layers.0.input_proj.weight" in tensors) == (name == "mimo")


@pytest.mark.parametrize("name", ["deepseek_v3", "hy_v3"])
def test_copies_may_be_left_out(name, tmp_path):
    model, ids = family_model(name), random_ids()
    with_copies, without = export(model, tmp_path / "a"), export(model, tmp_path / "b", copies=False)
    assert with_copies.num_tensors - without.num_tensors == 2 and model.shared_copies
    assert torch.equal(DeepSeekMTP.from_pretrained(without.folder)(ids).mtp_logits[0], model(ids).mtp_logits[0])


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_retrofit_is_a_backbone_and_a_module_of_hy3(name, tmp_path):
    model = family_model(name)
    report = export(model, tmp_path)
    assert any("sampled" in warning and "CPU" in warning for warning in report.warnings)
    backbone = AutoModelForCausalLM.from_pretrained(tmp_path / "backbone")
    ids = random_ids()
    assert torch.equal(backbone(ids).logits, model.main(ids).logits) and model.config.num_nextn_predict_layers == 1
    assert "num_nextn_predict_layers" not in json.loads((tmp_path / "backbone" / "config.json").read_text())
    stored, own = load_file(tmp_path / "draft" / "model.safetensors"), model.mtp[0].state_dict()
    assert len(stored) == len(own) and all(key.startswith("model.layers.2.") for key in stored)
    assert torch.equal(stored["model.layers.2.final_layernorm.weight"], own["norm.weight"])
    assert torch.equal(stored["model.layers.2.eh_proj.weight"], own["eh_proj.weight"])
    assert torch.equal(stored["model.layers.2.mlp.up_proj.weight"], own["block.mlp.up_proj.weight"])
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["architectures"] == ["HYV3ForCausalLM"] and config["head_dim"] == 8
    assert config["qk_norm"] is (name == "qwen3") and config["first_k_dense_replace"] == 3
    overrides = {"num_nextn_predict_layers": 1, "first_k_dense_replace": 3, "qk_norm": name == "qwen3"}
    assert f"vllm serve {tmp_path}/backbone --hf-overrides '{json.dumps(overrides)}'" in report.command
    assert f'"method": "mtp", "model": "{tmp_path}/draft"' in report.command
    assert "were run in vLLM 0.32.0" in str(report)


def test_a_retrofit_with_biases_is_a_module_of_mimo(tmp_path):
    model, ids = family_model("qwen2"), random_ids()
    export(model, tmp_path)
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["architectures"] == ["MiMoForCausalLM"] and config["model_type"] == "qwen2"
    drafts = load_file(tmp_path / "draft" / "model.safetensors")
    assert torch.equal(drafts["lm_head.weight"], drafts["model.embed_tokens.weight"])
    whole = load_file(tmp_path / "backbone" / "model.safetensors") | drafts
    (tmp_path / "whole").mkdir()
    save_file(whole, tmp_path / "whole" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config | {"model_type": "mimo"}))
    again = DeepSeekMTP.from_pretrained(tmp_path / "whole")  # as MiMo-7B, whose layout it is
    torch.testing.assert_close(again(ids).mtp_logits[0], model(ids).mtp_logits[0], atol=1e-5, rtol=0)


TWO = {"num_nextn_predict_layers": 2}


@pytest.mark.parametrize(
    ("engine", "name", "changes", "reason"),
    [
        ("vllm", "gemma", {}, "'gemma'"),
        ("vllm", "llama", TWO, "module.*2"),
        ("vllm", "llama", {"attention_bias": True}, "3.*layout"),
        ("vllm", "llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("vllm", "mistral", {}, "sliding_window=6"),
        ("vllm", "qwen2", {"head_dim": 16}, "head_dim=16"),
        ("vllm", "deepseek_v4", {}, "'deepseek_v4'"),
        ("vllm", "ernie4_5_moe", TWO, "one module.*2"),
        ("vllm", "deepseek_v3", {"num_nextn_predict_layers": 0}, "without its modules"),
        ("sglang", "deepseek_v3", TWO, "one module.*2"),
        ("sglang", "llama", {}, "'llama'"),
        ("tgi", "deepseek_v3", {}, "engine='tgi'"),
    ],
)
def test_what_an_engine_would_not_load_is_refused(engine, name, changes, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        export(family_model(name, **changes), tmp_path, engine)
    assert not any(tmp_path.iterdir())


def test_other_models_are_refused_by_name(tmp_path):
    for model in (family_model("llama").main, NgramDrafter(), PTPStudent.__new__(PTPStudent)):
        with pytest.raises(TypeError, match=type(model).__name__):
            export(model, tmp_path / "out")


@pytest.mark.core
def test_yarn_has_the_older_fields_too(tmp_path):
    rope = dict(rope_type="yarn", rope_theta=5000.0, factor=4.0, original_max_position_embeddings=32)
    model = DeepSeekMTP(family_config("deepseek_v3", rope_parameters=rope)).eval()
    export(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_theta"] == 5000.0 and config["rope_scaling"]["factor"] == 4.0
    assert config["rope_scaling"]["type"] == "yarn" and config["topk_method"] == "noaux_tc"
    ids = random_ids()
    assert torch.equal(DeepSeekMTP.from_pretrained(tmp_path)(ids).logits, model(ids).logits)


def write_tokenizer(folder):
    """Write a tokenizer of characters, which `AutoTokenizer` reads."""
    characters = Tokenizer(models.WordLevel({chr(256 + i): i for i in range(96)}, unk_token=chr(256)))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=characters).save_pretrained(folder)


@pytest.mark.parametrize(("name", "place"), [("deepseek_v3", "."), ("llama", "backbone")])
def test_the_models_own_tokenizer_goes_along(name, place, tmp_path):
    family_model(name).save_pretrained(tmp_path / "own")
    without = export(DeepSeekMTP.from_pretrained(tmp_path / "own"), tmp_path / "without")
    assert any("no tokenizer" in warning and "own" in warning for warning in without.warnings)
    write_tokenizer(tmp_path / "own")
    report = export(DeepSeekMTP.from_pretrained(tmp_path / "own"), tmp_path / "with")
    assert not any("tokenizer" in warning for warning in report.warnings)
    assert (tmp_path / "with" / place / "tokenizer.json").is_file()


@pytest.mark.parametrize(("name", "place"), [("deepseek_v3", "."), ("llama", "backbone")])
def test_served_configs_hold_nothing_of_generate_here(name, place, tmp_path):
    model = family_model(name)
    model.generation_config.update(use_mtp=True, num_assistant_tokens=3, verification="token", do_sample=True, top_k=5)
    export(model, tmp_path)
    config = json.loads((tmp_path / place / "config.json").read_text())
    assert "keys_to_ignore_at_inference" not in config
    generation = json.loads((tmp_path / place / "generation_config.json").read_text())
    assert generation["top_k"] == 5 and not {"use_mtp", "num_assistant_tokens", "verification"} & set(generation)
    assert model.generation_config.use_mtp
