"""`python -m tests.matrix [HABIT ...]`: runs the cells and prints the table, models by habits."""

from __future__ import annotations

import sys
import warnings

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Column, Table
from transformers.utils import logging

from tests.matrix.excuses import EXCUSES
from tests.matrix.life_cycle import HABITS
from tests.matrix.models import NAMES, entry

MARKS = {"ok": "[green]✓[/]", "excused": "[yellow]e[/]", "fails": "[bold red]✗[/]"}


def outcome(model: str, habit: str) -> str:
    """Runs a cell: its habit, or the check of its excuse."""
    excuse = EXCUSES.get((model, habit))
    check = HABITS[habit] if excuse is None else excuse.check
    try:
        check(entry(model))
    except Exception:  # whatever it is, it is a failing cell
        return "fails"
    return "ok" if excuse is None else "excused"


def table(rows: dict[str, dict[str, str]]) -> Table:
    """Habits as rows and models as numbered columns, so that it fits a terminal."""
    columns = (Column(str(number), justify="center") for number in range(1, len(NAMES) + 1))
    shown = Table(Column("habit", no_wrap=True), *columns, box=SIMPLE_HEAD, padding=(0, 1))
    for habit, outcomes in rows.items():
        shown.add_row(habit.replace("_", " "), *(MARKS[outcomes[name]] if name in outcomes else "" for name in NAMES))
    return shown


def main(habits: list[str]) -> int:
    """Prints the table while it fills, then the excuses; returns the number of failing cells."""
    rows: dict[str, dict[str, str]] = {}
    console = Console()
    console.print(", ".join(f"{number} {name}" for number, name in enumerate(NAMES, 1)), highlight=False)
    with Live(table(rows), console=console, refresh_per_second=2, vertical_overflow="visible") as live:
        for habit in habits or HABITS:
            rows[habit] = {}
            for name in NAMES:
                rows[habit][name] = outcome(name, habit)
                live.update(table(rows))
    results = [result for outcomes in rows.values() for result in outcomes.values()]
    console.print(", ".join(f"{results.count(kind)} {kind} ({mark})" for kind, mark in MARKS.items()))
    for reason in dict.fromkeys(excuse.reason for (_, habit), excuse in EXCUSES.items() if habit in rows):
        excused = sorted({habit for (_, habit), excuse in EXCUSES.items() if excuse.reason == reason})
        console.print(f"  excused, {', '.join(excused)}: {reason}")
    return results.count("fails")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    sys.exit(min(main(sys.argv[1:]), 1))
