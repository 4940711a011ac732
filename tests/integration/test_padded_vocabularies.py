"""Assistants whose embeddings are padded to another size than the backbone's: text and distribution are its own."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LogitsProcessorList

from tests.backbones import backbone, prompts, word_tokenizer
from tests.integration.test_enumeration import DRAFTS, WARPS, WINDOW, emitted, target_rows
from tests.models import left_padded
from tests.ptp_models import backbone as ptp_backbone
from tests.ptp_models import student
from tokenahead import AssistantDrafter
from tokenahead.generation.assistant.session import SharedVocabulary
from tokenahead.generation.call.options import DraftOptions, NumberCheck
from tokenahead.generation.call.processing import Processing

GREEDY = dict(max_new_tokens=20, do_sample=False)
SIZES = [(42, 48), (48, 44)]


def assistant_of(model, size, noise=0.05):
    """A disturbed copy of a model with fewer rows of embeddings, or more that are random."""
    shape = model.config.vocab_size
    twin = backbone(vocabulary=size) if shape > 10 else backbone(vocabulary=size, seed=2)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    for name, value in twin.state_dict().items():
        rows = min(len(value), len(state[name]))
        value[:rows] = state[name][:rows] + noise * torch.randn_like(state[name][:rows])
    return twin


@pytest.mark.core
def test_greedy_text_is_the_backbones():
    """Also where it writes ids of the padding, which the assistant cannot embed."""
    for own, theirs in SIZES:
        model, batch = backbone(vocabulary=theirs), left_padded(prompts(4, 40))
        drafter = AssistantDrafter(assistant_of(model, own), 4, vocab_size=40).attach(model)
        out = model.generate(**batch, **GREEDY, assistant_model=drafter, return_dict_in_generate=True)
        plain = model.generate(**batch, **GREEDY)
        assert torch.equal(out.sequences, plain) and (own > theirs or plain.max() >= own)
        drafts = [token for row in out.speculation.rows_drafts for draft in row for token in draft]
        assert any(map(any, out.speculation.rows_accepted)) and max(drafts) < 40


@pytest.mark.by_day("11-14-categorical")
@pytest.mark.parametrize("variant", ["one_hot", "categorical", "mask"])
@pytest.mark.parametrize("own, theirs", [(11, 14), (11, 9)])
def test_students_draft_for_other_sizes(variant, own, theirs):
    large, small = ptp_backbone(seed=2), student(variant, ptp_backbone(seed=2)).eval()
    large.resize_token_embeddings(theirs)
    assert small.config.get_text_config().vocab_size == own
    large.generation_config.eos_token_id, large.generation_config.pad_token_id = None, 0
    small.attach(large, vocab_size=8)
    batch = left_padded(prompts(3, 8))
    for options in (GREEDY, dict(max_new_tokens=12, do_sample=True, top_k=0, verification="coupled", seed=4)):
        out = large.generate(**batch, **options, assistant_model=small)
        if options is GREEDY:
            assert torch.equal(out, large.generate(**batch, **options))
        else:
            assert torch.equal(out, large.generate(**batch, **options, assistant_model=small, use_mtp=False))


@pytest.mark.by_day(each=1)
@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("way", ["choose", "fitted"])
def test_the_emitted_distribution_is_the_targets(warp, rule, way):
    """Every draft, with the probability that it is drawn with; of 3 ids 2 are shared, and the assistant has 4."""
    processing, vocabulary = Processing(LogitsProcessorList(WARPS[warp])), SharedVocabulary(4, 3, 2)
    options = SimpleNamespace(do_sample=True, threshold=0.0, processing=processing, numbers=NumberCheck())
    options.choose = lambda *args: DraftOptions.choose(options, *args)
    logits = 1.5 * torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    text = torch.cat([torch.ones_like(DRAFTS[:, :1]), DRAFTS], dim=1)[:, : WINDOW - 1]
    rows = logits[text]
    if way == "choose":
        q = torch.stack([vocabulary.choose(row, options)[1] for row in rows.unbind(1)], 1)
    else:
        q = processing.warp(vocabulary.fitted(rows.softmax(-1)))
    assert q[..., 2].max() < 1e-20
    distribution, target = emitted(rule, q, target_rows(processing, 50))
    assert max(abs(distribution[text] - target[text]) for text in distribution) < 1e-12


def saved(model, directory, words=40, swapped=False):
    """A model that was loaded from a directory with a tokenizer of some words."""
    tokenizer = word_tokenizer(words)
    tokenizer.save_pretrained(directory)
    if swapped:
        path = directory / "tokenizer.json"
        path.write_text(path.read_text().replace('"w7."', '"x7."'))
    model.config.name_or_path = str(directory)
    return model


def test_tokenizers_say_what_is_shared(tmp_path):
    model = saved(backbone(vocabulary=48), tmp_path / "large")
    small = saved(backbone(vocabulary=44), tmp_path / "small")
    drafter, batch = AssistantDrafter(small, 4).attach(model), left_padded(prompts(4, 40))
    out = model.generate(**batch, **GREEDY, assistant_model=small, return_dict_in_generate=True)
    assert torch.equal(out.sequences, model.generate(**batch, **GREEDY)) and out.speculation.rows_drafts[0][0]
    assert drafter.vocabulary.shared == 40
    other = saved(backbone(vocabulary=44), tmp_path / "other", swapped=True)
    with pytest.raises(ValueError, match="vocab_size.*44.*48"):
        AssistantDrafter(other).attach(model)
    with pytest.raises(ValueError, match="LlamaForCausalLM has 46.*len"):
        AssistantDrafter(backbone(vocabulary=46)).attach(model)
