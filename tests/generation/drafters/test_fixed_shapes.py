"""Drafts in fixed shapes: on a static cache they are what they are on one that grows."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from tests.backbones import backbone, prompts, train_eagle
from tests.models import left_padded
from tokenahead import DeepSeekMTP, DrafterCascade, EagleHead, MTPHeads, NgramDrafter, SuffixDrafter

STATIC = dict(cache_implementation="static", disable_compile=True)
TREES = {
    "chain": {},
    "ranked": {"draft_tree": [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]},
    "grown": {"draft_tree": {"depth": 2, "top_k": 2, "total_tokens": 6}},
}


@cache
def model_of(name: str = "llama") -> PreTrainedModel:
    """A random model."""
    return backbone(name)


@cache
def trained_eagle(version: int) -> EagleHead:
    """A head of that model that has learned some of its text."""
    return train_eagle(model_of(), version, steps=25)


@cache
def parallel_eagle() -> EagleHead:
    """A head that drafts a chain in one call."""
    torch.manual_seed(0)
    options = dict(version=3, aux_layers=[0, 1, 2], mask_token_id=7)
    return EagleHead.from_backbone(model_of(), **options)


@cache
def heads(kind: str, **options) -> MTPHeads:
    """Heads that attend."""
    torch.manual_seed(0)
    return MTPHeads.from_backbone(model_of(), head_type=kind, window=4, **options)


DRAFTERS: dict[str, tuple[Callable[[], object], dict[str, object]]] = {
    **{f"EAGLE-{v} {name}": (lambda v=v: trained_eagle(v), tree) for v in (1, 3) for name, tree in TREES.items()},
    "modules": (lambda: modules(2), {"num_assistant_tokens": 4}),
    "modules, unused": (lambda: modules(2), {"num_assistant_tokens": 1}),
    "modules, grown": (lambda: modules(2), TREES["grown"]),
    "P-EAGLE": (parallel_eagle, {}),
    "layers": (lambda: heads("layer"), {}),
    "layers, ranked": (lambda: heads("layer"), TREES["ranked"]),
    "Hydra++": (lambda: heads("hydra", arch="prefix-mlp"), {}),
}


LOOK_UPS: dict[str, tuple[Callable[[], object], dict[str, object]]] = {
    "n-grams": (lambda: NgramDrafter(longest=2, num_tokens=6).attach(model_of()), {}),
    "n-grams, branches": (lambda: NgramDrafter(longest=2, num_tokens=4, branches=2).attach(model_of()), {}),
    "n-grams, adaptive": (
        lambda: NgramDrafter(longest=1, num_tokens=3).attach(model_of()),
        {"num_assistant_tokens": 5},
    ),
    "suffixes": (lambda: SuffixDrafter(num_tokens=5).attach(model_of()), {}),
    "suffixes, branches": (lambda: SuffixDrafter().attach(model_of()), {"draft_tree": {"top_k": 2, "total_tokens": 8}}),
    "suffixes and EAGLE": (lambda: DrafterCascade([SuffixDrafter(), trained_eagle(1)]).attach(model_of()), {}),
}
"""Drafters whose blocks are wider where shapes are fixed, so that a seed gives another text."""


@cache
def modules(count: int) -> DeepSeekMTP:
    """A model that drafts for itself."""
    torch.manual_seed(0)
    return DeepSeekMTP.from_backbone(backbone(), count).eval()


def decoded(drafter, batch, **options):
    """The text and its statistics."""
    torch.manual_seed(0)
    model, own = (drafter, {}) if isinstance(drafter, DeepSeekMTP) else (model_of(), {"assistant_model": drafter})
    out = model.generate(**batch, **own, use_mtp=True, return_dict_in_generate=True, pad_token_id=0, **options)
    return out.sequences.tolist(), out.speculation.rows_accepted, out.speculation.rows_drafts


@pytest.mark.parametrize("name", LOOK_UPS)
def test_look_ups_on_a_static_cache_are_those_on_a_cache_that_grows(name):
    make, options = LOOK_UPS[name]
    for rows in (1, 3, 8):
        batch, accepted = left_padded(prompts(rows)), []
        for more in ({}, STATIC):
            drafter = make()
            found = [decoded(drafter, batch, max_new_tokens=40, do_sample=False, **options, **more) for _ in range(2)]
            accepted.append(found)
        assert accepted[0] == accepted[1] and sum(map(sum, accepted[0][0][1]))


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "top_k": 8}], ids=["greedy", "sampled"])
def test_drafts_on_a_static_cache_are_those_on_a_cache_that_grows(name, sampling):
    make, options = DRAFTERS[name]
    drafter = make()
    for rows in (1, 3, 8):
        batch = left_padded(prompts(rows))
        options = options | sampling | {"max_new_tokens": 24}
        assert decoded(drafter, batch, **options, **STATIC) == decoded(drafter, batch, **options)
