"""Indented commands of README and docs: the scripts are there, and each flag is one that its program knows."""

import contextlib
import io
import re
import shlex
from functools import cache

import pytest

from tests.test_documentation import PAGES, ROOT
from tokenahead import cli

LINE = re.compile(r"^(?:    |\t)(?:[A-Z_]+=\S+ )*(?:.*&& )?((?:tokenahead|python) .*)$")
READ_ELSEWHERE = {"lm-eval"}
"""Commands whose arguments another program reads."""


def commands(text: str) -> list[list[str]]:
    """The words of all indented commands of a page, those of continued lines in one."""
    found, lines = [], iter(text.splitlines())
    for line in lines:
        if match := LINE.match(line):
            whole = match[1]
            while whole.endswith("\\"):
                whole = whole[:-1] + next(lines).strip()
            with contextlib.suppress(ValueError):  # a quotation in prose
                found.append(shlex.split(whole, comments=True))
    return found


@cache
def help_of(command: str) -> str:
    """What a command of tokenahead says of its arguments, of all kinds of drafters where each has its own."""
    shown = io.StringIO()
    for kind in ([], ["--drafter", "heads"]) if command in ("train", "features") else ([],):
        with contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
            cli.main([command, *kind, "--help"])
    return shown.getvalue()


def unknown(words: list[str]) -> list[str]:
    """The flags of a command that its program does not have, or what is missing altogether."""
    flags = {word.partition("=")[0] for word in words if word.startswith("--") and len(word) > 2}
    if words[0] == "tokenahead":
        if words[1] in READ_ELSEWHERE or not flags - {"--version"}:
            return []
        known = set(re.findall(r"--[\w-]+", help_of(words[1])))
    elif words[1].endswith(".py"):
        if not (ROOT / words[1]).is_file():
            return [words[1]]
        known = set(re.findall(r"--[\w-]+", (ROOT / words[1]).read_text(encoding="utf-8")))
    else:  # python -m of another package
        return []
    return sorted(flags - known - {"--help"})


def test_flags_exist():
    found = [words for page in PAGES for words in commands(page.read_text("utf-8"))]
    assert found and {" ".join(words): names for words in found if (names := unknown(words))} == {}


def test_a_wrong_flag_is_seen():
    text = "    FOO=1 tokenahead bench --model x \\\n        --temprature 3\n\n    python benchmarks/no.py --a\n"
    first, second = commands(text)
    assert unknown(first) == ["--temprature"] and unknown(second) == ["benchmarks/no.py"]
    assert unknown(["python", "benchmarks/trees.py", "--total", "3", "--total-count", "2"]) == ["--total-count"]
