"""What the decoding loop needs of a drafter, and what a drafter is told of its call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.utils import logging

from ...modeling.sampling import draw
from ..contract import DraftTree, VerificationResult
from ..options import CallOptions
from ..processing import Processing
from ..targets import HiddenLayers, TargetOutput
from ..tokens import Sequences

logger = logging.get_logger(__name__)


class View(Protocol):
    """The part of the backbone's cache that drafters may look at, after each cycle's rollback.

    Attributes:
        mask: [B, W] bool, the real tokens among the columns of the cache.
        counts: [B] int64, real tokens per row.
        is_padded: Whether any column is no real token.
        shifts: [B] int64, by how many columns each row was moved to the right; None where none was.
        kept: How many tokens each row kept (`NewTokens`), known to the host.
    """

    mask: torch.Tensor
    counts: torch.Tensor
    is_padded: bool
    shifts: torch.Tensor | None
    kept: Any


class DraftSession(Protocol):
    """Proposes tokens behind every row, and says which distributions they were drawn from.

    Attributes:
        num_tokens: The longest path of a draft.
        hidden_layers: Which hidden states of the backbone it reads: an index, a list of them, or None.

    A drafter may say more of itself:

    - `supports_confidence_threshold = True`: its chains end as `CallOptions.threshold` asks for;
    - `lead = 1`: the forward of one cycle makes the draft of the next (`AdaptiveSchedule`);
    - `is_deterministic = True`: see `ParallelSession`.
    """

    num_tokens: int
    hidden_layers: HiddenLayers

    def begin(self, outputs: Any, view: View) -> None:
        """Takes in the prompt: the backbone's output of the prefill, and its cache as drafters may see it."""

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """Drafts behind every row, with paths of at most `length` tokens; 0 asks for an empty draft."""

    def advance(self, fed: TargetOutput, result: VerificationResult) -> None:
        """Takes in a verified block: what the backbone gave along the kept path; the cache is rolled back already."""


@dataclass
class DraftOptions:
    """What the drafter and the rule of one call are told.

    Attributes:
        backbone: The model whose tokens count.
        drafts: False: nothing is to be drafted, tokens are only to be picked.
        do_sample: Whether tokens are drawn.
        num_tokens: The longest path of a draft.
        verification: Name of the rule; None for the default.
        threshold: See `CallOptions`.
        schedule: See `CallOptions`.
        draft_tree: Complete options of a tree of drafts (`growth.tree_options`); None for a chain.
        processing: The target's logits processors.
        max_length: Tokens of the longest text, prompt included.
        prompt: [B, L] int64.
        sampling: The target's `temperature`, `top_k` and `top_p`.
        extra: See `CallOptions`.
    """

    backbone: PreTrainedModel
    drafts: bool
    do_sample: bool
    num_tokens: int
    verification: str | None
    threshold: float
    schedule: str
    draft_tree: dict[str, Any] | None
    processing: Processing
    max_length: int
    prompt: torch.Tensor
    sampling: dict[str, float | None]
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_call(
        cls,
        options: CallOptions,
        backbone: PreTrainedModel,
        drafts: bool,
        config: GenerationConfig,
        processors: LogitsProcessorList,
        prompt: torch.Tensor,
    ) -> DraftOptions:
        """Puts together what was asked and what transformers prepared."""
        pad, vocabulary = getattr(config, "_pad_token_tensor", None), backbone.config.get_text_config().vocab_size
        pad = 0 if pad is None else int(pad)
        return cls(
            backbone=backbone,
            drafts=drafts,
            do_sample=bool(config.do_sample),
            num_tokens=options.num_assistant_tokens,
            verification=options.verification,
            threshold=options.threshold,
            schedule=options.schedule,
            draft_tree=options.draft_tree,
            processing=Processing(processors, pad if 0 <= pad < vocabulary else 0),
            max_length=config.max_length,
            prompt=prompt,
            sampling={name: getattr(config, name) for name in ("temperature", "top_k", "top_p")},
            extra=options.extra,
        )

    def choose(
        self, logits: torch.Tensor, draft_ids: torch.Tensor | None = None, vocab_size: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A token of a chain, and the distribution that it was drawn from.

        Args:
            logits: [B, v] of the drafter.
            draft_ids: See `draft_probs`.
            vocab_size: See `draft_probs`.

        Returns:
            Tokens [B], and distributions [B, V] in float32 at least: warped where drawn, raw where greedy with a
            threshold, None where greedy without one.
        """
        if not self.do_sample and not self.threshold:
            token = logits.argmax(-1)
            return token if draft_ids is None else draft_ids[token], None
        distribution = draft_probs(logits, self, draft_ids, vocab_size)
        return (draw(distribution) if self.do_sample else distribution.argmax(-1)), distribution

    def is_unsure(self, token: torch.Tensor, distribution: torch.Tensor | None) -> bool:
        """Whether all rows gave their tokens [B] less than the threshold; then a draft ends.

        Asked of tokens that are drafted in any case, so that the drafts kept still follow their distributions.
        """
        return self.threshold > 0 and bool((distribution.gather(-1, token[:, None]) < self.threshold).all())

    def sure_length(self, draft: torch.Tensor, probs: torch.Tensor) -> int:
        """How many tokens of whole drafts [B, m] to verify: the first of which no row was sure is the last.

        The host waits for it, once for all tokens. What is left follows the distributions [B, m, V], for a draft ends
        where its own tokens say so, whatever would have come behind them.
        """
        chances = probs.gather(-1, draft[..., None])[..., 0]
        *unsure, _ = (chances < self.threshold).all(0).tolist()
        return [*unsure, True].index(True) + 1


def warn_of_threshold(options: DraftOptions, session: DraftSession, name: str) -> None:
    """Warns where a threshold was asked for and drafts do not end as it says.

    Args:
        options: Of the call.
        drafter: Of the call.
        name: Of what made the drafter.
    """
    is_tree = options.draft_tree is not None
    if (
        options.drafts
        and options.threshold
        and (is_tree or not getattr(session, "supports_confidence_threshold", False))
    ):
        logger.warning_once(
            f"assistant_confidence_threshold={options.threshold} is not read by {'trees' if is_tree else 'drafts'} of "
            f"{name}: they are verified whole."
        )


def draft_probs(
    logits: torch.Tensor, options: DraftOptions, draft_ids: torch.Tensor | None = None, vocab_size: int = 0
) -> torch.Tensor:
    """Probabilities over the whole vocabulary [..., V] from a drafter's logits [..., v], warped where sampled.

    Args:
        logits: [..., v].
        options: Of the call.
        draft_ids: [v] int64, the token ids that columns of logits stand for; None: every token, in order.
        vocab_size: V; not read where every token has a column.
    """
    distribution = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    is_part = draft_ids is not None and distribution.shape[-1] < vocab_size
    if is_part:
        distribution = distribution.new_zeros(*distribution.shape[:-1], vocab_size).index_copy_(
            -1, draft_ids, distribution
        )
    if not options.do_sample:
        return distribution
    warped = options.processing.warp(distribution)
    if not is_part:
        return warped
    # processors may have left none of its tokens: any distribution will do then
    return torch.where(warped.isnan().any(-1, keepdim=True), distribution, warped)
