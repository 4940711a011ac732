"""Options of speculation on a GenerationConfig: read like any other field, saved, and never a tensor."""

import json

import pytest
import torch
from transformers import GenerationConfig

from tests.every_model import llama
from tests.families import family_model
from tests.ptp_models import student
from tokenahead import AssistantDrafter

PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6, 7]])
PLAIN = dict(max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
TREE = {"depth": 1, "top_k": 2, "total_tokens": 5}
PATHS = [(0,), (1,), (0, 0)]


def sizes(out):
    """How many tokens drafts have."""
    return {len(draft) for draft in out.speculation.drafts}


def modules():
    """A model that drafts trees for itself."""
    return family_model("llama", num_nextn_predict_layers=2).eval()


def saved(tmp_path, **fields):
    """A config that was saved and read again."""
    GenerationConfig(**fields).save_pretrained(tmp_path)
    return GenerationConfig.from_pretrained(tmp_path)


@pytest.mark.by_day("paths")
@pytest.mark.core_cases("dynamic")
@pytest.mark.parametrize("tree", [TREE, PATHS, {"choices": PATHS}], ids=["dynamic", "paths", "choices"])
def test_a_tree_of_a_saved_config_is_drafted(tree, tmp_path):
    config = saved(tmp_path, draft_tree=tree, **PLAIN)
    assert json.loads((tmp_path / "generation_config.json").read_text())["draft_tree"]
    model = modules()
    want, size = model.generate(PROMPT, **PLAIN, use_mtp=False).sequences, 4 if tree is TREE else 3
    assert sizes(model.generate(PROMPT, **PLAIN)) != {size}
    out = model.generate(PROMPT, generation_config=config)
    assert max(sizes(out)) == size and torch.equal(out.sequences, want)
    model.generation_config.draft_tree = config.draft_tree
    assert max(sizes(model.generate(PROMPT, **PLAIN))) == size
    # keyword arguments go before the config that is passed, and that one before the model's own
    config.draft_tree = [(0,), (1,)]
    assert max(sizes(model.generate(PROMPT, generation_config=config))) == 2
    assert max(sizes(model.generate(PROMPT, generation_config=config, draft_tree=[[0]]))) == 1


@pytest.mark.core
def test_seed_and_slots_of_a_saved_config_are_read(tmp_path):
    model = student()
    sampled = dict(do_sample=True, top_k=0, max_new_tokens=12)
    config = saved(tmp_path, seed=3, slot_budget="linear", **sampled)
    want = model.generate(PROMPT, seed=3, slot_budget="linear", **sampled)
    assert torch.equal(model.generate(PROMPT, generation_config=config), want)
    model.generation_config.seed = 3
    assert torch.equal(model.generate(PROMPT, slot_budget="linear", **sampled), want)
    other = model.generate(PROMPT, slot_budget="linear", seed=4, **sampled)
    assert torch.equal(model.generate(PROMPT, generation_config=config, seed=4), other)


def test_the_assistant_says_last_how_many_tokens_it_drafts():
    """transformers' documented place is the assistant's own generation config."""
    model, small = llama(), llama()
    small.generation_config.num_assistant_tokens = 3
    drafter = AssistantDrafter(small, num_tokens=6).attach(model)
    for assistant in (drafter, small):
        assert max(sizes(model.generate(PROMPT, assistant_model=assistant, **PLAIN))) == 3
    model.generation_config.num_assistant_tokens = 2
    assert max(sizes(model.generate(PROMPT, assistant_model=drafter, **PLAIN))) == 2
    assert max(sizes(model.generate(PROMPT, assistant_model=drafter, **PLAIN, num_assistant_tokens=4))) == 4
    model.generation_config.num_assistant_tokens = None
    config = GenerationConfig(**PLAIN, num_assistant_tokens=1)
    assert max(sizes(model.generate(PROMPT, assistant_model=drafter, generation_config=config))) == 1
    small.generation_config.assistant_confidence_threshold = 1.0  # no token is that sure
    assert max(sizes(model.generate(PROMPT, assistant_model=drafter, **PLAIN))) == 1
    out = model.generate(PROMPT, assistant_model=drafter, **PLAIN, assistant_confidence_threshold=0.0)
    assert max(sizes(out)) == 3
    small.generation_config.num_assistant_tokens = 0
    with pytest.raises(ValueError, match="num_assistant_tokens=0"):
        model.generate(PROMPT, assistant_model=drafter, **PLAIN)
