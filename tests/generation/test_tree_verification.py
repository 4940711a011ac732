"""Tree verification: exact laws by enumeration, chains as a special case, planted mistakes."""

import contextlib
import itertools

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tests.laws import chi_square
from tests.no_sync import NoSync
from tokenahead.generation import tree_verification
from tokenahead.generation.processing import Processing
from tokenahead.generation.tree_verification import follow, kept_path, tree_acceptance
from tokenahead.generation.trees import DraftTree, drawn_tree, path_columns
from tokenahead.generation.verification import (
    block_acceptance,
    token_acceptance,
    verify,
    verify_sampled,
    verify_tree,
)
from tokenahead.modeling.sampling import race

V = 3
SHAPES = {
    "chain": [-1, 0, 1],
    "siblings": [-1, -1],
    "bushy": [-1, -1, 0, 0, 1],
    "lopsided": [-1, 0, 0, -1, 2],
    "late fork": [-1, 0, 1, 1],
    "three children": [-1, -1, -1, 1, 1],
    "interleaved": [-1, 0, -1, 0, 2],
}
WARPS = {
    "plain": [],
    "temperature": [TemperatureLogitsWarper(0.5)],
    "top_p": [TopPLogitsWarper(0.9)],
    "top_k": [TopKLogitsWarper(2)],
}
RULES = ("token", "block")


class World:
    """Targets and drafters of a batch: for d tokens of context the laws p[d] and q[d], [2, V^d, V]."""

    def __init__(self, warp: str, depth: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        processing, self.depth = Processing(LogitsProcessorList(WARPS[warp])), depth
        self.p, self.q = (
            [
                processing.warp((1.5 * torch.randn(2, V**d, V, generator=generator, dtype=torch.float64)).softmax(-1))
                for d in range(depth + 1)
            ]
            for _ in range(2)
        )

    def along(self, laws: list[torch.Tensor], parents: list[int], tokens: torch.Tensor) -> torch.Tensor:
        """The laws after every place of trees [2 * n, m], the first n of which belong to the batch's first row."""
        batch, found = torch.arange(2).repeat_interleave(len(tokens) // 2), []
        for number, depth in contexts(parents, tokens):
            found.append(laws[depth][batch, number])
        return torch.stack(found, dim=1)

    def text(self, emitted: list[torch.Tensor]) -> torch.Tensor:
        """The law of depth + 1 tokens [2, V^(depth + 1)] where emitted[d] [2, V^(d + 1)] says how the texts begin."""
        law = emitted[0]
        for d in range(1, self.depth + 1):
            law = (law[..., None] * self.p[d]).flatten(1) + emitted[d]
        return law

    def target(self) -> torch.Tensor:
        return self.text([self.p[0][:, 0]] + [torch.zeros(2, V ** (d + 1)) for d in range(1, self.depth + 1)])


def contexts(parents: list[int], tokens: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """For every place the number [n] that its path spells to the base V, and the length of the path."""
    found = [(torch.zeros(len(tokens), dtype=torch.long), 0)]
    for node, parent in enumerate(parents):
        number, depth = found[parent + 1]
        found.append((number * V + tokens[:, node], depth + 1))
    return found


def depth_of(parents: list[int]) -> int:
    return max(depth for _, depth in contexts(parents, torch.zeros(1, len(parents), dtype=torch.long)))


def all_trees(world: World, parents: list[int], replacement: bool) -> tuple[DraftTree, torch.Tensor]:
    """Every way to draw a tree, once for each row of the batch, and its probability [2 * n].

    Where siblings have used up their law, the next one takes the first token that is left: it is no draw of it.
    """
    tokens = torch.tensor(list(itertools.product(range(V), repeat=len(parents)))).repeat(2, 1)
    laws, rows = world.along(world.q, parents, tokens), torch.arange(len(tokens))
    chance, left = torch.ones(len(tokens), dtype=torch.float64), laws.clone()
    unused = torch.ones_like(laws)
    for node, parent in enumerate(parents):
        token, law = tokens[:, node], left[:, parent + 1]
        empty = law.sum(-1) == 0
        first = unused[:, parent + 1].argmax(-1) == token
        chance *= torch.where(empty, first.double(), law[rows, token] / law.sum(-1).masked_fill(empty, 1))
        if not replacement:
            left[rows, parent + 1, token] = 0
            unused[rows, parent + 1, token] = 0
    drawn = chance > 0
    assert torch.allclose(chance.view(2, -1).sum(1), torch.ones(2, dtype=torch.float64))
    # both rows of the batch keep all trees, those that cannot be drawn with probability 0 and laws that allow them
    laws = torch.where(drawn[:, None, None], laws, torch.full_like(laws, 1 / V))
    return DraftTree(tokens, torch.tensor(parents).expand_as(tokens), laws, replacement), chance


def ends(tree: DraftTree, accept: torch.Tensor, rule: str) -> torch.Tensor:
    """The probability that the path ends at each place, [n, m + 1], over all outcomes of the tries."""
    law = torch.zeros(len(accept), accept.shape[1] + 1, dtype=torch.float64)
    for outcome in itertools.product([False, True], repeat=accept.shape[1]):
        kept = torch.tensor(outcome).expand(accept.shape)
        last = path_columns(kept_path(tree, kept, rule), tree.depth)[:, -1:]
        law.scatter_add_(1, last, torch.where(kept, accept, 1 - accept).prod(1, keepdim=True))
    return law


def emitted_law(world: World, parents: list[int], tree: DraftTree, chance: torch.Tensor, rule: str) -> torch.Tensor:
    """The law of depth + 1 tokens: the kept path, the added token, then the target's own."""
    accept, residual = tree_acceptance(tree, world.along(world.p, parents, tree.tokens), rule)
    assert accept.isfinite().all() and residual.isfinite().all()
    mass = (chance[:, None] * ends(tree, accept, rule))[..., None] * residual
    return world.text(gather_texts(world, contexts(parents, tree.tokens), mass))


def gather_texts(world: World, places: list[tuple[torch.Tensor, int]], mass: torch.Tensor) -> list[torch.Tensor]:
    """emitted[d] from the mass [2 * n, places, V] of every token added at every place."""
    emitted = [torch.zeros(2, V ** (d + 1), dtype=torch.float64) for d in range(world.depth + 1)]
    half = len(mass) // 2
    for place, (number, depth) in enumerate(places):
        texts = number[:, None] * V + torch.arange(V)
        for row, part in enumerate((slice(half), slice(half, None))):
            emitted[depth][row].index_add_(0, texts[part].flatten(), mass[part, place].flatten())
    return emitted


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_emitted_law_of_drawn_trees_is_the_targets(shape, warp, replacement, rule):
    parents = SHAPES[shape]
    world = World(warp, depth_of(parents))
    tree, chance = all_trees(world, parents, replacement)
    error = (emitted_law(world, parents, tree, chance, rule) - world.target()).abs().max()
    assert error < 1e-12, float(error)


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_emitted_law_of_certain_trees_is_the_targets(shape, warp):
    """The walk along draws of the target, and the rejections it equals: for every single tree, repeated tokens too."""
    parents = SHAPES[shape]
    world = World(warp, depth_of(parents))
    for tokens in torch.randint(V, (3, len(parents))):
        tree = DraftTree(tokens.expand(2, -1), torch.tensor(parents).expand(2, -1))
        for rule in RULES:
            error = (emitted_law(world, parents, tree, torch.ones(2), rule) - world.target()).abs().max()
            assert error < 1e-12, (rule, tokens, float(error))
        assert (walked_law(world, parents, tokens) - world.target()).abs().max() < 1e-12


def walked_law(world: World, parents: list[int], tokens: torch.Tensor) -> torch.Tensor:
    """The law of depth + 1 tokens when `follow` walks along draws of the target, over all of them."""
    picks = torch.tensor(list(itertools.product(range(V), repeat=len(parents) + 1))).repeat(2, 1)
    tree = DraftTree(tokens.expand(len(picks), -1), torch.tensor(parents).expand(len(picks), -1))
    p = world.along(world.p, parents, tree.tokens)
    verdict = follow(tree, picks)
    mass = torch.zeros_like(p)
    drawn = p.gather(-1, picks[..., None])[..., 0].prod(1)
    last = verdict.columns[:, -1]
    mass[torch.arange(len(picks)), last, verdict.added] = drawn
    return world.text(gather_texts(world, contexts(parents, tree.tokens), mass))


def ranked(tree: DraftTree) -> DraftTree:
    """The same tokens under the root, likeliest first: no longer draws in their order."""
    order = tree.laws[:, 0].gather(1, tree.tokens).argsort(dim=1, descending=True, stable=True)
    return DraftTree(tree.tokens.gather(1, order), tree.parents, tree.laws, tree.replacement)


@pytest.mark.parametrize("rule", RULES)
def test_enumeration_notices_drawn_children_that_were_ranked_again(rule):
    world, parents = World("plain", 1), SHAPES["siblings"]
    tree, chance = all_trees(world, parents, False)
    error = (emitted_law(world, parents, ranked(tree), chance, rule) - world.target()).abs().max()
    assert error > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_enumeration_notices_drawn_children_that_were_dropped(rule):
    """The likelier of two draws is no draw."""
    world = World("plain", 1)
    tree, chance = all_trees(world, SHAPES["siblings"], False)
    best = ranked(tree)
    kept = DraftTree(best.tokens[:, :1], best.parents[:, :1], best.laws[:, :2])
    assert (emitted_law(world, [-1], kept, chance, rule) - world.target()).abs().max() > 1e-3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("replacement", [False, True])
def test_enumeration_notices_the_wrong_kind_of_draws(replacement, rule):
    world, parents = World("plain", 2), SHAPES["bushy"]
    tree, chance = all_trees(world, parents, replacement)
    tree.replacement = not replacement
    assert (emitted_law(world, parents, tree, chance, rule) - world.target()).abs().max() > 1e-3


def test_enumeration_notices_leaves_taken_in_another_order(monkeypatch):
    world, parents = World("plain", 2), SHAPES["bushy"]
    tree, chance = all_trees(world, parents, False)
    levels = tree_verification._post_order(tree).amax() - torch.arange(len(parents) + 1)
    monkeypatch.setattr(tree_verification, "_post_order", lambda tree: levels.expand(len(tree.tokens), -1))
    assert (emitted_law(world, parents, tree, chance, "block") - world.target()).abs().max() > 1e-3


def test_enumeration_notices_a_rule_judged_by_the_other(monkeypatch):
    world, parents = World("plain", 2), SHAPES["bushy"]
    tree, chance = all_trees(world, parents, False)
    right = tree_acceptance
    monkeypatch.setitem(globals(), "tree_acceptance", lambda tree, p, rule: right(tree, p, "token"))
    assert (emitted_law(world, parents, tree, chance, "block") - world.target()).abs().max() > 1e-3


def expected_accepted(world: World, parents: list[int], replacement: bool, rule: str) -> torch.Tensor:
    tree, chance = all_trees(world, parents, replacement)
    accept, _ = tree_acceptance(tree, world.along(world.p, parents, tree.tokens), rule)
    return (chance * (ends(tree, accept, rule) * tree.positions()).sum(1)).view(2, -1).sum(1)


@pytest.mark.parametrize("shape", [name for name, parents in SHAPES.items() if depth_of(parents) > 1])
def test_traversal_keeps_more_than_recursive_rejection(shape):
    gains = []
    for seed in range(4):
        world = World("plain", depth_of(SHAPES[shape]), seed)
        block, token = (expected_accepted(world, SHAPES[shape], False, rule) for rule in RULES[::-1])
        gains.append(block - token)
    assert torch.stack(gains).min() > -1e-12 and torch.stack(gains).mean() > 1e-3


def random_chain(dtype: torch.dtype, rows: int = 64, length: int = 4) -> tuple[torch.Tensor, ...]:
    """Draft, q and p, half of whose tokens are excluded, and one row where q is p."""
    logits = 2 * torch.randn(rows, 2 * length + 1, 6, dtype=dtype)
    logits = logits.masked_fill(torch.rand(logits.shape) < 0.4, float("-inf"))
    logits[..., 0] = logits[..., 0].nan_to_num(neginf=0.0)
    laws = logits.softmax(-1)
    q, p = laws[:, :length], laws[:, length:].clone()
    p[0, :length] = q[0]
    draft = torch.multinomial(q.flatten(0, 1), 1).view(rows, length)
    return draft, q, p


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize(("rule", "chain_rule"), [("token", token_acceptance), ("block", block_acceptance)])
def test_a_chain_is_judged_as_a_chain(rule, chain_rule, replacement, dtype, tolerance):
    draft, q, p = random_chain(dtype)
    tree = DraftTree.chain(draft, q)
    tree.replacement = replacement
    accept, residual = tree_acceptance(tree, p, rule)
    want_accept, want_residual = chain_rule(draft, q, p)
    assert accept.dtype == residual.dtype == dtype
    torch.testing.assert_close(accept, want_accept, rtol=0, atol=tolerance)
    # where all is accepted for certain, nothing is added there and any law will do
    reachable = (want_accept < 1).cummax(1).values if rule == "token" else torch.ones_like(want_accept, dtype=bool)
    torch.testing.assert_close(residual[:, :-1][reachable], want_residual[:, :-1][reachable], rtol=0, atol=tolerance)
    torch.testing.assert_close(residual[:, -1], p[:, -1])


def drawn_batch(count: int, dtype: torch.dtype) -> tuple[DraftTree, torch.Tensor, World]:
    """Trees of one shape, drawn `count` times for each row of the batch, and p along them."""
    parents = SHAPES["bushy"]
    world = World("top_p", 2, seed=3)
    tree, chance = all_trees(world, parents, False)
    first, second = chance.view(2, -1)
    drawn = [torch.multinomial(first, count, True), torch.multinomial(second, count, True) + len(first)]
    rows = torch.cat(drawn)
    p = world.along(world.p, parents, tree.tokens)[rows]
    return DraftTree(tree.tokens[rows], tree.parents[rows], tree.laws[rows].to(dtype)), p.to(dtype), world


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", RULES)
def test_verify_tree_emits_the_targets_law(rule, dtype):
    count = 30_000
    tree, p, world = drawn_batch(count, dtype)
    nodes, accepted, added = verify_tree(tree, p, torch.Generator().manual_seed(1), rule)
    assert nodes.shape == (2 * count, 5) and torch.equal((nodes >= 0).sum(1), accepted)
    kept = tree.tokens.gather(1, nodes.clamp(min=0))
    for row, part in enumerate((slice(count), slice(count, None))):
        number = torch.zeros(count, dtype=torch.long)
        for i in range(3):  # what was emitted, completed by the target to three tokens
            own = torch.multinomial(world.p[i][row], count, replacement=True)[number, torch.arange(count)]
            token = torch.where(accepted[part] > i, kept[part, i], torch.where(accepted[part] == i, added[part], own))
            number = number * V + token
        assert chi_square(number, world.target()[row]) > 1e-4


@pytest.mark.parametrize("rule", RULES)
def test_verify_tree_uses_its_generator_only(rule):
    tree, p, _ = drawn_batch(100, torch.float32)
    state = torch.get_rng_state()
    runs = [verify_tree(tree, p, torch.Generator().manual_seed(seed), rule) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1]))
    assert not torch.equal(runs[0][2], runs[2][2])


@pytest.mark.parametrize("noise", [0.0, 1e-7, 1e-3, 2.0])
@pytest.mark.parametrize("rule", RULES)
def test_excluded_tokens_are_never_emitted_in_float32(rule, noise):
    """Laws of which half the tokens are excluded; p and q differ by rounding, a little, or much."""
    logits = 4 * torch.randn(5000, 1, 12)
    logits = logits.masked_fill(torch.rand(logits.shape) < 0.5, float("-inf"))
    logits[..., 0] = logits[..., 0].nan_to_num(neginf=0.0)
    q = logits.softmax(-1)
    law = lambda tokens, parents: q.expand(-1, tokens.shape[1], -1)  # noqa: E731
    tree = drawn_tree(q[:, 0], law, depth=2, top_k=4, total_tokens=13)
    p = (logits + noise * torch.randn(5000, 13, 12)).masked_fill(torch.rand(5000, 13, 12) < 0.1 * noise, -1e9)
    p = p.softmax(-1)
    verdict = verify_sampled(tree, p, rule)
    after = p.gather(1, verdict.columns[..., None].expand(-1, -1, 12))
    emitted = torch.arange(4) <= verdict.accepted[:, None]
    assert (after.gather(-1, verdict.tokens[..., None])[..., 0][emitted] > 0).all()
    if noise < 1e-2:  # the path goes on to a leaf
        assert (tree.parents + 1 == verdict.columns[:, -1:]).any(1).float().mean() < 0.01
    else:
        assert verdict.accepted.unique().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("rule", RULES)
def test_nodes_beyond_the_count_are_as_if_not_drafted(rule):
    tree, p, _ = drawn_batch(50, torch.float64)
    counts = torch.arange(100) % 6
    accept, residual = tree_acceptance(DraftTree(tree.tokens, tree.parents, tree.laws, counts=counts), p, rule)
    for count in range(6):
        rows = counts == count
        small = DraftTree(tree.tokens[rows, :count], tree.parents[rows, :count], tree.laws[rows])
        want_accept, want_residual = tree_acceptance(small, p[rows, : count + 1], rule)
        torch.testing.assert_close(accept[rows, :count], want_accept, rtol=0, atol=1e-12)
        torch.testing.assert_close(residual[rows, : count + 1], want_residual, rtol=0, atol=1e-12)
        assert (accept[rows, count:] == 0).all()


@pytest.mark.parametrize("rule", RULES)
def test_a_drawn_chain_of_rows_of_different_lengths(rule):
    draft, q, p = random_chain(torch.float32, rows=4000)
    counts = torch.arange(4000) % 5
    verdict = verify_sampled(DraftTree.chain(draft, q, counts=counts), p, rule)
    assert (verdict.accepted <= counts).all() and (verdict.accepted[counts == 4] == 4).any()
    after = p.gather(1, verdict.accepted[:, None, None].expand(-1, 1, 6))[:, 0]
    assert (after.gather(1, verdict.added[:, None]) > 0).all()


@pytest.mark.parametrize("rule", RULES)
def test_chains_and_certain_trees_take_their_short_ways(rule):
    """A chain is verified as `verify` does, and certain trees by a walk, from the same random numbers."""
    draft, q, p = random_chain(torch.float64)
    seeded = lambda: torch.Generator().manual_seed(5)  # noqa: E731
    accepted, added = verify(draft, q, p, rule, seeded())
    verdict = verify_sampled(DraftTree.chain(draft, q), p, rule, seeded())
    assert torch.equal(verdict.accepted, accepted) and torch.equal(verdict.added, added)
    assert torch.equal(verdict.tokens[:, :-1][verdict.nodes >= 0], draft[verdict.nodes >= 0])
    walked, picked = verify_sampled(DraftTree.chain(draft), p, rule, seeded()), race(p, seeded())
    assert torch.equal(walked.tokens, picked)


def test_an_unknown_rule_is_refused():
    draft, q, p = random_chain(torch.float32)
    for tree in (DraftTree.chain(draft), DraftTree.chain(draft, q), DraftTree(draft, torch.full_like(draft, -1), q)):
        with pytest.raises(ValueError, match="verification='coin' is unknown; choose 'token' or 'block'"):
            verify_sampled(tree, p, "coin")
    with pytest.raises(ValueError, match="verification='coin' is unknown"):
        tree_acceptance(DraftTree.chain(draft, q), p, "coin")


@pytest.mark.parametrize("counts", [None, torch.tensor([5, 2])])
@pytest.mark.parametrize("replacement", [False, True])
def test_verification_never_makes_the_host_wait(replacement, counts):
    tokens, parents = torch.tensor([[0, 1, 0, 1, 2], [2, 1, 0, 1, 2]]), torch.tensor([SHAPES["bushy"]] * 2)
    p = torch.rand(2, 6, 3).softmax(-1)
    drawn = DraftTree(tokens, parents, p.flip(0), replacement, depth=2, counts=counts)
    certain = DraftTree(tokens, parents, depth=2, counts=counts)
    chains = [DraftTree.chain(tokens, q, counts) for q in (None, p[:, :-1])]
    for mode in (contextlib.nullcontext(), NoSync()):  # index tensors are made once, in the first round
        with mode:
            for tree, rule in itertools.product([drawn, certain, *chains], RULES):
                verdict = verify_sampled(tree, p, rule)
                verdict.nodes, verdict.columns, verdict.added, tree.positions(), tree.paths()  # noqa: B018
                follow(tree, p.argmax(-1))
                tree_acceptance(tree, p, rule)
