"""Runs of the public PTP code (mandt-lab/ptp), read and written: `train.yaml`, and checkpoints of Lightning.

What is not known here is refused by name: a field or a tensor that is ignored would make another distribution.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ...configuration.foreign_fields import FieldTable, names, refuse_unread, stated
from ...configuration.ptp import SAMPLING, PTPConfig
from ...generation.tensors.saving import whole_directory
from ...generation.tensors.tensor_files import Fields, Tensors, check_index, naming, read_yaml, renamed, unwrapped

_FILE, _LAST, _SHARES = "train.yaml", "last.ckpt", "correct_count_hist.pt"
_TARGETS = {"model": "ptp.lit.ParallelSamplingLightningModule", "model.model": "ptp.transformer.MixedTransformerModel"}
_MODEL, _LORA = "model.model", "model.model.lora_config"
_TABLE = FieldTable(
    "official",
    read={
        "": ("model", "data", "training"),
        "model": ("_target_", "model", *SAMPLING),
        _MODEL: ("_target_", "model_id", "adapter_name", "dtype", "lora_config"),
        _LORA: ("r", "lora_alpha", "use_rslora", "target_modules"),
    },
    known={
        "": ("*",),
        "model": names("optim_cfg completion_* pbar_metrics tokens_per_student_call hist_base"),
        _MODEL: names("attn_implementation cache_dir use_gradient_checkpointing reset_parameters gate_window"),
        _LORA: names("lora_dropout task_type peft_type inference_mode fan_in_fan_out megatron_core qalora_group_size"),
    },
    only={
        "shift_positions": (True,),
        "adapter_kwargs": ({}, {"num_embeddings": 3}),
        "bias": ("none",),
        "init_lora_weights": (True, False, "gaussian"),
    },
)
_PROJECTION = "uniform_embedding.projection."
_EMBEDDINGS = {
    "linear_interpolation": ("interpolate", False, ("embedding.weight", "weight")),
    "binary": ("bits", True, ("u_adapter.{part}", "{part}")),
}
"""By their names there: features, whether there is a bias, names of tensors there and here."""
_PRECISIONS = {"float32": "32-true", "bfloat16": "bf16-mixed", "float16": "16-mixed"}
"""Of a run, by the dtype of its backbone."""


class OfficialRun:
    """A run: the `options` of its student, and the `tensors` of a checkpoint in this library's names."""

    def __init__(self, folder: Path, checkpoint: str | None, ignored: Sequence[str]) -> None:
        self.folder, self.file = folder, folder / _FILE
        if not self.file.is_file():
            raise FileNotFoundError(f"{self.file} is missing: a run of the public PTP code has one")
        self.values = read_yaml(self.file)
        refuse_unread(self.file, self.values, _TABLE, ignored, "the run")
        for path, target in _TARGETS.items():
            self._one_of(f"{path}._target_", target)
        self._of_type(_LORA, dict)  # without adapters all weights are trained
        self.name = self._of_type(f"{_MODEL}.model_id", str)
        targets = self._get(f"{_LORA}.target_modules")
        self.targets = targets if targets == "all-linear" else self._of_type(f"{_LORA}.target_modules", list)
        self.dtype = self._one_of(f"{_MODEL}.dtype", *_PRECISIONS, default="float32")
        kind = self._one_of(f"{_MODEL}.adapter_name", *_EMBEDDINGS, default="linear_interpolation")
        rank, alpha = self._number(f"{_LORA}.r", int, 1, 8), self._number(f"{_LORA}.lora_alpha", float, 0, 8)
        alpha *= rank**0.5 if self._one_of(f"{_LORA}.use_rslora", True, False, default=False) else 1
        features, bias, _ = _EMBEDDINGS[kind]
        sampling = {key: self._number(f"model.{key}", type(value), 0, value) for key, value in SAMPLING.items()}
        self.options: Fields = {"features": features, "projection": "linear", "projection_bias": bias, "greedy": False}
        self.options |= {"lora_rank": rank, "lora_alpha": alpha, "sampling": sampling}
        self.options["num_slots"] = self._number("data.train_completion_len", int, 1)
        self.checkpoint = self._checkpoint(checkpoint)
        self.tensors = self._tensors(kind)
        for name, tensor in self.tensors.items():  # before a model of that rank is made
            if ".lora_A." in name and tensor.shape[:1] != (rank,):
                raise ValueError(f"{self.file}: {_LORA}.r={rank}, but {name} has the shape {tuple(tensor.shape)}")

    def backbone(self, given: PreTrainedModel | str | PathLike | None) -> PreTrainedModel:
        if isinstance(given, nn.Module):
            return given
        check_index(name := self.name if given is None else given)
        return AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, self.dtype))

    @torch.no_grad()
    def fill(self, student: nn.Module) -> None:
        """Give a student the tensors of the checkpoint, and compare its backbone with that of a whole checkpoint."""
        file, found, own = self.checkpoint, self.tensors, student.state_dict()
        backbone = {name for name in own if name.startswith("backbone.") and ".lora_" not in name}
        idle = {name for name in own if ".lora_" in name and not self._is_adapted(name)}
        is_whole = backbone & found.keys() or self._get(f"{_MODEL}.reset_parameters")
        if wrong := sorted((own.keys() - idle - (set() if is_whole else backbone)) ^ found.keys()):
            raise ValueError(f"{file}: tensors are missing, or are not in {self.file}: {', '.join(wrong[:5])}")
        for name, tensor in found.items():
            if tensor.shape != own[name].shape:
                shapes = f"{tuple(tensor.shape)}, and here {tuple(own[name].shape)}"
                raise ValueError(f"{file}: {name} has the shape {shapes}")
        for name in backbone & found.keys():
            if not own[name].is_meta and not torch.equal(own[name].to("cpu", found[name].dtype), found[name]):
                raise ValueError(f"{file}: {name} differs from that of backbone=, which is not the one of this run")
        trained = {name: tensor for name, tensor in found.items() if name not in backbone}
        for name, tensor in (trained | {name: torch.zeros(()) for name in idle if ".lora_B." in name}).items():
            own[name].copy_(tensor)

    def _tensors(self, kind: str) -> Tensors:
        state = _loaded(self.checkpoint)["state_dict"]
        names = {key: re.sub(r"^student\.", "model.", name) for key, name in unwrapped(state).items()}
        names = {name: re.sub(r"^model\.u_adapter\.", "model.u_embed.", new) for name, new in names.items()}
        if len({*names.values()}) < len(names):
            raise ValueError(f"{self.checkpoint} has a tensor under an older name (student., u_adapter) and a new one")
        return _turned(renamed({new: state[name] for name, new in names.items()}, _names(kind), self.checkpoint), kind)

    def _is_adapted(self, name: str) -> bool:
        """Return whether train.yaml gives the layer of a tensor an adapter, as peft reads a list."""
        layer = name.partition(".lora_")[0]
        return self.targets == "all-linear" or any(f".{layer}".endswith(f".{each}") for each in self.targets)

    def _checkpoint(self, name: str | None) -> Path:
        """Return the file of a name; else the best that last.ckpt records, last.ckpt, or the last one in order."""
        kept = self._get("training.ckpt_dir")
        place = Path(kept) if isinstance(kept, str) and Path(kept).is_dir() else self.folder
        found, last = sorted(place.glob("*.ckpt")), place / _LAST
        file = place / name if name else last if last in found or not found else found[-1]
        if file.is_dir():
            raise ValueError(f"{file} is a folder, as training.strategy leaves it: bring its parts into one file")
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: {place} has {[each.name for each in found]}")
        if name or file != last:
            return file
        known = _loaded(file).get("callbacks") or {}
        best = next((stated(known[key], "best_model_path") for key in known if "ModelCheckpoint" in str(key)), None)
        best = place / re.split(r"[/\\]", best)[-1] if isinstance(best, str) else place  # a path where it was trained
        return best if best.is_file() else file

    def _get(self, path: str) -> Any:
        return stated(self.values, path)

    def _fitting(self, path: str, value: Any, fits: bool, wanted: str) -> Any:
        if not fits:
            raise ValueError(f"{self.file}: {path}={value!r:.200} must be {wanted}")
        return value

    def _of_type(self, path: str, kind: type) -> Any:
        value = self._get(path)
        return self._fitting(path, value, isinstance(value, kind), f"a {kind.__name__}")

    def _one_of(self, path: str, *allowed: object, default: object = None) -> Any:
        value = default if (given := self._get(path)) is None else given
        return self._fitting(path, value, value in allowed, " or ".join(map(repr, allowed)))

    def _number(self, path: str, kind: type, least: int, default: Any = None) -> Any:
        value = default if (given := self._get(path)) is None else given
        fits = isinstance(value, (kind, int)) and not isinstance(value, bool) and least <= value < inf
        return self._fitting(path, value, fits, f"{kind.__name__} of at least {least}")


def write_run(
    folder: str | PathLike, layout: str, config: PTPConfig, state: Tensors, name: object, dtype: object
) -> None:
    """Write the adapters and the embedding of a student, for a backbone of this name and dtype, as a run."""
    if layout != "official":
        raise ValueError(f"layout={layout!r} is unknown; 'official' is that of the public PTP code")
    kinds = {(features, bias): kind for kind, (features, bias, _) in _EMBEDDINGS.items()}
    fits = {"variant": "one_hot", "projection": "linear", "greedy": False}
    if wrong := {name: value for name in fits if (value := getattr(config, name)) != fits[name]}:
        raise ValueError(f"{layout=} holds {fits}, and not {wrong}")
    if (config.features, config.projection_bias) not in kinds:
        raise ValueError(f"{layout=} has no features={config.features!r} with {config.projection_bias=}")
    if (written := str(dtype).removeprefix("torch.")) not in _PRECISIONS or not name:
        raise ValueError(f"{layout=} needs a backbone in one of {', '.join(_PRECISIONS)} that has a name_or_path")
    kind = kinds[config.features, config.projection_bias]
    model = {"_target_": _TARGETS[_MODEL], "model_id": str(name), "dtype": written, "adapter_name": kind}
    lora = {"r": config.lora_rank, "lora_alpha": config.lora_alpha, "target_modules": "all-linear"}
    sampling = {key: config.sampling[key] for key, value in SAMPLING.items() if config.sampling[key] != value}
    values = {
        "training": {"precision": _PRECISIONS[written]},
        "model": {"_target_": _TARGETS["model"], "model": model | {"lora_config": lora}, **sampling},
        "data": {"train_completion_len": config.num_slots},
    }
    tensors = {
        f"backbone.{name}" if ".lora_" in name else name: each.detach().to("cpu", torch.float32)
        for name, each in state.items()
    }
    tensors = renamed(_turned(tensors, kind), _names(kind), folder, back=True)
    # what their reader renames to the names that it has
    tensors = {name.replace("u_embed.u_adapter", "u_adapter.u_adapter"): each for name, each in tensors.items()}
    shares = torch.zeros(21, dtype=torch.float64)  # of completions with 0 .. 20 right tokens, which nobody has counted
    shares[: config.num_slots + 1] = 1
    with whole_directory(folder) as directory:
        (directory / _FILE).write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        content = {"state_dict": tensors, "epoch": 0, "global_step": 0, "pytorch-lightning_version": "2.6.0"}
        torch.save(content, directory / _LAST)
        torch.save(shares / shares.sum(), directory / _SHARES)  # after the checkpoint, or their command would count


def _loaded(file: Path) -> Fields:
    with naming(file):
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    state = loaded.get("state_dict") if isinstance(loaded, dict) else None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{file} has no state_dict of tensors by name")
    return loaded


def _names(kind: str) -> list[tuple[str, str]]:
    """Return pairs of templates of names, there and here."""
    there, here = _EMBEDDINGS[kind][2]
    return [(f"model.u_embed.{there}", _PROJECTION + here), ("model.model.base_model.model.{rest}", "backbone.{rest}")]


def _turned(tensors: Tensors, kind: str) -> Tensors:
    """Return tensors in which the anchors [3, H] of an interpolation are the weight [H, 3] of a projection, or back."""
    turned = () if kind == "binary" else (f"{_PROJECTION}weight", "model.u_embed.embedding.weight")
    return {name: each.T.contiguous() if name in turned else each for name, each in tensors.items()}
