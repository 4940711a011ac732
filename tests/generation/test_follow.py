"""Walks along the target's picks, and greedy verification of chains, against brute force."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenahead.generation.contract import DraftTree, follow
from tokenahead.generation.verification.rules import verify_tree_greedy


@st.composite
def trees(draw):
    """A certain tree of up to 8 nodes and 3 rows, picks of the target, and counts or None."""
    size, batch = draw(st.integers(0, 8)), draw(st.integers(1, 3))
    row = lambda high: st.lists(st.integers(0, 2), min_size=high, max_size=high)  # noqa: E731
    parents = [[draw(st.integers(-1, node - 1)) for node in range(size)] for _ in range(batch)]
    tokens, picks = ([draw(row(n)) for _ in range(batch)] for n in (size, size + 1))
    counts = draw(st.none() | st.lists(st.integers(0, size), min_size=batch, max_size=batch))
    to_tensor = lambda rows, n: torch.tensor(rows).view(batch, n).long()  # noqa: E731
    tree = DraftTree(to_tensor(tokens, size), to_tensor(parents, size))
    tree.num_nodes = None if counts is None else torch.tensor(counts)
    return tree, to_tensor(picks, size + 1)


def walk(tokens: list[int], parents: list[int], picks: list[int]) -> tuple[list[int], list[int]]:
    """The kept nodes and the emitted tokens of one row, one step at a time."""
    node, kept, emitted = -1, [], []
    while True:
        emitted.append(picks[node + 1])
        children = [i for i, parent in enumerate(parents) if parent == node and tokens[i] == emitted[-1]]
        if not children:
            return kept, emitted
        node = children[0]
        kept.append(node)


def check_result(tree: DraftTree, picks: torch.Tensor) -> None:
    result = follow(tree, picks)
    assert result.path.shape == result.tokens.shape == (len(picks), tree.depth + 1)
    assert result.path.dtype == result.tokens.dtype == result.num_accepted.dtype == torch.long
    for row in range(len(picks)):
        size = tree.tokens.shape[1] if tree.num_nodes is None else int(tree.num_nodes[row])
        kept, emitted = walk(tree.tokens[row, :size].tolist(), tree.parents[row, :size].tolist(), picks[row].tolist())
        columns = [0] + [node + 1 for node in kept]
        padding = tree.depth + 1 - len(columns)
        assert result.num_accepted[row] == len(kept) and result.added[row] == emitted[-1]
        assert result.tokens[row, : len(emitted)].tolist() == emitted
        assert result.path[row].tolist() == columns + columns[-1:] * padding
        assert result.nodes[row].tolist() == kept + [-1] * padding


@settings(max_examples=150)
@given(case=trees())
def test_follow_walks_as_one_row_at_a_time(case):
    check_result(*case)


@settings(max_examples=60)
@given(case=trees())
def test_follow_walks_along_chains(case):
    tree, picks = case
    check_result(DraftTree.chain(tree.tokens, num_nodes=tree.num_nodes), picks)


def test_greedy_verification_follows_the_argmax():
    tree = DraftTree(torch.tensor([[4, 2, 1, 3, 3]]), torch.tensor([[-1, -1, 0, 0, 1]]))
    scores = torch.nn.functional.one_hot(torch.tensor([[2, 0, 3, 0, 0, 1]]), 5).float()
    nodes, accepted, added = verify_tree_greedy(tree, scores)
    assert (nodes.tolist(), accepted.tolist(), added.tolist()) == ([[1, 4, -1, -1, -1]], [2], [1])
