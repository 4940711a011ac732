"""Layers with an attention window hold the window and a block, rounded up, while drafts are verified."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicSlidingWindowLayer

from tests.assisted import assisted_generate
from tests.families import CHUNKED, family_config, shake
from tests.models import left_padded
from tests.tree_drafters import DEPTH, KnowingChains, KnowingTrees
from tokenahead import AssistantDrafter
from tokenahead.generation.backbone import cache as cache_module
from tokenahead.generation.backbone.cache import RaggedLayer

WINDOW, NEW, NODES, VOCABULARY = 6, 40, 7, 24
NAMES = ["mistral", "gemma2", "gemma3_text", "gpt_oss", "llama4_text"]
OPTIONS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}


@pytest.fixture(autouse=True)
def step(monkeypatch):
    """Widths are multiples of 64; of 4 here, so that rings are gone through several times."""
    monkeypatch.setattr(cache_module, "_STEP", 4)
    return 4


def backbone(name):
    torch.manual_seed(3)
    if name == "llama4_text":
        config = AutoConfig.for_model(name, vocab_size=VOCABULARY, **CHUNKED)
    else:
        config = family_config(name, vocab_size=VOCABULARY)
    return shake(AutoModelForCausalLM.from_config(config)).eval()


def prompts(lengths=(3, 9, 1, 14)):
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]


def columns(cache):
    """Columns that layers with an attention window have room for."""
    return [
        layer.keys.shape[-2]
        for layer in cache.layers
        if isinstance(layer, (DynamicSlidingWindowLayer, RaggedLayer)) and layer.is_sliding
    ]


def watched(model):
    """Columns that such layers hold, and that texts have, after every call of a model; both grow meanwhile."""
    held, seen = [], []

    def look(_, args, kwargs, outputs):
        held.extend(columns(outputs.past_key_values))
        seen.append(outputs.past_key_values.get_seq_length())

    model.register_forward_hook(look, with_kwargs=True)
    return held, seen


@pytest.mark.by_day("mistral-KnowingChains", "gemma3_text-KnowingTrees")
@pytest.mark.parametrize("kind", [KnowingChains, KnowingTrees])
@pytest.mark.parametrize("name", NAMES)
def test_caches_stay_flat_and_texts_plain_alone_and_in_ragged_batches(name, kind, step):
    model, texts = backbone(name), prompts()
    inputs, drafter = left_padded(texts), kind(VOCABULARY, NODES).attach(model)
    plain = model.generate(**inputs, max_new_tokens=NEW, **OPTIONS).sequences
    drafter.texts = plain.tolist()
    held, seen = watched(model)
    ragged = model.generate(**inputs, max_new_tokens=NEW, assistant_model=drafter, **OPTIONS)
    assert torch.equal(ragged.sequences, plain)
    assert set().union(*ragged.speculation.rows_accepted) == set(range(DEPTH + 1))
    counts = set()
    for text, written in zip(texts, plain):
        drafter.texts = [[*text.tolist(), *written[-NEW:].tolist()]]
        alone = model.generate(text[None], max_new_tokens=NEW, assistant_model=drafter, **OPTIONS)
        assert alone.sequences[0].tolist() == drafter.texts[0]
        counts |= set(alone.speculation.accepted)
    assert counts == set(range(DEPTH + 1))
    assert 0 < max(held) <= -(-(WINDOW + 1 + NODES) // step) * step and max(seen) > 8 * WINDOW


@pytest.mark.by_day("gpt_oss")
@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_assistants_forget_as_their_targets_do(name, step):
    model, texts = backbone(name), prompts()
    assistant = shake(copy.deepcopy(model), seed=1, size=0.02)
    drafter = AssistantDrafter(assistant, num_tokens=3).attach(model)
    inputs = left_padded(texts)
    plain = model.generate(**inputs, max_new_tokens=NEW, **OPTIONS).sequences
    held, seen = watched(assistant)
    ours = model.generate(**inputs, max_new_tokens=NEW, assistant_model=drafter, **OPTIONS)
    assert torch.equal(ours.sequences, plain)
    assert set().union(*ours.speculation.rows_accepted) == {0, 1, 2, 3}
    assert 0 < max(held) <= -(-(WINDOW + 5) // step) * step and max(seen) > 8 * WINDOW
    out = assisted_generate(model, texts[1][None], drafter, max_new_tokens=NEW, **OPTIONS)
    assert torch.equal(out.sequences[0, -NEW:], plain[1, -NEW:])  # transformers' own loop
