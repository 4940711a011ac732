"""Sequences that have ended are left out of the forwards to come, and the text of the others does not change."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from tests.backbones import CONFIGS, backbone, prompts, train_eagle, train_heads
from tests.families import CHUNKED, family_config, shake
from tests.models import left_padded
from tests.tree_drafters import KnowingChains, KnowingTrees
from tokenahead import AssistantDrafter, NgramDrafter

NAMES = ["llama", "qwen3", "mistral", "gemma3", "gpt2", "gpt_oss", "llama4_text", "glm_moe_dsa"]
DRAFTERS = {
    "ngrams": lambda model: NgramDrafter(longest=1, num_tokens=4).attach(model),
    "heads": lambda model: train_heads(model, steps=10),
    "eagle": lambda model: train_eagle(model, 3, steps=5),
    "assistant": lambda model: AssistantDrafter(backbone(), num_tokens=3).attach(model),
}


def model_of(name):
    if name in CONFIGS:
        return backbone(name)
    torch.manual_seed(3)
    if name == "llama4_text":
        config = AutoConfig.for_model(name, vocab_size=48, **CHUNKED)
    else:
        config = family_config(name, vocab_size=48)
    return shake(AutoModelForCausalLM.from_config(config)).eval()


class EndsAt(StoppingCriteria):
    """Every sequence has its own length."""

    def __init__(self, lengths):
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.lengths


def batch_of(rows=8):
    """A ragged batch whose sequences end one after the other."""
    batch = left_padded(prompts(rows, seed=4))
    start = batch["input_ids"].shape[1]
    ends = StoppingCriteriaList([EndsAt([start + 3 + 4 * row for row in range(rows)])])
    return batch, dict(max_new_tokens=40, do_sample=False, pad_token_id=0, eos_token_id=47, stopping_criteria=ends)


def sizes_of(model):
    """Sequences of every forward, noted as they come."""
    sizes = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(len((*args, kwargs.get("input_ids"))[0])), with_kwargs=True
    )
    return sizes


@pytest.mark.by_day("llama-chains", "gemma3-trees")
@pytest.mark.parametrize("kind", [KnowingChains, KnowingTrees], ids=["chains", "trees"])
@pytest.mark.parametrize("name", NAMES)
def test_texts_stay_while_sequences_leave(name, kind):
    model = model_of(name)
    if kind is KnowingTrees and name == "glm_moe_dsa":
        pytest.skip("dynamic sparse attention takes chains")
    drafter = kind(48).attach(model)
    batch, common = batch_of()
    plain = model.generate(**batch, **common)
    drafter.texts = plain.tolist()
    sizes = sizes_of(model)
    out = model.generate(**batch, **common, assistant_model=drafter, num_assistant_tokens=4)
    assert torch.equal(out, plain)
    assert sizes[0] == 8 and sizes == sorted(sizes, reverse=True) and sizes[-1] < 5, sizes


def adapted(**options):
    """A model with two adapters, and what its layers get by hooks."""
    lora = dict(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(copy.deepcopy(backbone()), LoraConfig(**lora, **options), adapter_name="a")
    model.add_adapter("b", LoraConfig(**lora))
    return model.eval()


@pytest.mark.by_day("heads")
@pytest.mark.parametrize("name", DRAFTERS)
def test_adapters_per_sequence_stay_with_their_sequences(name):
    model, (batch, options) = adapted(), batch_of(4)
    options |= {"adapter_names": ["a", "b", "__base__", "a"]}
    plain = model.generate(**batch, **options)
    drafter = DRAFTERS[name](model)
    assert model.generate(**batch, **options, assistant_model=drafter).equal(plain)
    other = model.generate(**batch, **options | {"adapter_names": ["b", "b", "a", "a"]}, assistant_model=drafter)
    assert not other.equal(plain)


def interrupt(sequences, scores, **_):
    raise KeyboardInterrupt


def test_adapters_of_a_call_are_gone_after_an_error():
    for wrong in [{"stopping_criteria": [interrupt]}, {"num_assistant_tokens": 0}]:
        model, (batch, options) = adapted(), batch_of(4)
        drafter, plain = NgramDrafter().attach(model), model.generate(**batch, **options)
        wrong = options | wrong | {"adapter_names": ["a", "b", "__base__", "a"], "assistant_model": drafter}
        with pytest.raises((KeyboardInterrupt, ValueError)):
            model.generate(**batch, **wrong)
        assert model.generate(**batch, **options).equal(plain)
        assert model.generate(**batch, **options, assistant_model=drafter).equal(plain)


def test_activated_adapters_decode_plainly():
    """Their offsets count from the end of a forward, of one token in plain decoding."""
    model, (batch, options) = adapted(alora_invocation_tokens=[5, 6]), batch_of(4)
    batch["input_ids"][:, -2:] = torch.tensor([5, 6])
    plain = model.generate(**batch, **options)
    drafter = NgramDrafter(longest=1, num_tokens=6).attach(model)
    assert model.generate(**batch, **options, assistant_model=drafter).equal(plain)
    with pytest.raises(ValueError, match="alora_offsets"):
        model.generate(**batch, **options, assistant_model=drafter, use_mtp=True)
