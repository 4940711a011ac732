"""Drafts from the window distribution of a head: one hidden state describes the next n tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...modeling.heads.window_distribution import WindowDistribution
from ...modeling.indices import to_device
from ...modeling.sampling import draw
from ..contract import DraftTree, VerificationResult, cached_arange
from ..growth import grow, taken
from ..targets import HiddenLayers, TargetOutput
from ..tokens import Sequences
from .protocol import DraftOptions, View


class HeadSession:
    """Drafts from the window distribution of a head, conditioned on the token that the last verification added.

    The distribution comes from the hidden state just before that token, so that one backbone call verifies a draft and
    yields the state for the next. Greedy drafts are argmaxes of the exact conditionals. Where the target is warped by
    processors that look at scores alone (temperature, top-k, top-p, ...), each conditional is warped in the same way
    before a token is drawn from it. The verifier is handed the distributions that the tokens were really drawn from.

    Args:
        distribution: From features [..., F] of one position, the token [...] behind it and a number to the distribution
            of the next so many tokens.
        options: Of the call.
        hidden_layers: The states that features are made from.
        read: Makes features [B, T, F] from the backbone's hidden states; the last states if not given.
    """

    supports_confidence_threshold = True

    def __init__(
        self,
        distribution: Callable[[torch.Tensor, torch.Tensor, int], WindowDistribution],
        options: DraftOptions,
        hidden_layers: HiddenLayers = -1,
        read: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        self.distribution, self.options, self.hidden_layers = distribution, options, hidden_layers
        self.read = read or _last
        self.num_tokens = options.num_tokens
        self.hidden: torch.Tensor | None = None
        self._unchecked = True

    def begin(self, outputs: Any, view: View) -> None:
        """Keeps the state before the first new token."""
        self.hidden = self.read(outputs.hidden_states)[:, -1]

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """A chain or a tree behind every row, with paths of at most `length` tokens.

        Raises:
            ValueError: The head's logits are not numbers (looked at once per call of `generate`).
        """
        if length < 1:
            return DraftTree.chain(tokens.ids[:, :0])
        last, is_tree = to_device(tokens.last(), self.hidden.device), self.options.draft_tree is not None
        hidden = self.hidden
        if is_tree:
            hidden, last = hidden[:, None], last[:, None]
        distribution = self.distribution(hidden, last, length)
        if self._unchecked:
            _refuse_nan(distribution, last)
            self._unchecked = False
        if is_tree:
            return grow(WindowGrowth(distribution, last), self.options, length)
        return DraftTree.chain(*self._chain(distribution, length))

    def _chain(self, distribution: WindowDistribution, length: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Up to `length` tokens, and their distributions where drawn; they end with a token of which no row was
        sure."""
        options = self.options
        if not options.do_sample and not options.threshold:
            return distribution.greedy(length), None
        if not options.do_sample:
            draft, probs = distribution.draft(_likeliest, length)
        elif not options.processing.pointwise:  # nothing to warp: one ancestral sample
            draft, probs = distribution.sample_with_probs(length)
        else:
            draft, probs = distribution.draft(self._choose, length)
        if options.threshold:
            length = options.sure_length(draft, probs)
        return draft[:, :length], probs[:, :length] if options.do_sample else None

    def advance(self, fed: TargetOutput, result: VerificationResult) -> None:
        """Keeps the state before each row's last token; a row that has ended keeps any."""
        states = self.read(fed.hidden_states)
        self.hidden = states[cached_arange(len(states), states.device), to_device(result.num_accepted, states.device)]

    def _choose(self, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = self.options.processing.warp(probs)
        return draw(q), q


class WindowGrowth:
    """Grows a tree by the exact conditionals of a window distribution.

    Where positions are independent, all nodes of a level have the same children; else every path has its own.

    Args:
        distribution: Of the tokens behind b, with axes [B, 1].
        last: [B, 1] int64, b.
    """

    draft_ids, vocab_size = None, 0

    def __init__(self, distribution: WindowDistribution, last: torch.Tensor) -> None:
        self.distribution, self.paths = distribution, last[..., None][..., :0]

    def first(self) -> torch.Tensor:
        """See `Growth`."""
        return self.distribution.next_log_probs(self.paths)[:, 0]

    def behind(self, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """See `Growth`."""
        self.paths = torch.cat([taken(self.paths, parents.clamp(min=0)), tokens[..., None]], dim=-1)
        return self.distribution.next_log_probs(self.paths)


def _likeliest(probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return probs.argmax(-1), probs


def _last(hidden_states: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
    return hidden_states[-1]


def _refuse_nan(distribution: WindowDistribution, last: torch.Tensor) -> None:
    first = distribution.next_log_probs(last[..., None][..., :0])
    if bool(distribution.leaf_logits.isnan().any() | first.isnan().any()):
        raise ValueError(
            "the logits of the drafting head are not numbers (NaN): its weights are damaged, or its dtype overflowed; "
            "reload the checkpoint with dtype=torch.float32, or decode with use_mtp=False"
        )
