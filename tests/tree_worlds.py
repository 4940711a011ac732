"""Targets and drafters as tables over short texts, and the distribution of what trees emit, in float64 and by
enumeration.

A text over V tokens has a number: the empty one has 0, and token t behind text c makes V c + 1 + t.
"""

import itertools

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tokenahead.generation.call.processing import Processing
from tokenahead.generation.contract import DraftTree, path_columns
from tokenahead.generation.verification.tree_rules import accepted_path, tree_acceptance

V = 3
WARPS = {
    "plain": [],
    "temperature": [TemperatureLogitsWarper(0.5)],
    "top_p": [TopPLogitsWarper(0.9)],
    "top_k": [TopKLogitsWarper(2)],
}


def first_of_length(length: int) -> int:
    """The number of the first text of a length."""
    return (V**length - 1) // (V - 1)


class World:
    """A batch of two targets and two drafters.

    Attributes:
        depth: The longest path of trees.
        p: [2, texts, V] the targets' distributions after every text of up to `depth` tokens.
        q: The drafters'.
    """

    def __init__(self, warp: str, depth: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        logits = 1.5 * torch.randn(2, 2, first_of_length(depth + 1), V, generator=generator, dtype=torch.float64)
        self.p, self.q = Processing(LogitsProcessorList(WARPS[warp])).warp(logits.softmax(-1))
        self.depth = depth

    def along(self, probs: torch.Tensor, tree: DraftTree) -> torch.Tensor:
        """The distributions after every node of 2 n trees, [2 n, m + 1, V]; the first n belong to the batch's first
        row."""
        row = torch.arange(2).repeat_interleave(len(tree.tokens) // 2)
        return probs[row[:, None], texts(tree)]

    def completed(self, tree: DraftTree, mass: torch.Tensor) -> torch.Tensor:
        """The distribution of depth + 1 tokens, [2, V^(depth + 1)].

        Args:
            tree: 2 n trees.
            mass: [2 n, m + 1, V], how likely a tree is to occur, its path to end at a place, and a token to be added;
                the target completes the text.
        """
        distribution = torch.zeros(2, first_of_length(self.depth + 2), dtype=torch.float64)
        distribution.scatter_add_(
            1, (V * texts(tree)[..., None] + 1 + torch.arange(V)).view(2, -1), mass.reshape(2, -1)
        )
        return self._text(distribution)

    def target(self) -> torch.Tensor:
        """The distribution of depth + 1 tokens of the target alone."""
        distribution = torch.zeros(2, first_of_length(self.depth + 2), dtype=torch.float64)
        distribution[:, 0] = 1
        return self._text(distribution)

    def _text(self, distribution: torch.Tensor) -> torch.Tensor:
        starts = [first_of_length(length) for length in range(self.depth + 3)]
        for start, end, last in zip(starts, starts[1:], starts[2:]):
            distribution[:, end:last] += (distribution[:, start:end, None] * self.p[:, start:end]).flatten(1)
        return distribution[:, starts[-2] :]


def texts(tree: DraftTree) -> torch.Tensor:
    """The number of the text that leads to every node, [n, m + 1]."""
    found = torch.zeros_like(torch.nn.functional.pad(tree.tokens, (1, 0)))
    for node in range(tree.tokens.shape[1]):
        parent = found.gather(1, tree.parents[:, node, None] + 1)[:, 0]
        found[:, node + 1] = V * parent + 1 + tree.tokens[:, node]
    return found


def all_trees(
    world: World, shape: list[int], replacement: bool, marks: list[bool] | None = None
) -> tuple[DraftTree, torch.Tensor]:
    """Every way to draw a tree of some parents, once for each row of the batch, and its probability [2 n].

    Nodes with a mark are deterministic: their tokens follow from the text before them. Where siblings have used up
    their distribution, the next one takes the first token that is left: it is no draw of it.
    """
    tokens = torch.tensor(list(itertools.product(range(V), repeat=len(shape)))).repeat(2, 1)
    tree = DraftTree(tokens, torch.tensor(shape).expand_as(tokens), replacement=replacement)
    if marks is not None:
        tree.deterministic = torch.tensor(marks).expand_as(tokens)
    known = texts(tree)
    tree.probs, rows = world.along(world.q, tree), torch.arange(len(tokens))
    left, unused, chance = tree.probs.clone(), torch.ones_like(tree.probs), torch.ones(len(tokens), dtype=torch.float64)
    for node, parent in enumerate(shape):
        token, distribution = tokens[:, node], left[:, parent + 1]
        empty = distribution.sum(-1) == 0
        first = unused[:, parent + 1].argmax(-1) == token
        drawn = torch.where(
            empty, first.double(), distribution[rows, token] / distribution.sum(-1).masked_fill(empty, 1)
        )
        is_deterministic = marks is not None and marks[node]
        chance *= (token == (known[:, parent + 1] + 2 * node) % V).double() if is_deterministic else drawn
        if not replacement or is_deterministic:
            left[rows, parent + 1, token] = 0
            unused[rows, parent + 1, token] = 0
    torch.testing.assert_close(chance.view(2, -1).sum(1), torch.ones(2, dtype=torch.float64))
    return tree, chance


def ends(tree: DraftTree, accept: torch.Tensor, rule: str) -> torch.Tensor:
    """The probability that the path ends at each node, [n, m + 1], over all outcomes of the tries."""
    distribution = torch.zeros(len(accept), accept.shape[1] + 1, dtype=torch.float64)
    for outcome in itertools.product([False, True], repeat=accept.shape[1]):
        kept = torch.tensor(outcome).expand(accept.shape)
        last = path_columns(accepted_path(tree, kept, rule), tree.depth)[:, -1:]
        distribution.scatter_add_(1, last, torch.where(kept, accept, 1 - accept).prod(1, keepdim=True))
    return distribution


def emitted_distribution(
    world: World, tree: DraftTree, chance: torch.Tensor, rule: str, p: torch.Tensor | None = None
) -> torch.Tensor:
    """The distribution of depth + 1 tokens [2, V^(depth + 1)]: the kept path, the added token, then the target's own.

    `p` [2 n, m + 1, V] is what the target gives in a forward of the trees, if that is not looked up in the world.
    """
    accept, residual = tree_acceptance(tree, world.along(world.p, tree) if p is None else p, rule)
    assert accept.isfinite().all() and residual.isfinite().all()
    return world.completed(tree, (chance[:, None] * ends(tree, accept, rule))[..., None] * residual)


def chance_of_pairs(used: list[torch.Tensor], kept: list[torch.Tensor]) -> torch.Tensor:
    """The probability of drawn pairs of tokens [N, nodes, 2] by their distributions [N, nodes, V], level by level."""
    chance = torch.ones(len(kept[0]), dtype=torch.float64)
    for q, drawn in zip(used, kept):
        first, second = q.gather(-1, drawn).unbind(-1)
        left = q.scatter(-1, drawn[..., :1], 0).sum(-1)
        alone = left == 0  # nothing is left: any one of the others comes second, which is no draw
        others = first / (q.shape[-1] - 1)
        chance *= torch.where(alone, others, first * second / left.masked_fill(alone, 1)).prod(1)
    return chance
