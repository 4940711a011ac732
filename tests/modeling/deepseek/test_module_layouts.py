"""Logits of modules equal those of transformers' own layers, composed as the engines' model files compose them."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.exaone_moe import modeling_exaone_moe as exaone
from transformers.models.hy_v4 import modeling_hy_v4 as hunyuan
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.step3p7 import modeling_step3p7 as step

from tests.families import family_model, random_ids
from tests.towers import image_batch, tower_model
from tokenahead import DeepSeekMTP


@pytest.mark.parametrize(
    ("of_model", "of_modules", "kind"),
    [
        (["sliding_attention", "full_attention"], None, "sliding_attention"),  # the main layer of the same index
        (["full_attention", "sliding_attention"], None, "full_attention"),
        (["sliding_attention", "full_attention"], ["full_attention"], "full_attention"),
    ],
)
@torch.no_grad()
def test_exaone_moe(of_model, of_modules, kind, tmp_path):
    model, ids = family_model("exaone_moe", layer_types=of_model, mtp_layer_types=of_modules), random_ids()
    model.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    config = model.config
    window = create_sliding_window_causal_mask if kind == "sliding_attention" else create_causal_mask
    out = model(ids, output_hidden_states=-1)
    hidden, embeds = out.hidden_states[-1][:, :-1], model.get_input_embeddings()(ids)[:, 1:]

    def norm(name, states):
        layer = exaone.ExaoneMoeRMSNorm(32, config.rms_norm_eps)
        layer.load_state_dict({"weight": files[f"mtp.{name}.weight"]})
        return layer(states)

    joined = torch.cat([norm("pre_fc_norm_embedding", embeds), norm("pre_fc_norm_hidden", hidden)], -1)
    states, places = joined @ files["mtp.fc.weight"].T, torch.arange(15)[None]
    config = type(config)(**config.to_dict() | {"layer_types": [kind] * 2, "mlp_layer_types": ["dense"] * 2})
    config._attn_implementation = "eager"
    layer = exaone.ExaoneMoeDecoderLayer(config, 0)
    layer.load_state_dict({key[13:]: value for key, value in files.items() if key.startswith("mtp.layers.0.")})
    if kind == "full_attention":
        layer.self_attn.sliding_window = None  # rotary positions in modules of every kind
    mask = window(config=config, inputs_embeds=states, attention_mask=None, past_key_values=None)
    rotary = exaone.ExaoneMoeRotaryEmbedding(config)(states, places)
    states = layer(states, attention_mask=mask, position_ids=places, position_embeddings=rotary)
    states = states[0] if isinstance(states, tuple) else states
    want = norm("norm", states) @ files["lm_head.weight"].T
    torch.testing.assert_close(out.mtp_logits[0], want, atol=1e-5, rtol=0)


@torch.no_grad()
def test_hy_v4(tmp_path):
    """The main model's attention and experts, without its hyper-connections."""
    model, ids = family_model("hy_v4"), random_ids()
    model.save_pretrained(tmp_path)
    files, config = load_file(tmp_path / "model.safetensors"), model.config
    out = model(ids, output_hidden_states=-1)
    hidden, embeds = out.hidden_states[-1][:, :-1], model.get_input_embeddings()(ids)[:, 1:]
    assert not any("hc" in name for name in files if name.startswith("model.layers.2."))

    def norm(name, states):
        layer = hunyuan.HYV4RMSNorm(32, config.rms_norm_eps)
        layer.load_state_dict({"weight": files[f"model.layers.2.{name}.weight"]})
        return layer(states)

    states = torch.cat([norm("enorm", embeds), norm("hnorm", hidden)], -1) @ files["model.layers.2.eh_proj.weight"].T
    attention, experts = hunyuan.HYV4Attention(config, 0), hunyuan.HYV4MoE(config)
    block = model.mtp[0].block
    attention.load_state_dict(block.self_attn.state_dict())
    experts.load_state_dict(block.mlp.state_dict())
    mask = create_causal_mask(
        config=config, inputs_embeds=states, attention_mask=None, past_key_values=None, allow_is_causal_skip=False
    )
    places = torch.arange(15)[None]
    rotary = hunyuan.HYV4RotaryEmbedding(config)(states, places)
    states = (
        states
        + attention(
            hidden_states=norm("input_layernorm", states),
            attention_mask=mask,
            position_ids=places,
            position_embeddings=rotary,
            past_key_values=None,
            prev_topk_indices=None,
        )[0]
    )
    states = states + experts(norm("post_attention_layernorm", states))
    want = norm("final_layernorm", states) @ files["lm_head.weight"].T
    torch.testing.assert_close(out.mtp_logits[0], want, atol=1e-5, rtol=0)


@torch.no_grad()
def test_qwen3_5_with_an_image():
    """The module reads the image's features in the place of embeddings, and rotates by time, height and width."""
    model, batch = tower_model("qwen3_5"), image_batch("qwen3_5", texts=1)
    body, config, module, ids = model.main.model, model.config.text_config, model.mtp[0], batch["input_ids"]
    kinds, grid = batch["mm_token_type_ids"], batch["image_grid_thw"]
    embeds = body.get_input_embeddings()(ids)
    embeds[kinds == 1] = torch.cat(body.get_image_features(batch["pixel_values"], grid, return_dict=True).pooler_output)
    places = body.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grid)[0][..., :-1]
    assert not torch.equal(places[0], places[1])
    out = model(**batch, output_hidden_states=-1, output_mtp_logits=True)
    states = torch.cat([module.enorm(embeds[:, 1:]), module.hnorm(out.hidden_states[-1][:, :-1])], -1)
    states = states @ module.eh_proj.weight.T
    own = type(config)(**config.to_dict() | {"layer_types": ["full_attention"] * 3})
    own._attn_implementation = "eager"
    layer = qwen.Qwen3_5DecoderLayer(own, 0)
    layer.load_state_dict(module.block.state_dict())
    mask = create_causal_mask(config=own, inputs_embeds=states, attention_mask=None, past_key_values=None)
    rotary = qwen.Qwen3_5TextRotaryEmbedding(own)(states, places)
    states = layer(states, attention_mask=mask, position_embeddings=rotary)
    want = model.main.lm_head(module.norm(states[0] if isinstance(states, tuple) else states))
    torch.testing.assert_close(out.mtp_logits[0], want, atol=1e-5, rtol=0)


@torch.no_grad()
def test_step3p7(tmp_path):
    """Each module has a norm and a head of its own; the next one reads the state from before that norm."""
    model, ids = tower_model("step3p7"), random_ids()
    model.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    text = model.main.model.language_model
    seen = []
    hook = text.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    found = model(ids, output_mtp_logits=True, output_hidden_states=-1).mtp_logits
    hook.remove()
    config, state, embeds = text.config, seen[0], model.get_input_embeddings()(ids)
    changed = {"layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": ["dense"] * 2}
    config = type(config)(**config.to_dict() | changed | {"swiglu_limits": None, "swiglu_limits_shared": None})
    config._attn_implementation = "eager"

    def norm(name, states):
        layer = step.Step3p7RMSNorm(32, config.rms_norm_eps)
        layer.load_state_dict({"weight": files[f"{name}.weight"]})
        return layer(states)

    for k, kind in enumerate(changed["layer_types"]):
        name, state = f"model.layers.{2 + k}.", state[:, :-1]
        joined = torch.cat([norm(name + "enorm", embeds[:, k + 1 :]), norm(name + "hnorm", state)], -1)
        state = joined @ files[f"{name}eh_proj.weight"].T
        layer, own = step.Step3p7DecoderLayer(config, k), {}
        for key, value in model.mtp[k].block.state_dict().items():
            own[key] = value
            assert key.startswith("mlp.") or torch.equal(files[name + key], value)
        if k:
            layer.mlp = step.Step3p7SparseMoeBlock(config, k)
        layer.load_state_dict(own)
        window = create_sliding_window_causal_mask if kind == "sliding_attention" else create_causal_mask
        mask = window(config=config, inputs_embeds=state, attention_mask=None, past_key_values=None)
        places = torch.arange(state.shape[1])[None]
        rotary = step.Step3p7RotaryEmbedding(config)(state, places, kind)
        state = layer(state, attention_mask=mask, position_ids=places, position_embeddings=rotary)
        want = norm(f"{name}shared_head.norm", state) @ files[f"{name}shared_head.output.weight"].T
        torch.testing.assert_close(found[k], want, atol=1e-5, rtol=0)
    moved = {key.replace("shared_head", "transformer.shared_head"): value for key, value in files.items()}
    save_file(moved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = DeepSeekMTP.from_pretrained(tmp_path)
    torch.testing.assert_close(again(ids).mtp_logits[1], found[1], atol=1e-6, rtol=0)


def test_heads_of_modules_learn_and_limit_what_may_change():
    model, ids = tower_model("step3p7"), random_ids()
    model.train_only("drafter")
    model.loss_options.detach_head = True  # which is about the head that modules share with the main model
    model(ids, labels=ids).loss.backward()
    assert all(module.head.weight.grad.abs().sum() > 0 for module in model.mtp)
    assert all(parameter.grad is None for parameter in model.main.parameters())
    model.set_draft_vocabulary(range(0, 96, 2))
    out = model.generate(ids[:, :4], max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    assert all(token % 2 == 0 for draft in out.speculation.rows_drafts[0] for token in draft)
    with pytest.raises(ValueError, match="step3p7.*heads"):
        model.resize_token_embeddings(100)
