"""What a directory of a drafter holds, in this library's layout or in a published one, and its loading."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import PreTrainedConfig, PreTrainedModel

from ...generation.tensors.saving import reads_whole
from ...generation.tensors.tensor_files import Fields, hub_options, tensor_names
from ..block.layouts import layout_of
from ..block.model import BlockDrafter
from ..eagle.conversion import is_foreign_head
from ..eagle.model import EagleHead
from ..heads.attached import MTPHeads
from ..heads.official import holds_backbone, published_layout
from .loading import stored_kinds

_FILES = ["*.json", "*_lm_head.*", "*.safetensors", "pytorch_model*.bin"]
"""Of heads in a published layout, on the Hub."""
_WITHOUT_CONFIG = ["params.json", "consolidated*.pth", "config.yaml", "model@*.pt"]
"""Of layouts that have no config.json."""


@reads_whole
def drafter_class(name: str | PathLike[str], **hub: Any) -> type[Any] | None:
    """Return the class of the drafter in a directory or a Hub repository, in any layout; None where there is none."""
    fields = _fields(name, **hub)
    if (own := stored_kinds().get(fields.get("model_type"))) is not None:
        return own
    if layout_of(fields) is not None:
        return BlockDrafter
    try:
        directory = Path(name) if fields else _local(name, _WITHOUT_CONFIG, **hub)
        if published_layout(directory, fields) is not None:
            return MTPHeads
        return EagleHead if fields and is_foreign_head(fields, tensor_names(name, **hub)) else None
    except OSError:  # files that the Hub does not give
        return None


@reads_whole
def holds_drafter_alone(name: str | PathLike[str], **hub: Any) -> bool:
    """Return whether there is a drafter, and not also the model that it drafts for."""
    kind, fields = drafter_class(name, **hub), _fields(name, **hub)
    is_alone = kind is not MTPHeads or fields.get("model_type") in stored_kinds()
    return kind is not None and (is_alone or not holds_backbone(Path(name), fields))


@reads_whole
def read_drafter(
    name: str | PathLike[str], dtype: Any = None, backbone: PreTrainedModel | None = None, **options: Any
) -> Any:
    """Return the drafter in a directory or a Hub repository, in any layout, not attached.

    Args:
        name: See `drafter_class`.
        dtype: Of its weights; None or `"auto"`: the stored one.
        backbone: The model that it drafts for, whose layers published heads with draft layers run; left out, its
            configuration is read by the name that they record.
        **options: Of `from_pretrained` or, for published heads, of `from_official`. They stand in `read_with` of the
            drafter.
    """
    hub = hub_options(options)
    kind = drafter_class(name, **hub)
    if kind is None:
        raise ValueError(f"{name}: no drafter (heads, an EAGLE head, a block drafter, a student) in a known layout")
    if kind is MTPHeads and _fields(name, **hub).get("model_type") not in stored_kinds():
        own = {key: value for key, value in options.items() if key not in hub}
        drafter: Any = kind.from_official(_local(name, _FILES + _WITHOUT_CONFIG, **hub), backbone, **own).detach()
        drafter = drafter if dtype in (None, "auto") else drafter.to(dtype)
    else:
        drafter = kind.from_pretrained(name, dtype="auto" if dtype is None else dtype, **options)
    drafter.read_with = options
    return drafter


def _local(name: str | PathLike[str], patterns: list[str], **hub: Any) -> Path:
    """Return the directory of a name, with files of such names where it is one on the Hub."""
    if Path(name).is_dir() or str(name).count("/") != 1:
        return Path(name)
    return Path(snapshot_download(str(name), allow_patterns=patterns, **hub))


def _fields(name: str | PathLike[str], **hub: Any) -> Fields:
    """Return the fields of config.json; an empty dict where there is no such file."""
    try:
        return PreTrainedConfig.get_config_dict(name, **hub)[0]
    except OSError:
        return {}
