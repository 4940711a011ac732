"""Run the core tests with several versions of transformers and write docs/compatibility.md. Usage: make compatibility

Each version gets an environment of its own outside the checkout. With --light, the packages of the running Python are
used and only transformers is exchanged (`pip install --target --no-deps`), which takes a minute in place of ten. With
--newest, the newest release that pip finds is tried alone, after what a newcomer tries first (newcomer.py), and the
table stays: a failure counts where that version is listed as tested, and is reported where it is not.
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
NAMES = ROOT / "configuration" / "transformers_names.py"
HEAD = """# Versions of transformers

`make compatibility` runs the core tests with each version, in an environment of its own; this table is what it wrote.
There is no upper pin: a newer version than those in the table is named once (`configuration/transformers_names.py`),
and tests list the private names that we use (`tests/test_private_apis.py`).
`setup.cfg` asks for the oldest version on which all of them pass: older ones cost nothing but their row. Tests are
skipped where transformers refuses the installed peft: 5.24 asks for peft 0.22 in `add_adapter`, and there is no such
release yet. `train="lora"` works there by peft's own functions; on a backbone that carries adapters already it says by
name what is needed, and `peft.get_peft_model` works. CI runs all tests with 5.23.0.

| transformers | passed | skipped | failed | errors |
|---|---|---|---|---|
"""


def main() -> int:
    """Test the versions that were asked for; return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help=f"default: {' '.join(tested_versions())}")
    parser.add_argument("--light", action="store_true", help="exchange transformers alone")
    parser.add_argument("--newest", action="store_true", help="the newest release alone, without writing the table")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        wanted = [f"{version}.*" for version in arguments.versions or tested_versions()]
        for version in [""] if arguments.newest else wanted:
            rows.append(_row(version, Path(scratch) / (version or "newest"), arguments.light))
            print(rows[-1], flush=True)
    if not arguments.newest:
        (ROOT / "docs" / "compatibility.md").write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")
    return sum(_fails(row, arguments.newest) for row in rows)


def tested_versions() -> tuple[str, ...]:
    """Return the versions that the package lists as tested, without importing it."""
    listed = re.search(r"^TESTED_VERSIONS = \((.*)\)$", NAMES.read_text(encoding="utf-8"), re.MULTILINE)
    return tuple(re.findall(r'"([\d.]+)"', listed[1] if listed else ""))


def _fails(row: str, newest: bool) -> bool:
    """Return whether a row counts as a failure: of the newest release only where it is listed as tested."""
    version, passed, *_, failed, errors = re.findall(r"[\d.]+", row)
    is_listed = version.rpartition(".")[0] in tested_versions()
    if newest and not is_listed:
        print(f"transformers {version} is not listed as tested: add it, or mend what fails")
    return (is_listed or not newest) and (passed == "0" or (failed, errors) != ("0", "0"))


def _row(version: str, folder: Path, light: bool) -> str:
    """Install one version ("": the newest) and test it; return its row of the table."""
    python, path = (sys.executable, f"{folder}{os.pathsep}{ROOT}") if light else (str(folder / "bin/python"), str(ROOT))
    wanted = f"transformers=={version}" if version else "transformers"
    if light:
        _run(python, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), wanted)
    else:
        _run(sys.executable, "-m", "venv", str(folder))
        _run(python, "-m", "pip", "install", "-q", "-c", _constraints(folder), f"{ROOT}[test]", wanted)
    environment = os.environ | {"PYTHONPATH": path}
    script = "import transformers; print(transformers.__version__)"
    found = subprocess.run([python, "-c", script], env=environment, capture_output=True, text=True, check=True).stdout
    first = [] if version else [str(ROOT / ".ci" / "newcomer.py")]
    if first and subprocess.run([python, *first], env=environment).returncode:
        return f"| {found.strip()} | 0 | 0 | 1 | 0 |"
    command = [python, "-m", "pytest", "-v", "--no-header", "-p", "no:cacheprovider", "-m", "core"]
    command += ["--continue-on-collection-errors"]
    output = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stdout
    print("\n".join(line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))))
    kinds = ("passed", "skipped", "failed", "error")
    counts = [re.search(rf"(\d+) {kind}", output.rpartition("\n=")[2]) for kind in kinds]
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
