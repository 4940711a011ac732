"""Imports on demand (optional dependencies, names of a package), atomic writing of files, and what is shown."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_JOINERS = "\u200c\u200d"
"""Characters of words in many scripts, and of emoji."""
_OF_VALIDATORS = re.compile(r"Class validation error for validator '\w+': \w+: ")
"""What messages of our configs begin with, and tells a user nothing."""


class MissingExtraError(ModuleNotFoundError):
    """A package that an extra of `tokenahead` installs is missing."""


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Wrap imports of packages that an extra installs: a MissingExtraError says how to get one that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "tokenahead"):  # a defect of this package, not a missing extra
            raise
        message = f"{what} needs {package!r}, of tokenahead[{extra}]: in a checkout, pip install '.[{extra}]'"
        raise MissingExtraError(message, name=error.name) from error


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__`, which imports the module of a name at its first use, and its `__dir__`."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f".{homes[name]}", package), name)

    return find, lambda: sorted({*vars(import_module(package)), *homes})


def replace_file(path: str | Path, text: str) -> Path:
    """Write a file, and its directory, in UTF-8; after an interruption the old file is unchanged. Return the path."""
    from ..generation.tensors.saving import whole_file  # this module is read before PyTorch is

    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")
    return Path(path)


def replace_figure(path: Path, figure: Figure) -> Path:
    """Write a figure as PNG under a temporary name first; return `path`."""
    from ..generation.tensors.saving import whole_file

    with whole_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return path


def eos_ids(model: object) -> list[int]:
    """Return the end-of-text ids of a model's generation config; none if it has none."""
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def until_end(ids: list[int], ends: Collection[int]) -> list[int]:
    """Return a sequence's new ids without the padding after its end."""
    return ids[: next((index + 1 for index, token in enumerate(ids) if token in ends), len(ids))]


def _is_hidden(character: str) -> bool:
    """Return whether a character moves the cursor, colours, or turns the direction of text, and shows nothing."""
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in _JOINERS


def visible(text: str) -> str:
    """Return a text without control and bidi characters; line feeds and tabs stay."""
    return "".join(each for each in text if each in "\n\t" or not _is_hidden(each))


def escaped(text: str) -> str:
    """Return a text as a terminal may show it: control and bidi characters as escapes, `\\x1b`."""
    return "".join(ascii(each)[1:-1] if _is_hidden(each) else each for each in text)


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line that a terminal may show, or the name of its class; of a config that
    fails its validation, what its own check says."""
    said = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        said = f"{error.filename}: {error.strerror}"  # in place of [Errno 2]
    words = _OF_VALIDATORS.sub("", " ".join(said.split()))
    return escaped(words) or type(error).__name__


def without_directories(name: str) -> str:
    """Return a name as a card shows it: of a path of this machine, what comes last."""
    path = Path(name).expanduser()
    is_here = path.is_absolute() or name.startswith(".") or os.path.exists(path)  # noqa: PTH110 - a name may be too long
    return path.name or path.resolve().name if is_here else name


def shown_word(word: str) -> str:
    """Return an argument of a command as a card shows it, see `without_directories`."""
    return "".join(part and without_directories(part) for part in re.split("([=:?])", word))


def check_same(where: str, earlier: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Refuse a directory that was made with other settings; `where` is the argument that names it."""
    for name in sorted({*earlier, *now}):
        if earlier.get(name) != now.get(name):
            raise ValueError(
                f"{where} was made with {name}={earlier.get(name)!r}, and this is {name}={now.get(name)!r}: "
                "choose another directory, or remove it"
            )
