"""A folder that serving engines read: official names and fields, copies of embeddings and head, checked once written.

vLLM and SGLang were read and not run for this: the checks compare the folder with what their loaders ask for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..configuration.mtp_families import COUNT, family_of
from ..modeling import DeepSeekMTP
from ..modeling.deepseek.checkpoint_files import tensor_dtypes
from ..training.files import replace_text

ENGINES = {
    "vllm": ("deepseek_v3", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "hy_v3"),
    "sglang": ("deepseek_v3", "glm4_moe", "glm4_moe_lite"),
}
"""The families whose modules each engine has code for."""
_PARTS = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_COPIES = ("embed_tokens", "shared_head.head")
# fields of official files that transformers' classes no longer read, but engines do
_FIELDS = {"deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}}


@dataclass
class ExportReport:
    """What was written.

    Attributes:
        folder: Where.
        engine: For which engine.
        num_tensors: Tensors in the folder.
        command: How to serve it.
        warnings: What will not work as in this library.
    """

    folder: Path
    engine: str
    num_tensors: int
    command: str
    warnings: list[str] = field(default_factory=list)


def export(
    model: DeepSeekMTP,
    folder: str | PathLike,
    engine: str = "vllm",
    tokenizer: PreTrainedTokenizerBase | None = None,
    **options: Any,
) -> ExportReport:
    """Writes a model as an engine reads it, and checks what was written.

    Besides what `save_pretrained` writes, every module has its copies of embeddings and head (engines start without
    them, or draft nonsense in silence), and config.json has the older names of fields that transformers 5 renamed.

    Args:
        model: Backbone and modules, not quantised.
        folder: Where to.
        engine: `"vllm"` or `"sglang"`.
        tokenizer: Saved beside it.
        **options: As for `save_pretrained`, for example `max_shard_size="5GB"`.

    Returns:
        How to serve the folder, and warnings.

    Raises:
        ValueError: An unknown engine, a family that it cannot serve, a model without modules, more modules than
            SGLang loads.
        RuntimeError: The folder is not what the engine asks for.

    Example:
        >>> print(export(model, "served", engine="vllm", tokenizer=tokenizer).command)
        vllm serve served --speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'
    """
    warnings = _check_model(model, engine)
    folder, copies = Path(folder), model.shared_copies
    model.shared_copies = family_of(model.config).copies
    try:
        model.save_pretrained(folder, **options)
    finally:
        model.shared_copies = copies
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    _add_fields(folder / "config.json", model.config.model_type)
    names = set(tensor_dtypes(folder))
    if problems := _problems(folder, names, model):
        raise RuntimeError(f"{folder} is not what {engine} asks for: " + "; ".join(problems))
    return ExportReport(folder, engine, len(names), _command(folder, engine, model.num_modules), warnings)


def _check_model(model: DeepSeekMTP, engine: str) -> list[str]:
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r} is unknown; choose 'vllm' or 'sglang'")
    model_type, count = model.config.model_type, model.num_modules
    if model_type not in ENGINES[engine]:
        raise ValueError(
            f"{engine} has no code for modules of {model_type!r} (it has for {', '.join(ENGINES[engine])}); "
            "serve the folder of save_pretrained as a plain model"
        )
    if not count:
        raise ValueError("the model was loaded without its modules (inference_only=True); load them to export them")
    if engine == "sglang" and count > 1:
        raise ValueError(f"SGLang loads exactly one module of {model_type!r}, and this model has {count}; train one")
    if count == 1:
        return []
    return [
        f"vLLM will run module 0 only, again and again, and none of the other {count - 1}: train one module for reuse"
    ]


def _add_fields(path: Path, model_type: str) -> None:
    """Adds what engines read under older names."""
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = dict(config.get("rope_parameters") or {})
    theta, kind = rope.pop("rope_theta", 10000.0), rope.get("rope_type", "default")
    older = {
        "torch_dtype": config.get("dtype"),
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else rope | {"type": kind},
    }
    config = _FIELDS.get(model_type, {}) | older | config
    replace_text(path, json.dumps(config, indent=2, sort_keys=True) + "\n")


def _problems(folder: Path, names: set[str], model: DeepSeekMTP) -> list[str]:
    """What differs from an official folder, in words."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    main, layers, count = model.main, model.config.num_hidden_layers, model.num_modules
    wanted = {
        "model_type": model.config.model_type,
        "architectures": [type(main).__name__],
        "num_hidden_layers": layers,
        COUNT: count,
    }
    problems = [f"{name} is {config.get(name)!r}" for name, value in wanted.items() if config.get(name) != value]
    problems += [f"{name} is fused" for name in names if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    for k in range(count):
        lacking = sorted(_module_names(names, model, k) - names)
        problems += [f"lacks {name}" for name in lacking]
    modules = tuple(prefix for k in range(count) for prefix in family_of(model.config).prefixes(layers, k))
    known = set().union(*(_module_names(names, model, k) for k in range(count)))
    if family_of(model.config).copies:
        problems += [f"{name} is unknown" for name in sorted(names - known) if name.startswith(modules)]
    return problems


def _module_names(names: set[str], model: DeepSeekMTP, k: int) -> set[str]:
    """The tensors of module k by official pattern: its parts, its copies, and what the last layer has."""
    family, layers = family_of(model.config), model.config.num_hidden_layers
    ours = f"model.layers.{layers + k}."
    parts = _PARTS if family.norm_before_head else _PARTS[:3]
    expected = {f"{ours}{part}.weight" for part in parts + (_COPIES if family.copies else ())}
    if family.copies:  # else the block is not of the last layer's kind
        last = f"model.layers.{layers - 1}."
        expected |= {ours + name.removeprefix(last) for name in names if name.startswith(last)}
    return {family.file_name(name, layers, model.num_modules) for name in expected}


def _command(folder: Path, engine: str, count: int) -> str:
    if engine == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {folder} --speculative-algorithm NEXTN "
            "--speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2"
        )
    speculative = json.dumps({"method": "mtp", "num_speculative_tokens": count})
    return f"vllm serve {folder} --speculative-config '{speculative}'"
