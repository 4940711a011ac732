"""Adaptive lengths of parallel token prediction: down to plain forwards, without slots, where no draft is right."""

import pytest
import torch

from tests.ptp_models import VOCABULARY, backbone, ids, student
from tokenahead.experimental import best_of
from tokenahead.generation.call import schedule as schedules
from tokenahead.modeling.ptp.session import split_budget

_COUPLED = {"do_sample": True, "verification": "coupled"}


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


def test_slots_go_with_the_length_that_is_asked(monkeypatch, clock):
    monkeypatch.setattr(schedules.AdaptiveSchedule, "length", lambda self: 1)
    model = student("categorical", backbone(seed=2).double()).eval()
    rows, out = forwards(model, clock)
    assert max(rows) <= 1 + 1 + 9 // 3 and max(map(len, out.speculation.drafts)) == 1
    assert split_budget(3, 1, 1, (0.5,)) == [1, 1]
