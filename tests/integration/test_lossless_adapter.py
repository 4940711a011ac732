"""Chain drafters in transformers' own assisted loop (batch 1), through `CandidateAdapter`."""

import pytest
import torch

from tests.assisted import assisted_generate
from tests.backbones import backbone, blurred
from tokenahead import AssistantDrafter, EagleHead, MTPHeads, NgramDrafter
from tokenahead.modeling.eagle.session import EagleSession
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


def test_a_session_is_told_what_our_own_loop_tells_it(monkeypatch):
    model, prompt = backbone(vocabulary=5, seed=2), torch.tensor([[1, 3, 2, 4, 3]])
    drafter, told = EagleHead.from_backbone(model, version=1).eval(), []
    own = EagleSession.advance

    def advance(session, outputs, result):
        told.append(result.tokens[0, : int(result.num_accepted[0]) + 1])
        own(session, outputs, result)

    monkeypatch.setattr(EagleSession, "advance", advance)
    options = dict(max_new_tokens=60, do_sample=False, num_assistant_tokens=3, repetition_penalty=1.3)
    text = generate(model, prompt, drafter, **options)
    assert len({len(tokens) for tokens in told}) > 1  # some drafts are accepted, and some are not
    read = torch.cat(told)
    assert read.equal(text[0, 6 : 6 + len(read)]) and len(read) > 50
    assert model.generate(prompt, assistant_model=drafter, **options).equal(text)
