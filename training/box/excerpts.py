"""Held-out text that travels in the box, so that everyone can measure what its card says: excerpts with their sources.

Knows files of excerpts; knows no model.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import torch

from ...modeling.evabyte.tokenizer import BYTE_OFFSET
from ..data import BOS_ID, SourceText, code_prompts

EXCERPT = 1023
"""Bytes of an excerpt; with `<bos>` before it, a window of 1,024 ids."""


@dataclass(frozen=True)
class Excerpt:
    """A piece of a file of a package that nothing was trained on.

    Attributes:
        package: Its distribution.
        version: The distribution's version.
        licence: As the distribution's metadata names it.
        text: ASCII, `EXCERPT` bytes, from the beginning of a line.
    """

    package: str
    version: str
    licence: str
    text: str


def cut_excerpts(
    packages: Iterable[tuple[tuple[str, str, str], list[bytes]]], count: int, seed: int = 0
) -> list[Excerpt]:
    """Takes excerpts from packages in turn, at most one of each file.

    Args:
        packages: (name, version, licence) and files.
        count: Excerpts, at most.
        seed: Chooses files and places.

    Raises:
        ValueError: No file holds one.
    """
    chooser = random.Random(seed)
    queues = []
    for source, files in packages:
        order = chooser.sample(range(len(files)), len(files))
        queues.append([Excerpt(*source, text) for index in order if (text := _cut(files[index], chooser))])
    turns = [queue[turn] for turn in range(max(map(len, queues), default=0)) for queue in queues if turn < len(queue)]
    if not turns:
        raise ValueError(f"no held-out file has {EXCERPT} bytes of ASCII text")
    return turns[:count]


def _cut(content: bytes, chooser: random.Random) -> str | None:
    starts = [0, *(i + 1 for i, byte in enumerate(content) if byte == 10 and i + 1 + EXCERPT <= len(content))]
    start = chooser.choice(starts)
    piece = content[start : start + EXCERPT]
    return piece.decode("ascii") if len(piece) == EXCERPT and piece.isascii() else None


def save_excerpts(path: Path, excerpts: list[Excerpt]) -> None:
    """Writes excerpts as JSON."""
    path.write_text(json.dumps([asdict(excerpt) for excerpt in excerpts], indent=1) + "\n", encoding="utf-8")


def load_excerpts(path: Path) -> list[Excerpt]:
    """Reads what `save_excerpts` wrote."""
    return [Excerpt(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))]


def excerpt_windows(excerpts: list[Excerpt]) -> torch.Tensor:
    """`<bos>` and the bytes of every excerpt, [N, 1 + EXCERPT] int64."""
    data = torch.stack([torch.tensor(list(excerpt.text.encode("ascii"))) for excerpt in excerpts])
    return torch.nn.functional.pad(data + BYTE_OFFSET, (1, 0), value=BOS_ID)


def excerpt_prompts(excerpts: list[Excerpt], count: int, seed: int = 0, length: int = 320) -> list[str]:
    """Beginnings of code to complete, see `code_prompts`; packages take turns as excerpts do."""
    contents = [excerpt.text.encode("ascii") for excerpt in excerpts]
    data = torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8)
    text = SourceText(tuple(map(str, range(len(contents)))), data, (0, *accumulate(map(len, contents))))
    return code_prompts(text, count, seed, length)
