"""Drafts in fixed shapes: on a static cache they are what they are on one that grows."""

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from tests.backbones import backbone, prompts, train_eagle
from tests.fake_graphs import BlindGraph, FakeGraph
from tests.modeling.heads.backbones import shaken
from tests.models import left_padded
from tests.ptp_models import VOCABULARY, student
from tokenahead import (
    DeepSeekMTP,
    DrafterCascade,
    EagleHead,
    LookaheadDrafter,
    MTPHeads,
    NgramDrafter,
    PTPForCausalLM,
    RecyclingDrafter,
    SuffixDrafter,
)
from tokenahead.generation import graphs as graphs_module
from tokenahead.testing import chi_square

CONTEXT = dict(unembedding="own", context=2, context_rank=8)
WITHIN = (DeepSeekMTP, PTPForCausalLM)
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
    """Heads that attend, or whose leaves read tokens."""
    torch.manual_seed(0)
    made = MTPHeads.from_backbone(model_of(), head_type=kind, window=4, **options)
    return shaken(made, 0.3) if made.config.context else made


DRAFTERS: dict[str, tuple[Callable[[], object], dict[str, object]]] = {
    **{f"EAGLE-{v} {name}": (lambda v=v: trained_eagle(v), tree) for v in (1, 3) for name, tree in TREES.items()},
    "modules": (lambda: modules(2), {"num_assistant_tokens": 4}),
    "modules, unused": (lambda: modules(2), {"num_assistant_tokens": 1}),
    "modules, grown": (lambda: modules(2), TREES["grown"]),
    "P-EAGLE": (parallel_eagle, {}),
    "layers": (lambda: heads("layer"), {}),
    "layers, ranked": (lambda: heads("layer"), TREES["ranked"]),
    "Hydra++": (lambda: heads("hydra", arch="prefix-mlp"), {}),
    "context": (lambda: heads("ff", **CONTEXT), {}),
    "context, grown": (lambda: heads("hmm", rank=2, transition_context=True, **CONTEXT), TREES["grown"]),
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
    "recycled": (lambda: RecyclingDrafter(top_k=3, num_tokens=4, total_tokens=12).attach(model_of()), {}),
    "recycled, chain": (lambda: RecyclingDrafter().attach(model_of()), {"draft_tree": {"depth": 3, "top_k": 1}}),
    "lookahead": (lambda: LookaheadDrafter(3, 3, 2).attach(model_of()), {}),
    "suffixes and EAGLE": (lambda: DrafterCascade([SuffixDrafter(), trained_eagle(1)]).attach(model_of()), {}),
}
"""Drafters whose blocks are wider where shapes are fixed, so that a seed gives another text."""


@cache
def slots(variant: str = "one_hot") -> PTPForCausalLM:
    """A model that drafts in slots."""
    model = student(variant=variant)
    model.generation_config.eos_token_id = None
    return model


@cache
def modules(count: int) -> DeepSeekMTP:
    """A model that drafts for itself."""
    torch.manual_seed(0)
    return DeepSeekMTP.from_backbone(backbone(), count).eval()


RECORDED = (
    DRAFTERS | {name: LOOK_UPS[name] for name in LOOK_UPS if "suffixes" not in name} | {"slots": (lambda: slots(), {})}
)
SAMPLING = [{"do_sample": False}, {"do_sample": True, "top_k": 8}]


def decoded(drafter, batch, **options):
    """The text, its statistics, and what was replayed."""
    torch.manual_seed(0)
    model, own = (drafter, {}) if isinstance(drafter, WITHIN) else (model_of(), {"assistant_model": drafter})
    out = model.generate(**batch, **own, use_mtp=True, return_dict_in_generate=True, pad_token_id=0, **options)
    found = out.sequences.tolist(), out.speculation.rows_accepted, out.speculation.rows_drafts
    if (graphs := out.speculation.graphs) is not None:
        graphs.launched = out.speculation.backbone_calls - 1 - graphs.replayed.get("cycle", 0)
    return found, graphs


@pytest.fixture(params=[FakeGraph, BlindGraph])
def fake(monkeypatch, request):
    """Cycles are recorded, and replayed by a fake that compares, or by one that only repeats calls."""
    monkeypatch.setitem(graphs_module.GRAPHS, "cpu", request.param)


@pytest.mark.by_day("suffixes and EAGLE", "recycled")
@pytest.mark.parametrize("name", LOOK_UPS)
def test_look_ups_on_a_static_cache_are_those_on_a_cache_that_grows(name):
    make, options = LOOK_UPS[name]
    options = options | {"max_new_tokens": 30, "do_sample": False}
    for rows in (1, 3, 8):
        batch, found = left_padded(prompts(rows)), list[object]()
        for more in ({}, STATIC):
            drafter = make()  # others than n-grams remember the first call
            found.append([decoded(drafter, batch, **options, **more)[0] for _ in range(2)])
        assert found[0] == found[1] and sum(map(sum, found[0][1][1]))


@pytest.mark.by_day(
    "greedy-EAGLE-3 grown", "sampled-EAGLE-1 chain", "greedy-modules", "sampled-layers, ranked", "greedy-Hydra++"
)
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "sampled"])
def test_drafts_on_a_static_cache_are_those_on_a_cache_that_grows(name, sampling):
    make, options = DRAFTERS[name]
    drafter = make()
    for rows in (1, 3, 8):
        batch, call = left_padded(prompts(rows)), options | sampling | {"max_new_tokens": 20}
        fixed, eager = (decoded(drafter, batch, **call, **more)[0] for more in (STATIC, {}))
        if name == "modules, grown" and rows == 1:  # eager ones draft no tree after a prompt of one token
            assert fixed[0] == eager[0] or sampling["do_sample"]
        else:
            assert fixed == eager


@pytest.mark.by_day("sampled-EAGLE-3 ranked", "greedy-P-EAGLE", "sampled-context", "greedy-lookahead", "sampled-slots")
@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "sampled"])
def test_cycles_repeat_themselves_and_a_second_call_records_nothing(name, sampling, monkeypatch):
    monkeypatch.setitem(graphs_module.GRAPHS, "cpu", FakeGraph if sampling["do_sample"] else BlindGraph)
    make, options = RECORDED[name]
    drafter, call = make(), options | sampling | {"max_new_tokens": 16}
    for rows in (1, 3):
        for seed in (5, 6):
            batch = left_padded(prompts(rows, VOCABULARY, seed=seed))
            (text, _, _), graphs = decoded(drafter, batch, **call, **STATIC)
            assert graphs.replayed["cycle"] > 2 and not graphs.reasons
            if not sampling["do_sample"]:
                assert text == decoded(drafter, batch, **call)[0][0]
        assert not graphs.recorded and not graphs.buffers_made
        assert graphs.launched == (name == "slots")  # the first cycle is a replay of others, too


ON_DEVICE = dict(
    temperature=0.8, top_k=30, top_p=0.95, min_p=0.01, typical_p=0.95, eta_cutoff=0.01, repetition_penalty=1.2
)  # fmt: skip
ASKED = {"greedy": {"do_sample": False, "repetition_penalty": 1.2}, "sampled": {"do_sample": True} | ON_DEVICE}


@pytest.mark.by_day("greedy-EAGLE-3 grown", "sampled-n-grams, branches")
@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("asked", ASKED)
def test_ends_and_processors_are_on_the_device(name, asked, monkeypatch):
    monkeypatch.setitem(graphs_module.GRAPHS, "cpu", BlindGraph if asked == "greedy" else FakeGraph)
    make, options = RECORDED[name]
    drafter, batch = make(), left_padded(prompts(8, VOCABULARY))
    call = options | ASKED[asked] | {"max_new_tokens": 20}
    ends = decoded(drafter, batch, **call)[0][0][0][-5]  # some sequences end there, others at their length
    fixed, graphs = decoded(drafter, batch, **call, eos_token_id=ends, **STATIC)
    assert graphs.replayed["cycle"] and not graphs.reasons
    if asked == "greedy":
        eager, _ = decoded(drafter, batch, **call, eos_token_id=ends)
        is_chain = "draft_tree" not in options and name not in ("slots", "n-grams, branches", "recycled", "lookahead")
        assert fixed[0] == eager[0] and (fixed == eager or not is_chain)  # near the limit, other trees are smaller


@pytest.mark.by_day("n-grams, branches", "slots")
@pytest.mark.parametrize(
    "name", ["n-grams", "n-grams, branches", "suffixes", "recycled", "lookahead", "EAGLE-1 chain", "slots"]
)
def test_sampled_texts_of_recorded_cycles_have_the_distribution_of_the_model(name, monkeypatch):
    monkeypatch.setitem(graphs_module.GRAPHS, "cpu", BlindGraph)
    make, options = (RECORDED | LOOK_UPS)[name]
    drafter, rows, new, prompt = make(), 1024, 10, torch.tensor([[5, 6, 7, 5, 6]])
    model = drafter if isinstance(drafter, WITHIN) else model_of()
    call = options | dict(max_new_tokens=new, do_sample=True, top_k=4, temperature=2.0)
    texts, graphs = decoded(drafter, {"input_ids": prompt.expand(rows, -1)}, **call, **STATIC)
    drawn = torch.tensor(texts[0])  # [N, L + new]
    assert graphs.replayed["cycle"]
    with torch.no_grad():
        logits = model(drawn, use_cache=False).logits[:, -3:-1].double() / 2  # of the last two tokens
    top = logits.topk(4)  # [N, 2, 4]
    uniform = torch.rand(rows, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    chances = top.values.softmax(-1)  # [N, 2, 4]
    is_drawn = top.indices == drawn[:, -2:, None]
    below = (chances.cumsum(-1) - chances)[is_drawn].view(rows, 2)
    ranks = below + uniform * chances[is_drawn].view(rows, 2)  # uniform where each token is drawn from its distribution
    cells = (ranks * 8).long().clamp(max=7)
    assert is_drawn.any(-1).all() and chi_square(cells.flatten(), torch.full((8,), 1 / 8)) > 1e-4


@pytest.mark.by_day("BlindGraph-categorical-options1")
@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "verification": "coupled", "seed": 3}])
@pytest.mark.parametrize("variant", ["one_hot", "categorical", "mask"])
def test_slots_in_fixed_shapes_write_the_same_text(variant, options, fake):
    drafter = slots(variant)
    for rows in (1, 3):
        batch = left_padded(prompts(rows, VOCABULARY))
        (text, _, _), graphs = decoded(drafter, batch, max_new_tokens=20, **options, **STATIC)
        assert text == decoded(drafter, batch, max_new_tokens=20, **options)[0][0] and graphs.replayed["cycle"] > 2


def test_numbers_of_a_drafter_that_are_none_leave_the_text_alone():
    for name in ["EAGLE-1 chain", "layers", "modules", "slots"]:
        make, options = RECORDED[name]
        drafter, batch = copy.deepcopy(make()), left_padded(prompts(3, VOCABULARY))
        if not isinstance(drafter, WITHIN):
            drafter.attach(model_of())
        call = options | {"max_new_tokens": 12, "do_sample": False}
        text = decoded(drafter, batch, **call)[0][0]
        words = "mtp.", "lora_", "uniform_embedding"
        for part, parameter in drafter.named_parameters():
            if not isinstance(drafter, WITHIN) or any(word in part for word in words):
                parameter.data.fill_(float("nan"))
        for _ in range(2):  # nothing of the first call is left in the buffers
            assert decoded(drafter, batch, **call, **STATIC)[0][0] == text


@pytest.mark.by_day("FakeGraph")
def test_a_recording_drafts_from_tables_that_have_learned(fake):
    drafter, batch, call = heads("ff", **CONTEXT), left_padded(prompts(2)), {"max_new_tokens": 16, "do_sample": False}
    for _ in range(2):
        recorded = decoded(drafter, batch, **call, **STATIC)
        assert recorded[0] == decoded(drafter, batch, **call)[0] and recorded[1].replayed["cycle"] > 2
        with torch.no_grad():
            drafter.head.context.weight.normal_()
