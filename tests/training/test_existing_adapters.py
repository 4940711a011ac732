"""Strategies on a backbone that carries adapters of peft already: they go on where that is meant, or are refused."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.training.conftest import ragged_rows, trainer_for
from tests.training.test_evaluation_loss import llama
from tests.training.test_strategies import modules
from tokenahead import MTPHeads
from tokenahead.training import TrainingStrategy
from tokenahead.training.loading import put_adapters

ROWS = ragged_rows(4)
THERE = dict(r=3, lora_alpha=5, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])


@pytest.fixture
def adapted(tmp_path):
    """A backbone with adapters from a directory, which are not at zero, and do not learn."""
    torch.manual_seed(0)
    plain = llama(num_hidden_layers=2)
    plain.add_adapter(LoraConfig(**THERE, init_lora_weights=False))
    plain.save_pretrained(tmp_path / "adapters")
    backbone = llama(num_hidden_layers=2)
    backbone.load_adapter(str(tmp_path / "adapters"))
    return backbone


def trainer(model, folder, **fields):
    options = dict(max_steps=2, learning_rate=1e-2)
    return trainer_for(model, folder / "out", ROWS, strategy=TrainingStrategy(**fields), **options)


@pytest.mark.by_day("the same pattern")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict(lora_rank=3, lora_alpha=5, lora_dropout=0.0, lora_targets=["v_proj", "self_attn.q_proj"]),
        dict(lora_targets=r".*\.[qv]_proj"),
    ],
    ids=["unsaid", "the same", "the same pattern"],
)
def test_adapters_that_are_there_go_on(fields, adapted, tmp_path):
    before = {name: value.clone() for name, value in adapted.named_parameters()}
    trainer(MTPHeads.from_backbone(adapted, window=3), tmp_path, train="lora", **fields).train()
    moved = {name for name, value in adapted.named_parameters() if not value.equal(before[name])}
    assert moved == {name for name in before if "lora_" in name}


@pytest.mark.by_day("lora_rank-8-3")
@pytest.mark.parametrize(
    ("field", "value", "there"), [("lora_rank", 8, "3"), ("lora_alpha", 6, "5"), ("lora_dropout", 0.1, "0.0")]
)
def test_other_adapters_than_those_that_are_there(field, value, there, adapted, tmp_path):
    heads = MTPHeads.from_backbone(adapted, window=3)
    with pytest.raises(ValueError, match=rf"{field}=.*adapters of the backbone have {there}"):
        trainer(heads, tmp_path, train="lora", **{field: value})


def test_a_backbone_with_adapters_does_not_learn_as_a_whole(adapted, tmp_path):
    """Its save_pretrained would write the adapters alone."""
    with pytest.raises(ValueError, match="train='all'"):
        trainer(MTPHeads.from_backbone(adapted, window=3), tmp_path, train="all")


def test_adapters_that_a_wrapper_holds_are_not_drawn_anew(tmp_path):
    backbone = get_peft_model(llama(num_hidden_layers=2), LoraConfig(**THERE, init_lora_weights=False))
    before = {name: value.clone() for name, value in backbone.named_parameters()}
    with pytest.raises(ValueError, match="train='lora'.*merge"):
        trainer(MTPHeads.from_backbone(backbone, window=3), tmp_path, train="lora")
    assert all(value.equal(before[name]) for name, value in backbone.named_parameters())


@pytest.mark.parametrize("train", ["lora", "all"])
def test_a_model_with_modules_that_carries_adapters(train, tmp_path):
    model = get_peft_model(modules(), LoraConfig(**THERE))
    for each in (model, model.get_base_model()):
        with pytest.raises(ValueError, match=f"train='{train}': the (PeftModel|DeepSeekMTP) carries adapters .*merge"):
            trainer(each, tmp_path, train=train)


@pytest.mark.parametrize("is_training", [False, True])
def test_adapters_that_are_put_on_a_model_leave_it_in_its_mode(is_training, tmp_path):
    """New parts come in training mode, and would drop out where a model is measured."""
    saved = llama(num_hidden_layers=2)
    saved.add_adapter(LoraConfig(**THERE | {"lora_dropout": 0.5}, init_lora_weights=False))
    saved.eval().save_pretrained(tmp_path)
    backbone = llama(num_hidden_layers=2).train(is_training)
    put_adapters(backbone, tmp_path)
    assert {module.training for module in backbone.modules()} == {is_training}
    ids = torch.arange(3, 13)[None]
    torch.testing.assert_close(backbone.eval()(ids).logits, saved(ids).logits)
