"""`from_backbone` of every class takes a model and leaves it as it was, while no tensor is held twice."""

import copy

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from transformers import AutoModelForCausalLM

from tests.every_model import llama, same_texts, texts
from tokenahead import DeepSeekMTP, MTPHeads, PTPForCausalLM

MADE = {
    "deepseek": lambda base: DeepSeekMTP.from_backbone(base, num_modules=2),
    "ptp": lambda base: PTPForCausalLM.from_backbone(base, num_slots=3, lora_rank=2),
    "heads": lambda base: MTPHeads.from_backbone(base, window=3).detach(),
}


def facts(model: torch.nn.Module) -> dict:
    """All that can be seen of a model but the numbers in its tensors."""
    return {
        "config": copy.deepcopy(model.config.to_dict()),
        "attention": model.config._attn_implementation,
        "generation": model.generation_config.to_dict(),
        "attributes": set(vars(model)),
        "modules": [(name, type(module)) for name, module in model.named_modules()],
        "parameters": [(name, id(p), p.requires_grad, p.data_ptr()) for name, p in model.named_parameters()],
        "training": model.training,
    }


@pytest.mark.parametrize("name", MADE)
def test_the_given_model_stays_as_it_is(name, tmp_path):
    base = llama().train()
    before, expected = facts(base), texts(base.eval())
    base.train()
    made = MADE[name](base)
    made.train_only("all") if hasattr(made, "train_only") else None
    made.requires_grad_(False).double()
    assert facts(base) == before
    base.eval().save_pretrained(tmp_path)
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert same_texts(base, expected) and same_texts(again, expected)


@pytest.mark.parametrize("name", ["deepseek", "ptp"])
def test_no_tensor_is_held_twice(name):
    base = llama(tie_word_embeddings=True)
    made = MADE[name](base)
    places = {parameter.data_ptr() for parameter in made.parameters()}
    assert {parameter.data_ptr() for parameter in base.parameters()} <= places
    assert made.get_input_embeddings().weight is made.get_output_embeddings().weight
    assert same_texts(made, texts(base, use_cache=True)[:1], use_mtp=False)


@pytest.mark.parametrize("name", ["deepseek", "ptp"])
def test_a_model_with_hooks_of_accelerate(name):
    base = dispatch_model(llama(), {"": "cpu"}, force_hooks=True)
    assert same_texts(MADE[name](base), texts(base)[:1])
    with pytest.raises(ValueError, match="LlamaForCausalLM"):
        MADE[name](cpu_offload(llama(), execution_device="cpu"))


@pytest.mark.core_cases("deepseek")
@pytest.mark.parametrize("name", ["deepseek", "ptp"])
def test_a_path_will_do(name, tmp_path):
    base = llama()
    base.save_pretrained(tmp_path)
    assert same_texts(MADE[name](tmp_path), texts(base)[:1])
