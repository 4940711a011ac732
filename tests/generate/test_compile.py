"""A compiled forward decodes rightly, and is compiled a few times in the first call and never in an equal one."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models import trained_model
from tokenahead import MTPHeads

PROMPT = torch.arange(100, 112)[None]


def llama_with_heads():
    torch.manual_seed(0)
    sizes = dict(vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    backbone = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.1, eos_token_id=None, pad_token_id=0)).eval()
    return backbone, {"assistant_model": MTPHeads.from_backbone(backbone, window=4)}


@pytest.mark.nightly
@pytest.mark.parametrize("make", [lambda: (trained_model(), {}), llama_with_heads], ids=["evabyte", "heads"])
def test_a_compiled_forward_is_compiled_a_few_times_only(make):
    model, drafter = make()
    options = dict(do_sample=False, max_new_tokens=40, **drafter)
    expected = model.generate(PROMPT, **options)
    torch._dynamo.reset()
    counters.clear()
    model.forward = torch.compile(model.forward, backend="eager")  # the tracer is what is tested
    assert torch.equal(model.generate(PROMPT, **options), expected)
    first = counters["stats"]["unique_graphs"]
    assert 0 < first <= 9  # the first compilation, and at most 8 more
    assert torch.equal(model.generate(PROMPT, **options), expected)
    assert counters["stats"]["unique_graphs"] == first
    torch._dynamo.reset()
