"""Run the core tests with several versions of transformers and write docs/compatibility.md. Usage: make compatibility

Each version gets an environment of its own outside the checkout. With --light, the packages of the running Python are
used and only transformers is exchanged (`pip install --target --no-deps`), which takes a minute in place of ten.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("5.21", "5.22", "5.23")
HEAD = """# Versions of transformers

`make compatibility` runs the core tests with each version, in an environment of its own; this table is what it wrote.
There is no upper pin: a version that lacks a private name that we use says so when `tokenahead` is imported, with both
versions (`configuration/transformers_names.py`). `setup.cfg` asks for the oldest version on which all of them pass.

| transformers | passed | failed | errors |
|---|---|---|---|
"""


def main() -> int:
    """Test every version; return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help=f"default: {' '.join(VERSIONS)}")
    parser.add_argument("--light", action="store_true", help="exchange transformers alone")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for version in arguments.versions or VERSIONS:
            rows.append(_row(version, Path(scratch) / version, arguments.light))
            print(rows[-1], flush=True)
    (ROOT / "docs" / "compatibility.md").write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")
    return sum(not row.endswith("| 0 | 0 |") for row in rows)


def _row(version: str, folder: Path, light: bool) -> str:
    """Install one version and test it; return its row of the table."""
    python, path = (sys.executable, f"{folder}{os.pathsep}{ROOT}") if light else (str(folder / "bin/python"), str(ROOT))
    if light:
        _run(python, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), f"transformers=={version}.*")
    else:
        _run(sys.executable, "-m", "venv", str(folder))
        _run(
            python,
            "-m",
            "pip",
            "install",
            "-q",
            "-c",
            _constraints(folder),
            f"{ROOT}[test]",
            f"transformers=={version}.*",
        )
    environment = os.environ | {"PYTHONPATH": path}
    script = "import transformers; print(transformers.__version__)"
    found = subprocess.run([python, "-c", script], env=environment, capture_output=True, text=True, check=True).stdout
    command = [python, "-m", "pytest", "-n", "0", "-v", "--no-header", "-p", "no:cacheprovider", "-m", "core"]
    output = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stdout
    print("\n".join(line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))))
    counts = [re.search(rf"(\d+) {kind}", output.rpartition("\n=")[2]) for kind in ("passed", "failed", "error")]
    return f"| {found.strip()} | " + " | ".join(count[1] if count else "0" for count in counts) + " |"


def _constraints(folder: Path) -> str:
    """Write the project's constraints without that of transformers; return the file."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    file = folder / "constraints.txt"
    file.write_text("\n".join(line for line in lines if not line.startswith("transformers==")), encoding="utf-8")
    return str(file)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
