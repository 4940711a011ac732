"""The figures of the commands: nothing lies over a legend's text, lines are told apart, axes count whole numbers."""

import io
import math

import pytest

from tests.benchmark_modules import analysis_figure
from tests.internals import evaluation_figure, learning_figure


def figures_of(depths, loss=2.0):
    rows = [{"depth": depth, "top_1": 0.5, "top_5": 0.8, "loss": loss} for depth in range(2, 2 + depths)]
    return {"depths": rows, "held_out": {"accepted_by_position": [0.4] * depths}}


def history_of(depths, steps=3):
    return [
        {"step": step, **{f"loss_head_{depth}": 1.0 + depth for depth in range(1, depths + 1)}} for step in range(steps)
    ]


def ticks(axes):
    low, high = axes.get_xlim()
    return [tick for tick in axes.get_xticks() if low <= tick <= high]


def test_a_run_that_ended_before_its_first_entry_has_a_picture_and_no_warning(recwarn):
    learning_figure([{"step": 1, "train_runtime": 1.0}])
    assert [str(each.message) for each in recwarn] == []


@pytest.mark.parametrize(
    "figure",
    [
        lambda: analysis_figure({"depths": [{"depth": 1}], "layers": []}),
        lambda: learning_figure(history_of(40)),
    ],
    ids=["nothing known", "many depths"],
)
def test_figures_are_drawn_without_warnings(figure, recwarn):
    figure().savefig(io.BytesIO(), format="png")
    assert [str(each.message) for each in recwarn] == []


@pytest.mark.parametrize("depths", [1, 4])
def test_one_axis_lies_in_each_panel_of_an_evaluation(depths):
    """A second axis is drawn over the first one, its legend included."""
    axes = evaluation_figure(figures_of(depths)).axes
    assert len(axes) == 3
    assert len({one.get_position().x0 for one in axes}) == len(axes)


@pytest.mark.parametrize(
    "figure",
    [
        lambda: evaluation_figure(figures_of(1)),
        lambda: learning_figure([{"step": 3, "loss_head_1": 1.0, "eval_expected_accepted": 0.5}]),
        lambda: analysis_figure({"depths": [{"depth": 2, "head": 1.0}], "layers": [0.5]}),
    ],
    ids=["evaluation", "learning", "analysis"],
)
def test_one_value_alone_stands_at_a_whole_number(figure):
    drawn = figure()
    assert all(tick == int(tick) for axes in drawn.axes for tick in ticks(axes))
    assert all(line.get_marker() not in ("None", "") for line in drawn.axes[-1].get_lines())


def test_marginals_that_leave_much_out_are_hollow():
    depths = [{"depth": depth, "marginal": 1.0 + depth, "missing_mass": 0.06 * (depth - 1)} for depth in (1, 2, 3)]
    hollow = analysis_figure({"depths": depths, "layers": []}).axes[0].get_lines()[-1]
    assert list(hollow.get_xdata()) == [3] and hollow.get_markerfacecolor() == "white"


def test_every_depth_has_a_colour_of_its_own():
    lines = learning_figure(history_of(16)).axes[0].get_lines()
    assert len({str(line.get_color()) for line in lines}) == 16


def test_a_legend_of_many_lines_stands_beside_them():
    figure = learning_figure(history_of(16))
    figure.canvas.draw()
    axes = figure.axes[0]
    assert axes.get_legend().get_window_extent().x0 >= axes.get_window_extent().x1


@pytest.mark.parametrize("loss", [2.0, 0.0, math.inf])
def test_markers_have_room_below_the_top(loss):
    low, high = evaluation_figure(figures_of(3, loss)).axes[1].get_ylim()
    assert low == 0 and math.isfinite(high) and (high > loss or math.isinf(loss))
