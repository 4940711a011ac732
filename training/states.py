"""Sources of hidden states to learn from: stored ones, those of a backbone in this process, and those of a server.

All have rows of a data set, which a Trainer takes with their `collate`, and which `cache_features` stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import PreTrainedConfig

from ..configuration.fields import field as config_field
from ..configuration.fields import requested_states
from ..modeling import BlockDrafter, EagleHead, MTPHeads
from ..modeling.common.backbone_parts import BackboneParts
from ..modeling.common.recording import STATES, SUMMARIES, collate
from ..modeling.common.teacher import logit_summaries
from .columns import RowReader

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
_SPREAD = 12
"""Percent that rows of a group may be shorter than its longest one."""
Row = Mapping[str, Any]
Columns = dict[str, torch.Tensor]
Drafter = MTPHeads | EagleHead | BlockDrafter


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
        ValueError: Another dtype, or a stream; where a row is read, see `RowReader`.
    """

    def __init__(
        self, drafter: Drafter, data: Sequence[Row], dtype: str | None = None, ignore_columns: Sequence[str] = ()
    ) -> None:
        if not isinstance(data, Sized):
            raise ValueError(f"data={type(data).__name__} is a stream, and states need all rows and their lengths")
        self.drafter, self.data, self.layers = drafter, data, list(drafter.learning_layers)
        name = str(drafter.backbone.dtype).removeprefix("torch.") if dtype is None else dtype
        if name not in DTYPES:
            raise ValueError(f"dtype={name!r} is unknown; choose one of {', '.join(DTYPES)}")
        self.dtype = DTYPES[name]
        self.has_summaries = -1 in self.layers and drafter.config.draft_vocab_size is not None
        self._lengths: list[int] | None = None
        self.read = RowReader(("input_ids", "labels", "position_ids"), ignore_columns)

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of every row."""
        if self._lengths is None:
            self._lengths = [len(self.text(number)["input_ids"]) for number in range(len(self.data))]
        return self._lengths

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

    Args:
        drafter: See `TextStates`, as for the next two.
        data: See there.
        dtype: See there.
        tokens_per_batch: Rows of similar lengths go through the backbone together, up to this number of tokens with
            their padding, on the right, which no state of a causal model sees, recurrent or not.
        ignore_columns: See `TextStates`.
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
