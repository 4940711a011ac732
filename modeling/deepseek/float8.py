"""Block-scaled float8 checkpoints (DeepSeek-V3): weights times scales, where no device computes with the codes.

transformers does this too, but takes the block size from the number of scales, which is wrong where a block is cut off
by the end of the matrix, and cannot save afterwards. Knows neither models nor modules.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig

SCALES = ("weight_scale_inv", "weight_scale", "scale")
"""Names that a weight's scales may have beside it."""
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
_BLOCK = (128, 128)


def is_float8(config: PreTrainedConfig) -> bool:
    """Whether a configuration announces block-scaled float8 weights."""
    return _option(getattr(config, "quantization_config", None), "quant_method") == "fp8"


def is_to_be_dequantized(config: PreTrainedConfig, asked: Any = None) -> bool:
    """Whether the weights are to be multiplied out at once: on demand, or where no GPU computes with float8.

    Args:
        config: The model's configuration.
        asked: The `quantization_config` passed to `from_pretrained`, if any.
    """
    if not is_float8(config):
        return False
    capable = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    return not capable or bool(_option(asked, "dequantize"))


def dequantized_tensors(files: list[str], config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, without scales.

    Args:
        files: Its safetensors files.
        config: Its configuration, with `weight_block_size`.
        dtype: Of the weights that were float8; the others stay as they are.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as stored:
            tensors |= {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
    block = _option(config.quantization_config, "weight_block_size") or _BLOCK
    for key in [key for key, tensor in tensors.items() if tensor.dtype in _CODES]:
        stem = key.removesuffix("weight")
        scales = next(tensors.pop(stem + name) for name in SCALES if stem + name in tensors)
        tensors[key] = dequantize(tensors[key], scales, block).to(dtype)
    return {key: tensor for key, tensor in tensors.items() if not key.endswith("activation_scale")}


def dequantize(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] = _BLOCK) -> torch.Tensor:
    """Codes [M, N] times the scale of their block, in float32.

    Args:
        codes: float8.
        scales: [ceil(M / block[0]), ceil(N / block[1])], or one number; uint8 ones are exponents biased by 127.
        block: Rows and columns that share a scale; the last blocks may be cut off.

    Raises:
        ValueError: Scales that do not fit.
    """
    factors = (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()
    if factors.numel() == 1:
        return codes.float() * factors.reshape(())
    wanted = tuple(-(-size // step) for size, step in zip(codes.shape, block))
    if tuple(factors.shape) != wanted:
        shape, found = tuple(codes.shape), tuple(factors.shape)
        raise ValueError(f"a float8 weight {shape} in blocks of {tuple(block)} needs scales {wanted}, not {found}")
    for dim, step in enumerate(block):
        factors = factors.repeat_interleave(step, dim).narrow(dim, 0, codes.shape[dim])
    return codes.float() * factors


def _option(quantization: Any, name: str) -> Any:
    return quantization.get(name) if isinstance(quantization, dict) else getattr(quantization, name, None)
