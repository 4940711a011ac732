"""Verified tokens and states, recorded for drafters that learn from them: no further forward, no wait for the device.

A recording session wraps the drafter's own, and keeps states and ids of the new tokens of every cycle. At the end of a
call each sequence is a row as `training.features` makes them, so that losses are those of stored features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import cast

import torch
from torch import Tensor, nn

from ...generation.call.sequences import Sequences, Speculation
from ...generation.contract import (
    CacheView,
    DraftSession,
    DraftTree,
    PrefillOutput,
    TargetOutput,
    VerificationResult,
    joined_layers,
)
from ...generation.tensors.masks import to_device
from ..heads.losses import IGNORE

STATES = "cached_states"
"""The states' column in training data, and the keyword of the `forward` of drafters."""
SUMMARIES = "cached_summaries"
"""The same of the backbone's logits (`logit_summaries`), for drafters with a draft vocabulary."""
Row = dict[str, Tensor]
"""A sequence: N + 1 `input_ids`, `labels` (-100 where the backbone did not choose) and `position_ids`; their states,
[N + 1, S, d], of which the last one, of a token that no forward has read, is 0."""


def collate(sequences: Sequence[Row]) -> Row:
    """Return a batch of sequences with stored states, padded on the right; with `attention_mask` if lengths differ."""
    lengths, fills, pad = {len(each["input_ids"]) for each in sequences}, {"labels": IGNORE}, nn.utils.rnn.pad_sequence
    batch = {name: pad([each[name] for each in sequences], True, fills.get(name, 0)) for name in sequences[0]}
    if len(lengths) > 1:
        batch["attention_mask"] = pad([torch.ones_like(each["input_ids"]) for each in sequences], True)
    return batch


class OnlineBuffer:
    """The newest sequences with the backbone's states of them.

    Attributes:
        capacity: Tokens that it holds; a longer sequence loses its beginning.
        rows: The sequences, the oldest first.
    """

    def __init__(self, capacity: int = 2**14) -> None:
        if not isinstance(capacity, int) or capacity < 2:
            raise ValueError(f"capacity={capacity!r} must be a whole number of at least 2 tokens")
        self.capacity, self.rows = capacity, list[Row]()
        self._lock = Lock()

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.rows)

    def add(self, rows: Iterable[Row]) -> None:
        """Add sequences, in the place of the oldest ones."""
        with self._lock:
            held, left = list[Row](), self.capacity
            for row in reversed([*self.rows, *rows]):
                size = min(left, len(row["input_ids"]) - 1)
                if size:
                    held.append(_end(row, size))
                left -= size
            self.rows = held[::-1]

    def sample(self, count: int, generator: torch.Generator) -> list[Row]:
        """Return up to `count` of the sequences, chosen at random."""
        rows = self.rows
        return [rows[index] for index in torch.randperm(len(rows), generator=generator)[:count].tolist()]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors of `load_state_dict`, on the processor."""
        tensors = {f"{number}.{name}": each.cpu() for number, row in enumerate(self.rows) for name, each in row.items()}
        return tensors | {"capacity": torch.tensor(self.capacity)}

    def load_state_dict(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Load the sequences of another buffer, of the same capacity."""
        if (capacity := int(tensors["capacity"])) != self.capacity:
            raise ValueError(f"capacity={self.capacity} is not that of the buffer that was saved, {capacity}")
        rows: dict[int, Row] = {}
        for name, tensor in tensors.items():
            number, _, column = name.partition(".")
            if column:
                rows.setdefault(int(number), {})[column] = tensor.to(device)
        self.rows = [rows[number] for number in sorted(rows)]


def _end(row: Row, size: int) -> Row:
    """Return the last tokens of a sequence, of which `size` have states."""
    if len(row["input_ids"]) == size + 1:
        return row
    end = {name: each[-size - 1 :].clone() for name, each in row.items()}
    end["labels"][0] = IGNORE
    return end


class RecordingSession(DraftSession):
    """A drafter's session that also adds verified tokens and states of `layers` to a buffer, as many as it holds.

    Without `keeps_prompt` only the prompt's last state is recorded. `finished` gets statistics and seconds of the call.
    """

    def __init__(
        self,
        session: DraftSession,
        layers: Sequence[int],
        keeps_prompt: bool,
        buffer: OnlineBuffer,
        finished: Callable[[Speculation, float], None],
    ) -> None:
        self.session, self.layers, self.keeps_prompt, self.buffer = session, list(layers), keeps_prompt, buffer
        self.finished, self.started = finished, time.perf_counter()
        self.num_tokens, self.reads_cache = session.num_tokens, session.reads_cache
        self.supports_confidence_threshold = session.supports_confidence_threshold
        self.hidden_layers = joined_layers(session.hidden_layers, self.layers)
        self.states, self.ids, self.counts = list[Tensor](), list[Tensor](), list[list[int]]()

    def begin(self, outputs: PrefillOutput, view: CacheView) -> None:
        self.view, mask, states = view, view.mask, self._states(outputs.hidden_states)
        batch, width = states.shape[:2]
        count = min(width, max(1, self.buffer.capacity // (2 * batch))) if self.keeps_prompt else 1
        self.real = (mask[:, -width:] if mask is not None else states.new_ones(batch, width)).bool()  # [B, width]
        self.ends = view.counts.clone() if view.has_columns else self.real.sum(1)  # [B], positions of the first token
        self.states, self.left = [states[:, -count:].clone()], self.buffer.capacity
        self.session.begin(outputs, view)

    def _states(self, hidden_states: Sequence[Tensor | None]) -> Tensor:
        """Return the states of the recorded layers, [B, F, S, d]."""
        states = [cast(Tensor, hidden_states[layer]) for layer in self.layers]
        return torch.stack([to_device(state, states[0].device) for state in states], dim=2)  # [B, F, S, d]

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        if not self.ids:
            self.ids.append(tokens.newest(self.states[0].shape[1] + 1))  # with the token that was added first
        return self.session.propose(tokens, length)

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        new = self.view.new_tokens
        if new.longest and self.left > 0:
            self.states.append(self._states(outputs.first(new.longest)))
            self.ids.append(result.tokens[:, : new.longest])
            self.counts.append(new.counts)
            self.left -= sum(new.counts)
        self.session.advance(outputs, result)

    def finish(self, statistics: Speculation) -> None:
        self.session.finish(statistics)
        if self.ids:
            with torch.inference_mode(False):
                self.buffer.add(self._rows())
        self.finished(statistics, time.perf_counter() - self.started)

    def _rows(self) -> list[Row]:
        """Return the sequences of the call."""
        states, ids, size = torch.cat(self.states, 1), torch.cat(self.ids, 1), self.states[0].shape[1]
        rows, offsets = list[Row](), [size]  # of the cycles among the columns
        for each in self.states[1:]:
            offsets.append(offsets[-1] + each.shape[1])
        for number, (real, end) in enumerate(zip(self.real[:, -size:].tolist(), self.ends.tolist())):
            prompt = [column for column, is_real in enumerate(real) if is_real]
            counts = [count[number] for count in self.counts]
            new = [start + column for start, count in zip(offsets, counts) for column in range(count)]
            tokens = ids[number, [*prompt, size, *(column + 1 for column in new)]]  # [N + 1]
            labels, first = tokens.clone(), end - len(prompt)
            labels[: len(prompt)] = IGNORE
            own = states[number, [*prompt, *new]]  # [N, S, d]
            positions = torch.arange(first, first + len(tokens), device=ids.device)
            row = {"input_ids": tokens, "labels": labels, "position_ids": positions}
            rows.append(row | {STATES: nn.functional.pad(own, (0, 0, 0, 0, 0, 1))})
        return rows

    def coverage(self, tokens: Tensor) -> float | None:
        return self.session.coverage(tokens)
