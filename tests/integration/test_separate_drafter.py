"""A smaller model with parallel token prediction drafts for a larger one, which writes its own text."""

import copy

import pytest
import torch

from tests.models import left_padded
from tests.ptp_models import VOCABULARY, backbone, ids, student
from tokenahead.generation.tensors.sampling import pick


def pair(variant="one_hot", noise=0.02, base=None):
    """A larger model, and a small one that is a disturbed copy of it, with a student."""
    large = backbone(seed=2).double() if base is None else base
    small = student(variant, copy.deepcopy(large)).eval()
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in small.backbone.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    return large, small


def write(model, lengths=(5, 1, 9, 2), **options):
    batch = left_padded([ids(n, seed=n) for n in lengths])
    how = {"max_new_tokens": 14, "pad_token_id": 0} | options
    return model.generate(**batch, **how)


@pytest.mark.by_day("how1-categorical")
@pytest.mark.parametrize("variant", ["one_hot", "categorical", "mask"])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.7, "top_k": 6}])
def test_the_same_uniforms_pick_the_same_tokens(variant, how):
    large, small = pair(variant)
    small.attach(large)
    uniforms = torch.rand(1, 14, generator=torch.Generator().manual_seed(4))
    prompt = text = ids(1, 4)
    for step in range(14):
        with torch.no_grad():
            scores = large(text).logits[:, -1] / how.get("temperature", 1.0)
        least = scores.topk(how.get("top_k", VOCABULARY)).values[:, -1:]
        distribution = scores.masked_fill(scores < least, -torch.inf).softmax(-1)
        text = torch.cat([text, pick(uniforms[:, step], distribution)[:, None]], dim=1)
    options = {"do_sample": True, "verification": "coupled", "top_k": 0, "max_new_tokens": 14, "pad_token_id": 0} | how
    out = large.generate(prompt, assistant_model=small, uniforms=uniforms, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, text)
    rows = {"do_sample": True, "verification": "coupled", "seed": [3, 4, 5, 6]} | how
    together = write(large, assistant_model=small, **rows)
    assert torch.equal(together, write(large, assistant_model=small, use_mtp=False, **rows))


def test_an_equal_model_never_misses_the_first_token():
    """What slots of distributions stand behind is the model's own next token: rows of different lengths, fed again or
    not."""
    large, small = pair("categorical", noise=0.0)
    small.attach(large)
    for how in ({}, {"do_sample": True, "verification": "coupled", "seed": 5}):
        out = write(large, assistant_model=small, return_dict_in_generate=True, **how)
        stats = out.speculation
        for accepted, drafts in zip(stats.rows_accepted, stats.rows_drafts):
            assert all(count >= 1 for count, draft in zip(accepted, drafts) if draft)
        assert len({tuple(accepted) for accepted in stats.rows_accepted}) > 1
