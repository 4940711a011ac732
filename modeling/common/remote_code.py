"""Code that travels with what is saved, so that a directory loads where this library is not installed.

In the package, `model_cards.bundle` flattens the code; a model that was itself loaded from such code saves the files
next to this one. Knows no model, and imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import CONFIG_NAME, logging

from ... import __version__
from ...configuration.transformers_names import TESTED_VERSIONS
from ...generation.tensors.saving import reads_whole, whole_directory

logger = logging.get_logger(__name__)

CODE_DIRECTORY = "tokenahead_code"
"""The directory of code in a saved one."""
TRAVELS = __name__.rpartition(".")[2] != "remote_code"
"""Whether this file came with a model."""
REQUIREMENT = f"transformers>={TESTED_VERSIONS[0]},<5.{int(TESTED_VERSIONS[-1].removeprefix('5.')) + 1}"
"""For pip: the versions for which the code is written, which uses private methods of `generate`."""
_CHOICES = ("auto", "bundle", None)
_HANDED: dict[str, Callable[[], Any]] = {}
_README = f"""Code of tokenahead {__version__} (Apache-2.0) that loads the directory above; `auto_map` there names it:

    AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)

It needs torch and {REQUIREMENT}, and peft where it imports that. Where tokenahead is installed, that is used instead.
"""


def hand_in(**sources: Callable[[], Any]) -> None:
    """Let models and trainers release with modules of `model_cards`, which lies above them, imported at first need."""
    _HANDED.update(sources)


def handed(name: str) -> Any:
    """Return a module of `model_cards` that was handed in: `push`, `card` or `bundle`."""
    return _HANDED[name]()


def check_choice(remote_code: str | None) -> None:
    """Refuse an unknown `remote_code`."""
    if remote_code not in _CHOICES:
        raise ValueError(f"remote_code={remote_code!r}: choose {', '.join(map(repr, _CHOICES))}")


def is_ours(kind: type) -> bool:
    """Return whether a class is part of this library, or of the code that it was loaded from."""
    root = __package__ if TRAVELS else (__package__ or "").partition(".")[0]
    return kind.__module__.startswith(f"{root}.")


def code_when_pushed(saved: Any, remote_code: str | None = "auto") -> str | None:
    """Return what `remote_code` means for a push: `"auto"` is the bundle for models, and no code for drafters."""
    carries = saved.travels_when_pushed and is_ours(type(saved))
    return "bundle" if remote_code == "auto" and carries else remote_code


def add_code(saved: Any, directory: Path, remote_code: str | None) -> None:
    """Write the code of a saved directory, and `auto_map` into its config."""
    auto_map, files = _code_for(saved, remote_code)
    path = directory / saved._config_file
    if not path.is_file():  # adapters of peft were saved alone, or another process writes
        return
    fields = json.loads(path.read_text(encoding="utf-8"))
    is_stale = is_ours(type(saved)) and fields.pop("auto_map", None) is not None
    if is_stale or files:
        files[path.name] = json.dumps(fields | auto_map, indent=2, ensure_ascii=False) + "\n"
    for name, text in files.items():
        path, data = directory / name, text.encode()
        if not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # it may be a link
            path.write_bytes(data)


def _code_for(saved: Any, remote_code: str | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return `auto_map` as a field, and the files of a directory, by the choice of `save_pretrained`.

    Both are empty for no code. `"auto"` is that where this library is installed; code that was loaded saves itself.
    """
    check_choice(remote_code)
    reason = saved.without_code()
    if remote_code == "bundle" and reason:
        raise ValueError(f"remote_code={remote_code!r}: {reason}; leave it out")
    is_written = remote_code == "bundle" or (remote_code == "auto" and TRAVELS)
    if not is_written or reason or not saved.remote_classes:
        return {}, {}
    config = type(getattr(saved, "config", None))
    names = ({"AutoConfig": config.__name__} if is_ours(config) else {}) | dict(saved.remote_classes)
    entry, files = _files(type(saved))
    auto_map: dict[str, Any] = {name: f"{CODE_DIRECTORY}/{entry}.{class_}" for name, class_ in names.items()}
    if saved._config_file != CONFIG_NAME:  # tokenizers have pairs, of a slow and a fast class
        auto_map = {name: (each, None) for name, each in auto_map.items()}
    return {"auto_map": auto_map}, {
        f"{CODE_DIRECTORY}/{name}": text for name, text in (files | {"README.md": _README}).items()
    }


@cache
def _files(kind: type) -> tuple[str, dict[str, str]]:
    """Return entry module and files of the code for a class."""
    module = kind.__module__
    if not TRAVELS:
        return handed("bundle").bundle(module.partition(".")[2])
    beside = sorted(path for path in Path(__file__).parent.glob("*.py") if path.name != "__init__.py")
    return module.rpartition(".")[2], {path.name: path.read_text(encoding="utf-8") for path in beside}


class RemoteCodeMixin:
    """What can be saved and pushed with the code that loads it elsewhere; to be placed before transformers' class.

    Attributes:
        remote_classes: By Auto class, the class of its module that it loads, `{"AutoModel": "MTPHeads"}`.
        travels_when_pushed: Whether a push carries the code by default.
    """

    remote_classes: Mapping[str, str] = {}
    travels_when_pushed: bool = True
    _config_file: str = CONFIG_NAME

    @classmethod
    def register_for_auto_class(cls, *args: Any, **kwargs: Any) -> None:
        """Register classes of users; ours save their code themselves, and Auto classes call this on what they load."""
        if not is_ours(cls):
            super().register_for_auto_class(*args, **kwargs)

    def without_code(self) -> str | None:
        """Return why no code can be saved with this object; None where it can."""
        return None if is_ours(type(self)) else f"{type(self).__module__} is not of tokenahead"

    def push_to_hub(self, repo_id: str, *, remote_code: str | None = "auto", **kwargs: Any) -> Any:
        """Upload what `save_pretrained` writes, with a card; a card that is on the Hub already is not replaced.

        Args:
            repo_id: `"user/name"`; created if it does not exist.
            remote_code: As for `save_pretrained`, but `"auto"` is `"bundle"` for models, whose readers may not have
                this library; heads and other drafters carry no code unless it is requested.
            **kwargs: As for transformers' `push_to_hub`; `overwrite=True` replaces another model.

        Returns:
            The commit.

        Raises:
            ValueError: A repository that holds another model: nothing is changed there.
        """
        check_choice(remote_code)
        if TRAVELS:  # without the package there is no renderer of cards
            return super().push_to_hub(repo_id, **kwargs)
        return handed("push").push_to_hub(self, None, None, repo_id, remote_code=remote_code, **kwargs)


class RemoteCodeTokenizerMixin(RemoteCodeMixin):
    """`save_pretrained` of a tokenizer: whole or not at all, and with its code on request."""

    _config_file = "tokenizer_config.json"

    @classmethod
    @reads_whole
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike, *args: Any, **kwargs: Any) -> Any:
        """Load as every tokenizer of transformers does."""
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    def save_pretrained(
        self,
        save_directory: str | PathLike,
        *args: Any,
        push_to_hub: bool = False,
        remote_code: str | None = "auto",
        **kwargs: Any,
    ) -> tuple[str, ...]:
        """Save as every tokenizer of transformers does, and return the names of the files.

        `remote_code` is as for `save_pretrained` of a model; other arguments are those of transformers.
        """
        target = Path(save_directory)
        with whole_directory(target) as directory:
            names = super().save_pretrained(directory, *args, **kwargs)
            add_code(self, directory, remote_code)
        if push_to_hub:
            options = {key: kwargs[key] for key in ("commit_message", "private", "create_pr", "token") if key in kwargs}
            self.push_to_hub(kwargs.get("repo_id", target.absolute().name), remote_code=remote_code, **options)
        return tuple(str(target / Path(name).relative_to(directory)) for name in names)


if TRAVELS and not transformers.__version__.startswith(tuple(f"{version}." for version in TESTED_VERSIONS)):
    logger.warning(
        f"the code of this model (tokenahead {__version__}) needs {REQUIREMENT}, and {transformers.__version__} is "
        "installed: if it fails, install that, or tokenahead, which is then used in its place"
    )
