"""Drafters: they propose tokens and state the law that each was really drawn from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import CandidateGenerator

from ...modeling.heads.window_law import WindowLaw
from ...modeling.sampling import race
from ..processing import Processing
from ..targets import Target
from ..tokens import TokenRows


class Drafter(Protocol):
    """What the loop needs of a drafter.

    Attributes:
        num_tokens: The most tokens to draft.
    """

    num_tokens: int

    def begin(self, outputs: Any, target: Target) -> None:
        """Takes in the prompt: what the backbone made of it, and the backbone that holds it."""

    def propose(self, tokens: TokenRows, length: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts up to `length` tokens behind every row: ids [B, m] int64 and, unless greedy, their laws [B, m, v]."""

    def advance(self, outputs: Any, kept: list[int]) -> None:
        """Takes in a verified block, rolled back already: its outputs, and how many tokens each row keeps."""


class HeadDrafter(CandidateGenerator):
    """Drafts from the window law of a head, conditioned on the token that the last verification added.

    The law comes from the hidden state just before that token, so that one backbone call verifies a draft and yields
    the state for the next. Greedy drafts are argmaxes of the exact conditionals. Where the target is warped by
    processors that look at scores alone (temperature, top-k, top-p, ...), each conditional is warped in the same way
    before a token is drawn from it; otherwise the draft is an ancestral sample. The verifier is handed the laws that
    the tokens were really drawn from.

    It is a transformers `CandidateGenerator` and works in transformers' own assisted loop (batch 1) as well.

    Args:
        law: From hidden states [B, D] to the law of the next n tokens.
        window: n.
        generation_config: `do_sample`, `num_assistant_tokens` (None: n - 1) and `max_length` are read.
        logits_processor: The target's processors.

    Raises:
        ValueError: `num_assistant_tokens` below 1.
    """

    requires_model_outputs = True

    def __init__(
        self,
        law: Callable[[torch.Tensor], WindowLaw],
        window: int,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList | None = None,
    ) -> None:
        self.law = law
        self.num_tokens = _draft_length(generation_config.num_assistant_tokens, window - 1)
        self.do_sample = bool(generation_config.do_sample)
        self.max_length = generation_config.max_length
        self.processing = Processing(logits_processor or LogitsProcessorList())
        self.model_kwargs_overrides = {"output_hidden_states": generation_config.output_hidden_states or -1}
        self._after_prefill = self._unchecked = True
        self.hidden: torch.Tensor | None = None

    def begin(self, outputs: Any, target: Target) -> None:
        """Keeps the state before the first new token."""
        self.hidden = outputs.hidden_states[-1][:, -1]

    def propose(self, tokens: TokenRows, length: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts behind every row, see `draft`."""
        return self.draft(self.hidden, tokens.last(), length)

    def advance(self, outputs: Any, kept: list[int]) -> None:
        """Keeps the state before each row's last token; a row that has ended keeps any."""
        states = outputs.hidden_states[-1]
        if len(kept) == 1:
            self.hidden = states[:, max(kept[0] - 1, 0)]
            return
        rows = torch.arange(len(kept), device=states.device)
        self.hidden = states[rows, torch.tensor([max(count - 1, 0) for count in kept], device=states.device)]

    def draft(self, hidden: torch.Tensor, first: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts the tokens after `first`.

        Args:
            hidden: [B, D], the last hidden state before `first`.
            first: [B] int64, the token that the last verification added.
            length: Tokens to draft, at most `num_tokens`.

        Returns:
            draft [B, length] int64, and q [B, length, v], the probabilities each was drawn from (None when greedy).

        Raises:
            ValueError: The head's logits are not numbers (looked at once per call of `generate`).
        """
        law = self.law(hidden)
        if self._unchecked:
            _refuse_nan(law)
            self._unchecked = False
        law = law.condition(first)
        if not self.do_sample:
            return law.greedy(length), None
        if not self.processing.pointwise:
            return law.sample_with_laws(length)
        return law.draft(self._choose, length)

    def _choose(self, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = self.processing.warp(probs)
        return race(q), q

    def get_candidates(
        self,
        input_ids: torch.Tensor,
        model_outputs: Any = None,
        is_first_iteration: bool = True,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Candidates for transformers' assisted loop.

        Args:
            input_ids: [1, L], the sequence so far; its last token is the one to condition on.
            model_outputs: Output of the last forward, with `hidden_states[-1]` after the final norm.
            is_first_iteration: True before the prefill, which drafts nothing.
            n_last_matches: Drafts accepted by the last verification.
            **kwargs: What else the loop passes.

        Returns:
            Candidate ids [1, L + m] and log q [1, m, v] (None when greedy or nothing was drafted).
        """
        length = min(self.num_tokens, self.max_length - input_ids.shape[1] - 1)
        if is_first_iteration or length < 1:
            return input_ids, None
        states = model_outputs.hidden_states[-1]
        hidden = states[:, -1] if self._after_prefill else states[:, n_last_matches]
        self._after_prefill = False
        draft, q = self.draft(hidden.to(input_ids.device), input_ids[:, -1], length)
        return torch.cat([input_ids, draft], dim=1), None if q is None else q.log()


def _draft_length(asked: int | None, longest: int) -> int:
    if asked is not None and asked < 1:
        raise ValueError(f"num_assistant_tokens={asked} must be at least 1; to decode without drafts use use_mtp=False")
    return longest if asked is None else min(asked, longest)


def _refuse_nan(law: WindowLaw) -> None:
    if bool(law.leaf_logits.isnan().any()):
        raise ValueError(
            "the logits of the drafting head are not numbers (NaN): its weights are damaged, or its dtype overflowed; "
            "reload the checkpoint with dtype=torch.float32, or decode with use_mtp=False"
        )
