"""A pytest plugin that notes which tests run which lines, and how long they take: for `run.py cover`."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

FOLDER = Path(os.environ["MUTANTS_FOLDER"])
_ROOMS = [str(Path.cwd() / room) for room in ("generation", "modeling", "training", "tokenahead/experimental")]
_COVERAGE = coverage.Coverage(str(FOLDER / "lines"), data_suffix=True, source=_ROOMS, config_file=False)
_COVERAGE.start()


class _Current:
    test, seconds = "", dict[str, float]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note the lines of a test, and its seconds of processor time."""
    _Current.test, start = item.nodeid, time.process_time()
    _COVERAGE.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        _Current.seconds[item.nodeid] = time.process_time() - start
        _COVERAGE.switch_context("")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> Iterator[None]:
    """Note the lines of a fixture that tests share, as those of their file."""
    is_shared = fixturedef.scope != "function" and _Current.test
    if is_shared:
        _COVERAGE.switch_context(f"{_Current.test.partition('::')[0]}::")
    try:
        return (yield)
    finally:
        if is_shared:
            _COVERAGE.switch_context(_Current.test)


def pytest_sessionfinish() -> None:
    """Write both, for each process."""
    _COVERAGE.stop()
    _COVERAGE.save()
    (FOLDER / f"seconds-{os.getpid()}.json").write_text(json.dumps(_Current.seconds))
