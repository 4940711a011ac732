"""Caches behind draft trees: masks against every path alone, and rollback per row."""

import pytest
import torch
from transformers import DynamicCache

from tests.backbones import ATTENTION_WINDOW, backbone
from tokenahead.generation.backbone import cache as rows_module
from tokenahead.generation.backbone.backbones import shift_cache, target_of
from tokenahead.generation.backbone.cache import CacheLayout, block_mask
from tokenahead.generation.call.sequences import NewTokens
from tokenahead.generation.contract import DraftTree

NAMES = ["llama", "mistral", "gemma3", "gpt2"]
LENGTHS = [9, 4]
WIDTH = max(LENGTHS)
PARENTS = torch.tensor([[-1, 0, -1, 1, 0, 2], [-1, -1, 1, 2, 3, 3]])


@pytest.fixture(scope="module", params=[(name, kind) for name in NAMES for kind in ("sdpa", "eager")], ids=str)
def model(request):
    name, kind = request.param
    made = backbone(name)
    made.set_attn_implementation(kind)
    made.tolerance = 1e-4
    if kind == "sdpa":  # elsewhere the softmax is in float32
        made.double().tolerance = 1e-10
    return made


@pytest.fixture(autouse=True, params=[64, 1])
def step(request, monkeypatch):
    """Widths are multiples of 64; with 1, rings are as small as they may be, and are gone through several times."""
    monkeypatch.setattr(rows_module, "_STEP", request.param)


def texts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 48, (length,), generator=generator) for length in LENGTHS]


def filled(model):
    """A target with the left-padded texts, all but the last token of each, in its cache."""
    ids = torch.stack([torch.nn.functional.pad(text, (WIDTH - len(text), 0)) for text in texts()])
    mask = torch.arange(WIDTH) >= WIDTH - torch.tensor(LENGTHS)[:, None]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(
            ids[:, :-1], attention_mask=mask[:, :-1].long(), position_ids=positions[:, :-1], past_key_values=cache
        )  # fmt: skip
    return target_of(model, cache, ids[:, 0], mask[:, :-1], limit=WIDTH, span=PARENTS.shape[1] + 1), ids[:, -1:]


def tree(seed=0):
    return DraftTree(torch.randint(2, 48, PARENTS.shape, generator=torch.Generator().manual_seed(seed)), PARENTS)


def paths(draft):
    """For every row and node, the tokens of the nodes on its path."""
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


@pytest.mark.by_day("('llama', 'sdpa')-1", "('mistral', 'eager')-64", "('gemma3', 'sdpa')-1")
@torch.no_grad()
def test_every_place_is_scored_as_its_path_alone(model):
    target, last = filled(model)
    draft = tree()
    fed = target.forward(torch.cat([last, draft.tokens], dim=1), draft, None)
    assert min(LENGTHS) < ATTENTION_WINDOW < max(LENGTHS)
    for row, (text, ways) in enumerate(zip(texts(), paths(draft))):
        for place, way in enumerate(ways):
            expected = alone(model, [*text.tolist(), *way])
            torch.testing.assert_close(fed.logits[row, place], expected, atol=model.tolerance, rtol=0)


@pytest.mark.by_day(each=1)
@torch.no_grad()
@pytest.mark.parametrize("kept", [[4, 2], [1, 4], [3, 3], [2, 0]], ids=str)
def test_the_kept_path_is_continued_by_row(model, kept):
    """After every rollback the next tree is scored as its paths alone; after `align` plain decoding goes on there."""
    target, last = filled(model)
    ends = [4, 5]  # nodes 4 and 5 end paths of 3 and 4 nodes
    written = [text.tolist()[:-1] for text in texts()]
    for seed in range(5):
        draft = tree(seed)
        fed = target.forward(torch.cat([last, draft.tokens], dim=1), draft, None)
        for row, ways in enumerate(paths(draft)):
            for place, tokens in enumerate(ways):
                expected = alone(model, [*written[row], int(last[row]), *tokens])
                torch.testing.assert_close(fed.logits[row, place], expected, atol=model.tolerance, rtol=0)
        target.keep(NewTokens(kept, last.device), draft.paths()[torch.arange(2), torch.tensor(ends)])
        for row, (place, count) in enumerate(zip(ends, kept)):  # an ended row keeps nothing, not even b
            written[row] += [int(last[row]), *paths(draft)[row][place]][:count]
        assert target.counts.tolist() == [len(text) for text in written]
        last = torch.tensor([[7 + seed], [8 + seed]])
    padding = WIDTH - torch.tensor(LENGTHS)
    ends = [len(text) + int(pad) for text, pad in zip(written, padding)]
    target.align(max(ends))
    columns = torch.arange(max(ends) + 1)
    mask = (columns >= padding[:, None]) & ((columns < torch.tensor(ends)[:, None]) | (columns == max(ends)))
    outputs = model(
        last, attention_mask=mask.long(), position_ids=(mask.sum(1, keepdim=True) - 1), past_key_values=target.cache
    )
    for row in range(2):
        if ends[row] == max(ends) or not target.layout.window:  # a window would count the columns in between
            torch.testing.assert_close(
                outputs.logits[row, -1], alone(model, [*written[row], int(last[row])]), atol=model.tolerance, rtol=0
            )


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


@pytest.mark.core
def test_masks_by_hand():
    model = backbone("gemma3")
    cached = torch.tensor([[False, True, True, True, True, True, True, True]])
    draft = DraftTree(torch.tensor([[3, 4, 5]]), torch.tensor([[-1, -1, 1]]))
    seen = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    full = torch.tensor([[0, *[1] * 7, *own] for own in seen]).bool()
    near = full.clone()
    for place, distance in enumerate([0, 1, 1, 2]):  # from b; a window of 6 sees itself and 5 before
        near[place, : 8 - (ATTENTION_WINDOW - 1 - distance)] = False
    rows = CacheLayout(cached, True, 12, 4)
    both = block_mask(rows, 4, model.config, model.dtype, draft)
    assert torch.equal(both["full_attention"][0, 0, :, :12], full) and not both["full_attention"][..., 12:].any()
    assert torch.equal(both["sliding_attention"][0, 0, :, :12], near) and not both["sliding_attention"][..., 12:].any()
    model.set_attn_implementation("eager")
    added = block_mask(rows, 4, model.config, model.dtype, draft)["full_attention"]
    assert torch.equal(added == 0, both["full_attention"]) and added.isfinite().all()
