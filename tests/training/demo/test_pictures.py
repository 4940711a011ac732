"""The pictures can be read: every word lies inside them, none on another one, and every marker inside its axes."""

from itertools import combinations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from tokenahead.model_cards import DecodingResult
from tokenahead.training.demo import pictures
from tokenahead.training.demo.head_comparison import HeadFigures
from tokenahead.training.evaluation import GREEDY, Comparison, sampled

MEASURED = {"ff": (2.22, 4.8, 2.39, 6.2), "cp": (2.65, 7.2, 2.83, 8.2), "hmm": (2.47, 8, 2.55, 7.3)}
SPREAD = {"ff": (1, 1, 4, 3), "cp": (4, 41, 3, 3.5), "hmm": (7, 81, 2, 4), "btree": (10, 121, 1, 4.5)}
EQUAL = dict.fromkeys(("ff", "cp", "hmm", "btree"), (2, 5, 2, 5))


def decoding(per_call: float, ms: float) -> DecodingResult:
    return DecodingResult(
        name="x",
        do_sample=False,
        backbone_calls=1000,
        new_tokens=int(1000 * per_call),
        seconds=ms,
        plain_seconds=5.0,
        identical=None,
    )


def heads(table) -> list[HeadFigures]:
    return [
        HeadFigures(name, 8, 8, 1000, 19.0, decoding(greedy, ms), decoding(drawn, drawn_ms))
        for name, (greedy, ms, drawn, drawn_ms) in table.items()
    ]


def comparisons(*shares) -> list[Comparison]:
    modes = (GREEDY, sampled(0.7), sampled(1.0))
    return [Comparison(mode, decoding(2, 3), [], list(values)) for mode, values in zip(modes, shares)]


def bounds(box) -> tuple[float, float, float, float]:
    return box.x0, box.y0, box.x1, box.y1


def is_inside(inner, outer, slack: float = 1.0) -> bool:
    (x0, y0, x1, y1), (left, low, right, high) = bounds(inner), bounds(outer)
    return left - slack <= x0 and low - slack <= y0 and x1 <= right + slack and y1 <= high + slack


def markers(figure) -> list:
    """Extents of every marker in the axes."""
    (axes,) = figure.axes
    found = []
    for line in axes.lines:
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
    (axes,) = figure.axes
    hidden = set()  # ticks beyond the limits exist and are not drawn
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        hidden |= {tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    return [(text.get_text(), text.get_window_extent(renderer)) for text in texts if text not in hidden]


CASES = {
    "measured": lambda: pictures.heads_figure(heads(MEASURED)),
    "spread": lambda: pictures.heads_figure(heads(SPREAD)),
    "equal": lambda: pictures.heads_figure(heads(EQUAL)),
    "acceptance": lambda: pictures.acceptance_figure(comparisons([1.0, 0.5, 0.0], [1.0, 1.0, 0.1], [0.9, 0.5, 0.2])),
    "one position": lambda: pictures.acceptance_figure(comparisons([1.0])),
    "no drafts": lambda: pictures.acceptance_figure(comparisons([])),
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
    (x0, y0, x1, y1), found = bounds(figure.axes[0].bbox), markers(figure)
    assert found or case == "no drafts"
    assert all(x0 <= left and y0 <= low and right <= x1 and high <= y1 for left, low, right, high in found)


def test_a_family_has_one_colour_filled_for_greedy_and_hollow_for_samples():
    axes = pictures.heads_figure(heads(SPREAD)).axes[0]
    points = [line for line in axes.lines if line.get_linestyle() == "None"]
    colours = [to_hex(line.get_color()) for line in points]
    assert len(points) == 8 and colours[::2] == colours[1::2] and len(set(colours)) == 4
    faces = [to_hex(line.get_markerfacecolor()) for line in points]
    assert faces[::2] == colours[::2] and set(faces[1::2]) == {"#ffffff"}


def test_a_picture_is_written_as_a_png_and_leaves_nothing_else(tmp_path):
    figure = pictures.acceptance_figure(comparisons([0.75, 0.5], [0.5]))
    path = pictures.save_picture(figure, tmp_path / "a.png")
    assert path == tmp_path / "a.png" and path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]
    assert [len(line.get_xdata()) for line in figure.axes[0].lines] == [2, 1]
