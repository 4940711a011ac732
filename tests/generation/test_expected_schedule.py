"""The default length of drafts: what pays by known costs, without a clock, for the backbone's own text."""

import itertools
import random
import subprocess
import sys

import pytest
import torch

from tests.backbones import backbone, plain_continuations, prompts, train_eagle, train_heads
from tests.every_model import llama
from tests.models import left_padded
from tokenahead import (
    DrafterCascade,
    EagleHead,
    LookaheadDrafter,
    MTPHeads,
    NgramDrafter,
    RecyclingDrafter,
    SuffixDrafter,
)
from tokenahead.generation.backbone.target import weights_of
from tokenahead.generation.call import costs
from tokenahead.generation.call import options as call_options
from tokenahead.generation.call.costs import POSITIONS, BlockCosts
from tokenahead.generation.call.schedule import ExpectedSchedule
from tokenahead.generation.contract import DraftSession
from tokenahead.generation.lookups.ngram import NgramSession
from tokenahead.testing import continuation_distribution, continuation_p_value

EXPECTED = {"num_assistant_tokens_schedule": "expected"}
KIND = "float32"


def dictate(monkeypatch, slope, first=0.0):
    """Let a block of w positions cost 1 + first + slope (w - 1), whatever the model."""
    line = tuple(1 + (first + slope * (width - 1)) * (width > 1) for width in POSITIONS)
    monkeypatch.setattr(costs, "COSTS", {KIND: {(1, 1000): {1: line}}})


def run(schedule, chance, cycles, kinds=(0,), seed=0):
    """Tokens, costs and lengths of a decode in which drafts are accepted with the probability chance(kind)."""
    source, tokens, total, lengths = random.Random(seed), 0, 0.0, []
    for cycle in range(cycles):
        kind = kinds[cycle % len(kinds)]
        length = schedule.length([kind])
        accepted = next((n for n in range(length) if source.random() >= chance(kind)), length)
        schedule.update(length, [accepted], None, length, [length])
        tokens, total = tokens + 1 + accepted, total + (schedule.costs[kind][length] if kind >= 0 else 1)
        lengths.append(length)
    return tokens, total, lengths


def test_close_to_the_best_fixed_length():
    for chance, slope in itertools.product([0.0, 0.3, 0.6, 0.9, 0.98], [0.02, 0.1, 0.5]):
        line = [1 + slope * length for length in range(8)]
        tokens, total, _ = run(ExpectedSchedule([line], [(0.5, 0.5)]), lambda _: chance, 2000)  # noqa: B023
        best = max(sum(chance**i for i in range(length + 1)) / line[length] for length in range(8))
        assert tokens / total > 0.95 * best


def test_what_does_not_pay_is_asked_again_after_longer_and_longer_times():
    schedule = ExpectedSchedule([[1.0, 1.5, 2.0]], [(0.1, 0.1)])
    *_, lengths = run(schedule, lambda _: 0.0, 300)
    assert [cycle for cycle, length in enumerate(lengths) if length] == [16, 49, 114, 243]
    *_, lengths = run(schedule, lambda _: 1.0, 400)  # the text has become predictable
    assert lengths[-20:] == [2] * 20


def test_where_a_forward_makes_the_next_draft_it_is_asked_twice():
    *_, lengths = run(ExpectedSchedule([[1.0, 1.5]], [(0.1, 0.1)], lookahead=1), lambda _: 0.0, 60)
    assert [cycle for cycle, length in enumerate(lengths) if length] == [16, 17, 50, 51]


def test_kinds_of_drafts_have_an_acceptance_of_their_own():
    line = [1 + 0.3 * length for length in range(5)]
    schedule = ExpectedSchedule([line, line], [(0.5, 0.5), (0.5, 0.5)])
    *_, lengths = run(schedule, lambda kind: 0.95 * kind, 200, kinds=(0, 1, -1))
    assert lengths[2::3] == [0] * 66 and min(lengths[100::3]) >= 3 and sum(map(bool, lengths[99::3])) <= 2
    assert schedule.length([1]) == 4 and schedule.length([-1, 1]) == 4 and schedule.length([0]) == 0
    assert schedule.length([-1] * 20 + [1]) == 0  # a block is paid for by all sequences
    schedule.update(0, [-1] * 20 + [0], None, 0, [0] * 21)
    assert schedule.length([-1] * 20 + [1]) == 4  # but not for those that have ended


def test_costs_lie_between_those_that_were_measured(monkeypatch):
    block = BlockCosts(tuple(float(width) ** 2 for width in POSITIONS))
    assert [block(width) for width in (1, 4, 5, 96)] == [1, 16, 26, 96**2] and block(97) > 96**2
    assert block.best([1.0]) == 0 and BlockCosts((1.0,) * len(POSITIONS)).best([0.5, 0.4, 0.1]) == 3
    model, cpu = backbone(), torch.device("cpu")
    entry = {1: (1.0,) * len(POSITIONS), 8: (2.0,) * len(POSITIONS)}
    monkeypatch.setattr(costs, "COSTS", {KIND: {(1, 10**9): entry, (1, 1000): {1: (3.0,) * len(POSITIONS)}}})
    for weights, batch, found in [(5000, 4, 3), (10**8, 4, 2), (10**8, 2, 1)]:  # 4 is nearer to 8 than to 1
        assert BlockCosts.of(torch.float32, cpu, weights, batch).measured[0] == found
    assert BlockCosts.of(torch.float64, cpu, 1000, 1) is None
    assert BlockCosts.of(torch.float32, torch.device("meta"), 1000, 1) is None
    table, everything = model.get_input_embeddings().weight, sum(weight.numel() for weight in model.parameters())
    assert weights_of([model, model]) == everything - table.numel()


@pytest.mark.core
def test_greedy_texts_with_lengths_that_switch(monkeypatch):
    for slope, draft in [(0.05, train_heads), (0.0, lambda model: train_eagle(model, 1))]:
        dictate(monkeypatch, slope)
        model = backbone()
        head, batch = draft(model), prompts(6)
        texts = plain_continuations(model, batch, 24)
        how = dict(max_new_tokens=24, do_sample=False, assistant_model=head, return_dict_in_generate=True, **EXPECTED)
        alone = [model.generate(ids[None], attention_mask=torch.ones_like(ids)[None], **how) for ids in batch]
        assert all(torch.equal(out.sequences[0, len(ids) :], text) for out, ids, text in zip(alone, batch, texts))
        together = model.generate(**left_padded(batch), **how)
        assert torch.equal(together.sequences[:, -24:], torch.stack(texts))
        for out in (together, *alone):
            assert len(out.speculation.lengths) > 1


@pytest.mark.parametrize("options", [{}, {"layer_types": ["sliding_attention"], "sliding_window": 3}])
def test_an_eagle_head_reads_at_once_what_plain_cycles_left(options, monkeypatch):
    """And drafts as if it had read token by token."""
    dictate(monkeypatch, 0.01)  # drafts of a random head do not pay: they are asked for after 16 cycles, and 32 more
    model, ids = backbone(), torch.tensor([prompts(1)[0].tolist()] * 2)
    head, blocks, found = EagleHead.from_backbone(model, version=1, **options), list[int](), []
    run, how = head.run, dict(max_new_tokens=60, do_sample=False, assistant_model=head, **EXPECTED)

    def counted(features, *others):
        blocks.append(features.shape[1])
        found.append(run(features, *others))
        return found[-1]

    monkeypatch.setattr(head, "run", counted)
    model.generate(ids, **how)
    joined, last = list(blocks), found[-1]
    assert max(joined[1:]) > 16 and len(joined) < 20, joined
    monkeypatch.setattr("tokenahead.modeling.eagle.session._joined", iter)
    model.generate(ids, **how)
    assert len(blocks) > 40 and torch.allclose(found[-1][:, -1], last[:, -1], atol=1e-5)


@pytest.mark.parametrize("drafter", [NgramDrafter, SuffixDrafter, RecyclingDrafter, LookaheadDrafter])
def test_greedy_texts_of_look_ups(drafter, monkeypatch):
    dictate(monkeypatch, 0.1)
    model = backbone()
    each = drafter().attach(model)
    for ids in (torch.tensor([[5, 6, 7, 5, 8, 7, 5]]), torch.tensor([[5, 6, 7, 5], [9, 9, 9, 9], [3, 4, 3, 5]])):
        common = dict(attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False)
        out = model.generate(ids, assistant_model=each, return_dict_in_generate=True, **common, **EXPECTED)
        assert torch.equal(out.sequences, model.generate(ids, **common))
        assert out.speculation.schedule == "expected" and len(out.speculation.lengths) > 1


def test_the_law_of_sampled_text_with_lengths_that_switch(monkeypatch):
    """Sixty calls of a hundred rows, in which what was accepted decides how many tokens are drafted next."""
    dictate(monkeypatch, 0.22)
    torch.manual_seed(0)
    target = llama(vocab_size=5, initializer_range=0.3)
    head, prompt = MTPHeads.from_backbone(target, window=4), torch.tensor([[1, 3, 2, 4, 3]])
    how = dict(do_sample=True, top_k=4, temperature=0.8, assistant_model=head, return_dict_in_generate=True, **EXPECTED)
    texts, lengths = [], set()
    for rows in [4] * 200 + [100] * 40:
        out = target.generate(prompt, max_new_tokens=7, num_return_sequences=rows, **how)
        texts.append(out.sequences[:, 5:9])
        lengths.add(tuple(out.speculation.lengths))
    assert len(lengths) > 3  # the choice differs among calls
    for part in (texts[:200], texts[200:]):
        assert (
            continuation_p_value(
                torch.cat(part), continuation_distribution(target, prompt, 4, top_k=4, temperature=0.8)
            )
            > 1e-3
        )


SEEDED = """
import torch
from tests.every_model import llama
from tokenahead import MTPHeads
from tokenahead.generation.call import costs, options

options._LEAST_WEIGHTS = 0
costs.COSTS = {"float32": {(1, 1000): {1: tuple(
    1 + 0.15 * (width - 1) for width in costs.POSITIONS)}}}
torch.manual_seed(0)
model = llama(vocab_size=48, initializer_range=0.1)
head = MTPHeads.from_backbone(model, window=6)
for _ in range(2):  # an earlier call changes nothing
    torch.manual_seed(5)
    out = model.generate(torch.arange(2, 9)[None], assistant_model=head, do_sample=True, max_new_tokens=60,
                         return_dict_in_generate=True)
    assert out.speculation.schedule == "expected" and len(out.speculation.lengths) > 2
    print(out.sequences.tolist(), out.speculation.lengths)
"""


def test_a_seed_repeats_a_call_with_all_defaults():
    both = [subprocess.Popen([sys.executable, "-c", SEEDED], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [line for process in both for line in process.communicate()[0].splitlines()]
    assert len(lines) == 4 and len(set(lines)) == 1


def test_whoever_sets_a_length_gets_it(monkeypatch):
    monkeypatch.setattr(call_options, "_LEAST_WEIGHTS", 0)
    dictate(monkeypatch, 5.0)  # nothing pays
    model = backbone()
    head, ids = train_heads(model), torch.arange(2, 9)[None]
    how = dict(max_new_tokens=12, do_sample=False, assistant_model=head, return_dict_in_generate=True)
    chosen = model.generate(ids, **how).speculation
    assert chosen.schedule == "expected" and set(chosen.lengths) == {0}
    for fixed in (
        {"num_assistant_tokens": 2},
        {"num_assistant_tokens_schedule": "constant"},
        {"draft_tree": {"top_k": 2}},
    ):
        found = model.generate(ids, **how, **fixed).speculation
        assert found.schedule == "constant" and max(found.lengths) >= 2
    bounded = model.generate(ids, **how, num_assistant_tokens=2, **EXPECTED).speculation
    assert bounded.schedule == "expected" and max(bounded.lengths) <= 2


def test_sizes_of_trees_are_those_that_pay(monkeypatch):
    model = backbone()
    for slope, fewest, most in [(0.0, 81, 121), (0.1, 2, 20), (9.0, 1, 9)]:
        dictate(monkeypatch, slope)
        for drafter in (RecyclingDrafter(), LookaheadDrafter()):
            drafter.attach(model)
            made = list[DraftSession]()
            monkeypatch.setattr(drafter, "schedule_of", lambda session, options, made=made: made.append(session))
            model.generate(torch.arange(2, 9)[None], assistant_model=drafter, max_new_tokens=4, **EXPECTED)
            assert fewest <= made[0].positions(made[0].num_tokens) <= most


def test_a_cascade_chooses_by_who_drafts(monkeypatch):
    """Long drafts of the look-up pay while the last drafter's do not."""
    dictate(monkeypatch, 0.02)
    model = backbone()
    head = train_heads(model)
    ids = torch.tensor([[5, 6, 7, 8] * 8])
    cascade = DrafterCascade([SuffixDrafter(), head]).attach(model)
    kinds, made = [], cascade.schedule_of

    def schedule_of(session, options):
        schedule = made(session, options)
        assert len(schedule.costs) == len(session.priors) == 5 and len(schedule.costs[0]) > len(schedule.costs[4])
        assert schedule.costs[4][1] > schedule.costs[0][1]  # heads read weights of their own
        ask = schedule.length
        schedule.length = lambda asked: kinds.extend(asked) or ask(asked)
        return schedule

    monkeypatch.setattr(cascade, "schedule_of", schedule_of)
    common = dict(attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
    out = model.generate(ids, assistant_model=cascade, **common, **EXPECTED)
    assert torch.equal(out, model.generate(ids, **common)) and {4} < set(kinds)


def test_recycling_drafts_nothing_behind_a_token_of_which_nothing_is_known(monkeypatch):
    dictate(monkeypatch, 0.001)
    model, ids = backbone(vocabulary=40), prompts(1, vocabulary=40)[0][None]
    common = dict(attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
    drafter = RecyclingDrafter(top_k=3, num_tokens=3, total_tokens=8).attach(model)
    out = model.generate(ids, assistant_model=drafter, **common, **EXPECTED, return_dict_in_generate=True)
    assert out.sequences.equal(model.generate(ids, **common))
    text, place, known, asked = out.sequences[0].tolist(), ids.shape[1], set(), []
    for draft, accepted in zip(out.speculation.rows_drafts[0][:-3], out.speculation.rows_accepted[0]):
        asked.append(text[place] in known)
        assert bool(draft) == asked[-1]
        known |= {text[place], *draft}
        place += accepted + 1
    assert asked[0] is False and any(asked)


def test_a_schedule_by_the_clock_asks_for_no_kinds(monkeypatch):
    """The host would wait for them, and a recorded draft would read what was found outside of it."""

    def asked(self, tokens):
        raise AssertionError("kinds were asked for")

    monkeypatch.setattr(NgramSession, "kinds", asked)
    model = backbone()
    drafter, ids = NgramDrafter().attach(model), torch.tensor([[5, 6, 7, 5, 8, 7, 5]])
    how = dict(max_new_tokens=20, do_sample=False, assistant_model=drafter)
    for cache in (None, "static"):
        out = model.generate(ids, **how, num_assistant_tokens_schedule="adaptive", cache_implementation=cache)
        assert out.shape[1] == 27
