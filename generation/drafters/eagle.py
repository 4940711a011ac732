"""Drafts of an EAGLE head: chains, trees of likeliest paths, trees of draws, trees of fixed shape.

Columns of the head's own cache are those of the backbone's: column t holds the pair of the backbone's feature of token
t and of token t + 1. Between cycles it holds nothing else. Rows that were drafted on top of it (a feature that the head
itself returned, a token that it proposed) are thrown away, and what the backbone made of the accepted tokens takes
their place. These new pairs run first in the next draft, and the last of them proposes its first token:

    kept by the backbone    b  d1 d2 z          (z is the token that verification added, not in the cache yet)
    features of             b  d1 d2
    paired with             d1 d2 z             three rows of the head; the third one proposes what follows z
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from ...modeling.sampling import race
from ..contract import DraftTree, Verdict, line
from ..targets import Fed, HiddenLayers, shift_cache
from ..tokens import TokenRows
from ..trees import drawn_tree, dynamic_tree, ranked_tree
from .protocol import DraftOptions, View

_DEFAULTS = {"depth": 5, "top_k": 10, "total_tokens": 60}
"""A tree where `draft_tree` leaves something open (EAGLE-2's evaluation)."""


def tree_options(given: Any) -> tuple[dict[str, Any], int]:
    """The complete options of a tree of drafts, and the length of its longest path.

    Args:
        given: `draft_tree`: any of `depth`, `top_k`, `total_tokens` (b included); or `choices`, the rank paths of a
            tree of fixed shape.

    Raises:
        ValueError: Other keys, or a value out of range.
    """
    if not isinstance(given, dict) or not (given.keys() <= _DEFAULTS.keys() or given.keys() == {"choices"}):
        raise ValueError(f"draft_tree={given!r} must be a dict of {', '.join(_DEFAULTS)}, or of choices alone")
    if "choices" in given:
        choices = [tuple(path) for path in given["choices"]]
        if not choices or not all(choices):
            raise ValueError(f"draft_tree={given!r}: choices must be paths of at least one rank each")
        return {"choices": choices}, max(map(len, choices))
    options = _DEFAULTS | given
    for name, least in (("depth", 0), ("top_k", 1), ("total_tokens", 2)):
        if not isinstance(options[name], int) or options[name] < least:
            raise ValueError(f"{name}={options[name]!r} of draft_tree must be a whole number of at least {least}")
    return options, options["depth"] + 1


@dataclass
class _Pairs:
    """New rows of true features; what a row keeps comes first, and what is behind it is arbitrary.

    Attributes:
        features: [B, P, d].
        ids: [B, P] int64.
        real: [B, P] bool, False for padding.
        shifts: Columns by which each row moves to the right afterwards, [B]; None: none does.
    """

    features: torch.Tensor
    ids: torch.Tensor
    real: torch.Tensor
    shifts: torch.Tensor | None = None


class EagleDrafter:
    """The drafts of one call.

    Args:
        head: The `EagleHead`, attached.
        options: Of the call; `draft_tree` is complete (`tree_options`).
    """

    def __init__(self, head: Any, options: DraftOptions) -> None:
        self.head, self.options, self.num_tokens = head, options, options.num_tokens
        self.hidden_layers: HiddenLayers = head.hidden_layers
        self.draft_ids = head.draft_ids
        self.cache, self.pairs = DynamicCache(), []
        self.view: View | None = None
        self.is_padded = False
        self.prompt = self.mask = self.counts = self.features = None

    def begin(self, outputs: Any, view: View) -> None:
        """Takes the prompt's features; what an earlier call left in the backbone's cache is not looked at."""
        self.view, self.is_padded = view, view.is_padded
        self.prompt = self.head.fuse(outputs.hidden_states)
        rows = self.prompt.shape[1]
        self.mask, self.counts = view.mask[:, :0], view.counts - rows
        self.real = view.mask[:, -rows:]

    def advance(self, fed: Fed, verdict: Verdict) -> None:
        """Pairs the features of the kept path with the tokens behind them."""
        longest = self.view.kept.longest
        if longest:
            states = tuple(None if state is None else state[:, :longest] for state in fed.hidden_states)
            ids = verdict.tokens[:, :longest]
            real = torch.ones_like(ids, dtype=torch.bool)
            self.pairs.append(_Pairs(self.head.fuse(states), ids, real, self.view.shifts))

    def propose(self, tokens: TokenRows, length: int) -> DraftTree:
        """A chain or a tree behind every row, with paths of at most `length` tokens."""
        if self.prompt is not None:  # its last pair has the token that was added first
            self.pairs.append(_Pairs(self.prompt, tokens.newest(self.prompt.shape[1]), self.real))
            self.prompt = None
        if length < 1:
            return DraftTree.chain(tokens.ids[:, :0])
        for pairs in self.pairs:
            self._settle(pairs)
        self.pairs = []
        settled = self.mask.shape[1]
        tree = self._chain(length) if self.options.draft_tree is None else self._tree(length)
        for layer in self.cache.layers:
            layer.crop(settled - layer.get_seq_length())
        return tree

    def _settle(self, pairs: _Pairs) -> None:
        """Runs new pairs for good, and moves the rows that kept fewer of them as the backbone's cache moved them."""
        size = pairs.ids.shape[1]
        self.mask = torch.cat([self.mask, pairs.real], dim=1)
        positions = (self.counts[:, None] + line(size, self.counts.device)).clamp(min=0)
        features = self._run(pairs.features, pairs.ids, positions, _causal(self.mask, size) if self.is_padded else None)
        if pairs.shifts is None:
            self.features, self.counts = features[:, -1:], self.counts + size
            return
        last = (size - 1 - pairs.shifts).clamp(min=0)  # a row that has ended keeps any
        self.features = features.gather(1, last[:, None, None].expand(-1, 1, features.shape[2]))
        self.counts, self.is_padded = self.counts + size - pairs.shifts, True
        self.mask = shift_cache(self.cache, pairs.shifts, self.mask)

    def _run(
        self, features: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Rows of the head; `mask` is [B, 1, R, past + R] bool, or None where all columns before a row are real."""
        return self.head.rows(features, ids, positions, mask, self.cache)

    def _chain(self, length: int) -> DraftTree:
        """Up to `length` tokens one after the other; it ends with a token of which no row was sure."""
        features, drafts, laws = self.features, [], []
        for step in range(length):
            token, law = self._choose(self.head.draft_logits(features)[:, 0])
            drafts.append(token)
            laws.append(law)
            if step + 1 == length or self.options.is_unsure(token, law):
                break
            mask = nn.functional.pad(self.mask, (0, step + 1), value=True)[:, None, None] if self.is_padded else None
            features = self._run(features, token[:, None], self.counts[:, None] + step, mask)
        return DraftTree.chain(torch.stack(drafts, 1), torch.stack(laws, 1) if self.options.do_sample else None)

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A token [B] from logits [B, Vd], and the law it was drawn from (greedy: its own, or None if not needed)."""
        if not self.options.do_sample and not self.options.threshold:
            return self.draft_ids[logits.argmax(-1)], None
        law = self._law(logits)
        return (race(law) if self.options.do_sample else law.argmax(-1)), law

    def _law(self, logits: torch.Tensor) -> torch.Tensor:
        """Probabilities over the whole vocabulary [..., V] from logits [..., Vd], warped where sampled."""
        law = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        if law.shape[-1] < self.head.config.vocab_size:
            whole = law.new_zeros(*law.shape[:-1], self.head.config.vocab_size)
            law = whole.index_copy_(-1, self.draft_ids, law)
        return self.options.processing.warp(law) if self.options.do_sample else law

    def _tree(self, length: int) -> DraftTree:
        """A tree whose paths have at most `length` tokens: of draws where it can be, else of the likeliest tokens."""
        options, logits = dict(self.options.draft_tree), self.head.draft_logits(self.features)[:, 0]
        grow = _Growth(self)
        if "choices" in options:
            choices = [path for path in options["choices"] if len(path) <= length]
            tree = ranked_tree(choices, logits, lambda tokens, parents: grow(self.draft_ids[tokens], parents))
        else:
            options["depth"] = min(options["depth"], length - 1)
            if self.options.do_sample:
                return drawn_tree(self._law(logits), lambda *frontier: self._law(grow(*frontier)), **options)
            tree = dynamic_tree(
                _log_law(logits), lambda tokens, parents: _log_law(grow(self.draft_ids[tokens], parents)), **options
            )
        tree.tokens = self.draft_ids[tree.tokens]
        return tree


class _Growth:
    """Runs the frontier of a tree level by level; a node sees the settled columns, its ancestors and itself.

    Args:
        drafter: Whose settled columns the tree grows from.
    """

    def __init__(self, drafter: EagleDrafter) -> None:
        self.drafter, self.features = drafter, drafter.features
        self.ancestors: torch.Tensor | None = None
        self.level = 0

    def __call__(self, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """Logits [B, k, Vd] behind nodes with token ids [B, k], whose parents are places in the frontier before."""
        drafter, size = self.drafter, tokens.shape[1]
        itself = torch.eye(size, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
        if self.ancestors is None:
            features, self.ancestors = self.features.expand(-1, size, -1), itself
        else:
            features = _taken(self.features, parents)
            self.ancestors = torch.cat([_taken(self.ancestors, parents), itself], dim=-1)
        visible = torch.cat([drafter.mask[:, None].expand(-1, size, -1), self.ancestors], dim=-1)[:, None]
        positions = (drafter.counts[:, None] + self.level).expand(-1, size)
        self.features, self.level = drafter._run(features, tokens, positions, visible), self.level + 1
        return drafter.head.draft_logits(self.features)


def _causal(mask: torch.Tensor, rows: int) -> torch.Tensor:
    """What the last `rows` of columns [B, W] see, [B, 1, rows, W]; made here, where no host has to look at the mask.

    Padding sees itself, so that it gives numbers.
    """
    columns = line(mask.shape[1], mask.device)
    own = columns[-rows:, None]
    return ((mask[:, None] & (columns <= own)) | (columns == own))[:, None]


def _taken(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Entries of states [B, n, w] at places [B, k]: [B, k, w]."""
    return states.gather(1, places[..., None].expand(-1, -1, states.shape[-1]))


def _log_law(logits: torch.Tensor) -> torch.Tensor:
    """What ranks nodes: the head's raw law, in float32 at least (in half precision ties are common)."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
