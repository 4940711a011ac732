"""Drafters recognise the backbone that they were saved with."""

import copy
import logging

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tokenahead import EagleHead, MTPHeads


def _llama(seed):
    torch.manual_seed(seed)
    sizes = dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=None, pad_token_id=0)).eval()


def _warnings(caplog, attach):
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        attach()
    return [record.getMessage() for record in caplog.records if "backbone_fingerprint" in record.getMessage()]


@pytest.mark.parametrize("kind", [MTPHeads, EagleHead])
def test_another_backbone_of_the_same_shape_is_warned_of(kind, tmp_path, caplog):
    backbone = _llama(0)
    kind.from_backbone(backbone).save_pretrained(tmp_path)
    drafter = kind.from_pretrained(tmp_path)
    assert drafter.config.backbone_fingerprint.startswith("40x32 32 ")
    assert not _warnings(caplog, lambda: drafter.attach(copy.deepcopy(backbone)))
    drafter.detach()
    assert len(_warnings(caplog, lambda: drafter.attach(_llama(1)))) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_backbone_in_two_dtypes_is_the_same(dtype, tmp_path, caplog):
    backbone = _llama(0)
    MTPHeads.from_backbone(backbone).save_pretrained(tmp_path)
    heads = MTPHeads.from_pretrained(tmp_path)
    assert not _warnings(caplog, lambda: heads.attach(copy.deepcopy(backbone).to(dtype)))


def _saved(backbone, folder):
    MTPHeads.from_backbone(backbone).save_pretrained(folder)
    return MTPHeads.from_pretrained(folder)


@pytest.mark.by_day(most=6)
@pytest.mark.parametrize("layer", range(6))
@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"])
def test_every_matrix_of_every_layer_is_read(layer, name, tmp_path, caplog):
    backbone = _llama(0)
    heads, other = _saved(backbone, tmp_path), copy.deepcopy(backbone)
    with torch.no_grad():
        weight = other.model.layers[layer].get_submodule(name).weight
        weight.add_(torch.randn_like(weight), alpha=0.1 * float(weight.std()))
    assert len(_warnings(caplog, lambda: heads.attach(other))) == 1
