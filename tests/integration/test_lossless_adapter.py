"""Chain drafters in transformers' own assisted loop (batch 1), through `CandidateAdapter`."""

import pytest
import torch

from tests.assisted import assisted_generate
from tests.backbones import backbone, blurred
from tokenahead import AssistantDrafter, MTPHeads, NgramDrafter
from tokenahead.testing import continuation_distribution, continuation_p_value

MAKE = {
    "heads": lambda model: MTPHeads.from_backbone(model, window=4, unembedding="own").eval(),
    "ngram": lambda model: NgramDrafter(num_tokens=3).attach(model),
    "assistant": lambda model: AssistantDrafter(blurred(model, 0.3), num_tokens=3).attach(model),
}


def generate(model, prompt, drafter, **options):
    """transformers' own `generate`, past our patch."""
    return assisted_generate(model, prompt, drafter, attention_mask=torch.ones_like(prompt), **options)


@pytest.mark.by_day("heads")
@pytest.mark.parametrize("kind", MAKE)
def test_sampled_distribution(kind):
    model, prompt = backbone(vocabulary=5, seed=2), torch.tensor([[1, 3, 2, 4, 3]])
    options = dict(temperature=0.8, top_k=4, repetition_penalty=1.2)
    drafter = MAKE[kind](model)
    draws = [generate(model, prompt, drafter, do_sample=True, max_new_tokens=4, **options) for _ in range(250)]
    distribution = continuation_distribution(model, prompt, 2, **options)
    assert continuation_p_value(torch.cat(draws)[:, 5:7], distribution) > 0.001
