"""The distribution of independent positions, and what all distributions share: goldens, enumeration, precision."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.distributions import golden
from tokenahead import MTPHeadConfig
from tokenahead.modeling.heads.circuit_head import FFHead, circuit_from_logits
from tokenahead.modeling.heads.family import window_distribution
from tokenahead.modeling.heads.window_distribution import FactorisedDistribution
from tokenahead.testing import chi_square

DENSITIES = ("ff_n2_r1_v5", "ff_n5_r1_v5", "ff_n8_r1_v5", "r1_ff")
CLOSE = {torch.float64: {"rtol": 0, "atol": 1e-12}, torch.float32: {"rtol": 2e-5, "atol": 2e-5}}


def batched(data: dict[str, torch.Tensor], dtype: torch.dtype) -> FactorisedDistribution:
    """The golden's distribution, once for each of its windows `x` [K, n]."""
    logits = data["params.leaf_logits"]
    return circuit_from_logits("ff", leaf_logits=logits.expand(len(data["x"]), *logits.shape), dtype=dtype)


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got, want.to(dtype), **CLOSE[dtype])


def test_golden_condition():
    for name in DENSITIES:
        data = golden(name)
        x = data["x"]
        rest = batched(data, torch.float64).condition(x[:, 0])
        assert rest.window == x.shape[1] - 1
        assert_close(rest.log_prob(x[:, 1:]), data["rest_given_first_logq"], torch.float64)
        assert_close(rest.conditional_log_probs(x[:, 1:]), data["cond_logp"][:, 1:], torch.float64)
        firsts = torch.arange(len(data["univ_given_first"]))
        logits = data["params.leaf_logits"].expand(len(firsts), *data["params.leaf_logits"].shape)
        given_first = circuit_from_logits("ff", leaf_logits=logits).condition(firsts)
        anything = torch.zeros(len(firsts), given_first.window, dtype=torch.long)
        marginals = given_first.conditional_log_probs(anything).exp()
        assert_close(marginals, data["univ_given_first"][:, 1:], torch.float64)


@pytest.mark.by_day("dtype2")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sample_follows_the_joint(dtype):
    logits = golden("r1_ff")["params.leaf_logits"].to(dtype)
    distribution = circuit_from_logits("ff", leaf_logits=logits.expand(100_000, *logits.shape), dtype=torch.float32)
    joint = torch.einsum("a,b,c,d->abcd", *logits[:, 0].double().softmax(-1))
    for tokens in (distribution.sample(), distribution.sample_with_probs(4)[0]):
        assert tokens.shape == (100_000, 4) and tokens.dtype == torch.long
        cells = (tokens * 5 ** torch.arange(3, -1, -1)).sum(1)
        assert chi_square(cells, joint.flatten()) > 1e-4


def test_heads_of_any_dtype_are_evaluated_in_float32_at_least():
    for dtype, inside in [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ]:
        head = FFHead(6, 320, 4).to(dtype)
        head.weight.data *= 20
        hidden = torch.randn(7, 6, dtype=dtype)
        x = torch.randint(0, 320, (7, 4))
        distribution = window_distribution(head, MTPHeadConfig(window=4), hidden)
        exact = circuit_from_logits("ff", leaf_logits=head(hidden).unsqueeze(-2))
        for method in ("log_prob", "prefix_log_prob", "conditional_log_probs", "token_log_probs"):
            got, want = getattr(distribution, method)(x), getattr(exact, method)(x)
            assert got.dtype == inside and want.dtype == torch.float64
            torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-12 if inside == torch.float64 else 2e-5)
        rest = distribution.condition(x[:, 0])
        assert rest.log_prob(x[:, 1:]).dtype == rest.sample_with_probs(2)[1].dtype == inside
        assert torch.equal(distribution.greedy(), exact.greedy())


def test_drafts_state_the_distribution_they_were_drawn_from():
    distribution = FactorisedDistribution(torch.randn(5, 4, 1, 9))
    leaves = distribution.conditional_log_probs(torch.zeros(5, 4, dtype=torch.long)).exp()
    for length in (1, 3, 4):
        tokens, draft_probs = distribution.sample_with_probs(length)
        assert tokens.shape == (5, length)
        torch.testing.assert_close(draft_probs, leaves[:, :length])
        seen = []
        tokens, draft_probs = distribution.draft(
            lambda probs, seen=seen: (seen.append(probs) or probs.argmin(-1), probs**2), length
        )
        torch.testing.assert_close(torch.cat(seen, dim=-2), leaves[:, :length])
        assert torch.equal(tokens, leaves[:, :length].argmin(-1))
        torch.testing.assert_close(draft_probs, leaves[:, :length] ** 2)
        assert torch.equal(distribution.greedy(length), leaves[:, :length].argmax(-1))


def test_unknown_tokens_are_summed_out():
    """Under independence a token that is not known says nothing and costs nothing."""
    distribution = FactorisedDistribution(torch.randn(6, 4, 1, 5, dtype=torch.float64))
    x = torch.randint(0, 5, (6, 4))
    unknown = torch.rand(6, 4) < 0.5
    terms = distribution.token_log_probs(x)
    assert (distribution.token_log_probs(x, unknown)[unknown] == 0).all()
    torch.testing.assert_close(distribution.token_log_probs(x, unknown)[~unknown], terms[~unknown])
    torch.testing.assert_close(distribution.prefix_log_prob(x, unknown), terms.masked_fill(unknown, 0).cumsum(-1))
    torch.testing.assert_close(distribution.prefix_log_prob(x), terms.cumsum(-1))


LOGITS = st.sampled_from([float("-inf"), -300.0, -60.0, -1.0, 0.0, 0.5, 2.0, 60.0, 300.0])


@st.composite
def leaf_logits(draw):
    """[n, 1, v] with forbidden tokens and extreme values; no leaf forbids everything."""
    window, size = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    rows = [draw(st.lists(LOGITS, min_size=size, max_size=size)) for _ in range(window)]
    logits = torch.tensor(rows)
    allowed = draw(st.integers(0, size - 1))
    logits[:, allowed] = logits[:, allowed].nan_to_num(neginf=0.0)
    return logits[:, None]


@settings(max_examples=60)
@given(logits=leaf_logits())
def test_masked_and_extreme_leaves(logits):
    distribution = FactorisedDistribution(logits)
    greedy, drawn = distribution.greedy(), distribution.sample()
    conditionals = distribution.conditional_log_probs(greedy)
    assert not conditionals.isnan().any()
    assert (conditionals <= 0).all()
    torch.testing.assert_close(conditionals.exp().sum(-1), torch.ones(distribution.window))
    assert torch.isneginf(conditionals[torch.isneginf(logits[:, 0])]).all()
    assert distribution.log_prob(drawn).isfinite()
    assert distribution.log_prob(greedy) >= distribution.log_prob(drawn)
    worst = logits[:, 0].argmin(-1)
    prefixes = distribution.prefix_log_prob(worst)
    assert not prefixes.isnan().any()
    assert (prefixes.diff() <= 0).logical_or(prefixes.diff().isnan()).all()  # -inf stays -inf


def test_unknown_family_is_refused():
    with pytest.raises(ValueError, match="head_type=.*'mlp'"):
        circuit_from_logits("mlp", leaf_logits=torch.zeros(2, 1, 5))


def test_parameters_of_other_families_are_refused():
    for name in ["root_logits", "trans_logits", "node_logits"]:
        with pytest.raises(ValueError, match=rf"{name}.*'ff' needs none"):
            circuit_from_logits("ff", leaf_logits=torch.zeros(2, 1, 5), **{name: torch.zeros(1)})


def test_rank_of_another_family_is_refused():
    with pytest.raises(ValueError, match="leaf_logits.*'ff'.*1.*2.*3.*5"):
        circuit_from_logits("ff", leaf_logits=torch.zeros(2, 3, 5))


def test_a_root_and_nodes_of_other_leading_dimensions_are_broadcast():
    torch.manual_seed(0)
    root, node, leaf = torch.randn(3), torch.randn(5, 2, 3, 3), torch.randn(5, 4, 3, 7)
    text = torch.randint(0, 7, (5, 4))
    want, got = (
        circuit_from_logits("btree", leaf_logits=leaf, root_logits=each, node_logits=node).log_prob(text)
        for each in (root.expand(5, 3), root)
    )
    torch.testing.assert_close(got, want)
