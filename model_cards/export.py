"""Directories that serving engines read: models with modules, retrofitted backbones, and drafters that stand apart.

Names and fields are official, with copies of embeddings and head. vLLM has no code for modules of Llama, Qwen or
Mistral, and refuses tensors of layers that a backbone does not have. But it takes a drafter from a directory of its
own, and two families that it knows hold our module tensor for tensor: Hy3 (attention without biases) and MiMo (with
biases of q, k and v). docs/serving.md says which families were run in an engine, how, and why others were not.
"""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..configuration.fields import refuse
from ..configuration.mtp_families import family_of
from ..generation.backbone.wrapped_models import untyped
from ..generation.call.options import GENERATE_KWARGS
from ..generation.drafter import BaseDrafter
from ..generation.tensors.saving import whole_directory
from ..generation.tensors.tensor_files import tensor_dtypes
from ..modeling import DeepSeekMTP
from ..modeling.common.draft_vocabulary import FILE as DRAFT_VOCABULARY
from ..modeling.deepseek.main_model import has_towers
from ..training.utils import replace_file
from .vllm import OPTION

MEASURED = (
    *("deepseek_v3", "ernie4_5_moe", "exaone4_5", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_ocr", "hy_v3"),
    *("mimo", "mimo_v2_flash", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)
"""Families whose exported directories were run in vLLM 0.32.0 on CPUs: outputs and drafts were as here."""
ENGINES = {
    "vllm": (
        *(*MEASURED, "bailing_hybrid", "deepseek_v32", "glm_moe_dsa", "longcat_flash", "nemotron_h", "qwen3_5_moe"),
    ),
    "sglang": ("deepseek_v3", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "hy_v3"),
}
"""The families whose directories were compared with what each engine loads, at least."""
LAYOUTS = {"llama": "hy3", "mistral": "hy3", "qwen2": "mimo", "qwen3": "hy3"}
"""Families whose backbones vLLM serves with a module in a directory of its own, and the layout of that."""
PROPOSER = "tokenahead.model_cards.vllm.HeadProposer"
INSTALL = "pip install --no-deps PATH_OR_WHEEL (a clone of this library, or its wheel)"
_WAS_RUN = (
    "directories of this kind were run in vLLM 0.32.0 on an x86 CPU, in float32: greedy text equal, drafts as here"
)
_ON_CPUS = (
    "on CPUs vLLM 0.32 itself answers sampled requests with drafts wrongly, and greedy ones in their batch, and ends "
    f"at top_k; this library mends that where it is installed in vLLM's environment: {INSTALL}"
)
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "rms_norm_eps", "max_position_embeddings", "rope_parameters"),
)
_HY3_NAMES = {"norm.": "final_layernorm.", "block.": ""}
_MIMO_NAMES = {"enorm.": "token_layernorm.", "hnorm.": "hidden_layernorm.", "eh_proj.": "input_proj.", **_HY3_NAMES}
_HY3_FIELDS = {"num_experts": 1, "num_experts_per_tok": 1, "num_shared_experts": 0, "moe_intermediate_size": 8}
_OURS = ("num_nextn_predict_layers", "keys_to_ignore_at_inference")
"""Fields that only a model with modules has."""
_BIASED = ("q_proj", "k_proj", "v_proj")


@dataclass
class ExportReport:
    """A written directory, its engine, number of tensors and command, and differences from this library as warnings.

    `checked` says how such directories were tested; `print(report)` shows all of it.
    """

    folder: Path
    engine: str
    num_tensors: int
    command: str
    checked: str
    warnings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.folder}: {self.num_tensors} tensors for {self.engine}", f"  serve:   {self.command}"]
        return "\n".join([*lines, f"  checked: {self.checked}", *(f"  warning: {text}" for text in self.warnings)])


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
    if (reason := _not_served(model)) is not None:
        raise TypeError(f"export takes no {type(model).__name__}: {reason}")
    folder = Path(folder)
    if model.is_apart:
        return _export_drafter(model, folder, engine)
    family = family_of(model.config)
    _check_model(model, engine)
    warnings = [_ON_CPUS] if engine == "vllm" else []
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
    was_run = family.retrofit or (engine == "vllm" and model.config.model_type in MEASURED)
    checked = _WAS_RUN if was_run else f"the layout follows {engine}'s loader, which was read and not run"
    return ExportReport(folder, engine, num_tensors, command, checked, warnings)


def _not_served(model: Any) -> str | None:
    kind = type(untyped(model))
    if issubclass(kind, PreTrainedModel) and not issubclass(kind, BaseDrafter):
        return "a plain model is written by its own save_pretrained; DeepSeekMTP.from_backbone, for one, drafts for it"
    return getattr(model, "not_served", BaseDrafter.not_served)


def _export_drafter(drafter: Any, folder: Path, engine: str) -> ExportReport:
    """Write a drafter that stands apart."""
    speculative = drafter.export_to(engine, folder)
    backbone = drafter.config.base_model_name_or_path or "BACKBONE"
    num_tensors, method = len(tensor_dtypes(folder)), speculative["method"]
    if engine == "sglang":
        command = (
            f"python -m sglang.launch_server --model-path {shlex.quote(backbone)} --speculative-algorithm "
            f"{method.upper()} --speculative-draft-model-path {shlex.quote(str(folder))} "
            "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
        )
        return ExportReport(folder, engine, num_tensors, command, "SGLang's loader was read and not run")
    is_ours = method == "custom_class"  # then `HeadProposer` drafts there
    speculative = {"method": method, "model": PROPOSER if is_ours else str(folder)} | speculative
    words = ["vllm", "serve", backbone, "--speculative-config", json.dumps(speculative)]
    warnings, checked = [_ON_CPUS], _WAS_RUN
    if is_ours:
        words += ["--additional-config", json.dumps({OPTION: str(folder)})]
        warnings = [
            f"install this library in vLLM's environment, whose pin of transformers is older: {INSTALL}",
            "tensor parallelism was read in vLLM's source, and not run; vLLM calls custom_class experimental",
        ]
        if not drafter.family.is_built_in:
            warnings.append(
                f"vLLM's processes must import the module that registers head_type={drafter.config.head_type!r}: by a "
                "plugin (entry points of the group vllm.general_plugins)"
            )
        if not drafter.family.is_built_in or drafter.family.circuit is None:
            checked = "directories of this kind were not run in vLLM"
    return ExportReport(folder, engine, num_tensors, shlex.join(words), checked, warnings)


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
    """Refuse a model whose directory an engine would not load, or run wrongly."""
    model_type, count = model.config.model_type, model.num_modules
    if not count:
        raise ValueError("the model was loaded without its modules (inference_only=True); load them to export them")
    if engine == "vllm" and family_of(model.config).retrofit:
        _check_retrofit(model)
    elif model_type not in ENGINES[engine]:
        raise ValueError(
            f"no export of {model_type!r} was compared with what {engine} loads (docs/serving.md); serve the backbone "
            "alone: model.main.save_pretrained(directory)"
        )
    if count > 1 and (engine == "sglang" or model_type == "ernie4_5_moe"):
        raise ValueError(f"{engine} loads one module of {model_type!r}, and this model has {count}; train one")


def _check_retrofit(model: DeepSeekMTP) -> None:
    """Refuse a model that the layouts cannot hold."""
    config = model.config
    if config.model_type not in LAYOUTS:
        raise ValueError(
            f"vllm has no layout that holds a module of {config.model_type!r} (it has for {', '.join(LAYOUTS)}); serve "
            "the backbone alone (model.main.save_pretrained(directory)), or with heads (MTPHeads)"
        )
    if model.num_modules > 1:
        raise ValueError(f"vLLM runs one module beside a backbone, and this model has {model.num_modules}; train one")
    layout, kind, size = LAYOUTS[config.model_type], model.mtp[0].kind, _head_dim(config)
    window = getattr(config, "sliding_window", None)
    biases = {name for name, _ in model.mtp[0].block.named_parameters() if name.endswith("bias")}
    biases -= {f"self_attn.{name}.bias" for name in _BIASED if layout == "mimo"}
    is_other = layout == "mimo" and size * config.num_attention_heads != config.hidden_size
    refuse(
        [
            (config.hidden_act != "silu", f"hidden_act={config.hidden_act!r}: vLLM's layouts have 'silu'"),
            (kind == "sliding_attention", f"sliding_window={window}: vLLM's layouts attend to everything"),
            (biases, f"{min(biases, default='')}: vLLM's {layout} layout has no such bias"),
            (is_other, f"head_dim={size}: MiMo's layout has hidden_size / num_attention_heads"),
        ]
    )


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


def save_retrofit(model: DeepSeekMTP, folder: Path, **options: Any) -> None:
    """Write `folder/backbone`, which plain transformers reads, too, and `folder/draft`."""
    before = {name: vars(model.config).pop(name) for name in _OURS if name in vars(model.config)}
    try:
        model.main.save_pretrained(folder / "backbone", **options)
    finally:
        vars(model.config).update(before)
    is_hy3 = LAYOUTS[model.config.model_type] == "hy3"
    config, tensors = _hy3(model) if is_hy3 else _mimo(model)
    text = json.dumps(config | _common_fields(model), indent=2, sort_keys=True) + "\n"
    (draft := folder / "draft").mkdir(parents=True, exist_ok=True)
    (draft / "config.json").write_text(text, encoding="utf-8")
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})


def overrides(model: DeepSeekMTP) -> dict[str, int | bool]:
    """Return fields that vLLM's draft classes read from the backbone's configuration (`--hf-overrides`)."""
    return {
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": model.config.num_hidden_layers + 1,
        "qk_norm": hasattr(model.mtp[0].block.self_attn, "q_norm"),
    }


def _common_fields(model: DeepSeekMTP) -> dict[str, object]:
    config = model.config.to_dict()
    return {name: config[name] for name in _SIZES if config.get(name) is not None} | {
        "head_dim": _head_dim(model.config),
        "rope_theta": (config.get("rope_parameters") or {}).get("rope_theta", 10000.0),
        "tie_word_embeddings": False,
        "torch_dtype": str(model.dtype).removeprefix("torch."),
        **overrides(model),
    }


def _hy3(model: DeepSeekMTP) -> tuple[dict[str, object], dict[str, Tensor]]:
    config = {"architectures": ["HYV3ForCausalLM"], "model_type": "hy_v3", **_HY3_FIELDS}
    return config, _renamed(model, f"model.layers.{model.config.num_hidden_layers}.", _HY3_NAMES)


def _mimo(model: DeepSeekMTP) -> tuple[dict[str, object], dict[str, Tensor]]:
    prefix = "model.mtp_layers.0."
    tensors = _renamed(model, prefix, _MIMO_NAMES)
    projection = tensors[f"{prefix}input_proj.weight"]
    tensors[f"{prefix}input_proj.weight"] = projection.roll(model.config.hidden_size, dims=1)  # [hidden; embedding]
    for name in _BIASED:
        weight = tensors[f"{prefix}self_attn.{name}.weight"]
        tensors.setdefault(f"{prefix}self_attn.{name}.bias", weight.new_zeros(len(weight)))
    tensors["model.embed_tokens.weight"] = model.get_input_embeddings().get_parameter("weight")
    tensors["lm_head.weight"] = model.get_output_embeddings().get_parameter("weight").clone()
    return {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2"}, tensors


def _renamed(model: DeepSeekMTP, prefix: str, names: dict[str, str]) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in model.mtp[0].state_dict().items():
        part = next((ours for ours in names if name.startswith(ours)), "")
        tensors[prefix + names.get(part, "") + name.removeprefix(part)] = tensor
    return tensors


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
