"""Greedy texts of every kind of cache layer are plain decoding's, alone and in ragged batches: `pytest -m slow`."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.backbones import backbone, prompts
from tests.families import CHUNKED, family_config, family_model, shake
from tests.models import left_padded
from tests.ptp_models import VOCABULARY as OF_STUDENTS
from tests.ptp_models import student
from tests.tree_drafters import KnowingChains, KnowingTrees
from tokenahead import EagleHead, MTPHeads, NgramDrafter

VOCABULARY, NEW, COUNT = 24, 24, 20
GREEDY = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True)
CHANGES = {
    "llama": {"num_key_value_heads": 4}, "grouped": {"num_key_value_heads": 2}, "mistral": {"sliding_window": 8},
    "gemma2": {}, "gemma3_text": {}, "gpt_oss": {}, "deepseek_v3": {}, "qwen3_next": {},
}  # fmt: skip
NAMES = [*CHANGES, "llama4_text", "gpt2"]
CHAINS_ONLY = "qwen3_next"  # which decodes plainly on static caches, too
TREES = {"top_k": 3, "total_tokens": 8}


EAGER_ONLY = ("gemma2", "gpt_oss")
WAYS = [(name, way) for name in NAMES for way in ("sdpa", "eager") if way == "eager" or name not in EAGER_ONLY]


def model_of(name, attention):
    """A random model."""
    torch.manual_seed(3)
    if name == "gpt2":
        model = backbone(name, VOCABULARY)
    elif name == "llama4_text":
        config = AutoConfig.for_model(name, vocab_size=VOCABULARY, **CHUNKED)
        model = shake(AutoModelForCausalLM.from_config(config))
    else:
        config = family_config("llama" if name == "grouped" else name, vocab_size=VOCABULARY, **CHANGES[name])
        model = shake(AutoModelForCausalLM.from_config(config))
    return prepared(model, attention)


def prepared(model, attention):
    """A model in float64, which "eager" and kernels of experts do not take: its softmax has float32, always."""
    model.set_attn_implementation(attention)
    model.set_experts_implementation("eager")
    return model.eval() if attention == "eager" else model.eval().double()


def accepted(model, vocabulary, *ways, **plain):
    """The accepted counts of all calls; each was compared with plain decoding of its prompts.

    Args:
        model: Decodes.
        vocabulary: Of the prompts.
        *ways: Keyword arguments of `generate`.
        **plain: Those of plain decoding.
    """
    found, texts = set(), prompts(COUNT, vocabulary)
    for size in (1, 4, 16):
        for start in range(0, COUNT, size):
            batch = left_padded(texts[start : start + size])
            expected = model.generate(**batch, **GREEDY, **plain).sequences
            for way in ways:
                drafter = way.get("assistant_model")
                if isinstance(drafter, KnowingTrees):
                    drafter.texts = expected.tolist()
                out = model.generate(**batch, **GREEDY, **way, use_mtp=True)
                assert torch.equal(out.sequences, expected), (size, start, way)
                found |= set().union(*out.speculation.rows_accepted)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attention"), WAYS)
def test_texts_on_every_kind_of_layer(name, attention):
    model = model_of(name, attention)
    ngrams, heads = NgramDrafter(longest=1, num_tokens=4).attach(model), MTPHeads.from_backbone(model, window=4)
    chains, trees = KnowingChains(VOCABULARY).attach(model), KnowingTrees(VOCABULARY).attach(model)
    ways = [{"assistant_model": drafter} for drafter in (ngrams, heads)]
    ways += [{"assistant_model": chains, "num_assistant_tokens": 4}]
    ways += [{"assistant_model": ngrams, "num_assistant_tokens_schedule": "adaptive"}]
    if name != CHAINS_ONLY:
        ways += [{"assistant_model": trees, "num_assistant_tokens": 4}]
        ways += [
            {"assistant_model": heads, "draft_tree": TREES},
            {"assistant_model": ngrams, "draft_tree": {"top_k": 3}},
        ]
        ways += [way | {"cache_implementation": "static"} for way in ways]
    assert accepted(model, VOCABULARY, *ways) == {0, 1, 2, 3, 4}


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["grouped", "gemma3_text", "gpt2"])
def test_texts_of_eagle_heads(name, attention):
    model = model_of(name, attention)
    head = EagleHead.from_backbone(model, version=1)
    ways = [{"assistant_model": head}, {"assistant_model": head, "draft_tree": {"depth": 3, **TREES}}]
    ways += [way | {"cache_implementation": "static"} for way in ways]
    assert accepted(model, VOCABULARY, *ways) >= {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["deepseek_v3", "mimo", "qwen3_next"])
def test_texts_of_modules(name, attention):
    model = prepared(family_model(name, num_nextn_predict_layers=1), attention)
    ways = [{}, {"num_assistant_tokens_schedule": "adaptive"}]
    if name != CHAINS_ONLY:
        ways += [{"draft_tree": TREES}, {"cache_implementation": "static"}]
    assert accepted(model, VOCABULARY, *ways, use_mtp=False) >= {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", ["one_hot", "mask"])
def test_texts_of_slots(variant, attention):
    model = prepared(student(variant), attention)
    ways = [{}, {"cache_implementation": "static"}, {"slot_budget": 6}]
    assert accepted(model, OF_STUDENTS, *ways, use_mtp=False) >= {0, 1}
