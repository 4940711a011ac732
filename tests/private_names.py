"""Finds the private names of other libraries that our source uses, by reading its syntax and its classes' bases."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
import transformers
from peft import LoraConfig

import tokenahead
from tokenahead.training.utils import MissingExtraError

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("configuration", "modeling", "generation", "training", "model_cards")
LIBRARIES = ("transformers", "trl", "peft", "torch", "accelerate", "huggingface_hub", "safetensors")
USED_WITHOUT_INHERITING = (
    transformers.AutoModelForCausalLM,
    transformers.GenerationConfig,
    transformers.LlamaForCausalLM,
    transformers.PrefixConstrainedLogitsProcessor,
    LoraConfig,
)
"""Library classes whose objects we touch, in addition to those that our classes inherit from."""
OF_METACLASSES = {"_abc_impl", "_backward_cls"}
"""Attributes that Python and PyTorch give to every class of a kind."""


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore; what transformers notes on classes as it runs is no name of ours."""
    return bool(re.fullmatch(r"_[A-Za-z]\w*", name)) and not name.endswith("_cached_value")


@cache
def attributes(kind: type) -> frozenset[str]:
    """Private names that a class defines itself: in its body, or by assigning to `self`."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # a class without Python source
        source = ""
    assigned = re.findall(r"\bself\.(_[A-Za-z]\w*)\b[^=\n]*=(?!=)", source)
    return frozenset(name for name in (*vars(kind), *assigned) if is_private(name)) - OF_METACLASSES


def files() -> list[Path]:
    """Every module of the library, without the links in tokenahead/."""
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def modules() -> tuple[ModuleType, ...]:
    names = [".".join(("tokenahead", *path.relative_to(ROOT).with_suffix("").parts)) for path in files()]
    found = []
    for name in names:
        with suppress(MissingExtraError):  # the extra `eval` is large, and its module has a separate test
            found.append(importlib.import_module(name.removesuffix(".__init__")))
    return tuple(found)


@cache
def classes() -> tuple[type, ...]:
    """Every class that the library defines."""
    found = {
        value: None
        for module in modules()
        for value in vars(module).values()
        if inspect.isclass(value) and value.__module__.startswith(f"{tokenahead.__name__}.")
    }
    return tuple(found)


def library_bases(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if base.__module__.partition(".")[0] in LIBRARIES]


def library_names() -> set[str]:
    """Private names of the library classes that we inherit from or touch, and of the module `torch`."""
    kinds = {base for kind in (*classes(), *USED_WITHOUT_INHERITING) for base in library_bases(kind)}
    return {name for kind in kinds for name in attributes(kind)} | {name for name in vars(torch) if is_private(name)}


def overridden() -> Iterator[tuple[str, str]]:
    """Private names that a class of ours takes from a library class, and the class."""
    for kind in classes():
        of_library = {name for base in library_bases(kind) for name in attributes(base)}
        yield from ((name, kind.__name__) for name in attributes(kind) & of_library)


def own_names() -> set[str]:
    """Private names that a module or a class of ours defines, and no library class above it.

    Nor one above a class that takes it in: a mixin sets attributes of the class that it is mixed into.
    """
    own = {name for module in modules() for name in vars(module) if is_private(name)}
    for kind in classes():
        heirs = [heir for heir in classes() if kind in heir.__mro__]
        own |= attributes(kind) - {name for heir in heirs for base in library_bases(heir) for name in attributes(base)}
    return own


def accessed() -> Iterator[tuple[str, str]]:
    """Private names of libraries that the source reads, sets, imports or names in a string, and where."""
    of_library, own = library_names(), own_names()
    for path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in filter(is_private, _foreign(node, of_library, own)):
                yield name, f"{path.relative_to(ROOT)}:{node.lineno}"


def _foreign(node: ast.AST, of_library: set[str], own: set[str]) -> list[str]:
    """Names in a piece of syntax that mean something of a library."""
    if isinstance(node, ast.Attribute):
        is_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        return [node.attr] if node.attr in of_library and not (is_self and node.attr in own) else []
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value] if node.value not in own else []
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LIBRARIES and not node.level:
        return [*node.module.split("."), *(alias.name for alias in node.names)]
    return []
