"""The charts of a run, and the positions of a chart's values in its picture.

The charts are learning curves and calibration. Each says in words what it shows. The SVG is in
``templates/charts.html``.
"""

import math
from collections.abc import Sequence

from markupsafe import Markup

from bert_tasks.metrics.calibration import Calibration
from bert_tasks.metrics.tables import LOSS, metric_key, metrics_by_set, split_key
from bert_tasks.model.heads import curves, metric_table
from bert_tasks.outputs.sections import Axis, Chart, Line, Point
from bert_tasks.report.collect import Run

STYLES = 8  # number of line styles


class Plot:
    """The size of a chart's picture, and the place of a value in it."""

    width, height = 480, 290
    left, top, right, bottom = 62, 24, width - 14, height - 44  # above the plot there is room for one line of text
    most_marked = 40  # lines with at most this number of points show each of them

    @classmethod
    def across(cls, x: float, axis: Axis) -> float:
        return cls.left + (x - axis.low) / (axis.high - axis.low) * (cls.right - cls.left)

    @classmethod
    def up(cls, y: float, axis: Axis) -> float:
        return cls.bottom - (y - axis.low) / (axis.high - axis.low) * (cls.bottom - cls.top)

    @classmethod
    def path(cls, points: Sequence[Point], chart: Chart) -> Markup:
        """Returns the path of a line, with a gap at points without a value."""
        steps, pen = [], "M"
        for x, y in points:
            if y is not None:
                steps.append(f"{pen}{coordinate(cls.across(x, chart.x))} {coordinate(cls.up(y, chart.y))}")
            pen = "M" if y is None else "L"
        return Markup("".join(steps))


def coordinate(value: float) -> str:
    """Formats a number of the picture."""
    return f"{value:.1f}".removesuffix(".0")


def overall_metrics(run: Run) -> dict[str, float | None]:
    """Returns each recorded metric once, without metrics of single classes."""
    if run.tasks is None:
        return dict(run.metrics)
    numbers = {name: math.nan if value is None else value for name, value in run.metrics.items()}
    shown = {
        metric_key(name, metric)
        for name, metrics in metrics_by_set(numbers, run.sets).items()
        for metric in metric_table(run.tasks, metrics).overall
    }
    return {name: value for name, value in run.metrics.items() if name in shown}


def drawn_metrics(run: Run) -> list[str]:
    """Returns the keys of the metrics to draw, with the best model's metric first.

    Several validation sets have one metric each.
    """
    best_set, best = run.best_metric
    keys = [metric_key(best_set, best)] if best in run.metrics_of(best_set) and best != LOSS else []
    candidates: list[str] = []
    drawn = [] if run.tasks is None else curves(run.tasks)
    for name in run.sets:
        scores = [metric for metric in run.metrics_of(name) if metric not in run.metadata.metrics.lower_is_better]
        usual = [metric for metric in drawn if metric in scores]
        keys += [metric_key(name, metric) for metric in usual[: STYLES - 1 if len(run.sets) == 1 else 1]]
        candidates += [metric_key(name, metric) for metric in scores]
    return list(dict.fromkeys(keys if keys else candidates[:3]))


def loss_chart(run: Run) -> Chart | None:
    """Draws the training loss with its terms, and the validation loss."""
    steps = [event for event in run.events if event.event == "step"]
    train = [_point(event.step, event.loss) for event in steps]
    lines = [Line(name="training", points=train, style=0, marked=False)] if train else []
    for term in dict.fromkeys(term for event in steps for term in event.terms):
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
    lines = [
        Line(name=display_name(name, run.sets), points=_points(run, name), style=style)
        for style, name in enumerate(names)
    ]
    return _chart(lines, run, "score", "Metrics on the validation rows", from_zero=False)


def runs_chart(runs: Sequence[Run], key: str) -> Chart | None:
    """Draws one metric of several runs on the same validation sets."""
    lines = [Line(name=run.name, points=_points(run, key), style=style) for style, run in enumerate(runs)]
    sets = runs[0].sets
    name, metric = split_key(key, sets)
    rows = "" if name else " on the validation rows"
    title, unit = f"{display_name(key, sets)}{rows}", "loss" if metric == LOSS else "score"
    return _chart(lines, None, unit, title, from_zero=False)


def display_name(key: str, sets: Sequence[str]) -> str:
    """Returns a key in words, for example "overall F1 on dev_ood"."""
    name, metric = split_key(key, sets)
    return f"{spoken(metric)} on {name}" if name else spoken(metric)


def spoken(metric: str) -> str:
    """Returns a metric in words, for example "overall F1", without a set's name."""
    names = {"rmse": "root mean squared error", "exact": "exact match", "spearmanr": "Spearman", "pearson": "Pearson"}
    names |= {"map": "mean average precision", "mrr": "mean reciprocal rank", "ndcg@10": "nDCG@10"}
    return names.get(metric, metric.replace("_", " ").replace("f1", "F1").replace("matthews", "Matthews"))


def _chart(lines: Sequence[Line], run: Run | None, unit: str, title: str, *, from_zero: bool) -> Chart | None:
    """Draws lines over training steps, with a mark at ``run``'s best. None if empty."""
    values = [y for line in lines for _, y in line.points if y is not None]
    if not values:
        return None
    last = float(max(x for line in lines for x, _ in line.points))
    drawn = {line.name: [y for _, y in line.points if y is not None] for line in lines}
    ends = ", ".join(f"{name} from {ys[0]:.3g} to {ys[-1]:.3g}" for name, ys in drawn.items() if ys)
    return Chart(
        title=title,
        description=f"{title} by step, with {ends}.",
        x=Axis(name="step", low=0.0, high=last, scale="whole"),
        y=Axis.around(unit, [0.0, *values] if from_zero else values),
        lines=tuple(lines),
        rule=None if run is None or run.summary is None else (float(run.summary.best_step), "best model"),
    )


def _points(run: Run, metric: str) -> list[Point]:
    return [_point(event.step, event.metrics.get(metric)) for event in run.evaluations]


def _point(step: int, value: float | None) -> Point:
    """Returns a point, which has no value if there is no finite number."""
    if value is None or not math.isfinite(value):
        return step, None
    return step, value


def calibration_chart(
    calibration: Calibration, confidence_in: str, *, uncalibrated: Calibration | None = None, fitted_on: str = ""
) -> Chart:
    """Draws the accuracy of predictions by their confidence.

    The area of a point is its number of predictions.

    Args:
        calibration: The reliability diagram.
        confidence_in: Noun that the confidences refer to.
        uncalibrated: The diagram without the fitted temperature, if there is one.
        fitted_on: The rows that the temperature was fitted on.
    """
    most = max(bin.count for bin in calibration.bins)
    shares = ", ".join(f"{bin.accuracy:.2f} of {bin.count} at {bin.confidence:.2f}" for bin in calibration.bins)
    lines = [Line(name="perfectly calibrated", points=((0.0, 0.0), (1.0, 1.0)), style=7, marked=False)]
    before = ""
    if uncalibrated is not None:
        points = tuple((bin.confidence, bin.accuracy) for bin in uncalibrated.bins)
        lines.append(Line(name="without the temperature", points=points, style=1))
        before = f" Without the temperature, which was fitted {fitted_on}, the error is {uncalibrated.ece:.3f}."
    return Chart(
        title="Calibration",
        description=f"Calibration, expected calibration error {calibration.ece:.3f}. Correct are {shares}.",
        x=Axis(name=f"confidence in the {confidence_in}", low=0.0, high=1.0),
        y=Axis(name="share that is correct", low=0.0, high=1.0),
        lines=tuple(lines),
        points=tuple((bin.confidence, bin.accuracy, 3.5 + 7 * math.sqrt(bin.count / most)) for bin in calibration.bins),
        note=(
            f"Expected calibration error {calibration.ece:.3f}, the mean gap between confidence and accuracy. A larger "
            f"point stands for more predictions.{before}"
        ),
    )
