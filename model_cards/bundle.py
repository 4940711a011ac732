"""Code that travels with a model: the modules that a class needs, flattened into one directory.

transformers copies code by a regular expression that knows no directories. So every module that a class reaches by
relative imports gets one flat name here, and imports are rewritten. Reads source files, imports nothing.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from .. import __version__

_ROOT = Path(__file__).parents[1]
HEADER = f"# {{source}} of tokenahead {__version__} (Apache-2.0), as it travels with a model: only imports differ.\n"
_IMPORT = re.compile(r"^([ \t]*from )(\.+)([\w.]*)(?= import )", re.MULTILINE)


@cache
def bundle(module: str) -> tuple[str, dict[str, str]]:
    """Flatten a module (`"modeling.evabyte.model"`) and all that it imports of this package, once per process.

    Returns:
        The name of the flat module, and source text by file name.

    Raises:
        FileNotFoundError: An installation without its source.
    """
    start = _ROOT.joinpath(*module.split(".")).with_suffix(".py")
    files = {f"{_flat_name(_ROOT)}.py": f'{HEADER.format(source="the version")}\n__version__ = "{__version__}"\n'}
    waiting = [start]
    while waiting:
        path = waiting.pop()
        name = f"{_flat_name(path)}.py"
        if name not in files:
            files[name], targets = _flattened(path)
            waiting += targets
    return _flat_name(start), files


def _flattened(path: Path) -> tuple[str, list[Path]]:
    """Return the source of a module in a bundle, and the files that it imports."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not there: to save code with a model, install tokenahead with its source; or remote_code=None"
        )
    targets = []

    def rewritten(match: re.Match[str]) -> str:
        target = path.parents[len(match[2]) - 1].joinpath(*filter(None, match[3].split(".")))
        if target != _ROOT:
            is_package = (target / "__init__.py").is_file()
            target = target / "__init__.py" if is_package else target.with_suffix(".py")
            targets.append(target)
        return f"{match[1]}.{_flat_name(target)}"

    text = _IMPORT.sub(rewritten, path.read_text(encoding="utf-8"))
    return HEADER.format(source=path.relative_to(_ROOT).as_posix()) + text, targets


def _flat_name(path: Path) -> str:
    """Return the name of a module in a bundle: its path, joined by "_", without a last `model`."""
    if path == _ROOT:  # of which modules import `__version__` alone
        return "tokenahead_version"
    parts = [*path.parent.relative_to(_ROOT).parts, path.stem.strip("_")]
    return "_".join(parts[:-1] if parts[-1] == "model" else parts)
