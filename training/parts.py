"""Rows in a directory that one or several processes write: parts of whole rows, merged by the numbers of the rows.

A part is a safetensors file `part-RANK-of-WORLD-NUMBER`, with the columns of its rows joined, the rows' numbers and
lengths, and a checksum of every tensor. It is written under another name first, so that it is whole or not there. A
file of facts, with a checksum, says what the rows were made of; a part names these facts, so that none of another
directory is taken for one of this.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import stat
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from psutil import pid_exists
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import logging

from .processes import Processes
from .utils import one_line, replace_file

logger = logging.get_logger(__name__)
_NAME = re.compile(r"part-(\d{5,})-of-\d{5,}-(\d{5,})\.safetensors")
_REMAINS = re.compile(r"\.part-.*\.safetensors\.(?P<machine>.*)\.(?P<process>\d+)\.tmp")
_ROWS, _LENGTHS = "rows", "lengths"
_DAY, _VISIBLE = 86_400, 120  # seconds: until remains of other machines go, and a shared disk shows what others wrote


class DamagedPartError(ValueError):
    """A part that does not hold what was written."""


def write_facts(path: Path, facts: Mapping[str, Any]) -> None:
    """Write what rows are made of as JSON, with a checksum."""
    replace_file(path, json.dumps({**facts, "crc32": _sum_of_facts(facts)}))


def read_facts(path: Path) -> dict[str, Any]:
    """Return what `write_facts` wrote.

    Raises:
        ValueError: It is damaged.
    """
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts.pop("crc32") != _sum_of_facts(facts):
            raise ValueError("its checksum is another")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = one_line(error)
        raise ValueError(f"{path} is damaged ({reason}): remove it, and what wrote it writes it again") from error
    return facts


def _sum_of_facts(facts: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def digest_of(facts: Mapping[str, Any]) -> str:
    """Return the name of facts that parts carry."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


class Part:
    """A file of rows, whose header, numbers and lengths are read and checked.

    Args:
        path: The file.
        of: Name of the facts that it must be made of (`digest_of`).
        total: How many rows these have.

    Attributes:
        rows: Numbers of the rows [R].
        lengths: Tokens of every row [R].

    Raises:
        DamagedPartError: The file is damaged.
        ValueError: It is made of other facts.
    """

    def __init__(self, path: Path, of: str, total: int) -> None:
        self.path = path
        try:
            file = safe_open(path, framework="pt")
            said = file.metadata() or {}
            self.sums, self.of = json.loads(said.get("crc32", "{}")), said.get("of", "")
            if self.sums.keys() != set(file.keys()):
                raise ValueError("its checksums are not those of its tensors")
            self.rows, self.lengths = (self._checked(file, name).numpy().copy() for name in (_ROWS, _LENGTHS))
            sizes = {file.get_slice(name).get_shape()[0] for name in self.columns}
            is_known = self.rows.shape == self.lengths.shape == np.unique(self.rows).shape and self.rows.min() >= 0
            if self.of == of and not (is_known and self.rows.max() < total):
                raise ValueError(f"it has rows that are not among the {total}")
            if (self.lengths < 1).any() or not sizes <= {self.lengths.sum(), len(self.rows)}:
                raise ValueError("its rows have other lengths than its columns")
        except (SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise DamagedPartError(f"{path} is damaged: {one_line(error)}") from error
        if self.of != of:
            raise ValueError(f"{path} is of another data set or model: remove it, or choose another directory")

    @property
    def columns(self) -> list[str]:
        """Names of what its rows hold."""
        return [name for name in self.sums if name not in (_ROWS, _LENGTHS)]

    def opened(self, verify: bool = True) -> Any:
        """Return the open file, whose tensors are mapped and not read, except for a check of all of them.

        Raises:
            DamagedPartError: A tensor has another checksum.
        """
        try:
            file = safe_open(self.path, framework="pt")
            for name in self.sums if verify else ():
                self._checked(file, name)
        except (SafetensorError, ValueError) as error:
            raise DamagedPartError(f"{self.path} is damaged: {one_line(error)}") from error
        return file

    def _checked(self, file: Any, name: str) -> Tensor:
        if checksum_of(tensor := file.get_tensor(name), self.of) != self.sums[name]:
            raise ValueError(f"the checksum of {name} is another")
        return tensor


def checksum_of(tensor: Tensor, of: str) -> int:
    """Return a checksum of a part's tensor with its dtype and shape, and of what the part is made of."""
    kind = zlib.crc32(f"{of} {tensor.dtype} {list(tensor.shape)}".encode())
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, kind)


class PartWriter:
    """Writes the parts of one process."""

    def __init__(self, folder: Path, of: str, processes: Processes) -> None:
        self.folder, self.of, self.processes, self.numbers = folder, of, processes, count()

    def write(self, rows: Sequence[int], lengths: Sequence[int], columns: Mapping[str, Tensor]) -> None:
        """Write rows under the first number that is free.

        Args:
            rows: Their numbers.
            lengths: Their tokens.
            columns: [sum of lengths, ...] of each, joined in the order of `rows`, or one value per row.

        Raises:
            OSError: A full disk, say; no part is left.
        """
        rank, world = self.processes.rank, self.processes.world
        while (path := self.folder / f"part-{rank:05d}-of-{world:05d}-{next(self.numbers):05d}.safetensors").exists():
            pass
        tensors = {**columns, _ROWS: torch.tensor(rows), _LENGTHS: torch.tensor(lengths)}
        sums = json.dumps({name: checksum_of(tensor, self.of) for name, tensor in tensors.items()})
        temporary = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.tmp")
        try:
            temporary.touch()
            mode = stat.S_IMODE(temporary.stat().st_mode)  # the umask's; safetensors' files are their owner's alone
            save_file(tensors, temporary, {"of": self.of, "crc32": sums})
            temporary.chmod(mode)
            temporary.replace(path)
        except (OSError, SafetensorError) as error:
            raise OSError(f"{path} is not written ({one_line(error)}); other parts are whole") from error
        finally:
            temporary.unlink(missing_ok=True)


def part_files(folder: str | Path) -> list[Path]:
    """Return the parts of a directory, by name."""
    return sorted(path for path in Path(folder).iterdir() if _NAME.fullmatch(path.name))


def read_parts(folder: Path, of: str, total: int) -> list[Part]:
    """Return the parts of a directory, with headers, numbers and lengths checked.

    Raises:
        ValueError: One is damaged, or of another directory.
    """
    parts = []
    for path in part_files(folder):
        with suppress(FileNotFoundError):  # another process has removed it, and this machine still lists it
            parts.append(Part(path, of, total))
    return parts


class Places:
    """Where every row is, of `total` rows in parts.

    Attributes:
        part: Index of the part of every row [total]; -1: in none.
        number: Which one it is of the part's rows [total].
        start: Which of the part's tokens is its first [total].

    Raises:
        ValueError: A row in two parts.
    """

    def __init__(self, parts: Sequence[Part], total: int) -> None:
        self.parts = parts
        self.part, self.number, self.start = np.full(total, -1), np.zeros(total, int), np.zeros(total, int)
        for index, part in enumerate(parts):
            if (twice := part.rows[self.part[part.rows] >= 0]).size:
                other = parts[int(self.part[twice[0]])].path.name
                raise ValueError(f"{part.path} and {other} both hold row {twice[0]}: remove one of them")
            self.part[part.rows], self.number[part.rows] = index, np.arange(len(part.rows))
            self.start[part.rows] = np.cumsum(part.lengths) - part.lengths

    @property
    def missing(self) -> list[int]:
        """The rows that are in no part."""
        return np.flatnonzero(self.part < 0).tolist()

    def check_complete(self, facts: Path, names: Sequence[str], remedy: str) -> None:
        """Refuse gaps.

        Args:
            facts: The file that says how many rows there are.
            names: The parts that a complete directory had.
            remedy: Name of the function that writes what is missing.

        Raises:
            ValueError: A row in no part.
        """
        if missing := self.missing:
            gone = sorted({*names} - {part.path.name for part in self.parts})
            held = f"{facts.parent} holds {len(self.part) - len(missing)} of {len(self.part)} rows of {facts.name}"
            lost = f"{len(missing)} from row {missing[0]} to row {missing[-1]} are missing"
            where = f", of {', '.join(gone)}" if gone else ""
            raise ValueError(f"{held}: {lost}{where}; complete them with {remedy}")


def complete(
    facts: Path,
    of: str,
    total: int,
    write: Callable[[PartWriter, list[int], int], None],
    what: str,
    processes: Processes,
    batch_size: int = 1,
    verify: bool = True,
) -> list[str]:
    """Remove damaged parts of a directory, and write the rows that are missing, each process its share of both.

    Rows are divided by their numbers, batch by batch, so that the division knows nothing of what is there: a run of
    any number of processes goes on from the parts of any other.

    Args:
        facts: The file that says what rows are made of, in their directory; the first process has written it.
        of: The name of these facts.
        total: How many rows there are.
        write: Writes rows; it gets a writer, the numbers of those that are missing of this process's share, and the
            size of the share.
        what: What the rows are, for lines of progress.
        processes: Those that write.
        batch_size: Rows that belong together.
        verify: Read parts through; False: look at their headers and sizes.

    Returns:
        The names of all parts.

    Raises:
        FileNotFoundError: Parts that another process has written do not appear here.
        ValueError: A part of another directory, or a row in two parts.
    """
    folder = facts.parent

    def progress() -> str:
        return f"{len(part_files(folder))} parts in {folder}"

    def missing() -> list[int]:
        return Places(read_parts(folder, of, total), total).missing

    with processes.stage(f"reading {what} through", progress):
        _remove_damaged(folder, of, total, processes, verify)
        if processes.rank == 0:
            _remove_remains(folder)
    with processes.stage(what, progress):
        share = [row for row in range(total) if row // batch_size % processes.world == processes.rank]
        write(PartWriter(folder, of, processes), sorted({*share} & {*missing()}), len(share))
    until = time.monotonic() + _VISIBLE
    while processes.world > 1 and ((gone := missing()) or not facts.exists()):
        if time.monotonic() >= until:
            owners = sorted({row // batch_size % processes.world for row in gone}) or [0]
            raise FileNotFoundError(
                f"{folder} lacks {len(gone)} rows of processes {owners} {_VISIBLE} s after these wrote them: "
                f"process {processes.rank} of {processes.world} sees another disk"
            )
        time.sleep(1)  # a shared disk shows late what another machine has written
    return [path.name for path in part_files(folder)]


def _remove_damaged(folder: Path, of: str, total: int, processes: Processes, verify: bool) -> None:
    """Read this process's share of the parts through, and remove those that are damaged."""
    for path in part_files(folder):
        numbers = _NAME.fullmatch(path.name)
        if numbers is None or sum(map(int, numbers.groups())) % processes.world != processes.rank:
            continue
        try:
            Part(path, of, total).opened(verify)
        except DamagedPartError as error:
            logger.warning(f"{error}; its rows are written again")
            path.unlink()


def _remove_remains(folder: Path) -> None:
    """Remove what writers left that were killed: on this machine; of other machines, what is a day old."""
    for path in folder.iterdir():
        if remains := _REMAINS.fullmatch(path.name):
            is_here, process = remains["machine"] == platform.node(), int(remains["process"])
            with suppress(FileNotFoundError):
                if not pid_exists(process) if is_here else time.time() - path.stat().st_mtime > _DAY:
                    path.unlink()
