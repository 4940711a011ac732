"""Directories of facebook/multi-token-prediction: `consolidated.pth` and `params.json`. Names and rope order only.

The numbered layers are the trunk and, last, head 1; `extra_heads.{j}` are the others, on the same trunk. With head 1 as
its last layer the rest is a plain Llama.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from ...configuration import MTPHeadConfig
from ..tensor_files import read_json, read_tensors, refuse_unknown

Tensors = dict[str, torch.Tensor]
FILE, PARAMS = "consolidated.pth", "params.json"
_LAYER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_ELSE = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_PLACES = {"layers": "model.layers", "extra_heads": "extra_heads"}
_NAME = re.compile(r"(layers|extra_heads)\.(\d+)\.(.+)\.weight$")


def read(folder: Path) -> tuple[dict[str, Any], Tensors]:
    """Options of the heads and their tensors.

    Raises:
        ValueError: A model without further heads.
    """
    config, tensors, count = _read(folder)
    if count < 2:
        raise ValueError(
            f"{folder}: n_future_tokens={count}: a plain Llama without heads; MTPHeads.backbone_from_official loads it"
        )
    heads = {name.replace("extra_heads", "layers"): part for name, part in tensors.items() if "extra_heads" in name}
    options = {
        "head_type": "layer",
        "window": count,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "backbone_config": config.to_dict(),
    }
    return options, heads


def read_backbone(folder: Path) -> tuple[LlamaConfig, Tensors]:
    """The Llama whose last layer is head 1."""
    config, tensors, _ = _read(folder)
    return config, {name: tensor for name, tensor in tensors.items() if not name.startswith("extra_heads")}


def write(config: MTPHeadConfig, tensors: Tensors, backbone: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Fields of params.json and tensors of `consolidated.pth`, which holds the backbone too.

    Raises:
        ValueError: Heads that this layout cannot hold.
    """
    values = config.backbone_config or {}
    if config.head_type != "layer" or config.first != "backbone" or config.mix != "none":
        raise ValueError("layout='gloeckle' holds head_type='layer' with first='backbone' and mix='none'")
    if values.get("model_type") != "llama":
        raise ValueError(f"layout='gloeckle' holds Llama layers, not model_type={values.get('model_type')!r}")
    heads, named = values["num_attention_heads"], {}
    back = {ours: theirs for theirs, ours in _ELSE.items()}
    for name, tensor in backbone.items():
        match = re.match(r"model\.layers\.(\d+)\.(.+)\.weight$", name)
        written = f"layers.{match[1]}" if match else back[name.removesuffix(".weight")] + ".weight"
        named |= _layer_tensor(written, match[2], tensor, values) if match else {written: tensor}
    for name, tensor in tensors.items():
        _, index, part = name.removesuffix(".weight").split(".", 2)
        named |= _layer_tensor(f"extra_heads.{index}", part, tensor, values)
    fields = {
        "dim": config.hidden_size,
        "n_heads": heads,
        "n_kv_heads": values["num_key_value_heads"],
        "n_layers": values["num_hidden_layers"] + config.window - 1,
        "multiple_of": 1,
        "norm_eps": values["rms_norm_eps"],
        "vocab_size": config.vocab_size,
        "n_future_tokens": config.window,
        "rope_theta": values["rope_parameters"]["rope_theta"],
    }
    return fields, named


_PARAMS = ("dim", "n_heads", "n_layers", "norm_eps")
_TENSORS = ("tok_embeddings.weight", "layers.0.feed_forward.w1.weight")


def _read(folder: Path) -> tuple[LlamaConfig, Tensors, int]:
    params, tensors = read_json(folder / PARAMS), read_tensors([folder / FILE])
    tensors.pop("rope.freqs", None)
    for found, needed, file in ((params, _PARAMS, PARAMS), (tensors, _TENSORS, FILE)):
        if missing := [name for name in needed if name not in found]:
            raise ValueError(f"{folder / file} holds no {', '.join(missing)}")
    count, width, heads = params.get("n_future_tokens", 1), params["dim"], params["n_heads"]
    config = LlamaConfig(
        hidden_size=width,
        vocab_size=len(tensors["tok_embeddings.weight"]),
        intermediate_size=len(tensors["layers.0.feed_forward.w1.weight"]),
        num_hidden_layers=params["n_layers"] - count + 1,
        num_attention_heads=heads,
        num_key_value_heads=params.get("n_kv_heads") or heads,
        head_dim=width // heads,
        rms_norm_eps=params["norm_eps"],
        rope_parameters={"rope_theta": params.get("rope_theta", 10000.0), "rope_type": "default"},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return config, _renamed(folder, tensors, config), count


def _renamed(folder: Path, tensors: Tensors, config: LlamaConfig) -> Tensors:
    ours, unknown = {}, []
    for name, tensor in tensors.items():
        match, stem = _NAME.match(name), name.removesuffix(".weight")
        if match and match[3] in _LAYER:
            part = _LAYER[match[3]]
            ours[f"{_PLACES[match[1]]}.{match[2]}.{part}.weight"] = _half_split(part, tensor, config.head_dim)
        elif stem in _ELSE:
            ours[_ELSE[stem] + ".weight"] = tensor
        else:
            unknown.append(name)
    refuse_unknown(folder, unknown)
    return ours


def _layer_tensor(place: str, part: str, tensor: torch.Tensor, values: dict[str, Any]) -> Tensors:
    theirs = next(theirs for theirs, ours in _LAYER.items() if ours == part)
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    return {f"{place}.{theirs}.weight": _interleaved(part, tensor, head_dim)}


def _half_split(part: str, weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of queries and keys from rope pairs (0, 1), (2, 3), .. to pairs (i, i + D / 2)."""
    if part not in ("self_attn.q_proj", "self_attn.k_proj"):
        return weight
    return weight.view(-1, head_dim // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _interleaved(part: str, weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The inverse of `_half_split`."""
    if part not in ("self_attn.q_proj", "self_attn.k_proj"):
        return weight
    return weight.view(-1, 2, head_dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
