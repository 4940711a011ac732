"""Greedy text on 200 prompts for every trained head, chain and tree, on three backbones: `pytest -m slow`."""

import pytest

from tests.backbones import backbone, check_greedy, prompts, train_eagle, train_heads

HEADS = {
    "ff": dict(unembedding="own"),
    "btree": dict(head_type="btree", rank=3, unembedding="own"),
    "medusa": dict(head_type="medusa", unembedding=None),
    "hydra": dict(head_type="hydra", unembedding=None),
    "layer": dict(head_type="layer", unembedding=None),
}
EAGLES = {"eagle-1": 1, "eagle-3": 3}
DRAFTS = {
    "chain": dict(heads={}, eagle=dict(num_assistant_tokens=4)),
    "tree": dict(
        heads=dict(draft_tree=dict(top_k=3, total_tokens=12)),
        eagle=dict(draft_tree=dict(depth=3, top_k=2, total_tokens=12)),
    ),
}


@pytest.fixture(scope="module", params=["llama", "qwen3", "mistral"])
def model(request):
    return backbone(request.param)


@pytest.fixture(scope="module", params=[*HEADS, *EAGLES])
def drafter(request, model):
    name = request.param
    drafter = train_heads(model, steps=30, **HEADS[name]) if name in HEADS else train_eagle(model, EAGLES[name])
    yield drafter
    drafter.detach()


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAFTS)
def test_greedy_text_is_the_backbones_own_and_paths_of_every_length_are_kept(model, drafter, kind):
    is_eagle = drafter.config.model_type == "eagle_head"
    options = DRAFTS[kind]["eagle" if is_eagle else "heads"]
    lengths = check_greedy(model, drafter, prompts(200), new=20, **options)
    assert lengths == set(range((4 if is_eagle else 3) + 1))
