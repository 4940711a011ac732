"""Loading that refuses what it cannot load: another architecture, missing tensors, wrong shapes, damaged files."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from safetensors import SafetensorError
from transformers import PreTrainedConfig

from .saving import SavingMixin

HUB_OPTIONS = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "force_download", "proxies")
"""Arguments of `from_pretrained` that say where files come from."""


def check_is_there(name: str | PathLike) -> None:
    """Refuse a path that does not exist, of which the Hub would only say that it is no repository.

    Raises:
        FileNotFoundError: A path that is no directory.
    """
    path = str(name)
    is_path = path.startswith((".", "~")) or Path(path).is_absolute() or path.count("/") > 1
    if is_path and not Path(path).exists():
        raise FileNotFoundError(f"{path}: no such directory")


class StrictLoadingMixin(SavingMixin):
    """`from_pretrained` that raises where transformers would warn and continue with random weights.

    Directories are saved whole (`SavingMixin`). To be placed before `PreTrainedModel` among the bases.
    """

    config_class: ClassVar[type[PreTrainedConfig]]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike | None, *args: Any, **kwargs: Any) -> Any:
        """Load a model as `PreTrainedModel.from_pretrained` does.

        Raises:
            ValueError: A directory of another architecture, tensors that are missing or have another shape than the
                config says, or a damaged safetensors file.
        """
        hub = {key: kwargs[key] for key in HUB_OPTIONS if key in kwargs}
        cls.check_model_type(pretrained_model_name_or_path, kwargs.get("config"), **hub)
        wants_info = kwargs.pop("output_loading_info", False)
        name = str(pretrained_model_name_or_path or getattr(kwargs.get("config"), "_name_or_path", "") or cls.__name__)
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
            )
        except SafetensorError as error:
            raise ValueError(f"{name}: a safetensors file is damaged or cut short ({error}); fetch it again") from error
        except RuntimeError as error:
            if "mismatch" in str(error).lower():
                raise ValueError(f"{name}: tensors do not have the shapes that config.json says: {error}") from error
            raise
        if missing := sorted(info["missing_keys"]):
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise ValueError(f"{name}: the checkpoint lacks {len(missing)} tensors of {cls.__name__}: {shown}")
        vars(model.config).pop("auto_map", None)  # says where code lies in the directory that was read, and in no other
        return (model, info) if wants_info else model

    @classmethod
    def check_model_type(cls, name: str | PathLike | None, config: Any = None, **hub: Any) -> None:
        """Check the architecture in a directory's config.json.

        Args:
            name: Directory or Hub repository; None loads nothing.
            config: The argument `config`; where it is a configuration, the directory's own is not read.
            **hub: `revision`, `token`, ...

        Raises:
            ValueError: The directory holds another architecture.
        """
        if name is None or isinstance(config, PreTrainedConfig):
            return
        check_is_there(name)
        found = PreTrainedConfig.get_config_dict(config or name, **hub)[0].get("model_type")
        expected = cls.config_class.model_type
        if found not in (None, expected):
            makes = f"; {cls.__name__}.from_backbone makes new parts for a plain model"
            raise ValueError(
                f"{name}: config.json says model_type={found!r}, but {cls.__name__} reads model_type={expected!r}"
                + (makes if hasattr(cls, "from_backbone") else "")
            )
