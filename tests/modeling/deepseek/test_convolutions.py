"""Modules of Inkling: logits equal those of transformers' own layers, composed by hand as vLLM's model file does."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.inkling import modeling_inkling as inkling

from tests.families import family_model, random_ids
from tests.modeling.deepseek.composed import normed
from tests.towers import image_batch, tower_model
from tokenahead import DeepSeekMTP

LAYER = "model.mtp.layers.{}.transformer_block."
PARTS = {"norm": "model.mtp.chain_norm"}
PARTS |= {name: f"model.mtp.layers.{{}}.{name}" for name in ("hidden_norm", "embed_norm", "input_proj")}
OFFICIAL = (
    *("attn_norm.weight", "mlp_norm.weight", "attn_sconv.weight", "mlp_sconv.weight", "mlp.w13_dn.weight"),
    *("mlp.w2_md.weight", "mlp.global_scale", "attn.wq_du.weight", "attn.wk_dv.weight", "attn.wv_dv.weight"),
    *("attn.wr_du.weight", "attn.wo_ud.weight", "attn.q_norm.weight", "attn.k_norm.weight", "attn.k_sconv.weight"),
    *("attn.v_sconv.weight", "attn.rel_logits_proj.proj"),
)
"""Tensors of a module's layer, by the names that vLLM's loader reads."""


def composed(model, files, hidden, embeds, real, has_norm):
    """Logits of every module from h^0 and embeddings [B, L, H]; `real` [B, L] marks those of tokens."""
    text = model.config.get_text_config()
    norm = normed(inkling.InklingRMSNorm, files, text.rms_norm_eps)
    for k, module in enumerate(model.mtp):
        names = {part: name.format(k) for part, name in PARTS.items()}
        hidden, embeds, real = hidden[:, :-1], embeds[:, 1:], real[:, :-1]
        joined = torch.cat([norm(names["hidden_norm"], hidden), norm(names["embed_norm"], embeds)], -1)
        states = joined @ files[f"{names['input_proj']}.weight"].T
        is_near = k in text.mtp_local_layer_ids
        kinds = {"layer_types": ["hybrid_sliding" if is_near else "hybrid"] * 2, "mlp_layer_types": ["dense"] * 2}
        own = type(text)(**text.to_dict() | kinds | {"log_scaling_n_floor": None})
        own._attn_implementation = "eager"
        layer = inkling.InklingDecoderLayer(own, 0)
        layer.load_state_dict(module.block.state_dict())
        make = create_sliding_window_causal_mask if is_near else create_causal_mask
        mask = make(config=own, inputs_embeds=states, attention_mask=real, past_key_values=None)
        hidden = layer(states, attention_mask=mask, conv_mask=real)
        hidden = norm(names["norm"], hidden) if has_norm else hidden
        head = model.get_output_embeddings().weight
        yield (hidden / text.logits_mup_width_multiplier) @ head.T, real


@pytest.mark.by_day("near0-True", "near1-False", "near2-True")
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("near", [[], [0], [1]])
@torch.no_grad()
def test_modules_of_a_text(near, has_norm, tmp_path):
    """Of [hidden; embedding], with the main model's norm of embeddings, and one norm behind every module or none."""
    changes = {"mtp_local_layer_ids": near, "chain_hidden_post_norm": has_norm}
    model, ids = family_model("inkling_text", 0, 2, **changes), random_ids()
    model.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    assert (f"{PARTS['norm']}.weight" in files) == has_norm
    body, real = model.main.model, torch.ones_like(ids)
    real[1, :3] = 0
    raw = torch.nn.functional.embedding(ids, files["model.embed_tokens.weight"])
    embeds = body.embed_tokens.embed_norm(raw)
    hidden = body(ids, attention_mask=real).last_hidden_state
    found = model(ids, attention_mask=real).mtp_logits
    wanted = list(composed(model, files, hidden, embeds, real, has_norm))
    assert len(found) == len(wanted) == 2
    for got, (want, is_real) in zip(found, wanted):
        torch.testing.assert_close(got[is_real.bool()], want[is_real.bool()], atol=1e-5, rtol=0)
    again = DeepSeekMTP.from_pretrained(tmp_path)(ids, attention_mask=real)
    for got, want in zip(again.mtp_logits, found):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


@torch.no_grad()
def test_modules_beside_a_tower_have_official_names(tmp_path):
    model, batch = tower_model("inkling_mm_model"), image_batch("inkling_mm_model")
    model.save_pretrained(tmp_path)
    files, body = load_file(tmp_path / "model.safetensors"), model.main.model
    assert {name for name in files if name.startswith(LAYER.format(1))} == {LAYER.format(1) + name for name in OFFICIAL}
    assert not any("language_model" in name for name in files) and "model.llm.layers.0.attn.wq_du.weight" in files
    ids, real = batch["input_ids"], batch["attention_mask"]
    embeds = body.get_input_embeddings()(ids)
    embeds[ids == 95] = body.get_image_features(batch["pixel_values"]).pooler_output[:, 0]
    hidden = body(**batch).last_hidden_state
    found = model(**batch, output_mtp_logits=True).mtp_logits
    for got, (want, is_real) in zip(found, composed(model, files, hidden, embeds, real, True)):
        torch.testing.assert_close(got[is_real.bool()], want[is_real.bool()], atol=1e-5, rtol=0)


def test_one_norm_learns_from_all_modules_and_stays_one():
    model, ids = family_model("inkling_text", 0, 2), random_ids()
    model(ids, labels=ids).loss.backward()
    names = [name for name, parameter in model.named_parameters() if ".norm.weight" in name and "mtp" in name]
    assert names == ["mtp.0.norm.weight"] and model.mtp[1].norm.weight.grad.abs().sum() > 0
    twin = copy.deepcopy(model)
    assert twin.mtp[0].norm is twin.mtp[1].norm is not model.mtp[0].norm
    loaded = twin.load_state_dict(model.state_dict())
    assert not loaded.missing_keys and not loaded.unexpected_keys
