"""Imports point one way, configuration <- generation <- modeling <- training <- model_cards, and never in a circle.

Imports in functions, under TYPE_CHECKING and by `import_module` count, and names that a package's `__init__` hands on
count as imports of the files that define them.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ["configuration", "generation", "modeling", "training", "model_cards"]
FACE = {"deprecated", "experimental", "extending", "tokenahead"}
FILES = {
    ".".join((path.parent if path.stem == "__init__" else path.with_suffix("")).relative_to(ROOT).parts): path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
}
"""By name of the module, without the package's."""


def is_package(name: str) -> bool:
    return FILES[name].stem == "__init__"


@cache
def written(name: str) -> list[str]:
    """Full names of all that a module imports, relative to the root; an imported name follows its module."""
    package = name.split(".") if is_package(name) else name.split(".")[:-1]
    found = []
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module or "").split(".")] if node.module else base
            found += [".".join([*module, alias.name]) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            # the package's own name may be computed: what follows it is written out
            texts = (part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant))
            found += [text.strip(".") for text in texts if isinstance(text, str)]
    return [each.removeprefix("tokenahead.") for each in found]


def origin(name: str, seen: frozenset[str] = frozenset()) -> str | None:
    """The module that a full name lies in, through the packages that hand it on; None for foreign ones."""
    if name in FILES and not is_package(name):
        return name
    owner, _, attribute = name.rpartition(".")
    if owner in FILES and is_package(owner) and name not in seen:
        handed_on = (each for each in written(owner) if each.rpartition(".")[2] == attribute)
        return next(filter(None, (origin(each, seen | {name}) for each in handed_on)), None)
    return owner if owner in FILES else None


def imported(name: str) -> Iterator[str]:
    for each in written(name):
        if (found := origin(each)) not in (None, name):
            yield found


GRAPH = {name: set(imported(name)) for name in FILES}


def against() -> set[tuple[str, str]]:
    rank = {folder: index for index, folder in enumerate(FOLDERS)}
    pairs = ((one, other) for one, others in GRAPH.items() for other in others)
    return {(one, other) for one, other in pairs if rank[one.split(".")[0]] < rank[other.split(".")[0]]}


def reached(start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = {name for name in GRAPH[waiting.pop()] if not is_package(name)} - seen
        seen |= new
        waiting += new
    return seen


def circles() -> set[frozenset[str]]:
    """Sets of modules that reach each other; packages only hand names on."""
    reach = {name: reached(name) for name in GRAPH if not is_package(name)}
    return {
        frozenset(other for other in found if name in reach[other]) for name, found in reach.items() if name in found
    }


def test_imports_point_one_way():
    assert not against()


def test_no_circles():
    assert not circles()


@pytest.mark.parametrize("folder", FOLDERS)
def test_public_face_imported_by_no_folder(folder):
    names = [name for name in FILES if name.split(".")[0] == folder]
    face = {each.split(".")[0] for name in names for each in written(name)} & (FACE - {"tokenahead"})
    assert not face
