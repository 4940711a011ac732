"""Modules of models with hyper-connections: logits equal those of transformers' own layers, composed by hand."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek
from transformers.models.glm5_next import modeling_glm5_next as glm
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen

from tests.families import family_model, random_ids
from tests.modeling.deepseek.composed import normed
from tests.towers import image_batch, tower_model
from tokenahead import BlockDrafter, DeepSeekMTP
from tokenahead.training.loading import causal_class

KINDS = ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"]


@torch.no_grad()
def test_glm5_next(tmp_path):
    """The main model's attention and experts, without its hyper-connections; left padding is no token."""
    model, batch = tower_model("glm5_next"), image_batch("glm5_next")
    model.save_pretrained(tmp_path)
    files, config = load_file(tmp_path / "model.safetensors"), model.main.model.language_model.config
    body, ids, real = model.main.model, batch["input_ids"], batch["attention_mask"].bool()
    embeds = body.get_input_embeddings()(ids)
    embeds[ids == 95] = torch.cat(body.get_image_features(batch["pixel_values"], batch["image_grid_thw"]).pooler_output)
    hidden = body(**batch).last_hidden_state
    assert not any("hc" in name for name in files if ".layers.3." in name)
    found = model(**batch, output_mtp_logits=True).mtp_logits
    assert len(found) == 2

    norm = normed(glm.Glm5NextTextRMSNorm, files, config.rms_norm_eps)
    for k, module in enumerate(model.mtp):
        name, hidden, real = f"model.language_model.layers.{3 + k}.", hidden[:, :-1], real[:, :-1]
        joined = torch.cat([norm(name + "enorm", embeds[:, k + 1 :]), norm(name + "hnorm", hidden)], -1)
        states = joined @ files[f"{name}eh_proj.weight"].T
        own = type(config)(**config.to_dict() | {"layer_types": ["indexed_attention"] * 3})
        own._attn_implementation = "eager"
        attention, experts = glm.Glm5NextTextAttention(own, 0), glm.Glm5NextTextMoE(own)
        attention.load_state_dict(module.block.self_attn.state_dict())
        experts.load_state_dict(module.block.mlp.state_dict())
        assert torch.equal(files[f"{name}self_attn.kv_b_proj.weight"], attention.kv_b_proj.weight)
        states = states + attention(norm(f"{name}input_layernorm", states), attention_mask=real)[0]
        states = states + experts(norm(f"{name}post_attention_layernorm", states))
        hidden = norm(f"{name}shared_head.norm", states)
        want = hidden @ files["lm_head.weight"].T
        torch.testing.assert_close(found[k][real], want[real], atol=1e-5, rtol=0)


@torch.no_grad()
def test_qwen4_exp(tmp_path):
    """Every stream is mapped, the embedding's map is added to each, and a mixer of the module makes one of them."""
    model, ids = family_model("qwen4_exp_text"), random_ids()
    model.save_pretrained(tmp_path)
    files, config, seen = load_file(tmp_path / "model.safetensors"), model.config, []
    mixer = model.main.model.hyper_connection_mixer
    hook = mixer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.main(ids)
    hook.remove()
    streams, embeds = seen[0][:, :-1], model.get_input_embeddings()(ids)[:, 1:]
    assert streams.shape == (2, 15, 64)

    def part(name, layer):
        layer.load_state_dict({key[len(name) + 1 :]: value for key, value in files.items() if key.startswith(name)})
        return layer

    normed = part("mtp.pre_fc_norm_hidden", qwen.Qwen4ExpTextRMSNorm(64, eps=config.rms_norm_eps))(streams)
    embeds = part("mtp.pre_fc_norm_embedding", qwen.Qwen4ExpTextRMSNorm(32, eps=config.rms_norm_eps))(embeds)
    added = embeds @ files["mtp.fc_embedding.weight"].T
    states = normed.unflatten(-1, (2, 32)) @ files["mtp.fc_hidden.weight"].T + added.unsqueeze(-2)
    own = type(config)(**config.to_dict() | {"layer_types": ["indexed_attention"] * 3, "ple_layer_ids": []})
    own._attn_implementation = "eager"
    layer, block = qwen.Qwen4ExpTextDecoderLayer(own, 0), model.mtp[0].block.state_dict()
    layer.load_state_dict(block)
    single = {f"mtp.layers.0.{key}" for key in block if "experts" not in key}
    assert single <= set(files) and all(torch.equal(files[key], block[key[13:]]) for key in single)
    mask = create_causal_mask(
        config=own, inputs_embeds=embeds, attention_mask=None, past_key_values=None, allow_is_causal_skip=False
    )
    places = torch.arange(15).expand(3, 2, -1)
    rotary = qwen.Qwen4ExpTextRotaryEmbedding(own)(embeds, places)
    states = layer(states.flatten(-2), position_embeddings=rotary, attention_mask=mask)
    mixed = part("mtp.hyper_connection_mixer", qwen.Qwen4ExpTextGatedResidual(own, use_combine=False))(states)
    want = mixed @ files["lm_head.weight"].T
    torch.testing.assert_close(model(ids).mtp_logits[0], want, atol=1e-5, rtol=0)


def official(files):
    """Tensors under the names of DeepSeek's own files; transformers writes some otherwise."""
    names = {"model.hc_head.hc_": "hc_head_", ".attn.norm.": ".attn.kv_norm.", "model.embed_tokens.": "embed."}
    found = {}
    for name, tensor in files.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        found[name.removeprefix("model.")] = tensor
    return found


@pytest.mark.parametrize("name", ["deepseek_v4", "qwen4_exp_text", "hy_v4"])
def test_a_text_of_one_token_has_nothing_for_modules(name):
    model = family_model(name)
    alone = model(torch.tensor([[7]]))
    assert alone.logits.shape == (1, 1, 96) and alone.mtp_logits[0].shape == (1, 0, 96)


@torch.no_grad()
def test_deepseek_v4(tmp_path):
    """Every stream is normed and mapped alone; a mixer and a norm of the module make what the head reads."""
    model, ids = family_model("deepseek_v4", num_nextn_predict_layers=2), random_ids()
    router = model.main.model.layers[0].mlp.gate
    router.tid2eid.copy_(torch.randint(0, 4, router.tid2eid.shape))
    model.save_pretrained(tmp_path)
    files, config, seen = official(load_file(tmp_path / "model.safetensors")), model.config, []
    hook = model.main.model.hc_head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    logits = model.main(ids).logits
    hook.remove()
    streams, embeds = seen[0], model.get_input_embeddings()(ids)
    assert streams.shape == (2, 16, 2, 32)
    found = model(ids)
    torch.testing.assert_close(found.logits, logits)
    own = type(config)(**config.to_dict() | {"layer_types": ["sliding_attention"] * 3, "mlp_layer_types": ["moe"] * 3})
    own._attn_implementation = "eager"

    norm = normed(deepseek.DeepseekV4RMSNorm, files, config.rms_norm_eps)
    for k, module in enumerate(model.mtp):
        name, streams = f"mtp.{k}.", streams[:, :-1]
        added = norm(name + "enorm", embeds[:, k + 1 :]) @ files[name + "e_proj.weight"].T
        streams = norm(name + "hnorm", streams) @ files[name + "h_proj.weight"].T + added.unsqueeze(-2)
        layer, block = deepseek.DeepseekV4DecoderLayer(own, 0), module.block.state_dict()
        layer.load_state_dict(block)
        assert torch.equal(files[name + "attn.wq_a.weight"], block["self_attn.q_a_proj.weight"])
        places = torch.arange(streams.shape[1])[None]
        mask = create_sliding_window_causal_mask(
            config=own, inputs_embeds=streams.flatten(2), attention_mask=None, past_key_values=None
        )
        rotary = {"main": deepseek.DeepseekV4RotaryEmbedding(own)(streams, places, "main")}
        streams = layer(streams, position_embeddings=rotary, position_ids=places, attention_mask=mask)
        mixer = deepseek.DeepseekV4HyperHead(own)
        mixer.load_state_dict({f"hc_{part}": files[f"{name}hc_head_{part}"] for part in ("fn", "base", "scale")})
        want = norm(name + "norm", mixer(streams)) @ files["head.weight"].T
        torch.testing.assert_close(found.mtp_logits[k], want, atol=1e-5, rtol=0)


@torch.no_grad()
def test_deepseek_s_own_files_and_fields_are_read(tmp_path):
    model, ids = family_model("deepseek_v4", layer_types=KINDS, compress_rates=None), random_ids()
    model.save_pretrained(tmp_path)
    files = official(load_file(tmp_path / "model.safetensors"))
    assert {"embed.weight", "norm.weight", "hc_head_fn", "layers.0.attn.kv_norm.weight"} <= set(files)
    own = ("norm.weight", "hc_head_fn", "emb.tok_emb.weight", "head.weight")
    assert {f"mtp.0.{name}" for name in own} <= set(files)
    assert not any(name.startswith("model.") for name in files)
    save_file(files, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("layer_types", "mlp_layer_types", "compress_rates", "partial_rotary_factor", "rope_parameters"):
        del config[name]
    config |= {"compress_ratios": [128, 4, 0, 0], "num_hash_layers": 1, "qk_rope_head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = DeepSeekMTP.from_pretrained(tmp_path)
    for a, b in zip((again(ids).logits, *again(ids).mtp_logits), (model(ids).logits, *model(ids).mtp_logits)):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    assert again.shared_copies
    other = family_model("deepseek_v4", 1, layer_types=KINDS, compress_rates=None)
    for of_modules in (True, False):  # as a resuming Trainer reads shards
        shard = {key: files[key] for key in files if key.startswith("mtp.") == of_modules}
        other.load_state_dict(shard, strict=False)
    torch.testing.assert_close(other(ids).mtp_logits[0], model(ids).mtp_logits[0], atol=1e-6, rtol=0)
    del files["mtp.0.emb.tok_emb.weight"], files["mtp.0.head.weight"]
    save_file(files, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert not DeepSeekMTP.from_pretrained(tmp_path).shared_copies


def test_streams_are_no_business_of_a_head_that_may_not_learn():
    """The mixer is the module's own; only the head behind it is the main model's."""
    model, ids = family_model("qwen4_exp_text"), random_ids()
    model.loss_options.detach_head = True
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.mtp[0].norm.parameters())
    mine = model.get_output_embeddings().weight.grad.clone()
    model.zero_grad()
    model.loss_options.weight = 0.0
    model(ids, labels=ids).loss.backward()
    torch.testing.assert_close(mine, model.get_output_embeddings().weight.grad)


@pytest.mark.parametrize("nested", [False, True])
@torch.no_grad()
def test_a_release_of_deepseek_v4_with_dspark_names_its_drafter(nested, tmp_path):
    """Its `mtp.*` are a drafter: they are no modules, and the model alone is loaded on request."""
    model, ids = family_model("deepseek_v4"), random_ids()
    model.save_pretrained(tmp_path)
    files = {name: tensor for name, tensor in load_file(tmp_path / "model.safetensors").items() if "mtp." not in name}
    extra = {"mtp.0.main_proj.weight": torch.ones(32, 96), "mtp.2.markov_head.markov_w1.weight": torch.ones(96, 4)}
    save_file(files | extra, tmp_path / "model.safetensors", {"format": "pt"})
    values = json.loads((tmp_path / "config.json").read_text())
    stated = {"dspark_block_size": 5, "dspark_target_layer_ids": [0, 1, 2], "dspark_markov_rank": 4}
    values |= {"num_nextn_predict_layers": 3} | ({"text_config": stated} if nested else stated)
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"DSpark.*dspark_block_size=5.*inference_only=True"):
        DeepSeekMTP.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"DSpark.*dspark_block_size=5"):
        BlockDrafter.from_pretrained(tmp_path)
    if nested:  # as in V4.1, which transformers does not have
        return
    alone = DeepSeekMTP.from_pretrained(tmp_path, inference_only=True)
    assert alone.num_modules == 0
    torch.testing.assert_close(alone(ids).logits, model(ids).logits)
    assert causal_class(AutoConfig.from_pretrained(tmp_path)) is AutoModelForCausalLM
