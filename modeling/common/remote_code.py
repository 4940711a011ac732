"""Code that travels with what is saved, so that a directory loads where this library is not installed.

`model_cards.bundle` flattens the code; a model that was loaded from such code saves the files next to this one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, cast

from transformers.utils import CONFIG_NAME

from ... import __version__
from ...configuration.transformers_names import TESTED_VERSIONS
from ...generation.tensors.saving import reads_whole, whole_directory

CODE_DIRECTORY = "tokenahead_code"
"""The directory of code in a saved one."""
TRAVELS = __name__.rpartition(".")[2] != "remote_code"
"""Whether this file came with a model."""
REQUIREMENT = f"transformers>={TESTED_VERSIONS[0]},<5.{int(TESTED_VERSIONS[-1].removeprefix('5.')) + 1}"
"""For pip: the versions for which the code is written, which uses private methods of `generate`."""
HANDED: dict[str, Callable[[], Any]] = {}
"""The modules `push`, `card` and `bundle` of `model_cards`, which lies above and is imported at first need."""
_README = f"""Code of tokenahead {__version__} (Apache-2.0) that loads the directory above; `auto_map` there names it:

    AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)

It needs torch and {REQUIREMENT}, and peft where it imports that. Where tokenahead is installed, that is used instead.
"""


def check_choice(remote_code: str | None) -> None:
    """Refuse an unknown `remote_code`."""
    if remote_code not in ("auto", "bundle", None):
        raise ValueError(f"remote_code={remote_code!r}: choose 'auto', 'bundle' or None")


def is_ours(kind: type) -> bool:
    """Return whether a class is part of this library, or of the code that it was loaded from."""
    root = __package__ if TRAVELS else (__package__ or "").partition(".")[0]
    return kind.__module__.startswith(f"{root}.")


def code_when_pushed(saved: Any, remote_code: str | None = "auto") -> str | None:
    """Return what `remote_code` means for a push: `"auto"` is the bundle for models, and no code for drafters."""
    carries = remote_code == "auto" and saved.travels_when_pushed and is_ours(type(saved))
    return "bundle" if carries else remote_code


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
    """Return `auto_map` as a field, and the files of a directory; both are empty for no code.

    `"auto"` is that where this library is installed; code that was loaded saves itself.
    """
    check_choice(remote_code)
    reason = saved.without_code() if is_ours(type(saved)) else f"{type(saved).__module__} is not of tokenahead"
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
    files = {f"{CODE_DIRECTORY}/{name}": text for name, text in (files | {"README.md": _README}).items()}
    return {"auto_map": auto_map}, files


@cache
def _files(kind: type) -> tuple[str, dict[str, str]]:
    """Return entry module and files of the code for a class."""
    module = kind.__module__
    if not TRAVELS:
        return HANDED["bundle"]().bundle(module.partition(".")[2])
    beside = sorted(path for path in Path(__file__).parent.glob("*.py") if path.name != "__init__.py")
    return module.rpartition(".")[2], {path.name: path.read_text(encoding="utf-8") for path in beside}


def push(saved: Any, plain: Callable[..., Any], repo_id: str, remote_code: str | None, **kwargs: Any) -> Any:
    """Upload what a model or a tokenizer saves, with a card; by the `plain` method where the package is not there."""
    check_choice(remote_code)
    if TRAVELS:  # without the package there is no renderer of cards
        return plain(repo_id, **kwargs)
    return HANDED["push"]().push_to_hub(saved, None, None, repo_id, remote_code=remote_code, **kwargs)


class RemoteCodeTokenizerMixin:
    """A tokenizer that is saved whole or not at all, and with its code on request."""

    remote_classes: Mapping[str, str] = {}
    travels_when_pushed: bool = True
    _config_file = "tokenizer_config.json"

    @classmethod
    def register_for_auto_class(cls, *args: Any, **kwargs: Any) -> None:
        """Register classes of users; ours save their code themselves, and Auto classes call this on what they load."""
        if not is_ours(cls):
            cast(Any, super()).register_for_auto_class(*args, **kwargs)

    def without_code(self) -> str | None:
        """Return why no code can be saved with this object; None where it can."""
        return None

    @classmethod
    @reads_whole
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike, *args: Any, **kwargs: Any) -> Any:
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    def save_pretrained(
        self,
        save_directory: str | PathLike,
        *args: Any,
        push_to_hub: bool = False,
        remote_code: str | None = "auto",
        **kwargs: Any,
    ) -> tuple[str, ...]:
        """Save as every tokenizer does; `remote_code` is as for `save_pretrained` of a model."""
        target = Path(save_directory)
        with whole_directory(target) as directory:
            names = super().save_pretrained(directory, *args, **kwargs)
            add_code(self, directory, remote_code)
        if push_to_hub:
            options = {key: kwargs[key] for key in ("commit_message", "private", "create_pr", "token") if key in kwargs}
            self.push_to_hub(kwargs.get("repo_id", target.absolute().name), remote_code=remote_code, **options)
        return tuple(str(target / Path(name).relative_to(directory)) for name in names)

    def push_to_hub(self, repo_id: str, *, remote_code: str | None = "auto", **kwargs: Any) -> Any:
        """Upload as `push_to_hub` of a model does."""
        return push(self, cast(Any, super()).push_to_hub, repo_id, remote_code, **kwargs)
