"""Drafts of heads: one hidden state describes the next n tokens.

Heads that attend (a decoder layer per head, Gloeckle et al., Mehra et al.; or one before them, Hydra++) and draft
layers whose cache knows how long every sequence is (EvaByte) have caches of verified tokens only: drafts never enter
them. A verified block is read as far as the most new tokens of any sequence; columns after a sequence's own are seen by
nobody and overwritten by the next block, or leave the cache at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import DynamicCache

from ...generation.backbone.cache import block_mask
from ...generation.backbone.drafting import drafter_layout, of_accepted
from ...generation.call.constraints import DraftMasks
from ...generation.call.options import DraftOptions, chosen, warped
from ...generation.call.sequences import Sequences
from ...generation.contract import (
    CacheView,
    DraftSession,
    DraftTree,
    HiddenLayers,
    PrefillOutput,
    SpeculativeCache,
    TargetOutput,
    VerificationResult,
    each_state,
    taken,
)
from ...generation.tensors.masks import cached_arange, cached_range, to_device
from ...generation.tensors.sampling import draw
from ...generation.trees.growth import grow
from ..common.draft_vocabulary import DraftVocabulary
from ..common.learning import WindowHeadMixin
from .window_distribution import PartialDistribution, WindowDistribution


class HeadSession(DraftSession):
    """Drafts from the window distribution of a head, conditioned on the token that the last verification added.

    The distribution comes from the hidden state just before that token, so that one backbone call verifies a draft and
    yields the state for the next. Greedy drafts are argmaxes of the exact conditionals. Where the target is warped by
    processors of scores alone (temperature, top-k, top-p, ...), each conditional is warped in the same way before a
    token is drawn from it. The verifier gets the distributions that the tokens were really drawn from.

    Args:
        distribution: From features [..., F] of one position, the token [...] after it and a number to the distribution
            of the next so many tokens.
        options: Of the call.
        hidden_layers: The states that features are made from.
        read: Makes features [B, T, F] from the backbone's hidden states; the last states if None.
        vocabulary: The tokens that may be drafted; None: all.
    """

    supports_confidence_threshold, takes_fixed = True, True

    def __init__(
        self,
        distribution: Callable[[Tensor, Tensor, int], WindowDistribution],
        options: DraftOptions,
        hidden_layers: HiddenLayers = -1,
        read: Callable[..., Tensor] | None = None,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        self.distribution, self.options, self.hidden_layers = distribution, options, hidden_layers
        self.vocabulary = vocabulary
        self.read: Callable[..., Tensor] = read or _last
        self.num_tokens = options.num_tokens
        self.column = 0 if vocabulary is None else int(vocabulary.ids[0])  # which distributions have, if they have any

    def begin(self, outputs: PrefillOutput, view: CacheView) -> None:
        """Take the state before the first new token."""
        self.view = view
        self.hidden = view.held("heads.hidden", self.read(outputs.hidden_states)[:, -1])  # [B, F]

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """Return a chain or a tree after every sequence, with paths of at most `length` tokens."""
        if length < 1:
            return DraftTree.chain(tokens.ids[:, :0])
        last, is_tree = to_device(tokens.last(), self.hidden.device), self.options.draft_tree is not None
        hidden = self.hidden
        masks = self.options.masks(tokens)
        if is_tree:
            hidden, last = hidden[:, None], last[:, None]  # [B, 1, F], [B, 1]
        distribution = self.distribution(hidden, last, length)
        if is_tree:
            return grow(WindowGrowth(distribution, last), self.options, length, masks)
        return DraftTree.chain(*self._chain(distribution, length, masks))

    def _is_ancestral(self, masks: DraftMasks | None) -> bool:
        """Whether a draft is a plain ancestral sample: there is nothing to warp."""
        return masks is None and self.options.do_sample and not self.options.processing.pointwise

    def _chain(
        self, distribution: WindowDistribution, length: int, masks: DraftMasks | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return up to `length` tokens, and their distributions where drawn, up to one of which no sequence was
        sure."""
        options = self.options
        if masks is not None:
            draft, probs = distribution.draft(partial(self._choose_within, masks), length)
        elif not options.do_sample and not options.threshold:
            return distribution.greedy(length, options.numbers.note), None
        elif not options.do_sample:
            draft, probs = distribution.draft(self._likeliest, length)
        elif self._is_ancestral(masks):
            draft, probs = distribution.sample_with_probs(length)
            self._note(probs)
        else:
            draft, probs = distribution.draft(self._choose, length)
        if options.threshold:
            length = options.sure_length(draft, probs)
        return draft[:, :length], probs[:, :length] if options.do_sample else None

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Take the state before each sequence's last token; any state where it has ended."""
        states = self.read(outputs.hidden_states or ())
        before = cached_arange(len(states), states.device), to_device(result.num_accepted, states.device)
        self.hidden = self.view.held("heads.hidden", states[before])  # [B, F]

    def _note(self, probs: Tensor) -> None:
        self.options.numbers.note(probs[..., self.column])

    def _likeliest(self, probs: Tensor) -> tuple[Tensor, Tensor]:
        self._note(probs)
        return probs.argmax(-1), probs

    def _choose(self, probs: Tensor) -> tuple[Tensor, Tensor]:
        self._note(probs)
        q = warped(probs, self.options, self.vocabulary is not None)
        return draw(q), q  # [B, V]

    def _choose_within(self, masks: DraftMasks, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens of one position after the other, also where all positions [B, n, v] come at once."""
        if probs.dim() == 2:
            self._note(probs)
            q = warped(probs, self.options, self.vocabulary is not None, masks)
            return chosen(q, self.options, masks), q
        steps = [self._choose_within(masks, step) for step in probs.unbind(1)]
        return torch.stack([token for token, _ in steps], 1), torch.stack([q for _, q in steps], 1)  # [B, n], [B, n, V]

    def coverage(self, tokens: Tensor) -> float | None:
        """Return the share of tokens [N] that could be drafted; None where all can."""
        return None if self.vocabulary is None else self.vocabulary.coverage(tokens)


class WindowGrowth:
    """Grows a tree by the exact conditionals of a window distribution.

    Where positions are independent, all nodes of a level have the same children; else every path has its own.

    Args:
        distribution: Of the tokens after the bonus token, with axes [B, 1].
        last: [B, 1] int64, the bonus token.
    """

    draft_ids: Tensor | None = None
    vocab_size: int = 0

    def __init__(self, distribution: WindowDistribution, last: Tensor) -> None:
        self.paths, self.next = last[..., None][..., :0], distribution.next_log_probs  # [B, 1, 0]
        if isinstance(distribution, PartialDistribution):
            part, self.next = distribution.vocabulary, distribution.next_columns
            self.draft_ids, self.vocab_size = part.on(last.device), part.vocab_size

    def first(self) -> Tensor:
        return self.next(self.paths)[:, 0]  # [B, v]

    def after(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self.paths = torch.cat([taken(self.paths, parents.clamp(min=0)), tokens[..., None]], dim=-1)  # [B, k, j + 1]
        return self.next(self.paths)


def _last(hidden_states: tuple[Tensor, ...]) -> Tensor:
    return hidden_states[-1]


class AttendingHeadSession(HeadSession):
    """The drafts of one call of attached heads, whose features `read` makes with a cache."""

    def __init__(self, heads: WindowHeadMixin, options: DraftOptions, read: Callable[..., Tensor]) -> None:
        super().__init__(heads.distribution_after, options, heads.hidden_layers, read, heads.draft_vocabulary)
        self.cache = DynamicCache()

    def begin(self, outputs: PrefillOutput, view: CacheView) -> None:
        """Run over the prompt; columns of an earlier call in the backbone's cache are ignored.

        Raises:
            ValueError: A backbone whose cache shows no columns.
        """
        if not view.has_columns:
            raise ValueError("heads that attend need a backbone on transformers' own caches; use heads that do not")
        size = outputs.hidden_states[-1].shape[1]
        self.view, span = view, self.num_tokens + 1
        self.layout = drafter_layout(view, size, self.options.max_length, span, "heads")
        self.layout.install_layers(self.cache)
        self.layout.block_offset = -size
        self.hidden = view.held("heads.hidden", self._run(outputs.hidden_states, size)[:, -1])  # [B, F]
        self.layout.block_offset = 0

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Run over the new tokens."""
        new = self.view.new_tokens
        if self.view.is_fixed:
            size = outputs.logits.shape[1]
            states = each_state(outputs.hidden_states, lambda state: of_accepted(state, new.on_device)) or ()
            last = (new.on_device - 1).clamp(min=0)  # [B]
        elif (size := new.longest) == 0:
            return
        else:
            states, last = outputs.first(size), result.num_accepted.clamp(max=size - 1)  # an ended one's is any
        features = self._run(states, size)  # [B, T, F]
        ends = cached_arange(len(features), features.device), to_device(last, features.device)
        self.hidden = self.view.held("heads.hidden", features[ends])  # [B, F]
        self.layout.keep(new)

    def _run(self, states: tuple[Tensor | None, ...], size: int) -> Tensor:
        """Return features [B, T, F] of new columns."""
        layout, config = self.layout, self.options.backbone.config.get_text_config()
        positions = (layout.counts[:, None] + cached_range(layout.block_offset, size, layout.ends.device)).clamp(min=0)
        return self.read(states, block_mask(layout, size, config), positions, self.cache)


class DraftLayersSession(HeadSession):
    """The drafts of one call.

    Args:
        distribution: See `HeadSession`.
        options: Of the call.
        layer: Index of the backbone's state that the layers read.
        run: From such states [B, T, D], `attention_mask` and `cache` to features [B, T, F]; extends the cache.
        cache: Empty.
    """

    takes_fixed = False

    def __init__(
        self,
        distribution: Callable[[Tensor, Tensor, int], WindowDistribution],
        options: DraftOptions,
        layer: int,
        run: Callable[..., Tensor],
        cache: SpeculativeCache,
    ) -> None:
        super().__init__(distribution, options, [layer])
        self.layer, self.run, self.cache = layer, run, cache

    def begin(self, outputs: PrefillOutput, view: CacheView) -> None:
        """Run over the prompt; columns of an earlier call in the backbone's cache are ignored."""
        states, self.view = outputs.hidden_states[self.layer], view
        mask = None if view.mask is None else view.mask[:, -states.shape[1] :]  # [B, L]
        self.hidden = self.run(states, attention_mask=mask, cache=self.cache)[:, -1]  # [B, F]

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Run over the new tokens."""
        new = self.view.new_tokens
        if new.longest == 0:
            return
        features = self.run(outputs.state(self.layer)[:, : new.longest], cache=self.cache)  # [B, T, F]
        self.cache.keep_last(new.longest, new)
        # a sequence that has ended keeps any
        last = to_device(result.num_accepted.clamp(max=new.longest - 1), features.device)
        self.hidden = features[cached_arange(len(features), features.device), last]  # [B, F]
