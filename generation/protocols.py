"""The contracts of speculative decoding between the loop, the target, draft sessions and caches.

    DraftSession       the drafts of one call of `generate`
    Recorder           reads what is verified
    CacheView          the part of the backbone's cache that a session may read
    SpeculativeCache   a cache that knows a length per sequence

A class that inherits from `DraftSession` has its defaults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:
    from .backbone.target import HiddenLayers, TargetOutput
    from .call.outputs import Speculation
    from .call.sequences import NewTokens, Sequences
    from .trees.contract import DraftTree, VerificationResult


def joined_layers(*wanted: HiddenLayers) -> HiddenLayers:
    """Return the hidden states that any of several sessions reads; None where none does."""
    lists = ([each] if isinstance(each, int) else each or [] for each in wanted)
    return sorted({layer for layers in lists for layer in layers}) or None


class CacheView(Protocol):
    """The part of the backbone's cache that sessions may read: its prompt, and after each cycle the new tokens.

    Attributes:
        has_columns: Whether all sequences have the prompt in the same columns, as in transformers' own caches;
            elsewhere there is a mask of the prompt, or None, and no counts.
        mask: [B, L] bool, the real tokens among the columns that the cache had after the prefill.
        is_padded: Whether any of them is padding.
        counts: [B] int64, real tokens per sequence now.
        new_tokens: How many tokens each sequence got in the last cycle, known to the host.
    """

    has_columns: bool
    mask: Tensor
    is_padded: bool
    counts: Tensor
    new_tokens: NewTokens


class DraftSession(Protocol):
    """Proposes tokens after every sequence of one call, with the distributions that they were drawn from.

    Attributes:
        num_tokens: The longest path of a draft.
        hidden_layers: Which hidden states of the backbone the session reads: an index, a list of them, or None.
        supports_confidence_threshold: Whether chains end by `CallOptions.threshold`.
        lookahead: 1 where the forward of one cycle makes the draft of the next, else 0.
        is_deterministic: Whether the output of a sequence depends on its seed and its prompt alone, so that neither
            the length limit nor other sequences may shorten a draft.
        reads_cache: Whether drafting reads the backbone's own cache.
        expected: Of look-ups: how many tokens of the newest draft they expect to be accepted, per open sequence; None
            for sessions that cannot tell before they draw.
    """

    num_tokens: int
    hidden_layers: HiddenLayers = None
    supports_confidence_threshold: bool = False
    lookahead: int = 0
    is_deterministic: bool = False
    reads_cache: bool = False
    expected: float | None = None

    def begin(self, outputs: Any, view: CacheView) -> None:
        """Take the backbone's output of the prefill, and a view of its cache."""

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """Draft after every sequence, with paths of at most `length` tokens; 0 requests an empty draft."""
        raise NotImplementedError

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Take the backbone's outputs along the accepted path of a verified block; the cache is rolled back."""

    def finish(self, statistics: Speculation) -> None:
        """Take the statistics of the call, once all sequences have ended."""

    def coverage(self, tokens: Tensor) -> float | None:
        """Return the share of tokens [N] that could be drafted; None: every token could."""
        return None


class Recorder(Protocol):
    """Records what the calls with a drafter verify."""

    def session(self, session: DraftSession) -> DraftSession:
        """Return a session that drafts as `session`, and records what is verified."""
        ...


@runtime_checkable
class SpeculativeCache(Protocol):
    """A cache that knows the length of every sequence, so that a rollback moves nothing.

    The contract is provisional. One that has `takes_trees = True` belongs to a model whose forward takes a `draft_tree`
    (`DraftTree`), and its `keep_last` the accepted path.
    """

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns of the longest sequence."""
        ...

    def keep_last(self, fed: int, kept: NewTokens, path: Tensor | None = None) -> None:
        """Keep the first `kept.counts[b]` of the last `fed` tokens of sequence b.

        Args:
            fed: Tokens of the last forward.
            kept: Tokens per sequence.
            path: [B, k + 1] int64, the positions of a tree that come first; None: a chain.
        """
        ...

    def drop_padding(self, mask: Tensor) -> None:
        """Roll back the last tokens that are padding in a mask [B, columns]."""
        ...

    def activate_past_recording(self) -> None:
        """Keep the tokens of several forwards until the next rollback."""
        ...
