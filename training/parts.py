"""Rows in a directory that one or several processes write: files of consecutive rows, and facts about all of them.

A file is `rows-START.safetensors`: the columns of its rows joined ([sum of lengths, ...], or one value per row), the
rows' lengths, and one checksum of all this, of START and of the digest of the facts (JSON that says what the rows are
made of), so that none of another place is taken for one of this. It is whole or not there.
"""

from __future__ import annotations

import hashlib
import json
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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
from .utils import check_same, one_line, replace_file

logger = logging.get_logger(__name__)
T = TypeVar("T")
_LENGTHS = "lengths"
_PAUSE = 0.5  # seconds between two looks at the others
_VISIBLE = 120  # seconds until a shared disk shows what other machines wrote
_STAGES = count()
_OF_DAMAGE = (SafetensorError, ValueError, LookupError, TypeError, AttributeError)
Save = Callable[[int, Sequence[int], Mapping[str, Tensor]], None]
"""Writes a file of rows: the first one, their lengths, and their columns."""


class DamagedPartError(ValueError):
    """A file of rows that does not hold what was written."""


def read_facts(path: Path) -> dict[str, Any]:
    """Return what rows are made of, as `complete` wrote it; a damaged file is a ValueError."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts.pop("sum") != digest_of(facts):
            raise ValueError("its checksum is another")
    except _OF_DAMAGE as error:
        raise ValueError(f"{path} is damaged ({one_line(error)}): remove it, and it is written again") from error
    return facts


def digest_of(facts: Mapping[str, object]) -> str:
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
    """A file of the rows `start` to `stop` - 1, with their `lengths` and the names of their `columns`.

    One that is damaged is a DamagedPartError, and one of other facts than `of` another ValueError.
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
        """Return the open file, whose tensors are mapped, and read only to verify their checksum."""
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
        except _OF_DAMAGE as error:
            raise DamagedPartError(f"{self.path} is damaged: {one_line(error)}") from error


def write_part(folder: Path, of: str, start: int, lengths: Sequence[int], columns: Mapping[str, Tensor]) -> None:
    """Write the file of the rows from `start` on; after an error, of a full disk for example, there is none."""
    path, tensors = folder / _name(start), {**columns, _LENGTHS: torch.tensor(lengths)}
    with whole_file(path) as temporary:
        temporary.touch()
        mode = stat.S_IMODE(temporary.stat().st_mode)  # the umask's; safetensors' files are their owner's alone
        try:
            save_file(tensors, temporary, {"of": of, "sum": str(checksum_of(tensors, start, of))})
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {one_line(error)}; the rows before it are kept") from error
        temporary.chmod(mode)


def _name(start: int) -> str:
    return f"rows-{start:08d}.safetensors"


def _start_of(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def part_files(folder: str | Path) -> list[Path]:
    """Return the files of rows in a directory, by their first rows."""
    paths = Path(folder).glob("rows-*.safetensors")
    return sorted((path for path in paths if path.stem.partition("-")[2].isdecimal()), key=_start_of)


def read_parts(path: Path, remedy: str) -> list[Part]:
    """Return the files of all rows beside the file of their facts; where one is missing, `remedy` writes it."""
    facts = read_facts(path)
    parts, missing = _held(path.parent, digest_of(facts), facts["rows"])
    if missing:
        held = f"{path.parent} holds {facts['rows'] - len(missing)} of {facts['rows']} rows of {path.name}"
        raise ValueError(f"{held}: {_name(missing[0])} is missing; complete them with {remedy}")
    return parts


def _held(folder: Path, of: str, total: int) -> tuple[list[Part], list[int]]:
    """Return the files of rows, in their order, and the rows that are in none of them."""
    parts, is_there = list[Part](), np.zeros(total, bool)
    for path in part_files(folder):
        with suppress(FileNotFoundError):  # another process has removed it, and this machine still lists it
            parts.append(part := Part(path, of))
            if part.stop > total or is_there[part.start : part.stop].any():
                raise ValueError(f"{path} holds a row that another file holds, or one beyond {total}: remove it")
            is_there[part.start : part.stop] = True
    return parts, np.flatnonzero(~is_there).tolist()


def complete(
    path: Path,
    facts: Mapping[str, Any],
    write: Callable[[list[int], Save], None],
    processes: Processes,
    batch_size: int = 1,
    verify: bool = True,
) -> None:
    """Remove damaged files of rows, and write the rows that are missing, each process its share of both.

    `path` is the file of facts: where there are rows of others beside it, nothing is written. What is missing is seen
    by the first process, and divided by batches of `batch_size` rows: a run of any number of processes goes on from the
    files of any other. Without `verify`, only headers and sizes of files are looked at.
    """
    folder, of, total = path.parent, digest_of(facts), facts["rows"]
    if path.exists() and part_files(folder):  # not after a wrong option, where nothing was written
        check_same(f"folder={folder}", read_facts(path), facts)
    elif processes.rank == 0:
        replace_file(path, json.dumps({**facts, "sum": of}))
    with processes.stage():
        for file in part_files(folder):
            if zlib.crc32(file.name.encode()) % processes.world != processes.rank:
                continue
            try:
                Part(file, of).opened(verify)
            except DamagedPartError as error:
                logger.warning(f"{error}; its rows are written again")
                file.unlink(missing_ok=True)
        for file in folder.glob(f"{PREFIX}rows-*") if processes.rank == 0 else ():  # of a writer that was killed
            file.unlink()
    rows = of_first(lambda: _held(folder, of, total)[1])
    batches = np.unique([row // batch_size for row in rows])
    mine = {*np.array_split(batches, processes.world)[processes.rank].tolist()}
    with processes.stage():
        write([row for row in rows if row // batch_size in mine], partial(write_part, folder, of))
    until = time.monotonic() + _VISIBLE  # a shared disk shows late what others have written
    while processes.world > 1 and (not path.exists() or _held(folder, of, total)[1]):
        if time.monotonic() >= until:
            raise FileNotFoundError(f"{folder}: process {processes.rank} of {processes.world} sees another disk")
        time.sleep(1)


class Processes(NamedTuple):
    """This process, number `rank` of the `world` of a run, which share work on files."""

    rank: int = 0
    world: int = 1

    @classmethod
    def of(cls, backbone: PreTrainedModel | None) -> Processes:
        """Return the processes that each hold a whole backbone, or none; one that they divide is refused."""
        if backbone is not None:
            check_whole(backbone, "rows divided among processes")
            if is_sharded(backbone):
                raise ValueError(f"FSDP2 shards {type(backbone).__name__}, and rows are divided among whole ones")
        return cls(distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else cls()

    @contextmanager
    def stage(self) -> Iterator[None]:
        """Run this process's share of a piece of work, then wait for all others, without a collective's limit of time.

        They count themselves in the store of the process group. An error of one ends all.
        """
        if self.world == 1:
            yield
            return
        store, done = distributed.distributed_c10d._get_default_store(), f"tokenahead/{next(_STAGES)}"
        failed = f"{done}/failed"
        try:
            yield
        except BaseException as error:
            store.set(failed, f"process {self.rank} of {self.world} ended with: {one_line(error)}")
            raise
        store.add(done, 1)
        while store.add(done, 0) < self.world:
            if store.check([failed]):
                raise RuntimeError(store.get(failed).decode())
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
