"""`python -m tests.matrix [NAME ...]`: runs the tests of every drafter and prints the table, tests by drafters.

A name says which tests: those that contain it.
"""

from __future__ import annotations

import sys

import pytest
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from tests.conformance import DrafterConformance

MARKS = {"passed": "[green]✓[/]", "overridden": "[yellow]e[/]", "failed": "[bold red]✗[/]"}


class Results:
    """A plugin that keeps the outcome of every test, by its name and its class."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that ran, or whose fixtures failed."""
        if report.when == "call" or report.failed:
            _, drafter, test = report.nodeid.split("::", 2)
            self.rows.setdefault(test, {})[drafter] = report.outcome


def is_overridden(drafter: str, test: str) -> bool:
    """Return whether a drafter does something else than all others."""
    name = test.partition("[")[0]
    kinds = [kind for kind in subclasses(DrafterConformance) if kind.__name__ == drafter]
    return getattr(kinds[0], name) is not getattr(DrafterConformance, name)


def subclasses(kind: type) -> list[type]:
    """Return all classes below one."""
    return [each for below in kind.__subclasses__() for each in (below, *subclasses(below))]


def main(names: list[str]) -> int:
    """Print the table; return the exit status of pytest."""
    results, file = Results(), f"{__package__.replace('.', '/')}/test_matrix.py"
    status = pytest.main([file, "-q", "--no-header", "-k", " or ".join(names)], plugins=[results])
    drafters = list(dict.fromkeys(drafter for row in results.rows.values() for drafter in row))
    columns = (Column(str(number), justify="center") for number in range(1, len(drafters) + 1))
    table = Table(Column("test", no_wrap=True), *columns, box=SIMPLE_HEAD, padding=(0, 1))
    for test, outcomes in results.rows.items():
        marks = [
            "overridden"
            if outcomes.get(drafter) == "passed" and is_overridden(drafter, test)
            else outcomes.get(drafter)
            for drafter in drafters
        ]
        table.add_row(test.removeprefix("test_").replace("_", " "), *(MARKS.get(mark, "") for mark in marks))
    console = Console()
    console.print(", ".join(f"{number} {name}" for number, name in enumerate(drafters, 1)), highlight=False)
    console.print(table)
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
