"""Hidden states of a frozen backbone on disk, so that drafters are trained without running it again.

Rows of a data set go through the backbone once, in order; the states that a drafter reads are written in shards of
whole rows, and for one with a draft vocabulary what its losses read of the logits of all tokens. Shards and index are
written atomically, so a process that is killed loses only the shard it was writing: called again, `cache_features`
continues after the last complete one. The reader has the order of the data set, so that a Trainer makes the same
batches of both.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel
from transformers.utils import logging

from ..configuration.fields import requested_states
from ..modeling import EagleHead, MTPHeads
from ..modeling.common.backbone_parts import BackboneParts
from ..modeling.common.recording import STATES, SUMMARIES, collate
from ..modeling.common.teacher import logit_summaries
from .utils import check_same, replace_file

INDEX = "index.json"
_IDS = ("input_ids", "labels", "position_ids")
_SAME = ("weights", "layers", "width", "dtype", "data")
"""What must be the same where features are completed; two of them are checksums."""
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
        shards: File and number of rows of every shard.
        summaries: Whether rows have `cached_summaries`, too.
    """

    backbone: str
    weights: str
    layers: list[int]
    width: int
    dtype: str
    data: str
    lengths: list[int]
    shards: list[dict[str, Any]] = field(default_factory=list)
    summaries: bool = False

    @property
    def rows(self) -> int:
        """Number of rows that are written."""
        return sum(shard["rows"] for shard in self.shards)

    @property
    def is_complete(self) -> bool:
        """Whether all rows are written."""
        return self.rows == len(self.lengths)

    @classmethod
    def read(cls, folder: str | Path) -> FeatureIndex:
        """Return the index of a directory.

        Raises:
            FileNotFoundError: The directory holds no features.
        """
        path = Path(folder) / INDEX
        if not path.exists():
            raise FileNotFoundError(f"{folder} holds no features: there is no {INDEX}; write them with cache_features")
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, folder: Path) -> None:
        """Replace the index of a directory."""
        replace_file(folder / INDEX, json.dumps(asdict(self)))


def cache_features(
    drafter: MTPHeads | EagleHead,
    data: Sequence[Row],
    folder: str | Path,
    dtype: str | None = None,
    tokens_per_shard: int = 2**18,
    tokens_per_batch: int = 2**13,
) -> FeatureDataset:
    """Write the states that a drafter learns from, or the missing ones.

    Args:
        drafter: Attached `MTPHeads` or `EagleHead`; its `learning_layers` and its backbone are used.
        data: Rows with `input_ids` and, optionally, `labels`, `attention_mask` (padding is dropped) and `position_ids`.
        folder: Output directory; created if missing.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`; None: the backbone's.
        tokens_per_shard: A shard ends with the row that reaches this number of tokens.
        tokens_per_batch: Rows of the same length go through the backbone together, up to this number of tokens.

    Returns:
        The rows, to train with.

    Raises:
        ValueError: A data set without rows, or a directory with features of another backbone, data set or layers.
    """
    folder, backbone = Path(folder), drafter.backbone
    dtype = str(backbone.dtype).removeprefix("torch.") if dtype is None else dtype
    index = _index(drafter, data, dtype)
    if (folder / INDEX).exists():
        earlier = FeatureIndex.read(folder)
        check_same(f"folder={folder}", *({name: vars(each)[name] for name in _SAME} for each in (earlier, index)))
        index = earlier
    folder.mkdir(parents=True, exist_ok=True)
    index.write(folder)
    backbone.eval()
    size = sum(index.lengths) * len(index.layers) * index.width * _DTYPES[dtype].itemsize
    what = f"states of the backbone, {size / 1e9:.3g} GB"
    with logging.tqdm(total=len(index.lengths), initial=index.rows, desc=what) as bar:
        while not index.is_complete:
            first, end = index.rows, _end_of_shard(index, tokens_per_shard)
            rows = [_stripped(data[number]) for number in range(first, end)]
            states = _states(backbone, rows, index, tokens_per_batch, bar)
            rows = [row | outputs for row, outputs in zip(rows, states)]
            name = f"features-{len(index.shards):05d}.safetensors"
            temporary = folder / f".{name}.tmp"
            save_file({column: torch.cat([row[column] for row in rows]) for column in rows[0]}, temporary)
            temporary.replace(folder / name)
            index.shards.append({"file": name, "rows": end - first})
            index.write(folder)
    return FeatureDataset(folder)


class FeatureDataset(Dataset):
    """Rows of features: ids, labels and states, in the order of the data set.

    Args:
        folder: What `cache_features` wrote.

    Raises:
        FileNotFoundError: A directory without features.
        ValueError: Incomplete features.

    Example:
        >>> rows = cache_features(heads, data, "features")
        >>> MTPTrainer(heads, args, train_dataset=rows, data_collator=rows.collate).train()
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder, self.index = Path(folder), FeatureIndex.read(folder)
        if not self.index.is_complete:
            raise ValueError(
                f"{folder} holds {self.index.rows} of {len(self.index.lengths)} rows: complete them with cache_features"
            )
        self._ends = list(accumulate(shard["rows"] for shard in self.index.shards))
        self._starts = [0, *accumulate(self.index.lengths)]
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.index.lengths)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        number = bisect_right(self._ends, row)
        shard = self._shard(number)
        before = self._starts[self._ends[number] - self.index.shards[number]["rows"]]
        start, stop = self._starts[row] - before, self._starts[row + 1] - before
        return {name: shard.get_slice(name)[start:stop] for name in shard.keys()}  # noqa: SIM118 (not a dict)

    def _shard(self, number: int) -> Any:
        if number not in self._open:  # mapped, not read: memory is what a batch needs
            path = self.folder / self.index.shards[number]["file"]
            self._open[number] = safe_open(path, framework="pt")
        return self._open[number]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for worker processes, which open the shards themselves."""
        return vars(self) | {"_open": {}}

    collate = staticmethod(collate)


def _index(drafter: MTPHeads | EagleHead, data: Sequence[Row], dtype: str) -> FeatureIndex:
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


def _end_of_shard(index: FeatureIndex, tokens: int) -> int:
    end, total = index.rows, 0
    while end < len(index.lengths) and total < tokens:
        total += index.lengths[end]
        end += 1
    return end


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
    """Return the columns of every row that the backbone makes, and move a bar; rows of one length go together."""
    columns: list[dict[str, torch.Tensor]] = []
    options = {"use_cache": False, "logits_to_keep": 1, "output_hidden_states": requested_states(index.layers)}
    for group in _groups(rows, tokens):
        names = [name for name in ("input_ids", "position_ids") if name in group[0]]
        inputs = {name: torch.stack([row[name] for row in group]).to(backbone.device) for name in names}
        outputs = backbone(**inputs, **options, return_dict=True)
        states = torch.stack([outputs.hidden_states[layer] for layer in index.layers], 2).to(_DTYPES[index.dtype])
        found = {STATES: states}
        if index.summaries:
            last = states[:, :, index.layers.index(-1)]
            where = torch.ones(last.shape[:2], dtype=torch.bool, device=last.device)
            found[SUMMARIES] = logit_summaries(BackboneParts(backbone), last, where)
        found = {name: column.cpu() for name, column in found.items()}
        columns += [{name: column[number] for name, column in found.items()} for number in range(len(group))]
        bar.update(len(group))
    return columns


def _groups(rows: list[dict[str, torch.Tensor]], tokens: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    group: list[dict[str, torch.Tensor]] = []
    for row in rows:
        length = len(row["input_ids"])
        if group and (length != len(group[0]["input_ids"]) or (len(group) + 1) * length > tokens):
            yield group
            group = []
        group.append(row)
    if group:
        yield group
