"""Log-probabilities at tokens, and their gradients, which are made in one tensor."""

import torch

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
