"""Chain drafters in transformers' own assisted loop (batch 1), through `CandidateAdapter`."""

import pytest
import torch

from tests.assisted import assisted_generate
from tests.backbones import backbone, blurred, code_prompts, coder, plain_continuations, train_heads
from tests.distributions import continuation_distribution, continuation_p_value
from tokenahead import AssistantDrafter, MTPHeads, NgramDrafter

MAKE = {
    "heads": lambda model: MTPHeads.from_backbone(model, window=4, leaf="full").eval(),
    "ngram": lambda model: NgramDrafter(num_tokens=3).attach(model),
    "assistant": lambda model: AssistantDrafter(blurred(model, 0.3), num_tokens=3).attach(model),
}


def generate(model, prompt, drafter, **options):
    """transformers' own `generate`, past our patch."""
    return assisted_generate(model, prompt, drafter, attention_mask=torch.ones_like(prompt), **options)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("kind", MAKE)
def test_greedy_output_is_the_backbones_own(name, kind):
    model = coder(name)
    drafter = train_heads(model, steps=30) if kind == "heads" else MAKE[kind](model)
    batch = code_prompts(10)
    calls = []
    counter = model.register_forward_hook(lambda *args: calls.append(1))
    expected = plain_continuations(model, batch, 30)
    calls.clear()
    for prompt, text in zip(batch, expected):
        out = generate(model, prompt[None], drafter, max_new_tokens=30, do_sample=False)
        assert out[0, len(prompt) :].tolist() == text.tolist()
    counter.remove()
    drafter.detach()
    assert len(calls) < 0.8 * 10 * 30, "drafts must be accepted, or the test shows nothing"


@pytest.mark.parametrize("kind", MAKE)
def test_sampled_distribution(kind):
    model, prompt = backbone(vocabulary=5, seed=2), torch.tensor([[1, 3, 2, 4, 3]])
    options = dict(temperature=0.8, top_k=4, repetition_penalty=1.2)
    drafter = MAKE[kind](model)
    draws = [generate(model, prompt, drafter, do_sample=True, max_new_tokens=4, **options) for _ in range(500)]
    distribution = continuation_distribution(model, prompt, 2, **options)
    assert continuation_p_value(torch.cat(draws)[:, 5:7], distribution) > 0.001
