"""Says where a wheel differs from a checkout: `python compare_wheel.py WHEEL CHECKOUT`. Exit code 1 if it does."""

import sys
from pathlib import Path
from zipfile import ZipFile

FOLDERS = ("configuration", "modeling", "generation", "training", "model_cards")
SUFFIXES = (".py", ".jinja", ".bib", ".jsonl", "py.typed")


def is_ours(name: str) -> bool:
    """Whether a file of this path belongs into the wheel: code, templates, and all of the model in the box."""
    return name.endswith(SUFFIXES) or "model_cards/box/" in name


def of_wheel(path: Path) -> dict[str, bytes]:
    """Names and contents of the package's files in a wheel."""
    with ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist() if is_ours(name)}


def of_checkout(root: Path) -> dict[str, bytes]:
    """The same of a checkout, whether or not it has the links in tokenahead/."""
    above = root / "tokenahead"  # the links to the five folders are followed below
    files = [path for path in (*above.iterdir(), *(above / "experimental").iterdir()) if path.name.endswith(SUFFIXES)]
    files.append(root / "tokenahead_command.py")
    own = {path.relative_to(root).as_posix(): path.read_bytes() for path in files}
    paths = [path for folder in FOLDERS for path in (root / folder).rglob("*") if is_ours(path.as_posix())]
    return own | {f"tokenahead/{path.relative_to(root).as_posix()}": path.read_bytes() for path in paths}


def main(wheel: Path, checkout: Path) -> None:
    """Compares, and ends the process with a message where anything differs."""
    packed, source = of_wheel(wheel), of_checkout(checkout)
    wrong = sorted(name for name in packed.keys() | source.keys() if packed.get(name) != source.get(name))
    if wrong or not source:
        raise SystemExit(f"{wheel.name} and {checkout} differ in {', '.join(wrong) or 'everything'}")
    print(f"{wheel.name} holds all {len(source)} files")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
