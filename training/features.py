"""Hidden states of a frozen backbone on disk, so that drafters are trained without running it again.

Rows of a data set go through the backbone once; the states that a drafter reads are written in parts of whole rows
(`parts`), and for one with a draft vocabulary what its losses read of the logits of all tokens. Each process of a run
writes its share. A process that is killed loses only the part it was writing: called again, by any number of processes,
`cache_features` writes what is missing or damaged. The reader has the order of the data set, so that a Trainer makes
the same batches of both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.utils import logging

from ..modeling.common.recording import STATES
from .parts import PartWriter, Places, complete, digest_of, read_facts, read_parts, write_facts
from .processes import Processes
from .states import BackboneStates, Drafter, Row, StatesSource, TextStates
from .utils import check_same

INDEX = "index.json"
_SAME = ("weights", "layers", "width", "dtype", "data")
"""What must be the same where features are completed; two of them are checksums."""


@dataclass
class FeatureIndex:
    """The contents of a directory of features.

    Attributes:
        backbone: Name of the backbone, or of its directory, for people; `weights` identifies it.
        weights: Checksum of a sample of every weight of the backbone.
        layers: Indices of the states, as `output_hidden_states` counts them.
        width: d.
        dtype: Dtype of the states.
        data: Checksum of all token ids and labels.
        lengths: Tokens of every row, without padding.
        summaries: Whether rows have `cached_summaries`, too.
        parts: Names of all files, once all rows are written.
    """

    backbone: str
    weights: str
    layers: list[int]
    width: int
    dtype: str
    data: str
    lengths: list[int]
    summaries: bool = False
    parts: list[str] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """What parts carry of it: all that decides what their rows hold."""
        return digest_of({name: vars(self)[name] for name in _SAME})

    @classmethod
    def read(cls, folder: str | Path) -> FeatureIndex:
        """Return the index of a directory.

        Raises:
            FileNotFoundError: The directory holds no features.
            ValueError: The index is damaged.
        """
        path = Path(folder) / INDEX
        if not path.exists():
            raise FileNotFoundError(f"{folder} holds no features: there is no {INDEX}; write them with cache_features")
        facts = read_facts(path)
        if facts.keys() != {each.name for each in fields(cls)}:
            raise ValueError(f"{path} is no index of features")
        return cls(**facts)

    def write(self, folder: Path) -> None:
        """Replace the index of a directory."""
        write_facts(folder / INDEX, asdict(self))


def cache_features(
    drafter: Drafter,
    data: Sequence[Row],
    folder: str | Path,
    dtype: str | None = None,
    tokens_per_shard: int = 2**18,
    tokens_per_batch: int = 2**13,
    verify: bool = True,
    source: TextStates | None = None,
    ignore_columns: Sequence[str] = (),
) -> FeatureDataset:
    """Write the states that a drafter learns from, or those that are missing or damaged.

    The processes of a group of `torch.distributed`, all of which call this, divide the rows, and return when all rows
    are written.

    Args:
        drafter: Attached `MTPHeads`, `EagleHead` or `BlockDrafter`; its `learning_layers` and its backbone are used.
        data: Rows with `input_ids` and, optionally, `labels` or another mask of `training.columns`, `attention_mask`
            (padding is dropped) and `position_ids`.
        folder: Output directory; created if missing.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`; None: the backbone's.
        tokens_per_shard: A part ends with the row that reaches this number of tokens.
        tokens_per_batch: Rows of similar lengths in a part go through the backbone together, up to this number of
            tokens with their padding.
        verify: Read parts that are there through; False, for sets of terabytes: look at their headers and sizes alone.
        source: Of the states of these rows, as `ServerStates`; None: the drafter's backbone, in this process.
        ignore_columns: Columns of the rows that are left out unread.

    Returns:
        The rows, to train with.

    Raises:
        ValueError: A data set without rows, a directory with features of another backbone, data set or layers, a
            damaged index, states that are not finite, or a backbone that several processes hold together.
    """
    folder, backbone = Path(folder), drafter.backbone
    processes = Processes.of(backbone if source is None else None)
    source = BackboneStates(drafter, data, dtype, tokens_per_batch, ignore_columns) if source is None else source
    index = _index(source)
    if (folder / INDEX).exists():
        earlier = FeatureIndex.read(folder)
        check_same(f"folder={folder}", *({name: vars(each)[name] for name in _SAME} for each in (earlier, index)))
        index = earlier
    folder.mkdir(parents=True, exist_ok=True)
    if processes.rank == 0:
        index.write(folder)
    backbone.eval()
    size = sum(index.lengths) * len(index.layers) * index.width * source.dtype.itemsize

    def write(writer: PartWriter, rows: list[int], share: int) -> None:
        what = f"states of the backbone, {size / 1e9:.3g} GB"
        with logging.tqdm(total=share, initial=share - len(rows), desc=what) as bar:
            for numbers in _parts(rows, index.lengths, tokens_per_shard):
                columns = source.rows(numbers, bar.update)
                for row, each in zip(numbers, columns):
                    if not each[STATES].isfinite().all():
                        raise ValueError(f"states of row {row} are not finite in dtype={index.dtype!r}")
                joined = {name: torch.cat([each[name] for each in columns]) for name in columns[0]}
                writer.write(numbers, [index.lengths[number] for number in numbers], joined)

    what, total = "states of the backbone", len(index.lengths)
    index.parts = complete(folder / INDEX, index.digest, total, write, what, processes, verify=verify)
    if processes.rank == 0:
        index.write(folder)
    dataset = FeatureDataset(folder, verify)
    dataset.known = {*range(len(dataset.parts))}  # each was read through, or written just now
    return dataset


class FeatureDataset(StatesSource):
    """Rows of features: ids, labels and states, in the order of the data set.

    Args:
        folder: What `cache_features` wrote.
        verify: Read a part through when its first row is read, and compare its checksums.

    Raises:
        FileNotFoundError: A directory without features.
        ValueError: Incomplete or damaged features; where a row is read, too.

    Example:
        >>> rows = cache_features(heads, data, "features")
        >>> MTPTrainer(heads, args, train_dataset=rows, data_collator=rows.collate).train()
    """

    def __init__(self, folder: str | Path, verify: bool = True) -> None:
        self.folder, self.index, self.verify = Path(folder), FeatureIndex.read(folder), verify
        lengths = np.asarray(self.index.lengths)
        self.parts = read_parts(self.folder, self.index.digest, len(lengths))
        self.places = Places(self.parts, len(lengths))
        self.places.check_complete(self.folder / INDEX, self.index.parts, "cache_features")
        for part in self.parts:
            if not np.array_equal(part.lengths, lengths[part.rows]):
                raise ValueError(f"{part.path} is damaged: its rows have other lengths than in {INDEX}")
        self.known: set[int] = set()  # parts that were read through
        self._open: dict[int, Any] = {}

    @property
    def lengths(self) -> list[int]:
        """Tokens of every row."""
        return self.index.lengths

    def rows(self, numbers: Sequence[int], done: Callable[[int], object] = int) -> list[dict[str, torch.Tensor]]:
        """See `StatesSource`."""
        return [self._row(number) for number in numbers]

    def _row(self, row: int) -> dict[str, torch.Tensor]:
        part, start = int(self.places.part[row]), int(self.places.start[row])
        stop = start + self.index.lengths[row]
        file, names = self._part(part), self.parts[part].columns
        return {name: file.get_slice(name)[start:stop] for name in names}

    def _part(self, number: int) -> Any:
        if number not in self._open:  # mapped, not read: memory is what a batch needs
            self._open[number] = self.parts[number].opened(self.verify and number not in self.known)
            self.known.add(number)
        return self._open[number]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for worker processes, which open the parts themselves."""
        return vars(self) | {"_open": {}}


def _index(source: TextStates) -> FeatureIndex:
    if not len(source.data):
        raise ValueError("data has no rows; at least one is needed")
    backbone, digest, lengths = source.drafter.backbone, hashlib.sha256(), []
    for row in map(source.text, range(len(source.data))):
        for name in row:
            digest.update(name.encode() + row[name].numpy().tobytes())
        lengths.append(len(row["input_ids"]))
    config = backbone.config
    name = config.name_or_path or type(backbone).__name__
    return FeatureIndex(
        backbone=Path(name).name if Path(name).exists() else name,
        weights=checksum(backbone),
        layers=source.layers,
        width=config.get_text_config().hidden_size,
        dtype=str(source.dtype).removeprefix("torch."),
        data=digest.hexdigest(),
        lengths=lengths,
        summaries=source.has_summaries,
    )


def checksum(model: nn.Module, skip: str = "\0") -> str:
    """Return a checksum of a sample of each parameter; those with `skip` in their names do not count."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if skip in name:
            continue
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, len(flat) // 64)][:64]
        digest.update(name.encode() + sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _parts(rows: list[int], lengths: list[int], tokens: int) -> Iterator[list[int]]:
    """Yield rows by parts; a part ends with the row that reaches a number of tokens."""
    part, size = list[int](), 0
    for row in rows:
        part.append(row)
        size += lengths[row]
        if size >= tokens:
            yield part
            part, size = [], 0
    if part:
        yield part
