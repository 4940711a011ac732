"""The list of core tests (tests/core.py): every entry names a test that exists and is fast."""

from pathlib import Path

import pytest
from hypothesis import settings

from tests.conftest import explores
from tests.core import COLLECTED, CORE, is_core

ROOT = Path(__file__).resolve().parents[1]


def test_the_list_is_sorted_and_its_files_exist():
    assert list(CORE) == sorted(CORE)
    assert all(list(names) == sorted(set(names)) for names in CORE.values())
    assert [file for file in CORE if not (ROOT / file).is_file()] == []


def test_every_entry_matches_a_fast_test(request):
    slow = request.config.stash[COLLECTED]
    if not CORE.keys() <= {node.partition("::")[0] for node in slow}:
        pytest.skip("only a run of the whole folder collects every file of the list")
    names = set(slow) | {node.partition("[")[0] for node in slow}
    entries = [f"{file}::{name}" for file, listed in CORE.items() for name in listed]
    assert [entry for entry in entries if entry not in names] == []
    assert [node for node in slow if slow[node] and is_core(node)] == []


def test_property_tests_repeat_unless_slow_ones_are_asked_for(request, monkeypatch):
    asked = request.config.option
    assert settings().derandomize is not explores(request.config)
    for expression, expected in {
        "": False,
        "not slow": False,
        "core": False,
        "slow": True,
        "slow or core": True,
    }.items():
        monkeypatch.setattr(asked, "markexpr", expression)
        assert explores(request.config) is expected
