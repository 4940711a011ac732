"""Flattened code: whole, with unique names, in imports that transformers sees, and nothing that it may not import."""

import ast
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from transformers.dynamic_module_utils import get_imports, get_relative_imports

from tokenahead.configuration.transformers_names import TESTED_VERSIONS
from tokenahead.model_cards import bundle as module
from tokenahead.model_cards.bundle import bundle
from tokenahead.modeling.common.remote_code import REQUIREMENT

ENTRIES = {
    "modeling.evabyte.model": "modeling_evabyte",
    "modeling.evabyte.backbone": "modeling_evabyte_backbone",
    "modeling.evabyte.tokenizer": "modeling_evabyte_tokenizer",
    "modeling.heads.attached": "modeling_heads_attached",
    "modeling.eagle.model": "modeling_eagle",
    "modeling.ptp.model": "modeling_ptp",
    "modeling.ptp.student": "modeling_ptp_student",
    "modeling.deepseek.model": "modeling_deepseek",
}


@pytest.mark.by_day("modeling.evabyte.model", "modeling.ptp.student")
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_file_is_there_and_transformers_sees_every_import(entry, tmp_path):
    found, files = made = bundle(entry)
    assert found == ENTRIES[entry] and made is bundle(entry)
    needed = set()
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        relative = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.level]
        assert all(node.level == 1 for node in relative)
        named = {node.module or alias.name for node in relative for alias in node.names}
        assert named == set(get_relative_imports(tmp_path / name))
        assert {f"{one}.py" for one in named} <= files.keys()
        needed |= set(get_imports(tmp_path / name)) - set(sys.stdlib_module_names)
    of_transformers = {"torch", "transformers", "huggingface_hub", "safetensors", "numpy", "yaml", "packaging"}
    assert needed - of_transformers == ({"peft"} if entry.startswith("modeling.ptp.") else set())
    assert not any("tokenahead import" in text for text in files.values())


def test_versions_of_transformers_are_those_that_are_tested():
    text = Path(__file__).parents[2].joinpath("setup.cfg").read_text()
    assert f"    transformers>={TESTED_VERSIONS[0]}\n" in text
    low, high = (SpecifierSet(part) for part in REQUIREMENT.removeprefix("transformers").split(","))
    assert all(low.contains(f"{v}.0") and high.contains(f"{v}.0") for v in TESTED_VERSIONS)
    assert not high.contains(f"5.{int(TESTED_VERSIONS[-1].split('.')[1]) + 1}.0")


def test_only_imports_differ_from_the_source():
    path = module._ROOT / "modeling" / "heads" / "registry.py"
    ours = ast.parse(path.read_text(encoding="utf-8"))
    theirs = ast.parse(bundle("modeling.evabyte.model")[1]["modeling_heads_family.py"])

    def rest(tree: ast.Module) -> list[str]:
        return [ast.dump(node) for node in tree.body if not (isinstance(node, ast.ImportFrom) and node.level)]

    assert rest(ours) == rest(theirs)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A separate package for the bundler: by path, the text."""
    monkeypatch.setattr(module, "_ROOT", tmp_path)
    bundle.cache_clear()

    def write(**files: str) -> None:
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    yield write
    bundle.cache_clear()


@pytest.mark.core
def test_every_form_of_import(tree, tmp_path):
    tree(
        room__start="from .pack import (\n    Thing,\n    x as y,\n)\nVALUE = 1\n"
        "def f():\n    from .late import g\n    from .. import __version__\n    return g, __version__\n",
        room__late="g = 1\n",
        room__pack__model="Thing = 1\n",
        room__pack__rest="x = 2\n",
    )
    (tmp_path / "room" / "pack" / "__init__.py").write_text("from .model import Thing\nfrom .rest import x\n")
    _, files = bundle("room.start")
    assert set(files) == {
        *("room_start.py", "room_late.py", "room_pack_init.py", "room_pack.py", "room_pack_rest.py"),
        "tokenahead_version.py",
    }
    text = files["room_start.py"]
    assert "from .room_pack_init import (\n    Thing,\n    x as y,\n)\nVALUE = 1\n" in text
    assert "    from .room_late import g\n    from .tokenahead_version import __version__\n" in text
    assert files["room_pack_init.py"].endswith("from .room_pack import Thing\nfrom .room_pack_rest import x\n")


def test_an_installation_without_sources_says_what_to_do(tree):
    with pytest.raises(FileNotFoundError, match="remote_code="):
        bundle("room.nowhere")
