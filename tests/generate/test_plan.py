"""`read_call` and `plan_of`: what a call decides about drafts, and that nothing of it outlives the call."""

import gc
import weakref

import pytest
import torch

from tests.every_model import llama, moved_heads
from tokenahead.generation import generate as generate_module

IDS = torch.tensor([[5, 6, 7, 5, 6]])


@pytest.fixture
def plans(monkeypatch):
    """The calls that follow and their plans, weakly: whether they draft, and a reference to each."""
    made, read, of = [], generate_module.read_call, generate_module.plan_of

    def noted(*args):
        call = read(*args)
        made.append((call.options.speculates, weakref.ref(call)))
        return call

    def planned(*args):
        plan = of(*args)
        made.append((True, weakref.ref(plan)))
        return plan

    monkeypatch.setattr(generate_module, "read_call", noted)
    monkeypatch.setattr(generate_module, "plan_of", planned)
    return made


@pytest.mark.parametrize(
    ("options", "speculates"),
    [({}, True), ({"use_mtp": False}, False), ({"num_beams": 2}, False), ({"draft_tree": "auto"}, True)],
    ids=["plain", "switched off", "beams", "trials"],
)
def test_plan_decision_and_end(plans, options, speculates):
    drafter = moved_heads(model := llama())
    gc.collect()
    gc.disable()
    try:
        model.generate(IDS, assistant_model=drafter, max_new_tokens=4, pad_token_id=0, **options)
        assert [drafts for drafts, _ in plans] and plans[0][0] is speculates
        assert all(plan() is None for _, plan in plans)  # with its cache, before any collection
    finally:
        gc.enable()
