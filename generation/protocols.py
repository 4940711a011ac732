"""The contracts of speculative decoding: what the entry, the loop and the target need of drafters and caches.

    Drafter            what a user holds: an attached head, or a model that drafts for itself
    DraftSession       the drafts of one call of `generate`
    CacheView          what a session may read of the backbone's cache
    SpeculativeCache   a cache that knows a length per sequence

A class that inherits from `DraftSession` has its defaults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from transformers import GenerationConfig, PreTrainedModel

if TYPE_CHECKING:
    from .call.options import CallOptions, DraftOptions
    from .call.schedule import AdaptiveSchedule
    from .call.sequences import NewTokens, Sequences
    from .target.target import HiddenLayers, TargetOutput
    from .trees.contract import DraftTree, VerificationResult
    from .verification.verifiers import Verifier


class CacheView(Protocol):
    """What sessions may know of the backbone's cache: its prompt, and after each cycle what was kept.

    Attributes:
        has_columns: Whether all sequences have the prompt in the same columns, as in transformers' own caches;
            elsewhere there is a mask of the prompt, or None, and no counts.
        mask: [B, L] bool, the real tokens among the columns that the cache had after the prefill.
        is_padded: Whether any of them is none.
        counts: [B] int64, real tokens per sequence now.
        new_tokens: How many tokens each sequence got in the last cycle, known to the host.
    """

    has_columns: bool
    mask: torch.Tensor
    is_padded: bool
    counts: torch.Tensor
    new_tokens: NewTokens


class DraftSession(Protocol):
    """Proposes tokens after every sequence of one call, with the distributions that they were drawn from.

    Attributes:
        num_tokens: The longest path of a draft.
        hidden_layers: Which hidden states of the backbone the session reads: an index, a list of them, or None.
        supports_confidence_threshold: Whether chains end as `CallOptions.threshold` asks for.
        lookahead: 1 where the forward of one cycle makes the draft of the next, else 0.
        is_deterministic: Whether the output of a sequence depends on its seed and its prompt alone, so that neither
            the room that is left nor other sequences may shorten a draft.
    """

    num_tokens: int
    hidden_layers: HiddenLayers = None
    supports_confidence_threshold: bool = False
    lookahead: int = 0
    is_deterministic: bool = False

    def begin(self, outputs: Any, view: CacheView) -> None:
        """Take in the prompt: the backbone's output of the prefill, and a view of its cache."""

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """Draft after every sequence, with paths of at most `length` tokens; 0 asks for an empty draft."""
        raise NotImplementedError

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Take in a verified block: the backbone's outputs along the accepted path; the cache is rolled back."""

    def coverage(self, tokens: torch.Tensor) -> float | None:
        """Return the share of tokens [N] that could be drafted; None: every token could."""
        return None


class Drafter(Protocol):
    """Makes the draft sessions of calls of `generate`; `attach.BaseDrafter` has defaults for most methods.

    Attributes:
        rules: Names that `verification` may choose; the first is the default.
        tree_choices: The trees that `draft_tree="auto"` chose, of greedy (False) and of sampled calls.
    """

    rules: tuple[str, ...]

    @property
    def tree_choices(self) -> dict[bool, dict[str, int]]:
        """See the class."""
        ...

    def longest_draft(self) -> int | None:
        """Return the most tokens that a draft may have; None: any number."""
        ...

    def default_draft(self) -> int:
        """Return how many tokens are drafted where nobody asks for a number."""
        ...

    def runner(self, backbone: PreTrainedModel) -> PreTrainedModel:
        """Return what runs the forwards of a call: on tokens it must be the backbone."""
        ...

    def obstacle(self, config: GenerationConfig, model_kwargs: dict[str, Any]) -> str | None:
        """Return what in a call rules out these drafts, in the user's words; None: nothing."""
        ...

    def sampling_defaults(self, sources: tuple[Any, ...]) -> dict[str, Any]:
        """Return fields of the GenerationConfig that take these values where no source sets them."""
        ...

    def prepare_call(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """Validate the options that only this kind of drafter knows, and return them with its defaults."""
        ...

    def prepare_tree(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """Validate and complete `draft_tree`."""
        ...

    def start(self, options: DraftOptions) -> DraftSession:
        """Return the drafts of one call."""
        ...

    def make_verifier(self, options: DraftOptions, session: DraftSession) -> Verifier:
        """Return what verifies the drafts of one call."""
        ...

    def schedule_of(self, session: DraftSession, options: DraftOptions) -> AdaptiveSchedule:
        """Return an adaptive schedule that begins with what earlier calls of the same kind learned."""
        ...

    def remember(self, schedule: AdaptiveSchedule, session: DraftSession, options: DraftOptions) -> None:
        """Keep what a call learned for later calls of the same kind."""
        ...


@runtime_checkable
class SpeculativeCache(Protocol):
    """A cache that knows the length of every sequence, so that a rollback moves nothing.

    The contract is provisional.
    """

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns of the longest sequence."""
        ...

    def keep_last(self, fed: int, kept: NewTokens) -> None:
        """Keep the first `kept.counts[b]` of the last `fed` tokens of sequence b."""
        ...

    def drop_padding(self, mask: torch.Tensor) -> None:
        """Roll back the last tokens that a mask [B, columns] calls padding."""
        ...

    def activate_past_recording(self) -> None:
        """Keep what several forwards add until the next rollback."""
        ...
