"""Checks of a checkpoint's safetensors headers before loading, and block-scaled float8 weights.

The checks find what transformers would load wrongly without a warning: modules that are missing or not announced, and
quantised weights without scales. transformers also dequantises float8, but takes the block size from the number of
scales, which is wrong where the matrix ends within a block, and cannot save the model afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...configuration.fields import field
from ...configuration.mtp_families import MTPFamily, announced_modules, family_of, num_layers, set_modules
from ...generation.tensors.tensor_files import read_tensors, tensor_dtypes, unlisted_file, wrapped_names

SCALES = ("weight_scale_inv", "weight_scale", "scale")
"""Suffixes of the tensors that may hold a weight's scales."""
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
_BLOCK = (128, 128)


def check_checkpoint(
    name: str | PathLike, config: PreTrainedConfig, inference_only: bool = False, variant: str | None = None, **hub: Any
) -> tuple[PreTrainedConfig, bool]:
    """Check the names and dtypes of a checkpoint's tensors.

    Return the configuration to load with, and whether modules repeat the main model's embeddings and head.
    """
    family, wanted, layers = family_of(config), announced_modules(config), num_layers(config)
    dtypes = tensor_dtypes(name, variant, **hub)
    _check_scales(name, dtypes, config)
    if reason := wrapped_names(dtypes):
        raise ValueError(f"{name}: {reason}")
    if inference_only:
        return config, False
    stored = _count_stored(dtypes, family, layers)
    if not stored or stored != (stored if wanted is None else wanted):
        prefixes = [each for k in range((wanted or 0) + 1) for each in family.prefixes(layers, k)]
        if file := unlisted_file(name, lambda key: key.startswith(tuple(prefixes)) and key not in dtypes):
            raise ValueError(
                f"{name}: {file} holds tensors of modules ({prefixes[0]}*), but no index lists it: add them to the "
                "weight_map of model.safetensors.index.json"
            )
    if not stored:
        example = family.prefixes(layers, 0)[0]
        raise ValueError(f"{name}: no tensors of modules ({example}*): pass inference_only=True, or use from_backbone")
    if wanted is None:  # as in official files of some families
        config = copy.deepcopy(config)
        set_modules(config, stored)
    elif stored != wanted:
        raise ValueError(f"{name}: config.json has {family.count}={wanted}, but the checkpoint has {stored} modules")
    copies = {
        copy_: family.file_name(f"{family.stem}.layers.{layers}.{copy_}", layers, stored) for copy_ in family.copies
    }
    shared = bool(copies) and all(key in dtypes for key in copies.values())
    return _spare_projection(config, dtypes), shared


def _count_stored(names: Iterable[str], family: MTPFamily, layers: int) -> int:
    """Return the number of consecutive modules that have any tensor."""
    names, count = list(names), 0
    while (prefixes := tuple(family.prefixes(layers, count))) and any(name.startswith(prefixes) for name in names):
        count += 1
    return count


def _check_scales(name: str | PathLike, dtypes: dict[str, str], config: PreTrainedConfig) -> None:
    """Refuse float8 codes without scales: they would load as weights that are hundreds of times too large."""
    codes = [key for key, dtype in dtypes.items() if dtype.startswith(("F8_E4M3", "F8_E5M2"))]
    codes = [key for key in codes if key.endswith(".weight")]
    if codes and field(config, "quantization_config") is None:
        raise ValueError(f"{name}: {codes[0]} is stored as float8, but config.json has no quantization_config")
    stems = [key.removesuffix("weight") for key in codes]
    bare = [stem for stem in stems if not any(stem + scale in dtypes for scale in SCALES)]
    if bare:
        raise ValueError(f"{name}: {len(bare)} float8 weights lack scales, such as {bare[0]}weight_scale_inv")


def _spare_projection(config: PreTrainedConfig, dtypes: dict[str, str]) -> PreTrainedConfig:
    """Exclude `eh_proj` from transformers' FP8 quantizer where the file has it unquantised (DeepSeek's)."""
    quantization = field(config, "quantization_config")
    ends = "eh_proj.weight", ".e_proj.weight", ".h_proj.weight"
    plain = all(not dtype.startswith("F8") for key, dtype in dtypes.items() if key.endswith(ends))
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "fp8" or not plain:
        return config
    config = copy.deepcopy(config)
    spared = quantization.get("modules_to_not_convert") or ["lm_head"]  # transformers' default
    config.quantization_config = quantization | {"modules_to_not_convert": [*spared, "eh_proj"]}
    return config


def is_to_be_dequantized(config: PreTrainedConfig, requested: object = None) -> bool:
    """Return whether float8 weights are dequantised at loading: where `requested`, or without a GPU for float8."""
    if _option(field(config, "quantization_config"), "quant_method") != "fp8":
        return False
    capable = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    return not capable or bool(_option(requested, "dequantize"))


def dequantized_tensors(files: list[str], config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all tensors of safetensors files; float8 weights are multiplied by their scales and have `dtype`."""
    tensors = read_tensors(files)
    block = _option(config.quantization_config, "weight_block_size") or _BLOCK
    for key in [key for key, tensor in tensors.items() if tensor.dtype in _CODES]:
        stem = key.removesuffix("weight")
        scales = next(tensors.pop(stem + name) for name in SCALES if stem + name in tensors)
        tensors[key] = dequantize(tensors[key], scales, block).to(dtype)
    return {key: tensor for key, tensor in tensors.items() if not key.endswith("activation_scale")}


def dequantize(codes: Tensor, scales: Tensor, block: tuple[int, int] = _BLOCK) -> Tensor:
    """Return codes [M, N] times the scale of their block, in float32.

    Args:
        codes: float8.
        scales: [ceil(M / block[0]), ceil(N / block[1])], or one number; uint8 ones are exponents biased by 127.
        block: Rows and columns that share a scale; the last blocks may be smaller.
    """
    factors = (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()
    if factors.numel() == 1:
        return codes.float() * factors.reshape(())
    wanted = tuple(-(-size // step) for size, step in zip(codes.shape, block))
    if tuple(factors.shape) != wanted:
        shape, actual = tuple(codes.shape), tuple(factors.shape)
        raise ValueError(f"a float8 weight {shape} in blocks of {tuple(block)} needs scales {wanted}, not {actual}")
    for dim, step in enumerate(block):
        factors = factors.repeat_interleave(step, dim).narrow(dim, 0, codes.shape[dim])
    return codes.float() * factors


def _option(quantization: object, name: str) -> Any:
    return quantization.get(name) if isinstance(quantization, dict) else getattr(quantization, name, None)
