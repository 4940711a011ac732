"""Hidden states of a frozen backbone: sources of them, and a directory of them, so that it is not run again.

Drafters learn from rows of a data set with the states that they read of its backbone, and, of one with a draft
vocabulary, with what its losses read of the logits of all tokens. They are made in this process (`BackboneStates`) or
by a vLLM server, which writes those of each prompt to a file on a disk that both see (`ServerStates`).
`cache_features` stores the rows of either: each process of a run writes its share, and one that is killed loses only
the file that it was writing. All have the order of the data set, so that a Trainer makes the same batches of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import PreTrainedConfig
from transformers.utils import logging

from ..configuration.fields import field
from ..generation.contract import requested_states
from ..modeling import BlockDrafter, EagleHead, MTPHeads
from ..modeling.common.backbone_parts import BackboneParts, compute_device
from ..modeling.common.recording import STATES, SUMMARIES, collate
from ..modeling.common.teacher import logit_summaries
from .columns import RowReader
from .endpoint import Endpoint, EndpointError
from .parts import Processes, complete, digest_of, read_facts, read_parts, write_facts, write_part
from .utils import check_same, escaped

INDEX = "index.json"
_SAME = ("weights", "layers", "width", "dtype", "data")
"""What must be the same where features are completed; two of them are checksums."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
_SPREAD = 12
"""Percent that rows of a group may be shorter than its longest one."""
Row = Mapping[str, Any]
Columns = dict[str, torch.Tensor]
Index = dict[str, Any]
Drafter = MTPHeads | EagleHead | BlockDrafter
_MORE, _HEADER = 64, 1 << 16  # tokens beside the prompt's, and bytes beside those of tensors, that a file may have


class StatesSource(Dataset[Columns]):
    """Rows with `input_ids` and `labels` [T], and what a drafter reads of its backbone there.

    These are `cached_states` [T, S, d], of `learning_layers`, and `cached_summaries` [T, 2] where losses read logits of
    tokens that are not drafted.

    Attributes:
        lengths: Tokens of every row.
    """

    lengths: Sequence[int]

    def rows(self, numbers: Sequence[int], done: Callable[[int], object] = int) -> list[Columns]:
        """Return rows by their numbers; `done` is called with the number of those that have come since."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Columns:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return self.rows([row % len(self)])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Columns]:
        return self.rows(numbers)

    collate = staticmethod(collate)


class TextStates(StatesSource):
    """States that are made of the texts of a data set.

    Args:
        drafter: Attached; its `learning_layers` and its backbone are used.
        data: Rows with `input_ids` and, optionally, `labels` or another mask of `training.columns`, `attention_mask`
            (padding is dropped) and `position_ids`.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`; None: the backbone's.
        ignore_columns: Columns of the rows that are left out unread.

    Raises:
        ValueError: Another dtype; where a row is read, see `RowReader`.
    """

    def __init__(
        self, drafter: Drafter, data: Sequence[Row], dtype: str | None = None, ignore_columns: Sequence[str] = ()
    ) -> None:
        self.drafter, self.data, self.layers = drafter, data, list(drafter.learning_layers)
        name = str(drafter.backbone.dtype).removeprefix("torch.") if dtype is None else dtype
        if name not in DTYPES:
            raise ValueError(f"dtype={name!r} is unknown; choose one of {', '.join(DTYPES)}")
        self.dtype = DTYPES[name]
        self.has_summaries = -1 in self.layers and drafter.config.draft_vocab_size is not None
        self.read = RowReader(("input_ids", "labels", "position_ids"), ignore_columns)

    @cached_property
    def lengths(self) -> Sequence[int]:  # type: ignore[override]
        """Tokens of every row."""
        return [len(self.text(number)["input_ids"]) for number in range(len(self.data))]

    def text(self, number: int) -> Columns:
        """Return the columns of a row of the data set, without padding."""
        columns = {name: torch.as_tensor(column) for name, column in self.read(self.data[number]).items()}
        columns.setdefault("labels", columns["input_ids"])
        return {name: column.to(torch.int64).contiguous().clone() for name, column in columns.items()}

    def _columns(self, states: torch.Tensor, lengths: Sequence[int]) -> list[Columns]:
        """Return the columns of rows with states [B, L, S, d] and these lengths."""
        found = {STATES: states.to(self.dtype)}
        if self.has_summaries:
            last = found[STATES][:, :, self.layers.index(-1)]
            ends = torch.tensor(lengths, device=last.device)
            where = torch.arange(last.shape[1], device=last.device) < ends[:, None]  # [B, L]
            found[SUMMARIES] = logit_summaries(BackboneParts(self.drafter.backbone), last, where)
        found = {name: column.cpu() for name, column in found.items()}
        return [{name: column[row, :length] for name, column in found.items()} for row, length in enumerate(lengths)]


class BackboneStates(TextStates):
    """States of the drafter's own backbone, in this process.

    Rows of similar lengths go through the backbone together, up to `tokens_per_batch` with their padding, on the right,
    which no state of a causal model sees, recurrent or not. For the other arguments see `TextStates`.
    """

    def __init__(
        self,
        drafter: Drafter,
        data: Sequence[Row],
        dtype: str | None = None,
        tokens_per_batch: int = 2**13,
        ignore_columns: Sequence[str] = (),
    ) -> None:
        super().__init__(drafter, data, dtype, ignore_columns)
        self.tokens_per_batch = tokens_per_batch

    @torch.no_grad()
    def rows(self, numbers: Sequence[int], done: Callable[[int], object] = int) -> list[Columns]:
        """See `StatesSource`."""
        backbone, texts = self.drafter.backbone, [self.text(number) for number in numbers]
        options = {"use_cache": False, "logits_to_keep": 1, "output_hidden_states": requested_states(self.layers)}
        lengths = [len(row["input_ids"]) for row in texts]
        for group in _groups(lengths, self.tokens_per_batch, 0 if _reads_length(backbone.config) else _SPREAD):
            names = [name for name in ("input_ids", "position_ids") if name in texts[group[0]]]
            padded = {name: pad_sequence([texts[row][name] for row in group], True) for name in names}
            inputs = {name: column.to(backbone.device) for name, column in padded.items()}
            states = backbone(**inputs, **options, return_dict=True).hidden_states
            stacked = torch.stack([states[layer] for layer in self.layers], 2)  # [B, L, S, d]
            for row, columns in zip(group, self._columns(stacked, [lengths[row] for row in group])):
                texts[row] |= columns
            done(len(group))
        return texts


def _reads_length(config: PreTrainedConfig) -> bool:
    """Return whether rotary angles depend on the longest row of a batch."""
    rope = field(config.get_text_config(), "rope_parameters") or {}
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


def layer_outputs(drafter: Drafter) -> list[int]:
    """Return the layers whose outputs a drafter reads, as vLLM numbers them: i is the output of the i-th of L layers.

    The last output is not normed there; in transformers' `hidden_states`, which drafters read, it is.
    """
    count = drafter.backbone.config.get_text_config().num_hidden_layers
    return sorted({layer % (count + 1) for layer in drafter.learning_layers})


def vllm_options(drafter: Drafter, folder: str | Path) -> list[str]:
    """Return the arguments of `vllm serve BACKBONE` that make it write states for a drafter into a directory."""
    layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_outputs(drafter)}}
    method = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": layers}
    place = {"shared_storage_path": str(folder)}
    connector = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
    connector |= {"kv_connector_extra_config": place}
    words = ["--speculative_config", json.dumps(method), "--kv_transfer_config", json.dumps(connector)]
    return [*words, "--no-enable-chunked-prefill"]


class ServerStates(TextStates):
    """States of a backbone that a vLLM server runs: rows of a Trainer with `data_collator=rows.collate`.

    Args:
        endpoint: The server, started with `vllm_options`; at most `concurrency` requests are in flight.
        drafter: Attached; its backbone gives the final norm and, where losses read them, logits.
        data: See `TextStates`, as for `dtype` and `ignore_columns`.
        folder: The directory of the server's files, where it is mounted here; of the paths that the server gives, only
            the last name is read, and what was read is deleted.
        wait: Seconds until a file must be whole, after the server's answer.

    Raises:
        ValueError: No directory.
        EndpointError: No such server; where a row is read, states of other tokens, of another number of layers or
            width, or that are not finite, and files that do not come, or are no files of their own.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        drafter: Drafter,
        data: Sequence[Row],
        dtype: str | None = None,
        folder: str | Path | None = None,
        wait: float = 60.0,
        ignore_columns: Sequence[str] = (),
    ) -> None:
        if not folder:
            raise ValueError(f"folder={folder!r} must be the directory in which the server's files are found here")
        super().__init__(drafter, data, dtype, ignore_columns)
        self.endpoint, self.folder, self.wait = endpoint, Path(folder), wait
        endpoint.served_model()
        self._outputs = layer_outputs(drafter)

    def rows(self, numbers: Sequence[int], done: Callable[[int], object] = int) -> list[Columns]:
        """See `StatesSource`."""
        with ThreadPoolExecutor(max(1, min(self.endpoint.concurrency, len(numbers)))) as pool:
            coming = pool.map(self._row, numbers)
            return [(columns, done(1))[0] for columns in coming]

    @torch.no_grad()
    def _row(self, number: int) -> Columns:
        text, backbone = self.text(number), self.drafter.backbone
        ids, config = text["input_ids"].tolist(), backbone.config.get_text_config()
        said = self.endpoint.answer("completions", self.endpoint.body(ids, 1), self._path_of)
        name = PurePosixPath(said).name if isinstance(said, str) and "\0" not in said else ""
        if name in ("", ".."):
            raise EndpointError(
                f"the answer to row {number} has no hidden_states_path of a file, but {escaped(repr(said))[:200]}: "
                "docs/scale.md says how vLLM is started"
            )
        where, width = f"{escaped(name)[:200]} of row {number}", len(self._outputs) * config.hidden_size
        try:
            found = _read(self.folder / name, self.wait, (len(ids) + _MORE) * (1 + width) * 8 + _HEADER)
        except EndpointError as error:
            raise EndpointError(f"{where} {error}") from error
        states, tokens = (found.get(each, torch.empty(0)) for each in ("hidden_states", "token_ids"))
        if tokens.flatten().tolist()[: len(ids)] != ids:
            raise EndpointError(f"{where} holds states of other tokens than were sent")
        wanted = (tokens.numel(), len(self._outputs), config.hidden_size)
        if states.shape != wanted or not states.is_floating_point():
            raise EndpointError(f"{where} holds hidden_states {[*states.shape]}, not {wanted}, of {self._outputs}")
        states = states[: len(ids)].to(compute_device(backbone), backbone.dtype)  # [T, n, d]
        if not states.isfinite().all():
            raise EndpointError(f"{where} holds states that are not finite: nothing learns so")
        (self.folder / name).unlink(missing_ok=True)
        last = config.num_hidden_layers
        layers = [layer % (last + 1) for layer in self.layers]
        columns = [states[:, self._outputs.index(layer)] for layer in layers]
        normed = [BackboneParts(backbone).norm(each) if layer == last else each for layer, each in zip(layers, columns)]
        return text | self._columns(torch.stack(normed, 1)[None], [len(ids)])[0]

    def _path_of(self, answer: Any, body: Mapping[str, Any]) -> Any:
        self.endpoint.choice_of(answer, body)
        return (answer.get("kv_transfer_params") or {}).get("hidden_states_path")


def _opened(path: Path) -> BinaryIO:
    """Open a file that is one: no link to another place, and no pipe, whose reader would wait for ever."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise EndpointError(f"is no plain file, or its lock ({path.suffix}) is none")
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def _read(path: Path, wait: float, most: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a file once it is whole: the server may still write it, and newer ones lock it so long."""
    until, lock = time.monotonic() + wait, path.with_name(f"{path.name}.lock")
    while True:
        try:
            with suppress(FileNotFoundError), _opened(lock) as held:
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            with _opened(path) as file:
                content = file.read(most + 1)
            if len(content) > most:
                raise EndpointError(f"has more than the {most} bytes of these states")
            found = load(content)
            lock.unlink(missing_ok=True)
            return found
        except (OSError, ValueError, SafetensorError) as error:
            if time.monotonic() > until:
                raise EndpointError(
                    f"is not whole {wait:g} s after the server's answer ({type(error).__name__}): do this machine and "
                    "the server see one disk?"
                ) from error
            time.sleep(0.05)


def _digest(index: Index) -> str:
    return digest_of({name: index[name] for name in _SAME})


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
        check_same(
            f"folder={folder}",
            *({name: each[name] for name in _SAME} for each in (read_facts(Path(folder) / INDEX), index)),
        )
    elif processes.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_facts(folder / INDEX, index)
    backbone.eval()
    lengths, digest = index["lengths"], _digest(index)
    size = sum(lengths) * len(index["layers"]) * index["width"] * source.dtype.itemsize

    def write(rows: list[int]) -> None:
        with logging.tqdm(total=len(rows), desc=f"states of the backbone, {size / 1e9:.3g} GB") as bar:
            for numbers in _parts(rows, lengths, tokens_per_shard):
                columns = source.rows(numbers, bar.update)
                for row, each in zip(numbers, columns):
                    if not each[STATES].isfinite().all():
                        raise ValueError(f"states of row {row} are not finite in dtype={index['dtype']!r}")
                joined = {name: torch.cat([each[name] for each in columns]) for name in columns[0]}
                write_part(folder, digest, numbers[0], [lengths[number] for number in numbers], joined)

    complete(folder / INDEX, digest, len(lengths), write, "states of the backbone", processes, verify=verify)
    return FeatureDataset(folder, verify=False)  # each file was read through, or written just now


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
        self.index, self.verify = read_facts(Path(folder) / INDEX), verify
        self.lengths: list[int] = self.index["lengths"]
        self.parts = read_parts(Path(folder) / INDEX, _digest(self.index), len(self.lengths), "cache_features")
        for part in self.parts:
            if part.lengths.tolist() != self.lengths[part.start : part.stop]:
                raise ValueError(f"{part.path} is damaged: its rows have other lengths than in {INDEX}")
        self._starts = [part.start for part in self.parts]
        self._open: dict[int, Any] = {}

    def rows(self, numbers: Sequence[int], done: Callable[[int], object] = int) -> list[dict[str, torch.Tensor]]:
        """See `StatesSource`."""
        return [self._row(number) for number in numbers]

    def _row(self, row: int) -> dict[str, torch.Tensor]:
        number = bisect(self._starts, row) - 1
        part = self.parts[number]
        if number not in self._open:  # mapped, not read: memory is what a batch needs
            self._open[number] = part.opened(self.verify)
        start = int(part.lengths[: row - part.start].sum())
        stop = start + self.lengths[row]
        return {name: self._open[number].get_slice(name)[start:stop] for name in part.columns}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for worker processes, which open the parts themselves."""
        return vars(self) | {"_open": {}}


def _index(source: TextStates) -> Index:
    """Return what a directory of features is made of, and the tokens of every row."""
    if not len(source.data):
        raise ValueError("data has no rows; at least one is needed")
    backbone, digest, lengths = source.drafter.backbone, hashlib.sha256(), []
    for row in map(source.text, range(len(source.data))):
        for name in row:
            digest.update(name.encode() + row[name].numpy().tobytes())
        lengths.append(len(row["input_ids"]))
    config = backbone.config
    name = config.name_or_path or type(backbone).__name__
    return {
        "backbone": Path(name).name if Path(name).exists() else name,
        "weights": checksum(backbone),
        "layers": source.layers,
        "width": config.get_text_config().hidden_size,
        "dtype": str(source.dtype).removeprefix("torch."),
        "data": digest.hexdigest(),
        "lengths": lengths,
        "summaries": source.has_summaries,
    }


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
    """Yield consecutive rows by parts; a part ends with the row that reaches a number of tokens."""
    part, size = list[int](), 0
    for row in rows:
        if part and (size >= tokens or row > part[-1] + 1):
            yield part
            part, size = [], 0
        part.append(row)
        size += lengths[row]
    if part:
        yield part
