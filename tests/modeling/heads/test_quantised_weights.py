"""Drafters on backbones that torchao and bitsandbytes quantise: the greedy text is the quantised model's own."""

from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from tests.every_model import llama, prompt_for
from tokenahead import EagleHead, MTPHeads, NgramDrafter

DRAFTERS: dict[str, Callable] = {
    "n-grams": lambda base: NgramDrafter(num_tokens=4),
    "heads": lambda base: MTPHeads.from_backbone(base, window=4),
    "circuit": lambda base: MTPHeads.from_backbone(base, window=4, head_type="hmm", rank=2),
    "eagle": lambda base: EagleHead.from_backbone(base),
    "eagle 3": lambda base: EagleHead.from_backbone(base, version=3),
}


def int8():
    torchao = pytest.importorskip("torchao.quantization")
    return TorchAoConfig(torchao.Int8WeightOnlyConfig())


def int4():
    torchao = pytest.importorskip("torchao.quantization")
    return TorchAoConfig(torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4))


def nf4():
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


@pytest.fixture(params=[int8, int4, nf4], ids=lambda make: make.__name__)
def base(request, tmp_path):
    config = request.param()
    llama(hidden_size=64, intermediate_size=64).save_pretrained(tmp_path)  # blocks of 64 weights have one scale
    return AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32)


@pytest.mark.by_day("int8-eagle 3")
@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_the_text_is_the_quantised_models_own(base, make):
    ids, options = prompt_for(base), {"max_new_tokens": 12, "do_sample": False}
    drafter = make(base)
    drafter.attach(base)
    assert torch.equal(base.generate(ids, assistant_model=drafter, **options), base.generate(ids, **options))


@pytest.mark.by_day("int8")
def test_heads_learn_beside_it_and_load_again(base, tmp_path):
    ids, heads = prompt_for(base), MTPHeads.from_backbone(base, window=3)
    assert {parameter.dtype for parameter in heads.parameters()} == {torch.float32}
    heads(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in heads.parameters())
    heads.save_pretrained(tmp_path / "heads")
    again = MTPHeads.from_pretrained(tmp_path / "heads")
    again.attach(base)
    for name, value in heads.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
