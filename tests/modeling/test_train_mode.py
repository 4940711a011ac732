"""`generate` of a model that was left in train mode with checkpointed activations: the text is what it always is."""

import pytest
import torch

from tests.every_model import NAMES, every_model, llama, moved_heads, prompt_for, same_texts, texts
from tests.models import checkpoint_activations
from tokenahead import AssistantDrafter, DrafterCascade, EagleHead, SuffixDrafter


def is_checkpointing(model: torch.nn.Module) -> bool:
    return any(vars(module).get("gradient_checkpointing") for module in model.modules())


def left_in_training(model: torch.nn.Module) -> torch.nn.Module:
    checkpoint_activations(model)
    return model.train()


@pytest.mark.by_day(most=4)
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


@pytest.mark.core
def test_attached_heads_on_a_backbone_in_train_mode():
    base = llama()
    expected = base.generate(prompt_for(base), max_new_tokens=9, do_sample=False)
    heads = moved_heads(left_in_training(base))
    text = base.generate(prompt_for(base), assistant_model=heads, max_new_tokens=9, do_sample=False)
    assert torch.equal(text, expected) and is_checkpointing(base)


LEFT = {
    "assistant": lambda base: AssistantDrafter(first_layers(base)).attach(base),
    "layer": lambda base: moved_heads(base, head_type="layer"),
    "eagle": lambda base: EagleHead.from_backbone(base, version=1),
    "cascade": lambda base: DrafterCascade([SuffixDrafter(), AssistantDrafter(first_layers(base))]).attach(base),
}


def first_layers(base):
    small = AssistantDrafter.from_backbone(base, 1).detach().model
    small.get_input_embeddings().weight.requires_grad_(True)
    return small


@pytest.mark.parametrize("name", LEFT)
def test_a_drafter_that_a_trainer_has_left_drafts_as_before(name):
    base, common = llama(), dict(max_new_tokens=20, do_sample=False)
    ids = prompt_for(base)
    expected, drafter = base.generate(ids, **common), LEFT[name](base)
    [network] = drafter.parts().values()

    def drafts():
        out = base.generate(ids, **common, assistant_model=drafter, return_dict_in_generate=True)
        assert out.sequences.equal(expected)
        return out.speculation.rows_drafts

    before = drafts()
    left_in_training(network)
    assert drafts() == before or name == "cascade"  # which learns
    assert network.training and is_checkpointing(network) == (name != "eagle")
