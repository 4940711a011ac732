"""A text that every machine has: the source of the Python standard library, as windows of byte ids.

Byte b has the id b + 64, and every window begins with `<bos>`.
"""

from __future__ import annotations

import random
import sysconfig
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch.utils.data import Dataset

from tokenahead.modeling.evabyte.tokenizer import BYTE_OFFSET

BOS_ID = 1
# Not every machine has the tests, which Linux distributions package separately; the last two hold tables, not code.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class SourceText:
    """Files joined into `data`, [bytes] uint8; `starts` has where each file begins, and at the end the whole length."""

    data: torch.Tensor
    starts: tuple[int, ...]

    @classmethod
    def read(cls, files: list[Path]) -> SourceText:
        """Read files in the given order."""
        contents = [file.read_bytes() for file in files]
        data = torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8)
        return cls(data, (0, *accumulate(map(len, contents))))

    def contents(self) -> list[bytes]:
        """Return the bytes of every file."""
        return [self.data[start:end].numpy().tobytes() for start, end in zip(self.starts, self.starts[1:])]


@dataclass(frozen=True)
class Corpus:
    """The standard library's source in two parts that share no file."""

    train: SourceText
    held_out: SourceText


def load_corpus(seed: int = 0, held_out: float = 0.05) -> Corpus:
    """Read the source and split it by file: so large a share of the bytes is held out, the same for the same seed."""
    files = source_files(Path(sysconfig.get_path("stdlib")))
    shuffled = random.Random(seed).sample(files, len(files))
    wanted = held_out * sum(file.stat().st_size for file in files)
    sizes = accumulate(file.stat().st_size for file in shuffled)
    count = next(i for i, size in enumerate(sizes, 1) if size >= wanted)
    return Corpus(SourceText.read(sorted(shuffled[count:])), SourceText.read(sorted(shuffled[:count])))


def source_files(root: Path) -> list[Path]:
    """Return the Python files below `root`, sorted by path, without tests, tables and installed packages."""
    paths = (path for path in root.rglob("*.py") if not _LEFT_OUT.intersection(path.relative_to(root).parts[:-1]))
    return sorted(path for path in paths if path.is_file())


class ByteWindows(Dataset):
    """Windows of `length` ids: `<bos>` and bytes of one file. No byte is in two windows; the labels are the ids."""

    def __init__(self, text: SourceText, length: int) -> None:
        self.data, self.bytes_per_window = text.data, length - 1
        self.starts = [
            start
            for begin, end in zip(text.starts, text.starts[1:])
            for start in range(begin, end - self.bytes_per_window + 1, self.bytes_per_window)
        ]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = self.starts[index]
        ids = torch.empty(self.bytes_per_window + 1, dtype=torch.int64)
        ids[0] = BOS_ID
        ids[1:] = self.data[start : start + self.bytes_per_window]
        ids[1:] += BYTE_OFFSET
        return {"input_ids": ids, "labels": ids}
