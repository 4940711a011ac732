"""Drafters that stand apart from their backbone, as engines serve them: directory, command, and what was checked."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..modeling import EagleHead, MTPHeads
from ..modeling.deepseek.checkpoint_files import tensor_dtypes
from .vllm_proposer import OPTION, HeadProposer

PROPOSER = f"tokenahead.model_cards.{HeadProposer.__module__.rpartition('.')[2]}.{HeadProposer.__name__}"
_RUN = "directories of this kind were run in vLLM 0.32.0 on CPUs: greedy text equal, drafts as here"
_READ = "SGLang's loader was read and not run"


@dataclass
class ServedFolder:
    """A directory that was written, and what there is to say of it.

    Attributes:
        num_tensors: Tensors in it.
        command: How to serve it.
        checked: What was checked, and how.
        warnings: What will not work as in this library.
    """

    num_tensors: int
    command: str
    checked: list[str]
    warnings: list[str] = field(default_factory=list)


def write_drafter(drafter: MTPHeads | EagleHead, folder: Path, engine: str) -> ServedFolder:
    """Writes a drafter as an engine reads it, and reads it back.

    Args:
        drafter: Attached, where its leaves are the backbone's.
        folder: Where to.
        engine: `"vllm"` or `"sglang"`.

    Raises:
        ValueError: Heads that the engine cannot run; the message names what it lacks.
        RuntimeError: What was read back is not what was written.
    """
    if isinstance(drafter, EagleHead):
        return _write_eagle(drafter, folder, engine)
    if engine != "vllm":
        raise ValueError(f"engine={engine!r} runs no heads of this kind; choose 'vllm'")
    config, family = drafter.config, drafter.family
    if more := family.reads_besides(config):
        raise ValueError(
            f"vllm cannot run heads of head_type={config.head_type!r}: they read {more}, and it hands over the last "
            "hidden state alone"
        )
    if any(layout.name == engine and layout.refusal(config) is None for layout in family.layouts):
        return _write_medusa(drafter, folder)
    return _write_for_proposer(drafter, folder)


def _write_medusa(heads: MTPHeads, folder: Path) -> ServedFolder:
    heads.export(folder, "vllm")
    names = set(tensor_dtypes(folder))
    config, count = json.loads((folder / "config.json").read_text(encoding="utf-8")), heads.window - 1
    blocks = config["num_hidden_layers"]
    wanted = {
        f"blocks.{k}.layers.{j}.{part}" for k in range(count) for j in range(blocks) for part in ("weight", "bias")
    }
    wanted |= {f"lm_heads.{k}.weight" for k in range(1 if config.get("original_lm_head") else count)}
    _compare(folder, names, wanted)
    checked = ["config.json and the tensors' names were read back: one head per drafted token, none unknown", _RUN]
    speculative = {"method": "medusa", "model": str(folder), "num_speculative_tokens": count}
    return ServedFolder(len(names), _command(heads, speculative), checked)


def _write_for_proposer(heads: MTPHeads, folder: Path) -> ServedFolder:
    heads.save_pretrained(folder)
    again = MTPHeads.from_pretrained(folder)
    if not all(torch.equal(tensor.cpu(), again.state_dict()[name]) for name, tensor in heads.state_dict().items()):
        raise RuntimeError(f"{folder}: its tensors differ from those of the heads")
    speculative = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": heads.window - 1}
    checked = ["the directory was read back, and its tensors are those of the heads"]
    was_run = heads.family.is_built_in and heads.family.circuit is not None
    checked.append(_RUN if was_run else "directories of this kind were not run in vLLM")
    warnings = [
        "install this library beside vLLM, whose pin of transformers is older: pip install --no-deps tokenahead",
        "tensor parallelism was read in vLLM's source, and not run; vLLM calls custom_class experimental",
    ]
    if not heads.family.is_built_in:
        warnings.append(
            f"vLLM's processes must import the module that registers head_type={heads.config.head_type!r}: by a plugin "
            "(entry points of the group vllm.general_plugins)"
        )
    options = json.dumps({OPTION: str(folder)})
    command = f"{_command(heads, speculative)} --additional-config '{options}'"
    return ServedFolder(len(tensor_dtypes(folder)), command, checked, warnings)


def _write_eagle(head: EagleHead, folder: Path, engine: str) -> ServedFolder:
    head.export(folder, layout=engine)
    again = EagleHead.from_pretrained(folder).state_dict()
    if not all(torch.equal(tensor.cpu(), again[name]) for name, tensor in head.state_dict().items() if name in again):
        raise RuntimeError(f"{folder}: its tensors differ from those of the head")
    version = head.config.version
    checked = [
        "the directory was read back, and its tensors are those of the head",
        _RUN if engine == "vllm" else _READ,
    ]
    if engine == "vllm":
        method = "eagle" if version == 1 else "eagle3"
        command = _command(head, {"method": method, "model": str(folder), "num_speculative_tokens": 3})
    else:
        command = (
            f"python -m sglang.launch_server --model-path {_backbone(head)} --speculative-algorithm "
            f"EAGLE{'' if version == 1 else '3'} --speculative-draft-model-path {folder} --speculative-num-steps 3 "
            "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
        )
    return ServedFolder(len(tensor_dtypes(folder)), command, checked)


def _compare(folder: Path, found: set[str], wanted: set[str]) -> None:
    if found != wanted:
        raise RuntimeError(f"{folder} is not what vllm asks for: {sorted(found ^ wanted)[0]}")


def _command(drafter: Any, speculative: dict[str, Any]) -> str:
    return f"vllm serve {_backbone(drafter)} --speculative-config '{json.dumps(speculative)}'"


def _backbone(drafter: Any) -> str:
    """The backbone's name, or a word that stands for its directory."""
    return drafter.config.base_model_name_or_path or "BACKBONE"
