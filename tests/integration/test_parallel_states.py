"""What slots are told while decoding: the wish for the most likely token."""

import pytest
import torch

from tests.ptp_models import backbone, ids, student


def calls(model, prompt, **options):
    """Texts, and what the slots of every call read: their uniforms."""
    seen = []

    def note(module, inputs):
        seen.append(inputs)

    hook = model.uniform_embedding.register_forward_pre_hook(note)
    out = model.generate(prompt, max_new_tokens=14, **options)
    hook.remove()
    return out, seen


@pytest.mark.by_day("categorical")
@pytest.mark.parametrize("variant", ["one_hot", "categorical"])
def test_greedy_drafts_are_asked_for_the_most_likely_tokens(variant):
    prompt = ids(2, 5)
    for greedy, asked in ((True, -1.0), (False, 0.5)):
        model = student(variant, backbone().double(), greedy=greedy)
        out, seen = calls(model, prompt, do_sample=False)
        assert seen and all((inputs[0] == asked).all() for inputs in seen)
        assert torch.equal(out, model.generate(prompt, max_new_tokens=14, do_sample=False, use_mtp=False))
    _, seen = calls(student(variant, backbone().double(), greedy=True), prompt, do_sample=True, seed=1)
    assert all((inputs[0] >= 0).all() for inputs in seen)
