"""Trees of drafts on the EVA cache: each path equals the chain of its tokens, at every offset and across borders."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import left_padded, tiny_model, trained_model
from tokenahead import EvaByteCache, NgramDrafter
from tokenahead.generation.call.sequences import NewTokens
from tokenahead.generation.contract import DraftTree
from tokenahead.testing import continuation_distribution, continuation_p_value

MODEL = tiny_model(window_size=16, initializer_range=0.3).double()
TEXT = torch.randint(64, 320, (4, 120), generator=torch.Generator().manual_seed(1))


def prefilled(lengths):
    """A cache that holds the first tokens of the texts, so many per sequence."""
    cache = EvaByteCache(MODEL.config)
    cache.activate_past_recording()
    MODEL(**left_padded([row[:n] for row, n in zip(TEXT, lengths)]), past_key_values=cache)
    return cache


def random_tree(batch, nodes, generator, wide=3):
    """A tree per sequence, of other shapes: each node's parent is one of the `wide` before it, or b."""
    number = torch.arange(nodes)
    parents = number - 1 - torch.randint(wide, (batch, nodes), generator=generator)
    return DraftTree(torch.randint(64, 320, (batch, nodes), generator=generator), parents.clamp(min=-1))


def keep(cache, fed, counts, path=None):
    """Leave so many tokens of the last forward."""
    cache.keep_last(fed, NewTokens(counts, torch.device("cpu")), path)


def read(cache):
    """What every row holds in every layer: summaries and raw keys and values."""
    sequences, rows = cache.sequences, []
    for row, (length, start) in enumerate(zip(sequences.lengths, sequences.starts)):
        used = length - start + start // sequences.chunk
        rows.append([torch.stack([each.keys[row, :, :used], each.values[row, :, :used]]) for each in cache.layers])
    return rows


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    nodes=st.integers(2, 40),
    wide=st.integers(2, 9),
    seed=st.integers(0, 99),
)
def test_every_path_equals_the_chain_of_its_tokens_and_any_path_is_kept(lengths, nodes, wide, seed):
    check(lengths, nodes, wide, seed)


@pytest.mark.core
@pytest.mark.by_day("2")
@pytest.mark.parametrize("batch", [1, 2])
def test_trees_at_every_offset_in_a_window(batch):
    for length in range(1, 19):
        check([length, 41 - length][:batch], 6, 2, seed=length)


@torch.no_grad()
def check(lengths, nodes, wide, seed):
    """Each path of a random tree gives what the chain of its tokens gives; one is kept, and the cache goes on."""
    generator, batch = torch.Generator().manual_seed(seed), len(lengths)
    cache, tree = prefilled(lengths), random_tree(batch, nodes, generator, wide)
    tree.depth = int(tree.positions().max())
    b = torch.randint(64, 320, (batch, 1), generator=generator)
    block, before = torch.cat([b, tree.tokens], dim=1), copy.deepcopy(cache)
    logits = MODEL(block, past_key_values=cache, draft_tree=tree).logits
    paths, depths = tree.paths(), tree.positions()
    for node in range(nodes + 1):
        chain, again = block.gather(1, paths[:, node]), copy.deepcopy(before)
        expected = MODEL(chain, past_key_values=again).logits
        for row in range(batch):
            end = int(depths[row, node])
            torch.testing.assert_close(logits[row, node], expected[row, end], atol=1e-9, rtol=0)
    last = torch.randint(nodes + 1, (batch,), generator=generator)
    path = paths[torch.arange(batch), last]
    counts = [1 + int(torch.randint(int(d) + 1, (1,), generator=generator)) for d in depths[torch.arange(batch), last]]
    keep(cache, nodes + 1, counts, path)
    MODEL(block.gather(1, path), past_key_values=before)
    keep(before, path.shape[1], counts)
    assert cache.lengths == before.lengths and cache.sequences.starts == before.sequences.starts
    for ours, theirs in zip(read(cache), read(before)):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)
    following = TEXT[:batch, :19]
    again = [MODEL(following, past_key_values=each).logits for each in (cache, before)]
    torch.testing.assert_close(*again, atol=1e-9, rtol=0)


HEADS = {
    "ff": {},
    "cp": dict(head_type="cp", rank=3),
    "hmm": dict(head_type="hmm", rank=3),
    "btree": dict(head_type="btree", rank=3),
    "draft layers": dict(head_type="btree", rank=3, draft_layers=1, draft_lora_rank=2),
}
DYNAMIC, FIXED = dict(top_k=3, total_tokens=20), [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)]


def greedy(model, batch, **options):
    """What a call writes."""
    return model.generate(**batch, do_sample=False, return_dict_in_generate=True, **options)


@pytest.mark.by_day("hmm", "draft layers")
@pytest.mark.parametrize("head", HEADS)
def test_greedy_text_is_the_models_own_alone_and_in_ragged_batches(head):
    model = trained_model()
    model.set_head(window=8, **HEADS[head])
    prompts = [row[:n] for row, n in zip(TEXT.repeat(2, 1), (1, 5, 30, 31, 33, 40, 64, 90))]
    seen = set()
    for group in (prompts[:4], prompts[4:], prompts[2:3], prompts[6:7]):
        batch = left_padded(group)
        want = greedy(model, batch, use_mtp=False, max_new_tokens=40).sequences
        for tree in (DYNAMIC, FIXED):
            found = greedy(model, batch, draft_tree=tree, max_new_tokens=40)
            assert torch.equal(found.sequences, want)
            seen |= set().union(*found.speculation.rows_accepted)
    assert seen >= set(range(5))


def test_a_tree_that_pays_is_found():
    model, batch = trained_model(), left_padded([row[:n] for row, n in zip(TEXT, (30, 40))])
    found = greedy(model, batch, draft_tree="auto", max_new_tokens=20)
    assert list(model.tree_choices) == [False]
    assert torch.equal(found.sequences, greedy(model, batch, use_mtp=False, max_new_tokens=20).sequences)


@pytest.mark.parametrize("by", ["ngrams", "plain"])
def test_the_cache_of_trees_is_continued(by):
    model, ids = trained_model(), TEXT[:2, :9].repeat(1, 3)
    want = greedy(model, {"input_ids": ids}, use_mtp=False, max_new_tokens=50).sequences
    begun = greedy(model, {"input_ids": ids}, draft_tree=DYNAMIC, max_new_tokens=20)
    ngrams = NgramDrafter(num_tokens=4, branches=3).attach(model)
    way = dict(assistant_model=ngrams) if by == "ngrams" else dict(use_mtp=False)
    given = {"input_ids": begun.sequences, "past_key_values": begun.past_key_values}
    assert torch.equal(greedy(model, given, max_new_tokens=30, **way).sequences, want)


@pytest.mark.by_day("ff-block-tree0", "hmm-block-tree4")
@pytest.mark.parametrize(
    ("head", "rule", "tree"),
    [
        ("ff", "block", DYNAMIC),
        ("cp", "token", DYNAMIC),
        ("hmm", "token", DYNAMIC),
        ("btree", "block", DYNAMIC),
        ("hmm", "block", FIXED),
    ],
)
def test_sampled_text_has_the_models_distribution(head, rule, tree):
    """The third token is the first whose window is not the prompt's."""
    model = tiny_model(seed=2, vocab_size=5, window_size=9, chunk_size=3, initializer_range=0.3)
    model.set_head(window=5, **HEADS[head])
    prompt = torch.tensor([[1, 3, 2, 4, 3, 2, 2, 4]])
    torch.manual_seed(3)
    out = model.generate(
        prompt, do_sample=True, top_k=0, max_new_tokens=6, num_return_sequences=2_000, draft_tree=tree,
        verification=rule, return_dict_in_generate=True, pad_token_id=0,
    )  # fmt: skip
    assert {count for row in out.speculation.rows_accepted for count in row} >= {0, 1, 2}
    distribution = continuation_distribution(model, prompt, 3, top_k=0)
    assert continuation_p_value(out.sequences[:, 8:11], distribution) > 0.001
