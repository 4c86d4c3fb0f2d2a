"""Scales hold for whatever is drawn: values that agree up to rounding, very large and very small ones."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_tasks.report.charts import (
    WIDTH,
    Axes,
    Line,
    line_chart,
    nice,
    ticks,
)


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


@given(
    st.lists(st.tuples(st.floats(0, 1000), st.floats(-1e6, 1e6)), min_size=1, max_size=20),
    st.floats(0, 1),
    st.booleans(),
)
def test_the_name_of_a_rule_is_above_all_that_is_drawn(points, share, nice_range):
    """Whatever the lines do, and wherever the rule is: also where a line runs along the top of the plot."""
    lows, highs = (
        [min(values) for values in zip(*points, strict=True)],
        [max(values) for values in zip(*points, strict=True)],
    )
    y_range = nice(lows[1], highs[1]) if nice_range else (lows[1], highs[1])
    axes = Axes(x="step", y="score", x_range=(0.0, highs[0]), y_range=y_range)
    svg = line_chart([Line(name="one", points=points)], axes, label="", rule=(share * highs[0], "best model"))
    name = re.search(r'class="note" x="([-\d.]+)" y="([-\d.]+)" text-anchor="(start|end)"', svg)
    x, baseline = float(name[1]), float(name[2])
    drawn = [float(y) for y in re.findall(r'cy="([-\d.]+)"', svg)]
    assert baseline + 4 < min(drawn) - 3  # descenders of 4, marks with a radius of 3
    assert baseline > 11  # and it is inside the picture
    assert 80 < x < WIDTH if name[3] == "end" else 0 < x < WIDTH - 80
