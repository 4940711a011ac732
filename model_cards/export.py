"""A directory that serving engines read: official names and fields, copies of embeddings and head.

The report tells families whose directories were run in an engine from those whose loader was read.
"""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..configuration.fields import refuse
from ..configuration.mtp_families import family_of
from ..generation.call.options import GENERATE_KWARGS
from ..generation.drafter import BaseDrafter
from ..generation.tensors.saving import whole_directory
from ..generation.tensors.tensor_files import tensor_dtypes
from ..generation.tensors.wrapped_models import untyped
from ..modeling import DeepSeekMTP
from ..modeling.common.draft_vocabulary import FILE as DRAFT_VOCABULARY
from ..modeling.deepseek.main_model import has_towers
from ..training.utils import replace_file
from .drafter_folders import (
    RUN_AS_HERE,
    ExportReport,
    check_retrofit,
    overrides,
    sampling_on_cpus,
    save_retrofit,
    write_drafter,
)

_ENGINE_ONLY = {
    "longcat_flash": "it has no weights of zero experts, which engines do not take and transformers allocates",
    "mimo": "its config.json names the configuration of Qwen2, for vLLM has none of MiMo-7B",
}
"""Families whose directories are for engines alone, and why."""
MEASURED = {
    "vllm": (
        *("deepseek_v3", "ernie4_5_moe", "exaone4_5", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_ocr", "hy_v3"),
        *("mimo", "mimo_v2_flash", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    )
}
"""Families whose exported directories were run in an engine (vLLM 0.32.0 on CPUs): outputs and drafts were as here."""
ENGINES = {
    "vllm": (
        *("bailing_hybrid", "deepseek_v3", "deepseek_v32", "ernie4_5_moe", "exaone4_5", "exaone_moe", "glm4_moe"),
        *("glm4_moe_lite", "glm_moe_dsa", "glm_ocr", "hy_v3", "longcat_flash", "mimo", "mimo_v2_flash", "nemotron_h"),
        *("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    ),
    "sglang": ("deepseek_v3", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "hy_v3"),
}
"""The families whose directories were compared with what each engine loads, at least."""
_ON_GPUS = "vLLM 0.32's code for it is for GPUs, where nothing was tried; on a CPU it ends with "
_QSA = _ON_GPUS + "'Qwen4Exp QSA requires FlashAttention' (vllm/models/qwen4_exp/nvidia/qsa.py)"
_REFUSED = {
    "deepseek_v4": "transformers writes names and fields of its own (`model.layers.*.attn.norm`, layer_types), and "
    "vLLM's loader knows the official ones, `layers.*.attn.kv_norm` and compress_ratios "
    "(vllm/models/deepseek_v4/attention.py)",
    "dots3_note_text": "vLLM 0.32 knows the whole dots3_note, and no model of its text alone (vllm/models/dots3_note)",
    "glm4v_moe": "vLLM 0.32 maps Glm4vMoeForConditionalGeneration to no class for modules (vllm/config/speculative.py)",
    "glm5_next": _ON_GPUS + "'Sparse Attention is not supported on CPU' (vllm/platforms/cpu.py)",
    "hy_v4": "transformers writes the gates of its MLPs as `mlp.linear_gate`, and vLLM's loader knows `mlp.gate_proj` "
    "(vllm/models/hy_v4/nvidia/mtp.py)",
    "inkling_mm_model": "transformers writes layer_types, mlp_layer_types and num_mtp_layers, and vLLM reads "
    "local_layer_ids, dense_mlp_idx, use_embed_norm and mtp_config of the official files "
    "(vllm/models/inkling/configs.py, vllm/config/speculative.py)",
    "inkling_text": "transformers writes names of its own for the text alone (`model.layers.*.self_attn.q_proj`), and "
    "vLLM's loader knows the official ones, `model.llm.layers.*.attn.wq_du` (vllm/models/inkling/nvidia/model.py)",
    "minimax_m3_vl": _ON_GPUS + "'No Unquantized MoE backend supports the deployment configuration' "
    "(vllm/model_executor/layers/fused_moe/oracle/unquantized.py)",
    "qwen4_exp": _QSA,
    "qwen4_exp_text": _QSA,
    "step3p7": "vLLM reads fields of the configuration that came with the official files (vision_config.width, "
    "att_impl_type, ...), which transformers' classes do not have (vllm/model_executor/models/step3p{5,7}.py)",
}
"""Families whose directories vLLM could not load, or was not observed to load, and why; it has code for most."""
_NATIVE = (
    """; with --compilation-config '{"custom_ops": ["none"]}', for its rotary kernel for CPUs is wrong here, """
    """and --attention-backend CPU_MLA, "attention_backend": "CPU_MLA" in --speculative-config, in float32 with AMX"""
)
_RECURRENT = " (in bfloat16, with --no-enable-prefix-caching, which its kernels for CPUs want)"
_VISION = "; vLLM's file of it imports torchvision, of which PyPI has builds for CUDA alone"
_NOTES = {
    "deepseek_v3": _NATIVE,
    "glm4_moe_lite": _NATIVE,
    "glm_ocr": _VISION,
    "ernie4_5_moe": " but for one in twenty: its module has rotary positions of another kind there",
    "mimo_v2_flash": " where a text is shorter than sliding_window; beyond it vLLM attends to one token fewer (read)",
    "qwen3_5": _RECURRENT + _VISION,
    "qwen3_5_moe_text": _RECURRENT + _VISION,
    "qwen3_5_text": _RECURRENT + _VISION,
    "qwen3_next": _RECURRENT,
}
_SPARSE = "vLLM 0.32 has no sparse attention on CPUs (vllm/platforms/cpu.py)"
_NOT_RUN = {
    "bailing_hybrid": "the version of transformers that vLLM 0.32 pins has no configuration of it",
    "deepseek_v32": _SPARSE,
    "glm_moe_dsa": _SPARSE,
    "longcat_flash": "its routing to zero experts is kernels for GPUs in vLLM 0.32; with these replaced in PyTorch, "
    "text and drafts were as here on a CPU",
    "nemotron_h": "vLLM 0.32 has experts with is_act_and_mul=False on GPUs alone (fused_moe/config.py)",
}
"""Why families could not be run."""


def export(
    model: Any,
    folder: str | PathLike,
    engine: str = "vllm",
    tokenizer: PreTrainedTokenizerBase | None = None,
    copies: bool | None = None,
    max_shard_size: int | str | None = None,
) -> ExportReport:
    """Write a model for an engine.

    Besides what `save_pretrained` writes, config.json has the older names of fields that transformers 5 renamed, and
    every module has its copies of embeddings and head, where official files have them. A retrofitted backbone becomes
    two directories for vLLM, `backbone` and `draft`. Heads that stand apart are written alone: independent and Medusa
    heads in vLLM's Medusa layout, circuits as they are (`HeadProposer` drafts with them there), EAGLE heads in the
    engine's.

    Args:
        model: Backbone and modules, not quantised; or a drafter that stands apart, attached.
        folder: Where to.
        engine: `"vllm"` or `"sglang"`.
        tokenizer: Saved with the model; with a tower for images, the processor. None: the one in the directory or
            cached repository that the model was loaded from; without one there is a warning. Drafters that stand
            apart take none.
        copies: Whether modules repeat embeddings and head. None: as official files do. vLLM 0.32 shares the main
            model's in any case; older builds stop without copies, or draft nonsense in silence. For families whose
            files may have copies.
        max_shard_size: As for `save_pretrained`, for example `"5GB"`; for models, not for drafters that stand apart.

    Returns:
        The command that serves the directory, checks, and warnings.

    Raises:
        TypeError: Another kind of model.
        ValueError: An unknown engine, a family that it cannot serve, a model without modules, more modules than it
            loads, or an option that has no meaning for this model.

    Example:
        >>> print(export(model, "served", engine="vllm", tokenizer=tokenizer))
        served: 67 tensors for vllm
          serve:   vllm serve served --speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'
          checked: ...
    """
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r} is unknown; choose 'vllm' or 'sglang'")
    options = {"tokenizer": tokenizer, "copies": copies, "max_shard_size": max_shard_size}
    reason = getattr(model, "not_served", BaseDrafter.not_served)
    kind = type(untyped(model))
    if issubclass(kind, PreTrainedModel) and not issubclass(kind, BaseDrafter):
        reason = (
            "a plain model is written by its own save_pretrained; to draft for it, use DeepSeekMTP.from_backbone, "
            "MTPHeads.from_backbone or EagleHead.from_backbone"
        )
    if reason is not None:
        raise TypeError(f"export takes no {type(model).__name__}: {reason}")
    family = None if model.is_apart else family_of(model.config)
    reason = f"{type(model).__name__} is served with its backbone's own directory"
    if family is not None:
        options, reason = {"copies": copies}, f"files of model_type={model.config.model_type!r} have none"
    if family is None or not family.copies:
        refuse((value is not None, f"{name}={value!r} would not be read: {reason}") for name, value in options.items())
    if family is None:
        return write_drafter(model, Path(folder), engine)
    _check_model(model, engine)
    warnings, folder = _warnings(model, engine), Path(folder)
    shards = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    with whole_directory(folder, replaced=() if family.retrofit else [DRAFT_VOCABULARY]) as written:
        if family.retrofit:
            save_retrofit(model, written, **shards)
            main, command = written / "backbone", _retrofit_command(model, folder)
            num_tensors = len(tensor_dtypes(main)) + len(tensor_dtypes(written / "draft"))
        else:
            _save(model, written, bool(family.copies) if copies is None else copies, **shards)
            main, command = written, _command(folder, engine, model.num_modules)
            num_tensors = len(tensor_dtypes(main))
        _drop_options_of_generate(main / "generation_config.json")
        warnings += _save_tokenizer(model, tokenizer, main)
    return ExportReport(folder, engine, num_tensors, command, warnings, [_checked(model, engine)])


def _save(model: DeepSeekMTP, folder: Path, copies: bool, **options: Any) -> None:
    before = model.shared_copies
    model.shared_copies = copies
    try:
        # an engine has its own code
        model.save_pretrained(folder, remote_code=None, state_dict=_engine_state(model), **options)
        _add_fields(folder / "config.json", model)
    finally:
        model.shared_copies = before


def _drop_options_of_generate(path: Path) -> None:
    """Remove this library's drafting options from generation_config.json: an engine has its own."""
    if not path.is_file():
        return
    values = json.loads(path.read_text(encoding="utf-8"))
    ours = {*GENERATE_KWARGS, "use_mtp", "prompt_lookup_num_tokens"}
    others = {name: values[name] for name in values if name not in ours and "assistant" not in name}
    replace_file(path, json.dumps(others, indent=2, sort_keys=True) + "\n")


def _save_tokenizer(model: DeepSeekMTP, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> list[str]:
    """Save a tokenizer (with a tower: a processor), by default the loaded model's, and return warnings."""
    name = model.main.name_or_path
    if tokenizer is None and name:
        with suppress(OSError, ValueError, ImportError):  # no files of one, or unknown ones
            reader = AutoProcessor if has_towers(model.config) else AutoTokenizer
            tokenizer = reader.from_pretrained(name, local_files_only=True)
    if tokenizer is None:
        where = f"in {name}" if name else "was passed, and the model was not loaded from a directory"
        return [f"no tokenizer {where}: an engine does not load such a directory; pass tokenizer="]
    tokenizer.save_pretrained(folder)
    return []


def _check_model(model: DeepSeekMTP, engine: str) -> None:
    """Refuse a model whose directory an engine would not load."""
    model_type, count = model.config.model_type, model.num_modules
    if not count:
        raise ValueError("the model was loaded without its modules (inference_only=True); load them to export them")
    if engine == "vllm" and family_of(model.config).retrofit:
        check_retrofit(model)
    elif engine == "vllm" and model_type in _REFUSED:
        raise ValueError(f"vllm gets no export of {model_type!r}: {_REFUSED[model_type]}")
    elif model_type not in ENGINES[engine]:
        raise ValueError(
            f"no export of {model_type!r} was compared with what {engine} loads (those of {', '.join(ENGINES[engine])} "
            "were); serve the backbone alone: model.main.save_pretrained(directory)"
        )
    if engine == "sglang" and count > 1:
        raise ValueError(f"SGLang loads exactly one module of {model_type!r}, and this model has {count}; train one")
    if model_type == "ernie4_5_moe" and count > 1:
        raise ValueError(f"vLLM knows the names of ERNIE's module 0 only, and this model has {count}; train one")


def _warnings(model: DeepSeekMTP, engine: str) -> list[str]:
    """Return what to know of a directory that an engine loads."""
    model_type, count, warnings = model.config.model_type, model.num_modules, sampling_on_cpus(engine)
    if model.draft_vocabulary is not None:
        warnings.append(f"{engine} drafts the whole vocabulary: it does not read {DRAFT_VOCABULARY}")
    if reason := _ENGINE_ONLY.get(model_type):
        warnings.append(f"this directory is for engines ({reason}); save_pretrained writes what loads here")
    if has_towers(model.config):
        how = 'text alone (--limit-mm-per-prompt \'{"image": 0, "video": 0}\'); images were not tried'
        if model_type == "glm_ocr":
            how = "text, and with one image each, on a tiny random tower; several images and videos were not tried"
        warnings.append(f"directories of this family were tried with {how}")
    if count > 1:
        warnings += [
            f"num_speculative_tokens above {count} must be a multiple of {count}, the number of modules",
            f"vLLM's model runner V1 drafts with module 0 alone, again and again, and V2 with all {count} (read in its "
            "source, not run): for V1 train one module for reuse (unroll_steps)",
        ]
    return warnings


def _checked(model: DeepSeekMTP, engine: str) -> str:
    """Return how directories of the model's family were tested."""
    family, model_type = family_of(model.config), model.config.model_type
    if model_type in MEASURED.get(engine, ()):
        return f"directories of this family were {RUN_AS_HERE}{_NOTES.get(model_type, '')}"
    if family.retrofit:
        return f"retrofits of this family were {RUN_AS_HERE}"
    checked = "names of its tensors" if family.names else "layout"
    reason = f", because {_NOT_RUN[model_type]}" if engine == "vllm" and model_type in _NOT_RUN else ""
    return f"the {checked} follow {engine}'s loader, which was read and not run{reason}"


def _retrofit_command(model: DeepSeekMTP, folder: Path) -> str:
    speculative = {"method": "mtp", "model": str(folder / "draft"), "num_speculative_tokens": 1}
    options = ["--hf-overrides", json.dumps(overrides(model)), "--speculative-config", json.dumps(speculative)]
    return shlex.join(["vllm", "serve", str(folder / "backbone"), *options])


def _command(folder: Path, engine: str, count: int) -> str:
    if engine == "sglang":
        options = "--speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2"
        return (
            f"python -m sglang.launch_server --model-path {shlex.quote(str(folder))} --speculative-algorithm NEXTN "
            f"{options}"
        )
    speculative = json.dumps({"method": "mtp", "num_speculative_tokens": count})
    return shlex.join(["vllm", "serve", str(folder), "--speculative-config", speculative])


def _add_fields(path: Path, model: DeepSeekMTP) -> None:
    """Add to a written config.json the fields that engines read under older names."""
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = dict(config.get("rope_parameters") or {})
    theta, rope_type = rope.pop("rope_theta", 10000.0), rope.get("rope_type", "default")
    older = {"torch_dtype": config.get("dtype")}
    if "full_attention" not in rope:  # else every type of layer has its own, which the older fields cannot express
        older |= {"rope_theta": theta, "rope_scaling": None if rope_type == "default" else rope | {"type": rope_type}}
    config = _family_fields(model) | older | config
    if model.config.model_type == "mimo":
        config["model_type"] = "qwen2"
    replace_file(path, json.dumps(config, indent=2, sort_keys=True) + "\n")


def _engine_state(model: DeepSeekMTP) -> dict[str, Tensor] | None:
    """Return the tensors to write, where they are not the model's own.

    LongCat's zero experts return their input, so official files have no weights of them, while transformers allocates
    gates for them.
    """
    if model.config.model_type != "longcat_flash":
        return None
    count = model.config.n_routed_experts
    state = model.state_dict()
    return {name: state[name][:count] if name.endswith("experts.gate_up_proj") else state[name] for name in state}


def _hy3_fields(config: Any) -> dict[str, object]:
    """Return the fields of vLLM's Hy3; transformers has the first one as a list, and the others as constants."""
    return {
        "first_k_dense_replace": [*config.mlp_layer_types, "sparse"].index("sparse"),
        "qk_norm": True,
        "expert_hidden_dim": config.moe_intermediate_size,
        "route_norm": True,
    }


def _mimo_v2_fields(config: Any) -> dict[str, object]:
    """Return the official names: transformers has lists of types, and doubles the heads of sliding layers itself."""
    full, sliding = config.rope_parameters["full_attention"], config.rope_parameters["sliding_attention"]
    return {
        "hybrid_layer_pattern": [int(each == "sliding_attention") for each in config.layer_types],
        "moe_layer_freq": [int(each == "sparse") for each in config.mlp_layer_types],
        "layernorm_epsilon": config.rms_norm_eps,
        "rope_theta": full["rope_theta"],
        "partial_rotary_factor": full["partial_rotary_factor"],
        "swa_rope_theta": sliding["rope_theta"],
        "swa_num_attention_heads": config.num_attention_heads,
        "swa_num_key_value_heads": 2 * config.num_key_value_heads,
        "swa_head_dim": config.head_dim,
        "swa_v_head_dim": config.v_head_dim,
        "sliding_window_size": config.sliding_window - 1,  # without the token itself
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    }


def _family_fields(model: DeepSeekMTP) -> dict[str, object]:
    config = model.config
    match config.model_type:
        case "deepseek_v3":
            return {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
        case "longcat_flash":  # constants of transformers
            return {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"}
        case "exaone4_5":  # fields of the text, which vLLM's module reads from the whole configuration
            text = config.get_text_config()
            return {"vocab_size": text.vocab_size, "tie_word_embeddings": text.tie_word_embeddings}
        case "exaone_moe":  # vLLM would take the types of the modules from the first layers
            return {"mtp_layer_types": model.mtp.kinds}
        case "hy_v3":
            return _hy3_fields(config)
        case "mimo_v2_flash":
            return _mimo_v2_fields(config)
    return {}
