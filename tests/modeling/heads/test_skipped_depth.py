"""Training of heads whose first depth is the backbone's own, at a weight of 0: that depth has no logits."""

import torch

from tests.modeling.heads.test_medusa_hydra_layer import IDS, made

LABELS = IDS.masked_fill(torch.rand(IDS.shape, generator=torch.Generator().manual_seed(0)) < 0.2, -100)


def learned(heads):
    heads.zero_grad()
    out = heads(IDS, labels=LABELS)
    out.loss.backward()
    return out, [parameter.grad.clone() for parameter in heads.parameters()]


def test_loss_gradients_and_other_depths_stay():
    for kind in ["medusa", "medusa-own", "hydra", "hydra++"]:
        for options in [
            {},
            {"normalization": "paper"},
            {"target": "teacher"},
            {"target": "teacher", "label_weight": 0.3},
            {"target": "teacher", "divergence": "block"},
        ]:
            base, heads = made(kind, loss_options=options)
            base.double(), heads.double()
            whole, expected = learned(heads.eval())
            skipped, gradients = learned(heads.train())
            assert whole.head_losses.isfinite().all() and skipped.head_losses[0].isnan()
            torch.testing.assert_close(skipped.loss, whole.loss, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(skipped.head_losses[1:], whole.head_losses[1:], rtol=1e-12, atol=1e-14)
            if whole.acceptances is not None:
                torch.testing.assert_close(skipped.acceptances, whole.acceptances, rtol=1e-12, atol=0, equal_nan=True)
            for one, other in zip(gradients, expected, strict=True):
                assert (one - other).norm() <= 1e-12 * other.norm() + 1e-16


def test_a_first_depth_that_is_read_is_computed():
    for options in [{"weights": [0.5, 1.0, 1.0, 1.0]}, {"balance": "rms"}]:
        _, heads = made("medusa", loss_options=options)
        assert learned(heads.train())[0].head_losses.isfinite().all()
