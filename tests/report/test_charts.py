"""Scales hold for whatever is drawn: values that agree up to rounding, very large and very small ones."""

import pytest

from bert_tasks.report.charts import Axes, Line, line_chart, nice, ticks


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.8, 0.8), (0.8, 0.8000000000000002), (-1e-13, 1e-13), (0.0, 1e-300), (1e20, 1e20), (1e9, 1e9 + 1e-6)],
)
def test_values_that_agree_up_to_rounding_stand_in_the_middle(low, high):
    start, end = nice(low, high)
    assert start < low <= high < end
    axes = Axes(x="step", y="score", x_range=(low, high), y_range=(low, high))
    assert axes.x_range[0] < low <= high < axes.x_range[1]
    assert len(axes.y_ticks) == len(set(axes.y_ticks)) > 1
    line_chart([Line(name="one", points=((low, low), (high, high)))], axes, label="equal")


@pytest.mark.parametrize(("low", "high"), [(0.81, 0.93), (-3.0, 12.5), (0.5, 0.5 + 1e-8), (1e15, 3e15)])
def test_ticks_are_few_round_steps_that_hold_the_values(low, high):
    start, end = nice(low, high)
    assert start <= low < high <= end
    assert 2 <= len(ticks(start, end, most=6)) <= 8
