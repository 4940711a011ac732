"""Heads apart from their backbone under the trainers: tokenizers, checkpointing, float32 on bfloat16, evaluation."""

import pytest
import torch
from transformers import TrainingArguments

from tests.training.conftest import ragged_rows, trainer_for
from tests.training.test_evaluation_loss import llama
from tokenahead import EvaByteTokenizer, MTPHeads
from tokenahead.training import MTPTrainer


def heads_of(base=None, **options):
    torch.manual_seed(0)
    return MTPHeads.from_backbone(llama() if base is None else base, window=3, **{"unembedding": "own"} | options)


def test_a_tokenizer_may_align_the_special_tokens(tmp_path):
    heads = heads_of()
    arguments = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to="none", save_strategy="no")
    trainer = MTPTrainer(heads, arguments, train_dataset=ragged_rows(), processing_class=EvaByteTokenizer())
    trainer.train()
    assert trainer.state.global_step == 2 and "use_cache" not in heads.config.to_dict()
    assert heads.backbone.generation_config.pad_token_id == EvaByteTokenizer().pad_token_id


@pytest.mark.by_day("{'head_type': 'btree', 'rank': 2}")
@pytest.mark.parametrize("options", [{}, {"head_type": "btree", "rank": 2}, {"unembedding": "shared"}], ids=str)
def test_float32_heads_on_a_bfloat16_backbone_learn_and_draft(options, tmp_path):
    base = llama().bfloat16()
    base.generation_config.eos_token_id = None
    prompt = torch.arange(70, 80)[None]
    expected = base.generate(prompt, do_sample=False, max_new_tokens=12)
    heads = heads_of(base, **options).float()
    trainer = trainer_for(heads, tmp_path, ragged_rows(), learning_rate=1e-2, max_steps=6)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert {parameter.dtype for parameter in heads.parameters()} == {torch.float32} and base.dtype == torch.bfloat16
    assert torch.equal(base.generate(prompt, assistant_model=heads, do_sample=False, max_new_tokens=12), expected)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_heads_learn_the_same_with_checkpoints(is_reentrant, tmp_path):
    weights, kwargs = [], {"gradient_checkpointing_kwargs": {"use_reentrant": is_reentrant}}
    for chosen in ({"gradient_checkpointing": True, **kwargs}, {}):
        heads = heads_of(**({"head_type": "layer", "unembedding": None} if is_reentrant else {}))
        trainer_for(heads, tmp_path, ragged_rows(), max_steps=1, optim="sgd", learning_rate=1.0, **chosen).train()
        weights.append([each.detach() for each in heads.parameters() if each.requires_grad])
    assert weights[0] and all(map(torch.equal, *weights))
