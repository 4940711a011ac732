"""Directories that serving engines read: models with modules, retrofitted backbones, and drafters that stand apart.

vLLM has no code for modules of Llama, Qwen or Mistral. But it takes a drafter from a directory of its own, and two
families that it knows hold our module tensor for tensor: Hy3 (attention without biases) and MiMo (with biases of q, k
and v). docs/serving.md says which families were run in an engine, how, and why others were not.
"""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase

from ..configuration.fields import refuse
from ..configuration.mtp_families import family_of
from ..generation.call.options import GENERATE_KWARGS
from ..generation.tensors.saving import whole_directory
from ..generation.tensors.tensor_files import Fields, read_json, tensor_dtypes
from ..modeling import DeepSeekMTP
from ..modeling.common.draft_vocabulary import FILE as DRAFT_VOCABULARY
from ..modeling.deepseek.modules import has_towers
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
_WAS_RUN = "directories of this kind were run in vLLM 0.32.0 on an x86 CPU: greedy text equal, drafts as here"
_WAS_READ = "the layout follows {}'s loader, which was read and not run"
_ON_CPUS = f"on CPUs vLLM 0.32 itself answers sampled requests with drafts wrongly; this library mends that: {INSTALL}"
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "rms_norm_eps", "max_position_embeddings", "rope_parameters"),
)
_HY3_NAMES = {"norm.": "final_layernorm.", "block.": ""}
_MIMO_NAMES = {"enorm.": "token_layernorm.", "hnorm.": "hidden_layernorm.", "eh_proj.": "input_proj.", **_HY3_NAMES}
_HY3_FIELDS = {"num_experts": 1, "num_experts_per_tok": 1, "num_shared_experts": 0, "moe_intermediate_size": 8}
_BIASED = ("q_proj", "k_proj", "v_proj")


@dataclass
class ExportReport:
    """A written directory, the command that serves it, how such directories were `checked`, and `warnings`."""

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
    **options: Any,
) -> ExportReport:
    """Write a model for an engine, and return the command that serves it, checks, and warnings.

    A retrofitted backbone becomes two directories for vLLM, `backbone` and `draft`. Drafters that stand apart are
    written alone (`export_to`): circuits as they are, and `HeadProposer` drafts with them there.

    Args:
        model: Backbone and modules, not quantised; or a drafter that stands apart, attached.
        folder: Where to.
        engine: `"vllm"` or `"sglang"`.
        tokenizer: Saved with a model; with a tower for images, the processor. None: the one in the directory or
            cached repository that the model was loaded from.
        copies: Whether modules repeat embeddings and head, which vLLM 0.32 shares in any case. None: as official files
            do.
        options: Further ones of a model's `save_pretrained`, for example `max_shard_size`.

    Raises:
        TypeError: Another kind of model.
        ValueError: An engine that is not known, or does not load these modules.

    Example:
        >>> print(export(model, "served", engine="vllm", tokenizer=tokenizer))
        served: 67 tensors for vllm
          serve:   vllm serve served --speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'
          checked: ...
    """
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r} is unknown; choose 'vllm' or 'sglang'")
    if (reason := getattr(model, "not_served", "no engine drafts with it; save_pretrained writes it")) is not None:
        raise TypeError(f"export takes no {type(model).__name__}: {reason}")
    folder = Path(folder)
    if model.is_apart:
        return _export_drafter(model, folder, engine)
    _check_model(model, engine)
    family, speculative = family_of(model.config), {"method": "mtp", "num_speculative_tokens": model.num_modules}
    parts = ("backbone", "draft") if family.retrofit else ("",)
    with whole_directory(folder, replaced=() if family.retrofit else [DRAFT_VOCABULARY]) as written:
        if family.retrofit:
            save_retrofit(model, written, **options)
        else:
            _save(model, written, bool(family.copies) if copies is None else copies, **options)
        if (own := written / parts[0] / "generation_config.json").is_file():  # an engine has options of its own
            ours = {*GENERATE_KWARGS, "use_mtp", "prompt_lookup_num_tokens"}
            fields = {name: value for name, value in read_json(own).items() if name not in ours}
            _write(own, {name: value for name, value in fields.items() if "assistant" not in name})
        warnings = [_ON_CPUS] * (engine == "vllm") + _save_tokenizer(model, tokenizer, written / parts[0])
        num_tensors = sum(len(tensor_dtypes(written / part)) for part in parts)
    if engine == "sglang":
        command = _sglang(folder, "NEXTN", 1)
    elif family.retrofit:
        draft = {"method": "mtp", "model": str(folder / "draft")} | speculative
        command = _vllm(folder / "backbone", hf_overrides=overrides(model), speculative_config=draft)
    else:
        command = _vllm(folder, speculative_config=speculative)
    was_run = family.retrofit or (engine == "vllm" and model.config.model_type in MEASURED)
    checked = _WAS_RUN if was_run else _WAS_READ.format(engine)
    return ExportReport(folder, engine, num_tensors, command, checked, warnings)


def _export_drafter(drafter: Any, folder: Path, engine: str) -> ExportReport:
    """Write a drafter that stands apart."""
    speculative = drafter.export_to(engine, folder)
    backbone = drafter.config.base_model_name_or_path or "BACKBONE"
    num_tensors, method = len(tensor_dtypes(folder)), speculative["method"]
    if engine == "sglang":
        command = _sglang(backbone, method.upper(), 3, folder)
        return ExportReport(folder, engine, num_tensors, command, "SGLang's loader was read and not run")
    if method != "custom_class":
        command = _vllm(backbone, speculative_config={"method": method, "model": str(folder)} | speculative)
        checked = _WAS_RUN if method in ("medusa", "eagle", "eagle3") else _WAS_READ.format(engine)
        return ExportReport(folder, engine, num_tensors, command, checked, [_ON_CPUS])
    speculative = {"method": method, "model": PROPOSER} | speculative
    command = _vllm(backbone, speculative_config=speculative, additional_config={OPTION: str(folder)})
    warnings = [f"install this library in vLLM's environment, whose pin of transformers is older: {INSTALL}"]
    if not drafter.family.is_built_in:
        module = f"the module that registers head_type={drafter.config.head_type!r}"
        warnings.append(f"vLLM's processes must import {module}: by a plugin of the group vllm.general_plugins")
    was_run = drafter.family.is_built_in and drafter.family.circuit is not None
    checked = _WAS_RUN if was_run else "directories of this kind were not run in vLLM"
    return ExportReport(folder, engine, num_tensors, command, checked, warnings)


def _vllm(served: str | Path, **options: Fields) -> str:
    pairs = ((f"--{name.replace('_', '-')}", json.dumps(value)) for name, value in options.items())
    return shlex.join(["vllm", "serve", str(served), *chain(*pairs)])


def _sglang(served: str | Path, algorithm: str, steps: int, draft: Path | None = None) -> str:
    words = ["python", "-m", "sglang.launch_server", "--model-path", str(served), "--speculative-algorithm", algorithm]
    words += [] if draft is None else ["--speculative-draft-model-path", str(draft)]
    words += ["--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1"]
    return shlex.join([*words, "--speculative-num-draft-tokens", str(steps + 1)])


def _save(model: DeepSeekMTP, folder: Path, copies: bool, **options: Any) -> None:
    state, before = None, model.shared_copies
    if model.config.model_type == "longcat_flash":  # whose zero experts have no weights in official files
        count, whole = model.config.n_routed_experts, model.state_dict().items()
        state = {name: each[:count] if name.endswith("experts.gate_up_proj") else each for name, each in whole}
    model.shared_copies = copies
    try:  # without code: an engine has its own
        model.save_pretrained(folder, remote_code=None, state_dict=state, **options)
    finally:
        model.shared_copies = before
    _add_fields(folder / "config.json", model)


def _write(path: Path, fields: Fields) -> Path:
    return replace_file(path, json.dumps(fields, indent=2, sort_keys=True) + "\n")


def _save_tokenizer(model: DeepSeekMTP, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> list[str]:
    """Save a tokenizer (with a tower: a processor), by default the loaded model's, and return warnings."""
    name = model.main.name_or_path
    if tokenizer is None and name:
        with suppress(OSError, ValueError, ImportError):  # no files of one, or unknown ones
            reader = AutoProcessor if has_towers(model.config) else AutoTokenizer
            tokenizer = reader.from_pretrained(name, local_files_only=True)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        return []
    return [f"no tokenizer in {name or 'a directory'}: an engine does not load such a model; pass tokenizer="]


def _check_model(model: DeepSeekMTP, engine: str) -> None:
    """Refuse a model whose directory an engine would not load, or run wrongly."""
    model_type, count = model.config.model_type, model.num_modules
    if not count:
        raise ValueError("the model was loaded without its modules (inference_only=True); load them to export them")
    is_retrofit = engine == "vllm" and family_of(model.config).retrofit
    if model_type not in (LAYOUTS if is_retrofit else ENGINES[engine]):
        raise ValueError(f"{engine} loads no module of {model_type!r} (docs/serving.md); serve model.main alone")
    if count > 1 and (is_retrofit or engine == "sglang" or model_type == "ernie4_5_moe"):
        raise ValueError(f"{engine} loads one module of {model_type!r}, and this model has {count}; train one")
    if not is_retrofit:
        return
    config: Any = model.config
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


def _add_fields(path: Path, model: DeepSeekMTP) -> None:
    """Add to a written config.json the fields that engines read under older names."""
    config = read_json(path)
    rope = dict(config.get("rope_parameters") or {})
    theta, rope_type = rope.pop("rope_theta", 10000.0), rope.get("rope_type", "default")
    older = {"torch_dtype": config.get("dtype")}
    if "full_attention" not in rope:  # else every type of layer has its own, which the older fields cannot express
        older |= {"rope_theta": theta, "rope_scaling": None if rope_type == "default" else rope | {"type": rope_type}}
    config = _family_fields(model) | older | config
    if model.config.model_type == "mimo":
        config["model_type"] = "qwen2"
    _write(path, config)


def _family_fields(model: DeepSeekMTP) -> dict[str, object]:
    config: Any = model.config
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
            dense = [*config.mlp_layer_types, "sparse"].index("sparse")
            width = config.moe_intermediate_size
            return {"first_k_dense_replace": dense, "qk_norm": True, "expert_hidden_dim": width, "route_norm": True}
        case "mimo_v2_flash":  # transformers has lists of types, and doubles the heads of sliding layers itself
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
    return {}


def save_retrofit(model: DeepSeekMTP, folder: Path, **options: Any) -> None:
    """Write `folder/backbone`, which plain transformers reads, too, and `folder/draft`."""
    ours = ("num_nextn_predict_layers", "keys_to_ignore_at_inference")  # fields that only a model with modules has
    before = {name: vars(model.config).pop(name) for name in ours if name in vars(model.config)}
    try:
        model.main.save_pretrained(folder / "backbone", **options)
    finally:
        vars(model.config).update(before)
    if LAYOUTS[model.config.model_type] == "hy3":
        config = {"architectures": ["HYV3ForCausalLM"], "model_type": "hy_v3", **_HY3_FIELDS}
        tensors = _renamed(model, f"model.layers.{model.config.num_hidden_layers}.", _HY3_NAMES)
    else:
        config = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2"}
        tensors = _mimo_tensors(model)
    draft = _write(folder / "draft" / "config.json", config | _common_fields(model)).parent
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


def _mimo_tensors(model: DeepSeekMTP) -> dict[str, Tensor]:
    prefix = "model.mtp_layers.0."
    tensors = _renamed(model, prefix, _MIMO_NAMES)
    projection = tensors[f"{prefix}input_proj.weight"]
    tensors[f"{prefix}input_proj.weight"] = projection.roll(model.config.hidden_size, dims=1)  # [hidden; embedding]
    for name in _BIASED:
        weight = tensors[f"{prefix}self_attn.{name}.weight"]
        tensors.setdefault(f"{prefix}self_attn.{name}.bias", weight.new_zeros(len(weight)))
    tensors["model.embed_tokens.weight"] = model.get_input_embeddings().get_parameter("weight")
    tensors["lm_head.weight"] = model.get_output_embeddings().get_parameter("weight").clone()
    return tensors


def _renamed(model: DeepSeekMTP, prefix: str, names: dict[str, str]) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in model.mtp[0].state_dict().items():
        part = next((ours for ours in names if name.startswith(ours)), "")
        tensors[prefix + names.get(part, "") + name.removeprefix(part)] = tensor
    return tensors


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
