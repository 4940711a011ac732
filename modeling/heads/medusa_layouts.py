"""Directories of Medusa heads: the authors' (version 1, 2, merged into a model) and vLLM's. Names only.

Authors': `{k}.{j}.linear.{weight, bias}` for head k and block j, `{k}.{blocks}.weight` its unembedding (version 2 has
none). Merged: the same behind `medusa_head.` in a model's files. vLLM: `blocks.{k}.layers.{j}.*` and
`lm_heads.{k}.weight`. Independent (FF) heads are vLLM's with no block: `lm_heads` alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from ...configuration import MTPHeadConfig
from ..tensor_files import read_json, read_tensors, refuse_unknown
from .untying import untied

Tensors = dict[str, torch.Tensor]
Folder = tuple[dict[str, Any], Tensors]
"""Fields of config.json and tensors."""
_OFFICIAL = {
    re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)$"): "blocks.{0}.{1}.linear.{2}",
    re.compile(r"(\d+)\.\d+\.(weight)$"): "unembeddings.heads.{0}.{1}",
}
_VLLM = {
    re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$"): "blocks.{0}.{1}.linear.{2}",
    re.compile(r"lm_heads\.(\d+)\.(weight)$"): "unembeddings.heads.{0}.{1}",
}


def read_official(folder: Path) -> Folder:
    """Options of the heads and their tensors, from `medusa_lm_head.*` or the files of a merged model."""
    values = read_json(folder / "config.json")
    if files := sorted(folder.glob("medusa_lm_head.*")):
        tensors = read_tensors(files[-1:])  # safetensors rather than a pickle
    else:
        tensors = read_tensors(sorted(folder.glob("*.safetensors")), "medusa_head.")
    return _options(folder, values, _renamed(folder, tensors, _OFFICIAL))


def read_vllm(folder: Path) -> Folder:
    """Options of the heads and their tensors, from a directory that vLLM serves."""
    values = read_json(folder / "config.json")
    tensors = read_tensors(sorted(folder.glob("*.safetensors")))
    tensors = {name.removeprefix("medusa_heads."): tensor for name, tensor in tensors.items()}
    if "token_map" in tensors:
        raise ValueError(f"{folder}: token_map, a vocabulary of {len(tensors['token_map'])} tokens, is not supported")
    if values.get("original_lm_head"):
        tensors.pop("lm_heads.0.weight", None)
    ours = _renamed(folder, tensors, _VLLM)
    for name, tensor in list(ours.items()):
        if name.endswith("linear.weight"):
            ours.setdefault(name.removesuffix("weight") + "bias", tensor.new_zeros(len(tensor)))
    return _options(folder, values, ours)


def write_official(config: MTPHeadConfig, tensors: Tensors, unembedding: torch.Tensor) -> Folder:
    """Fields and tensors of a version 1 directory, or of version 2 where the unembedding is the backbone's."""
    _check(config)
    fields: dict[str, Any] = {"medusa_num_heads": config.window - 1, "medusa_num_layers": config.num_blocks}
    if config.unembed == "shared":
        fields["version"] = "2"
    named = {}
    for k in range(config.window - 1):
        for j in range(config.num_blocks):
            named |= {f"{k}.{j}.linear.{part}": _block(config, tensors, k, j, part) for part in ("weight", "bias")}
        if config.unembed == "own":
            named[f"{k}.{config.num_blocks}.weight"] = tensors[f"unembeddings.heads.{k}.weight"]
    return fields, named


def write_vllm(config: MTPHeadConfig, tensors: Tensors, unembedding: torch.Tensor) -> Folder:
    """Fields and tensors of a directory that vLLM serves; biases are announced, which it would else drop in silence."""
    if config.head_type == "ff":
        return _vllm_fields(config, num_hidden_layers=0), _independent_unembeddings(config, tensors, unembedding)
    _check(config)
    own = config.unembed == "own"
    fields = _vllm_fields(config, num_hidden_layers=config.num_blocks, medusa_fc_bias=True)
    if not own:
        fields["original_lm_head"] = True
    named = {} if own else {"lm_heads.0.weight": unembedding}
    for k in range(config.window - 1):
        for j in range(config.num_blocks):
            for part in ("weight", "bias"):
                named[f"blocks.{k}.layers.{j}.{part}"] = _block(config, tensors, k, j, part)
        if own:
            named[f"lm_heads.{k}.weight"] = tensors[f"unembeddings.heads.{k}.weight"]
    return fields, named


def _vllm_fields(config: MTPHeadConfig, **values: Any) -> dict[str, Any]:
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.vocab_size,
        "num_heads": config.window - 1,
        "max_paths": 64,
        "topk": 10,
        **values,
    }


def _independent_unembeddings(config: MTPHeadConfig, tensors: Tensors, unembedding: torch.Tensor) -> Tensors:
    """A matrix [V, d] per head from the second token on: the rows of a full leaf, or W A_h of a shared one."""
    if config.leaf == "full":
        matrices = tensors["weight"].unflatten(0, (-1, config.vocab_size))
    else:
        matrices = torch.stack([unembedding @ matrix.T.to(unembedding) for matrix in tensors["maps"]])
    return {f"lm_heads.{h - 1}.weight": matrices[h] for h in range(1, config.window)}


def _block(config: MTPHeadConfig, tensors: Tensors, k: int, j: int, part: str) -> torch.Tensor:
    return tensors[f"blocks.{k}.{0 if config.tied_blocks else j}.linear.{part}"]


def _check(config: MTPHeadConfig) -> None:
    if config.head_type != "medusa" or config.block != "residual":
        raise ValueError(
            f"layout: Medusa's directories hold head_type='medusa' with block='residual' (and vLLM's also 'ff'), not "
            f"{config.head_type!r} with block={config.block!r}"
        )


def _renamed(folder: Path, tensors: Tensors, patterns: dict[re.Pattern[str], str]) -> Tensors:
    ours = {}
    for name, tensor in tensors.items():
        for pattern, template in patterns.items():
            if match := pattern.match(name):
                ours[template.format(*match.groups())] = tensor
                break
    refuse_unknown(folder, (name for name in tensors if not any(pattern.match(name) for pattern in patterns)))
    return ours


def _options(folder: Path, values: dict[str, Any], ours: Tensors) -> Folder:
    """The weights decide on all counts: released configs say 2 heads where there are 5."""
    places = [tuple(map(int, name.split(".")[1:3])) for name in ours if name.endswith("linear.weight")]
    if not places:
        if "unembeddings.heads.0.weight" in ours:
            raise ValueError(
                f"{folder}: heads without blocks are independent ('ff') heads written for vLLM, which lack the first "
                "one; load the directory that they were written from"
            )
        raise ValueError(f"{folder}: no Medusa heads among its tensors")
    heads, blocks = (1 + max(numbers) for numbers in zip(*places))
    unembedding = ours.get("unembeddings.heads.0.weight")
    width = next(tensor.shape[1] for name, tensor in ours.items() if name.endswith("linear.weight"))
    tied, ours = untied(ours, heads, blocks)
    options = {
        "head_type": "medusa",
        "window": heads + 1,
        "num_blocks": blocks,
        "tied_blocks": tied,
        "unembed": "shared" if unembedding is None else "own",
        "hidden_size": width,
        "vocab_size": values.get("vocab_size") if unembedding is None else len(unembedding),
        "base_model_name_or_path": values.get("base_model_name_or_path"),
    }
    return options, ours
