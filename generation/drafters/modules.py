"""Drafts of sequential modules (DeepSeek-V3): a chain of depth D, whose last module is reused for longer drafts.

Columns are those of the backbone's cache: column i of module k holds h^{k-1}_i together with the embedding of the token
k places further on. Beyond the newest D - 1 columns, all of these tokens are verified; the last D - 1 columns of deeper
modules were computed from drafts, and are computed again once it is known which of them stayed. The modules' own cache
therefore ends D - 1 columns before the backbone's, and the hidden states of the columns after it are kept.

Trees of drafts from sequential modules: what follows a node, with a path of columns of its own in every module.

Columns of a module hold a hidden state and the embedding of the token k places further on, so that of module k the last
k - 1 columns are made from drafts. With t the backbone's last column, and nodes d1, d2 on a path:

    column       ..  t-2          t-1          t            t+1
    module 1         x[t-1]       x[t]         b
    module 2         x[t]         b            d1                      settled: up to t-1
    module 3 = D     b            d1           d2                      settled: up to t-2
    module 3 again   b            d1           d2           d3         what is behind D moves on

A node is a column that sees the settled ones, its ancestors and itself; its input is what its parent became in the
module before. A level of nodes that meets a module for the first time brings all its ancestors along.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...modeling.indices import cached_arange
from ..call.options import DraftOptions
from ..call.sequences import Sequences
from ..protocols import CacheView, DraftSession
from ..target.cache import crop_layer, hold, restrict, shift_cache, shift_mask, shift_source, shifted
from ..target.inputs import added_to_scores
from ..target.target import TargetOutput
from ..trees.contract import DraftTree, VerificationResult
from ..trees.growth import Ancestry, grow, taken

_LAG = 64
"""Columns that may be left to be computed by the modules that a short draft did not need; by so many, and those of a
block, rows may move to the right meanwhile, so that layers with an attention window keep them to spare."""


_TREE_KINDS = ("full_attention", "sliding_attention")
"""Ways to attend in which a mask says what each sequence sees."""


class ModuleSession(DraftSession):
    """Drafts by chaining modules on the backbone's last hidden state.

    A draft ends with the first token to which its own distribution gave less probability than the threshold, in all
    rows.

    Args:
        model: Offers `mtp.step`, `num_modules`, and its embeddings in and out.
        options: Of the call.

    Raises:
        ValueError: A tree is asked for, and modules attend in a way that takes none.
    """

    hidden_layers = -1
    supports_confidence_threshold = True

    def __init__(self, model: Any, options: DraftOptions) -> None:
        self.model, self.options, self.depth = model, options, model.num_modules
        self.num_tokens = options.num_tokens
        self.vocabulary = options.extra.get("draft_vocabulary", model.draft_vocabulary)
        self.vocab_size = model.config.get_text_config().vocab_size
        # nodes of a tree stand side by side, and would push columns out of a window that are still within it
        self.cache, self.cached = model.mtp.new_cache(forgets=options.draft_tree is None), 0
        hold(self.cache)
        others = set(model.mtp.kinds) - set(_TREE_KINDS)
        if options.draft_tree is not None and others:
            raise ValueError(
                f"draft_tree: modules of {type(model).__name__} with {', '.join(sorted(others))} draft chains only, "
                "for a tree's nodes have no mask there; leave it out"
            )

    def begin(self, outputs: Any, view: CacheView) -> None:
        """Takes the prompt's states [B, L, D]; what an earlier call left in the backbone's cache is not looked at."""
        self.view, self.states = view, outputs.hidden_states[-1]
        self.mask = view.mask[:, -self.states.shape[1] :]
        self.is_padded = view.is_padded

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Appends the newest states of every sequence, right-aligned, and moves the modules' cache as the
        backbone's."""
        shifts, longest = self.view.shifts, self.view.new_tokens.longest
        self.states = torch.cat([self.states, outputs.state()[:, :longest]], dim=1)
        self.mask = nn.functional.pad(self.mask, (0, longest), value=True)
        if shifts is not None:
            self.is_padded = True
            self.states = shifted(self.states, shift_source(shifts, self.states.shape[1]), dim=1)
            self.mask = shift_mask(self.mask, shift_source(shifts, self.mask.shape[1]))
            if self.cached:
                shift_cache(self.cache, shifts, self.mask[:, : self.cached])
        # sequences that fall after while columns are pending move right: what comes in from the left must be states,
        # too
        wanted = self.mask.shape[1] - self.cached + _LAG + self.num_tokens + 1
        self.states = self.states[:, -wanted:]

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """A chain or a tree after every sequence, with paths of at most `length` tokens."""
        if length < 1:
            return DraftTree.chain(tokens.ids[:, :0])
        pending = self.mask.shape[1] - self.cached
        if self.options.draft_tree is not None and pending >= self.depth:  # else the prompt is too short
            tree = grow(ModuleGrowth(self, tokens), self.options, length)
            self._settle(self.depth)
            return tree
        hidden, ids, mask = self.states[:, -pending:], tokens.newest(pending), self.mask
        positions = self.view.counts[:, None] - pending + cached_arange(pending, ids.device)
        late, prepared = pending > _LAG, self._prepared(hidden, positions, mask)
        drafts, probs = [], []
        for k in range(1, max(length, self.depth if late else 1) + 1):
            if k > self.depth:  # the last module goes on, one new column at a time
                hidden, ids, positions = hidden[:, -1:], ids[:, -1:], positions[:, -1:] + 1
                mask, prepared = nn.functional.pad(mask, (0, 1), value=True), None
            hidden = self._step(k, hidden, ids, positions, mask, prepared)
            logits = self._logits(hidden[:, -1])
            token, distribution = self.options.choose(logits, self.draft_ids(logits.device), self.vocab_size)
            ids = torch.cat([ids[:, 1:], token[:, None]], dim=1)
            drafts.append(token)
            probs.append(distribution)
            if not late and self.options.is_unsure(token, distribution):
                break
        self._settle(len(drafts))
        draft = torch.stack(drafts[:length], 1)
        return DraftTree.chain(draft, torch.stack(probs[:length], 1) if self.options.do_sample else None)

    def _step(
        self,
        k: int,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        prepared: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        embeddings = self.model.get_input_embeddings()(ids)
        return self.model.mtp.step(k, hidden, embeddings, **self._inputs(positions, mask), prepared=prepared)

    def _inputs(self, positions: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        return {
            "position_ids": positions.clamp(min=0) if self.is_padded else positions,
            "attention_mask": mask if self.is_padded else None,
            "past_key_values": self.cache,
        }

    def _prepared(self, hidden: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> dict[str, Any] | None:
        """The mask and the rotary embedding of all modules, which have the same columns before and after them.

        None where there is one module, or where they attend differently.
        """
        modules = self.model.mtp
        if self.depth == 1 or len(set(modules.kinds)) > 1:
            return None
        return modules.options(0, hidden, **self._inputs(positions, mask))

    def _nodes(
        self, k: int, states: torch.Tensor, ids: torch.Tensor, distances: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        """Module k over nodes of a tree, which see its settled columns and some nodes: [B, R, H].

        Args:
            k: From 1 to D.
            states: [B, R, H].
            ids: [B, R] int64.
            distances: [n] int64, how far nodes lie after the backbone's last column; the last R are these.
            seen: [B, R, n] bool.
        """
        count, settled = ids.shape[1], self.mask[:, : self.mask.shape[1] - k + 1]
        places = self.view.counts[:, None] - 1 + distances
        visible = torch.cat([settled[:, None].expand(-1, count, -1), seen], dim=2)
        if self.model.mtp.kinds[k - 1] == "sliding_attention":
            old = self.view.counts[:, None] - self.mask.shape[1] + cached_arange(settled.shape[1], ids.device)
            away = places[:, -count:, None] - torch.cat([old, places], dim=1)[:, None]
            visible = visible & (away < self.model.config.get_text_config().sliding_window)
        return self.model.mtp.step(
            k,
            states,
            self.model.get_input_embeddings()(ids),
            position_ids=places[:, -count:].clamp(min=0),
            attention_mask=added_to_scores(visible, states.dtype),
            past_key_values=self.cache,
        )

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [.., v] of the tokens that may be drafted."""
        if self.vocabulary is None:
            return self.model.readout(hidden)
        return self.vocabulary.logits(self.model.readout, hidden)

    def draft_ids(self, device: torch.device) -> torch.Tensor | None:
        """The token ids that columns of logits stand for; None: every token, in order."""
        return None if self.vocabulary is None else self.vocabulary.on(device)

    def coverage(self, tokens: torch.Tensor) -> float | None:
        """The share of tokens [N] that could be drafted; None where all can."""
        return None if self.vocabulary is None else self.vocabulary.coverage(tokens)

    def _settle(self, steps: int) -> None:
        """Leaves only those columns in the modules' cache whose tokens are verified, in all modules alike."""
        if steps >= self.depth:
            self.cached = max(self.cached, self.mask.shape[1] - self.depth + 1)
        for layer in self.cache.layers:
            crop_layer(layer, min(0, self.cached - layer.get_seq_length()))
        restrict(self.cache, spare=_LAG + self.num_tokens + 1)


class ModuleGrowth:
    """Grows a tree after the columns of one cycle.

    Args:
        drafter: The `ModuleSession` whose cache and states it starts from; at least D of its columns are not settled.
        tokens: The rows.
    """

    def __init__(self, drafter: Any, tokens: Sequences) -> None:
        self.drafter, self.ancestry = drafter, Ancestry()
        self.draft_ids, self.vocab_size = drafter.draft_ids(tokens.ids.device), drafter.vocab_size
        self.rows = tokens
        self.tops: list[torch.Tensor] = []  # of every module its newest settled column
        self.nodes: list[torch.Tensor] = []  # by level: token ids,
        self.above: list[torch.Tensor] = []  # places of parents,
        self.seen: list[torch.Tensor] = []  # ancestors among all nodes so far,
        self.states: list[torch.Tensor] = []  # and what they became in the module before

    def first(self) -> torch.Tensor:
        """See `Growth`; settles the newest columns of all modules."""
        drafter, mask = self.drafter, self.drafter.mask
        pending = mask.shape[1] - drafter.cached
        hidden, ids = drafter.states[:, -pending:], self.rows.newest(pending)
        positions = drafter.view.counts[:, None] - pending + cached_arange(pending, ids.device)
        for k in range(1, drafter.depth + 1):
            if k > 1:
                hidden, ids, positions, mask = hidden[:, :-1], ids[:, 1:], positions[:, :-1], mask[:, :-1]
            hidden = drafter._step(k, hidden, ids, positions, mask)
            self.tops.append(hidden[:, -1:])
        return drafter._logits(self.tops[0])[:, 0]

    def after(self, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """See `Growth`."""
        self.nodes.append(tokens)
        self.above.append(parents)
        self.seen.append(self.ancestry.extend(parents))
        depth, module = self.drafter.depth, min(len(self.nodes) + 1, self.drafter.depth)
        first = 0 if len(self.nodes) < depth else len(self.nodes) - 1  # the first level that the module has not met
        levels = range(first, len(self.nodes))
        inputs = [self._input(level, module) for level in levels]
        ids = torch.cat(self.nodes[first:], dim=1)
        width = sum(level.shape[1] for level in self.nodes)
        seen = [torch.nn.functional.pad(part, (0, width - part.shape[-1])) for part in self.seen[first:]]
        states = self.drafter._nodes(module, torch.cat(inputs, 1), ids, self._distances(module), torch.cat(seen, 1))
        parts = states.split([self.nodes[level].shape[1] for level in levels], dim=1)
        self.states[first:] = parts
        return self.drafter._logits(parts[-1])

    def _input(self, level: int, module: int) -> torch.Tensor:
        """What the nodes of a level read: their parents' states, or those of the newest settled column."""
        if level == 0:
            return self.tops[max(module - 2, 0)].expand(-1, self.nodes[0].shape[1], -1)
        return taken(self.states[level - 1], self.above[level])

    def _distances(self, module: int) -> torch.Tensor:
        """By how many columns every node lies after the backbone's last one, [nodes] int64."""
        return torch.cat([torch.zeros_like(part[0]) + (level + 2 - module) for level, part in enumerate(self.nodes)])
