"""Code that travels with a model: the modules that a class needs, flattened into one directory.

transformers copies code by a regular expression that knows no directories (`from ..heads.ff import FFHead` would be a
file `.heads.ff.py`). So every module that a class reaches by relative imports is taken here under one name of its own,
and its imports are rewritten in place; the rest of a file is unchanged. Reads source files, imports nothing.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from .. import __version__

VERSION_FILE = "tokenahead_version"
"""The module of a bundle that holds `__version__`."""
ALLOWED = frozenset({"torch", "transformers", "huggingface_hub", "safetensors", "numpy"})
"""What bundled code may import: torch, transformers, and what transformers itself needs."""
EXTRA = {"modeling.ptp": frozenset({"peft"})}
"""What the modules of a package may import besides."""
_ROOT = Path(__file__).parents[1]
_HEADER = f"# {{source}} of tokenahead {__version__} (Apache-2.0), as it travels with a model: only imports differ.\n"


@dataclass(frozen=True)
class Bundle:
    """Flattened code.

    Attributes:
        entry: The module of the bundle in which the class is.
        files: Source text by file name.
        requires: Packages that it imports beyond `ALLOWED`.
    """

    entry: str
    files: Mapping[str, str]
    requires: tuple[str, ...]


@cache
def bundle(module: str) -> Bundle:
    """Flatten a module and all that it reaches; made once per process, as the code that runs does not change.

    Args:
        module: A module of this package, without the package's name: `"modeling.evabyte.model"`.

    Returns:
        The files, and where to begin.

    Raises:
        ValueError: Code that cannot travel: two modules of one name, an import of this package by its name, of a name
            that an `__init__` defines, or of a package that is not allowed.
        FileNotFoundError: The source is not there (an installation without it).
    """
    start = _ROOT.joinpath(*module.split(".")).with_suffix(".py")
    found: dict[str, Path] = {}
    files = {f"{VERSION_FILE}.py": _HEADER.format(source="the version") + f'\n__version__ = "{__version__}"\n'}
    requires: set[str] = set()
    waiting = [start]
    while waiting:
        path = waiting.pop()
        name = flat_name(path)
        if found.setdefault(name, path) != path:
            raise ValueError(f"{_shown(path)} and {_shown(found[name])} would both become {name}.py")
        if f"{name}.py" not in files:
            module_there = _flattened(path)
            files[f"{name}.py"] = module_there.text
            requires |= module_there.requires
            waiting += module_there.targets
    return Bundle(flat_name(start), MappingProxyType(files), tuple(sorted(requires)))


def flat_name(path: Path) -> str:
    """Return the name of a module in a bundle: its path, joined by "_", without a last `model`."""
    parts = [*path.parent.relative_to(_ROOT).parts, path.stem]
    return "_".join(parts[:-1] if parts[-1] == "model" and len(parts) > 1 else parts)


@dataclass(frozen=True)
class _Module:
    """A module as a bundle has it, the files that it leads to, and what it imports beyond `ALLOWED`."""

    text: str
    targets: list[Path]
    requires: set[str]


@dataclass(frozen=True)
class _Import:
    """A relative import statement: where it stands, what stands there in a bundle, and the files it leads to."""

    node: ast.ImportFrom
    lines: list[str]
    targets: list[Path]


@cache
def _flattened(path: Path) -> _Module:
    source = _read(path)
    tree = ast.parse(source, path)
    imports = list(_imports(path, tree))
    targets = [target for one in imports for target in one.targets]
    return _Module(_HEADER.format(source=_shown(path)) + _rewritten(source, imports), targets, _foreign(path, tree))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(_read(path), path)


def _read(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not there, so that code cannot be saved with a model: install tokenahead with its source, or "
            "save with remote_code='package' or None"
        )
    return path.read_text(encoding="utf-8")


def _imports(path: Path, tree: ast.Module) -> Iterator[_Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            lines, targets = [], []
            for name, asked in _defining_files(path, node).items():
                lines += _statements(name, asked)
                targets += [file for file, _ in asked if file is not None]
            yield _Import(node, lines, targets)


def _statements(name: str, asked: list[tuple[Path | None, ast.alias]]) -> list[str]:
    """Return import statements for what one module of a bundle gives."""
    modules = [alias for file, alias in asked if file is not None and alias.name == file.stem and _is_module(alias)]
    names = [alias for _, alias in asked if alias not in modules]
    lines = []
    for alias in modules:
        called = alias.asname or alias.name
        # transformers looks for files in lines of the first form only
        lines += [f"from .{name} import __name__ as _name_of_{called}", f"from . import {name} as {called}"]
    if names:
        lines.append(f"from .{name} import {', '.join(map(ast.unparse, names))}")
    return lines


def _is_module(alias: ast.alias) -> bool:
    return vars(alias).get("is_module", False)


def _defining_files(path: Path, node: ast.ImportFrom) -> dict[str, list[tuple[Path | None, ast.alias]]]:
    """For every name of an import: the file that defines it, grouped by the module of the bundle."""
    found: dict[str, list[tuple[Path | None, ast.alias]]] = {}
    for alias in node.names:
        if alias.name == "*":
            raise ValueError(f"{_shown(path)}, line {node.lineno}: import names, not *")
        file = _origin(path, node, alias)
        name = VERSION_FILE if file is None else flat_name(file)
        found.setdefault(name, []).append((file, alias))
    return found


def _origin(path: Path, node: ast.ImportFrom, alias: ast.alias) -> Path | None:
    """Return the file that defines an imported name, through re-exports; None for the version."""
    folder = path.parents[node.level - 1]
    file = folder.joinpath(*(node.module or "").split(".")) if node.module else folder
    if file != _ROOT and file.with_suffix(".py").is_file():
        return file.with_suffix(".py")
    if file == _ROOT and alias.name == "__version__":
        return None
    if (file / f"{alias.name}.py").is_file():
        alias.is_module = True  # type: ignore[attr-defined]
        return file / f"{alias.name}.py"
    init = file / "__init__.py"
    for statement in _tree(init).body:
        if isinstance(statement, ast.ImportFrom) and statement.level:
            for exported in statement.names:
                if (exported.asname or exported.name) == alias.name == exported.name:
                    return _origin(init, statement, exported)
    raise ValueError(
        f"{_shown(path)}, line {node.lineno}: {alias.name} is defined in {_shown(init)} (or is not there), which no "
        "bundle has; define it in a module"
    )


def _foreign(path: Path, tree: ast.Module) -> set[str]:
    """Return packages that a module imports beyond `ALLOWED`, anywhere in it."""
    names: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0]: node.lineno for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names[str(node.module).partition(".")[0]] = node.lineno
    package = ".".join(path.parent.relative_to(_ROOT).parts)
    extra = EXTRA.get(package, frozenset())
    unknown = {name: line for name, line in names.items() if name not in {*sys.stdlib_module_names, *ALLOWED, *extra}}
    for name, line in unknown.items():
        raise ValueError(f"{_shown(path)}, line {line}: code that travels with a model must not import {name!r}")
    return names.keys() & extra


def _rewritten(source: str, imports: list[_Import]) -> str:
    """Return the source with its relative imports replaced; columns of the tree count bytes."""
    lines = source.encode().splitlines(keepends=True)
    for found in sorted(imports, key=lambda one: one.node.lineno, reverse=True):
        node = found.node
        indent = lines[node.lineno - 1][: node.col_offset]
        last, end = node.end_lineno or node.lineno, node.end_col_offset or 0
        rest = lines[last - 1][end:]
        # as many lines as there were, where that is possible: tracebacks then point to the right line
        text = [indent + line.encode() for line in found.lines]
        blank = last - node.lineno + 1 - len(text)
        text[-1] += rest.rstrip(b"\r\n")
        lines[node.lineno - 1 : last] = [line + b"\n" for line in text] + [b"\n"] * blank
    return b"".join(lines).decode()


def _shown(path: Path) -> str:
    return path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else path.name
