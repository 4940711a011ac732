"""The model in the box: a small EvaByte that comes with the package, heads that draft for it, and held-out text.

Loads and checks; `examples/box` trains and writes the directory.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from ..modeling import EvaByteForMTPC, EvaByteTokenizer
from ..modeling.evabyte.tokenizer import BYTE_OFFSET

BOS_ID = 1
_LINE_OF_CODE = re.compile(rb"^[ ]*(?:def|class) \w+.*:\n", re.MULTILINE)
HEADS = ("ff", "cp", "hmm", "btree")
"""Heads of a box, in the order in which they are shown."""
WEIGHTS, CHECKSUMS, EXCERPTS = "model.safetensors", "SHA256SUMS", "held_out.json"
"""Names of the files of the backbone with its FF heads, of checksums as `sha256sum` has them, and of held-out text."""
EXCERPT = 1023  # bytes of an excerpt; with `<bos>` before it, a window of 1,024 ids


class BoxDamagedError(OSError):
    """A file of the box is missing or is not what was released."""


def box_directory() -> Path:
    """Return the directory of the installed box."""
    return Path(__file__).resolve().parents[1] / "model_cards" / "box"


def load_box(
    head: str = "ff", directory: str | Path | None = None, dtype: torch.dtype | str = torch.float32
) -> tuple[EvaByteForMTPC, PreTrainedTokenizerBase]:
    """Load the model in the box (of another `directory` than the installed one) with one of its heads, in eval mode.

    Returns:
        The model, and its tokenizer.

    Raises:
        BoxDamagedError: See `check_box`.
        ValueError: A head that the box does not hold.
    """
    directory = check_box(directory)
    heads = heads_in(directory)
    if head not in heads:
        raise ValueError(f"head={head!r} is not in the box; choose one of {', '.join(heads)}")
    return _load(directory, head, dtype), EvaByteTokenizer.from_pretrained(directory)


def heads_in(directory: Path) -> list[str]:
    """Return the heads that a box holds: FF, then those of `HEADS`, then any other."""
    stored = {path.stem for path in directory.glob("*.safetensors") if path.name != WEIGHTS}
    return ["ff", *(head for head in HEADS if head in stored), *sorted(stored.difference(HEADS))]


def _load(directory: Path, head: str, dtype: torch.dtype | str) -> EvaByteForMTPC:
    model = EvaByteForMTPC.from_pretrained(directory, dtype=dtype)
    if head != "ff":
        file = directory / f"{head}.safetensors"
        with safe_open(file, framework="pt") as opened:
            notes = opened.metadata()
        model.set_head(**json.loads(notes["options"]))
        model.mtp_head.load_state_dict(load_file(file))
        model.generation_config.num_assistant_tokens = int(notes["num_assistant_tokens"])
    return model.eval()


def check_box(directory: str | Path | None) -> Path:
    """Compare every file with its checksum; return the directory, of None that of the installed box.

    Raises:
        BoxDamagedError: A file is missing, or its checksum is wrong; the message names it.
    """
    directory = Path(directory or box_directory())
    sums = directory / CHECKSUMS
    if not sums.is_file():
        raise BoxDamagedError(f"{directory} holds no {CHECKSUMS}: there is no model in the box; reinstall tokenahead")
    for line in sums.read_text().splitlines():
        expected, name = line.split(maxsplit=1)
        if not (file := directory / name).is_file() or sha256(file) != expected:
            raise BoxDamagedError(f"{file} is missing, or not as {CHECKSUMS} states; reinstall tokenahead")
    return directory


def sha256(file: Path) -> str:
    """Return the checksum of a file's bytes, in hexadecimal digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Excerpt:
    """A piece of a file of a package that nothing was trained on: `EXCERPT` bytes of ASCII from the start of a line.

    Package, version and licence are those of its distribution's metadata.
    """

    package: str
    version: str
    licence: str
    text: str


def load_excerpts(path: Path) -> list[Excerpt]:
    """Read a box's file of held-out text."""
    return [Excerpt(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))]


def excerpt_windows(excerpts: list[Excerpt]) -> torch.Tensor:
    """Return `<bos>` and the bytes of every excerpt, [N, 1 + EXCERPT] int64."""
    data = torch.stack([torch.tensor(list(excerpt.text.encode("ascii"))) for excerpt in excerpts])
    return torch.nn.functional.pad(data + BYTE_OFFSET, (1, 0), value=BOS_ID)


def excerpt_prompts(excerpts: list[Excerpt], count: int, seed: int = 0, length: int = 320) -> list[str]:
    """Return beginnings of code to complete, see `code_prompts`; packages take turns as excerpts do."""
    return code_prompts([excerpt.text.encode("ascii") for excerpt in excerpts], count, seed, length)


def code_prompts(contents: Sequence[bytes], count: int, seed: int = 0, length: int = 320) -> list[str]:
    """Return whole lines that end in the head of a function or class, at most `length` bytes, of files by turns.

    Raises:
        ValueError: No file with such a beginning.
    """
    chooser = random.Random(seed)
    usable = []  # files, and the ends of the heads that have enough ASCII text before them
    for content in contents:
        ends = (match.end() for match in _LINE_OF_CODE.finditer(content))
        if heads := [end for end in ends if end >= length and content[end - length : end].isascii()]:
            usable.append((content, heads))
    if not usable:
        raise ValueError(f"no file has a function or class after {length // 2} bytes of ASCII text to make a prompt of")
    chooser.shuffle(usable)
    prompts = []
    for turn in range(count):
        content, heads = usable[turn % len(usable)]
        end = chooser.choice(heads)
        piece = content[end - length : end]
        prompts.append(piece[piece.find(b"\n", 0, length // 2) + 1 :].decode("ascii"))  # of longer lines, a half
    return prompts


@dataclass
class Box:
    """A box in memory: the model with every head, by head, FF first; their tokenizer; and held-out text."""

    models: dict[str, EvaByteForMTPC]
    tokenizer: PreTrainedTokenizerBase
    excerpts: list[Excerpt]

    @classmethod
    def load(cls, directory: str | Path | None = None, dtype: torch.dtype | str = torch.float32) -> Box:
        """Read a box; None: the installed one. `dtype` is that of the weights in memory; see `check_box`."""
        directory = check_box(directory)
        models = {head: _load(directory, head, dtype) for head in heads_in(directory)}
        return cls(models, EvaByteTokenizer.from_pretrained(directory), load_excerpts(directory / EXCERPTS))
