"""The contracts of speculative decoding: what the loop and the target need of draft sessions and caches.

    DraftSession       the drafts of one call of `generate`
    Recorder           what reads along
    CacheView          what a session may read of the backbone's cache
    SpeculativeCache   a cache that knows a length per sequence

A class that inherits from `DraftSession` has its defaults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from .call.outputs import Speculation
    from .call.sequences import NewTokens, Sequences
    from .target.target import HiddenLayers, TargetOutput
    from .trees.contract import DraftTree, VerificationResult


def joined_layers(*wanted: HiddenLayers) -> HiddenLayers:
    """Return the hidden states that any of several sessions asks for; None where none asks."""
    lists = ([each] if isinstance(each, int) else each or [] for each in wanted)
    return sorted({layer for layers in lists for layer in layers}) or None


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
        reads_cache: Whether drafting reads the backbone's own cache.
        expected: Of look-ups: how many tokens of the newest draft they expect to be accepted, per open sequence; None
            for sessions that cannot say so before they draw.
    """

    num_tokens: int
    hidden_layers: HiddenLayers = None
    supports_confidence_threshold: bool = False
    lookahead: int = 0
    is_deterministic: bool = False
    reads_cache: bool = False
    expected: float | None = None

    def begin(self, outputs: Any, view: CacheView) -> None:
        """Take in the prompt: the backbone's output of the prefill, and a view of its cache."""

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """Draft after every sequence, with paths of at most `length` tokens; 0 asks for an empty draft."""
        raise NotImplementedError

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Take in a verified block: the backbone's outputs along the accepted path; the cache is rolled back."""

    def finish(self, statistics: Speculation) -> None:
        """Take in what was counted, once all sequences have ended."""

    def coverage(self, tokens: torch.Tensor) -> float | None:
        """Return the share of tokens [N] that could be drafted; None: every token could."""
        return None


class Recorder(Protocol):
    """Reads along what the calls with a drafter verify."""

    def session(self, session: DraftSession) -> DraftSession:
        """Return a session that drafts as `session`, and keeps what is verified."""
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

    def keep_last(self, fed: int, kept: NewTokens, path: torch.Tensor | None = None) -> None:
        """Keep the first `kept.counts[b]` of the last `fed` tokens of sequence b.

        Args:
            fed: Tokens of the last forward.
            kept: Tokens per sequence.
            path: [B, k + 1] int64, the places of a tree that come first; None: a chain.
        """
        ...

    def drop_padding(self, mask: torch.Tensor) -> None:
        """Roll back the last tokens that a mask [B, columns] calls padding."""
        ...

    def activate_past_recording(self) -> None:
        """Keep what several forwards add until the next rollback."""
        ...
