"""MtPC's published heads, as their authors save them: `model@N.pt` and `config.yaml`, without the backbone.

The file holds a compiled circuit: sums in the order of its compilation, leaves at the positions that `_scope_idx` says.
What is not known here is refused by name: a tensor that is ignored would make another distribution.
"""

from __future__ import annotations

import re
from functools import reduce
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ...generation.tensors.tensor_files import Fields, Tensors, naming, read_yaml, refuse_unknown, unwrapped
from .family import Directory, HeadLayout

LAYERS = "draft_layers."
"""Begins the names of tensors that belong to draft layers, and not to the head."""
_LEAVES, _SCOPE = "mt_head._categorical_log_probs_heads.0.head.proj", "circuit._circuit._nodes.0._scope_idx"
_SUMS, _MATRIX, _GAMMA = "mt_head._sum_weights_heads.", "head.proj", "_exp_gamma_weights"
_BACKBONE, _LAYER = "lm._lm.", re.compile(r"lm\._lm\.(?:base_model\.model\.)?model\.layers\.(\d+)\.(.+)")
_LORA = re.compile(r"(\w+\.\w+_proj)\.(lora_[AB])\.default\.weight")
_MAPS = (*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down")))
_WIRING = re.compile(r"circuit\.(_circuit\._address_book\._in_fold_idx_\d+_\d+|_(autoregressive|univariate)_mar_mask)")
_REFERENCE, _STEP = re.compile(r"\$\{([\w.]+)\}"), re.compile(r"model@(\d+)\.pt")
_HEAD, _ADAPTOR = "mt_head.hyperparameters.", "adaptor.hyperparameters."
_READABLE = {
    "circuit.model.kind": ("cp", "hmm", "btree"),
    "circuit.n_repetition": (1,),
    "circuit.model.n_repetition": (1,),
    _HEAD + "transformer_n_layer": (0,),
    _HEAD + "expander_type": ("linear",),
    _HEAD + "expander_n_layer": (1,),
    _ADAPTOR + "use_rslora": (False,),
    _ADAPTOR + "use_dora": (False,),
}
"""Values of the settings that decide what the tensors mean."""


class Settings:
    """The values of a config.yaml by dotted names; nothing where there is no such file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._values = read_yaml(file) if file.is_file() else {}
        for name, allowed in _READABLE.items():
            self.check(name, *allowed)

    def __getitem__(self, name: str) -> object:
        """Return a value, its references `${a.b}` followed; None where there is none."""
        return self._found(name, 3)

    def _found(self, name: str, most: int) -> object:
        value: object = self._values
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
            if isinstance(value, str) and (reference := _REFERENCE.fullmatch(value)):
                if not most:
                    raise ValueError(f"{self.file}: {name} refers to itself, or through too many others")
                value = self._found(reference[1], most - 1)
        return value

    def check(self, name: str, *allowed: object) -> None:
        """Refuse a value that is there, and is none of those that fit."""
        if (value := self[name]) is not None and value not in allowed:
            raise ValueError(f"{self.file}: {name}={value!r}, where {' or '.join(map(repr, allowed))} can be read")


class Sum(NamedTuple):
    """A layer of sums with the logits `weight` e + `bias`, [F, Ko, Ki]: folds, states above, states below."""

    weight: Tensor | None
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[F, Ko, Ki]."""
        present = self.bias if self.weight is None else self.weight
        return () if present is None else tuple(present.shape[:3])

    def rows(self, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return weights [F Ko Ki, D] and biases [F Ko Ki]; zeros for what is not there."""
        count = prod(self.shape)
        weight = torch.zeros(count, width, dtype=dtype) if self.weight is None else self.weight.reshape(count, width)
        return weight, torch.zeros(count, dtype=dtype) if self.bias is None else self.bias.flatten()


class Checkpoint:
    """The tensors of the last `model@N.pt` of a directory; what is read is taken out, and the rest is unknown."""

    def __init__(self, directory: Path) -> None:
        steps = {int(match[1]): file for file in directory.glob("*.pt") if (match := _STEP.fullmatch(file.name))}
        self.file, self.settings = steps[max(steps)], Settings(directory / "config.yaml")
        with naming(self.file):
            loaded = torch.load(self.file, map_location="cpu", weights_only=True, mmap=True)
        state = loaded.get("model_state_dict") if isinstance(loaded, dict) else None
        if not isinstance(state, dict) or not all(isinstance(value, Tensor | None) for value in state.values()):
            raise ValueError(f"{self.file} has no model_state_dict of tensors by name")
        names = unwrapped(map(str, state))
        self.tensors: dict[str, Tensor | None] = {names[str(name)]: value for name, value in state.items()}
        stored = [value for value in state.values() if value is not None]
        size = sum(value.nbytes for value in stored)
        if size > self.file.stat().st_size or not all(value.is_contiguous() for value in stored):
            raise ValueError(f"{self.file}: its tensors have {size} bytes, more than the file holds")

    def take(self, name: str, *shape: int | None) -> Tensor:
        """Take a tensor of weights out; None in `shape` is any size.

        Raises:
            ValueError: There is none, or one of another shape or dtype.
        """
        if (tensor := self.tensors.pop(name, None)) is None:
            raise ValueError(f"{self.file}: {name} is missing")
        fits = len(shape) == tensor.dim() and all(size in (None, own) for size, own in zip(shape, tensor.shape))
        if not fits or not tensor.numel() or tensor.dtype not in (torch.bfloat16, torch.float32):
            wanted = ", ".join("*" if size is None else str(size) for size in shape)
            raise ValueError(f"{self.file}: {name} is {tensor.dtype} {tuple(tensor.shape)}, not a matrix [{wanted}]")
        return tensor

    def sums(self, width: int) -> list[Sum]:
        """Take all layers of sums, in the order of the file."""
        parts: dict[str, list[str]] = {}
        for name in self.tensors:
            if name.startswith(_SUMS):
                index, _, part = name.removeprefix(_SUMS).partition(".")
                parts.setdefault(index, []).append(part)
        return [self._sum(f"{_SUMS}{k}.", parts.get(str(k), []), width) for k in range(len(parts))]

    def _sum(self, name: str, parts: list[str], width: int) -> Sum:
        """Take one layer; that of an HMM may have a bias (it starts near the identity), or be a bias alone."""
        is_chain = self.settings["circuit.model.kind"] in (None, "hmm")
        if is_chain and self.settings[_HEAD + "contextual_hmm_weights"] is False and len(parts) == 1:
            return Sum(None, self.take(name + parts[0], None, None, None))
        weight = self.take(name + _MATRIX, None, None, None, width)
        others = [part for part in parts if part != _MATRIX]
        if is_chain and len(others) == 1 and others[0].endswith("bias"):
            return Sum(weight, self.take(name + others[0], *weight.shape[:3]))
        for part in others:
            shape = tuple(getattr(self.tensors[name + part], "shape", ()))
            raise ValueError(f"{self.file}: {name}{part} of shape {shape} is not known in this layout")
        return Sum(weight)

    def kind(self, window: int, rank: int, sums: list[Sum]) -> tuple[str, bool]:
        """Return the family of a circuit with these sums, and whether all its steps share one.

        `cp` of one component is `ff`. Without a config.yaml, the shapes decide.
        """
        root, step, shapes = (1, 1, rank), (1, rank, rank), [each.shape for each in sums]
        known = {"cp": [[root]], "hmm": [[step] * (window - 1) + [root], [step, root]]}
        if rank == 1:
            known = {"ff": [[]]} | known
        if window & (window - 1) == 0:
            levels = ((window >> level, rank, rank) for level in range(1, window.bit_length() - 1))
            known["btree"] = [[*levels, root]]
        named = self.settings["circuit.model.kind"]
        for kind in known if named is None else ("ff", "cp") if named == "cp" else (str(named),):
            if shapes in (choices := known.get(kind, [])):
                return kind, shapes != choices[0]
        wanted = known[str(named)][0] if named in known else None
        if wanted is not None and len(shapes) < len(wanted) and shapes == wanted[: len(shapes)]:
            raise ValueError(f"{self.file}: {_SUMS}{len(shapes)}.{_MATRIX} is missing")
        what = f"kind={named!r} of window {window} and rank {rank}"
        raise ValueError(f"{self.file}: {_SUMS}* have the shapes {shapes}; {what} has {wanted or 'none that is known'}")

    def order(self, kind: str, window: int) -> Tensor:
        """Take the positions of the folds of the leaves; return the fold of every position, [n]."""
        if (scope := self.tensors.pop(_SCOPE, None)) is None:  # as the compiler orders them
            return torch.arange(window).flip(0) if kind == "hmm" else torch.arange(window)
        positions = scope.flatten()
        if scope.shape != (window, 1) or sorted(positions.tolist()) != list(range(window)):
            raise ValueError(f"{self.file}: {_SCOPE} {positions.tolist()[:32]} is no order of {window} positions")
        return positions.argsort()

    def adapters(self) -> tuple[Fields, Tensors]:
        """Take all names of the backbone; return the options and tensors of draft layers, if there are adapters."""
        numbers, found = set(), {}
        for name in [name for name in self.tensors if name.startswith(_BACKBONE)]:
            layer = _LAYER.fullmatch(name)
            numbers |= {int(layer[1])} if layer else set()
            if self.tensors[name] is None:  # frozen
                del self.tensors[name]
            elif layer and (adapter := _LORA.fullmatch(layer[2])):
                found[int(layer[1]), adapter[1], adapter[2]] = name
        if not found:
            self.settings.check(_ADAPTOR + "r", None)
            return {}, {}
        layers, count = sorted({layer for layer, *_ in found}), max(numbers) + 1
        if layers != list(range(count - len(layers), count)):
            raise ValueError(f"{self.file}: LoRA on layers {layers} of {count}: only the last ones can have adapters")
        tensors, rank = {}, None
        for layer in layers:
            for path in _MAPS:
                names = [
                    found.get((layer, path, part), f"{path}.{part} of layer {layer}") for part in ("lora_A", "lora_B")
                ]
                inner = self.take(names[0], rank, None)  # [r, in]
                rank, start = len(inner), f"{LAYERS}adapters.{layer - layers[0]}.{path.replace('.', '-')}"
                tensors |= {
                    f"{start}.lora_A": inner.clone(),
                    f"{start}.lora_B": self.take(names[1], None, rank).clone(),
                }
        alpha = self.settings[_ADAPTOR + "lora_alpha"]
        if not isinstance(alpha, int | float) or alpha <= 0:
            raise ValueError(
                f"{self.settings.file}: {_ADAPTOR}lora_alpha={alpha!r}: the scale of the adapters is needed"
            )
        self.settings.check(_ADAPTOR + "r", rank)
        self.settings.check(_ADAPTOR + "layers_to_transform", layers, *layers[1:] or layers)
        options = {"draft_layers": len(layers), "draft_lora_rank": rank, "draft_lora_alpha": alpha}
        return options | {"backbone_config": {"num_hidden_layers": count}}, tensors


def read_published(directory: Path) -> Directory:
    """Return the options and tensors of the heads in the last checkpoint of a directory; adapters below `LAYERS`.

    Of draft layers, `backbone_config` holds the number of the backbone's layers alone.

    Raises:
        ValueError: A tensor, a shape or a setting that is not known, by its name.
    """
    stored = Checkpoint(directory)
    settings, (adapted, adapters) = stored.settings, stored.adapters()
    leaves = stored.take(_LEAVES, None, None, None, None)
    window, rank, vocab_size, width = leaves.shape
    if window < 2:
        raise ValueError(f"{stored.file}: {_LEAVES} has {window} position, and drafts none")
    sums = stored.sums(width)
    kind, homogeneous = stored.kind(window, rank, sums)
    weight = leaves[stored.order(kind, window)].reshape(-1, width)  # [n R V, D], a copy
    gamma = stored.tensors.pop(_GAMMA, None)
    refuse_unknown(stored.file, (name for name in stored.tensors if not _WIRING.fullmatch(name)))
    sizes = {"n_token": window, "n_component": rank}
    for name, size in sizes.items():
        settings.check(f"circuit.{name}", size)
        settings.check(f"circuit.model.{name}", size)
    settings.check("data.vocab_size", vocab_size)
    options: Fields = {"head_type": kind, "window": window, "hidden_size": width, "vocab_size": vocab_size} | adapted
    options["unembedding"], options["base_model_name_or_path"] = "own", settings["lm.model.from_huggingface"]
    if gamma is not None and gamma.shape == (window,) and window > 1:
        options["loss_options"] = {"decay": round(float(gamma[1]), 6)}
    if kind == "ff":
        return options, {"weight": weight} | adapters
    options |= {"rank": rank, "masked_tokens": "marginalise"} | ({"homogeneous": True} if homogeneous else {})
    options["contextual"] = any(each.weight is not None for each in sums)
    rows = [each.rows(width, leaves.dtype) for each in (sums[-1], *sums[-2::-1])]  # the root, the first step or level
    tensors = {"leaf.weight": weight, "sum_weight": torch.cat([row for row, _ in rows])}
    tensors["sum_bias"] = torch.cat([bias for _, bias in rows])
    if not options["contextual"]:
        del tensors["sum_weight"]
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    return options, {name: tensor.to(dtype) for name, tensor in tensors.items()} | adapters


def with_backbone(directory: Path, options: Fields, backbone: PreTrainedModel | None) -> Fields:
    """Return options of draft layers with the configuration of the backbone whose layers they adapt.

    Without `backbone` that is read by the name in `config.yaml`.

    Raises:
        ValueError: No backbone, or one with another number of layers.
    """
    count = options["backbone_config"]["num_hidden_layers"]
    config = _recorded_config(directory, options) if backbone is None else backbone.config
    own = config.get_text_config().to_dict()
    if own["model_type"] == "evabyte":  # which runs draft layers itself
        raise ValueError(
            f"{directory}: its heads adapt layers of EvaByte: EvaByteForMTPC.from_official(directory, backbone) puts "
            "them into the model, whose save_pretrained writes a model that drafts for itself"
        )
    if own["num_hidden_layers"] != count:
        raise ValueError(f"{directory}: its backbone has {count} layers, and backbone has {own['num_hidden_layers']}")
    return options | {"backbone_config": own}


def _recorded_config(directory: Path, options: Fields) -> PreTrainedConfig:
    name = options["base_model_name_or_path"]
    try:
        return AutoConfig.from_pretrained(name or "", trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{directory}: its heads read adapted layers of their backbone ({name}), whose config cannot be read:"
            " pass backbone=, the model"
        ) from error


MTPC = HeadLayout(
    "mtpc",
    lambda directory, fields: any(_STEP.fullmatch(file.name) for file in directory.glob("model@*.pt")),
    read_published,
    lambda config: "it is read, and never written",
)
"""The layout of MtPC's authors, of independent heads and of circuits."""
