"""Backbones without modules: every one of the registry is used as it uses itself, and what is not is refused."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.families import BACKBONES, family_config, random_ids, shake
from tests.models import left_padded
from tests.towers import TOWERS
from tokenahead import DeepSeekMTP
from tokenahead.modeling.deepseek import modules as readout
from tokenahead.modeling.deepseek import retrofit

VOCABULARY = 24
OPTIONS = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}


def backbone_of(name, **changes):
    torch.manual_seed(0)
    config = family_config(name, 0, vocab_size=VOCABULARY, **changes)
    return shake(AutoModelForCausalLM.from_config(config)).eval()


@pytest.mark.by_day("gemma2", "gpt_oss", "nemotron")
@pytest.mark.parametrize("name", BACKBONES)
def test_every_backbone_is_kept_saved_decoded_exactly_and_learned_for(name, tmp_path):
    backbone, ids = backbone_of(name), random_ids() % VOCABULARY
    model = DeepSeekMTP.from_backbone(backbone)
    with torch.no_grad():
        out = model(ids, labels=ids)
        assert torch.equal(out.logits, backbone(ids).logits)
        model.save_pretrained(tmp_path)
        again = DeepSeekMTP.from_pretrained(tmp_path)(ids)
    torch.testing.assert_close(again.mtp_logits[0], out.mtp_logits[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(out.head_losses[0], backbone(ids, labels=ids).loss, atol=1e-5, rtol=0)
    batch = left_padded([row[:length] for row, length in zip(random_ids(4) % VOCABULARY, (9, 5, 1, 3))])
    text = model.generate(**batch, num_assistant_tokens=2, **OPTIONS)
    assert torch.equal(text, model.generate(**batch, use_mtp=False, **OPTIONS))
    model.train_only("drafter")
    model(ids, labels=ids).loss.backward()
    assert model.mtp[0].eh_proj.weight.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in model.main.parameters())


@pytest.mark.parametrize("name", ["granite", "gemma2"])
def test_a_readout_that_forgets_something_is_noticed(name, monkeypatch):
    monkeypatch.setattr(readout, "finished_logits", lambda logits, config: logits)
    with pytest.raises(ValueError, match=f"does not support this {name}: its logits are not what its head makes"):
        DeepSeekMTP.from_backbone(backbone_of(name))


def test_a_layer_that_is_called_wrongly_is_noticed(monkeypatch):
    monkeypatch.setattr(retrofit, "layer_kind", lambda config, index: "full_attention")
    with pytest.raises(ValueError, match="mistral.*states"):
        DeepSeekMTP.from_backbone(backbone_of("mistral"))


def test_a_layer_that_a_folder_would_not_give_back_is_noticed():
    with pytest.raises(ValueError, match="qwen2_moe.*mlp"):
        DeepSeekMTP.from_backbone(backbone_of("qwen2_moe", mlp_only_layers=[0, 1]))


REFUSED = {
    "minicpm3": ({}, "residual_scale"),  # by the number of layers
    "olmo": ({}, "no weights"),
    "opt": ({"word_embed_proj_dim": 32}, r"model\.layers"),
    "gpt2": ({}, "layers"),
    "mamba": ({}, "layer_types"),
}


def test_what_cannot_be_probed_saved_or_loaded_is_refused_by_name():
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    for name, (changes, reason) in REFUSED.items():
        config = AutoConfig.for_model(name, vocab_size=VOCABULARY, **(sizes | changes))
        with pytest.raises(ValueError, match=f"{name}.*{reason}"):
            DeepSeekMTP.from_backbone(AutoModelForCausalLM.from_config(config).eval())


def test_modules_are_made_from_the_last_layer_of_their_kind():
    backbone = backbone_of("kimi_linear")
    model = DeepSeekMTP.from_backbone(backbone)
    assert backbone.config.layer_types == ["linear_attention", "full_attention", "linear_attention"]
    weight = backbone.model.layers[1].self_attn.q_proj.weight
    assert torch.equal(model.mtp[0].block.self_attn.q_proj.weight, weight)


def test_norms_with_a_bias_start_at_nothing():
    backbone = backbone_of("starcoder2")
    assert backbone.model.norm.bias.abs().max() > 0
    norm = DeepSeekMTP.from_backbone(backbone).mtp[0].enorm
    states = torch.randn(3, 32)
    torch.testing.assert_close(norm(states), nn.functional.layer_norm(states, (32,)), atol=1e-4, rtol=0)


@torch.no_grad()
def test_new_modules_hand_on_the_states_that_official_ones_do(tmp_path):
    """MiniMax-M3's go on from before a module's norm, in a new model as in a loaded one."""
    config = AutoConfig.for_model("minimax_m3_vl_text", **TOWERS["minimax_m3_vl"]["text_config"])
    model, ids = DeepSeekMTP.from_backbone(shake(AutoModelForCausalLM.from_config(config)).eval(), 2), random_ids()
    model.save_pretrained(tmp_path)
    again = DeepSeekMTP.from_pretrained(tmp_path)
    torch.testing.assert_close(again(ids).mtp_logits[1], model(ids).mtp_logits[1], atol=1e-6, rtol=0)


@pytest.mark.by_day("eager")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_backbone_in_float64_is_kept_where_its_padded_rows_are_no_numbers(attention):
    backbone, ids = backbone_of("llama", attn_implementation=attention).double(), random_ids() % VOCABULARY
    model = DeepSeekMTP.from_backbone(backbone)
    plain = backbone.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS)
    assert torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS), plain)
