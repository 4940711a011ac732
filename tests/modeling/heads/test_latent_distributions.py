"""CP, HMM and BTree against exact goldens: values, prefixes, conditionals, conditioning, draws, gradients."""

import json

import pytest
import torch

from tests.distributions import CIRCUITS, golden
from tokenahead.generation.tensors.sampling import draw
from tokenahead.modeling.heads.circuit_head import circuit_from_logits
from tokenahead.modeling.heads.circuits import TreeDistribution, balanced
from tokenahead.modeling.heads.window_distribution import logsumexp
from tokenahead.testing import chi_square

CASES = {case["name"]: case for case in json.loads((CIRCUITS / "index.json").read_text())["cases"]}
DENSITY = [name for name, case in CASES.items() if case["type"] == "density"]
CONTEXTUAL = [name for name, case in CASES.items() if case["type"] == "contextual"]
LOSS = [name for name, case in CASES.items() if case["type"] == "loss"]
NAMES = ("leaf_logits", "root_logits", "trans_logits", "node_logits")


def load(name):
    data = golden(name)
    parameters = {key: data["params." + key] for key in NAMES if "params." + key in data}
    return CASES[name]["kind"], parameters, data


def distribution_of(kind, parameters, count=None, **options):
    if count is not None:
        parameters = {key: value.expand(count, *value.shape) for key, value in parameters.items()}
    return circuit_from_logits(kind, **parameters, **options)


def close(got, want, tolerance=1e-9):
    keep = ~want.isnan()
    torch.testing.assert_close(got.double()[keep], want.double()[keep], atol=tolerance, rtol=tolerance)


def test_values_prefixes_and_conditionals():
    for name in DENSITY:
        kind, parameters, data = load(name)
        x = data["x"]
        distribution = distribution_of(kind, parameters, len(x))
        close(distribution.log_prob(x), data["logq"])
        close(distribution.prefix_log_prob(x), data["prefix_logq"])
        if "cond_logp" in data:
            close(distribution.conditional_log_probs(x), data["cond_logp"])
        if "cond_logp_x0" in data:
            close(distribution.conditional_log_probs(x)[0], data["cond_logp_x0"])


def test_conditioning_on_one_token_after_the_other():
    for name in [name for name in DENSITY if not name.startswith("masked")]:
        kind, parameters, data = load(name)
        x = data["x"]
        distribution = distribution_of(kind, parameters, len(x))
        close(distribution.condition(x[:, 0]).log_prob(x[:, 1:]), data["rest_given_first_logq"])
        whole = distribution.conditional_log_probs(x)
        for position in range(distribution.window - 1):
            distribution = distribution.condition(x[:, position])
            assert distribution.window == x.shape[1] - position - 1
            close(distribution.conditional_log_probs(x[:, position + 1 :]), whole[:, position + 1 :], 1e-8)


def test_greedy_is_the_argmax_of_each_conditional():
    for name in [name for name in DENSITY if "greedy_seq" in golden(name)]:
        kind, parameters, data = load(name)
        distribution = distribution_of(kind, parameters)
        assert torch.equal(distribution.greedy(), data["greedy_seq"])
        assert torch.equal(distribution.greedy(2), data["greedy_seq"][:2])


@pytest.mark.by_day("cp_n3_r2_v5", "hmm_n4_r2_v5", "btree_n7_r2_v3", "masked_cp")
@pytest.mark.parametrize("name", [name for name in DENSITY if "joint" in golden(name)])
def test_draws_follow_the_joint_distribution(name):
    kind, parameters, data = load(name)
    distribution = distribution_of(kind, parameters, 20_000, dtype=torch.float32)
    joint = data["joint"].flatten().double()
    strides = torch.tensor([data["joint"].shape[0] ** i for i in reversed(range(distribution.window))])
    for tokens in (distribution.sample(), distribution.draft(lambda probs: (draw(probs), probs))[0]):
        assert chi_square((tokens * strides).sum(-1), joint) > 1e-4


def test_the_distributions_of_a_draft_are_the_exact_conditionals():
    for name in [name for name in DENSITY if name.split("_")[0] in ("cp", "hmm", "btree")]:
        kind, parameters, _ = load(name)
        distribution = distribution_of(kind, parameters, 7)
        for tokens, q in (
            distribution.draft(lambda probs: (draw(probs), probs)),
            distribution.sample_with_probs(distribution.window),
        ):
            torch.testing.assert_close(q, distribution.conditional_log_probs(tokens).exp(), atol=1e-10, rtol=1e-6)
        tokens, q = distribution.draft(lambda probs: (draw(probs), probs), 2)
        assert tokens.shape == (7, 2) and q.shape[:2] == (7, 2)


def random_distribution(kind, window, size, rank=3, count=1, dtype=torch.float64):
    """A circuit of random parameters, and windows of `size` tokens."""
    torch.manual_seed(window)
    sums = {"hmm": {"trans_logits": torch.randn(window - 1, rank, rank) * 2}}
    if window > 2:
        sums["btree"] = {"node_logits": torch.randn(window - 2, rank, rank) * 2}
    parameters = {"leaf_logits": torch.randn(window, rank, size) * 2, "root_logits": torch.randn(rank)}
    parameters |= sums.get(kind, {})
    return circuit_from_logits(
        kind, **{key: value.expand(count, *value.shape) for key, value in parameters.items()}, dtype=dtype
    )


@pytest.mark.by_day("hmm-5", "btree-5", "btree-6", "btree-8")
@pytest.mark.parametrize("window", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("kind", ["cp", "hmm", "btree"])
def test_draws_after_a_bound_token_follow_the_conditional_joint(kind, window):
    bound = random_distribution(kind, window, 2, count=20_000, dtype=torch.float32).condition(torch.ones(20_000).long())
    windows = torch.cartesian_prod(*[torch.arange(2)] * (window - 1)).view(-1, window - 1)
    exact = random_distribution(kind, window, 2, count=len(windows)).condition(torch.ones(len(windows)).long())
    tokens, q = bound.sample_with_probs(window - 1)
    strides = 2 ** torch.arange(window - 2, -1, -1)
    assert chi_square((tokens * strides).sum(-1), exact.log_prob(windows).exp()) > 1e-4
    torch.testing.assert_close(q[:50], bound.conditional_log_probs(tokens).exp()[:50], atol=1e-5, rtol=1e-4)


def test_long_drafts_of_bytes_in_float32_state_their_conditionals():
    for kind in ["cp", "hmm", "btree"]:
        for bound in [0, 1, 2]:
            for length in [1, 6, 11, 16]:
                distribution = random_distribution(kind, 18, 320, rank=8, count=3, dtype=torch.float32)
                exact = random_distribution(kind, 18, 320, rank=8, count=3)
                for token in (319, 5)[:bound]:
                    given = torch.full((3,), token)
                    distribution, exact = distribution.condition(given), exact.condition(given)
                for tokens, q in (
                    distribution.sample_with_probs(length),
                    distribution.draft(lambda probs: (probs.argmin(-1), probs), length),
                ):
                    text = torch.nn.functional.pad(tokens, (0, 18 - bound - length))
                    want = exact.conditional_log_probs(text).exp()[:, :length]
                    torch.testing.assert_close(q.double(), want, atol=1e-6, rtol=1e-3)
                    after = distribution.next_log_probs(tokens[:, : length - 1]).exp()
                    torch.testing.assert_close(
                        (after / after.sum(-1, keepdim=True)).double(), want[:, -1], atol=1e-6, rtol=1e-3
                    )
                greedy = distribution.greedy(length)
                text = torch.nn.functional.pad(greedy, (0, 18 - bound - length))
                assert torch.equal(exact.conditional_log_probs(text)[:, :length].argmax(-1), greedy)


def test_greedy_drafts_of_trees_by_pairs_as_on_accelerators(monkeypatch):
    for window in [4, 6, 8, 16]:
        for bound in [0, 1, 2, 3]:
            for learns in [False, True]:
                monkeypatch.setattr(TreeDistribution, "counts_launches", True)
                distribution = random_distribution("btree", window, 5, rank=4, count=30)
                distribution.leaf_logits.requires_grad_(learns)
                exact = random_distribution("btree", window, 5, rank=4, count=30)
                for token in (torch.arange(30) % 5, torch.arange(30) % 3, torch.arange(30) % 2)[:bound]:
                    distribution, exact = distribution.condition(token), exact.condition(token)
                for length in (1, window - bound, max(window - bound - 1, 1)):
                    greedy = distribution.greedy(length)
                    text = torch.nn.functional.pad(greedy, (0, window - bound - length))
                    assert torch.equal(exact.conditional_log_probs(text)[:, :length].argmax(-1), greedy)
                assert torch.equal(distribution.draft(lambda probs: (probs.argmax(-1), probs), length)[0], greedy)


def test_gradients():
    for name in [name for name in DENSITY if any(k.startswith("grad.") for k in golden(name))]:
        kind, parameters, data = load(name)
        leaves = {key: value.clone().requires_grad_() for key, value in parameters.items()}
        distribution_of(kind, leaves, len(data["x"])).log_prob(data["x"]).neg().mean().backward()
        for key, leaf in leaves.items():
            assert leaf.grad.isfinite().all()
            if not name.startswith("masked"):
                close(leaf.grad, data["grad." + key], 1e-8)


def test_float32_is_close():
    for name in [name for name in DENSITY if not name.startswith(("masked", "extreme"))]:
        kind, parameters, data = load(name)
        distribution = distribution_of(kind, parameters, len(data["x"]), dtype=torch.float32)
        got = distribution.prefix_log_prob(data["x"])
        assert got.dtype == torch.float32
        close(got, data["prefix_logq"], 2e-5)


def test_batches_of_distributions():
    for name in CONTEXTUAL:
        data, kind = golden(name), CASES[name]["kind"]
        logits = {key: data[key] for key in NAMES if key in data}
        count = data["x"].shape[1]
        distribution = circuit_from_logits(
            kind, **{k: v.unsqueeze(1).expand(v.shape[0], count, *v.shape[1:]) for k, v in logits.items()}
        )
        close(distribution.log_prob(data["x"]), data["logq"])
        close(distribution.prefix_log_prob(data["x"]), data["prefix_logq"])


def test_terms_with_masked_tokens():
    for name in LOSS:
        for way in ["observe", "marginalise"]:
            data, kind = golden(name), CASES[name]["kind"]
            e, tokens = data["e"], data["tokens"]
            logits = {}
            for key, (weight, bias) in {
                "leaf_logits": ("leaf_weight", None),
                "root_logits": ("root_weight", None),
                "trans_logits": ("trans_weight", "trans_bias"),
                "node_logits": ("node_weight", "node_bias"),
            }.items():
                if weight in data:
                    value = torch.einsum("nld,...d->nl...", e, data[weight])
                    logits[key] = value + data[bias] if bias in data else value
            distribution = circuit_from_logits(kind, **logits)
            window = distribution.window
            ahead = torch.nn.functional.pad(tokens, (0, window)).unfold(1, tokens.shape[1], 1)[:, 1:].transpose(1, 2)
            known = (
                torch.nn.functional.pad(data["target_mask"], (0, window))
                .unfold(1, tokens.shape[1], 1)[:, 1:]
                .transpose(1, 2)
            )
            unknown = None if way == "observe" else known == 0
            close(-distribution.token_log_probs(ahead, unknown), data[f"{way}.terms"])


def test_an_impossible_first_token_leaves_a_distribution():
    for kind in ["cp", "hmm", "btree"]:
        torch.manual_seed(0)
        extra = {"hmm": {"trans_logits": torch.randn(3, 2, 2)}, "btree": {"node_logits": torch.randn(2, 2, 2)}}.get(
            kind, {}
        )
        leaves = torch.randn(4, 2, 5)
        leaves[0, :, 3] = float("-inf")
        distribution = circuit_from_logits(kind, leaf_logits=leaves, root_logits=torch.randn(2), **extra).condition(
            torch.tensor(3)
        )
        total = distribution.conditional_log_probs(torch.tensor([0, 1, 2])).exp().sum(-1)
        torch.testing.assert_close(total, torch.ones(3, dtype=torch.float64))
        assert distribution.sample().shape == (3,) and distribution.greedy().shape == (3,)


def test_the_tree_owns_every_position_once():
    for window in range(2, 18):
        slots = balanced(window)
        assert [position for position in slots if position is not None] == list(range(window))
        pairs = list(zip(slots[::2], slots[1::2]))
        latents = (
            sum(left is not None for left, _ in pairs) + len(pairs) - 1
        )  # a node is one where both slots are filled
        assert latents == window - 1 and all(right is not None for _, right in pairs)


def test_wrong_parameters_are_refused_by_name():
    for kind, change, message in [
        ("cp", {"root_logits": None}, "root_logits"),
        ("hmm", {}, "trans_logits"),
        ("cp", {"node_logits": torch.zeros(2, 3, 3)}, "node_logits.*head_type=.*'cp'"),
        ("btree", {"node_logits": torch.zeros(3, 3, 3)}, "node_logits.*3.*3.*3"),
        ("cp", {"root_logits": torch.zeros(4)}, "root_logits.*4"),
        ("medusa", {}, "head_type=.*'medusa'"),
    ]:
        parameters = {"leaf_logits": torch.zeros(4, 3, 5), "root_logits": torch.zeros(3)} | change
        with pytest.raises(ValueError, match=message):
            circuit_from_logits(kind, **parameters)


def test_logsumexp_of_nothing_has_no_gradient():
    values = torch.tensor([[float("-inf")] * 3, [0.0, float("-inf"), 1.0]], requires_grad=True)
    out = logsumexp(values, -1)
    assert out[0] == float("-inf")
    torch.testing.assert_close(out[1], torch.tensor([0.0, 1.0]).logsumexp(0))
    out[1].backward()
    assert values.grad.isfinite().all()
