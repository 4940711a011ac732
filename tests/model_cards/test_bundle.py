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
    of_transformers = {
        "torch",
        "transformers",
        "huggingface_hub",
        "safetensors",
        "numpy",
        "yaml",
        "packaging",
        "tokenizers",
    }
    assert needed - of_transformers == ({"peft"} if entry.startswith("modeling.ptp.") else set())
    assert not any("tokenahead import" in text for text in files.values())


def test_versions_of_transformers_are_those_that_are_tested():
    text = Path(__file__).parents[2].joinpath("setup.cfg").read_text()
    assert f"    transformers>={TESTED_VERSIONS[0]}\n" in text
    low, high = (SpecifierSet(part) for part in REQUIREMENT.removeprefix("transformers").split(","))
    assert all(low.contains(f"{v}.0") and high.contains(f"{v}.0") for v in TESTED_VERSIONS)
    assert not high.contains(f"5.{int(TESTED_VERSIONS[-1].split('.')[1]) + 1}.0")


def test_only_imports_differ_from_the_source():
    path = module._ROOT / "modeling" / "heads" / "family.py"
    ours = ast.parse(path.read_text(encoding="utf-8"))
    theirs = ast.parse(bundle("modeling.evabyte.model")[1]["modeling_heads_family.py"])

    def rest(tree: ast.Module) -> list[str]:
        return [ast.dump(node) for node in tree.body if not (isinstance(node, ast.ImportFrom) and node.level)]

    assert rest(ours) == rest(theirs)


@pytest.mark.core
def test_every_form_of_import(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_ROOT", tmp_path)
    start = "from .pack import (\n    Thing,\n    x as y,\n)\nVALUE = 1\n"
    start += "def f():\n    from .late import g\n    from .. import __version__\n    return g, __version__\n"
    packed = {
        "pack/__init__": "from .model import Thing\nfrom .rest import x\n",
        "pack/model": "Thing = 1\n",
        "pack/rest": "x = 2\n",
    }
    (tmp_path / "room" / "pack").mkdir(parents=True)
    for name, text in [("start", start), ("late", "g = 1\n"), *packed.items()]:
        (tmp_path / "room" / f"{name}.py").write_text(text)
    _, files = bundle.__wrapped__("room.start")
    names = ("room_start", "room_late", "room_pack_init", "room_pack", "room_pack_rest", "tokenahead_version")
    assert set(files) == {f"{name}.py" for name in names}
    text = files["room_start.py"]
    assert "from .room_pack_init import (\n    Thing,\n    x as y,\n)\nVALUE = 1\n" in text
    assert "    from .room_late import g\n    from .tokenahead_version import __version__\n" in text
    assert files["room_pack_init.py"].endswith("from .room_pack import Thing\nfrom .room_pack_rest import x\n")
    with pytest.raises(FileNotFoundError, match="remote_code="):
        bundle.__wrapped__("room.nowhere")
