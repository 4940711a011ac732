"""`generate` of a model that was left in train mode with checkpointed activations: the text is what it always is."""

import pytest
import torch

from tests.every_model import NAMES, every_model, llama, moved_heads, prompt_for, same_texts, texts
from tests.models import checkpoint_activations


def is_checkpointing(model: torch.nn.Module) -> bool:
    return any(vars(module).get("gradient_checkpointing") for module in model.modules())


def left_in_training(model: torch.nn.Module) -> torch.nn.Module:
    checkpoint_activations(model)
    return model.train()


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_checkpointed_activations_do_not_change_the_text(name, speculate):
    model = every_model(name)
    expected = texts(model, use_mtp=speculate)
    assert same_texts(left_in_training(model), expected, use_mtp=speculate)
    assert is_checkpointing(model) and model.training


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_without_gradients_is_kept(name):
    model = left_in_training(every_model(name))
    ids = prompt_for(model)
    with torch.no_grad():
        whole = model(ids).logits[:, -1]
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        behind = model(ids[:, -1:], past_key_values=cache, attention_mask=torch.ones_like(ids)).logits[:, -1]
    torch.testing.assert_close(behind, whole, atol=1e-5, rtol=1e-4)


def test_attached_heads_on_a_backbone_in_train_mode():
    base = llama()
    expected = base.generate(prompt_for(base), max_new_tokens=9, do_sample=False)
    heads = moved_heads(left_in_training(base))
    text = base.generate(prompt_for(base), assistant_model=heads, max_new_tokens=9, do_sample=False)
    assert torch.equal(text, expected) and is_checkpointing(base)
