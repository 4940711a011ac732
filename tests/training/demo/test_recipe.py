"""How the demo's model is trained: which optimizer gets what, in which precision, and what the stages add up to."""

import io

import pytest
import torch
from rich.console import Console
from transformers import TrainerCallback

from tests.internals import (
    STAGES,
    Muon,
    Stage,
    StepCounter,
    build_optimizer,
    has_fast_bfloat16,
    load_corpus,
    tiny_config,
)
from tests.internals import callbacks_module as callbacks
from tests.internals import demo_recipe as recipe
from tests.internals import demo_train as train
from tests.training.conftest import micro_config
from tokenahead import EvaByteForMTPC


def ids_of(optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def test_matrices_of_the_layers_go_to_muon_and_the_rest_to_adam():
    model = EvaByteForMTPC(micro_config())
    muon, adam = build_optimizer(model, 0.01, 0.03).parts
    assert isinstance(muon, Muon) and isinstance(adam, torch.optim.AdamW)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[i].split(".", 3)[3] for i in ids_of(muon)} == {
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    }
    assert ids_of(muon) | ids_of(adam) == set(names) and not ids_of(muon) & ids_of(adam)
    assert (muon.param_groups[0]["lr"], adam.param_groups[0]["lr"]) == (0.03, 0.01)


def test_heads_alone_go_to_adam():
    model = EvaByteForMTPC(micro_config())
    model.train_only("heads")
    optimizer = build_optimizer(model, 0.01, 0.03)
    assert isinstance(optimizer, torch.optim.AdamW) and ids_of(optimizer) == {id(model.lm_head.weight)}


@pytest.mark.parametrize(
    ("capabilities", "fast"),
    [
        ({"avx2": True}, False),
        ({"avx512_bf16": True}, True),
        ({"amx_bf16": True, "avx512_bf16": False}, True),
        ({}, False),
    ],
)
def test_bfloat16_is_used_where_the_processor_multiplies_it(monkeypatch, capabilities, fast):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert has_fast_bfloat16() is fast


def test_an_old_torch_that_cannot_tell_trains_in_float32(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert has_fast_bfloat16() is False


def test_stages_share_the_whole_time_and_end_with_the_heads():
    assert sum(stage.share for stage in STAGES) == pytest.approx(1.0)
    assert [stage.part for stage in STAGES][-1] == "heads" and STAGES[-1].rates[1] == STAGES[-2].rates[1] == 0.0
    assert max(stage.length for stage in STAGES) > tiny_config().window_size  # summaries of earlier windows are learned


@pytest.mark.parametrize("is_fast", [False, True], ids=["float32", "bfloat16 autocast"])
def test_training_lowers_the_loss_of_every_head(monkeypatch, source, is_fast):
    class Losses(TrainerCallback):
        def __init__(self) -> None:
            self.entries, self.dtypes = [], set()

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.entries += [[logs[f"loss_head_{depth}"] for depth in (1, 2, 3, 4)]] if "loss" in logs else []

        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 30

    losses, counter = Losses(), StepCounter()
    monkeypatch.setattr(recipe, "has_fast_bfloat16", lambda: is_fast)
    monkeypatch.setattr(callbacks, "_WARMUP", 1e-9)  # the rate follows the clock; the loss must not depend on it
    model = EvaByteForMTPC(micro_config())
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: losses.dtypes.add(output.dtype))
    stage = Stage("all", "all", share=1.0, length=48, rows=4, rates=(1.0, 0.5))
    quiet = Console(file=io.StringIO())
    train(model, load_corpus(source).train, 5.0, quiet, stages=[stage], callbacks=[losses, counter])
    hook.remove()
    assert counter.count == 30 and not model.training
    assert all(last < first - 1.0 for first, last in zip(losses.entries[0], losses.entries[-1]))
    assert (torch.bfloat16 in losses.dtypes) is is_fast
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
