"""Every family: built, run, saved, read back, and the retrofits of models without modules."""

import copy
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.families import NAMES, RETROFITS, family_config, family_model, most_modules, random_ids, shake
from tests.towers import TOWERS, tower_model
from tokenahead import DeepSeekMTP
from tokenahead.configuration.mtp_families import FAMILIES, REFUSED, family_of
from tokenahead.modeling.deepseek.conversion import main_class


@pytest.mark.by_day("deepseek_v4", "ernie4_5_moe", "inkling_text", "longcat_flash", "nemotron_h")
@pytest.mark.parametrize("name", NAMES)
def test_family(name, tmp_path):
    count = most_modules(name)
    model, ids = family_model(name, num_nextn_predict_layers=count), random_ids()
    out = model(ids, labels=ids, output_mtp_logits=True)
    assert [logits.shape for logits in out.mtp_logits] == [(2, 15, 96), (2, 14, 96)][:count]
    out.loss.backward()
    assert all(next(module.eh_proj.parameters()).grad.abs().sum() > 0 for module in model.mtp)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        again = DeepSeekMTP.from_pretrained(tmp_path)
        assert type(again.main) is main_class(model.config) and again.num_modules == count
        other = again(ids, labels=ids)
        for a, b in zip((out.loss, out.logits, *out.mtp_logits), (other.loss, other.logits, *other.mtp_logits)):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
        plain, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not report["missing_keys"]
        torch.testing.assert_close(plain(ids).logits, out.logits, atol=1e-5, rtol=0)


@pytest.mark.by_day("deepseek_v3", "deepseek_v4", "mimo_v2_flash", "qwen4_exp_text")
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_rows_one_by_one_with_a_cache_equal_rows_at_once(name):
    model, ids = family_model(name), random_ids()
    out = model(ids, output_hidden_states=-1)
    hidden, embeds = out.hidden_states[-1], model.module_embeddings()(ids)
    cache, rows = model.mtp.new_cache(), []
    for start, stop in ((0, 9), (9, 10), (10, 15)):
        position_ids, mask = torch.arange(start, stop)[None], torch.ones(2, stop, dtype=torch.long)
        state = model.mtp.step(1, hidden[:, start:stop], embeds[:, start + 1 : stop + 1], position_ids, mask, cache)
        rows.append(model.readout_of(1)(state))
    torch.testing.assert_close(torch.cat(rows, 1), out.mtp_logits[0], atol=2e-5, rtol=0)


def test_names_in_files_are_the_family_s_own(tmp_path):
    expected = {
        "ernie4_5_moe": "model.mtp_block.0.input_layernorm model.mtp_emb_norm.0 model.mtp_linear_proj.0",
        "hy_v3": "model.layers.2.final_layernorm model.layers.2.mlp.experts.3.up_proj",
        "deepseek_v3": "model.layers.2.mlp.experts.3.up_proj model.layers.2.shared_head.norm",
        "glm_moe_dsa": "model.layers.2.embed_tokens model.layers.2.self_attn.indexer.wk",
        "bailing_hybrid": "model.layers.3.final_layernorm model.layers.3.mlp.experts.3.up_proj",
        "exaone_moe": "mtp.fc mtp.layers.0.mlp.gate_proj mtp.pre_fc_norm_hidden",
        "longcat_flash": (
            "model.mtp.embed_tokens model.mtp.layers.0.enorm.m model.mtp.layers.0.transformer_layer.mlp.gate_proj "
            "model.mtp.norm"
        ),
        "mellum": "mtp.layers.0.mlp.experts.3.up_proj mtp.norm",
        "mimo_v2_flash": (
            "model.mtp.layers.0.final_layernorm model.mtp.layers.0.pre_mlp_layernorm "
            "model.mtp.layers.0.self_attn.attention_sink_bias"
        ),
        "nemotron_h": (
            "mtp.layers.0.eh_proj mtp.layers.0.mixer.q_proj mtp.layers.1.final_layernorm "
            "mtp.layers.1.mixer.experts.3.up_proj"
        ),
        "qwen3_5_moe_text": "mtp.fc mtp.layers.0.mlp.experts.3.up_proj",
    }
    for name, names in expected.items():
        model = family_model(name)
        model.save_pretrained(tmp_path / name)
        DeepSeekMTP.from_pretrained(tmp_path / name).save_pretrained(tmp_path / name)  # also once it was loaded
        stored = set(load_file(tmp_path / name / "model.safetensors"))
        assert {*names.split()} <= {key.removesuffix(".weight") for key in stored}
        assert not any("gate_up_proj" in key or key.startswith(("main.", "mtp.0.")) for key in stored)


@pytest.mark.by_day("gemma", "qwen3")
@pytest.mark.parametrize("name", RETROFITS)
@torch.no_grad()
def test_retrofit_starts_from_the_last_layer(name, tmp_path):
    torch.manual_seed(0)
    backbone = shake(AutoModelForCausalLM.from_config(family_config(name, num_nextn_predict_layers=0))).eval()
    backbone.save_pretrained(tmp_path)
    model = DeepSeekMTP.from_backbone(tmp_path, num_modules=2, eh_init="hidden")
    ids = random_ids()
    assert torch.equal(model(ids).logits, backbone(ids).logits) and model.num_modules == 2
    last = backbone.get_decoder().layers[-1].state_dict()
    for module in model.mtp:
        assert all(torch.equal(value, last[key]) for key, value in module.block.state_dict().items())
        assert torch.equal(module.norm.weight, backbone.get_decoder().norm.weight)
        x = torch.randn(3, 32)
        torch.testing.assert_close(module.hnorm(x), torch.nn.functional.rms_norm(x, (32,)), atol=1e-4, rtol=0)
        torch.testing.assert_close(module.eh_proj(torch.cat([x, 2 * x], -1)), 2 * x)
    model.save_pretrained(tmp_path / "new")
    again = DeepSeekMTP.from_pretrained(tmp_path / "new")
    assert torch.equal(again(ids).mtp_logits[1], model(ids).mtp_logits[1])


@pytest.mark.core
def test_retrofit_refuses_what_it_cannot_do():
    backbone = AutoModelForCausalLM.from_config(family_config("llama"))
    with pytest.raises(ValueError, match="num_modules=.*0.*1"):
        DeepSeekMTP.from_backbone(backbone, num_modules=0)
    with pytest.raises(ValueError, match="eh_init=.*'zero'"):
        DeepSeekMTP.from_backbone(backbone, eh_init="zero")
    with pytest.raises(ValueError, match="LlamaModel"):
        DeepSeekMTP.from_backbone(backbone.model)
    official = AutoModelForCausalLM.from_config(family_config("deepseek_v3"))
    with pytest.raises(ValueError, match="num_nextn_predict_layers=1.*from_pretrained"):
        DeepSeekMTP.from_backbone(official)
    unlike = AutoModelForCausalLM.from_config(family_config("ernie4_5_moe", num_nextn_predict_layers=0))
    with pytest.raises(ValueError, match="last layer"):
        DeepSeekMTP.from_backbone(unlike)


def test_a_copy_is_a_model_of_its_own():
    model, ids = family_model("llama"), random_ids()
    other = copy.deepcopy(model)
    expected = model(ids).mtp_logits[0]
    torch.nn.init.zeros_(model.mtp[0].eh_proj.weight)
    model.main.model.rotary_emb.inv_freq.zero_()
    assert torch.equal(other(ids).mtp_logits[0], expected)
    assert other.mtp.config is other.config is other.main.config


def test_whatever_is_refused_is_refused_by_name_and_with_the_reason_of_its_own():
    from transformers import CONFIG_MAPPING, AutoConfig

    assert not set(REFUSED) & set(FAMILIES)
    words = {
        "dots3_note": "get_text_config.*dots3_note_text.*modeling_dots3_note",
        "mistral_large4": r"mtp_dspark\.\*.*mistral_large4",
        "step3p5": "step3p7.*modeling_auto",
    }  # fmt: skip
    assert set(REFUSED) == set(words)
    for name in REFUSED:
        assert name in CONFIG_MAPPING, "transformers makes no configuration of it, so that nobody could see the reason"
        with pytest.raises(ValueError, match=f"does not support model_type='{name}': .*{words[name]}"):
            family_of(AutoConfig.for_model(name))


def test_the_page_lists_every_family_in_the_table_where_it_belongs():
    page = (Path(__file__).parents[3] / "docs" / "families.md").read_text(encoding="utf-8")
    held, refused = (
        {name for row in part.splitlines() if row.startswith("| ") for name in re.findall(r"\w+", row.split("|")[1])}
        for part in page.split("## Refused, and why")
    )
    shown = held | {f"{name}_text" for name in held}
    assert set(FAMILIES) <= shown and set(TOWERS) <= held and set(NAMES) <= held
    assert set(REFUSED) <= refused | {f"{name}_text" for name in refused} and not set(REFUSED) & held


def test_names_that_modules_would_share_leave_room_for_one():
    for name in ["qwen3_next", "nemotron_h", "mellum", "longcat_flash"]:
        with pytest.raises(ValueError, match=f"=2: .*{name}.* 1 module"):
            family_config(name, 2)


def test_the_text_of_a_model_with_a_tower_is_loaded_alone_by_its_configuration(tmp_path):
    model, ids = tower_model("qwen3_5"), random_ids()
    model.save_pretrained(tmp_path)
    again = DeepSeekMTP.from_pretrained(tmp_path, config=model.config.get_text_config())
    assert again.config.model_type == "qwen3_5_text" and type(again.main) is main_class(again.config)
    torch.testing.assert_close(again(ids).mtp_logits[0], model(ids).mtp_logits[0], atol=1e-6, rtol=0)


def test_retrofit_projection():
    backbone = AutoModelForCausalLM.from_config(family_config("llama", num_nextn_predict_layers=0))
    for eh_init, shares in (("embedding", (1, 0)), ("hidden", (0, 1)), ("both", (0.5, 0.5))):
        weight = DeepSeekMTP.from_backbone(backbone, eh_init=eh_init).mtp[0].eh_proj.weight
        assert torch.equal(weight, torch.cat([share * torch.eye(32) for share in shares], dim=1))
