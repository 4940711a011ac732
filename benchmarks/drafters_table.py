"""The table of docs/public_drafters.md, from docs/results/public_drafters.json.

python benchmarks/drafters_table.py                 # prints it, and writes it to the page
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from measuring import markdown

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, DATA = DOCS / "public_drafters.md", DOCS / "results" / "public_drafters.json"
_TABLE = re.compile(r"(?<=<!-- python benchmarks/drafters_table.py -->\n).*?(?=<!-- end of the table -->)", re.S)


def table() -> str:
    """Return a row per drafter, by target."""
    parts = json.loads(DATA.read_text(encoding="utf-8"))
    rows = [
        (
            *(target, f"`{name}`", each["format"], each["class"], each["licences"].get(name, "-")),
            *(config_of(name, each), f"[list]({each['source']})"),
        )
        for each in parts
        for name, target in each["drafters"].items()
    ]
    rows.sort(key=lambda row: (row[0], row[2]))
    return markdown(("target", "on the Hub", "format", "read by", "licence stated", "config", "from"), rows)


def config_of(name: str, part: dict) -> str:
    """Return whether a drafter's own config.json was seen, and where; tests then read it."""
    where = part["configs"].get(name)
    seen = "in part" if name in part["in_part"] else "seen"
    return "config not seen" if where is None else f"[{seen}]({where})"


def rewritten(page: str) -> str:
    """Return the page with the table."""
    return _TABLE.sub(lambda match: table(), page)


if __name__ == "__main__":
    print(table(), end="")
    page = PAGE.read_text(encoding="utf-8")
    if rewritten(page) != page:
        PAGE.write_text(rewritten(page), encoding="utf-8")
