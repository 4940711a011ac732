"""The adaptive draft length finds what pays, with costs and acceptance that the test dictates."""

import random

import pytest
import torch

from tokenahead.generation.schedule import AdaptiveSchedule, ConstantSchedule


def run(schedule, chance, seconds, cycles, seed=0):
    """Tokens, seconds and draft lengths of a decode in which each draft is accepted with probability `chance`."""
    source, tokens, total, lengths = random.Random(seed), 0, 0.0, []
    for _ in range(cycles):
        length = schedule.length()
        accepted = 0
        while accepted < length and source.random() < chance:
            accepted += 1
        cost = seconds(length) * source.uniform(0.9, 1.1)
        schedule.update(length, [accepted], cost)
        tokens, total = tokens + accepted + 1, total + cost
        lengths.append(length)
    return tokens, total, lengths


def expected_rate(chance, seconds, length):
    return sum(chance**i for i in range(length + 1)) / seconds(length)


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.9, 0.98])
@pytest.mark.parametrize("slope", [0.01, 0.1, 0.5])
def test_close_to_the_best_fixed_length(chance, slope):
    seconds = lambda length: 1 + slope * length  # noqa: E731
    tokens, total, _ = run(AdaptiveSchedule(7), chance, seconds, 3000)
    best = max(expected_rate(chance, seconds, length) for length in range(8))
    assert tokens / total > 0.93 * best


@pytest.mark.parametrize("slope", [0.05, 0.3, 1.0])
def test_unpredictable_text_costs_at_most_5_percent(slope):
    tokens, total, lengths = run(AdaptiveSchedule(7), 0.0, lambda length: 1 + slope * length, 1000)
    assert tokens / total > 0.95
    assert 0 < sum(length > 0 for length in lengths[10:]) < 0.1 * len(lengths)


def test_it_notices_when_text_becomes_predictable():
    schedule, seconds = AdaptiveSchedule(7), lambda length: 1 + 0.1 * length
    run(schedule, 0.0, seconds, 300)
    *_, lengths = run(schedule, 0.95, seconds, 300)
    assert lengths[-1] >= 5


def test_a_slow_hiccup_does_not_change_the_mind():
    schedule, seconds = AdaptiveSchedule(7), lambda length: 1 + 0.1 * length
    run(schedule, 0.9, seconds, 100)
    schedule.update(7, [7], 500.0)
    assert schedule.length() >= 4


def test_constant():
    schedule = ConstantSchedule(5)
    schedule.update(5, [0], 1.0)
    assert schedule.length() == 5


def test_generate_adapts_and_stays_lossless(trained):
    prompt = torch.arange(100, 112)[None]
    options = dict(do_sample=False, max_new_tokens=60)
    out = trained.generate(
        prompt,
        num_assistant_tokens_schedule="adaptive",
        num_assistant_tokens=5,
        return_dict_in_generate=True,
        **options,
    )
    assert torch.equal(out.sequences, trained.generate(prompt, use_mtp=False, **options))
    assert max(map(len, out.speculation.drafts)) <= 5 and [] in out.speculation.drafts


def test_plain_decoding_where_a_forward_makes_the_next_draft_and_none_is_ever_right():
    """A cycle pays for what was asked in it; a draft that was asked for comes a cycle later."""
    schedule, asked, pending = AdaptiveSchedule(4, lead=1), [], 0
    for _ in range(600):
        length = schedule.length()
        drafted = min(pending, length)
        schedule.update(drafted, [0], 1 + 0.5 * length, length)
        pending = length
        asked.append(length)
    assert asked[0] == 0 and set(asked[1:5]) == {4}
    assert sum(length == 0 for length in asked[20:]) > 0.93 * 580
    probes = [a for a, b in zip(asked[20:], asked[21:]) if a and b]
    assert probes  # two cycles in a row: one that makes the draft, one that judges it


def test_drafts_that_come_a_cycle_later_and_pay_are_made():
    schedule, asked, pending = AdaptiveSchedule(4, lead=1), [], 0
    for _ in range(100):
        length = schedule.length()
        drafted = min(pending, length)
        schedule.update(drafted, [drafted], 1 + 0.1 * length, length)
        pending = length
        asked.append(length)
    assert set(asked[10:]) == {4}
