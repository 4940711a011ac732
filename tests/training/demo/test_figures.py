"""The figures can be read: every word lies inside them, none on another one, and every marker inside its axes."""

from dataclasses import replace
from itertools import combinations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from tokenahead.model_cards import DecodingResult, MeasuredResults
from tokenahead.training.commands import bench as figures
from tokenahead.training.evaluation import MODES

NAMES = ("ngram", "heads:hydra", "eagle:three", "transformers:prompt_lookup", "smaller", "own")
CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities", "translation")
TEXTS = {"dataset_name": "x", "dataset_description": "x", "hardware": "x", "dtype": "x", "command": "x"}


def rows(mode, batch: int, names, categories=CATEGORIES[:3], loops=()) -> list[DecodingResult]:
    found = []
    for index, name in enumerate(("plain", *names)):
        per_call = 1 + 0.4 * index
        found.append(
            DecodingResult(
                name=f"{name}, {mode.name}, {batch}",
                method=name,
                decoding=mode.name,
                do_sample=mode.is_sampled,
                batch_size=batch,
                backbone_calls=1000,
                new_tokens=int(1000 * per_call),
                seconds=3.0,
                plain_seconds=3.0 * per_call,
                call_ms=25.0 + 5 * index,
                draft_length=5 if index else None,
                category_speed_ups=dict.fromkeys(categories, per_call) if name not in loops else {},
                repeated_share=0.7 if name in loops else 0.1,
            )
        )
    return found


def measured(*groups) -> MeasuredResults:
    return MeasuredResults(results=[row for group in groups for row in group], library_version="0", **TEXTS)


def bounds(box) -> tuple[float, float, float, float]:
    return box.x0, box.y0, box.x1, box.y1


def is_inside(inner, outer, slack: float = 1.0) -> bool:
    (x0, y0, x1, y1), (left, low, right, high) = bounds(inner), bounds(outer)
    return left - slack <= x0 and low - slack <= y0 and x1 <= right + slack and y1 <= high + slack


def words(figure) -> list:
    """Extents of every text that is drawn."""
    from matplotlib.text import Text

    renderer = figure.canvas.get_renderer()
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    hidden = set()  # ticks beyond the limits exist and are not drawn
    for axes in figure.axes:
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            hidden |= {tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    return [(text.get_text(), text.get_window_extent(renderer)) for text in texts if text not in hidden]


SETTINGS = {
    "one method": lambda: measured(rows(MODES[0], 1, NAMES[:1])),
    "six methods": lambda: measured(rows(MODES[0], 1, NAMES), rows(MODES[2], 1, NAMES)),
    "categories": lambda: measured(rows(MODES[0], 1, NAMES[:4], CATEGORIES), rows(MODES[0], 8, NAMES[:2], CATEGORIES)),
    "loops": lambda: measured(rows(MODES[0], 1, NAMES[:3], loops=NAMES), rows(MODES[2], 1, NAMES[:3])),
}
CASES = {f"{kind}, {name}": (kind, name) for kind in ("bench", "frontier") for name in SETTINGS}


def drawn(case):
    kind, name = CASES[case]
    figure = {"bench": figures.bench_figure, "frontier": figures.frontier_figure}[kind](SETTINGS[name]())
    FigureCanvasAgg(figure).draw()
    return figure


@pytest.mark.by_day("bench, six methods", "frontier, loops")
@pytest.mark.parametrize("case", CASES)
def test_words_lie_inside_the_picture_and_not_on_each_other(case):
    figure = drawn(case)
    found = [(text, box) for text, box in words(figure) if not text.endswith("x")]  # speeds stand at their lines
    assert len(found) > 6
    for text, box in found:
        assert is_inside(box, figure.bbox), text
    for (one, box), (other, second) in combinations(found, 2):
        assert "categories" in case or not box.overlaps(second), (one, other)  # turned words have wide boxes


def points(axes) -> list:
    return [line for line in axes.lines if line.get_linestyle() == "None"]


def test_text_that_repeats_itself_is_hollow_and_claims_nothing():
    frontier, bench = drawn("frontier, loops"), drawn("bench, loops")
    looping, steady = ([line for line in points(axes) if line.get_marker() != "x"] for axes in frontier.axes)
    assert {to_hex(line.get_markerfacecolor()) for line in looping} == {"#ffffff"}
    assert "#ffffff" not in {to_hex(line.get_markerfacecolor()) for line in steady}
    assert any("hollow" in text.get_text() for text in frontier.legends[0].get_texts())
    assert not bench.axes[0].patches and bench.axes[0].texts and len(bench.axes[1].patches) == 9


@pytest.mark.core
def test_plain_decoding_stands_on_the_line_of_its_own_speed():
    axes = drawn("frontier, six methods").axes[0]
    (plain,) = [line for line in axes.lines if line.get_marker() == "x"]
    assert (plain.get_xdata()[0], plain.get_ydata()[0]) == (25.0, 1.0)
    slopes = [line.get_ydata()[-1] / line.get_xdata()[-1] for line in axes.lines if line.get_linestyle() == ":"]
    assert slopes[1] == pytest.approx(1 / 25) and slopes[3] == pytest.approx(2 / 25)


def test_an_unstable_machine_claims_nothing():
    case = next(name for name in CASES if name.startswith("bench, six"))
    measured = SETTINGS["six methods"]()
    noisy = replace(measured, results=[replace(row, plain_ratios=[0.03, 1.0, 30.0, 1.0]) for row in measured.results])
    bench, frontier = figures.bench_figure(noisy), figures.frontier_figure(noisy)
    assert drawn(case).axes[0].patches and not bench.axes[0].patches and "unstable" in bench.axes[0].texts[0].get_text()
    assert not any(line.get_linestyle() == ":" for line in frontier.axes[0].lines)
    assert not any(text.get_text().endswith("x") for text in frontier.axes[0].texts)
