"""Results: what is derived, what a file holds, and what is refused."""

import dataclasses
import json
import math

import pytest

from tokenahead.model_cards import DecodingResult, MeasuredResults


def test_derived_figures(results):
    greedy, sampled = results.results
    assert (greedy.tokens_per_call, greedy.tokens_per_second, greedy.plain_tokens_per_second) == (4.0, 100.0, 40.0)
    assert greedy.speed_up == 2.5
    # the plain run was shorter: compare speeds, not times
    assert (sampled.plain_tokens_per_second, sampled.speed_up) == (20.0, 2.5)


def test_json_round_trip_holds_measured_values_only(results, tmp_path):
    path = results.to_json(tmp_path / "new" / "results.json")
    assert MeasuredResults.from_json(path) == results
    stored = json.loads(path.read_text())
    assert stored["results"][0].keys() == {f.name for f in dataclasses.fields(DecodingResult)}
    assert '"speed_up"' not in path.read_text()


def test_interrupted_write_keeps_the_old_file(results, tmp_path, monkeypatch):
    path = results.to_json(tmp_path / "results.json")
    before = path.read_text()
    changed = dataclasses.replace(results, hardware="another")

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        changed.to_json(path)
    assert path.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backbone_calls": 0}, "backbone_calls=.*0"),
        ({"new_tokens": 2.5}, "new_tokens=.*2.5"),
        ({"plain_new_tokens": 0}, "plain_new_tokens=.*0"),
        ({"seconds": 0.0}, "seconds=0.0"),
        ({"plain_seconds": math.inf}, "plain_seconds="),
        ({"name": " "}, "name=' '"),
        ({"identical": "yes"}, "identical='yes'"),
        ({"batch_size": 0}, "batch_size=.*0"),
        ({"repeated_share": 1.5}, "repeated_share=.*1.5"),
        ({"accepted_by_position": [0.5, -0.1]}, "accepted_by_position="),
        ({"expected_by_position": 3}, "expected_by_position=.*3"),
        ({"expected_tokens_per_call": math.nan}, "expected_tokens_per_call="),
        ({"processor_seconds": 0.0}, "processor_seconds=.*0.0"),
        ({"per_prompt": [math.inf]}, "per_prompt="),
    ],
)
def test_bad_row_is_named(row, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(row, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"results": []}, r"results=\[\]"),
        ({"hardware": ""}, "hardware=''"),
        ({"accepted_by_position": [0.5, 1.5]}, "accepted_by_position="),
        ({"bits_per_byte": math.nan}, "bits_per_byte="),
        ({"extra": {"note": None}}, "'note'"),
        ({"environment": {"torch": []}}, "'torch'"),
    ],
)
def test_bad_results_are_named(results, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(results, **change)


def test_two_rows_of_one_name_are_refused(results, row):
    with pytest.raises(ValueError, match="once"):
        dataclasses.replace(results, results=[row, row])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda fields: fields.pop("command"), "command"),
        (lambda fields: fields.update(speed=2), "'speed'"),
        (lambda fields: fields["results"][0].update(speed_up=9.0), "speed_up"),
        (lambda fields: fields["results"].append(7), "holds no results"),
        (lambda fields: fields.update(results=3), "holds no results"),
    ],
)
def test_bad_file_is_named(results, tmp_path, edit, message):
    path = results.to_json(tmp_path / "results.json")
    fields = json.loads(path.read_text())
    edit(fields)
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=message) as error:
        MeasuredResults.from_json(path)
    assert str(path) in str(error.value)


def test_truncated_file_is_named(results, tmp_path):
    path = results.to_json(tmp_path / "results.json")
    path.write_text(path.read_text()[:100])
    with pytest.raises(ValueError, match=r"results\.json.*JSON"):
        MeasuredResults.from_json(path)


@pytest.mark.core
def test_text_that_repeats_itself_claims_no_speed_up(results, row, config):
    from tokenahead.model_cards import render_card

    loops = dataclasses.replace(row, repeated_share=0.6, expected_tokens_per_call=3.0)
    assert loops.is_degenerate and not row.is_degenerate
    assert not dataclasses.replace(row, repeated_share=0.5).is_degenerate
    changed = dataclasses.replace(results, results=[loops, results.results[1]])
    entries = render_card(config, changed, license="mit").data.eval_results
    figures = {(entry.metric_type, entry.metric_name.split(", ", 1)[-1]) for entry in entries}
    for metric in ("speed_up", "tokens_per_call"):
        assert (metric, "greedy") not in figures and (metric, "sampled, a | b") in figures
    values = {entry.metric_type: entry.metric_value for entry in entries}
    assert values["repetition"] == 0.6 and "expected_tokens_per_call" not in values


@pytest.mark.core
def test_spread_and_processor_time(row):
    assert row.spread is None and row.processor_speed_up is None
    more = dataclasses.replace(row, per_prompt=[3.5, 4.5], processor_seconds=1.0, plain_processor_seconds=3.0)
    assert more.spread == (3.5, 4.5) and more.processor_speed_up == 3.0
