"""A directory that serving engines read: official names and fields, copies of embeddings and head.

The report says for which families such directories were run in an engine, and for which its loader was read.
"""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ..configuration.mtp_families import family_of
from ..modeling import DeepSeekMTP, EagleHead, MTPHeads
from ..modeling.draft_vocabulary import FILE as DRAFT_VOCABULARY
from ..modeling.tensor_files import tensor_dtypes
from ..training.utils import replace_text
from .drafter_folders import ExportReport, check_retrofit, overrides, save_retrofit, write_drafter

MEASURED = {"vllm": ("deepseek_v3", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "hy_v3")}
"""The families whose exported directories were run in an engine (vLLM 0.32.0 on CPUs): text and drafts were as here."""
ENGINES = {
    "vllm": (
        *("bailing_hybrid", "deepseek_v3", "deepseek_v32", "ernie4_5_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite"),
        *("glm_moe_dsa", "hy_v3", "longcat_flash", "mimo_v2_flash", "nemotron_h", "qwen3_next"),
    ),
    "sglang": ("deepseek_v3", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "hy_v3"),
}
"""The families whose modules each engine has code for."""
_RUN = "run in vLLM 0.32.0 on CPUs: greedy text equal, drafts as here"
_NATIVE = """; with --compilation-config '{"custom_ops": ["none"]}', for its rotary kernel for CPUs is wrong here"""
_NOTES = {
    "deepseek_v3": _NATIVE,
    "glm4_moe_lite": _NATIVE,
    "ernie4_5_moe": " but for one in eight (k = 3): its module has rotary positions of another kind there",
}
# fields of official files that transformers' classes no longer read, but engines do
_FIELDS = {"deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}}


def export(
    model: DeepSeekMTP | MTPHeads | EagleHead,
    folder: str | PathLike,
    engine: str = "vllm",
    tokenizer: PreTrainedTokenizerBase | None = None,
    copies: bool | None = None,
    **options: Any,
) -> ExportReport:
    """Write a model as an engine reads it.

    Besides what `save_pretrained` writes, config.json has the older names of fields that transformers 5 renamed, and
    every module has its copies of embeddings and head, where official files have them. A retrofitted backbone becomes
    two directories for vLLM, `backbone` and `draft`. Heads that stand apart are written alone: independent and Medusa
    heads in vLLM's Medusa layout, circuits as they are (`HeadProposer` drafts with them there), EAGLE heads in the
    engine's.

    Args:
        model: Backbone and modules, not quantised; or a drafter that stands apart, attached.
        folder: Where to.
        engine: `"vllm"` or `"sglang"`.
        tokenizer: Saved beside it.
        copies: Whether modules repeat embeddings and head. None: as official files do. vLLM 0.32 shares the main
            model's in any case; older builds stop without copies, or draft nonsense in silence.
        **options: As for `save_pretrained`, for example `max_shard_size="5GB"`.

    Returns:
        How to serve the directory, what was checked, and warnings.

    Raises:
        ValueError: An unknown engine, a family that it cannot serve, a model without modules, or more modules than it
            loads.

    Example:
        >>> print(export(model, "served", engine="vllm", tokenizer=tokenizer))
        served: 67 tensors for vllm
          serve:   vllm serve served --speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'
          checked: ...
    """
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r} is unknown; choose 'vllm' or 'sglang'")
    if isinstance(model, (MTPHeads, EagleHead)):
        return write_drafter(model, Path(folder), engine)
    warnings = _check_model(model, engine)
    if family_of(model.config).retrofit:
        return _export_retrofit(model, Path(folder), tokenizer, warnings, **options)
    folder, before = Path(folder), model.shared_copies
    model.shared_copies = bool(family_of(model.config).copies) if copies is None else copies
    try:
        model.save_pretrained(folder, **{"remote_code": None, **options})  # an engine has its own code
        _add_fields(folder / "config.json", model.config)
    finally:
        model.shared_copies = before
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    command = _command(folder, engine, model.num_modules)
    return ExportReport(folder, engine, len(tensor_dtypes(folder)), command, warnings, [_checked(model, engine)])


def _check_model(model: DeepSeekMTP, engine: str) -> list[str]:
    model_type, count = model.config.model_type, model.num_modules
    if not count:
        raise ValueError("the model was loaded without its modules (inference_only=True); load them to export them")
    if engine == "vllm" and family_of(model.config).retrofit:
        check_retrofit(model)
    elif model_type not in ENGINES[engine]:
        raise ValueError(
            f"{engine} has no code for modules of {model_type!r} (it has for {', '.join(ENGINES[engine])}); "
            "serve the backbone alone: model.main.save_pretrained(directory)"
        )
    if engine == "sglang" and count > 1:
        raise ValueError(f"SGLang loads exactly one module of {model_type!r}, and this model has {count}; train one")
    if model_type == "ernie4_5_moe" and count > 1:
        raise ValueError(f"vLLM knows the names of ERNIE's module 0 only, and this model has {count}; train one")
    warnings = []
    if model.draft_vocabulary is not None:
        warnings.append(f"{engine} drafts the whole vocabulary: it does not read {DRAFT_VOCABULARY}")
    if count == 1:
        return warnings
    return [
        *warnings,
        f"vLLM's model runner V1 drafts with module 0 alone, again and again, and V2 with all {count} (read in its "
        "source, not run): for V1 train one module for reuse (unroll_steps)",
    ]


def _checked(model: DeepSeekMTP, engine: str) -> str:
    """Return what is known of directories of the model's family, and how."""
    family, model_type = family_of(model.config), model.config.model_type
    if model_type in MEASURED.get(engine, ()):
        return f"directories of this family were {_RUN}{_NOTES.get(model_type, '')}"
    place = "names of its tensors" if family.names else "layout"
    return f"the {place} follow {engine}'s loader, which was read and not run"


def _export_retrofit(
    model: DeepSeekMTP, folder: Path, tokenizer: PreTrainedTokenizerBase | None, warnings: list[str], **options: Any
) -> ExportReport:
    backbone, draft = save_retrofit(model, folder, **options)
    if tokenizer is not None:
        tokenizer.save_pretrained(backbone)
        tokenizer.save_pretrained(draft)
    num_tensors = len(tensor_dtypes(backbone)) + len(tensor_dtypes(draft))
    speculative = {"method": "mtp", "model": str(draft), "num_speculative_tokens": 1}
    command = (
        f"vllm serve {backbone} --hf-overrides '{json.dumps(overrides(model))}' "
        f"--speculative-config '{json.dumps(speculative)}'"
    )
    return ExportReport(folder, "vllm", num_tensors, command, warnings, [f"retrofits of this family were {_RUN}"])


def _add_fields(path: Path, own: PreTrainedConfig) -> None:
    """Add what engines read under older names."""
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = dict(config.get("rope_parameters") or {})
    theta, kind = rope.pop("rope_theta", 10000.0), rope.get("rope_type", "default")
    older = {"torch_dtype": config.get("dtype")}
    if "full_attention" not in rope:  # else every kind of layer has its own, which the older fields cannot say
        older |= {"rope_theta": theta, "rope_scaling": None if kind == "default" else rope | {"type": kind}}
    config = _FIELDS.get(own.model_type, {}) | _hy3_fields(own) | older | config
    replace_text(path, json.dumps(config, indent=2, sort_keys=True) + "\n")


def _hy3_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return what vLLM's Hy3 reads; transformers has the first one as a list, and takes the others for granted."""
    if config.model_type != "hy_v3":
        return {}
    kinds = [*config.mlp_layer_types, "sparse"]
    return {
        "first_k_dense_replace": kinds.index("sparse"),
        "qk_norm": True,
        "expert_hidden_dim": config.moe_intermediate_size,
        "route_norm": True,
    }


def _command(folder: Path, engine: str, count: int) -> str:
    if engine == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {folder} --speculative-algorithm NEXTN "
            "--speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2"
        )
    speculative = json.dumps({"method": "mtp", "num_speculative_tokens": count})
    return f"vllm serve {folder} --speculative-config '{speculative}'"
