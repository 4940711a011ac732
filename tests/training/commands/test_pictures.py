"""The figure of `benchmarks/analyze.py`: no warnings, axes that count whole numbers, hollow markers."""

import io

import pytest

from tests.benchmark_modules import analysis_figure


def test_a_figure_is_drawn_without_warnings(recwarn):
    analysis_figure({"depths": [{"depth": 1}], "layers": []}).savefig(io.BytesIO(), format="png")
    assert [str(each.message) for each in recwarn] == []


def test_one_value_alone_stands_at_a_whole_number():
    drawn = analysis_figure({"depths": [{"depth": 2, "head": 1.0}], "layers": [0.5]})
    for axes in drawn.axes:
        low, high = axes.get_xlim()
        assert all(tick == int(tick) for tick in axes.get_xticks() if low <= tick <= high)
    assert all(line.get_marker() not in ("None", "") for line in drawn.axes[-1].get_lines())


@pytest.mark.core
def test_marginals_that_leave_much_out_are_hollow():
    depths = [{"depth": depth, "marginal": 1.0 + depth, "missing_mass": 0.06 * (depth - 1)} for depth in (1, 2, 3)]
    hollow = analysis_figure({"depths": depths, "layers": []}).axes[0].get_lines()[-1]
    assert list(hollow.get_xdata()) == [3] and hollow.get_markerfacecolor() == "white"
