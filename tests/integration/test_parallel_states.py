"""What slots are told while decoding: the wish for the most likely token, and the last verified state."""

import pytest
import torch

from tests.ptp_models import backbone, ids, student


def calls(model, prompt, **options):
    """Texts, and what the slots of every call read: uniforms, states, gaps, and the tokens that stood before."""
    seen = []

    def note(module, inputs):
        seen.append(inputs)

    hook = model.uniform_embedding.register_forward_pre_hook(note)
    out = model.generate(prompt, max_new_tokens=14, **options)
    hook.remove()
    return out, seen


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


@pytest.mark.parametrize("best_of", [1, 2])
@pytest.mark.parametrize("variant", ["one_hot", "categorical"])
def test_slots_read_the_state_before_the_token_that_was_verified_last(variant, best_of):
    model, prompt = student(variant, backbone().double(), reads_state=True), ids(2, 5)
    how = {"do_sample": True, "verification": "coupled", "seed": 3, "best_of": best_of}
    out, seen = calls(model, prompt, **how)
    with torch.no_grad():
        states = model.backbone.model(out).last_hidden_state
    assert len(seen) > 1
    last = torch.full((2,), 4)
    for uniforms, read, gaps in seen:
        assert gaps.min() >= 1 and len(gaps) == uniforms.shape[1]
        for row in range(2):  # every call stands behind the one before
            close = (states[row] - read[row, 0]).abs().amax(-1) < 1e-9
            place = close[int(last[row]) :].nonzero()
            if len(place):
                last[row] += int(place[0])
            else:  # a row that has ended rides along, and what it reads stands behind its text
                assert int(last[row]) >= out.shape[1] - 2 - model.config.num_slots, "the state of no later token"
    assert (last > 4).all()
    if best_of == 1:
        assert torch.equal(out, model.generate(prompt, max_new_tokens=14, use_mtp=False, **how | {"best_of": 1}))
