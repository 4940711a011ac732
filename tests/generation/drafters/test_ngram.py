"""Prompt lookup against a plain search through every row's text, and what its options and trees are."""

import random
from types import SimpleNamespace

import pytest
import torch

from tests.backbones import backbone
from tokenahead import NgramDrafter
from tokenahead.generation.call.sequences import NewTokens, Sequences
from tokenahead.generation.lookups.ngram import NgramSession

LONGEST, LENGTH = 3, 4


def rows_of(texts):
    """Rows of different lengths, as a loop would hold them."""
    shortest = min(map(len, texts))
    rows = Sequences(torch.tensor([text[:shortest] for text in texts]))
    rest = [text[shortest:] for text in texts]
    width = max(map(len, rest))
    rows.write(torch.tensor([tail + [63] * (width - len(tail)) for tail in rest]).view(len(texts), width))
    rows.keep(NewTokens([len(tail) for tail in rest], torch.device("cpu")))
    return rows


def best_places(text):
    """Places (of the last token of a match) with the longest matches first, and of those the latest first."""
    ranked = []
    for place in range(len(text) - 1):
        length = 0
        while length < min(LONGEST, place + 1) and text[place - length] == text[-1 - length]:
            length += 1
        if length:
            ranked.append((-length, -place))
    return [-place for _, place in sorted(ranked)]


def continuation(text, place):
    """What follows a position; at the end of the text it continues as it did behind the position."""
    found = list(text)
    for _ in range(LENGTH):
        found.append(found[place + 1 + len(found) - len(text)])
    return found[len(text) :]


def proposals(branches, texts):
    options = SimpleNamespace(num_tokens=LENGTH, schedule="constant", masks=lambda tokens, is_warped: None)
    return NgramSession(options, LONGEST, branches).propose(rows_of(texts), LENGTH)


def test_chains_follow_the_longest_and_latest_match():
    for seed in range(20):
        rng = random.Random(seed)
        texts = [[rng.randrange(4 + 6 * row) for _ in range(rng.randint(2, 24))] for row in range(4)]
        tree = proposals(1, texts)
        assert tree.is_chain and tree.probs is None
        for row, text in enumerate(texts):
            places = best_places(text)
            assert int(tree.num_nodes[row]) == (LENGTH if places else 0)
            if places:
                assert tree.tokens[row].tolist() == continuation(text, places[0])


def test_trees_hold_the_best_places_once():
    for seed in range(20):
        rng, branches = random.Random(seed), 3
        texts = [[rng.randrange(4 + 6 * row) for _ in range(rng.randint(5, 24))] for row in range(4)]
        tree = proposals(branches, texts)
        assert tree.depth == LENGTH
        for row, text in enumerate(texts):
            places = best_places(text)[:branches]
            assert int(tree.num_nodes[row]) == (branches * LENGTH if places else 0)
            if not places:
                continue
            ways = {(): -1}
            for node, (token, parent) in enumerate(zip(tree.tokens[row].tolist(), tree.parents[row].tolist())):
                before = next(way for way, number in ways.items() if number == parent)
                ways.setdefault((*before, token), node)  # the first of equal siblings is the one that is walked on
            for place in places:
                assert tuple(continuation(text, place)) in ways


def test_an_n_gram_may_be_longer_than_every_text():
    model, prompt = backbone(), torch.tensor([[5, 6, 7, 5, 6], [9, 9, 9, 9, 9]])
    options = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, pad_token_id=0)
    drafter = NgramDrafter(longest=1000).attach(model)
    assert model.generate(prompt, assistant_model=drafter, **options).equal(model.generate(prompt, **options))


@pytest.mark.core
def test_a_call_may_ask_for_another_number_of_branches():
    model, prompt = backbone(), torch.tensor([[5, 6, 7, 5, 8, 7, 5]])
    drafter = NgramDrafter().attach(model)
    options = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    plain = model.generate(prompt, **options)
    out = model.generate(
        prompt, assistant_model=drafter, draft_tree={"top_k": 2}, num_assistant_tokens=2, return_dict_in_generate=True,
        **options,
    )  # fmt: skip
    assert torch.equal(out.sequences, plain) and {len(draft) for draft in out.speculation.drafts} >= {4}


def test_nothing_is_verified_where_no_n_gram_is_found():
    """And drafts stay long after rejections: text that repeats itself has full ones."""
    model, drafter = backbone(), NgramDrafter(longest=1, num_tokens=8)
    drafter.attach(model)
    ids = torch.tensor([[5, 6, 7, 5, 8, 7], [9, 9, 9, 9, 9, 9], [3, 4, 3, 4, 3, 5]])
    common = dict(attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
    out = model.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **common)
    assert torch.equal(out.sequences, model.generate(ids, **common))
    assert {len(draft) for row in out.speculation.rows_drafts for draft in row[:-8]} == {0, 8}
    session = NgramSession(SimpleNamespace(num_tokens=8, masks=lambda tokens, is_warped: None), LONGEST, 1)
    assert session.propose(rows_of([[1, 2, 3], [4, 5, 6, 7]]), 8).tokens.shape[1] == 0
    assert session.kinds(rows_of([[1, 2, 3], [4, 5, 4], [4, 5, 4, 5], [5, 6, 7, 5, 6, 7]])) == [-1, 0, 1, 2]
