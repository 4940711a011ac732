"""Caches behind draft trees: masks against every path alone, compaction, and rollback per row."""

import pytest
import torch
from transformers import DynamicCache

from tests.backbones import ATTENTION_WINDOW, backbone
from tests.internals import (
    DraftTree,
    NewTokens,
    RepackedTarget,
    VerificationResult,
    compact,
    dense_mask,
    shift_cache,
    tree_mask,
)

NAMES = ["llama", "mistral", "gemma3", "gpt2"]
LENGTHS = [9, 4]
WIDTH = max(LENGTHS)
PARENTS = torch.tensor([[-1, 0, -1, 1, 0, 2], [-1, -1, 1, 2, 3, 3]])


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    return backbone(request.param).double()


def texts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 48, (length,), generator=generator) for length in LENGTHS]


def filled(model):
    """A target with the left-padded texts, all but the last token of each, in its cache."""
    ids = torch.stack([torch.nn.functional.pad(text, (WIDTH - len(text), 0)) for text in texts()])
    mask = torch.arange(WIDTH) >= WIDTH - torch.tensor(LENGTHS)[:, None]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache()
    with torch.no_grad():
        model(
            ids[:, :-1], attention_mask=mask[:, :-1].long(), position_ids=positions[:, :-1], past_key_values=cache
        )  # fmt: skip
    return RepackedTarget(model, cache, ids[:, 0], mask[:, :-1]), ids[:, -1:]


def tree(seed=0):
    return DraftTree(torch.randint(2, 48, PARENTS.shape, generator=torch.Generator().manual_seed(seed)), PARENTS)


def paths(draft):
    """For every row and place, the tokens of the nodes on its way."""
    found = []
    for tokens, parents in zip(draft.tokens.tolist(), draft.parents.tolist()):
        row = [[]]
        for token, parent in zip(tokens, parents):
            row.append([*row[parent + 1], token])
        found.append(row)
    return found


@torch.no_grad()
def alone(model, text):
    """Logits of the last token of a text, from an ordinary forward without cache."""
    return model(torch.as_tensor(text)[None], use_cache=False).logits[0, -1]


@torch.no_grad()
def test_every_place_is_scored_as_its_path_alone(model):
    target, last = filled(model)
    draft = tree()
    fed = target.forward(torch.cat([last, draft.tokens], dim=1), draft, None)
    assert min(LENGTHS) < ATTENTION_WINDOW < max(LENGTHS)
    for row, (text, ways) in enumerate(zip(texts(), paths(draft))):
        for place, way in enumerate(ways):
            expected = alone(model, [*text.tolist(), *way])
            torch.testing.assert_close(fed.logits[row, place], expected, atol=1e-10, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("kept", [[4, 2], [1, 4], [3, 3], [2, 0]], ids=str)
def test_the_kept_path_is_continued_by_row(model, kept):
    """After compaction, rollback and repacking, the next tree is scored as its paths alone; and so after `align`."""
    target, last = filled(model)
    draft, ends = tree(), [4, 5]  # places 4 and 5 end paths of 3 and 4 nodes
    target.forward(torch.cat([last, draft.tokens], dim=1), draft, None)
    columns = draft.paths()[torch.arange(2), torch.tensor(ends)]
    way = [paths(draft)[row][place] for row, place in enumerate(ends)]
    target.keep(
        NewTokens(kept, last.device), VerificationResult(torch.tensor([3, 4]), draft.tokens[:, :5], columns), draft
    )
    written = [text.tolist() + tokens[: max(count - 1, 0)] for text, tokens, count in zip(texts(), way, kept)]
    if 0 in kept:  # an ended row keeps nothing, not even b: it is fed again
        written[kept.index(0)] = written[kept.index(0)][:-1]
    assert target.counts.tolist() == [len(text) for text in written]
    again, start = tree(seed=1), torch.tensor([[7], [8]])
    fed = target.forward(torch.cat([start, again.tokens], dim=1), again, None)
    for row, ways in enumerate(paths(again)):
        for place, tokens in enumerate(ways):
            expected = alone(model, [*written[row], int(start[row]), *tokens])
            torch.testing.assert_close(fed.logits[row, place], expected, atol=1e-10, rtol=0)


def test_compaction_takes_each_rows_columns_in_order():
    cache = DynamicCache()
    states = torch.arange(2 * 3 * 7, dtype=torch.float).view(2, 3, 7, 1)
    cache.update(states, -states, 0)
    compact(cache, torch.tensor([[0, 2, 3], [0, 1, 1]]), fed=4)
    expected = states[torch.arange(2)[:, None], :, torch.tensor([[0, 1, 2, 3, 5, 6], [0, 1, 2, 3, 4, 4]])]
    assert torch.equal(cache.layers[0].keys, expected.transpose(1, 2))
    assert torch.equal(cache.layers[0].values, -expected.transpose(1, 2))


def test_rows_are_shifted_to_the_right_and_back():
    cache, states = DynamicCache(), torch.arange(2 * 6, dtype=torch.float).view(2, 1, 6, 1)
    cache.update(states, states, 0)
    mask = torch.ones(2, 6, dtype=torch.bool)
    moved = shift_cache(cache, torch.tensor([0, 2]), mask)
    assert moved.tolist() == [[True] * 6, [False] * 2 + [True] * 4]
    assert cache.layers[0].keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert cache.layers[0].keys[1, 0, 2:, 0].tolist() == [6, 7, 8, 9]
    shift_cache(cache, torch.tensor([0, -2]), moved)
    assert cache.layers[0].keys[1, 0, :4, 0].tolist() == [6, 7, 8, 9]


def test_masks_by_hand():
    model = backbone("gemma3")
    cached = torch.tensor([[False, True, True, True, True, True, True, True]])
    draft = DraftTree(torch.tensor([[3, 4, 5]]), torch.tensor([[-1, -1, 1]]))
    seen = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    full = torch.tensor([[0, *[1] * 7, *own] for own in seen]).bool()
    near = full.clone()
    for place, distance in enumerate([0, 1, 1, 2]):  # from b; a window of 6 sees itself and 5 before
        near[place, : 8 - (ATTENTION_WINDOW - 1 - distance)] = False
    assert torch.equal(dense_mask(cached, draft.mask(), model) == 0, full[None, None])
    both = tree_mask(cached, draft, model)
    assert torch.equal(both["full_attention"] == 0, full[None, None])
    assert torch.equal(both["sliding_attention"] == 0, near[None, None])
