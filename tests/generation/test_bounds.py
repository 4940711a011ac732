"""Drafts and trees are no larger than a call can use, also where options ask for more."""

from contextlib import contextmanager

import pytest
import torch

from tests.every_model import llama
from tokenahead import DrafterCascade, EagleHead, MTPHeads, NgramDrafter, RecyclingDrafter, SuffixDrafter
from tokenahead.generation.call.options import CallOptions
from tokenahead.generation.trees.building import ranked_tree

PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6, 7], [9, 5, 6, 9, 5, 6, 9]])
DRAFTERS = {
    "ngram": lambda base: NgramDrafter().attach(base),
    "suffix": lambda base: SuffixDrafter().attach(base),
    "recycling": lambda base: RecyclingDrafter().attach(base),
    "heads": lambda base: MTPHeads.from_backbone(base, window=4),
    "eagle 1": lambda base: EagleHead.from_backbone(base, version=1),
    "cascade": lambda base: DrafterCascade([SuffixDrafter(), EagleHead.from_backbone(base, version=1)]).attach(base),
}
TREES = ({"depth": 10**9}, {"top_k": 10**9}, {"top_k": 2**62, "total_tokens": 2**62})


@pytest.fixture(scope="module")
def base():
    return llama()


@contextmanager
def detaching(drafter):
    yield drafter
    drafter.detach()
    for each in getattr(drafter, "drafters", ()):
        each.detach()


@pytest.mark.by_day("False-suffix", "True-heads", "False-cascade")
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("do_sample", [False, True])
def test_huge_trees_change_nothing(base, kind, do_sample):
    with detaching(DRAFTERS[kind](base)) as drafter:
        wanted = base.generate(PROMPT, max_new_tokens=12)
        for tree in TREES:
            try:
                out = base.generate(
                    PROMPT, max_new_tokens=12, assistant_model=drafter, draft_tree=tree, do_sample=do_sample, top_k=0
                )
            except ValueError as error:  # of a kind that has no such option, or is not so deep
                assert "draft_tree" in str(error)
                continue
            assert do_sample or torch.equal(out, wanted)


def test_cuts_are_the_tokens_left_or_the_context(base):
    def cut(max_length, **options):
        return CallOptions(num_assistant_tokens=10**9, **options).cut(base, PROMPT, max_length)

    assert cut(107).num_assistant_tokens == 100
    assert cut(10**9).num_assistant_tokens == base.config.max_position_embeddings
    # text that a seed repeats does not depend on the length limit
    assert cut(107, needs_our_loop=True).num_assistant_tokens == base.config.max_position_embeddings
    tree = cut(107, draft_tree={"depth": 10**9, "top_k": 10**9, "total_tokens": 10**9}).draft_tree
    assert tree == {"depth": 99, "top_k": 100, "total_tokens": 100}


def test_a_rank_beyond_the_vocabulary_is_refused():
    for rank in [64, 10**9, 2**62, 2**70]:
        with pytest.raises(ValueError, match=f"{rank}"):
            ranked_tree([(0,), (rank,)], torch.zeros(1, 64), lambda tokens, parents: torch.zeros(1, 1, 64))
