"""Hidden states of a frozen backbone on disk, so that drafters are trained without running it again.

Rows of a data set go through the backbone once; the states that a drafter reads are written in parts of whole rows
(`parts`), and for one with a draft vocabulary what its losses read of the logits of all tokens. Each process of a run
writes its share. A process that is killed loses only the part it was writing: called again, by any number of processes,
`cache_features` writes what is missing or damaged. The reader has the order of the data set, so that a Trainer makes
the same batches of both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..configuration.fields import field as config_field
from ..configuration.fields import requested_states
from ..modeling import BlockDrafter, EagleHead, MTPHeads
from ..modeling.common.backbone_parts import BackboneParts
from ..modeling.common.recording import STATES, SUMMARIES, collate
from ..modeling.common.teacher import logit_summaries
from .parts import PartWriter, Places, complete, digest_of, read_facts, read_parts, write_facts
from .processes import Processes
from .utils import check_same

INDEX = "index.json"
_IDS = ("input_ids", "labels", "position_ids")
_SAME = ("weights", "layers", "width", "dtype", "data")
"""What must be the same where features are completed; two of them are checksums."""
_SPREAD = 12
"""Percent that rows of a group may be shorter than its longest one."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
Row = Mapping[str, Any]


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
    drafter: MTPHeads | EagleHead | BlockDrafter,
    data: Sequence[Row],
    folder: str | Path,
    dtype: str | None = None,
    tokens_per_shard: int = 2**18,
    tokens_per_batch: int = 2**13,
    verify: bool = True,
) -> FeatureDataset:
    """Write the states that a drafter learns from, or those that are missing or damaged.

    The processes of a group of `torch.distributed`, all of which call this, divide the rows, and return when all rows
    are written.

    Args:
        drafter: Attached `MTPHeads`, `EagleHead` or `BlockDrafter`; its `learning_layers` and its backbone are used.
        data: Rows with `input_ids` and, optionally, `labels`, `attention_mask` (padding is dropped) and `position_ids`.
        folder: Output directory; created if missing.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`; None: the backbone's.
        tokens_per_shard: A part ends with the row that reaches this number of tokens.
        tokens_per_batch: Rows of similar lengths in a part go through the backbone together, up to this number of
            tokens with their padding.
        verify: Read parts that are there through; False, for sets of terabytes: look at their headers and sizes alone.

    Returns:
        The rows, to train with.

    Raises:
        ValueError: A data set without rows, a directory with features of another backbone, data set or layers, a
            damaged index, states that are not finite, or a backbone that several processes hold together.
    """
    folder, backbone = Path(folder), drafter.backbone
    processes = Processes.of(backbone)
    dtype = str(backbone.dtype).removeprefix("torch.") if dtype is None else dtype
    index = _index(drafter, data, dtype)
    if (folder / INDEX).exists():
        earlier = FeatureIndex.read(folder)
        check_same(f"folder={folder}", *({name: vars(each)[name] for name in _SAME} for each in (earlier, index)))
        index = earlier
    folder.mkdir(parents=True, exist_ok=True)
    if processes.rank == 0:
        index.write(folder)
    backbone.eval()
    size = sum(index.lengths) * len(index.layers) * index.width * _DTYPES[dtype].itemsize

    def write(writer: PartWriter, rows: list[int], share: int) -> None:
        what = f"states of the backbone, {size / 1e9:.3g} GB"
        with logging.tqdm(total=share, initial=share - len(rows), desc=what) as bar:
            for numbers in _parts(rows, index.lengths, tokens_per_shard):
                texts = [_stripped(data[number]) for number in numbers]
                states = _states(backbone, texts, index, tokens_per_batch, bar)
                for row, each in zip(numbers, states):
                    if not each[STATES].isfinite().all():
                        raise ValueError(f"states of row {row} are not finite in dtype={dtype!r}: nothing learns so")
                columns = [text | outputs for text, outputs in zip(texts, states)]
                joined = {name: torch.cat([each[name] for each in columns]) for name in columns[0]}
                writer.write(numbers, [index.lengths[number] for number in numbers], joined)

    what, total = "states of the backbone", len(index.lengths)
    index.parts = complete(folder / INDEX, index.digest, total, write, what, processes, verify=verify)
    if processes.rank == 0:
        index.write(folder)
    dataset = FeatureDataset(folder, verify)
    dataset.known = {*range(len(dataset.parts))}  # each was read through, or written just now
    return dataset


class FeatureDataset(Dataset):
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

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
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

    collate = staticmethod(collate)


def _index(drafter: MTPHeads | EagleHead | BlockDrafter, data: Sequence[Row], dtype: str) -> FeatureIndex:
    if not len(data):
        raise ValueError("data has no rows; at least one is needed")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r} is unknown; choose one of {', '.join(_DTYPES)}")
    backbone, digest, lengths = drafter.backbone, hashlib.sha256(), []
    for row in (_stripped(data[number]) for number in range(len(data))):
        for name in row:
            digest.update(name.encode() + row[name].numpy().tobytes())
        lengths.append(len(row["input_ids"]))
    config = backbone.config
    name = config.name_or_path or type(backbone).__name__
    return FeatureIndex(
        backbone=Path(name).name if Path(name).exists() else name,
        weights=checksum(backbone),
        layers=list(drafter.learning_layers),
        width=config.get_text_config().hidden_size,
        dtype=dtype,
        data=digest.hexdigest(),
        lengths=lengths,
        summaries=-1 in drafter.learning_layers and drafter.config.draft_vocab_size is not None,
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


def _stripped(row: Row) -> dict[str, torch.Tensor]:
    """Return the columns of a row without padding."""
    columns = {name: torch.as_tensor(row[name]) for name in _IDS if name in row}
    columns.setdefault("labels", columns["input_ids"])
    if "attention_mask" in row:
        real = torch.as_tensor(row["attention_mask"]).bool()
        columns = {name: column[real] for name, column in columns.items()}
    return {name: column.to(torch.int64).contiguous().clone() for name, column in columns.items()}


@torch.no_grad()
def _states(
    backbone: PreTrainedModel, rows: list[dict[str, torch.Tensor]], index: FeatureIndex, tokens: int, bar: Any
) -> list[dict[str, torch.Tensor]]:
    """Return the columns of every row that the backbone makes, and move a bar; rows of similar lengths go together.

    They are padded on the right, which no state of a causal model sees, recurrent or not.
    """
    columns: list[dict[str, torch.Tensor]] = [{}] * len(rows)
    options = {"use_cache": False, "logits_to_keep": 1, "output_hidden_states": requested_states(index.layers)}
    lengths = [len(row["input_ids"]) for row in rows]
    for group in _groups(lengths, tokens, 0 if _reads_length(backbone.config) else _SPREAD):
        names = [name for name in ("input_ids", "position_ids") if name in rows[group[0]]]
        inputs = {name: pad_sequence([rows[row][name] for row in group], True).to(backbone.device) for name in names}
        outputs = backbone(**inputs, **options, return_dict=True)
        states = torch.stack([outputs.hidden_states[layer] for layer in index.layers], 2).to(_DTYPES[index.dtype])
        found = {STATES: states}
        if index.summaries:
            last = states[:, :, index.layers.index(-1)]
            ends = torch.tensor([lengths[row] for row in group], device=last.device)
            where = torch.arange(last.shape[1], device=last.device) < ends[:, None]  # [B, L]
            found[SUMMARIES] = logit_summaries(BackboneParts(backbone), last, where)
        found = {name: column.cpu() for name, column in found.items()}
        for number, row in enumerate(group):
            columns[row] = {name: column[number, : lengths[row]] for name, column in found.items()}
        bar.update(len(group))
    return columns


def _reads_length(config: PreTrainedConfig) -> bool:
    """Return whether rotary angles depend on the longest row of a batch."""
    rope = config_field(config.get_text_config(), "rope_parameters") or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]  # one, or one per kind of layer
    return any(each.get("rope_type") in ("dynamic", "longrope") for each in kinds)


def _groups(lengths: list[int], tokens: int, spread: int) -> Iterator[list[int]]:
    """Yield rows by groups of similar lengths, the shortest first: padded, `tokens` at most, or one row.

    A row is at most `spread` percent shorter than the longest of its group, or, of short ones, `spread` tokens. The
    shortest first, because rotary angles that depend on the length follow it upwards alone.
    """
    group: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        longest, shortest = lengths[row], lengths[(group or [row])[0]]
        is_similar = longest - shortest <= spread * max(longest, 100) // 100
        if group and not (is_similar and (len(group) + 1) * longest <= tokens):
            yield group
            group = []
        group.append(row)
    if group:
        yield group
