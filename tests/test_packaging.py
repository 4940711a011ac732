"""The package's list of directories in setup.cfg, and clones without symbolic links."""

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("configuration", "modeling", "generation", "training", "model_cards")


def folders_with_code() -> set[str]:
    inits = (path for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py"))
    return {"tokenahead", "tokenahead.experimental"} | {
        ".".join(("tokenahead", *path.parent.relative_to(ROOT).parts)) for path in inits
    }


def test_setup_cfg_names_every_package():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert set(setup["options"]["packages"].split()) == folders_with_code()


@pytest.mark.nightly
def test_a_clone_without_links_imports(tmp_path):
    """What git writes where it may not make links: a text file that holds the link's target."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tokenahead").mkdir()
    for name in ("__init__.py", "__main__.py", "cli.py", "extending.py", "py.typed"):
        shutil.copy(ROOT / "tokenahead" / name, tmp_path / "tokenahead" / name)
    for folder in FOLDERS:
        (tmp_path / "tokenahead" / folder).write_text(f"../{folder}")
    code = "import tokenahead.cli, tokenahead.training as training; print(tokenahead.cli.__file__, training.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(tmp_path / "tokenahead" / "cli.py"), str(tmp_path / "training" / "__init__.py")]


def test_the_installed_package_is_found_from_beside_its_clone(tmp_path):
    """The directory of a script may hold the clone, whose name is the package's and which is none itself."""
    (tmp_path / "tokenahead").mkdir()
    code = "from importlib.util import find_spec; print(find_spec('tokenahead').origin)"
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip().endswith("__init__.py")


WITHOUT_EXTRAS = """
import sys
sys.modules.update(dict.fromkeys(["rich", "matplotlib", "trl", "datasets", "evaluate"]))
from tokenahead import cli
from tokenahead.training import MTPLossWeightSchedule, MTPTrainer, PTPTrainer
for found in ("rich", "matplotlib"):
    try:
        cli.main(["demo"])
    except SystemExit as end:
        assert end.code == 1, end.code
    del sys.modules[found]
try:
    from tokenahead.training import MTPSFTTrainer
except ImportError as error:
    print(error, file=sys.stderr)
"""


@pytest.mark.nightly
def test_the_core_works_without_extras_and_what_needs_one_names_it():
    """In one process, because importing torch takes seconds."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "", done.stderr
    assert done.stderr.splitlines() == [
        "tokenahead demo: the demo needs 'rich', of tokenahead[demo]: in a checkout, pip install '.[demo]'",
        "tokenahead demo: the demo needs 'matplotlib', of tokenahead[demo]: in a checkout, pip install '.[demo]'",
        "a trainer of TRL needs 'trl', of tokenahead[train]: in a checkout, pip install '.[train]'",
    ]


def test_a_defect_of_our_own_is_no_missing_extra():
    from tokenahead.training.utils import needs_extra

    with pytest.raises(ModuleNotFoundError, match="'tokenahead.nowhere'"), needs_extra("demo", "it"):
        import tokenahead.nowhere  # noqa: F401


def test_what_a_newcomer_tries_first_gives_the_same_text():
    """In the installed versions; `.ci/compatibility.py --newest` runs it in those that pip finds today."""
    command = [sys.executable, str(ROOT / ".ci" / "newcomer.py")]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | path)
    assert done.returncode == 0 and done.stdout.count("the same text") == 6, done.stdout + done.stderr
