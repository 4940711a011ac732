"""Conversion of checkpoints of the public PTP code: configuration and tensor names."""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path

from torch import Tensor
from transformers import AutoConfig

from ...configuration.fields import check_counts
from ...configuration.ptp import PTPConfig
from ...generation.tensors.tensor_files import Fields, read_json, read_tensors, warn_of_numbers

_EMBEDDINGS = {"binary": ("bits", True), "linear_interpolation": ("interpolate", False)}
_PREFIXES = re.compile(r"^(module\.|base_model\.model\.|student\.|backbone\.)+")


def read_official(directory: str | PathLike) -> tuple[PTPConfig, dict[str, Tensor]]:
    """Return the configuration and the tensors, in this library's names."""
    directory = Path(directory)
    values = read_json(directory / "config.json")
    found = _tensors(directory)
    config = _config(directory, values)
    check_counts(directory, config.to_dict(), len(found))
    tensors = dict(_renamed(_PREFIXES.sub("", name), tensor) for name, tensor in found.items())
    for layer in [name.split(".lora_")[0] for name in tensors if ".lora_A." in name]:
        for part in ("weight", "bias"):
            if (tensor := tensors.pop(f"{layer}.{part}", None)) is not None:
                tensors[f"{layer}.base_layer.{part}"] = tensor
    warn_of_numbers(directory, tensors.items())
    return config, tensors


def _config(directory: Path, values: Fields) -> PTPConfig:
    kind = values["aux_embedding"]
    if kind not in _EMBEDDINGS:
        raise ValueError(f"{directory}: aux_embedding={kind!r} is not supported; {', '.join(_EMBEDDINGS)} are")
    features, bias = _EMBEDDINGS[kind]
    llama = dict(values["llama"])
    rope = {"rope_theta": llama.pop("rope_theta"), "rope_type": llama.pop("rope_type", "default")}
    return PTPConfig(
        backbone_config=AutoConfig.for_model("llama", **llama, rope_parameters=rope),
        variant="one_hot",
        features=features,
        projection_bias=bias,
        num_slots=values.get("completion_length", 16),
        lora_rank=values["lora"]["r"],
        lora_alpha=values["lora"]["alpha"],
        sampling=values["sampling"],
    )


def _tensors(directory: Path) -> dict[str, Tensor]:
    """Return all tensors of a directory; pickles are read with `weights_only=True`."""
    for patterns in (["*.safetensors"], ["weights.npz"], ["*.ckpt", "*.pt", "*.bin"]):
        if files := sorted(file for pattern in patterns for file in directory.glob(pattern)):
            return read_tensors(files[:1])
    raise FileNotFoundError(f"{directory}: no weights (*.safetensors, weights.npz, *.ckpt, *.pt, *.bin)")


def _renamed(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    if name.startswith("u_embed."):
        own = name.rsplit(".", 1)
        if own[0].endswith("embedding"):  # anchors [3, H]
            return "uniform_embedding.projection.weight", tensor.T.contiguous()
        return f"uniform_embedding.projection.{own[1]}", tensor
    name = re.sub(r"\.(lora_[AB])\.(default\.)?weight$", r".\1.default.weight", name.replace(".base_layer.", "."))
    return f"backbone.{name}", tensor
