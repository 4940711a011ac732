"""Logits of modules equal those of transformers' own layers, composed as the engines' model files compose them."""

import pytest
import torch
from safetensors.torch import load_file
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.exaone_moe import modeling_exaone_moe as exaone

from tests.families import family_model, random_ids


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
