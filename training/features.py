"""Hidden states of a frozen backbone: sources of them, and a directory of them, so that it is not run again.

They are made in this process (`BackboneStates`) or by a vLLM server, which writes those of each prompt to a file on a
disk that both see (`ServerStates`); `cache_features` stores the rows of either. All have the order of the data set, so
that a Trainer makes the same batches of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import stat
import time
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from itertools import chain, groupby
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers.utils import logging

from ..configuration.fields import field
from ..generation.contract import requested_states
from ..modeling import BlockDrafter, EagleHead, MTPHeads
from ..modeling.common.backbone_parts import BackboneParts, compute_device
from ..modeling.common.online import STATES, SUMMARIES, collate
from ..modeling.common.teacher import logit_summaries
from .batches import batches_by_tokens
from .columns import RowReader
from .endpoint import Endpoint, EndpointError
from .parts import Processes, Save, complete, read_parts
from .utils import escaped

INDEX = "index.json"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
_SPREAD = 1.12
"""Rows that go through the backbone together differ in length by less than this factor."""
_MORE, _HEADER = 64, 1 << 16  # tokens beside the prompt's, and bytes beside those of tensors, that a file may have
Columns = dict[str, Tensor]
Drafter = MTPHeads | EagleHead | BlockDrafter


class StatesSource(Dataset[Columns]):
    """Rows with `input_ids` and `labels` [T], and what a drafter reads of its backbone there.

    These are `cached_states` [T, S, d], of `learning_layers`, and `cached_summaries` [T, 2] where losses read logits of
    tokens that are not drafted. `lengths` are the tokens of every row.
    """

    lengths: Sequence[int]
    collate = staticmethod(collate)

    def __getitems__(self, numbers: Sequence[int]) -> list[Columns]:
        raise NotImplementedError

    def __getitem__(self, row: int) -> Columns:
        return self.__getitems__([range(len(self))[row]])[0]

    def __len__(self) -> int:
        return len(self.lengths)


class BackboneStates(StatesSource):
    """States by the drafter's own backbone, in this process; the arguments are those of `cache_features`.

    Rows of similar lengths go through the backbone together, padded on the right, which no state of a causal model
    sees, recurrent or not.
    """

    def __init__(
        self,
        drafter: Drafter,
        data: Sequence[Mapping[str, object]],
        dtype: str | None = None,
        tokens_per_batch: int = 2**13,
        ignore_columns: Sequence[str] = (),
    ) -> None:
        self.drafter, self.data, self.layers = drafter, data, list(drafter.learning_layers)
        self.tokens_per_batch = tokens_per_batch
        if dtype not in (None, *DTYPES):
            raise ValueError(f"dtype={dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
        self.dtype = drafter.backbone.dtype if dtype is None else DTYPES[dtype]
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

    @torch.no_grad()
    def __getitems__(self, numbers: Sequence[int]) -> list[Columns]:
        backbone, texts = self.drafter.backbone, [self.text(number) for number in numbers]
        options = {"use_cache": False, "logits_to_keep": 1, "output_hidden_states": requested_states(self.layers)}
        lengths = [len(row["input_ids"]) for row in texts]
        rope = str(field(backbone.config.get_text_config(), "rope_parameters"))
        reads_longest = "'dynamic'" in rope or "'longrope'" in rope  # angles that depend on the longest row of a batch
        for group in _groups(lengths, self.tokens_per_batch, reads_longest):
            names = [name for name in ("input_ids", "position_ids") if name in texts[group[0]]]
            padded = {name: pad_sequence([texts[row][name] for row in group], True) for name in names}
            inputs = {name: column.to(backbone.device) for name, column in padded.items()}
            states = backbone(**inputs, **options, return_dict=True).hidden_states
            stacked = torch.stack([states[layer] for layer in self.layers], 2)  # [B, L, S, d]
            for row, columns in zip(group, self._columns(stacked, [lengths[row] for row in group])):
                texts[row] |= columns
        return texts

    def _columns(self, states: Tensor, lengths: Sequence[int]) -> list[Columns]:
        """Return the columns of rows with states [B, L, S, d] and these lengths."""
        found = {STATES: states.to(self.dtype)}
        if self.has_summaries:
            last = found[STATES][:, :, self.layers.index(-1)]
            ends = torch.tensor(lengths, device=last.device)
            where = torch.arange(last.shape[1], device=last.device) < ends[:, None]  # [B, L]
            found[SUMMARIES] = logit_summaries(BackboneParts(self.drafter.backbone), last, where)
        found = {name: column.cpu() for name, column in found.items()}
        return [{name: column[row, :length] for name, column in found.items()} for row, length in enumerate(lengths)]


def _groups(lengths: list[int], tokens: int, is_exact: bool) -> Iterator[list[int]]:
    """Yield rows by groups of similar lengths, the shortest first: rotary angles follow lengths upwards alone."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for _, rows in groupby(order, lambda row: lengths[row] if is_exact else int(math.log(lengths[row], _SPREAD))):
        yield from batches_by_tokens(lengths, tokens, [*rows], is_padded=True)


def layer_outputs(drafter: Drafter) -> list[int]:
    """Return the layers whose outputs a drafter reads, as vLLM numbers them: the last one, L of L, is not normed."""
    count = drafter.backbone.config.get_text_config().num_hidden_layers
    return sorted({layer % (count + 1) for layer in drafter.learning_layers})


def vllm_options(drafter: Drafter, folder: str | Path) -> list[str]:
    """Return the arguments of `vllm serve BACKBONE` that make it write states for a drafter into a directory."""
    layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_outputs(drafter)}}
    method = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": layers}
    connector = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
    connector |= {"kv_connector_extra_config": {"shared_storage_path": str(folder)}}
    words = ["--speculative_config", json.dumps(method), "--kv_transfer_config", json.dumps(connector)]
    return [*words, "--no-enable-chunked-prefill"]


class ServerStates(BackboneStates):
    """States of a backbone that a vLLM server runs: rows of a Trainer with `data_collator=rows.collate`.

    It is started with `vllm_options`; further arguments are those of `BackboneStates`, whose backbone gives the final
    norm and logits. `folder` is the directory of the server's files, where it is mounted here: of the paths that the
    server gives, only the last name is read, at most `wait` seconds after its answer, and what was read is deleted.
    """

    def __init__(
        self, endpoint: Endpoint, *args: Any, folder: str | Path | None = None, wait: float = 60.0, **options: Any
    ) -> None:
        if not folder:
            raise ValueError(f"folder={folder!r} must be the directory in which the server's files are found here")
        super().__init__(*args, **options)
        self.endpoint, self.folder, self.wait = endpoint, Path(folder), wait
        endpoint.served_model()
        self._outputs = layer_outputs(self.drafter)

    def __getitems__(self, numbers: Sequence[int]) -> list[Columns]:
        with ThreadPoolExecutor(max(1, min(self.endpoint.concurrency, len(numbers)))) as pool:
            return [*pool.map(self._row, numbers)]

    @torch.no_grad()
    def _row(self, number: int) -> Columns:
        text, backbone = self.text(number), self.drafter.backbone
        ids, config = text["input_ids"].tolist(), backbone.config.get_text_config()
        said = self.endpoint.answer("completions", self.endpoint.body(ids, 1), self._path_of)
        name = PurePosixPath(said).name if isinstance(said, str) and "\0" not in said else ""
        where, width = f"{escaped(name)[:200]} of row {number}", len(self._outputs) * config.hidden_size
        if name in ("", ".."):
            raise EndpointError(f"the answer to row {number} has no hidden_states_path: {escaped(repr(said))[:200]}")
        found = _read(self.folder / name, where, self.wait, (len(ids) + _MORE) * (1 + width) * 8 + _HEADER)
        states, tokens = (found.get(each, torch.empty(0)) for each in ("hidden_states", "token_ids"))
        wanted = (tokens.numel(), len(self._outputs), config.hidden_size)
        is_other = tokens.flatten().tolist()[: len(ids)] != ids
        if is_other or states.shape != wanted or not states.is_floating_point():
            what = "other tokens" if is_other else f"hidden_states {[*states.shape]}, not {wanted}, of {self._outputs}"
            raise EndpointError(f"{where} holds {what}")
        states = states[: len(ids)].to(compute_device(backbone), backbone.dtype)  # [T, n, d]
        if not states.isfinite().all():
            raise EndpointError(f"{where} holds states that are not finite: nothing learns so")
        (self.folder / name).unlink(missing_ok=True)
        last, columns = config.num_hidden_layers, []
        for layer in (layer % (last + 1) for layer in self.layers):
            column = states[:, self._outputs.index(layer)]
            columns.append(BackboneParts(backbone).norm(column) if layer == last else column)
        return text | self._columns(torch.stack(columns, 1)[None], [len(ids)])[0]

    def _path_of(self, answer: Any, body: Mapping[str, Any]) -> object:
        self.endpoint.choice_of(answer, body)
        return (answer.get("kv_transfer_params") or {}).get("hidden_states_path")


def _opened(path: Path, where: str) -> BinaryIO:
    """Open a file that is one: no link to another place, and no pipe, whose reader would wait for ever."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise EndpointError(f"{where} is no plain file, or its lock ({path.suffix}) is none")
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def _read(path: Path, where: str, wait: float, most: int) -> Columns:
    """Return the tensors of a file once it is whole: the server may still write it, and newer ones lock it so long."""
    until, lock = time.monotonic() + wait, path.with_name(f"{path.name}.lock")
    while True:
        try:
            with suppress(FileNotFoundError), _opened(lock, where) as held:
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            with _opened(path, where) as file:
                content = file.read(most + 1)
            if len(content) > most:
                raise EndpointError(f"{where} has more than the {most} bytes of these states")
            found = load(content)
            lock.unlink(missing_ok=True)
            return found
        except (OSError, ValueError, SafetensorError) as error:
            if time.monotonic() > until:
                late = f"{wait:g} s after the server's answer ({type(error).__name__})"
                raise EndpointError(f"{where} is not whole {late}: do this machine and it see one disk?") from error
            time.sleep(0.05)


def cache_features(
    drafter: Drafter,
    data: Sequence[Mapping[str, object]],
    folder: str | Path,
    dtype: str | None = None,
    tokens_per_shard: int = 2**18,
    tokens_per_batch: int = 2**13,
    verify: bool = True,
    source: BackboneStates | None = None,
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
        tokens_per_shard: Tokens of a part, at most, unless a row has more.
        tokens_per_batch: Rows of similar lengths in a part go through the backbone together, up to this number of
            tokens with their padding.
        verify: Read parts that are there through; False, for sets of terabytes: look at their headers and sizes alone.
        source: Of the states of these rows, as `ServerStates`; None: the drafter's backbone, in this process.
        ignore_columns: Columns of the rows that are left out unread.

    Raises:
        ValueError: A directory of another backbone, data set or layers, or states that are not finite.
    """
    processes = Processes.of(drafter.backbone if source is None else None)
    source = BackboneStates(drafter, data, dtype, tokens_per_batch, ignore_columns) if source is None else source
    index, lengths = _facts_of(source)
    drafter.backbone.eval()
    width = drafter.backbone.config.get_text_config().hidden_size
    size = sum(lengths) * len(source.layers) * width * source.dtype.itemsize

    def write(rows: list[int], save: Save) -> None:
        with logging.tqdm(total=len(rows), desc=f"states of the backbone, {size / 1e9:.3g} GB") as bar:
            runs = groupby(enumerate(rows), lambda each: each[1] - each[0])  # of consecutive rows
            parts = (batches_by_tokens(lengths, tokens_per_shard, [row for _, row in run]) for _, run in runs)
            for numbers in chain.from_iterable(parts):
                columns = source.__getitems__(numbers)
                for row, each in zip(numbers, columns):
                    if not each[STATES].isfinite().all():
                        raise ValueError(f"states of row {row} are not finite in dtype={index['dtype']!r}")
                joined = {name: torch.cat([each[name] for each in columns]) for name in columns[0]}
                save(numbers[0], [lengths[number] for number in numbers], joined)
                bar.update(len(numbers))

    complete(Path(folder) / INDEX, index, write, processes, verify=verify)
    return FeatureDataset(folder, verify=False)  # each file was read through, or written just now


def _facts_of(source: BackboneStates) -> tuple[dict[str, object], list[int]]:
    """Return what a directory of features is made of, and the tokens of every row."""
    digest, lengths = hashlib.sha256(), list[int]()
    for row in map(source.text, range(len(source.data))):
        for name in row:
            digest.update(name.encode() + row[name].numpy().tobytes())
        lengths.append(len(row["input_ids"]))
    facts: dict[str, object] = {"weights": checksum(source.drafter.backbone), "layers": source.layers}
    facts |= {"dtype": str(source.dtype).removeprefix("torch."), "data": digest.hexdigest(), "rows": len(lengths)}
    return facts, lengths


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


class FeatureDataset(StatesSource):
    """Rows that `cache_features` wrote, in the order of the data set; incomplete or damaged ones are refused.

    To `verify` a part, it is read through when its first row is read.

    Example:
        >>> rows = cache_features(heads, data, "features")
        >>> MTPTrainer(heads, args, train_dataset=rows, data_collator=rows.collate).train()
    """

    def __init__(self, folder: str | Path, verify: bool = True) -> None:
        self.parts, self.verify = read_parts(Path(folder) / INDEX, "cache_features"), verify
        self.lengths = [length for part in self.parts for length in part.lengths.tolist()]
        self._open: dict[int, Any] = {}

    def __getitems__(self, numbers: Sequence[int]) -> list[Columns]:
        found = []
        for row in numbers:
            part = self.parts[bisect(self.parts, row, key=lambda part: part.start) - 1]
            if part.start not in self._open:  # mapped, not read: memory is what a batch needs
                self._open[part.start] = part.opened(self.verify)
            file, start = self._open[part.start], int(part.lengths[: row - part.start].sum())
            found.append({name: file.get_slice(name)[start : start + self.lengths[row]] for name in part.columns})
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for worker processes, which open the parts themselves."""
        return vars(self) | {"_open": {}}
