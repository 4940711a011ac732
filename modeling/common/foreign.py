"""Drafters whose checkpoints are also those of other libraries: they are read in any layout, and saved in their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from ...generation.attach import adopt_fields
from ...generation.backbone.wrapped_models import Kwargs, has_own_cache, input_embeddings, untyped
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
from .drafter_configs import check_kind
from .learning import DraftModel
from .loading import stored_kinds

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
        if has_own_cache(backbone):
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
        is_own = self.config.layout == "tokenahead"
        return super().without_code() if is_own else f"layout={self.config.layout!r} is for other tools"
