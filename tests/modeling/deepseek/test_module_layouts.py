"""Logits of modules equal those of transformers' own layers, composed as the engines' model files compose them."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.exaone4 import modeling_exaone4 as exaone4
from transformers.models.exaone_moe import modeling_exaone_moe as exaone
from transformers.models.glm4v_moe import modeling_glm4v_moe as glm4v
from transformers.models.glm_ocr import modeling_glm_ocr as ocr
from transformers.models.hy_v4 import modeling_hy_v4 as hunyuan
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as minimax
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen_moe
from transformers.models.step3p7 import modeling_step3p7 as step

from tests.families import family_model, random_ids
from tests.modeling.deepseek.composed import normed
from tests.towers import FLAT, image_batch, tower_model
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

    norm = normed(exaone.ExaoneMoeRMSNorm, files, config.rms_norm_eps, "mtp.{}")
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

    norm = normed(hunyuan.HYV4RMSNorm, files, config.rms_norm_eps, "model.layers.2.{}")
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
    given = {"position_ids": places, "position_embeddings": rotary, "past_key_values": None, "prev_topk_indices": None}
    states = states + attention(norm("input_layernorm", states), attention_mask=mask, **given)[0]
    states = states + experts(norm("post_attention_layernorm", states))
    want = norm("final_layernorm", states) @ files["lm_head.weight"].T
    torch.testing.assert_close(out.mtp_logits[0], want, atol=1e-5, rtol=0)


@torch.no_grad()
def test_dots3_note(tmp_path):
    """The module has separate embeddings, and a window; with given embeddings there would be none to read."""
    dots = pytest.importorskip("transformers.models.dots3_note.modeling_dots3_note", reason="since transformers 5.23")
    model, ids = family_model("dots3_note_text"), random_ids()
    model.save_pretrained(tmp_path)
    files, config = load_file(tmp_path / "model.safetensors"), model.config
    hidden, embeds = model.main.model(ids).last_hidden_state[:, :-1], files["model.mtp.embed_tokens.weight"][ids[:, 1:]]
    assert not torch.equal(files["model.mtp.embed_tokens.weight"], files["model.embed_tokens.weight"])
    layer, name = dots.Dots3NoteTextDecoderLayer(config, 1), "model.layers.2."
    layer.mlp = dots.Dots3NoteTextMLP(config)
    layer.load_state_dict({key: files[name + key] for key in model.mtp[0].block.state_dict()})

    norm = normed(dots.Dots3NoteRMSNorm, files, config.rms_norm_eps, f"{name}{{}}")
    states = torch.cat([norm("enorm", embeds), norm("hnorm", hidden)], -1) @ files[f"{name}eh_proj.weight"].T
    places, options = torch.arange(15)[None], {"attention_mask": None, "past_key_values": None}
    mask = create_sliding_window_causal_mask(config=config, inputs_embeds=states, **options)
    rotary = dots.Dots3NoteTextRotaryEmbedding(config)(states, places, "sliding_attention")
    states = layer(states, attention_mask=mask, position_ids=places, position_embeddings=rotary)
    states = norm("shared_head.norm", states[0] if isinstance(states, tuple) else states)
    torch.testing.assert_close(model(ids).mtp_logits[0], states @ files["lm_head.weight"].T, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="inputs_embeds.*input_ids"):
        model(inputs_embeds=model.get_input_embeddings()(ids))
    with pytest.raises(ValueError, match="dots3_note_text.*embeddings"):
        model.resize_token_embeddings(100)


@torch.no_grad()
def test_minimax_m3(tmp_path):
    """The first module reads the state behind the final norm, and each one hands on what its own norm has not read."""
    model, ids = tower_model("minimax_m3_vl"), random_ids()
    model.save_pretrained(tmp_path)
    files, config = load_file(tmp_path / "model.safetensors"), model.main.model.language_model.config
    found, state = model(ids, output_mtp_logits=True).mtp_logits, model.main.model(ids).last_hidden_state
    embeds = model.get_input_embeddings()(ids)
    changed = {"layer_types": ["minimax_m3_sparse"] * 2, "mlp_layer_types": ["sparse"] * 2}
    own = type(config)(**config.to_dict() | changed)
    own._attn_implementation = "eager"

    norm = normed(minimax.MiniMaxM3VLRMSNorm, files, config.rms_norm_eps)
    for k, module in enumerate(model.mtp):
        name, state = f"language_model.model.mtp.layers.{k}.", state[:, :-1]
        joined = torch.cat([norm(name + "enorm", embeds[:, k + 1 :]), norm(name + "hnorm", state)], -1)
        state, places = joined @ files[f"{name}eh_proj.weight"].T, torch.arange(state.shape[1])[None]
        layer = minimax.MiniMaxM3VLDecoderLayer(own, 0)
        layer.load_state_dict(module.block.state_dict())
        index = files[f"{name}transformer_layer.self_attn.index_q_proj.weight"]
        assert torch.equal(index, layer.self_attn.indexer.q_proj.weight)
        mask = create_causal_mask(config=own, inputs_embeds=state, attention_mask=None, past_key_values=None)
        rotary = minimax.MiniMaxM3VLRotaryEmbedding(own)(state, places)
        state = layer(state, attention_mask=mask, position_ids=places, position_embeddings=rotary)
        want = norm(f"{name}final_layernorm", state) @ files["language_model.lm_head.weight"].T
        torch.testing.assert_close(found[k], want, atol=1e-5, rtol=0)


@pytest.mark.by_day(
    "glm4v_moe-transformers.models.glm4v_moe.modeling_glm4v_moe-Glm4vMoeText",
    "qwen3_5-transformers.models.qwen3_5.modeling_qwen3_5-Qwen3_5",
)
@pytest.mark.parametrize(
    ("name", "of", "kind"),
    [
        ("exaone4_5", exaone4, "Exaone4"),
        ("glm4v_moe", glm4v, "Glm4vMoeText"),
        ("glm_ocr", ocr, "GlmOcrText"),
        ("qwen3_5", qwen, "Qwen3_5"),
        ("qwen3_5_moe", qwen_moe, "Qwen3_5Moe"),
    ],
)
@torch.no_grad()
def test_behind_an_image(name, of, kind):
    """Modules read the image's features instead of embeddings, and rotate as the main model does."""
    model, batch = tower_model(name), image_batch(name, texts=1)
    body, config, ids = model.main.model, model.config.text_config, batch["input_ids"]
    grid, embeds = batch["image_grid_thw"], body.get_input_embeddings()(ids)
    embeds[ids == 95] = torch.cat(body.get_image_features(batch["pixel_values"], grid, return_dict=True).pooler_output)
    places = torch.arange(ids.shape[1])[None]
    if name not in FLAT:
        places = body.get_rope_index(ids, mm_token_type_ids=batch["mm_token_type_ids"], image_grid_thw=grid)[0]
        assert not torch.equal(places[0], places[1])
    found = model(**batch, output_hidden_states=-1, output_mtp_logits=True)
    state = found.hidden_states[-1]
    for k, module in enumerate(model.mtp):
        state, places = state[:, :-1], places[..., :-1]
        joined = torch.cat([module.enorm(embeds[:, k + 1 :]), module.hnorm(state)], -1) @ module.eh_proj.weight.T
        changed, window = {"layer_types": [module.kind] * config.num_hidden_layers}, module.kind == "sliding_attention"
        own = type(config)(**config.to_dict() | (changed if "layer_types" in config.to_dict() else {}))
        own._attn_implementation = "eager"
        layer = vars(of)[f"{kind}DecoderLayer"](own, 1)
        layer.load_state_dict(module.block.state_dict())
        make = create_sliding_window_causal_mask if window else create_causal_mask
        mask = make(config=own, inputs_embeds=joined, attention_mask=None, past_key_values=None)
        rotary = type(body.language_model.rotary_emb)(own)(joined, places)
        output = layer(joined, attention_mask=mask, position_embeddings=rotary)
        state = module.norm(output[0] if isinstance(output, tuple) else output)
        torch.testing.assert_close(found.mtp_logits[k], model.main.lm_head(state), atol=1e-5, rtol=0)


@torch.no_grad()
def test_step3p7(tmp_path):
    """Each module has its own norm and head; the next one reads the state from before that norm."""
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

    norm = normed(step.Step3p7RMSNorm, files, config.rms_norm_eps)
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
