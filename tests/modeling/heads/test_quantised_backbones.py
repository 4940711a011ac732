"""Heads on a backbone whose unembedding is no plain matrix: it is called, and its weight never read."""

import pytest
import torch
from accelerate import cpu_offload
from torch import nn

from tests.every_model import llama, prompt_for
from tokenahead import EagleHead, MTPHeads


class Int8Linear(nn.Linear):
    """Codes and one scale per row, as quantised models have them."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__(original.in_features, original.out_features, bias=False, device="meta")
        self.scales = nn.Parameter(original.weight.detach().abs().amax(1, keepdim=True) / 127)
        codes = (original.weight.detach() / self.scales).round().to(torch.int8)
        self.weight = nn.Parameter(codes, requires_grad=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(states, self.weight.to(states.dtype) * self.scales.to(states.dtype))


def quantised() -> nn.Module:
    base = llama()
    base.lm_head = Int8Linear(base.lm_head)
    return base


@pytest.mark.parametrize("options", [{}, {"head_type": "cp", "rank": 2}])
def test_the_distribution_starts_as_the_backbones_own(options):
    base = quantised()
    heads, ids = MTPHeads.from_backbone(base, window=3, **options), prompt_for(base)
    out = base(ids, output_hidden_states=-1)
    probs = heads.window_distribution(out.hidden_states[-1]).conditional_log_probs(
        torch.zeros(2, 7, 3, dtype=torch.long)
    )
    torch.testing.assert_close(probs[..., 0, :], out.logits.log_softmax(-1))


@pytest.mark.parametrize("unembedding", ["shared", "own"])
def test_heads_train_and_draft(unembedding):
    base = quantised()
    ids, heads = prompt_for(base), MTPHeads.from_backbone(base, window=3, unembedding=unembedding)
    heads(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in heads.parameters())
    assert base.lm_head.scales.grad is None  # frozen, though it could be trained
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(base.generate(ids[:1], assistant_model=heads, **options), base.generate(ids[:1], **options))


def offloaded() -> nn.Module:
    return cpu_offload(llama(), execution_device="cpu")


def in_codes() -> nn.Module:
    base = llama()
    for name, module in list(base.named_modules()):
        if isinstance(module, nn.Linear):
            base.set_submodule(name, Int8Linear(module))
    return base


@pytest.mark.parametrize(("make", "tolerance"), [(offloaded, 0.0), (in_codes, 2e-3)])
def test_heads_copy_layers_and_unembeddings_of_any_form(make, tolerance):
    plain, base = llama(), make()
    eagle = {"version": 3, "aux_layers": [1, 2]}
    for made in (
        lambda base: MTPHeads.from_backbone(base, window=3, head_type="layer"),
        lambda base: EagleHead.from_backbone(base, **eagle).lm_head,
    ):
        wanted, found = made(plain).state_dict(), made(base).state_dict()
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, atol=tolerance, rtol=0)
