"""Assistants with another tokenizer: the text and its distribution are the backbone's, alone and in ragged batches."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import LogitsProcessorList

from tests.backbones import check_greedy
from tests.integration.test_enumeration import DRAFTS, WARPS, WINDOW, emitted, target_rows
from tests.models import left_padded
from tests.two_tokenizers import TEXT, prompts, speaker, tokenizer, with_bytes
from tokenahead import AssistantDrafter, NgramDrafter
from tokenahead.generation.assistant.translation import CommonVocabulary, TranslatedSession, Translation
from tokenahead.generation.call.options import DraftOptions, NumberCheck
from tokenahead.generation.call.processing import Processing

SIZE, DRAFT = 64, 4
ASSISTANTS = [("llama", 46, "bytes"), ("mistral", 56, "words"), ("gpt2", 58, "bytes")]
WAYS = ["text", "vocabulary"]


def pair(name="llama", size=46, kind="bytes", translate=None):
    """A backbone, and an attached assistant with another tokenizer."""
    model, both = speaker("llama", SIZE), {"tokenizer": tokenizer(SIZE), "assistant_tokenizer": tokenizer(size, kind)}
    return model, AssistantDrafter(speaker(name, size, kind, 40), DRAFT, **both, translate=translate).attach(model)


@pytest.mark.by_day("gpt2-58-bytes-vocabulary")
@pytest.mark.parametrize("translate", WAYS)
@pytest.mark.parametrize("name, size, kind", ASSISTANTS)
def test_greedy_alone_and_in_ragged_batches(name, size, kind, translate):
    model, drafter = pair(name, size, kind, translate)
    seen = check_greedy(model, drafter, prompts(8, SIZE), 30)
    drafter.detach()
    assert seen <= set(range(DRAFT + 1)) and max(seen) > 0  # how many are accepted depends on the two models


@pytest.mark.by_day("llama-46-bytes-text", "gpt2-58-bytes-vocabulary")
@pytest.mark.parametrize("translate", WAYS)
@pytest.mark.parametrize("name, size, kind", ASSISTANTS)
def test_what_was_read_is_what_a_whole_forward_reads(name, size, kind, translate, monkeypatch):
    """After texts that were tokenised again, and rejected drafts, too."""
    model, drafter = pair(name, size, kind, translate)
    feed, again = TranslatedSession._feed, []

    def compared(self):
        again.append(any(script.ids[: len(own)] != own for script, own in zip(self.scripts, self.cached)))
        logits = feed(self)
        for row, script in enumerate(self.scripts):
            whole = self.model(torch.tensor([script.ids])).logits[0, -1]
            torch.testing.assert_close(logits[row], whole, atol=2e-4, rtol=1e-3)
        return logits

    monkeypatch.setattr(TranslatedSession, "_feed", compared)
    model.generate(**left_padded(prompts(4, SIZE)), max_new_tokens=40, do_sample=False, assistant_model=drafter)
    drafter.detach()
    assert any(again) or translate == "vocabulary"


def test_texts_grow_as_they_are():
    """Whatever number of tokens comes at a time: no text is lost, and settled ids stay."""
    for (size, kind), step in itertools.product([(46, "bytes"), (56, "words")], [1, 2, 5]):
        own, translation = tokenizer(size, kind), Translation((tokenizer(SIZE), tokenizer(size, kind)), SIZE, size)
        ids = tokenizer(SIZE)(TEXT[:300], add_special_tokens=False)["input_ids"]
        scripts = translation.open([ids[:7], ids[:2]])
        settled, begin = [list(script.ids) for script in scripts], [7, 2]
        for end in range(0, 60, step):
            translation.extend(scripts, [ids[first + end : first + end + step] for first in begin])
            for script, before, first in zip(scripts, settled, begin):
                assert script.ids[: len(before)] == before
                before[:] = script.ids[: script.settled]
                text = tokenizer(SIZE).decode(ids[: first + end + step])
                assert own.decode(script.ids).removeprefix(own.bos_token).strip() == text.rstrip("\ufffd").strip()
        assert all(len(before) > 20 for before in settled)


def test_letters_of_several_bytes_come_once():
    """Single bytes of two letters in a row; decoders show neither before both are whole."""
    for first, second in [(with_bytes(), tokenizer(46)), (tokenizer(46), with_bytes())]:
        translation, text = Translation((first, second), 400, 400), TEXT[:240]
        ids = first(text, add_special_tokens=False)["input_ids"]
        half = next((n for n in range(len(ids)) if first.decode(ids[:n]).endswith("\ufffd")), len(ids))
        script = translation.open([ids[:half]])[0]
        assert second.decode(script.ids).strip() == first.decode(ids[:half]).rstrip("\ufffd").strip()
        script = translation.open([ids[:3]])[0]
        for token in ids[3:]:
            translation.extend([script], [[token]])
        assert "数量" in text and second.decode(script.ids).strip() == text.strip()
        draft = translation.drafts([script], [second("数量(self", add_special_tokens=False)["input_ids"][-6:]])[0]
        assert first.decode(ids + draft).endswith("(self")
        own = second("((数", add_special_tokens=False)["input_ids"]
        cut = next((n for n in range(len(own)) if second.decode(own[:n]).endswith("\ufffd")), len(own))
        assert "\ufffd" not in first.decode(translation.drafts([script], [own[:cut]])[0])


def test_common_tokens_write_the_same():
    first, second = tokenizer(SIZE), tokenizer(56, "words")
    translation = Translation((first, second), SIZE, 56)
    assert len(translation.ids) > 30 and (translation.ids.diff() > 0).all()
    for theirs, own in zip(translation.ids.tolist(), translation.own_ids.tolist()):
        shown = second.convert_ids_to_tokens(own).replace("▁", " ")
        assert first.decode([theirs]) == shown, "and ö is one token here, parts of it are none"
    assert len(set(translation.own_ids.tolist())) == len(translation.own_ids)


def test_special_tokens_are_read_where_both_have_them():
    first, second = tokenizer(SIZE), tokenizer(56, "words")
    assert first.bos_token != second.bos_token
    ids = [first.bos_token_id, *first("def", add_special_tokens=False)["input_ids"]]
    apart, alike = Translation((first, second), SIZE, 56), Translation((first, tokenizer(46)), SIZE, 46)
    assert second.decode(apart.open([ids])[0].ids).strip() == "def"
    assert tokenizer(46).decode(alike.open([ids])[0].ids) == first.bos_token + "def"
    assert apart.open([[first.bos_token_id]])[0].ids  # something must be read


@pytest.mark.by_day(each=1)
@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    "own_ids, ids", [([3, 0], [0, 2]), ([2, 0, 3], [0, 1, 2]), ([1], [1])], ids=["part", "all", "one"]
)
def test_the_emitted_distribution_is_the_targets(warp, rule, own_ids, ids):
    """Every draft, with the probability that it is drawn with; the backbone has 3 ids, and the assistant 4."""
    processing = Processing(LogitsProcessorList(WARPS[warp]))
    vocabulary = CommonVocabulary(4, 3, torch.tensor(own_ids), torch.tensor(ids))
    options = SimpleNamespace(do_sample=True, threshold=0.0, processing=processing, numbers=NumberCheck())
    options.choose = lambda *args: DraftOptions.choose(options, *args)
    logits = 1.5 * torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    text = torch.cat([torch.ones_like(DRAFTS[:, :1]), DRAFTS], dim=1)[:, : WINDOW - 1]
    rows = logits[vocabulary.readable(text)]
    q = torch.stack([vocabulary.choose(row, options)[1] for row in rows.unbind(1)], 1)
    part = rows[..., own_ids].softmax(-1)
    if warp == "plain":
        torch.testing.assert_close(q[..., ids], part, atol=1e-15, rtol=0)
    assert (q.sum(-1) - 1).abs().max() < 1e-12 and q[..., [x for x in range(3) if x not in ids]].sum() == 0
    distribution, target = emitted(rule, q, target_rows(processing, 50))
    assert abs(sum(distribution.values()) - 1) < 1e-12
    assert max(abs(distribution[text] - target[text]) for text in distribution) < 1e-12


def test_the_call_of_transformers():
    """The assistant itself, and both tokenizers; before that the two share ids as far as anyone knows."""
    model, ids = speaker("llama", SIZE), prompts(2, SIZE)[1][None]
    small, options = speaker("llama", SIZE, "words", 40), dict(max_new_tokens=20, do_sample=False)
    drafter = AssistantDrafter(small, DRAFT).attach(model)
    both = {"tokenizer": tokenizer(SIZE), "assistant_tokenizer": tokenizer(SIZE, "words")}
    plain = model.generate(ids, **options)
    shared = model.generate(ids, assistant_model=small, return_dict_in_generate=True, **options)
    for stop in ({}, {"stop_strings": "+="}):
        out = model.generate(ids, assistant_model=small, return_dict_in_generate=True, **options, **both, **stop)
        assert torch.equal(out.sequences, model.generate(ids, tokenizer=both["tokenizer"], **options, **stop))
    assert drafter.translation.tokenizers == tuple(both.values())
    assert torch.equal(shared.sequences, plain) and drafter.vocabulary is not None
    with pytest.raises(TypeError, match="tokenizer=None"):
        model.generate(ids, assistant_model=small, assistant_tokenizer=both["assistant_tokenizer"], **options)
    drafter.detach()
    ngrams = NgramDrafter().attach(model)
    with pytest.raises(ValueError, match="assistant_tokenizer=.*AssistantDrafter.*NgramDrafter"):
        model.generate(ids, assistant_model=ngrams, **options, **both)
    ngrams.detach()
