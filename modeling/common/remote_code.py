"""Code that travels with what is saved, so that a directory loads where this library is not installed.

In the package, `model_cards.bundle` flattens the code; a model that was itself loaded from such code saves the files
next to this one. Knows no model, and imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import CONFIG_NAME, logging

from ... import __version__
from ...generation.tensors.saving import reads_whole, whole_directory

logger = logging.get_logger(__name__)

CODE_DIRECTORY = "tokenahead_code"
"""The directory of code in a saved one."""
TRAVELS = __name__.rpartition(".")[2] != "remote_code"
"""Whether this file came with a model."""
TRANSFORMERS = ("5.21", "5.22", "5.23", "5.24")
"""The versions of transformers for which the code is written: it uses private methods of `generate`."""
REQUIREMENT = "transformers>=5.21,<5.25"
"""The same for pip."""
_CHOICES = ("auto", "bundle", "package", None)
_HANDED: dict[str, Callable[[], Any]] = {}
_README = f"""This is code of tokenahead {__version__} (Apache-2.0), with which the directory above is loaded, by the
Auto classes of transformers that config.json names under `auto_map` (tokenizer_config.json for the tokenizer):

    AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)

It needs torch and transformers {TRANSFORMERS[0]} to {TRANSFORMERS[-1]}, and peft where it imports that. Where
tokenahead is installed (from a clone or a wheel), that is used in place of this code.
"""


def hand_in(**sources: Callable[[], Any]) -> None:
    """Let models and trainers release with modules of `model_cards`, which lies above them, imported at first need."""
    _HANDED.update(sources)


def handed(name: str) -> Any:
    """Return a module of `model_cards` that was handed in: `push`, or `bundle`."""
    return _HANDED[name]()


def check_choice(remote_code: str | None) -> None:
    """Refuse an unknown `remote_code`."""
    if remote_code not in _CHOICES:
        raise ValueError(f"remote_code={remote_code!r}: choose 'auto', 'bundle', 'package' or None")


@cache
def _files(kind: type, names: tuple[str, ...], choice: str) -> tuple[str, dict[str, str]]:
    """Return entry module and files of the code for a class, by the names that the entry gives."""
    if TRAVELS and choice == "package":
        raise ValueError("remote_code='package': tokenahead is not installed here; choose 'bundle'")
    if TRAVELS:
        beside = sorted(path for path in Path(__file__).parent.glob("*.py") if path.name != "__init__.py")
        return kind.__module__.rpartition(".")[2], {path.name: path.read_text(encoding="utf-8") for path in beside}
    root, _, module = kind.__module__.partition(".")
    bundle = handed("bundle").bundle(module)
    if choice == "bundle":
        return bundle.entry, dict(bundle.files)
    is_public = all(hasattr(import_module(root), name) for name in names)
    shim = f"from {root if is_public else kind.__module__} import {', '.join(names)}  # noqa: F401\n"
    return bundle.entry, {f"{bundle.entry}.py": shim}


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
    auto_map, files = code_for(saved, remote_code)
    path = directory / saved._config_file
    if not path.is_file():  # adapters of peft were saved alone, or another process writes
        return
    fields = json.loads(path.read_text(encoding="utf-8"))
    is_stale = is_ours(type(saved)) and fields.pop("auto_map", None) is not None
    if is_stale or files:
        if files:  # tokenizers have pairs, of a slow and a fast class
            is_model = saved._config_file == CONFIG_NAME
            fields["auto_map"] = auto_map if is_model else {name: (each, None) for name, each in auto_map.items()}
        files[path.name] = json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
    for name, text in files.items():
        path, data = directory / name, text.encode()
        if not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # it may be a link
            path.write_bytes(data)


def code_obstacle(saved: object) -> str | None:
    """Return why no code can be saved with an object; None where it can."""
    return None if is_ours(type(saved)) else f"{type(saved).__module__} is not of tokenahead"


def code_for(saved: Any, remote_code: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """Return `auto_map` and files of a directory, by the choice of `save_pretrained`; both are empty for no code.

    `"auto"` is no code where this library is installed; what was loaded from such code saves it again.
    """
    check_choice(remote_code)
    kind, reason = type(saved), saved.without_code()
    if remote_code in ("bundle", "package") and reason:
        raise ValueError(f"remote_code={remote_code!r}: {reason}; leave it out")
    choice = ("bundle" if TRAVELS else None) if remote_code == "auto" else remote_code
    if choice is None or reason or not saved.remote_classes:
        return {}, {}
    config = type(getattr(saved, "config", None))
    names = ({"AutoConfig": config.__name__} if is_ours(config) else {}) | dict(saved.remote_classes)
    entry, files = _files(kind, tuple(sorted({*names.values()})), choice)
    written = {f"{CODE_DIRECTORY}/{name}": text for name, text in (files | {"README.md": _README}).items()}
    return {name: f"{CODE_DIRECTORY}/{entry}.{class_}" for name, class_ in names.items()}, written


class RemoteCodeTokenizerMixin:
    """`save_pretrained` of a tokenizer: whole or not at all, with the code that loads it elsewhere on request."""

    remote_classes: Mapping[str, str] = {}
    travels_when_pushed = True
    _config_file = "tokenizer_config.json"
    _pushed_code: str | None = "auto"

    @classmethod
    def register_for_auto_class(cls, auto_class: str | type = "AutoTokenizer") -> None:
        """Register classes of users as transformers does; this library's own save their code without that."""
        if not is_ours(cls):
            super().register_for_auto_class(auto_class)

    def without_code(self) -> str | None:
        """Return why no code can be saved with it; None where it can."""
        return code_obstacle(self)

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
        hub = {key: kwargs.pop(key) for key in ("repo_id", "commit_message", "private", "create_pr") if key in kwargs}
        with whole_directory(target) as directory:
            names = super().save_pretrained(directory, *args, **kwargs)
            add_code(self, directory, self._pushed_code if remote_code == "auto" else remote_code)
        if push_to_hub:
            name = hub.pop("repo_id", target.absolute().name)
            self.push_to_hub(name, remote_code=remote_code, token=kwargs.get("token"), **hub)
        return tuple(str(target / Path(name).relative_to(directory)) for name in names)

    def push_to_hub(self, repo_id: str, *args: Any, remote_code: str | None = "auto", **kwargs: Any) -> Any:
        """Upload as every tokenizer of transformers does, with its code unless `remote_code` says otherwise."""
        self._pushed_code = code_when_pushed(self, remote_code)
        try:
            return super().push_to_hub(repo_id, *args, **kwargs)
        finally:
            self._pushed_code = "auto"


if TRAVELS and not transformers.__version__.startswith(tuple(f"{version}." for version in TRANSFORMERS)):
    logger.warning(
        f"the code of this model (tokenahead {__version__}) is written for transformers {TRANSFORMERS[0]} to "
        f"{TRANSFORMERS[-1]}, and {transformers.__version__} is installed: if it fails, pip install '{REQUIREMENT}', "
        "or install tokenahead, which is then used in its place"
    )
