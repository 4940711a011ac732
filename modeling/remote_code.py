"""Code that travels with what is saved, so that a directory loads where this library is not installed.

In the package, the code is that which `model_cards.bundle` flattens; a model that was itself loaded from such code
hands on the files beside this one. Knows no model, and imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import logging

from .. import __version__
from .folders import whole_folder

logger = logging.get_logger(__name__)

CODE_FOLDER = "tokenahead_code"
"""Where a saved directory has its code."""
TRAVELS = __name__.rpartition(".")[2] != "remote_code"
"""Whether this very file came with a model."""
TRANSFORMERS = "5.23"
"""The version of transformers that the code is written for: it leans on private methods of `generate`."""
_CHOICES = ("auto", "bundle", "package", None)
_CHECKPOINT = "checkpoint-"  # how trainers name directories that they resume from
_README = f"""This is code of tokenahead {__version__} (Apache-2.0), with which the directory above is loaded, by the
Auto classes of transformers that config.json names under `auto_map` (tokenizer_config.json for the tokenizer):

    AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True)

It needs torch and transformers {TRANSFORMERS}, and peft where it imports that. Where tokenahead is installed
(`pip install tokenahead`), that is used in place of this code.
"""


def check_choice(remote_code: str | None) -> None:
    """Refuses what `remote_code` cannot be.

    Raises:
        ValueError: It is named.
    """
    if remote_code not in _CHOICES:
        raise ValueError(f"remote_code={remote_code!r}: choose 'auto', 'bundle', 'package' or None")


def resolved_choice(kind: type, remote_code: str | None, folder: Path) -> str | None:
    """What `"auto"` means for a class and a directory: see `save_pretrained`.

    Raises:
        ValueError: An unknown choice, or `"bundle"` for a class whose code this library does not know.
    """
    check_choice(remote_code)
    if not _is_ours(kind):
        if remote_code in ("bundle", "package"):
            raise ValueError(
                f"remote_code={remote_code!r}: {kind.__name__} is defined in {kind.__module__}, and only classes of "
                "tokenahead travel; save with remote_code=None, or register_for_auto_class() and files of your own"
            )
        return None
    if remote_code != "auto":
        return remote_code
    is_checkpoint = folder.name.startswith(_CHECKPOINT) and folder.name.removeprefix(_CHECKPOINT).isdecimal()
    return "package" if is_checkpoint and not TRAVELS else "bundle"


def code_of(kind: type, names: Mapping[str, str], choice: str) -> tuple[dict[str, str], dict[str, str]]:
    """The code that loads a class.

    Args:
        kind: The class, one of this library.
        names: By Auto class: the name that is looked for in the module of `kind`.
        choice: `"bundle"` or `"package"`.

    Returns:
        The `auto_map` of a config.json, and source text by path in the saved directory.

    Raises:
        ValueError: `"package"`, where this library is not installed.
    """
    entry, files = _files(kind, tuple(sorted({*names.values()})), choice)
    written = {f"{CODE_FOLDER}/{name}": text for name, text in (files | {"README.md": _README}).items()}
    return {name: f"{CODE_FOLDER}/{entry}.{found}" for name, found in names.items()}, written


@cache
def _files(kind: type, names: tuple[str, ...], choice: str) -> tuple[str, dict[str, str]]:
    """Entry module and files of the code for a class."""
    if TRAVELS and choice == "package":
        raise ValueError("remote_code='package': tokenahead is not installed here; choose 'bundle'")
    if TRAVELS:
        beside = sorted(path for path in Path(__file__).parent.glob("*.py") if path.name != "__init__.py")
        return kind.__module__.rpartition(".")[2], {path.name: path.read_text(encoding="utf-8") for path in beside}
    root, _, module = kind.__module__.partition(".")
    bundle = import_module(f"{root}.model_cards.bundle").bundle(module)
    if choice == "bundle":
        return bundle.entry, dict(bundle.files)
    is_public = all(hasattr(import_module(root), name) for name in names)
    shim = f"from {root if is_public else kind.__module__} import {', '.join(names)}  # noqa: F401\n"
    return bundle.entry, {f"{bundle.entry}.py": shim}


def _is_ours(kind: type) -> bool:
    """Whether a class is part of this library, or of the code that it was loaded from."""
    return kind.__module__.startswith(f"{_root()}.")


def _root() -> str:
    return __package__ if TRAVELS else __package__.partition(".")[0]


@contextmanager
def auto_map_set(config: Any, auto_map: dict[str, str] | None) -> Iterator[None]:
    """Has a configuration say where its code lies, for the time of writing it.

    Auto classes mark a class that came with a directory; transformers would copy its code once more, by its own rule.
    """
    own = vars(config)
    names = ("auto_map", "_auto_class")
    kept = {name: own.pop(name) for name in names if name in own}
    own |= {"auto_map": auto_map} if auto_map else {}
    own |= {"_auto_class": None} if _is_ours(type(config)) else {}
    try:
        yield
    finally:
        for name in names:
            own.pop(name, None)
        own |= kept


class TravellingMixin:
    """A class whose code can be saved with it.

    To be placed before the base class of transformers.

    Attributes:
        remote_classes: By Auto class: which name of its module it gives, `{"AutoModel": "MTPHeads"}`.
    """

    remote_classes: Mapping[str, str] = {}

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """As in transformers, for classes of users; this library's own save their code without that.

        Auto classes call it on what they load with trust; transformers would then copy code by its own rule as well.
        """
        if not _is_ours(cls):
            super().register_for_auto_class(auto_class)

    def code_for(self, remote_code: str | None, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
        """`auto_map` and files for a directory, by the choice of `save_pretrained`; both empty where none travels."""
        kind = type(self)
        choice = resolved_choice(kind, remote_code, folder)
        if choice is None or not self.remote_classes:
            return {}, {}
        config = type(getattr(self, "config", None))
        own_config = {"AutoConfig": config.__name__} if _is_ours(config) else {}
        return code_of(kind, own_config | dict(self.remote_classes), choice)


class TravellingTokenizerMixin(TravellingMixin):
    """`save_pretrained` of a tokenizer: whole or not at all, and with the code that loads it elsewhere."""

    def save_pretrained(
        self,
        save_directory: str | PathLike,
        *args: Any,
        push_to_hub: bool = False,
        remote_code: str | None = "auto",
        **kwargs: Any,
    ) -> tuple[str, ...]:
        """Saves as every tokenizer of transformers does.

        Args:
            save_directory: The directory; that of the model, as a rule.
            *args: As in transformers.
            push_to_hub: Upload afterwards; `repo_id` and so on as for `push_to_hub`.
            remote_code: As for `save_pretrained` of a model.
            **kwargs: As in transformers.

        Returns:
            The names of the files.

        Raises:
            ValueError: An unknown `remote_code`, or a class that it cannot be had for.
        """
        target = Path(save_directory)
        auto_map, files = self.code_for(remote_code, target)
        hub = {key: kwargs.pop(key) for key in ("repo_id", "commit_message", "private", "create_pr") if key in kwargs}
        self._auto_map = {name: (found, None) for name, found in auto_map.items()} or None
        try:
            with whole_folder(target) as folder:
                names = super().save_pretrained(folder, *args, **kwargs)
                write_code(folder, files)
        finally:
            self._auto_map = None
        if push_to_hub:
            self.push_to_hub(hub.pop("repo_id", target.absolute().name), token=kwargs.get("token"), **hub)
        return tuple(str(target / Path(name).relative_to(folder)) for name in names)


def write_code(folder: Path, files: Mapping[str, str]) -> None:
    """Writes code into a directory; a file that has the same text is left alone.

    Args:
        folder: The directory of the model.
        files: Source text by path.
    """
    for name, text in files.items():
        path, data = folder / name, text.encode()
        if not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


if TRAVELS and not transformers.__version__.startswith(f"{TRANSFORMERS}."):
    logger.warning(
        f"the code of this model (tokenahead {__version__}) is written for transformers {TRANSFORMERS}, and "
        f"{transformers.__version__} is installed: if it fails, pip install 'transformers=={TRANSFORMERS}.*', or "
        "pip install tokenahead, which is then used in its place"
    )
