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

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from ..generation.tensors.tensor_files import tensor_dtypes
from ..modeling import DeepSeekMTP, MTPHeads
from .vllm_proposer import OPTION, HeadProposer

PROPOSER = f"tokenahead.model_cards.{HeadProposer.__module__.rpartition('.')[2]}.{HeadProposer.__name__}"
RUN_AS_HERE = "run in vLLM 0.32.0 on an x86 CPU, in float32: greedy text equal, drafts as here"
_RUN = f"directories of this kind were {RUN_AS_HERE}"
INSTALL = "pip install --no-deps PATH_OR_WHEEL (a clone of this library, or its wheel)"
_READ = "SGLang's loader was read and not run"
LAYOUTS = {"llama": "hy3", "mistral": "hy3", "qwen2": "mimo", "qwen3": "hy3"}
"""Families whose backbones vLLM serves with such a directory, and its layout."""
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "rms_norm_eps", "max_position_embeddings", "rope_parameters"),
)
_MIMO_NAMES = {
    "enorm.": "token_layernorm.",
    "hnorm.": "hidden_layernorm.",
    "eh_proj.": "input_proj.",
    "norm.": "final_layernorm.",
    "block.": "",
}
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
    if engine != "vllm":
        return []
    return [
        "on CPUs vLLM 0.32 itself answers sampled requests with drafts wrongly, and greedy ones in their batch, and "
        f"ends at top_k; this library mends that where it is installed in vLLM's environment: {INSTALL}"
    ]


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
        return ExportReport(folder, engine, num_tensors, command, checked=[_READ])
    model = PROPOSER if method == "custom_class" else str(folder)
    speculative = {"method": method, "model": model} | speculative
    command = shlex.join(["vllm", "serve", backbone, "--speculative-config", json.dumps(speculative)])
    report = ExportReport(folder, engine, num_tensors, command, sampling_on_cpus(engine), [_RUN])
    if method == "custom_class":
        _add_proposer(report, drafter)
    return report


def _add_proposer(report: ExportReport, heads: MTPHeads) -> None:
    """Add to the report of heads with which `HeadProposer` drafts in vLLM how it finds them, and what to know."""
    report.command += f" --additional-config {shlex.quote(json.dumps({OPTION: str(report.folder)}))}"
    if not heads.family.is_built_in or heads.family.circuit is None:
        report.checked = ["directories of this kind were not run in vLLM"]
    report.warnings = [
        f"install this library in vLLM's environment, whose pin of transformers is older: {INSTALL}",
        "tensor parallelism was read in vLLM's source, and not run; vLLM calls custom_class experimental",
    ]
    if not heads.family.is_built_in:
        report.warnings.append(
            f"vLLM's processes must import the module that registers head_type={heads.config.head_type!r}: by a plugin "
            "(entry points of the group vllm.general_plugins)"
        )


def check_retrofit(model: DeepSeekMTP) -> None:
    """Refuse a model that the layouts cannot hold."""
    config = model.config
    if config.model_type not in LAYOUTS:
        raise ValueError(
            f"vllm has no layout that holds a module of {config.model_type!r} (it has for "
            f"{', '.join(sorted(LAYOUTS))}); serve the backbone alone (model.main.save_pretrained(directory)), or with "
            "heads (MTPHeads)"
        )
    if model.num_modules > 1:
        raise ValueError(f"vLLM runs one module beside a backbone, and this model has {model.num_modules}; train one")
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act={config.hidden_act!r}: vLLM's layouts have 'silu'")
    if model.mtp[0].kind == "sliding_attention":
        raise ValueError(f"sliding_window={config.sliding_window}: vLLM's layouts attend to everything")
    names = [name for name, _ in model.mtp[0].block.named_parameters() if name.endswith("bias")]
    known = [f"self_attn.{name}.bias" for name in _BIASED] if LAYOUTS[config.model_type] == "mimo" else []
    if others := sorted(set(names) - set(known)):
        raise ValueError(f"{others[0]}: vLLM's {LAYOUTS[config.model_type]} layout has no such bias")
    if LAYOUTS[config.model_type] == "mimo" and _head_dim(config) * config.num_attention_heads != config.hidden_size:
        raise ValueError(f"head_dim={_head_dim(config)}: MiMo's layout has hidden_size / num_attention_heads")


def save_retrofit(model: DeepSeekMTP, folder: Path, **options: Any) -> None:
    """Write `folder/backbone`, which plain transformers reads, too, and `folder/draft`."""
    backbone, draft = folder / "backbone", folder / "draft"
    before = {name: vars(model.config).pop(name) for name in _OURS if name in vars(model.config)}
    try:
        model.main.save_pretrained(backbone, **options)
    finally:
        vars(model.config).update(before)
    draft.mkdir(parents=True, exist_ok=True)
    layout = LAYOUTS[model.config.model_type]
    config, tensors = _hy3(model) if layout == "hy3" else _mimo(model)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
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


def _common(model: DeepSeekMTP) -> dict[str, object]:
    config = model.config.to_dict()
    sizes = {name: config[name] for name in _SIZES if config.get(name) is not None}
    rope = config.get("rope_parameters") or {}
    dtype = str(model.dtype).removeprefix("torch.")
    return sizes | {
        "head_dim": _head_dim(model.config),
        "rope_theta": rope.get("rope_theta", 10000.0),
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **overrides(model),
    }


def _hy3(model: DeepSeekMTP) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    prefix = f"model.layers.{model.config.num_hidden_layers}."
    config = {
        "architectures": ["HYV3ForCausalLM"],
        "model_type": "hy_v3",
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "num_shared_experts": 0,
        "moe_intermediate_size": 8,
    }
    parts = {"norm.": "final_layernorm.", "block.": ""}
    return config | _common(model), _renamed(model, prefix, parts)


def _mimo(model: DeepSeekMTP) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    prefix, module = "model.mtp_layers.0.", model.mtp[0]
    tensors = _renamed(model, prefix, _MIMO_NAMES)
    projection = tensors[f"{prefix}input_proj.weight"]
    tensors[f"{prefix}input_proj.weight"] = projection.roll(model.config.hidden_size, dims=1)  # [hidden; embedding]
    for name in _BIASED:
        weight = module.block.get_parameter(f"self_attn.{name}.weight")
        tensors.setdefault(f"{prefix}self_attn.{name}.bias", weight.new_zeros(len(weight)))
    tensors["model.embed_tokens.weight"] = model.get_input_embeddings().get_parameter("weight")
    tensors["lm_head.weight"] = model.get_output_embeddings().get_parameter("weight").clone()
    return {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2"} | _common(model), tensors


def _renamed(model: DeepSeekMTP, prefix: str, parts: dict[str, str]) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, tensor in model.mtp[0].state_dict().items():
        part = next((ours for ours in parts if name.startswith(ours)), "")
        tensors[prefix + parts.get(part, "") + name.removeprefix(part)] = tensor
    return tensors


def _head_dim(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
