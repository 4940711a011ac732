"""Sampled output follows the target's distribution after all processors: chi-square on a real model with a small
vocabulary."""

import pytest
import torch

from tests.every_model import llama
from tests.models import tiny_model
from tokenahead import MTPHeads
from tokenahead.testing import continuation_distribution
from tokenahead.testing import continuation_p_value as p_value

VOCAB, LENGTH, DRAWS = 5, 3, 6_000
PROMPT = torch.tensor([[1, 3, 2, 4, 3]])


def model(**changes):
    sizes = dict(vocab_size=VOCAB, num_pred_heads=4, window_size=8) | changes
    return tiny_model(3, pad_token_id=None, initializer_range=0.3, **sizes)


def target_probs(target, **options):
    return continuation_distribution(target, PROMPT, LENGTH, **options)


def test_a_wrong_distribution_is_found():
    target = model()
    out = target.generate(PROMPT, do_sample=True, top_k=0, max_new_tokens=LENGTH, num_return_sequences=DRAWS)
    assert p_value(out[:, PROMPT.shape[1] :], target_probs(target, top_k=0, temperature=0.9)) < 1e-6


def _shaken(drafter, seed=6):
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.draft_layers.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return drafter


@pytest.mark.by_day("heads-token")
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("owner", ["evabyte", "heads"])
def test_sampled_distribution_of_draft_lora(owner, rule):
    """The drafter reads other states than the verifier; EvaByte's windows of 8 are crossed while it drafts."""
    options = {"temperature": 0.8, "top_k": 4}
    if owner == "evabyte":
        target, extra = model(), {}
        _shaken(target.add_draft_layers(2))
    else:
        target = llama(vocab_size=VOCAB, initializer_range=0.3)
        extra = {"assistant_model": _shaken(MTPHeads.from_backbone(target, window=4, draft_layers=1))}
    out = target.generate(
        PROMPT, do_sample=True, max_new_tokens=LENGTH + 2, num_return_sequences=DRAWS // 2, verification=rule,
        return_dict_in_generate=True, **options, **extra,
    )  # fmt: skip
    assert {count for row in out.speculation.accepted for count in row} >= {0, 1, 2}
    samples = out.sequences[:, PROMPT.shape[1] : PROMPT.shape[1] + LENGTH]
    assert p_value(samples, continuation_distribution(target, PROMPT, LENGTH, **options)) > 0.001
