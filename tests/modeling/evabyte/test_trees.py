"""Trees of drafts on the EVA cache: each path equals the chain of its tokens, at every offset and across borders."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.internals import DraftTree, NewTokens
from tests.models import left_padded, tiny_model
from tokenahead import EvaByteCache

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


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    nodes=st.integers(2, 40),
    wide=st.integers(2, 9),
    seed=st.integers(0, 99),
)
@torch.no_grad()
def test_every_path_equals_the_chain_of_its_tokens_and_any_path_is_kept(lengths, nodes, wide, seed):
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
