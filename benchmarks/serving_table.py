"""The table of docs/serving.md, from what `benchmarks/serving.py --json` wrote.

python benchmarks/serving_table.py                          # of benchmarks/serving.json
python benchmarks/serving_table.py results.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from measuring import markdown

RESULTS = Path(__file__).with_name("serving.json")
COLUMNS = (
    "equal outputs, alone and as a batch",
    "of a server, one by one and at once",
    "drafts as here, rejected",
    "accepted by position, of drafts",
)


def write(path: Path, machine: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write rows to a file of results; rows and values that it already has stay."""
    before = json.loads(path.read_text())["rows"] if path.is_file() else []
    merged = {row["name"]: row for row in before}
    for row in rows:
        merged[row["name"]] = {**merged.get(row["name"], {}), **row}
    lines = ",\n  ".join(json.dumps(row) for row in merged.values())
    path.write_text(f'{{\n "machine": {json.dumps(machine)},\n "rows": [\n  {lines}\n ]\n}}\n')


def table_of(results: dict[str, Any]) -> str:
    """Return the table, headed by what it was run on."""
    machine = results["machine"]
    head = f"directory, in vLLM {machine['vllm']} on a CPU ({machine['cpu']}), {machine['dtype']}"
    return markdown((head, *COLUMNS), map(cells, results["rows"]))


def cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of one row."""
    server = row.get("server", "-")
    if isinstance(server, list):
        server = " and ".join(f"{equal}/{row.get('prompts', 6)}" for equal in server)
    if "alone" not in row:
        error = f"does not start: {row['error'][:100]}" if "error" in row else "-"
        return [row["name"], "-", server, "-", error]
    total = row["prompts"]
    return [
        row["name"],
        f"{row['alone']}/{total} and {row['together']}/{total}",
        server,
        f"{row['equal']}/{row['places']}, {row['rejected']}",
        f"{row['accepted']} of {row['drafts']}",
    ]


if __name__ == "__main__":
    print(table_of(json.loads(Path(*sys.argv[1:2] or [RESULTS]).read_text())), end="")
