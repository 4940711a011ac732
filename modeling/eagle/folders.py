"""Reading and writing directories of a head: our own through transformers, those of others through their layouts."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from ...configuration import EagleHeadConfig
from ..loading import StrictLoadingMixin, check_is_there
from ..remote_code import check_choice
from .export import check_layout, folder_config, folder_tensors
from .loading import check_vocabulary, foreign_head, own_names, read_tensors

_HUB_OPTIONS = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "force_download", "proxies")


class EagleFolderMixin(StrictLoadingMixin):
    """`from_pretrained`, what `save_pretrained` writes, `export` and `load_state_dict` of an `EagleHead`."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | PathLike,
        *,
        aux_layers: list[int] | None = None,
        norm_output: bool | None = None,
        norm_before_residual: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Loads a directory or a Hub repository: ours, or an official, SpecForge's or speculators'.

        Args:
            pretrained_model_name_or_path: Where the head is.
            aux_layers: Indices into `hidden_states`, where the directory's ids are wrong or missing.
            norm_output: See `EagleHeadConfig`; False for heads that SpecForge trained from July to September
                2026, whose configs say true and mean something else.
            norm_before_residual: See `EagleHeadConfig`; libraries differ in what a missing field means.
            **kwargs: As for transformers' `from_pretrained`: `dtype`, `device_map`, `attn_implementation`, ...

        Raises:
            ValueError: No EAGLE head, missing or unknown tensors, wrong shapes, ambiguous auxiliary layers, a draft
                vocabulary out of range, a pickle of more than tensors.
        """
        name, given = pretrained_model_name_or_path, kwargs.pop("config", None)
        fields = {"aux_layers": aux_layers, "norm_output": norm_output, "norm_before_residual": norm_before_residual}
        hub = {key: kwargs[key] for key in _HUB_OPTIONS if key in kwargs}
        raw = given.to_dict() if isinstance(given, PreTrainedConfig) else _config_dict(name, hub)
        wants_info = kwargs.pop("output_loading_info", False)
        if raw.get("model_type") == EagleHeadConfig.model_type:
            changed = {key: value for key, value in fields.items() if value is not None}
            kwargs["config"] = EagleHeadConfig.from_dict(raw | changed)
        else:
            config, state = foreign_head(name, raw, read_tensors(name, **hub), **fields)
            kwargs = {key: value for key, value in kwargs.items() if key not in _HUB_OPTIONS}
            kwargs |= {"config": config, "state_dict": state}
        source = None if "state_dict" in kwargs else name
        head, info = super().from_pretrained(source, output_loading_info=True, **kwargs)
        if unknown := sorted(info["unexpected_keys"]):
            shown = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
            raise ValueError(f"{name}: {len(unknown)} tensors are not known, and would be ignored: {shown}")
        if (
            offsets := getattr(head, "d2t", None)
        ) is not None and not offsets.is_meta:  # our own layout holds them, too
            check_vocabulary(name, head.config, {"d2t": offsets.cpu()})
        head.config.name_or_path = str(name)
        return (head, info) if wants_info else head

    def _write_folder(
        self, folder: Path, is_main_process: bool, state_dict: dict[str, torch.Tensor] | None, **kwargs: Any
    ) -> None:
        """Writes a directory in the layout that the head came from; a new head's is ours."""
        self.config.loss_options = self.loss_options.changed()
        if self.config.layout == "tokenahead":
            if self.config.base_model_type is None and self.is_attached:
                self.config.base_model_type = self.backbone.config.get_text_config().model_type
            super()._write_folder(folder, is_main_process, state_dict, **kwargs)
        elif is_main_process:
            self._write(folder, self.config.layout, state_dict)

    def code_for(self, remote_code: str | None) -> tuple[dict[str, str], dict[str, str]]:
        """As everywhere, but directories in the layout of others have a config.json that their tools read: no code.

        Raises:
            ValueError: Code is asked for, and the layout is not ours.
        """
        if self.config.layout == "tokenahead":
            return super().code_for(remote_code)
        check_choice(remote_code)
        if remote_code in ("bundle", "package"):
            raise ValueError(
                f"remote_code={remote_code!r}: the layout {self.config.layout!r} is for other tools; set config.layout "
                "= 'tokenahead', or leave remote_code out"
            )
        return {}, {}

    def export(self, folder: str | PathLike, layout: str = "vllm") -> None:
        """Writes a directory for another library or engine.

        Args:
            folder: Where to.
            layout: `"vllm"`, `"sglang"`, `"official"` (SafeAILab's code), `"specforge"` or `"speculators"`.

        Raises:
            ValueError: An option of this head that the reader does not know.
        """
        check_layout(self.config, layout)
        self._write(Path(folder), layout)

    def _write(self, folder: Path, layout: str, state: dict[str, torch.Tensor] | None = None) -> None:
        state = self.state_dict() if state is None else state
        embeddings = self.backbone.get_input_embeddings().weight.detach() if self.is_attached else None
        tensors = folder_tensors(self.config, layout, state, embeddings)
        folder.mkdir(parents=True, exist_ok=True)
        written = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(written, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
        values = folder_config(self.config, layout, self.dtype)
        (folder / CONFIG_NAME).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    def load_state_dict(self, state_dict: dict[str, torch.Tensor], strict: bool = True, assign: bool = False) -> Any:
        """Takes this head's own names or a saved directory's (a Trainer that resumes reads the directory's file)."""
        state = own_names(state_dict)
        held = set(self.state_dict())
        state = {name: tensor for name, tensor in state.items() if name in held or name not in ("d2t", "t2d")}
        return super().load_state_dict(state, strict, assign)


def _config_dict(name: Any, hub: dict[str, Any]) -> dict[str, Any]:
    check_is_there(name)
    values, _ = PreTrainedConfig.get_config_dict(name, **hub)
    if not values:
        raise ValueError(f"{name}: no {CONFIG_NAME}")
    return values
