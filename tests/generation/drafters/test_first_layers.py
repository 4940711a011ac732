"""Assistants made of a backbone's own first layers: usable at once, tunable, kept in a directory."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from tests.backbones import backbone, code, code_prompts, learn
from tests.models import left_padded
from tokenahead import AssistantDrafter


def drafts(base, drafter):
    """Drafts of a ragged batch, whose greedy text is the backbone's own."""
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    batch = left_padded(code_prompts(6))
    out = base.generate(**batch, assistant_model=drafter, **options)
    assert torch.equal(out.sequences, base.generate(**batch, **options).sequences)
    return out.speculation.rows_drafts


@pytest.mark.by_day("gemma3")
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "qwen3", "gemma3"])
def test_greedy_text_is_the_same_before_and_after_saving(name, tmp_path):
    base = learn(backbone(name), code(), steps=30)
    drafter = AssistantDrafter.from_backbone(base, layers=1, num_tokens=3)
    assert drafter.is_attached and drafter.model.config.num_hidden_layers == 1
    seen = drafts(base, drafter)
    drafter.save_pretrained(tmp_path)
    drafter.detach()
    again = AssistantDrafter.from_pretrained(tmp_path, num_tokens=3).attach(base)
    assert drafts(base, again) == seen
    again.detach()


def test_tuning_leaves_the_backbone(tmp_path):
    base = learn(backbone("llama"), code(), steps=30)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    drafter = AssistantDrafter.from_backbone(base, layers=1)
    small = drafter.model
    assert not any(
        table.weight.requires_grad for table in (small.get_input_embeddings(), small.get_output_embeddings())
    )
    ids = base.generate(torch.randint(1, 48, (16, 2)), do_sample=True, top_k=0, max_new_tokens=20)
    data = [{"input_ids": row, "labels": row} for row in ids]
    options = TrainingArguments(tmp_path, max_steps=20, learning_rate=1e-2, report_to="none", use_cpu=True)
    untuned = small(ids, labels=ids).loss.item()
    Trainer(small, options, train_dataset=data).train()
    assert small.eval()(ids, labels=ids).loss.item() < untuned - 0.1
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())
    assert drafts(base, drafter)
