"""A cache that never moves: what stays where it is, room that grows, what attention gets, and grouped queries."""

import itertools

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.backbones import backbone
from tests.families import CHUNKED
from tokenahead.generation.backbone import cache as cache_module
from tokenahead.generation.backbone.backbones import target_of
from tokenahead.generation.backbone.cache import CacheLayout, RaggedLayer, block_mask, grouped_attention
from tokenahead.generation.backbone.target import RaggedBackbone
from tokenahead.generation.call.sequences import NewTokens
from tokenahead.generation.contract import DraftTree
from tokenahead.generation.tensors.masks import model_mask

PROMPT, BLOCK = 9, 5
KEPT = [[3, 1], [5, 2], [1, 5], [4, 4], [2, 3], [5, 1], [1, 1], [3, 5]]


@torch.no_grad()
def steps(model, span, ids):
    """Blocks of two texts that keep different numbers; logits are compared with a whole pass."""
    cache, expected, ends = DynamicCache(config=model.config), model(ids, use_cache=False).logits, [PROMPT, PROMPT]
    model(ids[:, :PROMPT], past_key_values=cache)
    target = target_of(model, cache, ids[:, 0], None, limit=PROMPT, span=span)
    assert isinstance(target, RaggedBackbone)
    for kept in KEPT:
        block = torch.stack([text[end : end + BLOCK] for text, end in zip(ids, ends)])
        logits = target.forward(block, DraftTree.chain(block[:, 1:]), None).logits
        for row, end in enumerate(ends):
            torch.testing.assert_close(logits[row], expected[row, end : end + BLOCK], atol=1e-9, rtol=0)
        target.keep(NewTokens(kept, ids.device))
        ends = [end + count for end, count in zip(ends, kept)]
        yield target, ends


def texts():
    return torch.randint(2, 48, (2, 64), generator=torch.Generator().manual_seed(0))


def test_room_grows_and_rings_are_laid_out_anew(monkeypatch):
    for name, step in itertools.product(["llama", "gpt2", "mistral", "gemma3"], [1, 8]):
        monkeypatch.setattr(cache_module, "_STEP", step)
        sizes = set()
        for target, _ in steps(backbone(name).double(), 0, texts()):
            sizes.add(tuple(layer.layout.size(layer.is_sliding) for layer in target.cache.layers))
        assert len(sizes) > 1 or name == "mistral"


def test_nothing_moves_and_attention_gets_little_more_than_the_longest_text():
    found = set()
    for target, ends in steps(backbone().double(), 100, texts()):
        found |= {(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in target.cache.layers}
        assert target.layout.width(BLOCK, target.layout.capacity) <= max(ends) + 2 * BLOCK + 64
    assert len(found) == 2


def test_grouped_queries_with_a_mask_give_what_repeated_keys_give():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, size, 8, generator=generator) for heads, size in ((6, 4), (2, 9), (2, 9))
    )
    module = torch.nn.Module()
    module.num_key_value_groups = 3
    visible = torch.rand(2, 4, 9, generator=generator) < 0.7
    mask = model_mask(visible, backbone().config, torch.float32)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    found, _ = grouped_attention(module, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(found, expected)
    other, _ = grouped_attention(module, query, key, value, visible[:, None], scaling=0.3)
    assert torch.equal(other, expected)


def test_layers_of_kinds_without_a_window_get_the_whole_mask():
    """A config may name a window that none of its layers has."""
    config = backbone("mistral").config
    config.layer_types = ["indexed_attention"] * 2
    rows = CacheLayout(torch.tensor([[False] + [True] * 11]), True, 12, 2)
    mask = block_mask(rows, 2, config, torch.float32)
    assert mask[0, 0].sum(-1).tolist() == [12, 13]


@torch.no_grad()
def test_slots_of_a_ring_that_hold_nothing_yet_are_not_seen():
    """One text keeps every draft and wraps round the ring; the other keeps none, and most of its slots are empty."""
    model, drafts = backbone("mistral").double(), 10
    model.config.sliding_window = 30
    ids = torch.randint(2, 48, (2, 140), generator=torch.Generator().manual_seed(0))
    expected, ends, cache = model(ids, use_cache=False).logits, [PROMPT, PROMPT], DynamicCache(config=model.config)
    model(ids[:, :PROMPT], past_key_values=cache)
    target = target_of(model, cache, ids[:, 0], None, limit=140, span=drafts + 1)
    while ends[0] + drafts < 140:
        block = torch.stack([text[end : end + drafts + 1] for text, end in zip(ids, ends)])
        logits = target.forward(block, DraftTree.chain(block[:, 1:]), None).logits
        for row, end in enumerate(ends):
            torch.testing.assert_close(logits[row], expected[row, end : end + drafts + 1], atol=1e-9, rtol=0)
        target.keep(NewTokens([drafts + 1, 1], ids.device))
        ends = [ends[0] + drafts + 1, ends[1] + 1]
    assert target.layout.has_wrapped(target.layout.size(True)) and ends[1] < 30


def test_blocks_of_another_dtype_leave_the_prompt_as_it_is():
    """Under autocast a block may come in another dtype than the prompt; both are held in the wider one."""
    for block in [torch.bfloat16, torch.float64]:
        origin, prompt = DynamicLayer(), torch.rand(1, 1, PROMPT, 4)
        origin.update(prompt, prompt)
        layer = RaggedLayer(CacheLayout(torch.ones(1, PROMPT, dtype=torch.bool), False, 20, 2), origin)
        new = torch.rand(1, 1, 2, 4).to(block)
        layer.layout.is_maskless = True
        keys, values = layer.update(new, new)
        wider = torch.promote_types(torch.float32, block)
        for states in (keys, values):
            assert states.dtype == wider
            assert torch.equal(states[:, :, :PROMPT], prompt.to(wider)) and torch.equal(
                states[:, :, PROMPT:], new.to(wider)
            )


@torch.no_grad()
def check_tree(model):
    """Every node of a tree after a left-padded prompt has the logits of a whole pass over its own path."""
    ids, real = torch.randint(2, 48, (2, 9), generator=torch.Generator().manual_seed(0)), [9, 5]
    mask = torch.arange(9) >= 9 - torch.tensor(real)[:, None]
    cache, places = DynamicCache(config=model.config), (mask.cumsum(1) - 1).clamp(min=0)
    model(ids, attention_mask=mask.long(), position_ids=places, past_key_values=cache)
    kwargs = {"position_ids": places[:, -1:]}
    target = target_of(model, cache, ids[:, 0], mask.long(), kwargs, limit=40, span=10)
    parents = torch.tensor([-1, -1, -1, 0, 0, 2, 3, 3, 6]).expand(2, -1)
    block = torch.randint(2, 48, (2, 10), generator=torch.Generator().manual_seed(1))
    logits = target.forward(block, DraftTree(block[:, 1:], parents, depth=4), None).logits
    for row, node in itertools.product(range(2), range(-1, 9)):
        path, each = [], node
        while each >= 0:
            path, each = [int(block[row, 1 + each]), *path], int(parents[row, each])
        text = torch.tensor([[*ids[row, 9 - real[row] :].tolist(), int(block[row, 0]), *path]])
        expected = model(text, use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits[row, 1 + node], expected, atol=1e-6, rtol=0)


def test_nodes_of_a_tree_see_a_window_back_from_their_depth():
    model = backbone("mistral").double()
    model.config.sliding_window = 4
    check_tree(model)


def test_nodes_of_a_tree_see_the_chunk_of_their_position():
    """Positions count real tokens, so that chunks of a padded text begin later."""
    config = AutoConfig.for_model("llama4_text", vocab_size=48, initializer_range=0.2, **CHUNKED)
    torch.manual_seed(0)
    check_tree(AutoModelForCausalLM.from_config(config).double().eval())
