"""README and docs: every Python block runs, every name exists, and every link of the README leads somewhere.

The blocks of a page run in order, in one namespace and a fresh directory. A page of docs/ begins with the names of the
block behind `SETUP` in docs/index.md. A block that cannot run stands behind a comment `<!-- not run: reason -->`.
"""

import importlib
import json
import logging
import re
from pathlib import Path
from typing import Any

import griffe
import pytest

import tokenahead
from tests.benchmark_modules import drafters_table, families_table, serving, training_tables

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SETUP = "<!-- every page of the documentation begins with this block -->"
BLOCK = re.compile(r"(?:^(<!-- [^\n]+ -->)\n)?^```python\n(.*?)^```", re.M | re.S)
NOT_RUN = re.compile(r"<!-- not run: \S.+ -->")
FILE = re.compile(
    r"\b(?:benchmarks|examples|generation|model_cards|modeling|tests|training)/[\w/]+\.(?:md|png|py|sh|yaml)\b"
)
NAME = re.compile(r"\btokenahead(?:\.[A-Za-z_]\w*)+")


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the Python blocks of a page that run: the comment before each, and its code at its line numbers."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        comment, code = match[1] or "", match[2]
        if not NOT_RUN.fullmatch(comment):
            found.append((comment, "\n" * text.count("\n", 0, match.start(2)) + code))
    return found


def run(page: Path, namespace: dict[str, Any], only: str | None = None) -> None:
    for comment, code in blocks(page):
        if only is None or comment == only:
            exec(compile(code, str(page), "exec"), namespace)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.by_day(
    "README.md",
    "docs/index.md",
    "docs/generate.md",
    "docs/measuring.md",
    "docs/doctor.md",
    "docs/training.md",
    "docs/extending.md",
    "docs/adding_a_method.md",
    "docs/trees.md",
    "docs/methods/block.md",
    "docs/methods/heads.md",
)
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name_of)
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    if page.name not in ("README.md", "index.md") or page.parent.name == "methods":
        run(ROOT / "docs" / "index.md", namespace, only=SETUP)
    run(page, namespace)


def test_the_first_block_comes_early():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert lines.index("```python") < 25 and len(lines) <= 175


def test_the_first_block_takes_a_class_of_transformers():
    """So that a release that renames what drafters rely on is seen here: a model of our own would go along."""
    (_, first), *_ = blocks(ROOT / "README.md")
    assert "LlamaForCausalLM(" in first and len(first.strip().splitlines()) <= 12


def test_blocks_fit():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert "```py\n" not in text and "``` python" not in text, "blocks are marked ```python"
        assert all(len(line) <= 120 for _, code in BLOCK.findall(text) for line in code.splitlines()), page


def test_names_and_files_exist():
    text = {page: page.read_text(encoding="utf-8") for page in (*PAGES, ROOT / "CONTRIBUTING.md")}
    assert {(page, name) for page in text for name in set(NAME.findall(text[page])) if not exists(name)} == set()
    assert {(page, name) for page in text for name in FILE.findall(text[page]) if not (ROOT / name).exists()} == set()


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part, None)
        return found is not None
    return False


def reference() -> list[str]:
    """The names that the reference shows."""
    pages = (page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    return [name for page in pages for name in re.findall(r"^::: (tokenahead\.[\w.]+)$", page, re.M)]


def test_the_reference_has_every_public_name():
    shown = [name.removeprefix("tokenahead.") for name in reference()]
    assert sorted(name for name in shown if "." not in name) == sorted(tokenahead.__all__)
    listed = re.findall(r"`(\w+)`", (ROOT / "docs" / "api.md").read_text(encoding="utf-8").partition("|---")[2])
    assert sorted(listed) == sorted(name.rpartition(".")[2] for name in shown)


def test_the_reference_documents_the_parameters_of_signatures(caplog):
    """What `mkdocs build --strict` refuses, on the classes that it shows, with the griffe that is installed."""
    shown = reference()
    extensions = griffe.load_extensions(str(ROOT / "docs" / "docstrings.py"))
    loader = griffe.GriffeLoader(extensions=extensions, search_paths=[ROOT], docstring_parser="google")
    package = loader.load("tokenahead")
    loader.resolve_aliases(external=False)
    for name in shown:
        documented = package[name.removeprefix("tokenahead.")]
        for each in (documented, *documented.members.values()):
            if each.docstring is not None and not each.is_private:
                assert each.docstring.parsed is not None
    assert shown and [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_an_environment_begins_with_a_torch_for_processors():
    """Else pip brings gigabytes of CUDA; of the version in constraints.txt, or pip brings another one after it."""
    (torch,) = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    first = f"    pip install {torch} --index-url https://download.pytorch.org/whl/cpu"
    blocks = [
        lines[number + 1 :]
        for page in [*PAGES, ROOT / "CONTRIBUTING.md"]
        for lines in [page.read_text(encoding="utf-8").splitlines()]
        for number, line in enumerate(lines)
        if "python3 -m venv" in line
    ]
    assert len(blocks) == 4 and all(block[0].startswith(first) for block in blocks)


def test_every_page_is_in_the_navigation():
    pages = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2])
    assert sorted(pages) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES[1:])


def test_links_of_the_readme_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    files = [target for target in targets if "://" not in target]
    assert files and all((ROOT / file).exists() for file in files)


def test_the_tables_of_families_are_those_of_the_registry_the_tests_and_the_last_run():
    """Otherwise: `python benchmarks/families_table.py`."""
    page = families_table.PAGE.read_text(encoding="utf-8")
    assert families_table.rewritten(page) == page


def test_the_table_of_public_drafters_is_that_of_the_data():
    """Otherwise: `python benchmarks/drafters_table.py`."""
    page, parts = drafters_table.PAGE.read_text(encoding="utf-8"), json.loads(drafters_table.DATA.read_text())
    assert drafters_table.rewritten(page) == page and page.count("| [list](https://") > 60
    names = [name for part in parts for name in part["drafters"]]
    assert len(names) == len(set(names)) and {part["class"] for part in parts} <= {*tokenahead.__all__}
    assert all(name.count("/") == 1 and name in names for part in parts for name in part["licences"])


def test_what_a_drafter_costs_is_what_the_counts_say():
    assert training_tables.costs() in (ROOT / "docs" / "training.md").read_text(encoding="utf-8")


def test_the_table_of_trainers_is_that_of_the_last_run():
    results = json.loads((ROOT / "docs" / "results" / "training_cpu.json").read_text(encoding="utf-8"))
    assert training_tables.measured(results) in (ROOT / "docs" / "training.md").read_text(encoding="utf-8")


def test_the_table_of_engines_is_that_of_the_last_run():
    results = json.loads(serving.RESULTS.read_text())
    assert serving.table_of(results) in (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    ran = [row for row in results["rows"] if "error" not in row]
    assert len(ran) > 30 and all(row["alone"] == row["together"] == row["prompts"] for row in ran)
    assert all(row["rejected"] for row in ran)
    assert all(row["server"] == [row["prompts"]] * 2 for row in ran)
