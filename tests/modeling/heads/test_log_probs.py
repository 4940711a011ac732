"""Log-probabilities at tokens, and their gradients, which are made in one tensor."""

import torch

from tokenahead.modeling.circuits import circuit_from_logits
from tokenahead.modeling.heads.window_distribution import log_probs_at


def test_values_and_gradients_are_those_of_log_softmax():
    """A token that is ruled out takes no part; one that no column has reads the last."""
    for batch in [(3,), (1,), (2, 3)]:
        logits = torch.randn(3, 7, dtype=torch.float64)
        logits[:, 2] = -torch.inf
        logits.requires_grad_()
        index = torch.randint(3, 9, (*batch, 1))
        weights = torch.randn(*torch.broadcast_shapes(batch, (3,)), 1, dtype=torch.float64)
        expected = logits.log_softmax(-1).expand(*weights.shape[:-1], -1)
        expected = expected.gather(-1, index.clamp(max=6).expand(*weights.shape[:-1], -1))
        (into,) = torch.autograd.grad((expected * weights).sum(), logits)
        found = log_probs_at(logits, index[..., 0])[..., None]
        for _ in range(2):  # twice: nothing is written over
            (gradient,) = torch.autograd.grad((found * weights).sum(), logits, retain_graph=True)
            torch.testing.assert_close(gradient, into, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_what_follows_an_impossible_token_is_no_nan():
    """Of a window whose second token has no probability, neither it nor the third is possible."""
    leaf_logits = torch.randn(1, 3, 2, 4, dtype=torch.float64)  # [B, n, r, v]
    leaf_logits[:, 1, :, 2] = -torch.inf
    circuit = circuit_from_logits("cp", leaf_logits=leaf_logits, root_logits=torch.zeros(1, 2, dtype=torch.float64))
    terms = circuit.token_log_probs(torch.tensor([[0, 2, 1]]))
    first = leaf_logits[0, 0].softmax(-1)[:, 0].mean().log()
    torch.testing.assert_close(terms, torch.tensor([[first, -torch.inf, -torch.inf]], dtype=torch.float64))
