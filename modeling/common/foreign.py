"""Drafters with layers of their own: what their configurations take over of a backbone, and layouts of other libraries.

Their checkpoints are read in any layout, and saved in their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from inspect import get_annotations
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from ...configuration.fields import check_options, field
from ...configuration.foreign_fields import ROPE, agreed
from ...generation.attach import adopt_fields
from ...generation.backbone.wrapped_models import Kwargs, input_embeddings, own_cache_of, untyped
from ...generation.tensors.saving import reads_whole, whole_directory
from ...generation.tensors.tensor_files import (
    HUB_OPTIONS,
    Fields,
    hub_options,
    optional_file,
    read_json,
    refuse_unknown,
    write_json,
)
from .backbone_parts import output_embeddings, weight_of
from .draft_vocabulary import check_offsets
from .learning import DraftModel
from .loading import stored_kinds

Config = TypeVar("Config", bound=PreTrainedConfig)
_FROM_BACKBONE = ("target_hidden_size", "num_target_layers", "base_model_name_or_path", "base_model_type")
_QUANTIZATION = "hf_quant_config"
"""The file (.json) in which Model-Optimizer says how weights are packed."""
Stored = tuple[PreTrainedConfig, dict[str, Tensor] | None]
"""The configuration of a stored drafter, and its tensors where they are not in this library's layout."""


class ForeignLayoutsMixin(DraftModel):
    """Adds loading of other layouts by `load_stored`, and saving in the one that `config.layout` names."""

    config_class: ClassVar[type[PreTrainedConfig]]
    lm_head: nn.Linear
    embed_tokens: nn.Embedding
    read_foreign: Callable[..., Stored]
    """From name, config.json, options of the hub, fields in place of the checkpoint's, and fields to pass over."""
    in_layout: Callable[..., tuple[Fields, dict[str, Tensor]]]
    """From a layout and all tensors of the drafter, config.json and tensors of a checkpoint in it."""
    _supports_sdpa = True
    drafts_trees, attends, not_served = True, True, None

    @property
    def loss_options(self) -> Any:
        return self.config.loss_options

    def check_backbone(self, backbone: PreTrainedModel) -> None:
        check_kind(backbone)
        super().check_backbone(backbone)
        if own_cache_of(backbone):
            raise ValueError(f"backbone: the cache of a {type(backbone).__name__} is its own, which no drafter follows")

    def on_attach(self, backbone: PreTrainedModel) -> None:
        """Follow the backbone's dtype and device, and take over its special ids."""
        if backbone.device.type != "meta":  # not offloaded
            dtype = backbone.dtype if backbone.dtype.is_floating_point else None
            untyped(self).to(backbone.device, dtype)
        adopt_fields(self.config, backbone)

    def _begun(self, backbone: PreTrainedModel, draft_ids: Tensor | None) -> Self:
        """Return a new drafter attached to a backbone, with copies of its tables where it has its own."""
        if draft_ids is not None:
            self.set_draft_ids(draft_ids)
        self.attach(backbone)
        with torch.no_grad():
            if "lm_head" in self._modules:
                unembedding = weight_of(output_embeddings(backbone), self.lm_head.weight)
                self.lm_head.weight.copy_(unembedding[self.draft_ids.to(unembedding.device)])
            table = input_embeddings(backbone).weight
            if "embed_tokens" in self._modules and self.embed_tokens.weight.shape == table.shape:
                self.embed_tokens.weight.copy_(table)
        return self

    def export(self, folder: str | PathLike, layout: str) -> None:
        """Write a checkpoint in another layout, one of those of `EagleHeadConfig` or of `BlockDrafterConfig`."""
        with whole_directory(folder) as directory:
            self._write_layout(directory, layout, self.state_dict())

    def _write_layout(self, directory: Path, layout: str, state: dict[str, Tensor]) -> None:
        fields, tensors = self.in_layout(layout, state)
        copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
        save_file(copies, directory / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
        write_json(directory / CONFIG_NAME, fields)

    @classmethod
    def check_fields(cls, name: str | PathLike, raw: Fields, changed: Fields) -> None:
        """Refuse fields in the place of those of a checkpoint in this library's layout."""

    @classmethod
    def load_stored(cls, name: str | PathLike, fields: Fields, kwargs: Kwargs) -> Any:
        """Return the drafter in a directory or repository; `kwargs` are those of `from_pretrained`."""
        wants_info, ignored = kwargs.pop("output_loading_info", False), kwargs.pop("ignore_fields", None) or ()
        config, state = cls._read(name, kwargs.pop("config", None), fields, kwargs, ignored)
        if state is not None:
            kwargs = {key: value for key, value in kwargs.items() if key not in HUB_OPTIONS} | {"state_dict": state}
        kwargs["config"] = config
        source = None if "state_dict" in kwargs else name
        drafter, info = super().from_pretrained(source, output_loading_info=True, **kwargs)
        refuse_unknown(name, info["unexpected_keys"])
        if drafter.offsets is not None and not drafter.offsets.is_meta:
            check_offsets(name, {"d2t": drafter.offsets.cpu()}, drafter.draft_size, drafter.config.vocab_size)
        drafter.config.name_or_path = str(name)
        return (drafter, info) if wants_info else drafter

    @classmethod
    @reads_whole
    def stored_config(cls, name: str | PathLike) -> Any:
        """Return the configuration of the drafter in a directory or a Hub repository, in any layout."""
        return cls._read(name, None, {}, {})[0]

    @classmethod
    def _read(
        cls, name: str | PathLike, passed: object, fields: Fields, options: Kwargs, ignored: Sequence[str] = ()
    ) -> Stored:
        hub, config = hub_options(options), passed if isinstance(passed, PreTrainedConfig) else None
        raw = PreTrainedConfig.get_config_dict(name, **hub)[0] if config is None else config.to_dict()
        if raw.get("model_type") in stored_kinds():
            cls.check_model_type(name, config, **hub)
        else:
            if packing := optional_file(name, f"{_QUANTIZATION}.json", hub):
                raw = raw | {_QUANTIZATION: read_json(Path(packing))}
            return cls.read_foreign(name, raw, hub, fields, ignored)
        changed = {key: value for key, value in fields.items() if value is not None}
        cls.check_fields(name, raw, changed)
        return cls.config_class.from_dict(raw | changed), None

    def _write_directory(
        self, directory: Path, is_main_process: bool, state_dict: dict[str, Tensor] | None, **kwargs: Any
    ) -> None:
        """Write a checkpoint in the layout that the drafter was loaded from; a new one's is ours."""
        if self.config.layout == "tokenahead":
            if self.config.base_model_type is None and self.is_attached:
                self.config.base_model_type = self.backbone.config.get_text_config().model_type
            super()._write_directory(directory, is_main_process, state_dict, **kwargs)
        elif is_main_process:
            self._write_layout(directory, self.config.layout, state_dict or self.state_dict())

    def without_code(self) -> str | None:
        """Return why no code can be saved in layouts of other libraries."""
        layout = self.config.layout
        return None if layout == "tokenahead" else f"layout={layout!r} is for other tools"


def layer_fields(text: PreTrainedConfig, options: Fields) -> Fields:
    """Return sizes, rope and special ids of a backbone for the layers of a new drafter."""
    heads = options.get("num_attention_heads", field(text, "num_attention_heads"))
    return {
        "hidden_size": text.hidden_size,
        "vocab_size": text.vocab_size,
        "intermediate_size": _shared(text, "intermediate_size") or 4 * text.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": _shared(text, "num_key_value_heads") or heads,
        "head_dim": _shared(text, "head_dim") or text.hidden_size // heads,
        "rms_norm_eps": _shared(text, "rms_norm_eps") or 1e-6,
        "max_position_embeddings": field(text, "max_position_embeddings"),
        "rope_parameters": _rope(text),
        "bos_token_id": text.bos_token_id,
        "eos_token_id": text.eos_token_id,
        "pad_token_id": text.pad_token_id,
    }


def new_config(
    kind: type[Config],
    owner: str,
    backbone: PreTrainedModel,
    options: Fields,
    own: Callable[[PreTrainedConfig], Fields] = lambda text: {},
) -> Config:
    """Return the configuration of a new drafter: the backbone's sizes and rope, and what `own` makes of its text
    config, unless `options` has others."""
    unknown = [name for name in options if name not in get_annotations(kind.__bases__[0])]
    check_options(unknown, kind, f"{owner}.from_backbone", _FROM_BACKBONE)
    check_kind(backbone)
    text = backbone.config.get_text_config()
    named = {"base_model_name_or_path": backbone.config.name_or_path or None, "base_model_type": text.model_type}
    return kind(**(layer_fields(text, options) | named | own(text) | options))


def check_kind(backbone: PreTrainedModel) -> None:
    """Refuse a backbone without one hidden state per layer (Gemma 3n), attention and computed positions."""
    text, name = backbone.config.get_text_config(), type(backbone).__name__
    if field(text, "altup_num_inputs", default=1) > 1:
        raise ValueError(f"{name}: altup_num_inputs={text.altup_num_inputs}; a drafter here reads one state per layer")
    needed = ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings")
    if missing := [each for each in needed if field(text, each) is None]:
        raise ValueError(f"{name}: its config has no {', '.join(missing)}; MTPHeads fit any")


def rope_of(owner: object, raw: Fields, usual: float | None = None) -> Fields:
    """Return the rope of all layers, wherever it stands; theta is the nested one before the flat one.

    `usual` is the theta of a layout that need not say it; for others any default would be wrong somewhere.
    """
    places = {place: raw.get(place) or {} for place in ("rope_parameters", "rope_scaling")}
    for place, rope in places.items():  # where kinds of layers have their own, that of windows
        nested = (rope.get(kind) for kind in ("sliding_attention", "full_attention"))
        places[place] = next((each for each in nested if isinstance(each, dict)), rope)
    thetas = [rope.get("rope_theta") for rope in places.values()] + [raw.get("rope_theta"), usual]
    theta = next((each for each in thetas if each is not None), None)
    if not isinstance(theta, (int, float)) or theta <= 0:
        raise ValueError(f"{owner}: config.json has rope_theta={theta!r}, which is no positive number")
    kinds = {
        place: {"rope_type": agreed(owner, rope, "rope_type", "type") or "default"}
        | {key: rope[key] for key in sorted(ROPE - {"rope_theta", "rope_type", "type"}) if rope.get(key) is not None}
        for place, rope in places.items()
        if rope.keys() - {"rope_theta"}
    }
    rope = agreed(owner, kinds, *kinds) or {"rope_type": "default"}
    if rope["rope_type"] not in ("default", *ROPE_INIT_FUNCTIONS):
        raise ValueError(
            f"{owner}: rope_type={rope['rope_type']!r} is none of {', '.join(sorted(ROPE_INIT_FUNCTIONS))}"
        )
    return rope | {"rope_theta": theta}


def with_prefixes(name: str, renames: Iterable[tuple[str, str]]) -> str:
    """Return a tensor's name with the beginnings that a layout renames, theirs and ours, one rename after the other."""
    for theirs, ours in renames:
        name = ours + name.removeprefix(theirs) if name.startswith(theirs) else name
    return name


def check_columns(owner: object, columns: int, layers: Sequence[int | None], width: int, option: str) -> None:
    """Refuse an `fc` whose columns are not those of the states of these layers, which `option` names."""
    if columns != len(layers) * width:
        states = f"{option}={list(layers)} of {width}"
        raise ValueError(f"{owner}: fc.weight has {columns} columns, {len(layers)} states {states}; pass {option}=")


def architectures(raw: Fields) -> list[str]:
    """Return the names in `architectures` of a config.json, whatever else it holds there."""
    named = raw.get("architectures")
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


def verifier_fields(verifier: Fields) -> Fields:
    """Return speculators' fields of the backbone: its name and its kind."""
    named = architectures(verifier)
    kinds = [(kind, name) for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name in named]
    # Llama's class also reads other kinds
    kind, _ = min(kinds, key=lambda pair: not pair[1].lower().startswith(pair[0]), default=(None, None))
    fields = {"base_model_name_or_path": verifier.get("name_or_path") or None, "base_model_type": kind}
    return {key: value for key, value in fields.items() if value is not None}


def speculators_fields(config: Any, kind: str, name: str, layers: Fields, tokens: int) -> Fields:
    """Return the fields of a `speculators_model_type`, of a class `name`, with a config of its `layers`."""
    verifiers = [each for key, each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if key == config.base_model_type]
    proposal = dict(proposal_type="greedy", speculative_tokens=tokens, verifier_accept_k=1, accept_tolerance=0.0)
    width = config.target_hidden_size
    return ({} if width == config.hidden_size else {"target_hidden_size": width}) | {
        "architectures": [name],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": config.base_model_name_or_path, "architectures": verifiers},
        },
    }


def _shared(config: PreTrainedConfig, name: str) -> Any:
    """Return a size of the layers; of a list the first, and None where layers differ and the config raises."""
    try:
        value = field(config, name)
    except RuntimeError:
        return None
    return value[0] if isinstance(value, (list, tuple)) else value


def _rope(text: PreTrainedConfig) -> Fields:
    """Return the backbone's rope where all layers share it, over whole heads; else a default one with its base."""
    rope = field(text, "rope_parameters") or {}
    nested = [value for value in rope.values() if isinstance(value, dict) and "rope_theta" in value]
    if nested or "partial_rotary_factor" in rope or "rope_type" not in rope:
        theta = (nested or [rope])[0].get("rope_theta", 10_000.0)
        return {"rope_type": "default", "rope_theta": theta}
    return dict(rope)
