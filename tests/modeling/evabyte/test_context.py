"""EvaByte's heads whose leaves read the bytes before them: decoding, learning, files, other vocabularies."""

import pytest
import torch

from tests.modeling.heads.backbones import shaken
from tests.models import TRAINED
from tokenahead import EvaByteForMTPC

IDS = torch.randint(64, 320, (2, 12), generator=torch.Generator().manual_seed(0))
HEADS = {
    "ff": dict(head_type="ff", context=2, context_rank=8),
    "hmm": dict(head_type="hmm", rank=3, context=3, transition_context=True, context_rank=8),
    "btree": dict(head_type="btree", rank=2, context=1),
}


def model_with(kind):
    """A trained model with a new head, whose tables hold noise."""
    model = EvaByteForMTPC.from_pretrained(TRAINED).eval()
    model.set_head(**HEADS[kind])
    shaken(model.head.context, 0.3)
    return model


@pytest.mark.by_day("hmm")
@pytest.mark.parametrize("kind", HEADS)
def test_text_is_the_backbones_own(kind):
    model = model_with(kind)
    plain = model.generate(IDS, max_new_tokens=16, do_sample=False, use_mtp=False)
    for options in ({}, dict(draft_tree=dict(top_k=3, total_tokens=12)), dict(cache_implementation="static")):
        assert torch.equal(model.generate(IDS, max_new_tokens=16, do_sample=False, **options), plain)


@pytest.mark.by_day("ff", "btree")
@pytest.mark.parametrize("kind", HEADS)
def test_learning_files_and_another_vocabulary(kind, tmp_path):
    model = model_with(kind)
    model.train_only("drafter")
    model(IDS, labels=IDS).loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.head.context.parameters())
    model.save_pretrained(tmp_path)
    again = EvaByteForMTPC.from_pretrained(tmp_path)
    own = dict(again.named_parameters())
    assert all(torch.equal(value, own[name]) for name, value in model.named_parameters())
    again.resize_token_embeddings(330)
    assert again.head.context.embedding.shape[0] == again.head.context.weight.shape[1] == 330
    again.generate(IDS, max_new_tokens=4)


def test_a_circuit_takes_over_the_tables_of_ff_heads():
    model = model_with("ff")
    wanted, text = model.distribution(IDS), torch.randint(320, (2, 12, 8))
    model.set_head(head_type="cp", rank=3, context=2, context_rank=8)
    assert model.draft_heads.context is None
    got = model.distribution(IDS).conditional_log_probs(text)
    torch.testing.assert_close(got, wanted.conditional_log_probs(text), atol=1e-4, rtol=0)
