"""Drafters as engines serve them with their backbone: directory, command, and checks.

vLLM has no code for modules of Llama, Qwen or Mistral, and refuses tensors of layers that a backbone does not have. But
it takes a drafter from a directory of its own, and two families that it knows hold our module tensor for tensor: Hy3
(attention without biases) and MiMo (with biases of q, k and v).
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ..configuration.fields import refuse
from ..generation.tensors.tensor_files import tensor_dtypes
from ..modeling import DeepSeekMTP
from .vllm_proposer import OPTION, HeadProposer

PROPOSER = f"tokenahead.model_cards.{HeadProposer.__module__.rpartition('.')[2]}.{HeadProposer.__name__}"
RUN_AS_HERE = "run in vLLM 0.32.0 on an x86 CPU, in float32: greedy text equal, drafts as here"
INSTALL = "pip install --no-deps PATH_OR_WHEEL (a clone of this library, or its wheel)"
LAYOUTS = {"llama": "hy3", "mistral": "hy3", "qwen2": "mimo", "qwen3": "hy3"}
"""Families whose backbones vLLM serves with such a directory, and its layout."""
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
    warnings: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.folder}: {self.num_tensors} tensors for {self.engine}", f"  serve:   {self.command}"]
        lines += [f"  checked: {text}" for text in self.checked]
        return "\n".join(lines + [f"  warning: {text}" for text in self.warnings])


def sampling_on_cpus(engine: str) -> list[str]:
    """Return the warning that vLLM needs this library where it samples on CPUs."""
    text = (
        "on CPUs vLLM 0.32 itself answers sampled requests with drafts wrongly, and greedy ones in their batch, and "
        f"ends at top_k; this library mends that where it is installed in vLLM's environment: {INSTALL}"
    )
    return [text] if engine == "vllm" else []


def write_drafter(drafter: Any, folder: Path, engine: str) -> ExportReport:
    """Write a drafter for an engine; refuse heads that it cannot run."""
    speculative = drafter.export_to(engine, folder)
    backbone = drafter.config.base_model_name_or_path or "BACKBONE"
    num_tensors, method = len(tensor_dtypes(folder)), speculative["method"]
    if engine == "sglang":
        command = (
            f"python -m sglang.launch_server --model-path {shlex.quote(backbone)} --speculative-algorithm "
            f"{method.upper()} --speculative-draft-model-path {shlex.quote(str(folder))} "
            "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
        )
        return ExportReport(folder, engine, num_tensors, command, checked=["SGLang's loader was read and not run"])
    is_ours = method == "custom_class"  # then `HeadProposer` drafts there
    speculative = {"method": method, "model": PROPOSER if is_ours else str(folder)} | speculative
    words = ["vllm", "serve", backbone, "--speculative-config", json.dumps(speculative)]
    warnings, checked = sampling_on_cpus(engine), f"directories of this kind were {RUN_AS_HERE}"
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
    return ExportReport(folder, engine, num_tensors, shlex.join(words), warnings, [checked])


def check_retrofit(model: DeepSeekMTP) -> None:
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
