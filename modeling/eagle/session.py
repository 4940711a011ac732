"""Drafts of an EAGLE head: chains, trees of likely paths, trees of draws, trees of fixed shape.

Columns of the head's own cache are those of the backbone's: column t holds the pair of the backbone's feature of token
t and of token t + 1. Between cycles it holds nothing else. Pairs drafted on top of it (a feature that the head
itself returned, a token that it proposed) are dropped, and the backbone's features of the accepted tokens replace
them. These new pairs run first in the next draft, and the last of them proposes its first token:

    new tokens              b  d1 d2 z          (z is the token that verification added, not in the cache yet)
    features of             b  d1 d2
    paired with             d1 d2 z             three pairs; the third one proposes the token after z
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ...generation.backbone.cache import drafter_layout, of_accepted
from ...generation.call.constraints import DraftMasks
from ...generation.call.options import DraftOptions, block_chain, grow_chain
from ...generation.call.sequences import NewTokens, Sequences
from ...generation.contract import (
    CacheView,
    DraftSession,
    DraftTree,
    HiddenLayers,
    PrefillOutput,
    TargetOutput,
    VerificationResult,
    taken,
)
from ...generation.tensors.masks import cached_arange
from ...generation.trees.growth import Ancestry, grow, most_nodes
from .modules import EagleNetwork

_Pairs = tuple[Tensor, Tensor, NewTokens | None]
"""Features [B, P, d], the ids paired with them, and how many are new of each sequence (None: the prompt's)."""


class EagleSession(DraftSession):
    """The drafts of one call of an attached `EagleHead`."""

    supports_confidence_threshold = takes_fixed = True

    def __init__(self, head: EagleNetwork, options: DraftOptions) -> None:
        self.head, self.options, self.num_tokens = head, options, options.num_tokens
        self.hidden_layers: HiddenLayers = (layers := head.hidden_layers)
        self.layers = [layers] if isinstance(layers, int) else layers
        self.embed = head.embedding()
        self.draft_ids: Tensor | None = None if head.draft_size == head.config.vocab_size else head.draft_ids
        self.vocab_size = head.config.vocab_size
        self.cache, self.pairs = DynamicCache(config=head.config), list[_Pairs]()
        self.prompt: Tensor | None = None
        self.fixed: tuple[Tensor, Tensor] | None = None

    def begin(self, outputs: PrefillOutput, view: CacheView) -> None:
        self.view, prompt, options = view, self._features(outputs.hidden_states), self.options  # [B, L, d]
        span = 1 + self.num_tokens if options.draft_tree is None else most_nodes(options)
        self.layout = drafter_layout(view, prompt.shape[1], options.max_length, span, "eagle")
        self.layout.install_layers(self.cache)
        self.draft_ids = None if self.draft_ids is None else view.held("eagle.draft_ids", self.draft_ids)  # [v]
        if view.is_fixed:
            self._begin_fixed(prompt)
        else:
            self.prompt = prompt

    def _begin_fixed(self, prompt: Tensor) -> None:
        """Run the prompt's pairs [B, L, d]; the last one lacks its token, and is the first new one of the next draft.

        As many pairs are new in every cycle; those beyond a sequence's own are zeros, and seen by nobody.
        """
        self.layout.block_offset = -(size := prompt.shape[1])
        self._run(prompt, self.options.prompt[:, -size:].roll(-1, 1))
        self.layout.ends.sub_(1)
        features = torch.nn.functional.pad(prompt[:, -1:], (0, 0, 0, self.num_tokens))  # [B, P, d]
        new, hold = torch.ones_like(self.layout.ends), self.view.held
        self.fixed = hold("eagle.features", features), hold("eagle.new", new)

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        new = self.view.new_tokens
        if self.fixed is not None:
            features, (held, counts) = self._features(outputs.hidden_states), self.fixed  # [B, P or fewer, d]
            counts.copy_(new.on_device)
            held[:, : features.shape[1]] = of_accepted(features, new.on_device)
        elif new.longest:
            features = self._features(outputs.hidden_states, new.longest)  # [B, P, d]
            self.pairs.append((features, result.tokens[:, : new.longest], new))

    def _features(self, hidden_states: Any, count: int | None = None) -> Tensor:
        """Return the features of the backbone's states, of the first `count` tokens."""
        return self.head.fused([hidden_states[layer][:, :count] for layer in self.layers])

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        if self.prompt is not None:  # its last pair has the token that was added first
            self.pairs.append((self.prompt, tokens.newest(self.prompt.shape[1]), None))
            self.prompt = None
        if self.fixed is not None:
            features, new = self.fixed
            columns = (tokens.ends - new)[:, None] + cached_arange(features.shape[1], new.device)  # [B, P]
            self.pairs.append((features, tokens.at(columns), NewTokens.unread(new)))
        elif length < 1:
            return DraftTree.chain(tokens.ids[:, :0])
        for pairs in _joined(self.pairs):
            self._append_pairs(*pairs)
        self.pairs.clear()
        if length < 1:
            return DraftTree.chain(tokens.ids[:, :0])
        features, self.layout.block_offset = self.features, 0
        masks = self.options.masks(tokens) if self.options.processors else None
        if self.options.draft_tree is None:
            return self._chain(features, length, masks)
        return grow(_Growth(self, features), self.options, length, masks)

    def _append_pairs(self, features: Tensor, ids: Tensor, new: NewTokens | None) -> None:
        """Run pairs of true features [B, P, d]; the first ones, `new` of each sequence (None: the prompt's), stay."""
        self.layout.block_offset = 0 if new else -ids.shape[1]
        features = self._run(features, ids)
        if new is None or new.is_even:
            self.features = features[:, -1:]  # [B, 1, d]
        else:
            last = (new.on_device - 1).clamp(min=0)[:, None]  # a sequence that has ended keeps any
            self.features = taken(features, last.to(features.device))  # [B, 1, d]
        if new is not None:
            self.layout.keep(new)

    def _run(self, features: Tensor, ids: Tensor, seen: Tensor | None = None, depths: Tensor | None = None) -> Tensor:
        """Return features of pairs after those before; or of a level of a tree, which sees the columns `seen` of it.

        `depths` [1, N] are those of the tree's nodes so far.
        """
        positions, masks = self.layout.next_rows(ids.shape[1], self.head.windows, seen, depths)  # [B, P]
        features = self.head.run(features, self.embed(ids), positions, masks, self.cache)  # [B, P, d]
        self.layout.block_offset += ids.shape[1]
        return features

    def _chain(self, features: Tensor, length: int, masks: DraftMasks | None) -> DraftTree:
        """Return a chain of up to `length` tokens after features [B, 1, d], or to one that no sequence is sure of."""
        if self.head.config.mask_token_id is not None:  # P-EAGLE: it replaces all tokens but the first one
            if length > 1:
                masked = self.head.masked(len(features), length - 1)  # [B, m - 1, d]
                features = torch.cat([features, self._run(*masked)], dim=1)  # [B, m, d]
            logits = self.head.draft_logits(features)  # [B, m, v]
            return block_chain(logits, self.options, masks, self.draft_ids, self.vocab_size)

        def step(token: Tensor | None) -> tuple[Tensor, Tensor | None]:
            nonlocal features
            features = features if token is None else self._run(features, token[:, None])
            logits = self.head.draft_logits(features)[:, 0]  # [B, v]
            return self.options.choose(logits, self.draft_ids, self.vocab_size, masks)

        return grow_chain(step, self.options, length)


def _joined(pairs: list[_Pairs]) -> Iterator[_Pairs]:
    """Yield pairs as one block each for the cycles in a row that gave all sequences as many, as plain ones do."""
    for is_even, group in groupby(pairs, lambda each: each[2] is not None and each[2].is_even):
        parts = list(group)
        if not is_even or len(parts) == 1:
            yield from parts
            continue
        features = torch.cat([each for each, _, _ in parts], dim=1)  # [B, P, d]
        ids = torch.cat([each for _, each, _ in parts], dim=1)  # [B, P]
        yield features, ids, NewTokens([ids.shape[1]] * len(ids), ids.device)


class _Growth:
    """Runs the frontier of a tree level by level; a node sees the settled columns, its ancestors and itself."""

    def __init__(self, drafter: EagleSession, features: Tensor) -> None:
        self.drafter, self.features = drafter, features
        self.draft_ids: Tensor | None = drafter.draft_ids
        self.vocab_size = drafter.vocab_size
        self.ancestry, self.level, self.depths = Ancestry(), 0, drafter.layout.ends.new_zeros(1, 0)  # [1, N]

    def first(self) -> Tensor:
        return self.drafter.head.draft_logits(self.features)[:, 0]  # [B, v]

    def after(self, tokens: Tensor, parents: Tensor) -> Tensor:
        drafter, size = self.drafter, tokens.shape[1]
        features = taken(self.features, parents) if self.level else self.features.expand(-1, size, -1)  # [B, k, d]
        self.depths = torch.cat([self.depths, self.depths.new_full((1, size), self.level)], 1)
        self.features = drafter._run(features, tokens, self.ancestry.extend(parents), self.depths)
        self.level += 1
        return drafter.head.draft_logits(self.features)  # [B, k, v]
