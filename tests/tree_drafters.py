"""Drafters of random trees, which know the text to come or a distribution of their own; several tests share them."""

import random

import torch

from tokenahead.extending import AttachableDrafter, DraftSession, DraftTree

DEPTH = 4


class _Call(DraftSession):
    """A session of one of the drafters below."""

    def __init__(self, owner, options) -> None:
        self.owner, self.options, self.num_tokens = owner, options, options.num_tokens


class _Trees(AttachableDrafter):
    drafts_trees = True

    def __init__(self) -> None:
        self._backbones = []

    def longest_draft(self):
        return DEPTH


class KnowingTrees(_Trees):
    """Certain trees of random shapes, around what plain decoding writes.

    A path that is right so far is continued rightly with an even chance, else by any token, so that paths of every
    length are accepted; siblings may repeat each other, and some drafts have rows with fewer nodes.

    Attributes:
        texts: What plain decoding makes of the next call's prompts, padding included.
        fewer: How often rows have fewer nodes.
    """

    def __init__(self, vocabulary: int, nodes: int = 7) -> None:
        super().__init__()
        self.texts: list[list[int]] = []
        self.vocabulary, self.nodes, self.random = vocabulary, nodes, random.Random(0)
        self.fewer = 0.3

    def start(self, options):
        return _Knowing(self, options)

    def grow(self, truth: list[int], length: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of one row's tree, whose paths have at most `length` nodes."""
        rng = self.random
        tokens, parents, depths, right = [], [], [0], [True]
        for _ in range(self.nodes):
            place = rng.choice([place for place, depth in enumerate(depths) if depth < length])
            depth = depths[place]
            true = truth[depth] if right[place] and depth < len(truth) else None
            token = true if true is not None and rng.random() < 0.6 else rng.randrange(self.vocabulary)
            tokens.append(token)
            parents.append(place - 1)
            depths.append(depth + 1)
            right.append(token == true)
        return tokens, parents


class _Knowing(_Call):
    def propose(self, tokens, length):
        if length < 1:
            return DraftTree.chain(tokens.ids[:, :0])
        owner = self.owner
        rows = [owner.grow(text[end : end + length], length) for text, end in zip(owner.texts, tokens.lengths)]
        drafts, parents = (torch.tensor(part) for part in zip(*rows))
        some = torch.tensor([owner.random.randrange(owner.nodes + 1) for _ in rows])
        return DraftTree(drafts, parents, depth=length, num_nodes=some if owner.random.random() < owner.fewer else None)


class KnowingChains(KnowingTrees):
    """Certain chains that go on rightly for a random while."""

    drafts_trees = False

    def start(self, options):
        return _KnowingChain(self, options)


class _KnowingChain(_Call):
    def propose(self, tokens, length):
        owner = self.owner
        rows = [(text[end : end + length] + [0] * length)[:length] for text, end in zip(owner.texts, tokens.lengths)]
        for row in rows:
            for place in range(owner.random.randrange(length + 1), length):
                row[place] = (row[place] + 1) % owner.vocabulary
        return DraftTree.chain(torch.tensor(rows, dtype=torch.long).view(len(rows), length))
