"""Results: what is derived, what a file holds, and what is refused."""

import dataclasses
import json

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError

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


@pytest.mark.parametrize(
    ("field", "value"),
    [("new_tokens", 2.5), ("identical", "yes"), ("per_prompt", ["a"]), ("hardware", 3), ("results", [7])],
)
def test_a_value_of_another_type_is_refused_by_the_name_of_its_field(row, results, field, value):
    owner = row if hasattr(row, field) else results
    with pytest.raises(StrictDataclassFieldValidationError, match=f"'{field}'"):
        dataclasses.replace(owner, **{field: value})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda fields: fields.pop("command"), "command"),
        (lambda fields: fields["results"][0].update(speed_up=9.0), "speed_up"),
        (lambda fields: fields["results"].append(7), "holds no results"),
        (lambda fields: fields.update(results=3), "holds no results"),
        (None, "results"),
    ],
)
def test_bad_file_is_named(results, tmp_path, edit, message):
    path = results.to_json(tmp_path / "results.json")
    fields = json.loads(path.read_text())
    if edit is not None:
        edit(fields)
    path.write_text(json.dumps(fields)[: None if edit else 100])
    with pytest.raises(ValueError, match=message) as error:
        MeasuredResults.from_json(path)
    assert str(path) in str(error.value)


@pytest.mark.core
def test_text_that_repeats_itself_claims_no_speed_up(results, row, config):
    from tokenahead.model_cards import render_card

    loops = dataclasses.replace(row, repeated_share=0.6, expected_tokens_per_call=3.0)
    assert loops.only_loops and not dataclasses.replace(row, repeated_share=0.5).only_loops
    changed = dataclasses.replace(results, results=[loops, results.results[1]])
    entries = render_card(config, changed, license="mit").data.eval_results
    figures = {(entry.metric_type, entry.metric_name.split(", ", 1)[-1]) for entry in entries}
    for metric in ("speed_up", "tokens_per_call"):
        assert (metric, "greedy") not in figures and (metric, "sampled, a | b") in figures
    values = {entry.metric_type: entry.metric_value for entry in entries}
    assert values["repetition"] == 0.6 and "expected_tokens_per_call" not in values
