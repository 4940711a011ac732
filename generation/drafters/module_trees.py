"""Trees of drafts from sequential modules: what follows a node, with a path of columns of its own in every module.

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

from ..contract import cached_arange
from ..growth import Ancestry, taken
from ..tokens import Sequences


class ModuleGrowth:
    """Grows a tree behind the columns of one cycle.

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

    def behind(self, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
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
        """By how many columns every node lies behind the backbone's last one, [nodes] int64."""
        return torch.cat([torch.zeros_like(part[0]) + (level + 2 - module) for level, part in enumerate(self.nodes)])
