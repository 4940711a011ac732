"""Rows in a directory that one or several processes write: files of consecutive rows, and facts about all of them.

A file is `rows-START.safetensors`: the columns of its rows joined, the rows' lengths, and one checksum of all this, of
START and of the name of the facts, so that none of another place is taken for one of this. It is whole or not there.
The facts, in JSON with a checksum, say what the rows are made of.
"""

from __future__ import annotations

import hashlib
import json
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate.state import PartialState
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, distributed
from transformers import PreTrainedModel
from transformers.utils import logging

from ..generation.backbone.wrapped_models import check_whole, is_sharded
from ..generation.tensors.saving import PREFIX, whole_file
from .utils import one_line, replace_file

logger = logging.get_logger(__name__)
T = TypeVar("T")
_LENGTHS = "lengths"
_PAUSE, _TELL = 0.5, 30.0  # seconds between two looks at the others, and between two lines about them
_VISIBLE = 120  # seconds until a shared disk shows what other machines wrote
_STAGES = count()


class DamagedPartError(ValueError):
    """A file of rows that does not hold what was written."""


def write_facts(path: Path, facts: Mapping[str, Any]) -> None:
    """Write what rows are made of as JSON, with a checksum."""
    replace_file(path, json.dumps({**facts, "sum": digest_of(facts)}))


def read_facts(path: Path) -> dict[str, Any]:
    """Return what `write_facts` wrote.

    Raises:
        ValueError: It is damaged.
    """
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts.pop("sum") != digest_of(facts):
            raise ValueError("its checksum is another")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = one_line(error)
        raise ValueError(f"{path} is damaged ({reason}): remove it, and what wrote it writes it again") from error
    return facts


def digest_of(facts: Mapping[str, Any]) -> str:
    """Return the name of facts that files of rows carry."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def checksum_of(tensors: Mapping[str, Tensor], start: int, of: str) -> int:
    """Return a checksum of tensors with their names, dtypes and shapes, of their first row, and of their facts."""
    found = zlib.crc32(f"{of} {start}".encode())
    for name, tensor in sorted(tensors.items()):
        found = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), found)
        found = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, found)
    return found


class Part:
    """A file of consecutive rows, of which the header and the lengths are read.

    Args:
        path: The file, which is named after its first row.
        of: Name of the facts that it must be made of (`digest_of`).

    Attributes:
        start: Number of its first row.
        lengths: Tokens of every row [R].
        stop: Number of the row behind its last one.
        columns: Names of what its rows hold.

    Raises:
        DamagedPartError: The file is damaged.
        ValueError: It is made of other facts.
    """

    def __init__(self, path: Path, of: str) -> None:
        self.path, self.start = path, _start_of(path)
        with self._reading() as file:
            said = file.metadata() or {}
            self.of, self.sum = said["of"], int(said["sum"])
            self.lengths = file.get_tensor(_LENGTHS).numpy().copy()
            self.columns = [name for name in file.keys() if name != _LENGTHS]  # noqa: SIM118
            sizes = {file.get_slice(name).get_shape()[0] for name in self.columns}
            if (self.lengths < 1).any() or not sizes <= {self.lengths.sum(), len(self.lengths)}:
                raise ValueError("its rows have other lengths than its columns")
        self.stop = self.start + len(self.lengths)
        if self.of != of:
            self.opened()  # or it is damaged
            raise ValueError(f"{path} is of another data set or model: remove it, or choose another directory")

    def opened(self, verify: bool = True) -> Any:
        """Return the open file, whose tensors are mapped and not read, except to verify their checksum.

        Raises:
            DamagedPartError: They have another checksum.
        """
        with self._reading() as file:
            if verify:
                tensors = {name: file.get_tensor(name) for name in (*self.columns, _LENGTHS)}
                if checksum_of(tensors, self.start, self.of) != self.sum:
                    raise ValueError("its checksum is another")
        return file

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        try:
            yield safe_open(self.path, framework="pt")
        except (SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise DamagedPartError(f"{self.path} is damaged: {one_line(error)}") from error


def write_part(folder: Path, of: str, start: int, lengths: Sequence[int], columns: Mapping[str, Tensor]) -> None:
    """Write consecutive rows.

    Args:
        folder: The directory.
        of: Name of the facts that they are made of.
        start: Number of the first one.
        lengths: Tokens of every row.
        columns: [sum of lengths, ...] of each, joined, or one value per row.

    Raises:
        OSError: A full disk, say; no file is left.
    """
    path = folder / _name(start)
    tensors = {**columns, _LENGTHS: torch.tensor(lengths)}
    said = {"of": of, "sum": str(checksum_of(tensors, start, of))}
    try:
        with whole_file(path) as temporary:
            temporary.touch()
            mode = stat.S_IMODE(temporary.stat().st_mode)  # the umask's; safetensors' files are their owner's alone
            save_file(tensors, temporary, said)
            temporary.chmod(mode)
    except (OSError, SafetensorError) as error:
        raise OSError(f"{path} is not written ({one_line(error)}); other files are whole") from error


def _name(start: int) -> str:
    return f"rows-{start:08d}.safetensors"


def _start_of(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def part_files(folder: str | Path) -> list[Path]:
    """Return the files of rows in a directory, by their first rows."""
    found = Path(folder).glob("rows-*.safetensors")
    return sorted((path for path in found if path.stem.partition("-")[2].isdecimal()), key=_start_of)


def read_parts(facts: Path, of: str, total: int, remedy: str) -> list[Part]:
    """Return the files of all rows, in their order.

    Args:
        facts: The file that says what rows are made of, in their directory.
        of: The name of these facts.
        total: How many rows there are.
        remedy: Name of the function that writes what is missing.

    Raises:
        ValueError: A file that is damaged or of another directory, a row that is missing, or one in two files.
    """
    parts = [Part(path, of) for path in part_files(facts.parent)]
    if missing := _missing(parts, total):
        held = f"{facts.parent} holds {total - len(missing)} of {total} rows of {facts.name}"
        raise ValueError(f"{held}: {_name(missing[0])} is missing; complete them with {remedy}")
    return parts


def _missing(parts: Sequence[Part], total: int) -> list[int]:
    """Return the rows that are in none of the parts, which are sorted."""
    for one, other in pairwise(parts):
        if one.stop > other.start:
            raise ValueError(f"{one.path} and {other.path.name} both hold row {other.start}: remove one of them")
    if parts and not 0 <= parts[0].start < parts[-1].stop <= total:
        raise ValueError(f"{parts[-1].path} holds row {parts[-1].stop - 1}, and there are {total}: remove it")
    is_there = np.zeros(total, bool)
    for part in parts:
        is_there[part.start : part.stop] = True
    return np.flatnonzero(~is_there).tolist()


def complete(
    facts: Path,
    of: str,
    total: int,
    write: Callable[[list[int]], None],
    what: str,
    processes: Processes,
    batch_size: int = 1,
    verify: bool = True,
) -> None:
    """Remove damaged files of rows, and write the rows that are missing, each process its share of both.

    What is missing is seen by the first process, and divided batch by batch: a run of any number of processes goes on
    from the files of any other.

    Args:
        facts: The file that says what rows are made of, in their directory; the first process has written it.
        of: The name of these facts.
        total: How many rows there are.
        write: Writes rows of these numbers.
        what: What the rows are, for lines of progress.
        processes: Those that write.
        batch_size: Rows that belong together.
        verify: Read files through; False: look at their headers and sizes.

    Raises:
        FileNotFoundError: Files that another process has written do not appear here.
        ValueError: A file of another directory, or a row in two files.
    """
    folder = facts.parent

    def missing() -> list[int]:
        parts = []
        for path in part_files(folder):
            with suppress(FileNotFoundError):  # another process has removed it, and this machine still lists it
                parts.append(Part(path, of))
        return _missing(parts, total)

    def progress() -> str:
        return f"{len(part_files(folder))} files in {folder}"

    with processes.stage(f"reading {what} through", progress):
        for path in part_files(folder):
            if zlib.crc32(path.name.encode()) % processes.world != processes.rank:
                continue
            try:
                Part(path, of).opened(verify)
            except DamagedPartError as error:
                logger.warning(f"{error}; its rows are written again")
                path.unlink(missing_ok=True)
        for path in folder.glob(f"{PREFIX}rows-*") if processes.rank == 0 else ():  # of a writer that was killed
            path.unlink()
    rows = of_first(missing)
    batches = np.unique([row // batch_size for row in rows])
    mine = {*np.array_split(batches, processes.world)[processes.rank].tolist()}
    with processes.stage(what, progress):
        write([row for row in rows if row // batch_size in mine])
    until = time.monotonic() + _VISIBLE
    while processes.world > 1 and (not facts.exists() or missing()):
        if time.monotonic() >= until:
            raise FileNotFoundError(
                f"{folder} does not show what all have written {_VISIBLE} s ago: process {processes.rank} of "
                f"{processes.world} sees another disk"
            )
        time.sleep(1)  # a shared disk shows late what another machine has written


@dataclass(frozen=True)
class Processes:
    """This process among those of the run, which share work on files without waiting for each other in a collective.

    Attributes:
        rank: Its number, over all machines.
        world: How many there are.
    """

    rank: int = 0
    world: int = 1

    @classmethod
    def of(cls, backbone: PreTrainedModel | None) -> Processes:
        """Return the processes that each hold a whole backbone, or none.

        Raises:
            ValueError: The backbone is divided among them, so that they cannot read different rows.
        """
        if backbone is not None:
            check_whole(backbone, "rows divided among processes")
            if is_sharded(backbone):
                name = type(backbone).__name__
                raise ValueError(f"FSDP2 shards {name}, and rows are divided among whole ones: load it so")
        if not (distributed.is_available() and distributed.is_initialized()):
            return cls()
        return cls(distributed.get_rank(), distributed.get_world_size())

    @contextmanager
    def stage(self, what: str, progress: Callable[[], str] = str) -> Iterator[None]:
        """Run this process's share of a piece of work, then wait until all others have finished theirs.

        Processes count themselves in the store of the process group: there is no limit of time, as a collective has.

        Args:
            what: The work, in lines about those that are waited for.
            progress: Returns how far all are.

        Raises:
            RuntimeError: Another process has ended with an error.
        """
        if self.world == 1:
            yield
            return
        store, name = distributed.distributed_c10d._get_default_store(), f"tokenahead/{next(_STAGES)}"
        done, failed = f"{name}/done", f"{name}/failed"
        try:
            yield
        except BaseException as error:
            store.set(failed, f"process {self.rank} of {self.world} ended with: {one_line(error)}")
            raise
        store.add(done, 1)
        told = time.monotonic()
        while (left := self.world - store.add(done, 0)) > 0:
            if store.check([failed]):
                raise RuntimeError(f"{what}: {store.get(failed).decode()}")
            if time.monotonic() - told > _TELL:
                logger.warning(f"{what}: {progress()}; waiting for {left} of {self.world} processes")
                told = time.monotonic()
            time.sleep(_PAUSE)
        distributed.barrier()  # all are here; the one that holds the store leaves last


def of_first(read: Callable[[], T]) -> T:
    """Return in every process what the first one reads; its error is raised in all."""
    PartialState()  # joins the processes of a launcher
    processes, found = Processes.of(None), list[Any]([None, None])
    if processes.rank == 0:
        try:
            found[0] = read()
        except Exception as error:
            found[1] = error
    if processes.world > 1:
        distributed.broadcast_object_list(found)
    if found[1] is not None:
        raise found[1]
    return found[0]
