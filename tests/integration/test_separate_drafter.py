"""A smaller model with parallel token prediction drafts for a larger one, which writes its own text."""

import copy

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM

from tests.models import left_padded
from tests.ptp_models import VOCABULARY, backbone, ids, student
from tokenahead import PTPStudent
from tokenahead.generation.tensors.sampling import pick
from tokenahead.testing import chi_square


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


@pytest.mark.by_day("one_hot-coupled")
@pytest.mark.parametrize(("variant", "rule"), [("one_hot", "coupled"), ("one_hot", "token"), ("categorical", "block"),
                                               ("categorical", "token"), ("categorical", "coupled")])  # fmt: skip
def test_sampled_text_follows_the_larger_model(variant, rule):
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=7, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.5, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    large, small = pair(variant, 0.1, LlamaForCausalLM(config).eval())
    small.attach(large)
    outcomes, distribution = torch.tensor([[1, 2, 3]]), torch.ones(1, dtype=torch.float64)
    for _ in range(4):  # three tokens are possible at each position
        with torch.no_grad():
            values, tokens = large(outcomes).logits[:, -1].topk(3)
        distribution = (distribution[:, None] * (values.double() / 3).softmax(-1)).flatten()
        outcomes = torch.cat([outcomes.repeat_interleave(3, 0), tokens.flatten()[:, None]], dim=1)
    rows = torch.tensor([[1, 2, 3]]).expand(3000, -1)
    out = large.generate(
        rows, assistant_model=small, do_sample=True, temperature=3.0, top_k=3, verification=rule, max_new_tokens=4,
        seed=1, pad_token_id=0,
    )  # fmt: skip
    found = (out[:, None, 3:] == outcomes[:, 3:]).all(-1)
    assert found.any(1).all() and chi_square(found.long().argmax(1), distribution) > 0.001


def test_backbones_of_different_families():
    large = backbone(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=3, n_head=2, n_positions=64), seed=3).double()
    small = student("one_hot", backbone(seed=4).double()).eval()
    small.attach(large)
    assert torch.equal(write(large, assistant_model=small), write(large))


@pytest.mark.by_day("one_hot")
@pytest.mark.parametrize("variant", ["one_hot", "categorical"])
def test_slots_with_a_greedy_wish(variant):
    large = backbone(seed=2).double()
    small = student(variant, copy.deepcopy(large), greedy=True).eval()
    small.attach(large)
    assert torch.equal(write(large, assistant_model=small), write(large))
    apart = PTPStudent.from_model(copy.deepcopy(small)).attach(large)
    assert torch.equal(write(large, assistant_model=apart), write(large))
