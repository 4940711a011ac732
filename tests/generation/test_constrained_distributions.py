"""What is emitted under constraints, by enumeration in float64: five tokens, drafts of three, random automata."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from tests import tree_worlds
from tests.tree_worlds import World, first_of_length
from tokenahead.extending import AutomatonProcessor, TableAutomaton
from tokenahead.generation.call.options import warped
from tokenahead.generation.call.processing import Processing
from tokenahead.generation.call.sequences import Sequences
from tokenahead.generation.contract import DraftTree

V, DEPTH, STATES = 5, 3, 4
PROMPT = [2, 1]
SHAPES = {"chain": [-1, 0, 1], "tree": [-1, -1, 0, 0, 1]}


class Host(AutomatonProcessor):
    """A random automaton on the host."""

    start = 0

    def __init__(self, following, mask):
        super().__init__()
        self.following, self.mask = following, mask

    def step(self, state, token):
        return int(self.following[state, token])

    def allowed(self, state):
        return self.mask[state]


class Constrained(World):
    """A world under an automaton: the target's distributions have no mass on what it excludes.

    The drafter has no mass on one half of all tokens, so that some states allow nothing of it: there the allowed ones
    are drafted alike.
    """

    def __init__(self, seed):
        super().__init__("plain", DEPTH, seed)
        draws = torch.Generator().manual_seed(seed)
        self.following = torch.randint(STATES, (STATES, V), generator=draws)
        self.mask = torch.rand(STATES, V, generator=draws) < 0.5
        self.mask[torch.arange(STATES), torch.randint(V, (STATES,), generator=draws)] = True
        self.free = self.q * (torch.rand(self.q.shape, generator=draws) < 0.5)
        self.free.scatter_add_(-1, torch.randint(V, self.q[..., :1].shape, generator=draws), self.q[..., :1])
        self.free /= self.free.sum(-1, keepdim=True)
        states = torch.zeros(first_of_length(DEPTH + 1), dtype=torch.long)
        for text in range(1, len(states)):
            states[text] = self.following[states[(text - 1) // V], (text - 1) % V]
        allowed = self.mask[states].double()
        self.p = self.p * allowed / (self.p * allowed).sum(-1, keepdim=True)
        drafted = self.free * allowed
        drafted = torch.where(drafted.sum(-1, keepdim=True) > 0, drafted, allowed.expand_as(drafted))
        self.q = drafted / drafted.sum(-1, keepdim=True)

    def processor(self, kind):
        """The automaton, as calls are given it."""
        if kind == "host":
            return Host(self.following, self.mask)
        if kind == "table":
            return TableAutomaton(self.following, self.mask)

        def allowed(row, prefix):
            state = 0
            for token in prefix.tolist()[len(PROMPT) :]:
                state = int(self.following[state, token])
            return self.mask[state].nonzero()[:, 0].tolist()

        return PrefixConstrainedLogitsProcessor(allowed, 1)


@pytest.fixture(autouse=True)
def five_tokens(monkeypatch):
    monkeypatch.setattr(tree_worlds, "V", V)


def test_drafts_are_drawn_from_the_masked_conditionals_along_them():
    for kind, shape in itertools.product(["host", "table", "function"], SHAPES):
        world, parents = Constrained(seed=1), SHAPES[shape]
        tokens = torch.tensor(list(itertools.product(range(V), repeat=len(parents))))[::7].repeat(2, 1)
        tree = DraftTree(tokens, torch.tensor(parents).expand_as(tokens))
        free, want = world.along(world.free, tree), world.along(world.q, tree)
        options = SimpleNamespace(processing=Processing(LogitsProcessorList([world.processor(kind)])))
        masks = options.processing.constraints.masks(Sequences(torch.tensor(PROMPT).repeat(len(tokens), 1)), True)
        levels = [
            [0],
            *([n + 1 for n, _ in enumerate(parents) if depth_of(parents, n) == d] for d in range(1, DEPTH + 1)),
        ]
        alive = torch.ones(len(tokens), 1, dtype=torch.bool)
        for places, below in itertools.pairwise(levels):
            got = warped(free[:, places], options, False, masks)
            torch.testing.assert_close(got[alive], want[:, places][alive], atol=1e-12, rtol=0)
            if not below:
                break
            chosen = tokens[:, [place - 1 for place in below]]
            above = torch.tensor([places.index(parents[place - 1] + 1) for place in below]).expand_as(chosen)
            legal = want[:, places].flatten(1).gather(1, above * V + chosen) > 0
            legal |= world.along(world.p, tree)[:, places].flatten(1).gather(1, above * V + chosen) > 0
            alive = legal & alive.gather(1, above)
            masks.extend(chosen, above)


def depth_of(parents, node):
    """How deep a node of a tree is, its root's children being 1."""
    return 1 if parents[node] < 0 else 1 + depth_of(parents, parents[node])
