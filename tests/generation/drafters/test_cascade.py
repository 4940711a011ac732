"""Look-ups before a model's drafts: greedy text, distributions, and states that go on whoever drafted."""

import copy

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.backbones import backbone, blurred, prompts, train_eagle
from tests.models import left_padded
from tokenahead import AssistantDrafter, DrafterCascade, EagleHead, MTPHeads, NgramDrafter, SuffixDrafter
from tokenahead.extending import AttachableDrafter, DraftSession, DraftTree


class KnowsTheBeginning(AttachableDrafter):
    """A look-up that knows how a text begins, and is sure of that much alone."""

    window, reads_prompt = 4, False

    def __init__(self, text, known):
        self.text, self.known = text, known

    def start(self, options):
        return KnowingSession(self.text, self.known)


class KnowingSession(DraftSession):
    """The look-ups of one call."""

    num_tokens, expected = 3, 0.0

    def __init__(self, text, known):
        self.text, self.known = text, known

    def propose(self, sequences, length):
        start = sequences.lengths[0]
        self.expected = 3.0 if start < self.known else 0.0
        return DraftTree.chain(self.text[:, start : start + length])


def test_a_head_drafts_the_same_after_cycles_that_others_drafted():
    model, ids = backbone(), prompts(1, seed=7)[0][None]
    head, first = train_eagle(model, 3, steps=10), ids.shape[1]
    options = dict(max_new_tokens=40, do_sample=False, pad_token_id=0, return_dict_in_generate=True)

    def drafts_by_place(drafter):
        out = model.generate(ids, assistant_model=drafter, **options)
        place, found = first + 1, {}
        for accepted, draft in zip(out.speculation.rows_accepted[0], out.speculation.rows_drafts[0]):
            found[place] = draft
            place += accepted + 1
        return out.sequences, found

    text, alone = drafts_by_place(head)
    same, mixed = drafts_by_place(DrafterCascade([KnowsTheBeginning(text, first + 12), head]).attach(model))
    assert same.equal(text)
    both = [place for place in alone.keys() & mixed.keys() if place >= first + 12]
    assert both and all(alone[place] == mixed[place] for place in both)
    assert mixed[first + 1] == text[0, first + 1 : first + 4].tolist()


def test_a_look_up_that_expects_too_much_is_asked_less():
    """Tokens that the text has never had are drafted by the look-up alone."""
    for is_right in [True, False]:
        model, ids = backbone(), prompts(1, seed=7)[0][None]
        options = dict(max_new_tokens=60, do_sample=False, pad_token_id=0)
        text = model.generate(ids, **options)
        known = text if is_right else torch.full_like(text, next(token for token in range(97) if token not in text))
        cascade = DrafterCascade([KnowsTheBeginning(known, 1000), train_eagle(model, 3, steps=10)]).attach(model)
        out = model.generate(ids, assistant_model=cascade, return_dict_in_generate=True, **options)
        assert out.sequences.equal(text)
        drafts = [draft for draft in out.speculation.rows_drafts[0] if draft]
        place, asked = ids.shape[1] + 1, []
        for accepted, draft in zip(out.speculation.rows_accepted[0], out.speculation.rows_drafts[0]):
            asked.append(draft == known[0, place : place + len(draft)].tolist())
            place += accepted + 1
        share = sum(asked) / len(drafts)
        assert share == 1.0 if is_right else 0.0 < share < 0.5
    (greedy,), (drawn,) = cascade.calibrations
    before = greedy.accepted, greedy.expected
    assert not drawn.expected
    model.generate(ids, assistant_model=cascade, **options | {"do_sample": True})
    assert drawn.expected and (greedy.accepted, greedy.expected) == before


class Meddles(AttachableDrafter):
    """A look-up that is sure of two tokens in some cycles, right or wrong, and knows two others in the rest."""

    window, reads_prompt = 3, False

    def __init__(self, text):
        self.text = text

    def start(self, options):
        return MeddlingSession(self.text)


class MeddlingSession(DraftSession):
    """The look-ups of one call."""

    num_tokens, expected, cycle = 2, 0.0, 0

    def __init__(self, text):
        self.text = text

    def propose(self, sequences, length):
        self.cycle += 1
        self.expected = 3.0 if self.cycle % 4 < 2 else 0.0
        guess = sequences.ids.new_zeros(len(self.text), min(length, 2))
        for row, start in enumerate(sequences.lengths):
            known = self.text[row, start : start + guess.shape[1]]
            guess[row, : len(known)] = known ^ (self.cycle + row) % 3 // 2  # every third is wrong
        return DraftTree.chain(guess)


@pytest.mark.by_day(each=1)
@pytest.mark.parametrize("joins", [False, True], ids=["first", "joined"])
@pytest.mark.parametrize("number", [1, 4], ids=["alone", "ragged"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_an_assistant_that_knows_the_text_is_right_after_cycles_that_others_drafted(name, number, joins):
    model, batch = backbone(name, vocabulary=40), left_padded(prompts(number, vocabulary=40, seed=7))
    options = dict(max_new_tokens=40, do_sample=False, pad_token_id=0)
    plain = model.generate(**batch, **options)
    assistant = AssistantDrafter(copy.deepcopy(model), num_tokens=4)
    cascade = DrafterCascade([Meddles(plain), assistant], joins=joins).attach(model)
    out = model.generate(**batch, **options, assistant_model=cascade, return_dict_in_generate=True)
    assert out.sequences.equal(plain)
    cycles = 0
    for accepted, drafts in zip(out.speculation.rows_accepted, out.speculation.rows_drafts):
        for count, draft in list(zip(accepted, drafts))[:-1]:
            if len(draft) == (6 if joins else 4):
                assert count == 4, (accepted, drafts)
                cycles += 1
    assert cycles >= 3 * number


class KnowsOneRow(Meddles):
    """A look-up that knows the first row, is wrong in the second, and is unsure in two cycles."""

    window = 12

    def start(self, options):
        return OneRowSession(self.text)


class OneRowSession(MeddlingSession):
    """The look-ups of one call."""

    num_tokens = 11

    def propose(self, sequences, length):
        self.cycle += 1
        self.expected = 0.0 if self.cycle in (25, 150) else 1e6
        guess = sequences.ids.new_zeros(2, min(length, 11))
        for row, start in enumerate(sequences.lengths):
            known = self.text[row, start : start + guess.shape[1]]
            guess[row, : len(known)] = known ^ row
        return DraftTree.chain(guess)


def translated(model):
    """An assistant with the backbone's vocabulary, as if it were another one."""
    letters = Tokenizer(models.BPE({chr(192 + number): number for number in range(40)}, []))
    letters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters)
    texts = {"tokenizer": tokenizer, "assistant_tokenizer": tokenizer, "translate": "vocabulary"}
    return AssistantDrafter(blurred(model, 0.5), num_tokens=4, **texts)


BEHIND = {
    "assistant": lambda model: AssistantDrafter(blurred(model, 0.5), num_tokens=4),
    "translated": translated,
    "suffix": lambda model: SuffixDrafter(),
    "ngram": lambda model: NgramDrafter(),
    "eagle": lambda model: EagleHead.from_backbone(model, version=1),
    "layer": lambda model: MTPHeads.from_backbone(model, window=4, head_type="layer"),
}


@pytest.mark.by_day("llama-translated", "gpt2-eagle", "llama-layer")
@pytest.mark.parametrize("last", BEHIND)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_drafter_catches_up_where_one_row_ended_long_before(name, last):
    if name == "gpt2" and last in ("eagle", "layer"):
        pytest.skip("their layers are those of llama's kind")
    model = backbone(name, vocabulary=40)
    ids = torch.stack([prompt[:6] for prompt in prompts(5, vocabulary=40, seed=2)[3:]])
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=200, do_sample=False, pad_token_id=0)
    plain = model.generate(ids, **options)
    cascade = DrafterCascade([KnowsOneRow(plain), BEHIND[last](model)], least=1e-3).attach(model)
    assert model.generate(ids, **options, assistant_model=cascade).equal(plain)


def test_translated_drafts_are_the_assistants_own_after_tokens_that_others_drafted():
    model, ids = backbone(vocabulary=40), torch.stack([prompt[:7] for prompt in prompts(5, vocabulary=40, seed=2)[2:]])
    options = dict(max_new_tokens=40, do_sample=False, pad_token_id=0)
    plain = model.generate(ids, **options)
    found = []
    for assistant in (BEHIND["assistant"](model), BEHIND["translated"](model)):
        cascade = DrafterCascade([Meddles(plain), assistant], joins=True).attach(model)
        out = model.generate(ids, **options, assistant_model=cascade, return_dict_in_generate=True)
        assert out.sequences.equal(plain)
        found.append(out.speculation.rows_drafts)
    assert found[0] == found[1]
