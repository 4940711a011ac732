"""Fields of transformers' GenerationConfig that speculation might pass over: heeded, or said not to be."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.every_model import llama, moved_heads
from tests.models import tiny_model

IDS = torch.tensor([[12, 11, 14, 12], [16, 9, 11, 4]])
GREEDY = dict(attention_mask=torch.ones_like(IDS), max_new_tokens=9, do_sample=False, pad_token_id=0)


def speculating(kind):
    """A model, and what its calls need to speculate."""
    if kind == "evabyte":
        return tiny_model(vocab_size=64), {}
    model = llama()
    return model, {"assistant_model": moved_heads(model)}


@pytest.fixture
def tokenizer():
    """Tokens that are beginnings of others, which healing replaces."""
    words = ["<pad>", "<s>", "</s>", "<unk>", *"abcdefgh", "ab", "abc", "abd", "bc", "cd", "cde", "gh"]
    merges = [("a", "b"), ("ab", "c"), ("ab", "d"), ("b", "c"), ("c", "d"), ("cd", "e"), ("g", "h")]
    known = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges, unk_token="<unk>"))
    known.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=known, pad_token="<pad>", bos_token="<s>", padding_side="left")


@pytest.mark.parametrize("kind", ["evabyte", "heads"])
def test_token_healing_leaves_the_options_of_its_call_alone(kind, tokenizer):
    """It calls `generate` in the midst of `generate`."""
    model, extra = speculating(kind)
    common = GREEDY | dict(token_healing=True, tokenizer=tokenizer)
    ids = tokenizer(["abcab", "ghab"], return_tensors="pt", padding=True).input_ids
    common["attention_mask"] = torch.ones_like(ids)
    want = model.generate(ids, **common, **({} if extra else {"use_mtp": False}))
    out = model.generate(ids, **common, **extra, num_assistant_tokens=2, return_dict_in_generate=True)
    assert torch.equal(out.sequences, want)
    assert max(len(draft) for row in out.speculation.rows_drafts for draft in row) == 2
    with pytest.raises(ValueError, match="use_mtp=.*use_cache="):
        model.generate(ids, **common, **extra, use_mtp=True, use_cache=False)
