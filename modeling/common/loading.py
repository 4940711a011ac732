"""Saving of whole directories, strict loading, and the one table by which a directory becomes a drafter.

A class enters the table by `DRAFTERS[name]` and its `model_type`; it recognises other layouts by `recognises`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME

from ... import __version__
from ...generation.backbone.wrapped_models import fingerprint, holds_shares, untyped
from ...generation.drafter import DRAFTERS
from ...generation.tensors.saving import reads_whole, whole_directory
from ...generation.tensors.tensor_files import Fields, check_stored, hub_options
from .remote_code import add_code, is_ours, push

LOADS: ContextVar[bool] = ContextVar("LOADS", default=False)
"""Whether a checkpoint is being read: what it lacks is an error, and needs no values that take minutes to draw."""
_PUSH_OPTIONS = ("repo_id", "commit_message", "private", "create_pr", "revision", "commit_description")


class StrictLoadingMixin:
    """`from_pretrained` that raises where transformers would warn, and directories that are saved whole or not at all.

    A class that writes its tensors in its own way overrides `_write_directory`.
    """

    remote_classes: Mapping[str, str] = {}  # by Auto class, the class of its module that saved code loads
    travels_when_pushed: bool = True  # whether a push carries the code by default
    config_class: ClassVar[type[PreTrainedConfig]]
    _config_file: str = CONFIG_NAME
    _optional_files: tuple[str, ...] = ()  # what it does not always write

    @classmethod
    @reads_whole
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike | None, *args: Any, **kwargs: Any) -> Any:
        """Load a model as `PreTrainedModel.from_pretrained` does; another architecture or missing tensors raise."""
        if kwargs.get("weights_only") is False:
            raise ValueError("weights_only=False would run code that is in a file: leave it out")
        kwargs.pop("ignore_fields", None)  # in this library's layout no field is foreign
        name, config, hub = pretrained_model_name_or_path, kwargs.get("config"), hub_options(kwargs)
        cls.check_model_type(name, config, **hub)
        if name is not None:
            check_stored(name, config, kwargs.get("variant"), **hub)
        wants_info = kwargs.pop("output_loading_info", False)
        token = LOADS.set(True)
        try:
            model, info = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
        finally:
            LOADS.reset(token)
        if missing := sorted(info["missing_keys"]):
            where = name or getattr(config, "_name_or_path", "")
            raise ValueError(f"{where}: the checkpoint lacks {len(missing)} tensors of {cls.__name__}: {missing[:5]}")
        vars(model.config).pop("auto_map", None)  # says where code lies in the directory that was read, and in no other
        return (model, info) if wants_info else model

    @classmethod
    def check_model_type(
        cls, name: str | PathLike | None, config: str | PathLike | PreTrainedConfig | None = None, **hub: Any
    ) -> None:
        """Refuse a directory or repository whose config.json, if `config` is none, names another architecture."""
        if name is None or isinstance(config, PreTrainedConfig):
            return
        fields = PreTrainedConfig.get_config_dict(config or name, **hub)[0]  # {} of a directory without config.json
        actual, expected = fields.get("model_type"), cls.config_class.model_type
        may_be_others = config is None and Path(name).is_dir() and actual not in stored_kinds()
        if may_be_others and hasattr(cls, "from_official") and cls.recognises(name, fields, hub):
            raise ValueError(f"{name} has the layout of other tools: load it with {cls.__name__}.from_official")
        if actual not in (None, expected):
            other = f"; load it with {kind.__name__}.from_pretrained" if (kind := stored_kinds().get(actual)) else ""
            raise ValueError(f"{name}: model_type={actual!r}, but {cls.__name__} reads model_type={expected!r}{other}")

    @classmethod
    def recognises(cls, name: str | PathLike, fields: Fields, hub: Fields) -> bool:
        """Return whether a directory or repository, whose config.json has `fields`, is a drafter in another layout."""
        return False

    @classmethod
    def stored_with_backbone(cls, name: str | PathLike, fields: Fields) -> bool:
        """Return whether a directory of another layout holds the model that it drafts for, too."""
        return False

    @classmethod
    def read_other(cls, name: str | PathLike, dtype: Any, backbone: PreTrainedModel | None, options: Fields) -> Any:
        """Return the drafter in a directory or repository of another layout; see `read_drafter`."""
        return cls.from_pretrained(name, dtype=dtype, **options)

    def save_pretrained(
        self,
        save_directory: str | PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        push_to_hub: bool = False,
        *,
        remote_code: str | None = "auto",
        **kwargs: Any,
    ) -> None:
        """Save as `PreTrainedModel.save_pretrained` does, whole or not at all.

        Files are written to a hidden folder in the directory and brought in when all are complete; weights of an
        earlier save that are not replaced are removed. config.json also names this library and its version.

        Args:
            save_directory: The directory, which is created.
            is_main_process: Whether this process writes.
            state_dict: The tensors of this model, where they had to be gathered.
            push_to_hub: Upload afterwards; `repo_id` and so on as for `push_to_hub`.
            remote_code: What loads the directory where this library is not installed, with `trust_remote_code=True`:
                `"bundle"`, its code, in a directory of its own; None, nothing. `"auto"` is None, but a model that was
                itself loaded from such code saves it again.
            **kwargs: As for transformers' `save_pretrained`.
        """
        spread = kwargs.get("distributed_checkpoint", False)
        if state_dict is None and not spread and holds_shares(untyped(self)):
            raise ValueError("state_dict=None: processes share these weights, which a trainer's save_model gathers")
        target = Path(save_directory)
        hub = {key: kwargs.pop(key) for key in _PUSH_OPTIONS if key in kwargs}
        config = self.config
        config.library_name, config.library_version = "tokenahead", __version__
        base = vars(config).get("base_model_name_or_path")
        if base and Path(base).is_dir():  # elsewhere `runs/base` would be the name of a repository
            config.base_model_name_or_path = str(Path(base).absolute())
        if vars(self).get("_backbones"):  # a drafter with the backbone that it learned from
            known = vars(config).get("backbone_fingerprint")
            config.backbone_fingerprint = fingerprint(vars(self)["_backbones"][0]) or known
        if is_ours(type(config)):  # Auto classes mark a class that came with a directory: its code is added here
            config._auto_class = None
        for name in self._optional_files if spread and is_main_process else ():
            (target / name).unlink(missing_ok=True)
        # else transformers would wait for all processes
        divided = None if spread else vars(config).pop("distributed_config", None)
        try:
            with whole_directory(target, kwargs.get("variant"), self._optional_files, in_place=spread) as directory:
                self._write_directory(directory, is_main_process, state_dict, **kwargs)
                if is_main_process:
                    add_code(self, directory, remote_code)
        finally:
            vars(config).update({} if divided is None else {"distributed_config": divided})
        if push_to_hub and is_main_process:
            hub = {"repo_id": target.absolute().name, "remote_code": remote_code} | hub
            self.push_to_hub(**hub, **{key: kwargs[key] for key in ("token", "max_shard_size") if key in kwargs})

    @classmethod
    def register_for_auto_class(cls, *args: Any, **kwargs: Any) -> None:
        """Register classes of users; ours save their code themselves, and Auto classes call this on what they load."""
        if not is_ours(cls):
            super().register_for_auto_class(*args, **kwargs)

    def without_code(self) -> str | None:
        """Return why no code can be saved with this model; None where it can."""
        return None

    def push_to_hub(self, repo_id: str, *, remote_code: str | None = "auto", **kwargs: Any) -> Any:
        """Upload what `save_pretrained` writes, with a card; a card that is on the Hub already is not replaced.

        Args:
            repo_id: `"user/name"`; created if it does not exist.
            remote_code: As for `save_pretrained`, but `"auto"` is `"bundle"` for models, whose readers may not have
                this library; heads and other drafters carry no code unless it is requested.
            **kwargs: As for transformers' `push_to_hub`; `overwrite=True` replaces another model.

        Returns:
            The commit.
        """
        return push(self, super().push_to_hub, repo_id, remote_code, **kwargs)

    def _write_directory(
        self, directory: Path, is_main_process: bool, state_dict: dict[str, Tensor] | None, **kwargs: Any
    ) -> None:
        """Write everything but code into a directory."""
        super().save_pretrained(directory, is_main_process, state_dict, **kwargs)


def stored_kinds() -> dict[str | None, type[StrictLoadingMixin]]:
    """Return the classes of drafters that are saved without a backbone, by the model_type of their directories."""
    apart = (kind for kind in DRAFTERS.values() if kind.is_apart and issubclass(kind, StrictLoadingMixin))
    return {kind.config_class.model_type: kind for kind in apart}


@reads_whole
def drafter_class(name: str | PathLike, **hub: Any) -> type[Any] | None:
    """Return the class of the drafter in a directory or a Hub repository, in any layout; None where there is none."""
    fields, kinds = stored_fields(name, **hub), stored_kinds()
    own = kinds.get(fields.get("model_type"))
    return own or next((kind for kind in kinds.values() if _recognises(kind, name, fields, hub)), None)


@reads_whole
def holds_drafter_alone(name: str | PathLike, **hub: Any) -> bool:
    """Return whether there is a drafter, and not also the model that it drafts for."""
    kind, fields = drafter_class(name, **hub), stored_fields(name, **hub)
    is_own = fields.get("model_type") in stored_kinds()
    return kind is not None and (is_own or not kind.stored_with_backbone(name, fields))


@reads_whole
def read_drafter(
    name: str | PathLike, dtype: Any = None, backbone: PreTrainedModel | None = None, **options: Any
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
    hub, dtype = hub_options(options), dtype or "auto"
    if (kind := drafter_class(name, **hub)) is None:
        raise ValueError(f"{name}: no drafter (heads, an EAGLE head, a block drafter, a student) in a known layout")
    if stored_fields(name, **hub).get("model_type") in stored_kinds():
        drafter = kind.from_pretrained(name, dtype=dtype, **options)
    else:
        drafter = kind.read_other(name, dtype, backbone, options)
    drafter.read_with = options
    return drafter


def stored_fields(name: str | PathLike, **hub: Any) -> Fields:
    """Return the fields of config.json; an empty dict where there is no such file."""
    try:
        return PreTrainedConfig.get_config_dict(name, **hub)[0]
    except OSError:
        return {}


def local_files(name: str | PathLike, hub: Fields, with_weights: bool = True) -> Path:
    """Return the directory of a name, with files of layouts without a config.json, or of all, where the Hub has it."""
    if Path(name).is_dir() or str(name).count("/") != 1:
        return Path(name)
    patterns = ["params.json", "consolidated*.pth", "config.yaml", "model@*.pt"]
    patterns += ["*.json", "*_lm_head.*", "*.safetensors", "pytorch_model*.bin"] if with_weights else []
    return Path(snapshot_download(str(name), allow_patterns=patterns, **hub))


def _recognises(kind: type[StrictLoadingMixin], name: str | PathLike, fields: Fields, hub: Fields) -> bool:
    try:
        return kind.recognises(name, fields, hub)
    except OSError:  # files that the Hub does not give
        return False
