"""The charts of a run, and the positions of a chart's values in its picture.

The charts are learning curves and calibration. Each says in words what it shows, for readers who do not see it. The
SVG itself is in ``templates/charts.html``.
"""

import math
from collections.abc import Iterable, Sequence

from markupsafe import Markup

from bert_tasks.metrics.calibration import Calibration
from bert_tasks.metrics.tables import LOSS, metric_key, metrics_by_set, split_key
from bert_tasks.model.heads import curves, metric_table
from bert_tasks.outputs.sections import Axis, Chart, Line, Point
from bert_tasks.report.collect import Run
from bert_tasks.report.statistics import Estimate

STYLES = 8  # number of line styles
# The names of metrics whose key is an abbreviation.
_METRIC_NAMES = {
    "rmse": "root mean squared error",
    "exact": "exact match",
    "spearmanr": "Spearman",
    "pearson": "Pearson",
    "map": "mean average precision",
    "mrr": "mean reciprocal rank",
    "ndcg@10": "nDCG@10",
}


class Plot:
    """The size of a chart's picture in pixels, and the place of a value in it."""

    width, height = 480, 290
    left, top, right, bottom = 62, 24, width - 14, height - 44  # above the plot there is room for one line of text
    most_marked = 40  # lines with at most this number of points show each of them

    @classmethod
    def across(cls, x: float, axis: Axis) -> float:
        """Returns the distance from the left."""
        return cls.left + (x - axis.low) / (axis.high - axis.low) * (cls.right - cls.left)

    @classmethod
    def up(cls, y: float, axis: Axis) -> float:
        """Returns the distance from the top, from which SVG measures."""
        return cls.bottom - (y - axis.low) / (axis.high - axis.low) * (cls.bottom - cls.top)

    @classmethod
    def path(cls, points: Sequence[Point], chart: Chart) -> Markup:
        """Returns the path of a line, with a gap at points without a value."""
        steps = []
        pen = "M"  # the commands of an SVG path: M moves to a point, and L draws a line to it
        for x, y in points:
            if y is None:
                pen = "M"
                continue
            steps.append(f"{pen}{coordinate(cls.across(x, chart.x))} {coordinate(cls.up(y, chart.y))}")
            pen = "L"
        return Markup("".join(steps))


class Strip(Plot):
    """The size in pixels of the picture of an interval, which has an axis but no height to speak of."""

    width, height = 180, 16
    left, right = 18, width - 18  # so that the numbers at both ends of the axis fit

    @classmethod
    def scale(cls, axis: Axis) -> Markup:
        """Returns the path of the axis, a horizontal line with a short vertical one for each tick."""
        middle = cls.height // 2
        steps = [f"M{cls.left} {middle}H{cls.right}"]
        for tick in axis.ticks:
            steps.append(f"M{coordinate(cls.across(tick, axis))} {middle - 4}V{middle + 4}")
        return Markup("".join(steps))

    @classmethod
    def numbered_ticks(cls, axis: Axis) -> list[float]:
        """Returns the ticks that have a number. Of many ticks it is every other one, because there is no more room."""
        ticks = axis.ticks
        if len(ticks) < 5:
            return ticks
        return ticks[::2]


def interval_axis(estimates: Iterable[Estimate]) -> Axis | None:
    """Returns an axis from just below the lowest interval to just above the highest, or None without any interval.

    All scores of a model may be above 0.9, and on an axis from 0 to 1 their intervals could not be told apart.
    """
    values: list[float] = []
    has_interval = False
    for one in estimates:
        if one.value is not None and one.low is not None and one.high is not None:
            values += [one.low, one.value, one.high]
            has_interval = has_interval or one.low < one.high
    if not has_interval:
        return None
    return Axis.around("", values)


def coordinate(value: float) -> str:
    """Formats a number of the picture with one decimal, which keeps the file small."""
    return f"{value:.1f}".removesuffix(".0")


def overall_metrics(run: Run) -> dict[str, float | None]:
    """Returns each recorded metric once, without metrics of single classes."""
    if run.tasks is None:
        return dict(run.metrics)
    # metrics.json has null for a number that is not finite, and tables of metrics have NaN.
    numbers = {}
    for key, value in run.metrics.items():
        numbers[key] = math.nan if value is None else value
    shown = set()
    for name, metrics in metrics_by_set(numbers, run.sets).items():
        for metric in metric_table(run.tasks, metrics).overall:
            shown.add(metric_key(name, metric))
    return {key: value for key, value in run.metrics.items() if key in shown}


def drawn_metrics(run: Run) -> list[str]:
    """Returns the keys of the metrics to draw, with the best model's metric first.

    Several validation sets have one metric each, besides that of the best model. A task without usual curves has its
    first three scores.
    """
    best_set, best = run.best_metric
    keys: list[str] = []
    if best in run.metrics_of(best_set) and best != LOSS:  # the loss has a chart of its own
        keys.append(metric_key(best_set, best))
    candidates: list[str] = []
    drawn: Sequence[str] = []
    if run.tasks is not None:
        drawn = curves(run.tasks)
    most = STYLES - 1 if len(run.sets) == 1 else 1  # of each set
    for name in run.sets:
        scores = [metric for metric in run.metrics_of(name) if metric not in run.metadata.metrics.lower_is_better]
        usual = [metric for metric in drawn if metric in scores]
        keys += [metric_key(name, metric) for metric in usual[:most]]
        candidates += [metric_key(name, metric) for metric in scores]
    if not keys:
        keys = candidates[:3]
    return list(dict.fromkeys(keys))


def loss_chart(run: Run) -> Chart | None:
    """Draws the training loss with its terms, and the validation loss."""
    steps = [event for event in run.events if event.event == "step"]
    lines = []
    if steps:
        losses = [_point(event.step, event.loss) for event in steps]
        lines.append(Line(name="training", points=losses, style=0, marked=False))
    terms: dict[str, None] = {}  # in the order in which they first occur
    for event in steps:
        terms |= dict.fromkeys(event.terms)
    for term in terms:
        points = [_point(event.step, event.terms.get(term)) for event in steps]
        lines.append(Line(name=f"training, {term.replace('-', ' ')}", points=points, style=len(lines), marked=False))
    for style, name in enumerate(run.sets, start=max(1, len(lines))):
        points = _points(run, metric_key(name, LOSS))
        if any(value is not None for _, value in points):
            lines.append(Line(name=f"validation {name}".strip(), points=points, style=style))
    return _chart(lines, run, "loss", "Loss", from_zero=True)


def metric_chart(run: Run) -> Chart | None:
    """Draws the metrics of ``drawn_metrics`` at the evaluations."""
    names = drawn_metrics(run)
    lines = []
    for style, name in enumerate(names):
        lines.append(Line(name=display_name(name, run.sets), points=_points(run, name), style=style))
    return _chart(lines, run, "score", "Metrics on the validation rows", from_zero=False)


def runs_chart(runs: Sequence[Run], key: str) -> Chart | None:
    """Draws one metric of several runs on the same validation sets."""
    lines = [Line(name=run.name, points=_points(run, key), style=style) for style, run in enumerate(runs)]
    sets = runs[0].sets
    name, metric = split_key(key, sets)
    title = display_name(key, sets)
    if not name:
        title = f"{title} on the validation rows"
    unit = "loss" if metric == LOSS else "score"
    return _chart(lines, None, unit, title, from_zero=False)


def display_name(key: str, sets: Sequence[str]) -> str:
    """Returns a key in words, for example "overall F1 on dev_ood"."""
    name, metric = split_key(key, sets)
    if not name:
        return spoken(metric)
    return f"{spoken(metric)} on {name}"


def spoken(metric: str) -> str:
    """Returns a metric in words, for example "overall F1", without a set's name."""
    if metric in _METRIC_NAMES:
        return _METRIC_NAMES[metric]
    return metric.replace("_", " ").replace("f1", "F1").replace("matthews", "Matthews")


def _chart(lines: Sequence[Line], run: Run | None, unit: str, title: str, *, from_zero: bool) -> Chart | None:
    """Draws lines over training steps, with a mark at ``run``'s best model. It returns None if no line has a value."""
    values: list[float] = []
    drawn: dict[str, list[float]] = {}
    last = 0.0
    for line in lines:
        drawn[line.name] = [y for _, y in line.points if y is not None]
        values += drawn[line.name]
        last = max([last, *(x for x, _ in line.points)])
    if not values:
        return None
    ends = []
    for name, line_values in drawn.items():
        if line_values:
            ends.append(f"{name} from {line_values[0]:.3g} to {line_values[-1]:.3g}")
    rule = None
    if run is not None and run.summary is not None:
        rule = (float(run.summary.best_step), "best model")
    # From zero, the height of a loss shows how much of it is left. Scores would lie on one another.
    shown_values = [0.0, *values] if from_zero else values
    return Chart(
        title=title,
        description=f"{title} by step, with {', '.join(ends)}.",
        x=Axis(name="step", low=0.0, high=float(last), scale="whole"),
        y=Axis.around(unit, shown_values),
        lines=tuple(lines),
        rule=rule,
    )


def _points(run: Run, metric: str) -> list[Point]:
    """Returns a metric at each evaluation."""
    return [_point(event.step, event.metrics.get(metric)) for event in run.evaluations]


def _point(step: int, value: float | None) -> Point:
    """Returns a point, which has no value if there is no finite number."""
    if value is None or not math.isfinite(value):
        return step, None
    return step, value


def calibration_chart(
    calibration: Calibration, confidence_in: str, *, uncalibrated: Calibration | None = None, fitted_on: str = ""
) -> Chart:
    """Draws a reliability diagram, which is the accuracy of predictions by their confidence.

    A calibrated model lies on the diagonal: of the predictions with a confidence of 0.8, 80 % are correct.

    Args:
        calibration: The reliability diagram.
        confidence_in: The noun that the confidences refer to.
        uncalibrated: The diagram without the fitted temperature, if there is one.
        fitted_on: The rows that the temperature was fitted on.
    """
    most = max(bin.count for bin in calibration.bins)
    shares = []
    points = []
    for bin in calibration.bins:
        shares.append(f"{bin.accuracy:.2f} of {bin.count} at {bin.confidence:.2f}")
        # The root makes the area of a point, and not its radius, grow with the number of its predictions.
        radius = 3.5 + 7 * math.sqrt(bin.count / most)
        points.append((bin.confidence, bin.accuracy, radius))
    lines = [Line(name="perfectly calibrated", points=((0.0, 0.0), (1.0, 1.0)), style=7, marked=False)]
    before = ""
    if uncalibrated is not None:
        before_points = tuple((bin.confidence, bin.accuracy) for bin in uncalibrated.bins)
        lines.append(Line(name="without the temperature", points=before_points, style=1))
        before = f" Without the temperature, which was fitted {fitted_on}, the error is {uncalibrated.ece:.3f}."
    return Chart(
        title="Calibration",
        description=f"Calibration, expected calibration error {calibration.ece:.3f}. Correct are {', '.join(shares)}.",
        x=Axis(name=f"confidence in the {confidence_in}", low=0.0, high=1.0),
        y=Axis(name="share that is correct", low=0.0, high=1.0),
        lines=tuple(lines),
        points=tuple(points),
        note=(
            f"Expected calibration error {calibration.ece:.3f}, the mean gap between confidence and accuracy. A larger "
            f"point stands for more predictions.{before}"
        ),
    )
