"""The model in the box: a small EvaByte that comes with the package, heads that draft for it, and held-out text."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from ..modeling import EvaByteForMTPC, EvaByteTokenizer

_LINE_OF_CODE = re.compile(rb"^[ ]*(?:def|class) \w+.*:\n", re.MULTILINE)
CHECKSUMS, EXCERPTS = "SHA256SUMS", "held_out.json"
"""Names of the files of checksums as `sha256sum` has them, and of held-out text with its package and licence."""


class BoxDamagedError(OSError):
    """A file of the box is missing or is not what was released."""


def box_directory() -> Path:
    """Return the directory of the installed box."""
    return Path(__file__).resolve().parents[1] / "model_cards" / "box"


def load_box(
    head: str = "ff", directory: str | Path | None = None, dtype: torch.dtype | str = torch.float32
) -> tuple[EvaByteForMTPC, PreTrainedTokenizerBase]:
    """Load the model in a box (see `check_box`) with one of its heads, in eval mode, and its tokenizer."""
    directory = check_box(directory)
    model = EvaByteForMTPC.from_pretrained(directory, dtype=dtype)
    if head != "ff":
        file = directory / f"{head}.safetensors"
        with safe_open(file, framework="pt") as opened:
            notes = opened.metadata()
        model.set_head(**json.loads(notes["options"]))
        model.mtp_head.load_state_dict(load_file(file))
        model.generation_config.num_assistant_tokens = int(notes["num_assistant_tokens"])
    return model.eval(), EvaByteTokenizer.from_pretrained(directory)


def heads_in(directory: Path) -> list[str]:
    """Return the heads that a box holds: FF, which the backbone's file has, and those that have files of their own."""
    return ["ff", *sorted({path.stem for path in directory.glob("*.safetensors")} - {"model"})]


def check_box(directory: str | Path | None) -> Path:
    """Compare every file with its checksum; return the directory, of None that of the installed box."""
    directory = Path(directory or box_directory())
    sums = directory / CHECKSUMS
    lines = sums.read_text().splitlines() if sums.is_file() else [f"- {CHECKSUMS}"]
    for expected, name in (line.split(maxsplit=1) for line in lines):
        if not (file := directory / name).is_file() or sha256(file) != expected:
            raise BoxDamagedError(f"{file} is missing, or not as {CHECKSUMS} states; reinstall tokenahead")
    return directory


def sha256(file: Path) -> str:
    """Return the checksum of a file's bytes, in hexadecimal digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def code_prompts(contents: Sequence[bytes], count: int, seed: int = 0, length: int = 320) -> list[str]:
    """Return whole lines that end in the head of a function or class, at most `length` bytes, of files by turns."""
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
