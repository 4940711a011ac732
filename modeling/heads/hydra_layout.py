"""Directories of Hydra heads as their authors write them: `hydra_lm_head.pt` and `config.json`. Names only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from ...configuration import MTPHeadConfig
from ..tensor_files import below, read_json, read_tensors, refuse_unknown
from .hydra import prefix_config
from .untying import untied

Tensors = dict[str, torch.Tensor]
EMBEDDING = "input_embed_fn.weight"
"""The backbone's embedding, which the authors' files repeat."""
_PREFIX = "prefix_embeding_layer."  # sic
_UNUSED = (_PREFIX + "embed_tokens.weight", _PREFIX + "layers.0.self_attn.rotary_emb.inv_freq")
_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)$")
_UNEMBEDDING = re.compile(r"hydra_lm_head\.(\d+)\.(?:1\.)?(weight|bias)$")


def read(folder: Path) -> tuple[dict[str, Any], Tensors]:
    """Options of the heads and their tensors; the backbone's embedding is among them under its own name.

    Raises:
        ValueError: An architecture without released weights, or unknown tensors.
    """
    values, tensors = read_json(folder / "config.json"), read_tensors(sorted(folder.glob("hydra_lm_head.*"))[-1:])
    arch = values.get("hydra_head_arch", "mlp")
    if arch not in ("mlp", "prefix-mlp"):
        raise ValueError(f"{folder}: hydra_head_arch={arch!r} is not supported; 'mlp' and 'prefix-mlp' are")
    places = sorted({int(match[2]) for match in map(_BLOCK.match, tensors) if match})
    ours, rows = {}, {}
    for name, tensor in tensors.items():
        if match := _BLOCK.match(name):
            ours[_our_block(match, places.index(int(match[2])))] = tensor
        elif match := _UNEMBEDDING.match(name):
            rows[(int(match[1]), match[2])] = tensor
        elif name.startswith(_PREFIX) and name not in _UNUSED:
            ours["prefix." + name.removeprefix(_PREFIX)] = tensor
    known = (name for name in tensors if _BLOCK.match(name) or _UNEMBEDDING.match(name) or name.startswith(_PREFIX))
    refuse_unknown(folder, tensors.keys() - {*known, EMBEDDING})
    heads = 1 + max(k for k, _ in rows)
    ours |= {f"unembeddings.heads.{k}.weight": rows[k, "weight"] for k in range(heads)}
    ours["unembeddings.bias"] = torch.stack([rows[k, "bias"] for k in range(heads)])
    tied, ours = untied(ours, heads, len(places) - 1)
    vocab_size, width = rows[0, "weight"].shape
    options = {
        "head_type": "hydra",
        "window": heads + 1,
        "num_blocks": len(places),
        "tied_blocks": tied,
        "unembed": "own",
        "arch": arch,
        "grounded": values.get("grounded_heads", True),
        "state_offset": values.get("hidden_state_offset", 0),
        "hidden_size": width,
        "vocab_size": vocab_size,
        "base_model_name_or_path": values.get("base_model_name_or_path"),
    }
    if arch == "prefix-mlp":
        options["backbone_config"] = _layer_config(folder, tensors, vocab_size)
    return options, ours | ({EMBEDDING: tensors[EMBEDDING]} if EMBEDDING in tensors else {})


def write(config: MTPHeadConfig, tensors: Tensors, embedding: torch.Tensor) -> tuple[dict[str, Any], Tensors]:
    """Fields of config.json and tensors of `hydra_lm_head.pt`.

    Raises:
        ValueError: Heads of another type, or with the backbone's unembedding.
    """
    if config.head_type != "hydra" or config.unembed != "own":
        raise ValueError(
            f"layout='hydra' holds head_type='hydra' with unembed='own', not {config.head_type!r} with "
            f"{config.unembed!r}"
        )
    prefix = config.arch == "prefix-mlp"
    named = {EMBEDDING: embedding}
    for k in range(config.window - 1):
        last = "1." if prefix else ""
        named[f"hydra_lm_head.{k}.{last}weight"] = tensors[f"unembeddings.heads.{k}.weight"]
        named[f"hydra_lm_head.{k}.{last}bias"] = tensors["unembeddings.bias"][k]
        for place in range(config.num_blocks):
            written = 2 * place + 1 if prefix else place  # dropouts stand between the blocks
            ours = f"firsts.{k}." if place == 0 else f"blocks.{k}.{0 if config.tied_blocks else place - 1}."
            named |= {f"hydra_mlp.{k}.{written}.{part}": tensor for part, tensor in below(tensors, ours).items()}
    named |= {_PREFIX + name: tensor for name, tensor in below(tensors, "prefix.").items()}
    if prefix:  # their loader is strict about what it does not use
        named |= {_UNUSED[0]: embedding, _UNUSED[1]: _frequencies(config.backbone_config["head_dim"])}
    fields = {
        "hydra_num_heads": config.window - 1,
        "hydra_num_layers": config.num_blocks,
        "hydra_head_arch": config.arch,
        "grounded_heads": config.grounded,
        "hidden_state_offset": config.state_offset,
    }
    return fields, named


def _frequencies(head_dim: int) -> torch.Tensor:
    return 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)


def _our_block(match: re.Match[str], rank: int) -> str:
    place = f"firsts.{match[1]}" if rank == 0 else f"blocks.{match[1]}.{rank - 1}"
    return f"{place}.{match[3]}.{match[4]}"


def _layer_config(folder: Path, tensors: Tensors, vocab_size: int) -> dict[str, Any]:
    """Shapes say all but the norm's epsilon, which is that of the backbones these heads were released for."""
    frequencies = tensors.get(_UNUSED[1])
    if frequencies is None:
        raise ValueError(f"{folder}: without {_UNUSED[1]} the number of attention heads is not known")
    head_dim = 2 * len(frequencies)
    inner, width = tensors[_PREFIX + "layers.0.mlp.gate_proj.weight"].shape
    keys = len(tensors[_PREFIX + "layers.0.self_attn.k_proj.weight"])
    return prefix_config(width, inner, width // head_dim, keys // head_dim, eps=1e-6)
