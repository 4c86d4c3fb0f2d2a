"""The charts of one validation set's results: calibration, regression, the threshold of "no answer".

Owns what they show and say. Must not know tasks or how a page is laid out.
"""

from math import sqrt

from bert_tasks.report.charts import Axes, Line, line_chart, nice, point_chart
from bert_tasks.report.curves import Chart
from bert_tasks.report.results import Results

_UNIT = (0.0, 1.0)


def calibration_chart(results: Results) -> Chart | None:
    """How often answers of each confidence are right; a point's area is the number of answers."""
    found = results.calibration
    if found is None:
        return None
    most = max(one.count for one in found.bins)
    points = [(one.confidence, one.accuracy, 3.5 + 7 * sqrt(one.count / most)) for one in found.bins]
    happens = "is true" if results.sure_of == "label" else "is right"
    said = "; ".join(f"at {one.confidence:.2f} {one.accuracy:.2f} of {one.count}" for one in found.bins)
    svg = point_chart(
        points,
        Axes(x=f"confidence in the {results.sure_of}", y=f"share that {happens}", x_range=_UNIT, y_range=_UNIT),
        label=f"Calibration, expected calibration error {found.ece:.3f}. Share that {happens}: {said}.",
        line=Line(name="perfect", points=((0.0, 0.0), (1.0, 1.0)), style=7, marked=False),
    )
    return Chart(svg=svg, legend=(("perfectly calibrated", 7),), caption="Calibration")


def scatter_chart(results: Results) -> Chart:
    """Predicted against true numbers."""
    both = [number for pair in results.pairs for number in pair]
    low, high = nice(min(both), max(both))
    svg = point_chart(
        [(true, guess, 3.0) for true, guess in results.pairs],
        Axes(x="true", y="predicted", x_range=(low, high), y_range=(low, high)),
        label=f"Predicted against true numbers of {len(results.pairs)} rows.",
        line=Line(name="equal", points=((low, low), (high, high)), style=7, marked=False),
    )
    return Chart(svg=svg, legend=(("predicted equals true", 7),), caption="Predicted against true")


def residual_chart(results: Results) -> Chart:
    """What is predicted too much or too little, over the prediction."""
    gaps = [(guess, guess - true) for true, guess in results.pairs]
    x_range = nice(min(x for x, _ in gaps), max(x for x, _ in gaps))
    widest = max(abs(y) for _, y in gaps)
    svg = point_chart(
        [(x, y, 3.0) for x, y in gaps],
        Axes(x="predicted", y="predicted minus true", x_range=x_range, y_range=nice(-widest, widest)),
        label=f"Residuals of {len(gaps)} rows, at most {widest:.3g} away.",
        line=Line(name="none", points=((x_range[0], 0.0), (x_range[1], 0.0)), style=7, marked=False),
    )
    return Chart(svg=svg, legend=(("no error", 7),), caption="Residuals")


def threshold_chart(results: Results) -> Chart | None:
    """Scores by the null odds above which "no answer" is given."""
    curve = results.curve
    if curve is None:
        return None
    exact = [(threshold, score) for threshold, score, _ in curve.points]
    f1 = [(threshold, score) for threshold, _, score in curve.points]
    values = [score for _, score in exact + f1]
    ends = [curve.points[0][0], curve.points[-1][0], curve.chosen]
    best = max(curve.points, key=lambda point: point[2])
    svg = line_chart(
        [
            Line(name="F1", points=f1, style=0, marked=False),
            Line(name="exact match", points=exact, style=1, marked=False),
        ],
        Axes(
            x="threshold of the null odds",
            y="score",
            x_range=(min(ends), max(ends)),
            y_range=nice(min(values), max(values)),
        ),
        label=f"F1 and exact match by the threshold of the null odds; the best F1, {best[2]:.1f}, is at {best[0]:.2f}.",
        rule=(curve.chosen, f"chosen: {curve.chosen:.2f}"),
    )
    return Chart(svg=svg, legend=(("F1", 0), ("exact match", 1)), caption="Threshold of “no answer”")
