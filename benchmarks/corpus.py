"""A text that every machine has: the source of the Python standard library, as windows of byte ids.

Byte b has the id b + 64, and every window begins with `<bos>`.
"""

from __future__ import annotations

import math
import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from tokenahead.modeling.evabyte.tokenizer import BYTE_OFFSET

BOS_ID = 1
# Not every machine has the tests, which Linux distributions package separately; the last two hold tables, not code.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class SourceText:
    """Files joined into one tensor.

    Attributes:
        files: Paths of the files, relative to the library's directory.
        data: [total bytes] uint8.
        starts: Where each file begins in `data`, and at the end where the last one ends.
    """

    files: tuple[str, ...]
    data: torch.Tensor
    starts: tuple[int, ...]

    @classmethod
    def read(cls, root: Path, files: list[Path]) -> SourceText:
        """Read files below `root`, in the given order."""
        contents = [file.read_bytes() for file in files]
        return cls(
            files=tuple(file.relative_to(root).as_posix() for file in files),
            data=torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8),
            starts=(0, *accumulate(map(len, contents))),
        )

    def __len__(self) -> int:
        return len(self.data)

    def contents(self) -> list[bytes]:
        """Return the bytes of every file."""
        return [self.data[start:end].numpy().tobytes() for start, end in zip(self.starts, self.starts[1:])]


@dataclass(frozen=True)
class Corpus:
    """The standard library's source in two parts that share no file.

    Attributes:
        root: The directory of the files.
        train: The part to train on.
        held_out: The part to measure on.
    """

    root: Path
    train: SourceText
    held_out: SourceText


def load_corpus(root: str | Path | None = None, seed: int = 0, held_out: float = 0.05) -> Corpus:
    """Read the source and split it by file.

    Args:
        root: The directory to read; None: that of the standard library.
        seed: Chooses the held-out files; the same files and seed give the same split.
        held_out: Share of the bytes to hold out, at least one file.

    Returns:
        The two parts, each in the order of paths.

    Raises:
        ValueError: Fewer than two files of source, or a share outside (0, 1).
    """
    if not 0.0 < held_out < 1.0:
        raise ValueError(f"held_out={held_out} must lie between 0 and 1")
    root = Path(root or sysconfig.get_path("stdlib"))
    files = source_files(root)
    if len(files) < 2:
        raise ValueError(f"{root} holds {len(files)} files of Python source; at least 2 are needed, to hold one out")
    shuffled = random.Random(seed).sample(files, len(files))
    wanted = held_out * sum(file.stat().st_size for file in files)
    sizes = accumulate(file.stat().st_size for file in shuffled)
    count = next(i for i, size in enumerate(sizes, 1) if size >= wanted)
    kept = shuffled[min(count, len(files) - 1) :]
    chosen = set(files) - set(kept)
    return Corpus(root, SourceText.read(root, sorted(kept)), SourceText.read(root, sorted(chosen)))


def source_files(root: Path) -> list[Path]:
    """Return the Python files below `root`, sorted by path, without tests, tables and installed packages."""
    paths = (path for path in root.rglob("*.py") if not _LEFT_OUT.intersection(path.relative_to(root).parts[:-1]))
    return sorted(path for path in paths if path.is_file())


class ByteWindows(Dataset):
    """Windows of ids: `<bos>` and `length - 1` bytes of one file. No byte is in two windows; the labels are the ids.

    Args:
        text: The bytes.
        length: Ids per window.

    Raises:
        ValueError: A length below 2, or no file as long as a window.

    Example:
        >>> windows = ByteWindows(load_corpus().train, 512)
        >>> windows[0]["input_ids"].shape
        torch.Size([512])
    """

    def __init__(self, text: SourceText, length: int) -> None:
        if length < 2:
            raise ValueError(f"length={length} must be at least 2: <bos> and one byte")
        self.data, self.bytes_per_window = text.data, length - 1
        self.starts = [
            start
            for begin, end in zip(text.starts, text.starts[1:])
            for start in range(begin, end - self.bytes_per_window + 1, self.bytes_per_window)
        ]
        if not self.starts:
            raise ValueError(f"length={length}: no file has the {self.bytes_per_window} bytes of one window")

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = self.starts[index]
        ids = torch.empty(self.bytes_per_window + 1, dtype=torch.int64)
        ids[0] = BOS_ID
        ids[1:] = self.data[start : start + self.bytes_per_window]
        ids[1:] += BYTE_OFFSET
        return {"input_ids": ids, "labels": ids}


@torch.inference_mode()
def bits_per_byte(model: PreTrainedModel, windows: Sequence[Any], limit: int, batch_size: int = 16) -> list[float]:
    """Return the cross-entropy of every head on windows spread evenly over a text.

    Args:
        model: A model with `head_losses`.
        windows: The text (`ByteWindows`): entries with `input_ids` [L].
        limit: Number of windows, at most.
        batch_size: Windows per forward.

    Returns:
        Bits per byte of head 1, 2, ... (head j predicts the byte j ahead).
    """
    chosen = range(0, len(windows), -(-len(windows) // limit))
    total = torch.zeros(())
    for batch in torch.tensor(chosen).split(batch_size):
        ids = torch.stack([windows[int(index)]["input_ids"] for index in batch]).to(model.device)
        losses = model(ids, labels=ids, use_cache=False, logits_to_keep=1).head_losses
        total = total.to(losses) + losses * len(batch)
    return (total / len(chosen) / math.log(2)).tolist()
