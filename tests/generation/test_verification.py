"""Verification: exact distributions by enumeration, goldens, drawn distributions by chi-square, and inputs at the
edge."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.distributions import golden
from tokenahead.generation.tensors.sampling import pick
from tokenahead.generation.verification import rules as verification
from tokenahead.generation.verification.rules import block_acceptance, token_acceptance, verify
from tokenahead.generation.verification.verifiers import race_block
from tokenahead.testing import chi_square

RULES = {"token": token_acceptance, "block": block_acceptance}
WAYS = RULES | {"race": block_acceptance}
"""Ways of drawing, and the probabilities that each draws from."""
V = 3
GOLDENS = ("verify_ff_n3", "verify_cp_n4", "verify_hmm_n4_first", "verify_btree_n5_first")


@dataclass
class World:
    """A target and a drafter over V tokens, as tables over prefixes: `p[i]` and `q[i]` are [V] * (i + 1)."""

    p: list[torch.Tensor]
    q: list[torch.Tensor]

    @property
    def length(self) -> int:
        return len(self.q)

    def cases(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """All V^m drafts [N, m], q [N, m, V] and p [N, m + 1, V] along each, and the drafts' probabilities [N]."""
        drafts = torch.tensor(list(itertools.product(range(V), repeat=self.length)))
        rows = [
            torch.stack(
                [torch.stack([distribution[i][tuple(d[:i])] for i in range(len(distribution))]) for d in drafts]
            )
            for distribution in (self.q, self.p)
        ]
        drawn = rows[0].gather(-1, drafts[..., None])[..., 0].prod(1)
        return drafts, rows[0], rows[1], drawn

    def target(self) -> torch.Tensor:
        """Distribution of the next m + 1 tokens, [V] * (m + 1)."""
        return self.tail(0)

    def tail(self, start: int) -> torch.Tensor:
        """Distribution of tokens start + 1 .. m + 1 given those before, [V] * (m + 1)."""
        distribution = torch.ones([V] * (self.length + 1), dtype=torch.float64)
        for i in range(start, self.length + 1):
            distribution = distribution * self.p[i].reshape([V] * (i + 1) + [1] * (self.length - i))
        return distribution


def tables(depth: int, seed: int, zeros: float = 0.0) -> list[torch.Tensor]:
    """Random conditionals for prefixes of 0 .. depth - 1 tokens; a share `zeros` of the entries is 0."""
    generator = torch.Generator().manual_seed(seed)
    probs = []
    for i in range(depth):
        weights = torch.rand([V] * (i + 1), generator=generator, dtype=torch.float64) ** 3 + 1e-3
        dropped = torch.rand(weights.shape, generator=generator) < zeros
        dropped.scatter_(-1, weights.argmax(-1, keepdim=True), False)
        weights = weights.masked_fill(dropped, 0)
        probs.append(weights / weights.sum(-1, keepdim=True))
    return probs


def one_hot(probs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The greedy drafter of some conditionals."""
    return [torch.nn.functional.one_hot(distribution.argmax(-1), V).double() for distribution in probs]


def world(kind: str, length: int, seed: int) -> World:
    p = tables(length + 1, seed, zeros=0.4 if kind in ("zeros in p", "zeros in both") else 0.0)
    q = tables(length, seed + 1000, zeros=0.4 if kind in ("zeros in q", "zeros in both") else 0.0)
    if kind == "equal":
        q = [distribution.clone() for distribution in p[:-1]]
    elif kind == "greedy draft":
        q = one_hot(q)
    elif kind == "greedy draft of the target":
        q = one_hot(p[:-1])
    elif kind == "greedy target":
        p = one_hot(p)
    elif kind == "disjoint":
        p = [distribution * torch.tensor([0.0, 1.0, 1.0]) for distribution in p]
        p = [distribution / distribution.sum(-1, keepdim=True) for distribution in p]
        q = [torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64).expand(distribution.shape) for distribution in q]
    return World(p, q)


KINDS = (
    "random",
    "zeros in p",
    "zeros in q",
    "zeros in both",
    "equal",
    "greedy draft",
    "greedy draft of the target",
    "greedy target",
    "disjoint",
)


def accepted_distribution(rule: str, accept: torch.Tensor) -> torch.Tensor:
    """P(s drafts accepted) for s = 0..m, [N, m + 1]."""
    one = torch.ones_like(accept[:, :1])
    if rule == "token":  # the first failure ends
        return torch.cat([one, accept.cumprod(1)], 1) * torch.cat([1 - accept, one], 1)
    failing = (1 - accept).flip(1).cumprod(1).flip(1)  # all later ones fail
    return torch.cat([one, accept], 1) * torch.cat([failing, one], 1)


def emitted_distribution(world: World, rule: str) -> torch.Tensor:
    """Distribution of m + 1 tokens: the accepted drafts, the added token, and then the target's own, [V] * (m + 1)."""
    drafts, q, p, drawn = world.cases()
    accept, residual = RULES[rule](drafts, q, p)
    assert accept.isfinite().all() and residual.isfinite().all()
    counts = accepted_distribution(rule, accept) * drawn[:, None]
    distribution = torch.zeros([V] * (world.length + 1), dtype=torch.float64)
    for count in range(world.length + 1):
        rest = world.tail(count + 1)
        for row, draft in enumerate(drafts):
            kept = tuple(draft[:count])
            added = residual[row, count].reshape([V] + [1] * (world.length - count))
            distribution[kept] += counts[row, count] * added * rest[kept]
    return distribution


def expected_accepted(world: World, rule: str) -> float:
    drafts, q, p, drawn = world.cases()
    counts = accepted_distribution(rule, RULES[rule](drafts, q, p)[0])
    return float((counts @ torch.arange(world.length + 1.0, dtype=torch.float64)) @ drawn)


def test_emitted_distribution_is_the_targets():
    for length, kind, rule in itertools.product([1, 2, 3], KINDS, RULES):
        for seed in range(5):
            case = world(kind, length, seed)
            error = (emitted_distribution(case, rule) - case.target()).abs().max()
            assert error < 1e-12, (seed, float(error))


def test_enumeration_notices_a_wrong_residual(monkeypatch):
    """Adding a token of the target's own distribution after a rejection must show, or the test above proves nothing."""
    case = world("random", 2, 0)
    monkeypatch.setitem(RULES, "token", lambda draft, q, p: (token_acceptance(draft, q, p)[0], p))
    assert (emitted_distribution(case, "token") - case.target()).abs().max() > 1e-2


def test_block_accepts_at_least_as_many():
    for kind in KINDS:
        gains = []
        for length, seed in itertools.product([1, 2, 3], range(5)):
            case = world(kind, length, seed)
            gains.append(expected_accepted(case, "block") - expected_accepted(case, "token"))
        assert min(gains) > -1e-12
        if kind == "random":
            assert max(gains) > 1e-3
        if kind == "equal":
            assert max(gains) < 1e-12


def test_published_example():
    """Sun et al. 2024, section 2: 10/9 accepted tokens become 11/9."""
    p, q = (torch.tensor(distribution, dtype=torch.float64) for distribution in ([1 / 3, 2 / 3, 0], [2 / 3, 1 / 3, 0]))
    case = World([p.expand([V] * (i + 1)) for i in range(3)], [q.expand([V] * (i + 1)) for i in range(2)])
    assert expected_accepted(case, "token") == pytest.approx(10 / 9, abs=1e-15)
    assert expected_accepted(case, "block") == pytest.approx(11 / 9, abs=1e-15)


def test_goldens():
    for name, (rule, accept_key) in itertools.product(GOLDENS, [("token", "token_accept"), ("block", "block_h")]):
        data = golden(name)
        length = data["q"].shape[1]
        accept, residual = RULES[rule](data["x"], data["q"], data["p"])
        torch.testing.assert_close(accept, data[accept_key][:, -length:], rtol=0, atol=1e-12)
        torch.testing.assert_close(residual, data[f"{rule}_residual"], rtol=0, atol=1e-12)
        torch.testing.assert_close(accepted_distribution(rule, accept), data[f"{rule}_len_prob"], rtol=0, atol=1e-12)


def draws(case: World, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`count` drafts from the world's drafter, by number, with the distributions along each."""
    drafts, q, p, drawn = case.cases()
    number = torch.multinomial(drawn, count, replacement=True)
    return number, drafts[number], q[number], p[number]


def drawn_by(way: str, draft: torch.Tensor, q: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted drafts and the added token; a race must also have written the drafts before it."""
    if way != "race":
        return verify(draft, q, p, way)[:2]
    accepted, tokens, check = race_block(draft, q, p)
    is_after = torch.arange(draft.shape[1]) >= accepted[:, None]
    assert ((tokens[:, :-1] == draft) | is_after).all() and check.isfinite().all()
    return accepted, tokens.gather(1, accepted[:, None])[:, 0]


@pytest.mark.core
def test_verify_draws_from_the_distributions():
    for dtype, rule, (kind, length) in itertools.product(
        [torch.float32, torch.float64], WAYS, [("random", 1), ("random", 3), ("zeros in both", 3), ("greedy draft", 2)]
    ):
        case = world(kind, length, 3)
        number, draft, q, p = draws(case, 100_000)
        accepted, added = drawn_by(rule, draft, q.to(dtype), p.to(dtype))
        drafts, q, p, drawn = case.cases()
        accept, residual = WAYS[rule](drafts, q, p)
        distribution = drawn[:, None, None] * accepted_distribution(rule, accept)[..., None] * residual
        cells = (number * (length + 1) + accepted) * V + added
        assert chi_square(cells, distribution.flatten()) > 1e-4


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_added_token_is_the_inverse_cdf_of_the_uniform_at_its_place(rule):
    _, draft, q, p = draws(world("random", 3, 3), 256)
    uniforms = torch.rand(256, 4, dtype=p.dtype, generator=torch.Generator().manual_seed(0))
    accepted, added, check = verify(draft, q, p, rule, uniforms=uniforms)
    rows = torch.arange(256)
    assert check is None and set(accepted.tolist()) == {0, 1, 2, 3}
    residual = WAYS[rule](draft, q, p)[1][rows, accepted]
    assert torch.equal(added, pick(uniforms[rows, accepted], residual))


def test_verify_uses_its_generator_only():
    number, draft, q, p = draws(world("random", 3, 5), 64)
    state = torch.get_rng_state()
    runs = [verify(draft, q, p, "block", torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(runs[0][:2], runs[1][:2]))
    assert not torch.equal(runs[0][1], runs[2][1])


def close_pair(rows: int, length: int, size: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 distributions p [rows, length + 1, size], with half the tokens excluded, and a q that hardly
    differs."""
    logits = 4 * torch.randn(rows, length + 1, size)
    p = logits.masked_fill(torch.rand(logits.shape) < 0.5, float("-inf"))
    p[..., 0] = p[..., 0].nan_to_num(neginf=0.0)  # one token at least
    q = (logits if noise > 1 else p)[:, :length] + noise * torch.randn(rows, length, size)
    return p.softmax(-1), q.softmax(-1)


def test_excluded_tokens_are_never_emitted_in_float32():
    for noise, rule in itertools.product([0.0, 1e-7, 1e-3, 2.0], WAYS):
        p, q = close_pair(rows=20_000, length=4, size=12, noise=noise)
        draft = torch.multinomial(q.flatten(0, 1), 1).view(q.shape[:2])
        accepted, added = drawn_by(rule, draft, q, p)
        assert (p[torch.arange(len(p)), accepted].gather(1, added[:, None]) > 0).all()
        of_drafts = p[:, :-1].gather(-1, draft[..., None])[..., 0]
        assert (of_drafts[torch.arange(4) < accepted[:, None]] > 0).all()
        assert accepted.min() >= 0 and accepted.max() <= 4
        if noise < 1e-2:
            assert accepted.float().mean() > 3.9


def test_an_excluded_draft_is_refused_by_every_uniform(monkeypatch):
    for rule, uniform in itertools.product(RULES, [0.0, 1 - 2**-24]):
        p = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
        q = torch.tensor([[[1.0, 0.0]]])
        monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.full(shape, uniform, dtype=options["dtype"]))  # noqa: B023
        accepted, added, _ = verify(torch.tensor([[0]]), q, p, rule)
        assert (accepted.item(), added.item()) == (0, 1)


def test_a_residual_of_rounding_noise_emits_no_excluded_token(monkeypatch):
    """All that is left after the rejection is 1e-45, which a race would round to 0 like the excluded token's."""
    for rule in RULES:
        q = torch.tensor([0.0, 0.9, 0.0, 0.1])
        p = torch.tensor([0.0, 0.9, 1e-45, 0.09999999])
        rows = [torch.stack(probs)[None].expand(2000, -1, -1) for probs in ([q], [p, p])]
        refusing = 0.0 if rule == "block" else 1 - 2**-24
        monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.full(shape, refusing, dtype=options["dtype"]))  # noqa: B023
        accepted, added, _ = verify(torch.full((2000, 1), 3), *rows, rule)
        assert (accepted == 0).all() and (p[added] > 0).all()


def test_float32_agrees_with_float64_on_long_drafts():
    for rule in RULES:
        p = (3 * torch.randn(200, 16, 320, dtype=torch.float64)).softmax(-1)
        q = (p[:, :-1].log() + 0.3 * torch.randn(200, 15, 320, dtype=torch.float64)).softmax(-1)
        draft = torch.multinomial(q.flatten(0, 1), 1).view(200, 15)
        exact, single = (
            accepted_distribution(rule, RULES[rule](draft, q.to(d), p.to(d))[0]) for d in (q.dtype, torch.float32)
        )
        assert 2 < float((exact @ torch.arange(16, dtype=torch.float64)).mean()) < 13
        assert (exact - single).abs().sum(1).max() < 1e-4


def test_block_keeps_a_prefix_exactly_with_its_probability():
    """`verify` asks without a division what `block_acceptance` says in the words of the paper."""
    for kind in ["random", "zeros in both", "greedy draft"]:
        _, draft, q, p = draws(world(kind, 4, 9), 500)
        accept, _ = block_acceptance(draft, q, p)
        for uniform in torch.linspace(0, 1, 41, dtype=torch.float64)[:-1]:
            u = uniform.expand(draft.shape)
            near = ((1 - accept) - u).abs().amin(1) < 1e-12
            kept = ((1 - accept) <= u) * torch.arange(1, 5)
            found = verification._block_accepted(draft, q, p, u)[0]
            assert torch.equal(found[~near], kept.amax(1)[~near]) and near.double().mean() < 0.9


WEIGHTS = st.sampled_from([0.0, 0.0, 1e-300, 1e-30, 1e-9, 0.3, 1.0, 1.0])
"""With 0 twice as often, and numbers that are nothing, or everything, in float32."""


@st.composite
def probs(draw, dtype):
    """A draft [1, m] and distributions q [1, m, v], p [1, m + 1, v]; the draft need not be possible under q."""
    length, size = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    rows = []
    for _ in range(2 * length + 1):
        row = torch.tensor(draw(st.lists(WEIGHTS, min_size=size, max_size=size)), dtype=dtype)
        row[draw(st.integers(0, size - 1))] += 1e-9
        rows.append(row / row.sum())
    draft = torch.tensor([draw(st.lists(st.integers(0, size - 1), min_size=length, max_size=length))])
    q = torch.stack(rows[:length])[None]
    same = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    p = torch.stack([q[0, i] if i < length and same[i] else rows[length + i] for i in range(length + 1)])[None]
    return draft, q, p


def check_probs(rule: str, draft: torch.Tensor, q: torch.Tensor, p: torch.Tensor, tolerance: float) -> None:
    accept, residual = RULES[rule](draft, q, p)
    assert accept.shape == draft.shape and residual.shape == p.shape
    assert accept.isfinite().all() and accept.min() >= 0 and accept.max() <= 1 + tolerance
    assert residual.isfinite().all() and residual.min() >= 0
    assert (residual.sum(-1) - 1).abs().max() <= tolerance
    assert (residual[p == 0] == 0).all()
    assert (accept[p[:, :-1].gather(-1, draft[..., None])[..., 0] == 0] == 0).all()
    torch.testing.assert_close(residual[:, -1], p[:, -1])


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=80)
@given(case=probs(torch.float32))
def test_distributions_are_distributions_in_float32(rule, case):
    check_probs(rule, *case, tolerance=1e-5)
    for way in (rule, "race"):
        accepted, added = drawn_by(way, *case)
        assert case[2][0, accepted[0], added[0]] > 0


@settings(max_examples=60)
@given(case=probs(torch.float64))
def test_block_follows_its_recursion(case):
    """The closed form against P_i = min(1, P_{i-1} p_i / q_i) and h_i = Z_i / (Z_i + 1 - P_i), one step at a time."""
    draft, q, p = (tensor[0] for tensor in case)
    weight, want = 1.0, []
    for i, token in enumerate(draft.tolist()):
        above, below = float(p[i, token]), float(q[i, token])
        assume(below > 0)  # or else it cannot have been drafted
        product = weight * (above / below)
        assume(product == weight or abs(product - 1) > 1e-9)  # h is 0 / 0 at P = 1, and rounding near it
        weight = min(1.0, product)
        mass = float((weight * p[i + 1] - q[i + 1]).clamp(min=0).sum()) if i + 1 < len(draft) else weight
        rest = mass + 1 - weight
        want.append(mass if i + 1 == len(draft) else mass / rest if rest > 0 else 1.0)
    accept = block_acceptance(*case)[0][0]
    torch.testing.assert_close(accept, torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-9)
