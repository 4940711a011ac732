"""`resize_token_embeddings`: every head follows, or nothing changes."""

import pytest
import torch

from tests.every_model import NAMES, every_model, llama, moved_heads, prompt_for
from tokenahead import EvaByteForMTPC


def vocabulary(model: torch.nn.Module) -> int:
    return model.config.get_text_config().vocab_size


@pytest.mark.by_day(most=4)
@pytest.mark.parametrize("change", [5, -2])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_old_tokens_keep_their_logits(name, change, tmp_path):
    model, ids = every_model(name), prompt_for(every_model(name)).clamp(max=vocabulary(every_model(name)) - 3)
    before, size = model(ids).logits, vocabulary(model)
    embeddings = model.resize_token_embeddings(size + change)
    assert embeddings.weight.shape[0] == vocabulary(model) == model.vocab_size == size + change
    after, kept = model(ids).logits, size + min(change, 0)
    torch.testing.assert_close(after[..., :kept], before[..., :kept])
    assert after.shape[-1] == size + change
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    text = model.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert torch.equal(text, model.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0, use_mtp=False))
    assert torch.equal(text, again.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0))


@pytest.mark.parametrize("mean_resizing", [True, False])
@pytest.mark.parametrize("name", ["evabyte_ff", "evabyte_btree", "evabyte_shared"])
@torch.no_grad()
def test_every_head_of_evabyte_keeps_its_own_rows(name, mean_resizing):
    model: EvaByteForMTPC = every_model(name)
    states, size = torch.randn(3, 32), vocabulary(model)
    before = model.window_distribution(states).leaf_logits
    model.resize_token_embeddings(size + 5, mean_resizing=mean_resizing)
    after = model.window_distribution(states).leaf_logits
    torch.testing.assert_close(after[..., :size], before)
    new, mean = after[..., size:], before.mean(-1, keepdim=True)
    assert new.shape[-1] == 5 and torch.allclose(new, mean.expand_as(new), atol=1e-2) == mean_resizing
    assert model.draft_heads.num_heads == 7 and model(prompt_for(model), labels=prompt_for(model)).loss.isfinite()


@pytest.mark.parametrize("unembedding", ["shared", "own"])
def test_heads_refuse_a_backbone_that_has_grown(unembedding):
    base = llama()
    heads = moved_heads(base, unembedding)
    base.resize_token_embeddings(70)
    with pytest.raises(ValueError, match="vocab_size.*64.*LlamaForCausalLM.*70"):
        heads.attach(base)
    with pytest.raises(ValueError, match="vocab_size.*64.*LlamaForCausalLM.*70"):
        base.generate(prompt_for(base)[:1], max_new_tokens=4, do_sample=False, assistant_model=heads)
    heads.detach()
    base.resize_token_embeddings(64)
    heads.attach(base)
    with pytest.raises(ValueError, match="vocab_size=.*64"):
        heads.resize_token_embeddings(70)
