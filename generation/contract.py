r"""What drafters, the backbone, verification and the loop share: trees of drafts, their results, sessions and caches.

The backbone reads a block: the bonus token b, which the last verification added, and then the m nodes of a tree. Node i
has index i + 1 in the block; parents come before their children, so that indices rise along a path:

                  b             index 0                           tokens      the  a cat dog man
                /   \                                             parents      -1 -1   0   0   1
             the     a          indices 1, 2 (nodes 0, 1)         positions  0  1  1   2   2   2  (b's first)
            /   \     \
          cat   dog   man       indices 3, 4, 5 (nodes 2, 3, 4)

A chain is the tree whose nodes have one child each. No tree and no result makes the host wait for an accelerator.

Fixed shapes. On a cache of a fixed size (`cache_implementation="static"`, on a CPU, too) a cycle can be recorded and
replayed, as a CUDA graph is: then only what is done on tensors is done again. Where `CacheView.is_fixed`,

    propose(tokens, length)   gets the same `length` in every cycle (but for shorter drafts at the end, which nobody
                              replays), and returns a draft of constant width; `num_nodes` [B] says what of it is real
    tokens                    has `ids` [B, capacity], `ends` [B], `last()`, `newest(count)` and `at(columns)` on the
                              device; what the host knows of lengths lags behind
    new_tokens.on_device      [B] is known, and nothing of it to the host
    advance(outputs, result)  gets the outputs of the whole block, or of the whole path of a tree, [B, k + 1, ...], and
                              keeps of them what `new_tokens.on_device` counts; the rest is computed, and masked

and what lasts from one cycle to the next lies in tensors of `CacheView.held`. No operation of a cycle may depend on a
number of the host that changes, nor wait for the device, nor may a cycle leave attributes other than it found them.
That holds for the first cycle of a call, too, for which a recording of an earlier call stands in: what the prompt left
is put into these tensors in `begin`, or else `first_differs`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig

from .call.sequences import NewTokens, Sequences, Speculation
from .tensors.masks import cached_arange, made_once

HiddenLayers = int | list[int] | bool | None  # whose states a session reads: of one layer, of several, or of none
_TAKES_INDICES = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
States = tuple[Tensor | None, ...]  # hidden states per layer [B, F, D]; None for layers that were not requested


@dataclass(eq=False)
class DraftTree:
    """Drafted tokens after the bonus token, and the distributions that they were really drawn from.

    Attributes:
        tokens: [B, m] int64; siblings are tried in the order of their nodes.
        parents: [B, m] int64 node numbers, smaller than their children's; -1 is the bonus token.
        probs: [B, m + 1, V] probabilities that the children of each index of the block were drawn from; rows without
            children are never read, and a chain leaves the last one out. None: the tokens are deterministic given those
            before them (argmax, top-k, n-grams).
        replacement: Siblings were drawn independently; otherwise without replacement, in the order of their nodes.
        depth: The longest path that the tree could have, fixed before drafting; at most m.
        num_nodes: [B] real nodes of every sequence, if not all of them; the others are never accepted.
        deterministic: [B, m] bool, nodes of a drawn tree that were not drawn: their tokens are deterministic given
            those before their parents' children, precede the drawn ones among these, and are taken out of `probs` for
            them. Whether there is such a node must not depend on draws among its siblings. None: all nodes were drawn.
        columns: [v] int64, the tokens that the columns of `probs` [B, m + 1, v] stand for, of a drawn tree; all others
            have no probability. None: every token has a column.
        auxiliary: Positions after the nodes in the block; only their drafter reads them.
        is_chain: Whether node i is the parent of node i + 1 everywhere, as `chain` makes it.
        numbers: [B], set by the loop: NaN or +inf where a node was chosen from what is no number; None: not known.
    """

    tokens: Tensor
    parents: Tensor
    probs: Tensor | None = None
    replacement: bool = False
    depth: int = sys.maxsize
    num_nodes: Tensor | None = None
    deterministic: Tensor | None = None
    columns: Tensor | None = None
    auxiliary: Any = None
    is_chain: bool = False
    numbers: Tensor | None = None

    def __post_init__(self) -> None:
        self.depth = min(self.depth, self.tokens.shape[1])

    @classmethod
    def chain(
        cls, draft: Tensor, q: Tensor | None = None, num_nodes: Tensor | None = None, auxiliary: Any = None
    ) -> DraftTree:
        """Return a tree of one path: tokens [B, m], and the probabilities [B, m, V] that they were drawn from."""
        parents = _chain_parents(draft.shape[1], draft.device).expand(draft.shape)  # [B, m]
        return cls(draft, parents, q, num_nodes=num_nodes, auxiliary=auxiliary, is_chain=True)

    @property
    def is_empty(self) -> bool:
        """Whether nothing follows b in the block, neither nodes nor auxiliary positions."""
        return not self.tokens.shape[1] and self.auxiliary is None

    def positions(self) -> Tensor:
        """Return the distance of every index from b, [B, m + 1] int64."""
        if self.is_chain:
            return cached_arange(self.tokens.shape[1] + 1, self.tokens.device).expand(len(self.tokens), -1)
        return self.mask().sum(-1) - 1

    def mask(self) -> Tensor:
        """Return what every index attends to, itself and its ancestors: [B, m + 1, m + 1] bool, column 0 True."""
        return self._ancestors

    def paths(self) -> Tensor:
        """Return the indices from b to every index, [B, m + 1, depth + 1]; its own is repeated after."""
        return path_columns(self.mask(), self.depth)

    def real(self) -> Tensor | None:
        """Return which nodes count, [B, m] bool; None: all of them."""
        if self.num_nodes is None:
            return None
        return cached_arange(self.tokens.shape[1], self.tokens.device) < self.num_nodes[:, None]

    @cached_property
    def _ancestors(self) -> Tensor:
        """`mask`, by jumps that double: after j of them an index has its nearest 2^j - 1 ancestors."""
        batch, size = len(self.tokens), self.tokens.shape[1] + 1
        if self.is_chain:
            return _triangle(size, self.tokens.device).expand(batch, size, size)
        known = torch.eye(size, dtype=torch.bool, device=self.tokens.device).expand(batch, size, size)
        jump = torch.nn.functional.pad(self.parents + 1, (1, 0))  # [B, m + 1], an index's ancestor 2^j levels up
        for _ in range(self.depth.bit_length()):
            known = known | known.gather(1, jump[..., None].expand_as(known))  # and what the ancestor 2^j up knows
            jump = jump.gather(1, jump)  # 2^(j + 1) levels up; b is its own ancestor
        return known


@dataclass(eq=False)
class VerificationResult:
    """The accepted part of a tree, and the token that verification adds; k is `DraftTree.depth`.

    Attributes:
        num_accepted: [B] int64 accepted nodes.
        tokens: [B, k + 1] int64: the accepted drafts, then the added token; the rest is arbitrary.
        tree_path: [B, k + 1] int64, `path` of a tree; None: the first nodes of a chain are accepted.
        check: [B], NaN where a distribution of the target on the path was none; None: its rows tell (`Verifier.rows`).
    """

    num_accepted: Tensor
    tokens: Tensor
    tree_path: Tensor | None = None
    check: Tensor | None = None

    @cached_property
    def path(self) -> Tensor:
        """Indices of the accepted path in the block, [B, k + 1] int64: b's is 0, and the last is repeated after."""
        if self.tree_path is not None:
            return self.tree_path
        return torch.minimum(cached_arange(self.tokens.shape[1], self.tokens.device), self.num_accepted[:, None])

    @property
    def nodes(self) -> Tensor:
        """The accepted nodes in the order of their path, [B, k] int64, and -1 after them."""
        is_after = cached_arange(self.tokens.shape[1], self.tokens.device)[:-1] >= self.num_accepted[:, None]  # [B, k]
        return (self.path[:, 1:] - 1).masked_fill(is_after, -1)

    @property
    def added(self) -> Tensor:
        """The added token, [B] int64."""
        return self.tokens.gather(1, self.num_accepted[:, None])[:, 0]

    def first(self, counts: Tensor) -> VerificationResult:
        """Return the result with at most `counts` [B] of the tokens; the last of these counts as the added one."""
        accepted = torch.minimum(self.num_accepted, (counts - 1).clamp(min=0))  # [B]
        index = torch.minimum(cached_arange(self.tokens.shape[1], self.tokens.device), accepted[:, None])  # [B, k + 1]
        path = None if self.tree_path is None else self.tree_path.gather(1, index)
        return VerificationResult(accepted, self.tokens, path, self.check)


@dataclass
class TargetOutput:
    """The output of one backbone call for a block."""

    logits: Tensor  # [B, F, v] of the bonus token and the nodes
    hidden_states: States | None = None  # those that were requested
    auxiliary: Tensor | None = None  # [B, A, v] logits of the auxiliary positions
    auxiliary_states: States | None = None
    block: tuple[Tensor, Tensor] | None = None  # ids [B, m + 1] and logits of all positions, also `along` a path

    def state(self, layer: int = -1) -> Tensor:
        """Return the hidden states [B, F, D] of a layer that the session reads."""
        state = None if self.hidden_states is None else self.hidden_states[layer]
        if state is None:
            raise ValueError(f"hidden_layers: the states of layer {layer} were not requested")
        return state

    def first(self, count: int) -> States:
        """Return the hidden states of the first `count` positions; None for layers that were not requested."""
        return each_state(self.hidden_states, lambda state: state[:, :count]) or ()

    def along(self, result: VerificationResult, tree: DraftTree) -> TargetOutput:
        """Return the output along the accepted path only, [B, k + 1, ...]; a chain's path is its beginning."""
        if tree.is_chain:
            return self

        def along_path(values: Tensor) -> Tensor:
            return taken(values, result.path.to(values.device))

        states = each_state(self.hidden_states, along_path)
        return TargetOutput(along_path(self.logits), states, self.auxiliary, self.auxiliary_states, self.block)


class PrefillOutput(Protocol):
    """The backbone's output for the prompt: hidden states [B, L, D] by layer, and what else its class returns."""

    hidden_states: Any

    def get(self, name: str, /) -> Tensor | None:
        """Return another output by name."""
        ...


class CacheView(Protocol):
    """The part of the backbone's cache that sessions may read: its prompt, and after each cycle the new tokens.

    Attributes:
        has_columns: Whether all sequences have the prompt in the same columns, as in transformers' own caches;
            elsewhere there is a mask of the prompt, or None, and no counts.
        mask: [B, L] bool, the real tokens among the columns that the cache had after the prefill.
        is_padded: Whether any of them is padding.
        counts: [B] int64, real tokens per sequence now.
        new_tokens: How many tokens each sequence got in the last cycle, known to the host where shapes are not fixed.
        is_fixed: Whether shapes are fixed; see the file.
        takes_trees: Whether drafts may branch.
    """

    is_fixed: bool = False
    takes_trees: bool = False
    has_columns: bool
    mask: Tensor
    is_padded: bool
    counts: Tensor
    new_tokens: NewTokens

    def held(self, name: str, value: Tensor) -> Tensor:
        """Return a value to keep until the next cycle, where shapes are fixed in a tensor that keeps its address.

        It does so for all cycles, and for later calls of the same sizes, of all values of one name (such as
        `"eagle.keys.0"`), shape and dtype. No value is a view of what is held, but for the very tensor.
        """
        return value

    def fixed_layout(self, size: int, limit: int, span: int, name: str) -> Any:
        """Return the layout of a drafter's cache of a fixed size (`cache.drafter_layout`); None: shapes change."""
        return None


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
        takes_fixed: Whether it can draft in fixed shapes; see the file. Others never meet a view that `is_fixed`.
        priors: By kind of drafts, which acceptance to expect of a first token and of later ones, before any is known.
        reads_host: Whether `propose` then reads what the host alone has, such as a trie and `tokens.newest_on_host`: it
            is never replayed, and the host knows the tokens before it is called.
        first_differs: Whether the first draft of a call is made in other shapes than all others.
    """

    num_tokens: int
    hidden_layers: HiddenLayers = None
    supports_confidence_threshold: bool = False
    lookahead: int = 0
    is_deterministic: bool = False
    reads_cache: bool = False
    expected: float | None = None
    takes_fixed: bool = False
    priors: Sequence[tuple[float, float]] = ((0.6, 0.7),)
    reads_host: bool = False
    first_differs: bool = False

    def begin(self, outputs: PrefillOutput, view: CacheView) -> None:
        """Take the backbone's output of the prefill, and a view of its cache."""

    def kinds(self, tokens: Sequences) -> list[int]:
        """Return which of several kinds of drafts every sequence gets next, by its text alone; -1: none, or it ended.

        Each kind has an acceptance of its own, by which the length of drafts is chosen (`priors`).
        """
        return [-1 if done else 0 for done in tokens.done]

    def positions(self, length: int) -> int:
        """Return how many positions the backbone reads of each sequence to verify drafts of a length."""
        return 1 + length

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


class NoDrafts(DraftSession):
    """Replaces a session whose drafts have ended; its draft is always the tree `empty`."""

    num_tokens = 0

    def __init__(self, empty: DraftTree) -> None:
        self.empty = empty

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        return self.empty


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
        """Keep the first `kept.counts[b]` of the last `fed` tokens of sequence b, or of their `path` [B, k + 1]."""
        ...

    def drop_padding(self, mask: Tensor) -> None:
        """Roll back the last tokens that are padding in a mask [B, columns]."""
        ...

    def activate_past_recording(self) -> None:
        """Keep the tokens of several forwards until the next rollback."""
        ...


def requested_states(wanted: HiddenLayers, *configs: PreTrainedConfig) -> bool | int | list[int]:
    """Return `output_hidden_states` as a decoder of transformers reads it; None: what the first of `configs` requests.

    The number 0 alone would be taken for False, and becomes a list. Before transformers 5.23, indices could not be
    negative: there, all hidden states are returned in place of some.
    """
    if wanted is None:
        wanted = next((config.output_hidden_states for config in configs if config.output_hidden_states), False)
    if isinstance(wanted, bool):
        return wanted
    if not _TAKES_INDICES:
        return True
    return [wanted] if isinstance(wanted, int) else wanted


def joined_layers(*wanted: HiddenLayers) -> HiddenLayers:
    """Return the hidden states that any of several sessions reads; None where none does."""
    lists = ([each] if isinstance(each, int) else each or [] for each in wanted)
    return sorted({layer for layers in lists for layer in layers}) or None


def each_state(states: States | None, change: Callable[[Tensor], Tensor]) -> States | None:
    """Return hidden states of layers after a change; None for layers that were not requested, or for all of them."""
    return states and tuple(None if state is None else change(state) for state in states)


def follow(tree: DraftTree, picks: Tensor) -> VerificationResult:
    """Follow the target's picks from b down, as long as there is a child with the pick, and add the pick at the end.

    Picks [B, m + 1] after every index are the argmax of the target's scores, or draws that the draft did not depend on,
    or that it anticipates (coupled uniforms).
    """
    if not tree.tokens.shape[1]:
        return VerificationResult(torch.zeros_like(picks[:, 0]), picks)
    agrees = tree.tokens == (picks[:, :-1] if tree.is_chain else picks.gather(1, tree.parents + 1))  # [B, m]
    if (real := tree.real()) is not None:
        agrees = agrees & real
    if tree.is_chain:
        return VerificationResult(agrees.cumprod(1, dtype=torch.long).sum(1), picks)
    reached = descend(tree, agrees)  # [B, m + 1]
    columns = path_columns(reached, tree.depth)  # [B, k + 1]
    return VerificationResult(reached.sum(1) - 1, picks.gather(1, columns), columns)


def elder_siblings(tree: DraftTree) -> Tensor:
    """Return whether node j is an elder sibling of node i, [B, m, m] bool."""
    nodes = cached_arange(tree.tokens.shape[1], tree.tokens.device)  # [m]
    return (tree.parents[:, :, None] == tree.parents[:, None]) & (nodes < nodes[:, None])  # [B, m, m]


def descend(tree: DraftTree, wanted: Tensor) -> Tensor:
    """Return the indices [B, m + 1] bool on the way down to the first wanted child of each, b's among them."""
    taken = wanted & ~(elder_siblings(tree) & wanted[:, None]).any(-1)  # [B, m]
    taken = torch.nn.functional.pad(taken, (1, 0), value=True)  # [B, m + 1], b is always taken
    return (taken[:, None] | ~tree.mask()).all(-1)  # an index counts where all its ancestors are taken


def path_columns(members: Tensor, depth: int) -> Tensor:
    """Return the indices [..., depth + 1] of the members [..., m + 1] bool of paths in order; the last is repeated."""
    index = cached_arange(members.shape[-1], members.device)  # [m + 1]
    last = (members * index).amax(-1, keepdim=True)  # [..., 1]
    return torch.where(members, index, last).sort(-1).values[..., : depth + 1]  # what is not on the path sorts last


def taken(states: Tensor, index: Tensor) -> Tensor:
    """Return entries [B, k, w] of states [B, n, w] at an index [B, k]."""
    return states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))  # [B, k, w]


@made_once
def _chain_parents(length: int, device: torch.device) -> Tensor:
    return torch.arange(-1, length - 1, device=device)  # [m]


@made_once
def _triangle(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()  # [m + 1, m + 1]
