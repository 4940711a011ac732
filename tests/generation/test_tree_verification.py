"""Tree verification: exact distributions by enumeration, chains as a special case, planted mistakes."""

import contextlib
import itertools
import random

import pytest
import torch

from tests import tree_worlds
from tests.no_sync import NoSync
from tests.tree_worlds import WARPS, V, World, all_trees, emitted_distribution, first_of_length, texts
from tokenahead.generation.contract import DraftTree, follow
from tokenahead.generation.tensors.sampling import draw
from tokenahead.generation.trees.building import drawn_tree, of_real
from tokenahead.generation.verification import tree_rules as tree_verification
from tokenahead.generation.verification.rules import (
    block_acceptance,
    token_acceptance,
    verify,
    verify_sampled,
    verify_tree,
)
from tokenahead.generation.verification.tree_rules import tree_acceptance
from tokenahead.testing import chi_square

SHAPES = {
    "chain": [-1, 0, 1],
    "siblings": [-1, -1],
    "bushy": [-1, -1, 0, 0, 1],
    "lopsided": [-1, 0, 0, -1, 2],
    "late fork": [-1, 0, 1, 1],
    "three children": [-1, -1, -1, 1, 1],
    "interleaved": [-1, 0, -1, 0, 2],
}
RULES = ("token", "block")


def depth_of(parents: list[int]) -> int:
    return int(DraftTree(torch.zeros(1, len(parents), dtype=torch.long), torch.tensor([parents])).positions().max())


def test_emitted_distribution_of_drawn_trees_is_the_targets():
    for rule, replacement, warp, shape in itertools.product(RULES, [False, True], WARPS, SHAPES):
        parents = SHAPES[shape]
        world = World(warp, depth_of(parents))
        tree, chance = all_trees(world, parents, replacement)
        error = (emitted_distribution(world, tree, chance, rule) - world.target()).abs().max()
        assert error < 1e-12, float(error)


def test_emitted_distribution_of_mixed_trees_is_the_targets():
    """Random shapes and marks; deterministic children come before the drawn ones, and may repeat each other."""
    for rule, replacement, seed in itertools.product(RULES, [False, True], range(12)):
        rng = random.Random(seed)
        parents = [rng.randint(-1, node - 1) for node in range(rng.randint(2, 6))]
        marks = [rng.random() < 0.5 for _ in parents]
        order = sorted(range(len(parents)), key=lambda node: (depth_in(parents, node), not marks[node]))
        number = {node: place for place, node in enumerate(order)} | {-1: -1}
        parents, marks = [number[parents[node]] for node in order], [marks[node] for node in order]
        world = World(list(WARPS)[seed % len(WARPS)], depth_of(parents), seed)
        tree, chance = all_trees(world, parents, replacement, marks)
        error = (emitted_distribution(world, tree, chance, rule) - world.target()).abs().max()
        assert error < 1e-12, (parents, marks, float(error))


def depth_in(parents: list[int], node: int) -> int:
    return 0 if node < 0 else 1 + depth_in(parents, parents[node])


def test_enumeration_notices_certain_children_that_pass_for_draws():
    for rule in RULES:
        world, parents = World("plain", 1), SHAPES["three children"][:3]
        tree, chance = all_trees(world, parents, False, [True, False, False])
        tree.deterministic = None
        assert (emitted_distribution(world, tree, chance, rule) - world.target()).abs().max() > 1e-3


def test_emitted_distribution_of_certain_trees_is_the_targets():
    """The walk along draws of the target, and the rejections it equals: for every single tree, repeated tokens too."""
    for warp, shape in itertools.product(WARPS, SHAPES):
        parents = SHAPES[shape]
        world = World(warp, depth_of(parents))
        for tokens in torch.randint(V, (3, len(parents))):
            tree = DraftTree(tokens.expand(2, -1), torch.tensor(parents).expand(2, -1))
            for rule in RULES:
                error = (emitted_distribution(world, tree, torch.ones(2), rule) - world.target()).abs().max()
                assert error < 1e-12, (rule, tokens, float(error))
            assert (walked_distribution(world, tree) - world.target()).abs().max() < 1e-12


def walked_distribution(world: World, tree: DraftTree) -> torch.Tensor:
    """The distribution of depth + 1 tokens when `follow` walks along draws of the target, over all of them; one
    tree."""
    size = tree.tokens.shape[1]
    picks = torch.tensor(list(itertools.product(range(V), repeat=size + 1))).repeat(2, 1)
    many = DraftTree(*(part[:1].expand(len(picks), -1) for part in (tree.tokens, tree.parents)))
    p, result = world.along(world.p, many), follow(many, picks)
    mass = torch.zeros_like(p)
    drawn = p.gather(-1, picks[..., None])[..., 0].prod(1)
    mass[torch.arange(len(picks)), result.path[:, -1], result.added] = drawn
    return world.completed(many, mass)


def ranked(tree: DraftTree) -> DraftTree:
    """The same tokens under the root, the most likely first: no longer draws in their order."""
    order = tree.probs[:, 0].gather(1, tree.tokens).argsort(dim=1, descending=True, stable=True)
    return DraftTree(tree.tokens.gather(1, order), tree.parents, tree.probs, tree.replacement)


def test_enumeration_notices_drawn_children_that_are_no_draws():
    """Ranked again; of two draws the likelier one alone; and draws of the other kind."""
    for rule, replacement in itertools.product(RULES, [False, True]):
        world = World("plain", 1)
        tree, chance = all_trees(world, SHAPES["siblings"], False)
        best = ranked(tree)
        kept = DraftTree(best.tokens[:, :1], best.parents[:, :1], best.probs[:, :2])
        wide = World("plain", 2)
        other, likely = all_trees(wide, SHAPES["bushy"], replacement)
        other.replacement = not replacement
        for found, wrong, drawn in ((world, best, chance), (world, kept, chance), (wide, other, likely)):
            assert (emitted_distribution(found, wrong, drawn, rule) - found.target()).abs().max() > 1e-3


def test_enumeration_notices_leaves_taken_in_another_order(monkeypatch):
    world, parents = World("plain", 2), SHAPES["bushy"]
    tree, chance = all_trees(world, parents, False)
    levels = tree_verification._post_order(tree).amax() - torch.arange(len(parents) + 1)
    monkeypatch.setattr(tree_verification, "_post_order", lambda tree: levels.expand(len(tree.tokens), -1))
    assert (emitted_distribution(world, tree, chance, "block") - world.target()).abs().max() > 1e-3


def test_enumeration_notices_a_rule_judged_by_the_other(monkeypatch):
    world, parents = World("plain", 2), SHAPES["bushy"]
    tree, chance = all_trees(world, parents, False)
    right = tree_acceptance
    monkeypatch.setattr(tree_worlds, "tree_acceptance", lambda tree, p, rule: right(tree, p, "token"))
    assert (emitted_distribution(world, tree, chance, "block") - world.target()).abs().max() > 1e-3


def traverse(tree: DraftTree, p: torch.Tensor) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Traversal verification of one tree as its paper has it: (node, probability, distribution of the added token) in
    order."""
    tokens, parents = tree.tokens[0].tolist(), (tree.parents[0] + 1).tolist()
    target, drafter, weight = p[0].clone(), tree.probs[0].clone(), torch.ones(len(tokens) + 1, dtype=p.dtype)
    children = {place: [i + 1 for i, parent in enumerate(parents) if parent == place] for place in range(len(weight))}
    trials = []

    def descend(place):
        for child in children[place]:
            token = tokens[child - 1]
            weight[child] = min(1, weight[place] * target[place, token] / drafter[place, token])
            descend(child)

    descend(0)
    while True:
        place = 0
        while children[place]:
            place = children[place][0]
        trials.append((place, weight[place].clone(), target[place].clone()))
        if weight[place] > 1 - 1e-9:  # b's always is 1, and nothing comes after certainty
            return trials
        parent = parents[place - 1]
        children[parent].remove(place)
        surplus = (weight[parent] * target[parent] - drafter[parent]).clamp(min=0)
        target[parent] = (surplus / surplus.sum()).nan_to_num(nan=0.0)  # the weight is 0 then, too
        weight[parent] = surplus.sum() / (surplus.sum() + 1 - weight[parent])
        if not tree.replacement:
            drafter[parent, tokens[place - 1]] = 0
            drafter[parent] /= drafter[parent].sum()
        descend(parent)


def test_the_recursion_is_traversal_verification():
    for replacement, shape in itertools.product([False, True], SHAPES):
        world = World("plain", depth_of(SHAPES[shape]))
        tree, chance = all_trees(world, SHAPES[shape], replacement)
        p = world.along(world.p, tree)
        accept, residual = tree_acceptance(tree, p, "block")
        order = tree_verification._post_order(tree)
        for row in chance.nonzero()[::17, 0].tolist():
            one = DraftTree(
                tree.tokens[row : row + 1], tree.parents[row : row + 1], tree.probs[row : row + 1], replacement
            )
            trials = traverse(one, p[row : row + 1])
            assert order[row, [place for place, *_ in trials]].tolist() == list(range(len(trials)))
            for place, weight, distribution in trials:
                have = accept[row, place - 1] if place else torch.ones_like(weight)
                torch.testing.assert_close(have, weight, rtol=0, atol=1e-12)
                if weight > 0:
                    torch.testing.assert_close(residual[row, place], distribution, rtol=0, atol=1e-12)


def random_chain(dtype: torch.dtype, rows: int = 64, length: int = 4) -> tuple[torch.Tensor, ...]:
    """Draft, q and p, half of whose tokens are excluded, and one row where q is p."""
    logits = 2 * torch.randn(rows, 2 * length + 1, 6, dtype=dtype)
    logits = logits.masked_fill(torch.rand(logits.shape) < 0.4, float("-inf"))
    logits[..., 0] = logits[..., 0].nan_to_num(neginf=0.0)
    probs = logits.softmax(-1)
    q, p = probs[:, :length], probs[:, length:].clone()
    p[0, :length] = q[0]
    draft = torch.multinomial(q.flatten(0, 1), 1).view(rows, length)
    return draft, q, p


def test_a_chain_is_judged_as_a_chain():
    for (dtype, tolerance), replacement, (rule, chain_rule) in itertools.product(
        [(torch.float64, 1e-12), (torch.float32, 2e-5)],
        [False, True],
        [("token", token_acceptance), ("block", block_acceptance)],
    ):
        draft, q, p = random_chain(dtype)
        tree = DraftTree.chain(draft, q)
        tree.replacement = replacement
        accept, residual = tree_acceptance(tree, p, rule)
        want_accept, want_residual = chain_rule(draft, q, p)
        assert accept.dtype == residual.dtype == dtype
        torch.testing.assert_close(accept, want_accept, rtol=0, atol=tolerance)
        # where all is accepted for certain, nothing is added there and any distribution will do
        reachable = (want_accept < 1).cummax(1).values if rule == "token" else torch.ones_like(want_accept, dtype=bool)
        torch.testing.assert_close(
            residual[:, :-1][reachable], want_residual[:, :-1][reachable], rtol=0, atol=tolerance
        )
        torch.testing.assert_close(residual[:, -1], p[:, -1])


def drawn_batch(count: int, dtype: torch.dtype) -> tuple[DraftTree, torch.Tensor, World]:
    """Trees of one shape, drawn `count` times for each row of the batch, and p along them."""
    parents = SHAPES["bushy"]
    world = World("top_p", 2, seed=3)
    tree, chance = all_trees(world, parents, False)
    first, second = chance.view(2, -1)
    drawn = [torch.multinomial(first, count, True), torch.multinomial(second, count, True) + len(first)]
    rows = torch.cat(drawn)
    p = world.along(world.p, tree)[rows]
    return DraftTree(tree.tokens[rows], tree.parents[rows], tree.probs[rows].to(dtype)), p.to(dtype), world


def test_verify_tree_emits_the_targets_distribution():
    for dtype, rule in itertools.product([torch.float32, torch.float64], RULES):
        count = 30_000
        tree, p, world = drawn_batch(count, dtype)
        nodes, accepted, added = verify_tree(tree, p, torch.Generator().manual_seed(1), rule)
        assert nodes.shape == (2 * count, 5) and torch.equal((nodes >= 0).sum(1), accepted)
        kept = tree.tokens.gather(1, nodes.clamp(min=0))
        for row, part in enumerate((slice(count), slice(count, None))):
            number = torch.zeros(count, dtype=torch.long)
            for i in range(3):  # what was emitted, completed by the target to three tokens
                own = torch.multinomial(world.p[row, number], 1)[:, 0]
                token = torch.where(
                    accepted[part] > i, kept[part, i], torch.where(accepted[part] == i, added[part], own)
                )
                number = V * number + 1 + token
            assert chi_square(number - first_of_length(3), world.target()[row]) > 1e-4


def test_excluded_tokens_are_never_emitted_in_float32():
    """Distributions with half the tokens excluded; p and q differ by rounding, a little, or much."""
    for rule, noise in itertools.product(RULES, [0.0, 1e-7, 1e-3, 2.0]):
        logits = 4 * torch.randn(5000, 1, 12)
        logits = logits.masked_fill(torch.rand(logits.shape) < 0.5, float("-inf"))
        logits[..., 0] = logits[..., 0].nan_to_num(neginf=0.0)
        q = logits.softmax(-1)
        distribution = lambda tokens, parents: q.expand(-1, tokens.shape[1], -1)  # noqa: B023, E731
        tree = drawn_tree(q[:, 0], distribution, depth=2, top_k=4, total_tokens=13)
        p = (logits + noise * torch.randn(5000, 13, 12)).masked_fill(torch.rand(5000, 13, 12) < 0.1 * noise, -1e9)
        p = p.softmax(-1)
        result = verify_sampled(tree, p, rule)
        after = p.gather(1, result.path[..., None].expand(-1, -1, 12))
        emitted = torch.arange(4) <= result.num_accepted[:, None]
        assert (after.gather(-1, result.tokens[..., None])[..., 0][emitted] > 0).all()
        if noise < 1e-2:  # the path goes on to a leaf
            assert (tree.parents + 1 == result.path[:, -1:]).any(1).float().mean() < 0.01
        else:
            assert result.num_accepted.unique().tolist() == [0, 1, 2, 3]


def named_tree(rows: int, dtype: torch.dtype) -> tuple[DraftTree, DraftTree, torch.Tensor]:
    """A tree over six tokens of twelve, the same with distributions over all, and a target that excludes some."""
    ids = torch.tensor([7, 2, 11, 0, 5, 9])
    q = (2 * torch.randn(rows, 6, dtype=dtype)).softmax(-1)
    spread = lambda tokens, parents: q[:, None].expand(-1, tokens.shape[1], -1)  # noqa: E731
    tree = drawn_tree(q, spread, depth=2, top_k=3, total_tokens=10, columns=ids)
    probs = tree.probs.new_zeros(*tree.probs.shape[:2], 12).index_copy_(-1, ids, tree.probs)
    p = (2 * torch.randn(rows, 10, 12, dtype=dtype)).masked_fill(torch.rand(rows, 10, 12) < 0.3, -torch.inf)
    p[..., 0] = p[..., 0].nan_to_num(neginf=0.0)
    p[: rows // 4] = p[: rows // 4].masked_fill(~torch.isin(torch.arange(12), ids), -torch.inf)  # nothing else is left
    p = p.softmax(-1)
    p[0] = probs[0, :1]
    return tree, DraftTree(tree.tokens, tree.parents, probs, depth=tree.depth), p


def test_distributions_over_some_tokens_are_judged_as_those_over_all():
    for rule in RULES:
        tree, whole, p = named_tree(200, torch.float64)
        for got, want in zip(tree_acceptance(tree, p, rule), tree_acceptance(whole, p, rule)):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
        runs = [verify_tree(each, p, torch.manual_seed(5), rule) for each in (tree, whole)]
        assert all(torch.equal(one, other) for one, other in zip(*runs))


def test_nodes_beyond_the_count_are_as_if_not_drafted():
    for rule in RULES:
        tree, p, _ = drawn_batch(50, torch.float64)
        counts = torch.arange(100) % 6
        accept, residual = tree_acceptance(DraftTree(tree.tokens, tree.parents, tree.probs, num_nodes=counts), p, rule)
        for count in range(6):
            rows = counts == count
            small = DraftTree(tree.tokens[rows, :count], tree.parents[rows, :count], tree.probs[rows])
            want_accept, want_residual = tree_acceptance(small, p[rows, : count + 1], rule)
            torch.testing.assert_close(accept[rows, :count], want_accept, rtol=0, atol=1e-12)
            torch.testing.assert_close(residual[rows, : count + 1], want_residual, rtol=0, atol=1e-12)
            assert (accept[rows, count:] == 0).all()


def test_nodes_may_lose_all_their_children_whatever_was_drawn():
    """Which do depends on the text up to them."""
    for rule, shape in itertools.product(RULES, [[-1, -1, 0, 1], [-1, 0, 1], [-1, 0, 0, 1]]):
        world = World("plain", 3)
        tree, chance = all_trees(world, shape, replacement=False)
        before = texts(tree).gather(1, tree.parents + 1)
        real = ((before * 7 % 5 % 2 == 0)[:, None] | ~tree.mask()[:, 1:, 1:]).all(-1)
        left = of_real(tree, real)
        assert 0 < left.num_nodes.double().mean() < len(shape)
        assert (emitted_distribution(world, left, chance, rule) - world.target()).abs().max() < 1e-12


def test_a_drawn_chain_of_rows_of_different_lengths():
    for rule in RULES:
        draft, q, p = random_chain(torch.float32, rows=4000)
        counts = torch.arange(4000) % 5
        result = verify_sampled(DraftTree.chain(draft, q, num_nodes=counts), p, rule)
        assert (result.num_accepted <= counts).all() and (result.num_accepted[counts == 4] == 4).any()
        after = p.gather(1, result.num_accepted[:, None, None].expand(-1, 1, 6))[:, 0]
        assert (after.gather(1, result.added[:, None]) > 0).all()


def test_chains_and_certain_trees_take_their_short_ways():
    """A chain is verified as `verify` does, and deterministic trees by a walk, from the same random numbers."""
    for rule in RULES:
        draft, q, p = random_chain(torch.float64)
        seeded = lambda: torch.Generator().manual_seed(5)  # noqa: E731
        accepted, added, _ = verify(draft, q, p, rule, seeded())
        result = verify_sampled(DraftTree.chain(draft, q), p, rule, seeded())
        assert torch.equal(result.num_accepted, accepted) and torch.equal(result.added, added)
        assert torch.equal(result.tokens[:, :-1][result.nodes >= 0], draft[result.nodes >= 0])
        walked, picked = verify_sampled(DraftTree.chain(draft), p, rule, seeded()), draw(p, seeded())
        assert torch.equal(walked.tokens, picked)


def test_verification_never_makes_the_host_wait():
    for counts, replacement in itertools.product([None, torch.tensor([5, 2])], [False, True]):
        tokens, parents = torch.tensor([[0, 1, 0, 1, 2], [2, 1, 0, 1, 2]]), torch.tensor([SHAPES["bushy"]] * 2)
        p = torch.rand(2, 6, 3).softmax(-1)
        drawn = DraftTree(tokens, parents, p.flip(0), replacement, depth=2, num_nodes=counts)
        certain = DraftTree(tokens, parents, depth=2, num_nodes=counts)
        chains = [DraftTree.chain(tokens, q, counts) for q in (None, p[:, :-1])]
        for mode in (contextlib.nullcontext(), NoSync()):  # index tensors are made once, in the first round
            with mode:
                for tree, rule in itertools.product([drawn, certain, *chains], RULES):
                    result = verify_sampled(tree, p, rule)
                    result.nodes, result.path, result.added, tree.positions(), tree.paths()  # noqa: B018
                    follow(tree, p.argmax(-1))
                    tree_acceptance(tree, p, rule)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_where_rounding_leaves_no_residual_the_target_is_drawn_from(rule, monkeypatch):
    """Drafts that are all but certain to be kept, and are not: what is added still follows the target."""
    rows, rand, first = 512, torch.rand, [1 - 2**-25]
    q, p = torch.full((rows, 2, 2), 0.5), torch.tensor([0.5 - 2**-25, 0.5]).expand(rows, 2, 2)
    tree = DraftTree(torch.zeros(rows, 1, dtype=torch.long), torch.full((rows, 1), -1), q)
    monkeypatch.setattr(torch, "rand", lambda *a, **k: torch.full(a[0], first.pop()) if first else rand(*a, **k))
    result = tree_verification.verify_drawn_tree(tree, p, rule)
    assert not result.num_accepted.any() and 0.4 < result.added.float().mean() < 0.6
