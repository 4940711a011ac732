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


def run_verify(request: VerifyRequest) -> dict[str, list[Verified]]:
    """Look decoding functions over, and show what each keeps.

    Raises:
        ValueError: No such function.
    """
    console = Console(highlight=False, emoji=False)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    wanted = request.decoders or ([] if request.function else [*DECODERS])
    if unknown := [name for name in wanted if name not in DECODERS]:
        raise ValueError(f"--decoders {unknown[0]}: choose of {', '.join(map(repr, DECODERS))}")
    decoders = {name: DECODERS[name] for name in wanted} | {name: _found(name) for name in request.function or []}
    found = {name: verify(decode, request.samples) for name, decode in decoders.items()}
    if request.json:
        values = {name: [asdict(each) for each in checks] for name, checks in found.items()}
        console.print(json.dumps(values), markup=False, soft_wrap=True)
    elif request.markdown:
        console.print(_markdown(found), markup=False, soft_wrap=True)
    else:
        show(console, found)
    return found


def _found(name: str) -> Decoder:
    """Return the function `MODULE:NAME`, of a module in the working directory, too."""
    sys.path.append(here := str(Path.cwd()))
    try:
        return resolve_name(name)
    except Exception as error:  # whatever a stranger's module raises
        raise ValueError(f"--function {name}: no such function as MODULE:NAME ({one_line(error)})") from error
    finally:
        sys.path.remove(here)


def is_others(name: str) -> bool:
    """Return whether a decoding function is another library's, whose faults are known (docs/upstream.md)."""
    return name in DECODERS and ":" in name


def show(console: Console, found: dict[str, list[Verified]]) -> None:
    """Print a table for each function, how many keep all, and what others break."""
    for name, checks in found.items():
        table = Table("check", "", "", title=name, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for each in checks:
            table.add_row(each.check, Text(each.result, _STYLES[each.result]), Text(escaped(each.words[:120])))
        console.print(table)
    broken = {name: [each.check for each in checks if each.result == BROKEN] for name, checks in found.items()}
    whole = sum(not checks for checks in broken.values())
    console.print(f"{whole} of {len(found)} keep all that they do not refuse.", markup=False)
    for name in filter(broken.get, broken):
        known = " (not ours, known)" * is_others(name)
        console.print(f"{name}: {', '.join(broken[name])} {BROKEN}{known}", markup=False)


def _markdown(found: dict[str, list[Verified]]) -> str:
    """Return one table of what each function keeps."""
    lines = ["| decoding function | kept | refused | BROKEN |", "|---|---|---|---|"]
    for name, checks in found.items():
        of = {result: [each.check for each in checks if each.result == result] for result in _STYLES}
        shown = [f"{len(of[KEPT])} of {len(checks)}", "; ".join(of[REFUSED]), "; ".join(of[BROKEN])]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)
