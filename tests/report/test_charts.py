"""Scales hold for whatever is drawn: values that agree up to rounding, very large and very small ones."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bert_tasks.outputs.sections import Axis, Chart, Line
from bert_tasks.report.charts import Plot
from bert_tasks.report.page import page_environment


def drawn(chart: Chart) -> str:
    return str(page_environment().get_template("charts.html").module.draw(chart))


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.8, 0.8), (0.8, 0.8000000000000002), (-1e-13, 1e-13), (0.0, 1e-300), (1e20, 1e20), (1e9, 1e9 + 1e-6)],
)
def test_values_that_agree_up_to_rounding_are_in_the_middle(low, high):
    around = Axis.around("score", (low, high))
    assert around.low < low <= high < around.high
    axis = Axis(name="score", low=low, high=high)
    assert axis.low < low <= high < axis.high
    assert len(axis.ticks) == len(set(axis.ticks)) > 1
    line = Line(name="one", points=((low, low), (high, high)))
    drawn(Chart(title="", description="equal", x=axis, y=axis, lines=(line,)))


@pytest.mark.parametrize(("low", "high"), [(0.81, 0.93), (-3.0, 12.5), (0.5, 0.5 + 1e-8), (1e15, 3e15)])
def test_ticks_are_few_round_steps_that_hold_the_values(low, high):
    axis = Axis.around("score", (high, low))
    assert axis.low <= low < high <= axis.high
    assert 2 <= len(axis.ticks) <= 8


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.floats(0, 1000), st.floats(-1e6, 1e6)), min_size=1, max_size=20),
    st.floats(0, 1),
    st.booleans(),
)
def test_the_name_of_a_rule_is_above_all_that_is_drawn(points, share, is_round):
    """Whatever the lines do, and wherever the rule is: also where a line runs along the top of the plot."""
    across, up = ([values[axis] for values in points] for axis in (0, 1))
    chart = Chart(
        title="",
        description="",
        x=Axis(name="step", low=0.0, high=max(across)),
        y=Axis.around("score", up) if is_round else Axis(name="score", low=min(up), high=max(up)),
        lines=(Line(name="one", points=points),),
        rule=(share * max(across), "best model"),
    )
    svg = drawn(chart)
    name = re.search(r'class="note" x="([-\d.]+)" y="([-\d.]+)" text-anchor="(start|end)"', svg)
    x, baseline = float(name[1]), float(name[2])
    marks = [float(y) for y in re.findall(r'cy="([-\d.]+)"', svg)]
    assert baseline + 4 < min(marks) - 3  # descenders of 4, marks with a radius of 3
    assert baseline > 11  # and it is inside the picture
    assert 80 < x < Plot.width if name[3] == "end" else 0 < x < Plot.width - 80


@given(st.lists(st.floats(-8, 4), min_size=1, max_size=20), st.sampled_from(["linear", "whole"]))
@example([1000.2, 1002.4], "linear")
@example([2.0, 2.000012], "linear")
@example([0.0, 0.00002], "linear")
@example([3.0, 400_000.0], "linear")
def test_every_scale_holds_its_values_and_has_few_ticks_with_different_names(values, scale):
    axis = Axis.around("rate", [float(round(value)) for value in values] if scale == "whole" else values, scale)
    assert axis.low - 1e-9 <= min(axis.ticks) <= max(axis.ticks) <= axis.high + 1e-9
    assert axis.low <= min(values) + 0.5 * (scale == "whole") + 1e-9
    assert axis.high >= max(values) - 0.5 * (scale == "whole") - 1e-9
    assert 2 <= len(axis.ticks) <= 8
    named = [axis.tick_text(tick) for tick in axis.ticks]
    assert len(named) == len(set(named))
    shown = [float(name.replace(",", "").replace("\N{MINUS SIGN}", "-")) for name in named]
    assert shown == pytest.approx(axis.ticks, rel=0.02, abs=1e-9)
    if scale == "whole":
        assert all(tick == round(tick) for tick in axis.ticks)
        assert not any("." in name for name in named)
