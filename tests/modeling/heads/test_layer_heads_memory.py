"""Layer heads that are recomputed in backward: the same loss and gradients, activations of one."""

import pytest
import torch

from tests.training.test_evaluation_loss import llama
from tokenahead import MTPHeads
from tokenahead.modeling.common import chunks as heads_chunks
from tokenahead.modeling.heads import layer as layer_module
from tokenahead.modeling.heads.joint import JointMTPModel


def inputs():
    ids = torch.randint(5, 320, (3, 14), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 10:] = 0
    return dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))


def gradients(model):
    model.zero_grad()
    out = model.train()(**inputs())
    (3 * out.loss).backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.by_day("False-backbone", "True-own")
@pytest.mark.core_cases("False-backbone")
@pytest.mark.parametrize("first", ["backbone", "own"])
@pytest.mark.parametrize("joint", [False, True])
def test_the_same_loss_and_gradients_as_without_recomputation(first, joint, monkeypatch):
    torch.manual_seed(0)
    heads = MTPHeads.from_backbone(llama(num_hidden_layers=3), window=4, head_type="layer", first=first).double()
    heads.backbone.double()  # single precision would need tolerances that hide a missing term
    for parameter in heads.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model = JointMTPModel(heads) if joint else heads
    model.requires_grad_(True)
    one, found = gradients(model)
    monkeypatch.setattr(layer_module, "is_unit", lambda module: True)
    other, want = gradients(model)
    torch.testing.assert_close(one.loss, other.loss)
    torch.testing.assert_close(one.head_losses, other.head_losses)
    assert found.keys() == want.keys() and len(found) > (30 if joint else 20)
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-5)


def peak_of_saved_activations(window):
    """Bytes that autograd holds at most, of a step with so many heads."""
    heads = MTPHeads.from_backbone(llama(num_hidden_layers=2), window=window, head_type="layer")
    held, most = [0], [0]

    class Saved:
        def __init__(self, tensor):
            self.tensor, self.size = tensor, tensor.nbytes
            held[0] += self.size
            most[0] = max(most[0], held[0])

        def __del__(self):
            held[0] -= self.size

    ids = torch.randint(5, 320, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        heads.train()(ids, labels=ids).loss.backward()
    return most[0]


def test_activations_do_not_grow_with_the_number_of_heads(monkeypatch):
    monkeypatch.setattr(heads_chunks, "LOGITS_PER_CHUNK", 320 * 9)  # of one position
    few, many = peak_of_saved_activations(2), peak_of_saved_activations(9)
    assert many < 1.1 * few
    monkeypatch.setattr(layer_module, "is_unit", lambda module: True)
    assert peak_of_saved_activations(9) > 3 * many
