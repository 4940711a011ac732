"""Heads apart from their backbone under the trainers: tokenizers, checkpointing, float32 on bfloat16, evaluation."""

import pytest
import torch
from datasets import Dataset
from transformers import TrainingArguments
from trl import SFTConfig

from tests.training.conftest import ragged_rows, trainer_for
from tests.training.test_evaluation_loss import llama
from tokenahead import EvaByteTokenizer, MTPHeads
from tokenahead.training import MTPSFTTrainer, MTPTrainer

TEXTS = ["def f(x):\n    return x + 1\n", "import os\n", "# a comment\nx = [1, 2]\n"] * 4


def heads_of(base=None, **options):
    torch.manual_seed(0)
    return MTPHeads.from_backbone(llama() if base is None else base, window=3, unembedding="own", **options)


def test_a_tokenizer_may_align_the_special_tokens(tmp_path):
    heads = heads_of()
    arguments = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to="none", save_strategy="no")
    trainer = MTPTrainer(heads, arguments, train_dataset=ragged_rows(), processing_class=EvaByteTokenizer())
    trainer.train()
    assert trainer.state.global_step == 2
    assert heads.backbone.generation_config.pad_token_id == EvaByteTokenizer().pad_token_id


@pytest.mark.by_day("True")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_trl_trains_heads_apart(checkpointing, tmp_path):
    heads = heads_of()
    before = heads.head.weight.detach().clone()
    config = SFTConfig(
        str(tmp_path), max_steps=3, learning_rate=1e-2, logging_steps=1, report_to="none", save_strategy="no",
        use_cpu=True, bf16=False, max_length=32, gradient_checkpointing=checkpointing,
    )  # fmt: skip
    data = Dataset.from_dict({"text": TEXTS})
    trainer = MTPSFTTrainer(heads, config, train_dataset=data, eval_dataset=data, processing_class=EvaByteTokenizer())
    trainer.train()
    assert not torch.equal(heads.head.weight, before) and "loss_head_3" in trainer.state.log_history[0]
    losses = []
    for size in (1, 4, 12):
        trainer.args.per_device_eval_batch_size = size
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_activation_checkpointing_is_accepted(tmp_path):
    options = dict(max_steps=1, gradient_checkpointing=True, optim="sgd", learning_rate=1.0)
    weights = []
    for checkpointing in (True, False):
        heads = heads_of()
        trainer_for(heads, tmp_path, ragged_rows(), **(options | {"gradient_checkpointing": checkpointing})).train()
        weights.append(heads.head.weight.detach())
    assert torch.equal(*weights)


def test_layer_heads_learn_with_reentrant_checkpoints(tmp_path):
    weights = []
    for chosen in ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, {}):
        torch.manual_seed(0)
        heads = MTPHeads.from_backbone(llama(), window=3, head_type="layer")
        options = dict(max_steps=1, optim="sgd", learning_rate=1.0)
        trainer_for(heads, tmp_path, ragged_rows(), **options, **chosen).train()
        weights.append(heads.head.layers[0].mlp.up_proj.weight.detach())
    assert torch.equal(*weights)


@pytest.mark.by_day("{'head_type': 'btree', 'rank': 2}")
@pytest.mark.parametrize("options", [{}, {"head_type": "btree", "rank": 2}, {"unembedding": "shared"}], ids=str)
def test_float32_heads_on_a_bfloat16_backbone_learn_and_draft(options, tmp_path):
    base = llama().bfloat16()
    base.generation_config.eos_token_id = None
    prompt = torch.arange(70, 80)[None]
    expected = base.generate(prompt, do_sample=False, max_new_tokens=12)
    heads = MTPHeads.from_backbone(base, window=3, **({"unembedding": "own"} | options)).float()
    trainer = trainer_for(heads, tmp_path, ragged_rows(), learning_rate=1e-2, max_steps=6)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert {parameter.dtype for parameter in heads.parameters()} == {torch.float32} and base.dtype == torch.bfloat16
    assert torch.equal(base.generate(prompt, assistant_model=heads, do_sample=False, max_new_tokens=12), expected)


def test_heads_that_assist_another_model_are_refused_by_name():
    heads, other = heads_of(), llama()
    with pytest.raises(RuntimeError, match=r"attach\(backbone\)"):
        other.generate(torch.arange(70, 80)[None], assistant_model=heads, max_new_tokens=3)
