"""Look-ups before a model's drafts: greedy text, distributions, and states that go on whoever drafted."""

import pytest
import torch

from tests.backbones import backbone, prompts, train_eagle, train_heads
from tests.distributions import continuation_distribution, continuation_p_value
from tests.models import left_padded
from tokenahead import AssistantDrafter, DrafterCascade, NgramDrafter, SuffixDrafter
from tokenahead.extending import AttachableDrafter, DraftSession, DraftTree

LAST = {
    "heads": lambda model: train_heads(model, steps=10),
    "eagle": lambda model: train_eagle(model, 3, steps=10),
    "assistant": lambda model: AssistantDrafter(backbone(), num_tokens=3).attach(model),
}


@pytest.mark.parametrize("tree", [None, {"depth": 2, "top_k": 2, "total_tokens": 8}], ids=["chain", "tree"])
@pytest.mark.parametrize("last", LAST)
def test_greedy_text_is_the_backbones(last, tree):
    if tree and last == "assistant":
        pytest.skip("assistants draft chains")
    model, batch = backbone("qwen3"), left_padded(prompts(5, seed=3))
    plain = model.generate(**batch, max_new_tokens=40, do_sample=False, pad_token_id=0)
    suffix = SuffixDrafter(factor=2.0)
    cascade = DrafterCascade([suffix, LAST[last](model)]).attach(model)
    options = dict(max_new_tokens=40, do_sample=False, pad_token_id=0, assistant_model=cascade, draft_tree=tree)
    calls = []
    for _ in range(2):
        out = model.generate(**batch, **options, return_dict_in_generate=True)
        assert out.sequences.equal(plain)
        calls.append(out.speculation.backbone_calls)
    assert calls[1] < calls[0] / 1.5


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


def test_sampled_text_has_the_backbones_distribution():
    model, prompt = backbone(), torch.tensor([[5, 9, 5, 9, 5]])
    options = dict(max_new_tokens=4, top_k=2, pad_token_id=0, eos_token_id=None)
    torch.manual_seed(0)
    plain = model.generate(prompt.expand(3000, -1), **options, do_sample=True)
    suffix = SuffixDrafter(depth=4)
    suffix.add(plain[:, 2:].unique(dim=0))
    cascade = DrafterCascade([suffix, train_heads(model, steps=10)], least=1.2).attach(model)
    out = model.generate(prompt.expand(3000, -1), **options, do_sample=True, assistant_model=cascade)
    distribution = continuation_distribution(model, prompt, 3, **options)
    assert continuation_p_value(out[:, 5:8], distribution) > 1e-3


def test_what_cannot_be_one_of_several_is_named():
    model = backbone()
    with pytest.raises(ValueError, match="drafters"):
        DrafterCascade([SuffixDrafter()])
    with pytest.raises(ValueError, match="least"):
        DrafterCascade([SuffixDrafter(), NgramDrafter()], least=0)
    cascade = DrafterCascade([NgramDrafter(), SuffixDrafter()]).attach(model)
    with pytest.raises(ValueError, match="NgramDrafter"):
        model.generate(torch.tensor([[3, 4, 5]]), assistant_model=cascade, max_new_tokens=3, pad_token_id=0)
