"""An EVA cache of a fixed size, on which a cycle has fixed shapes, so that it can be recorded and replayed.

    columns of a layer    summaries of chunks 0 .. S - 1, then the raw token of position p in place p % R

Chunks get their summary before their window closes: every forward summarises those that its block reaches, rejected
drafts among them, and the next forward does so again. A query sees raw tokens of its own window up to itself, and
summaries of earlier windows alone, whose tokens are all in the cache, or before it in the block. Only the device knows
how many tokens there are, and R is a window and the longest block: what a shorter block leaves is of another window.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ...generation.backbone.cache import rounded
from ...generation.call.sequences import NewTokens
from ...generation.tensors.masks import cached_arange
from .cache import EvaBlock, EvaByteCache, EvaCacheLayer, SequenceLengths, States, Summarise, additive, for_states

Hold = Callable[[str, Tensor], Tensor]


class FixedBlock(EvaBlock):
    """Geometry of one forward of `length` tokens, M, after those that the cache has."""

    def __init__(self, sequences: FixedLengths, length: int) -> None:
        ends, chunk = sequences.ends, sequences.chunk
        super().__init__(length, sequences.window, chunk, [], [], [], [], ends.device, lambda: (ends, ends))
        vars(self).update(is_fresh=False, provisional=0)
        self.sequences, first = sequences, ends[:, None] // chunk  # [B, 1]
        self.tokens = ends[:, None] + cached_arange(length, ends.device)  # [B, M]
        self.chunks = first + cached_arange((length + 2 * chunk - 2) // chunk, ends.device)  # [B, K], that it reaches
        of_chunks = first * chunk + cached_arange(self.chunks.shape[1] * chunk, ends.device)  # [B, K C]
        self.written, self.read = sequences.columns(self.tokens), sequences.columns(of_chunks)

    @property
    def is_long(self) -> bool:
        return False

    def positions(self) -> Tensor:
        return self.tokens

    def with_mask(self, dtype: torch.dtype, explicit: bool) -> FixedBlock:
        query, per_window = self.tokens[..., None], self.window // self.chunk  # [B, M, 1]
        raw = self.sequences.newest(self.tokens[:, -1:])[:, None]  # [B, 1, R]
        raw = (raw >= 0) & (raw // self.window == query // self.window) & (raw <= query)  # [B, M, R]
        chunks = cached_arange(self.sequences.summaries, self.device) // per_window < query // self.window  # [B, M, S]
        self.mask = additive(torch.cat([chunks, raw], -1), dtype)[:, None]  # [B, 1, M, S + R]
        return self


class FixedLengths(SequenceLengths):
    """How many tokens every sequence has, `ends` [B] on the device; `room` is for the most of them."""

    def __init__(self, origin: SequenceLengths, room: int, span: int, device: torch.device, hold: Hold) -> None:
        super().__init__(origin.window, origin.chunk)
        self.ends = hold("cache.ends", torch.tensor(origin.lengths, device=device))
        self.summaries, self.ring = rounded((room + span) // self.chunk + 2), rounded(self.window + span)  # S, R

    def begin(self, counts: object, length: int, device: torch.device, tree: object = None) -> FixedBlock:
        return FixedBlock(self, length)

    def finish(self, block: EvaBlock, counts: list[int]) -> None:
        """See `keep_last` of the cache."""

    def columns(self, positions: Tensor) -> Tensor:
        """Return where layers have the raw tokens of positions."""
        return self.summaries + positions % self.ring

    def newest(self, last: Tensor) -> Tensor:
        """Return the newest positions up to the `last` ones [B, 1] by their place, [B, R]; negative: none."""
        return last - (last - cached_arange(self.ring, last.device)) % self.ring


class FixedEvaLayer(EvaCacheLayer):
    """Keys and values [B, H, S + R, d] of a layer, filled with those of `origin`, which has what `sequences` counts."""

    sequences: FixedLengths

    def __init__(
        self, sequences: FixedLengths, origin: EvaCacheLayer, summarise: Summarise, hold: Hold, name: str
    ) -> None:
        super().__init__(sequences)
        past, chunk, (ends, device) = origin.sequences, sequences.chunk, (sequences.ends, sequences.ends.device)
        starts = torch.tensor(past.starts, device=device)[:, None]  # [B, 1]
        first, places = starts // chunk, cached_arange(sequences.summaries, device)  # [B, 1], [S]
        raw = sequences.newest(ends[:, None] - 1) - starts  # [B, R]
        index = torch.cat([places.expand(len(ends), -1), first + raw], 1)  # [B, S + R], columns of the origin
        is_known = torch.cat([places < first, raw >= 0], 1)
        count = max(1, *map(int.__sub__, past.lengths, past.starts)) // chunk + 1  # of raw tokens, and one more
        most, states = origin.keys.shape[2] - 1, (origin.keys, origin.values)
        tokens = (first + cached_arange(count * chunk, device)).clamp(max=most)  # [B, count C]
        new = summarise(*(each.gather(2, for_states(tokens, each)) for each in states))  # [B, H, count, d] each
        target = (first + cached_arange(count, device)).clamp(max=sequences.summaries - 1)  # nobody sees the last one
        held = []
        for part, each, folded in zip(("keys", "values"), states, new):
            laid_out = each.gather(2, for_states(index.clamp(0, most), each))  # [B, H, S + R, d]
            laid_out = laid_out.masked_fill(~is_known[:, None, :, None], 0)
            laid_out.scatter_(2, for_states(target, each), folded.to(each.dtype))
            held.append(hold(f"cache.{name}.{part}", laid_out))
        (self.keys, self.values), self.is_initialized = held, True

    def update(self, key_states: Tensor, value_states: Tensor, block: EvaBlock, summarise: Summarise) -> States:
        """Write keys and values [B, H, M, d] of a block, summarise its chunks, and return all columns."""
        assert isinstance(block, FixedBlock)
        both = self.keys, self.values
        for buffer, states in zip(both, (key_states, value_states)):
            buffer.scatter_(2, for_states(block.written, buffer), states.to(buffer.dtype))
        folded = summarise(*(buffer.gather(2, for_states(block.read, buffer)) for buffer in both))  # [B, H, K, d] each
        for buffer, states in zip(both, folded):
            buffer.scatter_(2, for_states(block.chunks, buffer), states.to(buffer.dtype))
        return both

    def summarise_after(self, block: EvaBlock, summarise: Summarise) -> None:
        """No window is folded."""


class FixedEvaByteCache(EvaByteCache):
    """What `origin` has, with room for `room` tokens and blocks of `span`; see the file, and `CacheView.held`.

    `summaries` are the functions of the layers that summarise chunks.
    """

    takes_trees = False
    sequences: FixedLengths

    def __init__(self, origin: EvaByteCache, summaries: list[Summarise], room: int, span: int, hold: Hold) -> None:
        self.origin = origin
        self.sequences = FixedLengths(origin.sequences, room, span, origin.layers[0].keys.device, hold)
        parts = enumerate(zip(origin.layers, summaries, strict=True))
        Cache.__init__(
            self, layers=[FixedEvaLayer(self.sequences, layer, each, hold, str(n)) for n, (layer, each) in parts]
        )

    def keep_last(self, fed: int, kept: NewTokens, path: Tensor | None = None) -> None:
        self.sequences.ends.add_(kept.on_device)

    def clear_rejected(self) -> None:
        sequences = self.sequences
        last = sequences.ends[:, None] - 1  # [B, 1]
        chunks = cached_arange(sequences.summaries, last.device) > last // sequences.chunk  # [B, S]
        is_old = sequences.newest(last) <= last - sequences.window  # [B, R], in whose place there may be a draft
        for layer in self.layers:
            for buffer in (layer.keys, layer.values):
                buffer.masked_fill_(torch.cat([chunks, is_old], 1)[:, None, :, None], 0)

    def restored(self) -> EvaByteCache:
        """Return the origin with the tokens of all forwards; the host waits."""
        sequences, past = self.sequences, self.origin.sequences
        lengths = sequences.ends.tolist()
        past.lengths, past.settled = lengths, list(lengths)
        past.starts, past._mirror = [n // past.window * past.window for n in lengths], None
        starts = torch.tensor(past.starts, device=sequences.ends.device)[:, None]  # [B, 1]
        widths = [start // past.chunk + n - start for n, start in zip(lengths, past.starts)]
        place = cached_arange(max(widths), starts.device) - starts // past.chunk  # [B, T], of raw tokens from 0 on
        index = torch.where(place < 0, place + starts // past.chunk, sequences.columns(starts + place))
        for layer, fixed in zip(self.origin.layers, self.layers):
            layer.keys, layer.values = (each.gather(2, for_states(index, each)) for each in (fixed.keys, fixed.values))
        return self.origin
