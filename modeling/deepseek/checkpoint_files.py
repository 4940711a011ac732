"""What a checkpoint holds, read from the headers of its files: no weights are loaded.

Finds what transformers would load wrongly and in silence: modules that are not there or not announced, and quantised
weights whose scales are missing. Knows safetensors files only.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file, logging

from ...configuration.mtp_families import MTPFamily, announced_modules, family_of, num_layers, set_modules
from .float8 import SCALES

logger = logging.get_logger(__name__)

COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Tensors that official files repeat in every module: the main model's embeddings and its head."""
_EMBEDDINGS = "model.embed_tokens.weight"


@dataclass
class CheckpointFacts:
    """What is known before loading.

    Attributes:
        config: The configuration to load with.
        shared_copies: Whether the modules repeat the main model's embeddings and head.
    """

    config: PreTrainedConfig
    shared_copies: bool


def check_checkpoint(
    name: Any, config: PreTrainedConfig, inference_only: bool = False, variant: str | None = None, **hub: Any
) -> CheckpointFacts:
    """Looks at the names and dtypes of a checkpoint's tensors.

    Args:
        name: Directory or Hub repository.
        config: Its configuration.
        inference_only: The modules will not be loaded.
        variant: As for `from_pretrained`: files like `model.fp16.safetensors`.
        hub: `revision`, `token`, ... as for `from_pretrained`.

    Raises:
        ValueError: No modules, another number of them than the configuration says, float8 weights without scales, a
            damaged file.
    """
    family, wanted, layers = family_of(config), announced_modules(config), num_layers(config)
    headers = _headers(name, variant, **hub)
    dtypes = {key: dtype for key, (dtype, _) in headers.items()}
    _check_scales(name, dtypes, config)
    if inference_only:
        return CheckpointFacts(config, False)
    found = _count_stored(dtypes, family, layers)
    if not found:
        example = family.prefixes(layers, 0)[0]
        raise ValueError(
            f"{name}: the directory has no tensors of modules (names like {example}*); "
            "use inference_only=True to decode plainly, or DeepSeekMTP.from_backbone to make new modules"
        )
    if wanted is None:  # official files of some families do not say it
        config = copy.deepcopy(config)
        set_modules(config, found)
    elif found != wanted:
        raise ValueError(
            f"{name}: config.json says {family.count}={wanted}, but it holds {found} modules; correct one of them"
        )
    copies = {copy_: family.file_name(f"model.layers.{layers}.{copy_}", layers, found) for copy_ in family.copies}
    files = {key: file for key, (_, file) in headers.items()}
    for k in range(found):
        _warn_of_other_copies(name, files, family, layers, k)
    shared = bool(copies) and all(key in dtypes for key in copies.values())
    return CheckpointFacts(_spare_projection(config, dtypes), shared)


def tensor_dtypes(name: Any, **hub: Any) -> dict[str, str]:
    """Names of all tensors of a checkpoint and their dtypes as safetensors calls them (`F32`, `BF16`, `F8_E4M3`).

    Raises:
        ValueError: No safetensors files, or a damaged one.
    """
    return {key: dtype for key, (dtype, _) in _headers(name, None, **hub).items()}


def _headers(name: Any, variant: str | None, **hub: Any) -> dict[str, tuple[str, str]]:
    """Dtype and file of every tensor."""
    found = {}
    for file in weight_files(name, variant, **hub):
        try:
            with safe_open(file, framework="pt") as tensors:
                found |= {key: (tensors.get_slice(key).get_dtype(), file) for key in tensors.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{name}: a safetensors file is damaged or cut short ({error}); fetch it again") from error
    return found


def weight_files(name: Any, variant: str | None = None, **hub: Any) -> list[str]:
    """Paths of a checkpoint's safetensors files; those of a Hub repository are fetched.

    Raises:
        ValueError: There are none.
    """
    options = {"_raise_exceptions_for_missing_entries": False, **hub}
    index_name, single_name = (_with_variant(file, variant) for file in (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME))
    index = cached_file(name, index_name, **options)
    if index is not None:
        with open(index, encoding="utf-8") as file:  # noqa: PTH123
            shards = sorted(set(json.load(file)["weight_map"].values()))
        return [cached_file(name, shard, **hub) for shard in shards]
    single = cached_file(name, single_name, **options)
    if single is None:
        raise ValueError(f"{name}: neither {single_name} nor {index_name} is there")
    return [single]


def _with_variant(file: str, variant: str | None) -> str:
    """The name that transformers gives to a file of a variant: the variant goes before the last ending."""
    stem, _, ending = file.rpartition(".")
    return file if variant is None else f"{stem}.{variant}.{ending}"


def _count_stored(names: Iterable[str], family: MTPFamily, layers: int) -> int:
    """Modules, one after the other, of which there is any tensor."""
    names, count = list(names), 0
    while (prefixes := tuple(family.prefixes(layers, count))) and any(name.startswith(prefixes) for name in names):
        count += 1
    return count


def _warn_of_other_copies(name: Any, files: dict[str, str], family: MTPFamily, layers: int, k: int) -> None:
    """Says so where a module's embeddings or head are not the main model's, which is used in their place."""
    tied = "lm_head.weight" if "lm_head.weight" in files else _EMBEDDINGS
    for copy_, main in zip(COPIES, (_EMBEDDINGS, tied)):
        own = family.file_name(f"model.layers.{layers + k}.{copy_}", layers, k + 1)
        if own in files and main in files and not torch.equal(_tensor(files, own), _tensor(files, main)):
            logger.warning(f"{name}: {own} differs from {main}; the modules use {main}, and {own} is not kept.")


def _tensor(files: dict[str, str], key: str) -> torch.Tensor:
    with safe_open(files[key], framework="pt") as stored:
        return stored.get_tensor(key)


def _check_scales(name: Any, dtypes: dict[str, str], config: PreTrainedConfig) -> None:
    """Raw float8 codes look like weights, only hundreds of times too large."""
    codes = [key for key, dtype in dtypes.items() if dtype.startswith(("F8_E4M3", "F8_E5M2"))]
    codes = [key for key in codes if key.endswith(".weight")]
    if codes and getattr(config, "quantization_config", None) is None:
        raise ValueError(f"{name}: {codes[0]} is stored as float8, but config.json has no quantization_config")
    stems = [key.removesuffix("weight") for key in codes]
    bare = [stem for stem in stems if not any(stem + scale in dtypes for scale in SCALES)]
    if bare:
        raise ValueError(
            f"{name}: {len(bare)} float8 weights have no scales, for example {bare[0]}weight without "
            f"{bare[0]}weight_scale_inv; convert the checkpoint again"
        )


def _spare_projection(config: PreTrainedConfig, dtypes: dict[str, str]) -> PreTrainedConfig:
    """Tells transformers' FP8 quantizer to leave `eh_proj` alone where the file has it unquantised (DeepSeek's)."""
    quantization = getattr(config, "quantization_config", None)
    plain = all(not dtype.startswith("F8") for key, dtype in dtypes.items() if key.endswith("eh_proj.weight"))
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "fp8" or not plain:
        return config
    config = copy.deepcopy(config)
    kept = quantization.get("modules_to_not_convert") or ["lm_head"]  # what transformers spares where there is no list
    config.quantization_config = quantization | {"modules_to_not_convert": [*kept, "eh_proj"]}
    return config
