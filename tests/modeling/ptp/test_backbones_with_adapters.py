"""A backbone that carries adapters of peft keeps them under a student, and stays as it is."""

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model, inject_adapter_in_model

from tests.ptp_models import backbone, ids, student
from tokenahead import PTPForCausalLM


def lora(**options):
    return LoraConfig(**({"r": 2, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False} | options))


def by_transformers(name):
    model = backbone().double()
    model.add_adapter(lora(), adapter_name=name)
    return model


MADE = {
    "add_adapter, default": lambda: by_transformers("default"),
    "add_adapter, own name": lambda: by_transformers("mine"),
    "PeftModel": lambda: get_peft_model(backbone().double(), lora()),
    "within a PeftModel": lambda: get_peft_model(backbone().double(), lora()).get_base_model(),
    "injected": lambda: inject_adapter_in_model(lora(), backbone().double(), "default"),
}


@pytest.mark.by_day("add_adapter, own name", "within a PeftModel")
@pytest.mark.core_cases("add_adapter, default")
@pytest.mark.parametrize("how", MADE)
@torch.no_grad()
def test_adapters_are_kept_and_the_model_is_not_touched(how, tmp_path):
    torch.manual_seed(5)
    model = MADE[how]()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens = ids(2, 6)
    with_adapter, plain = model(tokens).logits, backbone().double()(tokens).logits
    assert (with_adapter - plain).abs().max() > 1e-3
    ptp = student(base=model)
    torch.testing.assert_close(ptp(tokens).logits, with_adapter)
    assert not torch.allclose(ptp(tokens, uniforms=torch.rand(2, 2)).logits[:, 6:8], with_adapter[:, :2])
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(tokens).logits, with_adapter)
    ptp.save_pretrained(tmp_path)
    again, uniforms = PTPForCausalLM.from_pretrained(tmp_path, dtype=torch.float64), torch.rand(2, 3)
    torch.testing.assert_close(again(tokens, uniforms=uniforms).logits, ptp(tokens, uniforms=uniforms).logits)


@torch.no_grad()
def test_adapters_that_are_off_or_merged_already():
    torch.manual_seed(5)
    model = get_peft_model(backbone().double(), lora())
    tokens = ids(1, 6)
    wanted = model(tokens).logits
    model.merge_adapter()
    torch.testing.assert_close(student(base=model)(tokens).logits, wanted)
    model.unmerge_adapter()
    with model.disable_adapter():
        assert torch.equal(student(base=model)(tokens).logits, model(tokens).logits)


@pytest.mark.core
def test_what_cannot_be_merged_is_refused_by_name():
    prompts = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2)
    with pytest.raises(ValueError, match="PeftModelForCausalLM"):
        student(base=get_peft_model(backbone(), prompts))
    whole = get_peft_model(backbone(), lora(modules_to_save=["lm_head"], task_type=TaskType.CAUSAL_LM))
    with pytest.raises(ValueError, match="PTPForCausalLM"):
        student(base=student().backbone)
    with pytest.raises(ValueError, match="lm_head"):
        student(base=whole)
