"""Every random choice of a call, enumerated: which text comes with what probability, in float64."""

from collections import defaultdict

import torch
from torch.nn.functional import pad

from tokenahead.generation.call import options as options_module
from tokenahead.generation.contract import VerificationResult, path_columns
from tokenahead.generation.trees import building
from tokenahead.generation.verification import verifiers
from tokenahead.generation.verification.tree_rules import tree_acceptance


class Branches:
    """Takes every way through the choices of a function, one after the other.

    Draws of tokens and of trees, and the events of verification, become choices. Their probabilities are those of
    `tree_acceptance`, which other tests compare with what is drawn.

    Args:
        monkeypatch: Of the test.
        given: What the first choices are, with certainty.
    """

    def __init__(self, monkeypatch, given=()):
        self.given, self.ways, self.met, self.chance = given, [], 0, 1.0
        for module in (options_module, verifiers):
            monkeypatch.setattr(module, "draw", self.draw)
        monkeypatch.setattr(building, "race_order", self.race_order)
        monkeypatch.setattr(verifiers, "verify_sampled", self.verify)

    def law(self, run):
        """The texts that `run` returns, and their probabilities."""
        found = defaultdict(float)
        while True:
            self.met, self.chance = 0, 1.0
            text = run()
            found[text] += self.chance
            while self.ways and not any(self.ways[-1][1][self.ways[-1][0] + 1 :]):
                self.ways.pop()
            if not self.ways:
                return found
            self._advance()

    def choose(self, weights):
        """The number of one of some weights, NaN among them: what is drawn from these is no draw."""
        total = sum(weights)
        if not total > 0:
            return len(weights) - 1
        self.met += 1
        if self.met <= len(self.given):
            return self.given[self.met - 1]
        place = self.met - 1 - len(self.given)
        if place == len(self.ways):
            self.ways.append([-1, [max(weight, 0.0) / total for weight in weights]])
            self._advance()
        number, chances = self.ways[place]
        self.chance *= chances[number]
        return number

    def _advance(self):
        number, chances = self.ways[-1]
        self.ways[-1][0] = next(later for later in range(number + 1, len(chances)) if chances[later])

    def draw(self, weights, generator=None):
        rows = [self.choose(row) for row in weights.flatten(0, -2).tolist()]
        return torch.tensor(rows).view(weights.shape[:-1])

    def race_order(self, weights, count, generator=None):
        rows = []
        for row in weights.flatten(0, -2).tolist():
            left, order = dict(enumerate(row)), []
            for _ in range(count):
                tokens = list(left)
                order.append(tokens[self.choose([left[token] for token in tokens])])
                del left[order[-1]]
            rows.append(order)
        return torch.tensor(rows).view(*weights.shape[:-1], count)

    def verify(self, tree, p, rule="block", generator=None, uniforms=None, tests=None):
        """`verify_sampled`; uniforms are not read."""
        if tree.probs is None:
            found = [self._followed(tree, p, row) for row in range(len(p))]
        else:
            accept, residual = tree_acceptance(tree, p, rule)
            ends = [self._end(tree, accept, row, rule) for row in range(len(p))]
            found = [(end, self.choose(residual[row, end].tolist())) for row, end in enumerate(ends)]
        ends, added = torch.tensor(found).unbind(1)
        path = tree.mask()[torch.arange(len(p)), ends]
        columns, accepted = path_columns(path, tree.depth), path.sum(1, keepdim=True) - 1
        drafts = pad(tree.tokens, (1, 0)).gather(1, columns)[:, 1:]
        tokens = torch.cat([drafts, added[:, None]], 1).scatter_(1, accepted, added[:, None])
        return VerificationResult(accepted[:, 0], tokens, None if tree.is_chain else columns)

    def _followed(self, tree, p, row):
        """The index where the target's draws leave a tree, and the last of them."""
        index, real = 0, tree.tokens.shape[1] if tree.num_nodes is None else int(tree.num_nodes[row])
        while True:
            token = self.choose(p[row, index].tolist())
            below = [
                node for node in _children(tree, row, index) if node < real and int(tree.tokens[row, node]) == token
            ]
            if not below:
                return index, token
            index = below[0] + 1

    def _end(self, tree, accept, row, rule):
        """The index where the accepted path ends."""
        if rule == "block":
            return next((node + 1 for node in _post_order(tree, row, 0) if self._kept(accept[row, node])), 0)
        index = 0
        while (child := next((n for n in _children(tree, row, index) if self._kept(accept[row, n])), None)) is not None:
            index = child + 1
        return index

    def _kept(self, chance):
        return self.choose([1 - float(chance), float(chance)]) == 1


def _children(tree, row, index):
    return [node for node, parent in enumerate(tree.parents[row].tolist()) if parent + 1 == index]


def _post_order(tree, row, index):
    for node in _children(tree, row, index):
        yield from _post_order(tree, row, node + 1)
        yield node


def continued(p, texts, prompt):
    """The probabilities of texts under a target's rows p(prefix)."""
    found = {}
    for text in texts:
        found[text] = 1.0
        for place, token in enumerate(text):
            found[text] *= float(p((*prompt, *text[:place]))[token])
    return found
