"""Gated adapters: auxiliary rows get B A x, all others stay the backbone bit for bit."""

import copy

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tokenahead.modeling.ptp.gated_linear import gate_linears
from tokenahead.modeling.ptp.gated_lora import ADAPTER, Gate
from tokenahead.modeling.ptp.gated_lora import opened as opened_gate


def two_layers(std: float = 0.3) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    gate_linears(model, rank=2, alpha=4)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=std)
    return model


def by_hand(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    low = layer.lora_A[ADAPTER].weight @ x
    return layer.base_layer(x) + 4 / 2 * (layer.lora_B[ADAPTER].weight @ low)


def opened(model: nn.Module, x: torch.Tensor, start: int, length: int) -> torch.Tensor:
    with opened_gate(Gate(start, length)):
        return model(x)


def test_auxiliary_rows_have_adapters_and_the_others_are_untouched():
    model, x = two_layers(), torch.randn(3, 7, 6)
    closed, mixed = model(x), opened(model, x, 4, 7)
    assert torch.equal(closed, model[1].base_layer(model[0].base_layer(x)))
    assert torch.equal(mixed[:, :4], closed[:, :4])
    expected = by_hand(model[1], by_hand(model[0], x[2, 5]))
    torch.testing.assert_close(mixed[2, 5], expected)
    assert (mixed[:, 4:] - closed[:, 4:]).abs().min() > 0


def test_rows_of_all_sequences_in_one_axis():
    model, x = two_layers(), torch.randn(3, 7, 6)
    torch.testing.assert_close(opened(model, x.flatten(0, 1), 4, 7), opened(model, x, 4, 7).flatten(0, 1))


def test_layers_that_see_some_rows_only_are_refused():
    with pytest.raises(ValueError, match="7.*every"):
        opened(two_layers(), torch.randn(10, 6), 4, 7)


def test_gradients_reach_adapters_from_auxiliary_rows_alone():
    model, x = two_layers(), torch.randn(2, 5, 6)
    opened(model, x, 3, 5)[:, :3].sum().backward()
    adapters = [p for name, p in model.named_parameters() if "lora_" in name]
    assert all(p.grad is None or not p.grad.any() for p in adapters)
    opened(model, x, 3, 5)[:, 3:].sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in adapters)


def test_transposed_layers_of_gpt2():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=16)).eval()
    gate_linears(model, rank=2, alpha=2, skip=model.lm_head)
    layer = model.transformer.h[0].mlp.c_fc
    nn.init.normal_(layer.lora_B[ADAPTER].weight)
    x = torch.randn(1, 2, 8)
    with opened_gate(Gate(1, 2)):
        added = layer(x) - layer.base_layer(x)
    expected = layer.lora_B[ADAPTER](layer.lora_A[ADAPTER](x[:, 1]))
    assert not added[:, 0].any()
    torch.testing.assert_close(added[:, 1], expected)
    assert not hasattr(model.lm_head, "lora_A")


def test_compiled_calls_find_their_gates():
    """The gate of a call is read while its graph is made; calls of the same shape share a graph."""
    model, x, graphs = two_layers(), torch.randn(2, 7, 6), []

    def backend(graph: torch.fx.GraphModule, _: list) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        expected, closed = opened(model, x, 4, 7), model(x)
        for repeated in range(3):
            torch.testing.assert_close(opened(compiled, x, 4, 7), expected)
            torch.testing.assert_close(compiled(x), closed)
            if repeated == 1:
                made = len(graphs)
    assert len(graphs) == made <= 3  # open gates, closed ones, and a thread that has opened none yet


def test_decoding_packs_adapters_in_the_dtype_of_the_layer_until_a_weight_changes():
    model, x = two_layers().double(), torch.randn(3, 5, 6, dtype=torch.float64)
    with torch.no_grad():
        first = opened(model, x, 2, 5)
        kept = model[0].siblings.known
        torch.testing.assert_close(opened(model, x, 2, 5), first)
        assert model[0].siblings.known is kept and kept[2].dtype == torch.float64
        model[0].lora_A[ADAPTER].weight.mul_(2)
        torch.testing.assert_close(opened(model, x, 2, 5)[2, 4], by_hand(model[1], by_hand(model[0], x[2, 4])))
    assert model[0].siblings.known is not kept and copy.deepcopy(model)[0].siblings.known is None
