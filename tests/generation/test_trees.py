"""Draft trees: what they are as tensors, and how they grow, against goldens, brute force and enumeration."""

import contextlib
import heapq
import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.no_sync import NoSync
from tests.tree_worlds import WARPS, V, World, chance_of_pairs, emitted_distribution
from tokenahead.generation.call.costs import POSITIONS, BlockCosts
from tokenahead.generation.contract import DraftTree
from tokenahead.generation.trees import building as growth
from tokenahead.generation.trees.building import (
    choices_from_accuracies,
    drawn_tree,
    dynamic_tree,
    of_real,
    prefix_tree,
    ranked_tree,
    static_tree,
)
from tokenahead.generation.verification.verifiers import GreedyVerifier

DATA = Path(__file__).parent.parent / "data" / "trees"
GROWTH, CHOICES = load_file(DATA / "growth.safetensors"), load_file(DATA / "choices.safetensors")


def ancestors(parents: list[int], place: int) -> list[int]:
    """The nodes on the path from the last verified token to a node."""
    return [0] if place == 0 else [*ancestors(parents, parents[place - 1] + 1), place]


@settings(max_examples=80)
@given(st.lists(st.lists(st.integers(0, 100), min_size=12, max_size=12), min_size=1, max_size=3), st.integers(0, 12))
def test_mask_positions_and_paths_are_those_of_every_row(rows, size):
    parents = [[row[node] % (node + 1) - 1 for node in range(size)] for row in rows]
    tree = DraftTree(torch.zeros(len(rows), size, dtype=torch.long), torch.tensor(parents).view(len(rows), size).long())
    paths = [[ancestors(row, place) for place in range(size + 1)] for row in parents]
    deepest = max(len(path) - 1 for row in paths for path in row)
    for tree.depth in (size, deepest):
        tree.__dict__.pop("_ancestors", None)
        assert tree.positions().tolist() == [[len(path) - 1 for path in row] for row in paths]
        want = [[[place in path for place in range(size + 1)] for path in row] for row in paths]
        assert tree.mask().tolist() == want
        padded = [[path + path[-1:] * (tree.depth + 1 - len(path)) for path in row] for row in paths]
        assert tree.paths().tolist() == padded


def test_a_chain_is_a_tree():
    for length in [0, 1, 5]:
        draft = torch.randint(9, (3, length))
        chain, counts = DraftTree.chain(draft), torch.tensor([0, 1, 2])
        tree = DraftTree(draft, chain.parents)
        assert chain.is_chain and not tree.is_chain and chain.depth == tree.depth == length
        for name in ("mask", "positions", "paths"):
            assert torch.equal(getattr(chain, name)(), getattr(tree, name)())
        assert chain.real() is None
        assert DraftTree.chain(draft, num_nodes=counts).real().tolist() == [
            [i < n for i in range(length)] for n in (0, 1, 2)
        ]


def test_tensors_made_in_inference_mode_serve_outside():
    with torch.inference_mode():
        DraftTree.chain(torch.zeros(1, 77, dtype=torch.long)).mask()
    chain = DraftTree.chain(torch.zeros(1, 77, dtype=torch.long))
    assert not chain.positions().is_inference() and not chain.mask().is_inference()


class Table:
    """Distributions that depend on a state, which moves with every token; grows trees for a batch of states."""

    def __init__(
        self, probs: torch.Tensor, states: list[int], move=lambda state, token: state * 31 + token + 7
    ) -> None:
        self.probs, self.move, self.frontier = probs, move, torch.tensor(states)[:, None]
        self.first, self.calls = probs[self.frontier[:, 0]], []

    def expand(self, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        assert (parents == -1).all() if not self.calls else (parents >= 0).all()
        self.calls.append(tokens.shape[1])
        self.frontier = self.move(self.frontier.gather(1, parents.clamp(min=0)), tokens) % len(self.probs)
        return self.probs[self.frontier]

    def likeliest(self, state: int, depth: int, top_k: int, size: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of a dynamic tree, by sorting lists in float32."""
        nodes, level = [], [(torch.tensor(0.0), state, -1)]
        for _ in range(depth + 1):
            start = len(nodes)
            for value, at, parent in level:
                for token in self.probs[at].topk(top_k).indices.tolist():
                    nodes.append((value + self.probs[at][token], self.move(at, token) % len(self.probs), parent, token))
            best = sorted(range(start, len(nodes)), key=lambda i: (-float(nodes[i][0]), i))[:top_k]
            level = [(nodes[i][0], nodes[i][1], i) for i in best]
        kept = sorted(sorted(range(len(nodes)), key=lambda i: (-float(nodes[i][0]), i))[:size])
        return [nodes[i][3] for i in kept], [kept.index(nodes[i][2]) if nodes[i][2] >= 0 else -1 for i in kept]


def test_dynamic_trees_are_those_of_the_official_code():
    for number in range(len(GROWTH["options"])):
        total, depth, top_k = GROWTH["options"][number].tolist()
        table = Table(GROWTH["table"], [0, 0])
        tree = dynamic_tree(table.first, table.expand, depth=depth, top_k=top_k, total_tokens=total)
        assert table.calls == [top_k] * depth and tree.depth == min(depth + 1, total - 1) and tree.probs is None
        have = {"tokens": tree.tokens, "parents": tree.parents, "mask": tree.mask(), "positions": tree.positions()}
        for name, got in have.items():
            assert torch.equal(got, GROWTH[f"tree{number}_{name}"].expand_as(got)), name


def test_every_row_grows_its_own_tree():
    for depth, top_k, total in [(3, 4, 20), (5, 2, 12), (0, 3, 3), (2, 1, 9), (1, 50, 30)]:
        states = [3, 11, 40]
        table = Table(GROWTH["table"].clone(), states)
        tree = dynamic_tree(table.first, table.expand, depth=depth, top_k=top_k, total_tokens=total)
        width = min(top_k, table.probs.shape[1])
        size = min(total - 1, width + depth * width**2)
        for row, state in enumerate(states):
            want = table.likeliest(state, depth, width, size)
            assert (tree.tokens[row].tolist(), tree.parents[row].tolist()) == want


def likeliest(log_probs: list[torch.Tensor], size: int) -> set[tuple[int, ...]]:
    """The `size` best of all prefixes of independent places, whose log-probabilities are [V] each."""
    worth = {
        path: sum(float(row[token]) for row, token in zip(log_probs, path))
        for length in range(1, len(log_probs) + 1)
        for path in itertools.product(range(len(log_probs[0])), repeat=length)
    }
    return set(sorted(worth, key=worth.__getitem__, reverse=True)[:size])


def prefixes(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """The tokens of the paths to all nodes."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens[row].tolist(), tree.parents[row].tolist()):
        found.append((*found[parent], token) if parent >= 0 else (token,))
    return found


def test_a_budget_holds_the_likeliest_prefixes():
    """By the heap, and by levels with and without nodes that cannot be among them, in batches."""
    for number in range(60):
        torch.manual_seed(number)
        places, vocabulary, size = 1 + number % 4, 2 + number % 5, 1 + number % 23
        rows = (torch.randn(3, places, vocabulary, dtype=torch.float64) * (1 + number % 3)).log_softmax(-1)
        steps, tokens = rows.topk(min(size, vocabulary))
        trees = [prefix_tree(steps, tokens, size)]
        for prunes in (False, True):
            levels = iter(rows[:, 1:, None].unbind(1))
            options = dict(depth=places - 1, top_k=size + 1, total_tokens=size + 1, prunes=prunes)
            trees.append(dynamic_tree(rows[:, 0], lambda *_: next(levels), **options))  # noqa: B023
        for tree, row in itertools.product(trees, range(3)):
            found = prefixes(tree, row)
            assert set(found) == likeliest(list(rows[row]), size) and len(found) == len(set(found))


def test_a_budget_of_a_law_that_reads_the_path_holds_its_likeliest_prefixes():
    for size, states in [(1, [3]), (9, [3, 11]), (40, [3, 11, 40])]:
        widths = list[int]()
        for prunes in (False, True):
            table = Table(GROWTH["table"], states)
            tree = dynamic_tree(
                table.first, table.expand, depth=4, top_k=size + 1, total_tokens=size + 1, prunes=prunes
            )
            widths.append(sum(table.calls))
            for row, state in enumerate(states):
                heap, want = [(0.0, (), state)], []
                while len(want) <= size:
                    cost, path, at = heapq.heappop(heap)
                    want.append(path)
                    for token in table.probs[at].topk(size).indices.tolist() if len(path) < 5 else ():
                        after = table.move(at, token) % len(table.probs)
                        heapq.heappush(heap, (cost - float(table.probs[at][token]), (*path, token), after))
                assert set(prefixes(tree, row)) == set(want[1:])
        assert widths[1] < widths[0] or size == 1


def test_as_many_prefixes_as_pay():
    steps = torch.tensor([[[0.5, 0.3, 0.2], [0.9, 0.06, 0.04]]]).log()
    tokens = torch.tensor([[[7, 8, 9], [4, 5, 6]]])
    gains = [0.5, 0.45, 0.3, 0.27, 0.2, 0.18]  # 7, 7 4, 8, 8 4, 9, 9 4
    for line, size in [(0.2, 3), (10.0, 1), (0.0, 6)]:
        costs = BlockCosts(tuple(1 + line * (width - 1) for width in POSITIONS))
        tree = prefix_tree(steps, tokens, 6, costs)
        rates = [(1 + sum(gains[:count])) / costs(1 + count) for count in range(1, 7)]
        assert rates.index(max(rates)) + 1 == size == tree.tokens.shape[1]
    assert prefix_tree(steps, tokens, 2).is_chain and not prefix_tree(steps, tokens, 3).is_chain


def test_no_child_comes_without_its_parent_where_values_tie():
    """Distributions of certainty: every value on the certain path is 0, and the others' differ by less than they round
    to."""
    probs = torch.full((7, 12), -1e9)
    probs[torch.arange(7), torch.tensor([3, 1, 4, 1, 5, 9, 2])] = 0.0
    probs = (probs + torch.linspace(-1, 0, 12)).log_softmax(-1)
    table = Table(probs, [0, 5], lambda state, token: state * 3 + token + 1)
    tree = dynamic_tree(table.first, table.expand, depth=6, top_k=4, total_tokens=7)
    for row, state in enumerate((0, 5)):
        path = []
        for _ in range(6):
            path.append(int(probs[state].argmax()))
            state = (state * 3 + path[-1] + 1) % 7  # noqa: PLW2901
        assert tree.tokens[row].tolist() == path and tree.parents[row].tolist() == list(range(-1, 5))


def test_excluded_tokens_are_drafted_last():
    probs = torch.full((1, 6), -torch.inf)
    probs[0, [2, 4]] = math.log(0.5)
    table = Table(probs, [0, 0])
    tree = dynamic_tree(table.first, table.expand, depth=1, top_k=3, total_tokens=7)
    assert tree.tokens.tolist() == [[2, 4, 2, 4, 2, 4]] * 2
    assert tree.parents.tolist() == [[-1, -1, 0, 0, 1, 1]] * 2


@pytest.mark.by_day(each=1)
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("depth", [1, 2])
def test_text_from_drawn_trees_has_the_targets_distribution(depth, warp, rule, monkeypatch):
    """All draws of trees whose shapes depend on them: two of three tokens for b, then three nodes below the two.

    The three are children of the two, or two children and a grandchild of one of them.
    """
    world, pairs = World(warp, depth + 1, seed=4), torch.tensor(list(itertools.permutations(range(V), 2)))
    draws = torch.tensor(list(itertools.product(range(len(pairs)), repeat=1 + 2 * depth))).repeat(2, 1)
    kept = [pairs[draws[:, :1]], *(pairs[draws[:, 2 * level - 1 : 2 * level + 1]] for level in range(1, depth + 1))]
    row, used, texts = torch.arange(2).repeat_interleave(len(draws) // 2)[:, None], [], [torch.zeros_like(draws[:, :1])]

    def dictate(q, count, generator):
        used.append(q)
        return kept[len(used) - 1]

    def expand(tokens, parents):
        texts.append(V * texts[-1].gather(1, parents.clamp(min=0)) + 1 + tokens)
        return world.q[row, texts[-1]]

    monkeypatch.setattr(growth, "race_order", dictate)
    tree = drawn_tree(world.q[row[:, 0], 0], expand, depth=depth, top_k=2, total_tokens=6)
    assert len(used) == depth + 1 and tree.tokens.shape[1] == 5
    chance = chance_of_pairs(used, kept)
    torch.testing.assert_close(chance.view(2, -1).sum(1), torch.ones(2, dtype=torch.float64))
    assert (tree.parents[chance > 0].unique(dim=0)).shape[0] > 1
    assert (emitted_distribution(world, tree, chance, rule) - world.target()).abs().max() < 1e-12


def random_probs(count: int) -> Table:
    return Table((2 * torch.randn(23, 30, generator=torch.Generator().manual_seed(7))).softmax(-1), list(range(count)))


def test_drawn_trees_are_trees_with_their_distributions():
    for depth, top_k, total in [(5, 10, 60), (2, 3, 8), (0, 4, 5), (4, 1, 4), (7, 2, 60)]:
        table = random_probs(8)
        tree = drawn_tree(table.first, table.expand, depth=depth, top_k=top_k, total_tokens=total)
        size = tree.tokens.shape[1]
        assert size <= total - 1 and tree.probs.shape == (8, size + 1, 30) and not tree.replacement
        assert size == total - 1 or top_k < 3
        for row in range(8):
            states, parents = [row], tree.parents[row].tolist()
            for node, parent in enumerate(parents):
                assert parent < node
                states.append((states[parent + 1] * 31 + int(tree.tokens[row, node]) + 7) % 23)
            for parent in set(parents):
                children = tree.tokens[row][tree.parents[row] == parent].tolist()
                assert len(set(children)) == len(children) <= top_k
                assert torch.equal(tree.probs[row, parent + 1], table.probs[states[parent + 1]])
        assert int(tree.positions().max()) == tree.depth


def same_distribution_everywhere(distribution: torch.Tensor):
    """The callback of a drafter that always thinks the same."""
    return lambda tokens, parents: distribution[:, None].expand(-1, tokens.shape[1], -1)


def test_first_draws_have_more_below_them_than_later_ones():
    distribution = torch.full((1, 40), 1 / 40)
    tree = drawn_tree(distribution, same_distribution_everywhere(distribution), depth=1, top_k=6, total_tokens=13)
    assert tree.parents.tolist() == [[-1] * 6 + [0, 0, 0, 1, 2, 3]]


def test_tokens_that_cannot_be_drawn_have_no_place_where_others_can():
    """Three tokens can come first and two behind each of them, which are all that the tree has room for."""
    first, second = torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0]]), torch.tensor([[0.5, 0.5, 0, 0]])
    tree = drawn_tree(first, same_distribution_everywhere(second), depth=1, top_k=3, total_tokens=10)
    assert tree.parents.tolist() == [[-1, -1, -1, 0, 0, 1, 1, 2, 2]]
    assert tree.tokens.max() == 2 and tree.tokens[:, 3:].max() == 1


def test_a_sure_drafter_draws_long_paths():
    """Chances of tokens that cannot be drawn stay 0 all along, and the first of equal nodes is expanded."""
    for top_k in [2, 4]:
        distribution = torch.nn.functional.one_hot(torch.tensor([3]), 9).double()
        tree = drawn_tree(
            distribution, same_distribution_everywhere(distribution), depth=5, top_k=top_k, total_tokens=7
        )
        assert tree.parents.tolist() == [[-1, 0, 1, 2, 3, 4]] and tree.tokens.unique().tolist() == [3]


def paths_of(table: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(rank for rank in row if rank >= 0) for row in table.tolist()]


def test_static_trees_are_those_of_the_official_code():
    choices = paths_of(CHOICES["choices"])
    for given_choices in (choices, choices[::-1]):
        parents, ranks = static_tree(given_choices)
        assert torch.equal(parents, CHOICES["parents"]) and torch.equal(ranks, CHOICES["ranks"])
    tree = DraftTree(ranks[None], parents[None])
    assert torch.equal(tree.mask()[0], CHOICES["mask"]) and torch.equal(tree.positions()[0], CHOICES["positions"])


def test_choices_from_accuracies_are_those_of_the_official_code():
    assert choices_from_accuracies(CHOICES["accuracies"], int(CHOICES["num_nodes"])) == paths_of(CHOICES["chosen"])
    assert choices_from_accuracies(torch.tensor([[0.9, 0.1], [0.8, 0.05]]), 99) == [
        (0,),
        (0, 0),
        (1,),
        (1, 0),
        (0, 1),
        (1, 1),
    ]


def test_ranked_trees_hold_the_tokens_of_their_ranks():
    for choices in [paths_of(CHOICES["choices"]), [(2,), (0,), (2, 1), (2, 1, 0), (0, 3), (2, 0)]]:
        states = [4, 9]
        table = Table(GROWTH["table"], states)
        tree = ranked_tree(choices, table.first, table.expand)
        paths = sorted(choices, key=lambda path: (len(path), path))
        assert tree.depth == len(paths[-1]) and torch.equal(tree.parents[0], static_tree(choices)[0])
        inner = {path[:-1] for path in paths} - {()}
        assert table.calls == [sum(len(path) == n for path in inner) for n in range(1, tree.depth)]
        for row, state in enumerate(states):
            found = {(): state}
            for node, path in enumerate(paths):
                before = found[path[:-1]]
                token = int(table.probs[before].topk(10).indices[path[-1]])
                assert tree.tokens[row, node] == token
                found[path] = (before * 31 + token + 7) % len(table.probs)


def test_growing_never_makes_the_host_wait():
    log_probs = GROWTH["table"][:2]
    expand = lambda tokens, parents: log_probs[:, None].expand(-1, tokens.shape[1], -1)  # noqa: E731
    probs = lambda tokens, parents: expand(tokens, parents).exp()  # noqa: E731
    for mode in (contextlib.nullcontext(), NoSync()):
        with mode:
            dynamic_tree(log_probs, expand, depth=2, top_k=3, total_tokens=9)
            dynamic_tree(log_probs, lambda *_: log_probs[:, None], depth=2, top_k=9, total_tokens=9)
            drawn_tree(log_probs.exp(), probs, depth=2, top_k=3, total_tokens=9)
            ranked_tree([(0,), (1,), (1, 2)], log_probs, expand)


def test_waiting_is_noticed():
    for waits in [lambda x: x.sum().item(), lambda x: bool(x.any()), lambda x: x[x > 0], lambda x: torch.tensor([1])]:
        with NoSync(), pytest.raises(AssertionError, match="waits for the device"):
            waits(torch.ones(2))


def test_a_draft_vocabulary_draws_as_a_vocabulary_of_its_own():
    """One seed draws the same tokens, by their ids."""
    for top_k in [3, 9]:
        ids, probs = torch.tensor([4, 17, 2, 28, 9, 11]), (2 * torch.randn(8, 6)).softmax(-1)
        options = dict(depth=2, top_k=top_k, total_tokens=12)
        few, named = (
            drawn_tree(probs, same_distribution_everywhere(probs), **options, generator=torch.manual_seed(3), **columns)
            for columns in ({}, {"columns": ids})
        )
        assert named.tokens.equal(ids[few.tokens]) and named.parents.equal(few.parents)
        assert named.probs.equal(few.probs) and named.columns is ids


def test_what_is_left_of_a_tree_hangs_together():
    tokens, parents = torch.tensor([[5, 6, 7, 8, 9]]).expand(2, -1), torch.tensor([[-1, -1, 0, 1, 3]]).expand(2, -1)
    probs = torch.arange(6.0)[:, None].expand(2, 6, 4)  # a row that names its index
    left = of_real(DraftTree(tokens, parents, probs), torch.tensor([[0, 1, 0, 1, 1], [1, 1, 1, 0, 0]]).bool())
    assert left.num_nodes.tolist() == [3, 3]
    assert left.tokens.tolist() == [[6, 8, 9], [5, 6, 7]]
    assert left.parents.tolist() == [[-1, 0, 1], [-1, -1, 0]]
    assert left.probs[..., 0].tolist() == [[0, 2, 4, 5], [0, 1, 2, 3]]


def test_the_host_sees_numbers_along_the_accepted_path_alone():
    """Of three nodes, the second and its child are accepted; infinity after the first is nobody's business."""
    tree = DraftTree(torch.tensor([[5, 6, 7]]), torch.tensor([[-1, -1, 1]]), depth=2)
    for node, is_seen in [(0, False), (1, True), (2, True)]:
        scores = torch.nn.functional.one_hot(torch.tensor([[6, 1, 7, 2]]), 9).float()  # picks after b and every node
        scores[0, 1 + node] *= torch.where(scores[0, 1 + node] > 0, torch.inf, 1.0)
        verifier = GreedyVerifier()
        result = verifier.verify(tree, scores)
        rows = verifier.path_rows(result)[0, : int(result.num_accepted) + 1]
        assert int(result.num_accepted) == 2 and bool(rows.isfinite().all()) is not is_seen
