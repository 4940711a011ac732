"""What makes drafters for calls of `generate`, and what most of them share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from .call.options import CallOptions, DraftOptions
from .call.schedule import AdaptiveSchedule, ConstantSchedule, DraftSchedule
from .call.sequences import Sequences
from .target.target import HiddenLayers, TargetOutput
from .trees.choice import DEEPEST
from .trees.contract import DraftTree, VerificationResult
from .trees.growth import tree_options
from .verification.verifiers import GreedyVerifier, SampledVerifier, Verifier

logger = logging.get_logger(__name__)

_TREE_CHOICES: WeakKeyDictionary[Any, dict[bool, dict[str, int]]] = WeakKeyDictionary()
"""By drafter: a copy or a pickle chooses its own trees, for another backbone or another machine may be below it."""


_SCHEDULES: WeakKeyDictionary[Any, dict[tuple[Any, ...], AdaptiveSchedule]] = WeakKeyDictionary()
"""By drafter, and by what decides over a cycle's cost: what adaptive calls have learned."""


class Drafter(Protocol):
    """What makes drafters for calls of `generate`: a model that drafts for itself, or something attached to one."""

    rules: tuple[str, ...]
    """Names of the rules that `verification` may choose; the first is the default."""

    def longest_draft(self) -> int | None:
        """The most tokens that a draft may have; None: any number."""

    def default_draft(self) -> int:
        """Tokens to draft where nobody asks for a number."""

    def runner(self, backbone: Any) -> Any:
        """What runs the forwards of a call: on tokens it must be the backbone."""

    def obstacle(self, config: GenerationConfig, model_kwargs: dict[str, Any]) -> str | None:
        """What in this call rules out its drafts, in the user's words."""

    def sampling_defaults(self, sources: tuple[Any, ...]) -> dict[str, Any]:
        """Fields of the GenerationConfig that take these values where no source sets them."""

    def prepare_call(self, options: CallOptions, config: GenerationConfig) -> None:
        """Checks the options that only this kind knows, and fills in defaults."""

    def start(self, options: DraftOptions) -> DraftSession:
        """A drafter for one call."""

    def make_verifier(self, options: DraftOptions, session: DraftSession) -> Verifier:
        """How the drafts of one call are verified."""


class DrafterMixin:
    """What most speculators share: token and block verification, greedy and sampled."""

    rules: tuple[str, ...] = ("block", "token")
    drafts_trees = False
    """Whether it takes `draft_tree`."""

    def longest_draft(self) -> int | None:
        """window - 1: the first token of a window is the ordinary next token."""
        return max(self.window - 1, 0)

    def default_draft(self) -> int:
        """As many as a draft may have."""
        return self.longest_draft()

    def runner(self, backbone: Any) -> Any:
        """The backbone itself."""
        return backbone

    def obstacle(self, config: GenerationConfig, model_kwargs: dict[str, Any]) -> str | None:
        """Nothing by itself."""
        return None

    def sampling_defaults(self, sources: tuple[Any, ...]) -> dict[str, Any]:
        """transformers' own."""
        return {}

    def prepare_call(self, options: CallOptions, config: GenerationConfig) -> None:
        """Refuses options of other kinds of drafters, and completes a tree, whose longest path is the draft's length.

        Raises:
            ValueError: An option that this kind does not have, or a tree that cannot be.
        """
        for name in options.extra:
            kind = "sequential modules" if name == "draft_vocabulary" else "parallel token prediction"
            raise ValueError(f"{name}= is an option of {kind}, and {type(self).__name__} has none")
        if options.draft_tree is None:
            return
        if not self.drafts_trees:
            raise ValueError(
                f"draft_tree={options.draft_tree!r}: {type(self).__name__} drafts chains only; leave it out"
            )
        self.prepare_tree(options, config)

    @property
    def tree_choices(self) -> dict[bool, dict[str, int]]:
        """The trees that `draft_tree="auto"` chose, of greedy (False) and of sampled text; empty it to choose anew."""
        return _TREE_CHOICES.setdefault(self, {})

    @property
    def schedules(self) -> dict[tuple[Any, ...], AdaptiveSchedule]:
        """What calls with `num_assistant_tokens_schedule="adaptive"` have learned; empty it to begin anew."""
        return _SCHEDULES.setdefault(self, {})

    def prepare_tree(self, options: CallOptions, config: GenerationConfig) -> None:
        """Checks and completes `draft_tree`; `"auto"` is what was chosen before, or stays until the prompt is known.

        Raises:
            ValueError: A tree that cannot be, or that is deeper than the drafter.
        """
        if self.longest_draft() == 0:
            raise ValueError(
                f"draft_tree={options.draft_tree!r}: this {type(self).__name__} drafts nothing; leave it out"
            )
        if options.draft_tree == "auto":
            options.draft_tree = self.tree_choices.get(bool(config.do_sample), "auto")
        if options.draft_tree == "auto":
            options.num_assistant_tokens = options.num_assistant_tokens or self.longest_draft() or DEEPEST
            return
        options.draft_tree, longest = tree_options(options.draft_tree, self.longest_draft())
        options.num_assistant_tokens = min(options.num_assistant_tokens or longest, longest)

    def make_verifier(self, options: DraftOptions, session: DraftSession) -> Verifier:
        """Greedy where the call is, else the rule that was asked for."""
        return SampledVerifier(options.verification) if options.do_sample else GreedyVerifier()


@contextmanager
def schedule_of(drafter: DrafterMixin, session: DraftSession, options: DraftOptions) -> Iterator[DraftSchedule]:
    """How many tokens to draft in one call.

    An adaptive length begins with what calls of the same kind have learned: short calls would otherwise pay for trials
    of lengths that are known not to pay. Every call has a copy of its own, and what it learned is kept when it ends
    well, so that calls in several threads do not meet.
    """
    lead = getattr(session, "lead", 0)
    if options.schedule != "adaptive":
        yield ConstantSchedule(session.num_tokens)
        return
    processors = tuple(type(processor).__name__ for processor in options.processing.processors)
    kind = (len(options.prompt), options.do_sample, session.num_tokens, lead, str(options.draft_tree), processors)
    known = drafter.schedules.get(kind)
    schedule = AdaptiveSchedule(session.num_tokens, lead) if known is None else known.resumed()
    yield schedule
    drafter.schedules[kind] = schedule


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
