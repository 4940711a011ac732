"""Parallel prediction in the loop: masks, a smaller model for a larger one, adaptive lengths, what slots are told."""

import copy

import pytest
import torch

from tests.models import left_padded
from tests.ptp_models import VOCABULARY, backbone, ids, student
from tokenahead.experimental import best_of
from tokenahead.generation.tensors.sampling import pick

BUDGETS = ["quadratic", "linear", 2, None]
_COUPLED = {"do_sample": True, "verification": "coupled"}


def write(model, lengths=(5, 1, 9, 2), **options):
    batch = left_padded([ids(n, seed=n) for n in lengths])
    how = {"max_new_tokens": 14, "pad_token_id": 0} | options
    return model.generate(**batch, **how)


def told(model, lengths=(5, 1, 9, 2), **options):
    options = {"max_new_tokens": 18, "return_dict_in_generate": True} | options
    return write(model, lengths, **{name: value for name, value in options.items() if value is not None})


def masked(**options):
    """A model of three masks in float64."""
    return student("mask", backbone(seed=2).double(), **options).eval()


@pytest.mark.by_day("linear-mlp", "2-none")
@pytest.mark.parametrize("sampler", ["mlp", "none"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_greedy_text_is_plain_greedy_text(budget, sampler):
    model = masked(sampler=sampler)
    want = told(model, use_mtp=False).sequences
    out = told(model, slot_budget=budget)
    assert torch.equal(out.sequences, want)
    assert {0, 1} <= set().union(*out.speculation.rows_accepted)
    for row, length in enumerate((5, 1, 9, 2)):
        alone = told(model, (length,), slot_budget=budget)
        assert torch.equal(alone.sequences[0, length:], want[row, 9:])
    assert torch.equal(told(model, slot_budget=budget, num_assistant_tokens_schedule="adaptive").sequences, want)


def drafts(model, **options):
    """Cycles of one row: tokens drafted, and how many of them were accepted."""
    how = {"do_sample": True, "temperature": 3.0, "top_k": 3, "verification": "coupled", "seed": 1}
    said = told(model, (5,), max_new_tokens=60, **how, **options).speculation
    return [(len(draft), count) for draft, count in zip(said.rows_drafts[0], said.rows_accepted[0])]


def test_quadratic_decoding_always_has_a_whole_draft():
    cycles = drafts(masked(), slot_budget="quadratic")
    assert cycles[0] == (0, 0) and {count for _, count in cycles} >= {0, 1, 2}
    assert {drafted for drafted, _ in cycles[1:-4]} == {3}


def test_linear_decoding_takes_a_plain_step_after_a_rejection():
    for size in (1, 3):
        cycles = drafts(masked(num_slots=size), slot_budget="linear")[:-4]  # the last ones are cut to the text's end
        for (drafted, accepted), (following, _) in zip(cycles, cycles[1:]):
            assert following == (size if accepted == drafted else 0)
        assert set(cycles) >= {(0, 0), (size, 0), (size, 1)}


@pytest.mark.parametrize("variant", ["one_hot", "categorical"])
@torch.no_grad()
def test_drafts_are_read_off_the_slots_behind_the_text(variant):
    """Of every number of accepted drafts, by a forward of its own that reads the same uniforms."""
    model, prompts = student(variant, backbone(seed=2).double()).eval(), ids(6, 4)
    uniforms, how = torch.rand(6, 40, generator=torch.Generator().manual_seed(4)), {"return_dict_in_generate": True}
    how |= {"attention_mask": torch.ones_like(prompts), "max_new_tokens": 30, "pad_token_id": 0}
    out = model.generate(prompts, uniforms=uniforms, slot_budget="quadratic", **_COUPLED, **how)
    cycles = zip(out.speculation.rows_drafts, out.speculation.rows_accepted)
    for text, u, drafts, accepted in zip(out.sequences, uniforms, *zip(*cycles)):
        place = 0
        for draft, count in zip(drafts, accepted):
            own = u[None, place : place + len(draft) + 1]  # the target picks with the first
            slots = model(text[None, : 4 + place], uniforms=own).logits[:, 4 + place :]
            want = slots[:, 1:].argmax(-1) if variant == "one_hot" else pick(own[:, 1:], slots[:, :-1].softmax(-1))
            assert draft == want[0].tolist()
            place += count + 1
    assert set().union(*out.speculation.rows_accepted) >= {0, 1, 2}


def pair(variant="one_hot", noise=0.02, base=None):
    """A larger model, and a small one that is a disturbed copy of it, with a student."""
    large = backbone(seed=2).double() if base is None else base
    small = student(variant, copy.deepcopy(large)).eval()
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in small.backbone.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    return large, small


@pytest.mark.by_day("how1-categorical")
@pytest.mark.parametrize("variant", ["one_hot", "categorical", "mask"])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.7, "top_k": 6}])
def test_the_same_uniforms_pick_the_same_tokens(variant, how):
    large, small = pair(variant)
    small.attach(large)
    uniforms = torch.rand(1, 14, generator=torch.Generator().manual_seed(4))
    prompt = text = ids(1, 4)
    for step in range(14):
        with torch.no_grad():
            scores = large(text).logits[:, -1] / how.get("temperature", 1.0)
        least = scores.topk(how.get("top_k", VOCABULARY)).values[:, -1:]
        distribution = scores.masked_fill(scores < least, -torch.inf).softmax(-1)
        text = torch.cat([text, pick(uniforms[:, step], distribution)[:, None]], dim=1)
    options = {"do_sample": True, "verification": "coupled", "top_k": 0, "max_new_tokens": 14, "pad_token_id": 0} | how
    out = large.generate(prompt, assistant_model=small, uniforms=uniforms, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, text)
    rows = {"do_sample": True, "verification": "coupled", "seed": [3, 4, 5, 6]} | how
    together = write(large, assistant_model=small, **rows)
    assert torch.equal(together, write(large, assistant_model=small, use_mtp=False, **rows))


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the test dictates: a forward costs one, and a tenth for every row behind the first."""
    seconds = [0.0]
    monkeypatch.setattr("tokenahead.generation.loop.time.perf_counter", lambda: seconds[0])
    return seconds


def forwards(model, clock, **options):
    """Rows of every forward behind the prompt, and the output."""
    rows, forward = [], model.backbone.get_decoder().forward

    def counted(*args, **kwargs):
        fed = kwargs["inputs_embeds"].shape[1]
        rows.append(fed)
        clock[0] += 1 + 0.1 * (fed - 1)
        return forward(*args, **kwargs)

    model.backbone.get_decoder().forward = counted
    how = {"num_assistant_tokens_schedule": "adaptive", "return_dict_in_generate": True, "pad_token_id": 0}
    out = model.generate(ids(1, 4), max_new_tokens=200, **(how | options))
    return rows[1:], out


@pytest.mark.by_day("options1-categorical")
@pytest.mark.parametrize("variant", ["one_hot", "categorical"])
@pytest.mark.parametrize("options", [_COUPLED | {"seed": 1}, _COUPLED, {}])
def test_no_slots_where_none_pay(variant, options, clock, monkeypatch):
    model = student(variant, backbone(seed=2).double()).eval()
    model.backbone.config.max_position_embeddings = 512
    has_many = options == _COUPLED
    model = best_of(model, 2) if has_many else model
    never = lambda self, logits, *args: (torch.full(logits.shape[:-1], VOCABULARY - 1), None)  # noqa: E731
    monkeypatch.setattr("tokenahead.modeling.ptp.session.ParallelSession._drafts", never)
    bad = {"suppress_tokens": [VOCABULARY - 1]}
    rows, out = forwards(model, clock, **options, **bad)
    assert not sum(out.speculation.accepted)
    plain = sum(count == 1 for count in rows)
    assert rows[0] == 1 and plain > 0.85 * len(rows), rows
    if not has_many:
        want = model.generate(ids(1, 4), max_new_tokens=200, use_mtp=False, pad_token_id=0, **options, **bad)
        assert torch.equal(out.sequences, want)


@pytest.mark.by_day("categorical")
@pytest.mark.parametrize("variant", ["one_hot", "categorical"])
def test_greedy_drafts_are_asked_for_the_most_likely_tokens(variant):
    prompt = ids(2, 5)
    for greedy, options, asked in ((True, {}, -1.0), (False, {}, 0.5), (True, {"do_sample": True, "seed": 1}, None)):
        model, seen = student(variant, backbone().double(), greedy=greedy), []
        model.uniform_embedding.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))  # noqa: B023
        out = model.generate(prompt, max_new_tokens=14, **options)
        assert seen and all((u >= 0).all() if asked is None else (u == asked).all() for u in seen)
        if not options:
            assert torch.equal(out, model.generate(prompt, max_new_tokens=14, use_mtp=False))
