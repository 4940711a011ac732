"""The table of docs/serving.md, from what `benchmarks/serving.py --json` wrote.

python benchmarks/serving_table.py                          # of benchmarks/serving.json
python benchmarks/serving_table.py results.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("serving.json")


def write(path: Path, machine: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write rows to a file of results; rows of other names that it already has stay."""
    before = json.loads(path.read_text())["rows"] if path.is_file() else []
    new = {row["name"]: row for row in rows}
    merged = [new.pop(row["name"], row) for row in before] + list(new.values())
    lines = ",\n  ".join(json.dumps(row) for row in merged)
    path.write_text(f'{{\n "machine": {json.dumps(machine)},\n "rows": [\n  {lines}\n ]\n}}\n')


def markdown(results: dict[str, Any]) -> str:
    """Return the table, headed by what it was run on."""
    machine = results["machine"]
    head = f"directory, in vLLM {machine['vllm']} on a CPU ({machine['cpu']}), {machine['dtype']}"
    columns = (
        head,
        "equal outputs, alone and as a batch",
        "drafts as here, rejected",
        "accepted by position, of drafts",
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join(lines + [f"| {' | '.join(cells(row))} |" for row in results["rows"]]) + "\n"


def cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of one row."""
    if "error" in row:
        return [row["name"], "-", "-", f"does not start: {row['error'][:100]}"]
    total = row["prompts"]
    return [
        row["name"],
        f"{row['alone']}/{total} and {row['together']}/{total}",
        f"{row['equal']}/{row['places']}, {row['rejected']}",
        f"{row['accepted']} of {row['drafts']}",
    ]


if __name__ == "__main__":
    print(markdown(json.loads(Path(*sys.argv[1:2] or [RESULTS]).read_text())), end="")
