"""`tokenahead verify`: what decoding functions keep of the text of their model, as a table."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.utils import logging

from ..conformance.kit import BROKEN, DECODERS, KEPT, REFUSED, Decoder, Verified, verify
from ..requests import VerifyRequest
from ..utils import escaped, one_line

_STYLES = {KEPT: "green", REFUSED: "dim", BROKEN: "bold red"}


def main(request: VerifyRequest) -> int:
    """Look decoding functions over, and show what each keeps; return 1 where one is broken that is not known to be."""
    console = Console(highlight=False, emoji=False)
    logging.disable_progress_bar()
    wanted = request.decoders or ([] if request.function else [*DECODERS])
    if unknown := [name for name in wanted if name not in DECODERS]:
        raise ValueError(f"--decoders {unknown[0]}: choose of {', '.join(map(repr, DECODERS))}")
    decoders = {name: DECODERS[name] for name in wanted} | {name: _found(name) for name in request.function or []}
    found = {name: verify(decode, request.samples) for name, decode in decoders.items()}
    broken = {name: checks for name in found if (checks := _names_of(found[name], BROKEN))}
    # faults of other libraries' functions are known (docs/upstream.md)
    ours = [name for name in broken if name not in DECODERS or ":" not in name]
    if request.json:
        values = {name: [asdict(each) for each in checks] for name, checks in found.items()}
        console.print(json.dumps(values), markup=False, soft_wrap=True)
    elif request.markdown:
        console.print(_markdown(found), markup=False, soft_wrap=True)
    else:
        _show(console, found, broken, ours)
    return 1 if ours else 0


def _show(console: Console, found: dict[str, list[Verified]], broken: dict[str, list[str]], ours: list[str]) -> None:
    for name, checks in found.items():
        table = Table("check", "", "", title=name, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for each in checks:
            table.add_row(each.check, Text(each.result, _STYLES[each.result]), Text(escaped(each.words[:120])))
        console.print(table)
    console.print(f"{len(found) - len(broken)} of {len(found)} keep all that they do not refuse.", markup=False)
    for name, checks in broken.items():
        known = "" if name in ours else " (not ours, known)"
        console.print(f"{name}: {', '.join(checks)} {BROKEN}{known}", markup=False)


def _found(name: str) -> Decoder:
    """Return the function `MODULE:NAME`, of a module in the working directory, too."""
    sys.path.append(here := str(Path.cwd()))
    try:
        return resolve_name(name)
    except Exception as error:  # whatever a stranger's module raises
        raise ValueError(f"--function {name}: no such function as MODULE:NAME ({one_line(error)})") from error
    finally:
        sys.path.remove(here)


def _names_of(checks: list[Verified], result: str) -> list[str]:
    return [each.check for each in checks if each.result == result]


def _markdown(found: dict[str, list[Verified]]) -> str:
    """Return one table of what each function keeps."""
    lines = ["| decoding function | kept | refused | BROKEN |", "|---|---|---|---|"]
    for name, checks in found.items():
        kept, refused, broken = (_names_of(checks, result) for result in (KEPT, REFUSED, BROKEN))
        lines.append(f"| {name} | {len(kept)} of {len(checks)} | {'; '.join(refused)} | {'; '.join(broken)} |")
    return "\n".join(lines)
