"""The figures' arithmetic against sums by hand, and the metrics of `evaluate`, which load without a network."""

import math

import pytest

from tests.internals import METRICS, load_metric, metric_path
from tests.internals import evaluation_figures as figures


def test_calls_are_counted_with_the_prefill():
    assert figures.tokens_per_call([2, 0, 3]) == 9 / 4
    assert figures.tokens_per_call([2, 0, 3], new_tokens=7) == 7 / 4  # an end inside the last draft
    assert figures.tokens_per_call([]) == 1.0


def test_short_drafts_do_not_count_where_they_do_not_reach():
    assert figures.acceptance_by_position([2, 0, 1], [3, 3, 1]) == [2 / 3, 1 / 2, 0.0]
    assert figures.acceptance_by_position([], []) == []


def test_repeated_text_is_found():
    assert figures.repeated_share(list(range(100))) == 0.0
    assert figures.repeated_share([1, 2, 3, 4] * 20) == 1.0
    assert figures.repeated_share(list(range(50)) + list(range(20)), gram=16) == pytest.approx(40 / 70)
    assert figures.repeated_share([]) == 0.0
    assert figures.is_degenerate(0.51) and not figures.is_degenerate(0.5)


CASES = {
    "tokens_per_call": (
        {"predictions": [[2, 0, 3], [1]]},
        {"tokens_per_call": 12 / 6, "lowest": 3 / 2, "highest": 9 / 4},
    ),
    "acceptance_by_position": (
        {"predictions": [2, 0, 1], "references": [3, 3, 1]},
        {"acceptance_by_position": [2 / 3, 1 / 2, 0.0], "accepted": 1.0},
    ),
    "expected_acceptance": (  # m = 1, 1/2, 1/2: a later surplus of q does not mend an earlier lack
        {"predictions": [[0.0, math.log(0.25), math.log(0.5)]], "references": [[0.0, math.log(0.5), math.log(0.25)]]},
        {"expected_by_position": [1.0, 0.5, 0.5], "expected_tokens_per_call": 3.0},
    ),
    "bits_per_byte": ({"predictions": [math.log(2), math.log(8)], "count": 4}, {"bits_per_byte": 1.0}),
    "repetition": (
        {"predictions": [[1, 2, 3, 4] * 20, list(range(40))]},
        {"repeated_share": 0.5, "degenerate": False},
    ),
}


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_says_what_it_should(name, monkeypatch, tmp_path):
    given, expected = CASES[name]
    metric = load_metric(name)
    found = metric.compute(**given)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value), key
    assert metric.inputs_description and metric.name == name


def test_a_metric_loads_from_its_file_without_a_network(tmp_path):
    import evaluate

    metric = evaluate.load(metric_path("repetition"), cache_dir=str(tmp_path))
    assert metric.compute(predictions=[[7] * 40])["degenerate"] is True


def test_a_metric_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="name='speed'.*acceptance_by"):
        load_metric("speed")
