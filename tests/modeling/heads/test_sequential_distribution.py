"""The distribution of conditionals: by enumeration it is a distribution; binding, drafting and marginals are those of
the definition."""

import itertools

import pytest
import torch

from tokenahead.modeling.heads.window_distribution import SequentialDistribution

V, N, D = 3, 4, 5
WINDOWS = torch.tensor(list(itertools.product(range(V), repeat=N)))


def distribution(batch=()):
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    table, maps, first = normal(V, D), [normal(V, D * k) for k in range(1, N)], normal(*batch, V)

    def next_logits(prefix):
        count = prefix.shape[-2]
        return first if count == 0 else torch.tanh(prefix.flatten(-2) @ maps[count - 1].T) + first

    return SequentialDistribution(
        next_logits, lambda tokens: table[tokens], N, torch.zeros(*batch, 0, D, dtype=torch.float64)
    )


def test_all_windows_have_mass_one_and_prefixes_are_their_sums():
    q = distribution()
    mass = q.log_prob(WINDOWS).exp()
    assert abs(float(mass.sum()) - 1) < 1e-12
    prefixes = q.prefix_log_prob(WINDOWS).exp()
    for length in range(1, N):
        same = (WINDOWS[:, None, :length] == WINDOWS[None, :, :length]).all(-1)
        torch.testing.assert_close(prefixes[:, length - 1], same.double() @ mass, atol=1e-12, rtol=0)


def test_binding_tokens_is_the_conditional_distribution():
    q = distribution()
    full = q.conditional_log_probs(WINDOWS)
    once = q.condition(WINDOWS[:, 0])
    assert once.window == N - 1
    torch.testing.assert_close(once.conditional_log_probs(WINDOWS[:, 1:]), full[:, 1:], atol=1e-12, rtol=0)
    twice = once.condition(WINDOWS[:, 1])
    torch.testing.assert_close(twice.conditional_log_probs(WINDOWS[:, 2:]), full[:, 2:], atol=1e-12, rtol=0)
    torch.testing.assert_close(twice.leaf_logits[:, 0, 0].log_softmax(-1), full[:, 2], atol=1e-12, rtol=0)


def test_drafts_follow_the_distributions_that_they_state():
    q = distribution((2,))
    greedy = q.greedy()
    assert torch.equal(greedy, q.conditional_log_probs(greedy).argmax(-1)) and q.greedy(2).shape == (2, 2)
    tokens, probs = q.sample_with_probs(3)
    padded = torch.cat([tokens, tokens[:, :1]], 1)
    torch.testing.assert_close(probs, q.conditional_log_probs(padded)[:, :3].exp(), atol=1e-12, rtol=0)


@pytest.mark.core
def test_samples_have_the_distribution():
    q, count = distribution(), 20_000
    wide = SequentialDistribution(
        lambda prefix: q.next_logits(prefix).expand(count, V), q.embed, N, q.known.expand(count, 0, D)
    )
    draws = wide.sample(torch.Generator().manual_seed(5))
    numbers = (draws * V ** torch.arange(N - 1, -1, -1)).sum(-1)
    expected = q.log_prob(WINDOWS).exp() * count
    square = ((numbers.bincount(minlength=V**N) - expected) ** 2 / expected).sum()
    assert (float(square) - (V**N - 1)) / (2 * (V**N - 1)) ** 0.5 < 5


def test_unknown_tokens_are_free_at_the_end_and_refused_elsewhere():
    q = distribution()
    late = torch.tensor([False, False, True, True]).expand(len(WINDOWS), -1)
    got = q.prefix_log_prob(WINDOWS, late)
    torch.testing.assert_close(got[:, 3], q.prefix_log_prob(WINDOWS)[:, 1], atol=1e-12, rtol=0)
    with pytest.raises(ValueError, match="end of the window"):
        q.prefix_log_prob(WINDOWS, late.flip(-1))
