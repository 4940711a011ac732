"""Verified tokens and states, recorded for drafters that learn from them: no further forward, and no wait for the
device.

A recording session wraps the drafter's own. In every cycle it copies the states, ids and positions of the new tokens of
each sequence into a ring of fixed size. The ring returns sequences in the format that `training.features` reads, so
that the drafters' losses are those of stored features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Lock
from typing import cast

import torch
from torch import Tensor, nn

from ...generation.call.sequences import NewTokens, Sequences, Speculation
from ...generation.contract import (
    CacheView,
    DraftSession,
    DraftTree,
    PrefillOutput,
    TargetOutput,
    VerificationResult,
    joined_layers,
)
from ...generation.tensors.masks import cached_range, to_device
from ..heads.losses import IGNORE

STATES = "cached_states"
"""The states' column in training data, and the keyword of the `forward` of drafters."""
SUMMARIES = "cached_summaries"
"""The same of the backbone's logits (`logit_summaries`), for drafters with a draft vocabulary."""
_PADDING = -1
"""The position of padding."""


def collate(sequences: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch of sequences with stored states, padded on the right; with `attention_mask` if lengths differ."""
    lengths, fills, pad = {len(each["input_ids"]) for each in sequences}, {"labels": IGNORE}, nn.utils.rnn.pad_sequence
    batch = {name: pad([each[name] for each in sequences], True, fills.get(name, 0)) for name in sequences[0]}
    if len(lengths) > 1:
        batch["attention_mask"] = pad([torch.ones_like(each["input_ids"]) for each in sequences], True)
    return batch


class OnlineBuffer:
    """Verified tokens and the backbone's states of them, in memory that is allocated once; the oldest tokens go first.

    Attributes:
        capacity: Tokens that it holds.
        states: [capacity + 1, S, d] on the states' device, made with the first ones; the last slot is never read.
        tokens: [capacity + 1, 3] int64: a token's id, the label of its state (the next token if the backbone chose it,
            else -100), and its position (-1: padding).
        written: Tokens that were ever written.
        runs: Per sequence, the runs of its tokens: when the first was written, and how many.

    Args:
        capacity: See above. A sequence that is longer loses its beginning.

    Raises:
        ValueError: A capacity below 2.
    """

    def __init__(self, capacity: int = 2**14) -> None:
        if not isinstance(capacity, int) or capacity < 2:
            raise ValueError(f"capacity={capacity!r} must be a whole number of at least 2 tokens")
        self.capacity, self.written = capacity, 0
        self.states: Tensor | None = None
        self.tokens = torch.empty(0)
        self.runs: list[list[tuple[int, int]]] = []
        self._lock = Lock()

    def new_sequences(self, count: int) -> list[list[tuple[int, int]]]:
        """Return the runs of new sequences, which `write` extends; sequences without tokens are forgotten."""
        new: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        with self._lock:
            self.runs = [*self._held(), *new]
        return new

    def _held(self) -> list[list[tuple[int, int]]]:
        """Return the runs of sequences that have two tokens left."""
        oldest = self.written - self.capacity
        return [runs for runs in self.runs if runs and sum(runs[-1]) > oldest + 1]

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._held())

    def write(self, runs: list[list[tuple[int, int]]], states: Tensor, tokens: Tensor, new: NewTokens) -> None:
        """Write the first `new.counts[b]` tokens of every sequence.

        Args:
            runs: Of `new_sequences`.
            states: [B, F, S, d].
            tokens: [B, F, 3], as `tokens` of the buffer.
            new: Tokens per sequence.

        Raises:
            ValueError: States of another width or number of layers than those in the buffer.
        """
        with self._lock:
            held = self._allocated(states)
            counts, total = new.on_device[:, None], sum(new.counts)  # [B, 1]
            steps = cached_range(0, tokens.shape[1], tokens.device)  # [F]
            order = counts.cumsum(0) - counts + steps  # [B, F], counted over all sequences
            is_written = (steps < counts) & (order >= total - self.capacity)  # [B, F]
            slots = torch.where(is_written, (order + self.written) % self.capacity, self.capacity).flatten()
            self.tokens.index_copy_(0, to_device(slots, self.tokens.device), tokens.flatten(0, 1))
            held.index_copy_(0, to_device(slots, held.device), states.flatten(0, 1).to(held.dtype))
            for of_sequence, count in zip(runs, new.counts):
                if of_sequence and sum(of_sequence[-1]) == self.written:
                    of_sequence[-1] = of_sequence[-1][0], of_sequence[-1][1] + count
                elif count:
                    of_sequence.append((self.written, count))
                self.written += count

    def _allocated(self, like: Tensor) -> Tensor:
        """Return the ring of states, made before the first ones, outside of inference mode."""
        size, expected = like.shape[2:], None if self.states is None else self.states.shape[1:]
        if expected not in (None, size):
            raise ValueError(f"states have the shape {tuple(size)} (layers, width), the buffer's {tuple(expected)}")
        if self.states is None:
            with torch.inference_mode(False):
                self.states = like.new_zeros(self.capacity + 1, *size)
                self.tokens = torch.zeros(self.capacity + 1, 3, dtype=torch.long, device=like.device)
        return self.states

    def sample(self, count: int, generator: torch.Generator) -> list[dict[str, Tensor]]:
        """Return up to `count` of the sequences, chosen at random."""
        with self._lock:
            held = self._held()
            chosen = torch.randperm(len(held), generator=generator)[:count].tolist()
            return [self._features(held[index]) for index in chosen]

    def _features(self, runs: list[tuple[int, int]]) -> dict[str, Tensor]:
        """Return a sequence as a row of features; its last token, which has no state, has zeros."""
        assert self.states is not None
        oldest = self.written - self.capacity
        times = [time for first, count in runs for time in range(max(first, oldest), first + count)]
        slots = torch.tensor(times, device=self.tokens.device) % self.capacity  # [N]
        tokens = self.tokens[slots]  # [N, 3]
        real = tokens[:, 2] != _PADDING  # [N]
        ids, labels, positions = tokens[real].unbind(1)
        states = self.states[to_device(slots[real], self.states.device)]  # [N', S, d]
        return {
            "input_ids": torch.cat([ids, labels[-1:]]),
            "labels": torch.cat([torch.full_like(labels[:1], IGNORE), labels]),
            "position_ids": torch.cat([positions, positions[-1:] + 1]),
            STATES: torch.cat([states, torch.zeros_like(states[:1])]),
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors of `load_state_dict`, on the processor."""
        if self.states is None:
            return {}
        oldest, filled = self.written - self.capacity, min(self.written, self.capacity)
        runs = [
            (number, max(first, oldest), first + count)
            for number, of_sequence in enumerate(self._held())
            for first, count in of_sequence
            if first + count > oldest
        ]
        return {
            "states": self.states[:filled].cpu(),
            "tokens": self.tokens[:filled].cpu(),
            "runs": torch.tensor(runs).view(-1, 3),
            "sizes": torch.tensor([self.capacity, self.written]),
        }

    def load_state_dict(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Load the tokens of another buffer, of the same capacity."""
        if not tensors:
            return
        capacity, written = tensors["sizes"].tolist()
        if capacity != self.capacity:
            raise ValueError(f"capacity={self.capacity} is not that of the buffer that was saved, {capacity}")
        self.written, states = written, tensors["states"].to(device)
        self._allocated(states[None])[: len(states)] = states
        self.tokens[: len(states)] = tensors["tokens"].to(device)
        runs: dict[int, list[tuple[int, int]]] = {}
        for number, first, end in tensors["runs"].tolist():
            runs.setdefault(number, []).append((first, end - first))
        self.runs = list(runs.values())


class RecordingSession(DraftSession):
    """A drafter's session that also writes verified tokens and states of `layers` to a buffer.

    Where `keeps_prompt`, learning at a token depends on all before it; else only the prompt's last state is recorded.
    `finished` is called at the end with the statistics, and the seconds that the call took.
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
        self.prompt: Tensor | None = None

    def begin(self, outputs: PrefillOutput, view: CacheView) -> None:
        self.view, self.prompt = view, self._states(outputs.hidden_states)
        self.session.begin(outputs, view)

    def _states(self, hidden_states: Sequence[Tensor | None]) -> Tensor:
        """Return the states of the recorded layers, [B, F, S, d]."""
        states = [cast(Tensor, hidden_states[layer]) for layer in self.layers]
        return torch.stack([to_device(state, states[0].device) for state in states], dim=2)  # [B, F, S, d]

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        if self.prompt is not None:
            self._write_prompt(self.prompt, tokens)
            self.prompt = None
        self.last = tokens.last()
        return self.session.propose(tokens, length)

    def _write_prompt(self, states: Tensor, tokens: Sequences) -> None:
        """Write the end of the prompt: as much of every sequence as fits half of the buffer."""
        (batch, width), device = states.shape[:2], tokens.ids.device
        mask = self.view.mask
        real = torch.ones(batch, width, device=device).long() if mask is None else mask[:, -width:].long()  # [B, width]
        self.ends = self.view.counts.clone() if self.view.has_columns else real.sum(1)  # [B]
        positions = (self.ends - real.sum(1))[:, None] + real.cumsum(1) - 1  # [B, width]
        positions = torch.where(real.bool(), positions, _PADDING)
        count = min(width, max(1, self.buffer.capacity // (2 * batch))) if self.keeps_prompt else 1
        ids = tokens.newest(count + 1)  # [B, count + 1]
        labels = torch.full_like(ids[:, 1:], IGNORE)  # [B, count]
        labels[:, -1] = ids[:, -1]
        self.runs = self.buffer.new_sequences(batch)
        written = torch.stack([ids[:, :-1], labels, positions[:, -count:]], dim=-1)  # [B, count, 3]
        self.buffer.write(self.runs, states[:, -count:], written, NewTokens([count] * batch, device))

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        new = self.view.new_tokens
        if new.longest:
            labels = result.tokens[:, : new.longest]  # [B, F]
            ids = torch.cat([self.last[:, None], labels[:, :-1]], dim=1)  # [B, F], the tokens before them
            positions = self.ends[:, None] + cached_range(0, new.longest, ids.device)  # [B, F]
            states = self._states(outputs.first(new.longest))
            self.buffer.write(self.runs, states, torch.stack([ids, labels, positions], dim=-1), new)
            self.ends = self.ends + new.on_device
        self.session.advance(outputs, result)

    def finish(self, statistics: Speculation) -> None:
        self.session.finish(statistics)
        self.finished(statistics, time.perf_counter() - self.started)

    def coverage(self, tokens: Tensor) -> float | None:
        return self.session.coverage(tokens)
