"""Drafts of an EAGLE head: chains, trees of likeliest paths, trees of draws, trees of fixed shape.

Columns of the head's own cache are those of the backbone's: column t holds the pair of the backbone's feature of token
t and of token t + 1. Between cycles it holds nothing else. Rows that were drafted on top of it (a feature that the head
itself returned, a token that it proposed) are thrown away, and what the backbone made of the accepted tokens takes
their place. These new pairs run first in the next draft, and the last of them proposes its first token:

    kept by the backbone    b  d1 d2 z          (z is the token that verification added, not in the cache yet)
    features of             b  d1 d2
    paired with             d1 d2 z             three rows of the head; the third one proposes what follows z
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from ...modeling.indices import cached_arange
from ..call.options import DraftOptions
from ..call.sequences import Sequences
from ..protocols import CacheView, DraftSession
from ..target.cache import crop, shift_cache
from ..target.target import HiddenLayers, TargetOutput
from ..trees.contract import DraftTree, VerificationResult
from ..trees.growth import Ancestry, grow, taken


@dataclass
class _Pairs:
    """New rows of true features; what a row keeps comes first, and what is after it is arbitrary.

    Attributes:
        features: [B, P, d].
        ids: [B, P] int64.
        real: [B, P] bool, False for padding.
        shifts: Columns by which each sequence moves to the right afterwards, [B]; None: none does.
    """

    features: torch.Tensor
    ids: torch.Tensor
    real: torch.Tensor
    shifts: torch.Tensor | None = None


class EagleSession(DraftSession):
    """The drafts of one call.

    Args:
        head: The `EagleHead`, attached.
        options: Of the call; `draft_tree` is complete (`growth.tree_options`).
    """

    supports_confidence_threshold = True

    def __init__(self, head: Any, options: DraftOptions) -> None:
        self.head, self.options, self.num_tokens = head, options, options.num_tokens
        self.hidden_layers: HiddenLayers = head.hidden_layers
        self.draft_ids, self.vocab_size = head.draft_ids, head.config.vocab_size
        self.cache, self.pairs = DynamicCache(), list[_Pairs]()

    def begin(self, outputs: Any, view: CacheView) -> None:
        """Takes the prompt's features; what an earlier call left in the backbone's cache is not looked at."""
        self.view, self.is_padded = view, view.is_padded
        prompt: torch.Tensor = self.head.fuse(outputs.hidden_states)
        self.prompt: torch.Tensor | None = prompt
        rows = prompt.shape[1]
        self.mask, self.counts = view.mask[:, :0], view.counts - rows
        self.real = view.mask[:, -rows:]

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Pairs the features of the accepted path with the tokens after them."""
        longest = self.view.new_tokens.longest
        if longest:
            states = outputs.first(longest)
            ids = result.tokens[:, :longest]
            real = torch.ones_like(ids, dtype=torch.bool)
            self.pairs.append(_Pairs(self.head.fuse(states), ids, real, self.view.shifts))

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """A chain or a tree after every sequence, with paths of at most `length` tokens."""
        if self.prompt is not None:  # its last pair has the token that was added first
            self.pairs.append(_Pairs(self.prompt, tokens.newest(self.prompt.shape[1]), self.real))
            self.prompt = None
        if length < 1:
            return DraftTree.chain(tokens.ids[:, :0])
        for pairs in self.pairs:
            self._settle(pairs)
        self.pairs = []
        is_chain = self.options.draft_tree is None
        tree = self._chain(length) if is_chain else grow(_Growth(self), self.options, length)
        crop(self.cache, self.mask.shape[1] - self.cache.get_seq_length())
        return tree

    def _settle(self, pairs: _Pairs) -> None:
        """Runs new pairs for good, and moves the sequences that kept fewer of them as the backbone's cache moved
        them."""
        size = pairs.ids.shape[1]
        self.mask = torch.cat([self.mask, pairs.real], dim=1)
        positions = (self.counts[:, None] + cached_arange(size, self.counts.device)).clamp(min=0)
        features = self._run(pairs.features, pairs.ids, positions, _causal(self.mask, size) if self.is_padded else None)
        if pairs.shifts is None:
            self.features, self.counts = features[:, -1:], self.counts + size
            return
        last = (size - 1 - pairs.shifts).clamp(min=0)  # a sequence that has ended keeps any
        self.features = features.gather(1, last[:, None, None].expand(-1, 1, features.shape[2]))
        self.counts, self.is_padded = self.counts + size - pairs.shifts, True
        self.mask = shift_cache(self.cache, pairs.shifts, self.mask)

    def _run(
        self, features: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Rows of the head; `mask` is [B, 1, R, past + R] bool, or None where all columns before a row are real."""
        return self.head.rows(features, ids, positions, mask, self.cache)

    def _chain(self, length: int) -> DraftTree:
        """Up to `length` tokens one after the other; it ends with a token of which no sequence was sure."""
        features, drafts, probs = self.features, [], []
        for step in range(length):
            logits = self.head.draft_logits(features)[:, 0]
            token, distribution = self.options.choose(logits, self.draft_ids, self.vocab_size)
            drafts.append(token)
            probs.append(distribution)
            if step + 1 == length or self.options.is_unsure(token, distribution):
                break
            mask = nn.functional.pad(self.mask, (0, step + 1), value=True)[:, None, None] if self.is_padded else None
            features = self._run(features, token[:, None], self.counts[:, None] + step, mask)
        return DraftTree.chain(torch.stack(drafts, 1), torch.stack(probs, 1) if self.options.do_sample else None)


class _Growth:
    """Runs the frontier of a tree level by level; a node sees the settled columns, its ancestors and itself.

    Args:
        drafter: Whose settled columns the tree grows from.
    """

    def __init__(self, drafter: EagleSession) -> None:
        self.drafter, self.features = drafter, drafter.features
        self.draft_ids, self.vocab_size = drafter.draft_ids, drafter.vocab_size
        self.ancestry, self.level = Ancestry(), 0

    def first(self) -> torch.Tensor:
        """See `Growth`."""
        return self.drafter.head.draft_logits(self.features)[:, 0]

    def after(self, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """See `Growth`."""
        drafter, size = self.drafter, tokens.shape[1]
        features = taken(self.features, parents) if self.level else self.features.expand(-1, size, -1)
        settled = drafter.mask[:, None].expand(-1, size, -1)
        visible = torch.cat([settled, self.ancestry.extend(parents)], dim=-1)[:, None]
        positions = (drafter.counts[:, None] + self.level).expand(-1, size)
        self.features, self.level = drafter._run(features, tokens, positions, visible), self.level + 1
        return drafter.head.draft_logits(self.features)


def _causal(mask: torch.Tensor, rows: int) -> torch.Tensor:
    """What the last `rows` of columns [B, W] see, [B, 1, rows, W]; made here, where no host has to look at the mask.

    Padding sees itself, so that it gives numbers.
    """
    columns = cached_arange(mask.shape[1], mask.device)
    own = columns[-rows:, None]
    return ((mask[:, None] & (columns <= own)) | (columns == own))[:, None]
