"""The adaptive draft length finds what pays, with costs and acceptance that the test dictates."""

import copy
import itertools
import random

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from tokenahead.generation.call.schedule import AdaptiveSchedule


def run(schedule, chance, seconds, cycles, seed=0, rows=1):
    """Tokens per row, seconds and draft lengths of a decode in which drafts are accepted with probability `chance`."""
    source, tokens, total, lengths = random.Random(seed), 0.0, 0.0, []
    for _ in range(cycles):
        length = schedule.length()
        accepted = [0] * rows
        for row in range(rows):
            while accepted[row] < length and source.random() < chance:
                accepted[row] += 1
        cost = seconds(length) * source.uniform(0.9, 1.1)
        schedule.update(length, accepted, cost)
        tokens, total = tokens + sum(accepted) / rows + 1, total + cost
        lengths.append(length)
    return tokens, total, lengths


def expected_rate(chance, seconds, length):
    return sum(chance**i for i in range(length + 1)) / seconds(length)


def test_close_to_the_best_fixed_length():
    for chance, slope in itertools.product([0.0, 0.3, 0.6, 0.9, 0.98], [0.01, 0.1, 0.5]):
        seconds = lambda length: 1 + slope * length  # noqa: B023, E731
        tokens, total, _ = run(AdaptiveSchedule(7), chance, seconds, 3000)
        best = max(expected_rate(chance, seconds, length) for length in range(8))
        assert tokens / total > 0.93 * best


def test_a_batch_that_rejects_much_is_decoded_plainly_within_a_short_call():
    """The first drafted token costs much, the next ones little (batch 16 with processors on a small model)."""
    for seed in range(4):
        seconds = lambda length: 1.0 if length == 0 else 1.38 + 0.1 * (length - 1)  # noqa: E731
        tokens, total, _ = run(AdaptiveSchedule(7), 0.19, seconds, 96, seed, rows=16)
        assert tokens / total > 0.94


def work_of_calls(seed):
    """Four calls of 16 rows and 96 tokens, in which drafts do not pay, on a machine half as fast every other 10 cycles.

    Returns what the cycles would have taken at an even pace, relative to plain decoding.
    """
    source, schedule, work, cycle = random.Random(seed), AdaptiveSchedule(7), 0.0, 0
    for _ in range(4):
        rows = [0] * 16
        while min(rows) < 96:
            length, cycle = schedule.length(), cycle + 1
            accepted = [next((i for i in range(length) if source.random() > 0.6), length) for n in rows if n < 96]
            fresh = iter(accepted)
            rows = [n if n >= 96 else n + 1 + next(fresh) for n in rows]
            cost = 1.0 if length == 0 else 1.5 + 0.3 * length
            schedule.update(length, accepted, cost * (1 + cycle // 10 % 2) * source.uniform(0.8, 1.2))
            work += cost
        schedule = schedule.resumed()
    return work / (4 * 96)


def test_a_machine_of_changing_pace_lures_no_batch_into_drafts_that_do_not_pay():
    assert sum(work_of_calls(seed) for seed in range(8)) / 8 < 1.13  # 1.20 if times are not seen relative to the pace


def test_it_notices_when_text_becomes_predictable():
    schedule, seconds = AdaptiveSchedule(7), lambda length: 1 + 0.1 * length
    run(schedule, 0.0, seconds, 300)
    *_, lengths = run(schedule, 0.95, seconds, 300)
    assert lengths[-1] >= 5


@pytest.mark.core
def test_a_call_begins_with_what_calls_of_its_kind_have_learned(trained):
    options = dict(do_sample=False, max_new_tokens=20, num_assistant_tokens_schedule="adaptive")
    trained.schedules.clear()
    trained.generate(torch.arange(100, 112)[None], **options)
    ((kind, first),) = trained.schedules.items()
    trained.generate(torch.arange(100, 112)[None], **options)
    assert trained.schedules[kind].cycles > first.cycles and trained.schedules[kind] is not first
    trained.generate(torch.arange(100, 112).expand(3, -1), **options)
    assert len(trained.schedules) == 2  # the cost of a cycle depends on the batch
    assert not copy.deepcopy(trained).schedules


def test_a_call_that_fails_teaches_nothing(trained):
    class Broken(BaseStreamer):
        def put(self, value):
            raise OSError("nobody listens")

    options = dict(do_sample=False, max_new_tokens=20, num_assistant_tokens_schedule="adaptive")
    trained.schedules.clear()
    with pytest.raises(OSError, match="nobody listens"):
        trained.generate(torch.arange(100, 112)[None], streamer=Broken(), **options)
    assert not trained.schedules


def test_plain_decoding_where_a_forward_makes_the_next_draft_and_none_is_ever_right():
    """A cycle pays for what was asked in it; a draft that was asked for comes a cycle later."""
    schedule, asked, pending = AdaptiveSchedule(4, lookahead=1), [], 0
    for _ in range(600):
        length = schedule.length()
        drafted = min(pending, length)
        schedule.update(drafted, [0], 1 + 0.5 * length, length)
        pending = length
        asked.append(length)
    assert asked[0] == 0 and set(asked[1:5]) == {4}
    assert sum(length == 0 for length in asked[20:]) > 0.93 * 580
    probes = [a for a, b in zip(asked[20:], asked[21:]) if a and b]
    assert probes  # two cycles in a row: one that makes the draft, one that verifies it


def test_a_cycle_pays_for_what_it_drafted_where_its_draft_was_its_own():
    """Drafts end early where they are unsure; only where one cycle drafts for the next does it pay for the asking."""
    for lead, length in [(0, 2), (1, 5)]:
        schedule = AdaptiveSchedule(7, lead)
        schedule.update(2, [1], 1.0, 5)
        assert [n for n in range(8) if schedule.costs.count(n)] == [length]
