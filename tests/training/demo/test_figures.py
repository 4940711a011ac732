"""The figures can be read: every word lies inside them, none on another one, and every marker inside its axes."""

from dataclasses import replace
from itertools import combinations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from tests.internals import MODES, HeadReport
from tests.internals import demo_figures as figures
from tokenahead.model_cards import DecodingResult, MeasuredResults

MEASURED = {"ff": (2.22, 4.8, 2.39, 6.2), "cp": (2.65, 7.2, 2.83, 8.2), "hmm": (2.47, 8, 2.55, 7.3)}
SPREAD = {"ff": (1, 1, 4, 3), "cp": (4, 41, 3, 3.5), "hmm": (7, 81, 2, 4), "btree": (10, 121, 1, 4.5)}
EQUAL = dict.fromkeys(("ff", "cp", "hmm", "btree"), (2, 5, 2, 5))
TEXTS = {"dataset_name": "x", "dataset_description": "x", "hardware": "x", "dtype": "x", "command": "x"}
WORDS = {"library_version": "0"} | TEXTS


def decoding(mode, per_call: float, ms: float, shares=(), expected=()) -> DecodingResult:
    return DecodingResult(
        name=mode.name,
        do_sample=mode.is_sampled,
        backbone_calls=1000,
        new_tokens=int(1000 * per_call),
        seconds=ms,
        plain_seconds=3.0 * per_call,
        accepted_by_position=list(shares),
        expected_by_position=list(expected),
    )


def heads(table) -> list[HeadReport]:
    reports = []
    for name, (greedy, ms, drawn, drawn_ms) in table.items():
        points = (greedy, ms), ((greedy + drawn) / 2, (ms + drawn_ms) / 2), (drawn, drawn_ms)
        rows = [decoding(mode, *point) for mode, point in zip(MODES, points)]
        reports.append(HeadReport(name, 8, 1 if name == "ff" else 8, 1000, MeasuredResults(results=rows, **WORDS)))
    return reports


def drafts(*shares, expected=(), count: int = 1) -> list[HeadReport]:
    rows = [decoding(mode, 2, 3, values, expected) for mode, values in zip(MODES, shares)]
    measured = MeasuredResults(results=rows, **WORDS)
    return [HeadReport(name, 4, rank, 9, measured) for name, rank in (("ff", 1), ("hmm", 16), ("btree", 16))[:count]]


def bounds(box) -> tuple[float, float, float, float]:
    return box.x0, box.y0, box.x1, box.y1


def is_inside(inner, outer, slack: float = 1.0) -> bool:
    (x0, y0, x1, y1), (left, low, right, high) = bounds(inner), bounds(outer)
    return left - slack <= x0 and low - slack <= y0 and x1 <= right + slack and y1 <= high + slack


def markers(figure) -> list:
    """Extents of every marker in the axes."""
    found = []
    for axes, line in ((panel, line) for panel in figure.axes for line in panel.lines):
        if line.get_marker() not in ("None", None, ""):
            radius = (line.get_markersize() + line.get_markeredgewidth()) / 2 * figure.dpi / 72
            found += [
                (x - radius, y - radius, x + radius, y + radius) for x, y in axes.transData.transform(line.get_xydata())
            ]
    return found


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


def loops() -> list[HeadReport]:
    reports = heads(SPREAD)
    for report in reports:
        report.measured.results[0] = replace(report.measured.results[0], repeated_share=0.7)
    return reports


CASES = {
    "loops": lambda: figures.speed_figure(loops()),
    "measured": lambda: figures.speed_figure(heads(MEASURED)),
    "spread": lambda: figures.speed_figure(heads(SPREAD)),
    "equal": lambda: figures.speed_figure(heads(EQUAL)),
    "acceptance": lambda: figures.acceptance_figure(drafts([1.0, 0.5, 0.0], [1.0, 1.0, 0.1], [0.9, 0.5, 0.2])),
    "three heads": lambda: figures.acceptance_figure(
        drafts([1.0, 0.5], [1.0, 0.1], [0.9, 0.5], expected=[0.9 / k for k in range(1, 16)], count=3)
    ),
    "one position": lambda: figures.acceptance_figure(drafts([1.0])),
    "no drafts": lambda: figures.acceptance_figure(drafts([])),
}


@pytest.mark.parametrize("case", CASES)
def test_words_lie_inside_the_picture_and_not_on_each_other(case):
    figure = CASES[case]()
    FigureCanvasAgg(figure).draw()
    found = words(figure)
    assert len(found) > 6
    for text, box in found:
        assert is_inside(box, figure.bbox), text
    for (one, box), (other, second) in combinations(found, 2):
        assert not box.overlaps(second), (one, other)


@pytest.mark.parametrize("case", CASES)
def test_markers_are_drawn_whole(case):
    figure = CASES[case]()
    FigureCanvasAgg(figure).draw()
    found, frames = markers(figure), [bounds(axes.bbox) for axes in figure.axes]
    assert found or case == "no drafts"
    for left, low, right, high in found:
        assert any(x0 <= left and y0 <= low and right <= x1 and high <= y1 for x0, y0, x1, y1 in frames)


def test_a_family_has_one_colour_and_the_way_of_decoding_is_the_fill():
    axes = figures.speed_figure(heads(SPREAD)).axes[0]
    points = [line for line in axes.lines if line.get_linestyle() == "None" and line.get_marker() != "x"]
    colours = [to_hex(line.get_color()) for line in points]
    assert len(points) == 12 and colours[::3] == colours[1::3] == colours[2::3] and len(set(colours)) == 4
    assert [line.get_fillstyle() for line in points[:3]] == ["full", "left", "bottom"]
    assert [to_hex(line.get_markerfacecolor()) for line in points[:3]] == [colours[0]] * 3


def test_text_that_repeats_itself_is_hollow_and_the_legend_says_why():
    reports = loops()
    figure = figures.speed_figure(reports)
    points = [line for line in figure.axes[0].lines if line.get_linestyle() == "None" and line.get_marker() != "x"]
    assert {to_hex(line.get_markerfacecolor()) for line in points[::3]} == {"#ffffff"}
    assert "#ffffff" not in {to_hex(line.get_markerfacecolor()) for line in points[1::3] + points[2::3]}
    assert any("hollow: greedy" in text.get_text() for text in figure.legends[0].get_texts())
    drawn = figures.acceptance_figure(reports).axes[0].lines
    assert all(to_hex(line.get_markerfacecolor()) == "#ffffff" for line in drawn[::2])


def test_plain_decoding_stands_at_one_byte_per_call():
    axes = figures.speed_figure(heads(EQUAL)).axes[0]
    (plain,) = [line for line in axes.lines if line.get_marker() == "x"]
    assert plain.get_ydata()[0] == 1.0 and plain.get_xdata()[0] == pytest.approx(3.0)


def test_a_panel_per_way_of_decoding_with_what_was_measured_and_what_was_expected():
    figure = figures.acceptance_figure(drafts([0.75, 0.5], [0.5, 0.25], [0.4], expected=[0.5, 0.4, 0.3], count=2))
    assert [axes.get_title() for axes in figure.axes] == [mode.name for mode in MODES]
    lines = figure.axes[0].lines
    assert [list(line.get_ydata()) for line in lines] == [[75.0, 50.0], [50.0, 40.0, 30.0]] * 2
    assert [to_hex(line.get_color()) for line in lines[:2]] != [to_hex(line.get_color()) for line in lines[2:]]


def test_figures_are_written_as_png_and_leave_nothing_else(tmp_path):
    figures.save_figures(tmp_path, drafts([0.75, 0.5], [0.5]))
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == ["acceptance.png", "speed.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
