"""Heads in directories of other tools, read and written: the layouts in the records of families, and MtPC's.

MtPC's authors save `model@N.pt` and `config.yaml`, without the backbone. The file holds a compiled circuit: sums in the
order of its compilation, leaves at the positions that `_scope_idx` says. What is not known is refused by name: a tensor
that is ignored would make another distribution.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import reduce
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from ...configuration.fields import check_counts
from ...configuration.foreign_fields import refuse_unread
from ...configuration.heads import MTPHeadConfig
from ...generation.backbone.wrapped_models import untyped
from ...generation.tensors.tensor_files import (
    Fields,
    Tensors,
    below,
    check_index,
    naming,
    read_json,
    read_yaml,
    refuse_unknown,
    unwrapped,
    write_json,
)
from .family import FAMILIES, Directory, HeadLayout
from .layer import PARAMS, DraftLayers, read_backbone
from .medusa import EMBEDDING

Heads = TypeVar("Heads", bound=PreTrainedModel)
Sum = tuple[Tensor | None, Tensor | None]
"""A layer of sums with the logits weight e + bias, [F, Ko, Ki, D] and [F, Ko, Ki]: folds, states above, below."""

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

    def __call__(self, name: str, most: int = 3) -> object:
        """Return a value, at most so many references `${a.b}` followed; None where there is none."""
        value: object = self._values
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
            if isinstance(value, str) and (reference := _REFERENCE.fullmatch(value)):
                if not most:
                    raise ValueError(f"{self.file}: {name} refers to itself, or through too many others")
                value = self(reference[1], most - 1)
        return value

    def check(self, name: str, *allowed: object) -> None:
        if (value := self(name)) is not None and value not in allowed:
            raise ValueError(f"{self.file}: {name}={value!r}, where {' or '.join(map(repr, allowed))} can be read")


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
        size = sum(value.nbytes for value in state.values() if value is not None)
        if size > self.file.stat().st_size:
            raise ValueError(f"{self.file}: its tensors have {size} bytes, more than the file holds")

    def take(self, name: str, *shape: int | None) -> Tensor:
        """Take a tensor of weights out; None in `shape` is any size."""
        if (tensor := self.tensors.pop(name, None)) is None:
            raise ValueError(f"{self.file}: {name} is missing")
        fits = len(shape) == tensor.dim() and all(size in (None, own) for size, own in zip(shape, tensor.shape))
        if not fits or tensor.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"{self.file}: {name} is {tensor.dtype} {tuple(tensor.shape)}, not a matrix {shape}")
        return tensor

    def sums(self, width: int) -> list[Sum]:
        """Take all layers of sums, in the order of the file; one of an HMM may have a bias, or be a bias alone."""
        sums = list[Sum]()
        has_bias = self.settings("circuit.model.kind") in (None, "hmm")
        is_fixed = has_bias and self.settings(_HEAD + "contextual_hmm_weights") is False
        while parts := [name for name in self.tensors if name.startswith(f"{_SUMS}{len(sums)}.")]:
            if is_fixed and len(parts) == 1:
                sums.append((None, self.take(parts[0], None, None, None)))
                continue
            weight = self.take(f"{_SUMS}{len(sums)}.{_MATRIX}", None, None, None, width)
            biases = [name for name in parts if has_bias and len(parts) == 2 and name.endswith("bias")]
            sums.append((weight, self.take(biases[0], *weight.shape[:3]) if biases else None))
        return sums

    def kind(self, window: int, rank: int, sums: list[Sum]) -> tuple[str, bool]:
        """Return the family of a circuit with these sums (`cp` of rank 1 is `ff`), and whether its steps share one."""
        root, step = (1, 1, rank), (1, rank, rank)
        known = {"cp": [[root]], "hmm": [[step] * (window - 1) + [root], [step, root]]}
        if rank == 1:
            known = {"ff": [[]]} | known
        if window & (window - 1) == 0:
            levels = ((window >> level, rank, rank) for level in range(1, window.bit_length() - 1))
            known["btree"] = [[*levels, root]]
        named, shapes = self.settings("circuit.model.kind"), [_shape(each) for each in sums]
        for kind in known if named is None else ("ff", "cp") if named == "cp" else (str(named),):
            if shapes in (choices := known.get(kind, [])):
                return kind, shapes != choices[0]
        what = f"of window {window} and rank {rank} has {known.get(str(named), 'none that is known')}"
        raise ValueError(f"{self.file}: {_SUMS}* have the shapes {shapes}; kind={named!r} {what}")

    def order(self, kind: str, window: int) -> Tensor:
        """Take the positions of the folds of the leaves; return the fold of every position, [n]."""
        if (scope := self.tensors.pop(_SCOPE, None)) is None:  # as the compiler orders them
            return torch.arange(window).flip(0) if kind == "hmm" else torch.arange(window)
        positions = scope.flatten()
        if sorted(positions.tolist()) != list(range(window)):
            raise ValueError(f"{self.file}: {_SCOPE} {positions.tolist()[:32]} is no order of {window} positions")
        return positions.argsort()

    def adapters(self) -> tuple[Fields, Tensors]:
        """Take all names of the backbone; return the options and tensors of draft layers, if there are adapters."""
        numbers, found = set[int](), dict[tuple[int, str, str], str]()
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
                first, second = (found.get((layer, path, part), f"{path}.{part}") for part in ("lora_A", "lora_B"))
                inner = self.take(first, rank, None)  # [r, in]
                rank, start = len(inner), f"{LAYERS}adapters.{layer - layers[0]}.{path.replace('.', '-')}"
                tensors[f"{start}.lora_A"], outer = inner.clone(), self.take(second, None, rank)
                tensors[f"{start}.lora_B"] = outer.clone()
        alpha = self.settings(_ADAPTOR + "lora_alpha")
        if not isinstance(alpha, int | float) or alpha <= 0:
            raise ValueError(f"{self.settings.file}: {_ADAPTOR}lora_alpha={alpha!r}: the adapters' scale is needed")
        options = {"draft_layers": len(layers), "draft_lora_rank": rank, "draft_lora_alpha": alpha}
        return options | {"backbone_config": {"num_hidden_layers": count}}, tensors  # the rest of it is not stored


def _shape(layer: Sum) -> tuple[int, ...]:
    """Return [F, Ko, Ki]."""
    weight, bias = layer
    return tuple(weight.shape[:3]) if weight is not None else () if bias is None else tuple(bias.shape)


def read_published(directory: Path) -> Directory:
    """Return the options and tensors of the heads in the last checkpoint of a directory; adapters below `LAYERS`."""
    stored = Checkpoint(directory)
    settings, (adapted, adapters) = stored.settings, stored.adapters()
    leaves = stored.take(_LEAVES, None, None, None, None)
    window, rank, vocab_size, width = leaves.shape
    sums = stored.sums(width)
    kind, homogeneous = stored.kind(window, rank, sums)
    weight = leaves[stored.order(kind, window)].reshape(-1, width)  # [n R V, D], a copy
    gamma = stored.tensors.pop(_GAMMA, None)
    refuse_unknown(stored.file, (name for name in stored.tensors if not _WIRING.fullmatch(name)))
    options: Fields = {"head_type": kind, "window": window, "hidden_size": width, "vocab_size": vocab_size} | adapted
    options["unembedding"], options["base_model_name_or_path"] = "own", settings("lm.model.from_huggingface")
    if gamma is not None and gamma.shape == (window,) and window > 1:
        options["loss_options"] = {"decay": round(float(gamma[1]), 6)}
    if kind == "ff":
        return options, {"weight": weight} | adapters
    options |= {"rank": rank, "masked_tokens": "marginalise"} | ({"homogeneous": True} if homogeneous else {})
    options["contextual"] = any(weight is not None for weight, _ in sums)
    tensors, rows, biases = {"leaf.weight": weight}, list[Tensor](), list[Tensor]()
    for layer in (sums[-1], *sums[-2::-1]):  # the root, the first step or level
        (own, bias), count = layer, prod(_shape(layer))
        rows.append(leaves.new_zeros(count, width) if own is None else own.reshape(count, width))
        biases.append(leaves.new_zeros(count) if bias is None else bias.flatten())
    if options["contextual"]:
        tensors["sum_weight"] = torch.cat(rows)
    tensors["sum_bias"] = torch.cat(biases)
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    return options, {name: tensor.to(dtype) for name, tensor in tensors.items()} | adapters


def with_backbone(directory: Path, options: Fields, backbone: PreTrainedModel | None) -> Fields:
    """Return options of draft layers with the config of their backbone, read by its recorded name without one."""
    count, name = options["backbone_config"]["num_hidden_layers"], options["base_model_name_or_path"]
    try:
        config = AutoConfig.from_pretrained(name or "") if backbone is None else backbone.config
    except (OSError, ValueError) as error:
        raise ValueError(f"{directory}: its heads adapt layers of their backbone, {name}: pass backbone=") from error
    own = config.get_text_config().to_dict()
    if own["num_hidden_layers"] != count:
        raise ValueError(f"{directory}: its backbone has {count} layers, and backbone has {own['num_hidden_layers']}")
    return options | {"backbone_config": own}


MTPC = HeadLayout(
    "mtpc",
    lambda directory, fields: any(_STEP.fullmatch(file.name) for file in directory.glob("model@*.pt")),
    read_published,
    lambda config: "it is read, and never written",
)
"""The layout of MtPC's authors, of independent heads and of circuits."""


def heads_from_official(
    kind: type[Heads], folder: Path, fields: Fields, backbone: PreTrainedModel | None, ignored: Sequence[str] = ()
) -> tuple[Heads, Tensor | None]:
    """Return heads from a directory of their authors, and the embedding that Hydra's repeat; see `from_official`."""
    raw = read_json(folder / "config.json")
    layout = published_layout(folder, raw)
    if raw.get("model_type") == MTPHeadConfig.model_type:
        raise ValueError(f"{folder} is in this library's own layout: load it with MTPHeads.from_pretrained")
    if layout is None:
        raise ValueError(f"{folder}: no known layout of heads (medusa_lm_head.*, params.json, model@N.pt, ...)")
    if layout.fields is not None:
        stored = read_json(folder / layout.fields_file)
        if "architectures" in stored and stored.get("model_type") != "medusa":  # a whole model's: others are its own
            stored = {key: value for key, value in stored.items() if key.startswith(("medusa_", "hydra_"))}
        refuse_unread(folder, stored, layout.fields, ignored)
    found, tensors = layout.read(folder)
    check_counts(folder, found, len(tensors))
    embedding, adapters = tensors.pop(EMBEDDING, None), below(tensors, LAYERS)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(LAYERS)}
    if adapters:
        found = with_backbone(folder, found, backbone)
    config = MTPHeadConfig(**(found | fields))
    what = f"{folder}: its tensors do not make {config.head_type!r} heads"
    is_circuit = FAMILIES[config.head_type].circuit is not None  # whose tensors are all there: nothing is drawn first
    with torch.device("meta") if is_circuit else nullcontext():
        heads = kind(config)
    head = heads.get_submodule("head")
    load_tensors(head, tensors, what, assign=is_circuit)
    untyped(head).to(dtype=next(iter(tensors.values())).dtype)
    if adapters:
        heads.draft_layers = layers = DraftLayers(config)
        load_tensors(layers, adapters, what)
    return heads.eval(), embedding


def load_tensors(head: nn.Module, tensors: Tensors, what: str, assign: bool = False) -> None:
    """Load all tensors of a head and no others, with `assign` as its parameters; `what` begins an error's message."""
    try:
        result = head.load_state_dict(tensors, strict=False, assign=assign)
    except RuntimeError as error:  # another shape
        raise ValueError(f"{what}: {error}") from error
    if names := [*result.missing_keys, *result.unexpected_keys]:
        raise ValueError(f"{what}: {', '.join(names[:5])}")


def backbone_from_official(folder: Path) -> PreTrainedModel:
    """See `MTPHeads.backbone_from_official`."""
    if (folder / PARAMS).is_file():
        config, tensors = read_backbone(folder)
        config.dtype = next(iter(tensors.values())).dtype
        model = untyped(LlamaForCausalLM(config)).to(dtype=config.dtype)
        model.load_state_dict(tensors)
        return model.eval()
    if not holds_backbone(folder, read_json(folder / "config.json")):
        raise ValueError(f"{folder} holds heads alone; load their backbone by its own name")
    check_index(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def export_head(
    config: MTPHeadConfig, tensors: Tensors, backbone: Callable[[], PreTrainedModel], folder: Path, layout: str
) -> None:
    """Write a head in the layout of another tool; see `MTPHeads.export`. `backbone` raises where there is none."""
    layouts = {known.name: known for known in FAMILIES[config.head_type].layouts}
    if (chosen := layouts.get(layout)) is None:
        known = ", ".join(layouts) or "none"
        raise ValueError(f"layout={layout!r} holds no head_type={config.head_type!r}; choose one of: {known}")
    unheld = [f"{name}={value}" for name in ("draft_layers", "draft_vocab_size") if (value := getattr(config, name))]
    if reason := chosen.refusal(config) or (unheld and f"it holds no {unheld[0]}"):
        raise ValueError(f"layout={layout!r}: {reason}")
    fields, named = chosen.write(config, tensors, backbone())
    named = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in named.items()}
    if chosen.fields_file == "config.json":
        fields = fields | {"base_model_name_or_path": config.base_model_name_or_path}
    write_json(folder / chosen.fields_file, fields)
    if chosen.tensors_file.endswith(".safetensors"):
        save_file(named, folder / chosen.tensors_file)
    else:
        torch.save(named, folder / chosen.tensors_file)


def engine_layout(config: MTPHeadConfig, engine: str) -> HeadLayout | None:
    """Return the layout in which an engine runs heads; None: as they are saved, by a class of its user's."""
    family = FAMILIES[config.head_type]
    reads = family.reads_besides(config)
    if engine != "vllm" or reads or config.draft_vocab_size is not None:
        what = f"head_type={config.head_type!r}, draft_vocab_size={config.draft_vocab_size}"
        besides = f", which read {reads}" if reads else ""
        raise ValueError(f"engine={engine!r} cannot run heads of {what}{besides}")
    return next((layout for layout in family.layouts if layout.name == engine and layout.refusal(config) is None), None)


def published_layout(directory: Path, fields: Fields) -> HeadLayout | None:
    """Return the layout of other tools that a directory of heads has, if any; `fields` are those of its config.json."""
    layouts = [MTPC, *(layout for family in FAMILIES.values() for layout in family.layouts)]
    return next((layout for layout in layouts if layout.recognises(directory, fields)), None)


def holds_backbone(directory: Path, fields: Fields) -> bool:
    """Return whether a directory of heads in a published layout holds a model of transformers, too."""
    return "architectures" in fields and fields.get("model_type") != "medusa" and not any(directory.glob("*_lm_head.*"))
