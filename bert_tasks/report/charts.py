"""Charts as inline SVG, and the charts of a run: learning curves and calibration.

Colours, dashes and fonts are the page's style sheet (classes ``s0`` to ``s7``), so that one picture serves light and
dark. Everything is escaped, and every chart says in words what it shows.
"""

import math
from collections.abc import Sequence

from markupsafe import Markup

from bert_tasks.metrics.classification import Calibration
from bert_tasks.metrics.tables import LOSS, metric_key, metrics_by_set, split_key
from bert_tasks.report.collect import Run
from bert_tasks.tasks.report_data import Axis, Chart, Line, Point, thinned

WIDTH, HEIGHT = 480, 290
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 24, 44  # above the plot there is room for one line of text
STYLES = 8
_MARKED = 40  # lines with at most so many points show each of them


def draw(chart: Chart) -> Markup:
    """The chart as an SVG element."""
    circle = Markup('<circle class="point" cx="{}" cy="{}" r="{}"/>')
    rule = Markup("") if chart.rule is None else _rule(*chart.rule, chart)
    lines = Markup("").join(_line(line, chart) for line in chart.lines)
    points = Markup("").join(
        circle.format(_text(_across(x, chart.x)), _text(_up(y, chart.y)), _text(radius))
        for x, y, radius in chart.points
    )
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, HEIGHT, chart.description, _grid(chart) + rule + lines + points
    )


def interval(value: float | None, low: float | None, high: float | None, *, top: float = 1.0) -> Markup:
    """A small picture of an estimate on a scale from 0; the numbers are beside it, so screen readers skip it."""
    if value is None or low is None or high is None:
        return Markup("")
    left, right, middle = (4 + 112 * max(0.0, min(1.0, number / top)) for number in (low, high, value))
    return Markup(
        '<svg class="interval" viewBox="0 0 120 16" aria-hidden="true" focusable="false">'
        '<line class="scale" x1="4" y1="8" x2="116" y2="8"/><line class="range" x1="{0}" y1="8" x2="{1}" y2="8"/>'
        '<line class="value" x1="{2}" y1="2" x2="{2}" y2="14"/></svg>'
    ).format(_text(left), _text(right), _text(middle))


def sample(style: int) -> Markup:
    """A short piece of a line, for legends."""
    return Markup(
        '<svg class="sample" viewBox="0 0 28 8" aria-hidden="true" focusable="false">'
        '<line class="line s{}" x1="1" y1="4" x2="27" y2="4"/></svg>'
    ).format(style % STYLES)


def _across(x: float, axis: Axis) -> float:
    return LEFT + (x - axis.low) / (axis.high - axis.low) * (WIDTH - LEFT - RIGHT)


def _up(y: float, axis: Axis) -> float:
    return HEIGHT - BOTTOM - (y - axis.low) / (axis.high - axis.low) * (HEIGHT - TOP - BOTTOM)


def _text(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _tick_text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _grid(chart: Chart) -> Markup:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    drawn = Markup("")
    for value in chart.y.ticks:
        y = _up(value, chart.y)
        drawn += Markup('<line class="grid" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(LEFT, _text(y), right, _text(y))
        drawn += Markup('<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>').format(
            LEFT - 7, _text(y + 4), _tick_text(value)
        )
    for value in chart.x.ticks:
        drawn += Markup('<text class="tick" x="{}" y="{}" text-anchor="middle">{}</text>').format(
            _text(_across(value, chart.x)), bottom + 17, _tick_text(value)
        )
    drawn += Markup('<line class="axis" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(LEFT, bottom, right, bottom)
    drawn += Markup('<text class="name" x="{}" y="{}" text-anchor="end">{}</text>').format(
        right, HEIGHT - 8, chart.x.name
    )
    middle = (TOP + bottom) / 2
    return drawn + Markup(
        '<text class="name" transform="translate(13 {}) rotate(-90)" text-anchor="middle">{}</text>'
    ).format(_text(middle), chart.y.name)


def _line(line: Line, chart: Chart) -> Markup:
    points = thinned(line.points)
    placed = [None if y is None else (_text(_across(x, chart.x)), _text(_up(y, chart.y))) for x, y in points]
    steps, pen = [], "M"
    for place in placed:
        if place is not None:
            steps.append(f"{pen}{place[0]} {place[1]}")
        pen = "M" if place is None else "L"
    drawn = Markup('<path class="line s{}" d="{}"/>').format(line.style % STYLES, "".join(steps))
    if line.marked and len(points) <= _MARKED:
        dot = Markup('<circle class="mark s{}" cx="{}" cy="{}" r="3"/>')
        drawn += Markup("").join(dot.format(line.style % STYLES, *place) for place in placed if place is not None)
    return drawn


def _rule(x: float, name: str, chart: Chart) -> Markup:
    """The name is above the plot, where no line can be."""
    across = _across(x, chart.x)
    anchor, shift = ("end", 4) if across > WIDTH / 2 else ("start", -4)
    return Markup(
        '<line class="rule" x1="{0}" y1="{1}" x2="{0}" y2="{2}"/>'
        '<text class="note" x="{3}" y="{4}" text-anchor="{5}">{6}</text>'
    ).format(_text(across), TOP, HEIGHT - BOTTOM, _text(across + shift), TOP - 10, anchor, name)


def overall_metrics(run: Run) -> dict[str, float | None]:
    """The recorded metrics, each number once, without those of single classes; all of them of an unknown task."""
    if run.task is None:
        return dict(run.metrics)
    known = {name: math.nan if value is None else value for name, value in run.metrics.items()}
    shown = {
        metric_key(name, metric)
        for name, metrics in metrics_by_set(known, run.sets).items()
        for metric in run.task.metric_table(metrics).overall
    }
    return {name: value for name, value in run.metrics.items() if name in shown}


def drawn_metrics(run: Run) -> list[str]:
    """The keys of the metrics that are drawn and tabled: first the one that the best model was chosen by.

    Of several validation sets one metric each.
    """
    best_set, best = run.best_metric
    keys = [metric_key(best_set, best)] if best in run.metrics_of(best_set) and best != LOSS else []
    candidates: list[str] = []
    for name in run.sets:
        scores = [metric for metric in run.metrics_of(name) if not run.is_lower_better(metric)]
        usual = [] if run.task is None else [metric for metric in run.task.curve_metrics if metric in scores]
        keys += [metric_key(name, metric) for metric in usual[: 3 if len(run.sets) == 1 else 1]]
        candidates += [metric_key(name, metric) for metric in scores]
    return list(dict.fromkeys(keys if keys else candidates[:3]))


def loss_chart(run: Run) -> Chart | None:
    """Training loss at the logged steps and validation loss at the evaluations."""
    train = [(event["step"], event.get("loss")) for event in run.events if event["event"] == "step"]
    lines = [Line(name="training", points=train, style=0, marked=False)] if train else []
    for style, name in enumerate(run.sets, start=1):
        points = _points(run, metric_key(name, LOSS))
        if any(value is not None for _, value in points):
            lines.append(Line(name=f"validation {name}".strip(), points=points, style=style))
    return _chart(lines, run, "loss", "Loss", from_zero=True)


def metric_chart(run: Run) -> Chart | None:
    """The metrics of ``drawn_metrics`` at the evaluations."""
    names = drawn_metrics(run)
    lines = [
        Line(name=spoken_key(name, run.sets), points=_points(run, name), style=style)
        for style, name in enumerate(names)
    ]
    return _chart(lines, run, "score", "Metrics on the validation rows", from_zero=False)


def runs_chart(runs: Sequence[Run], key: str) -> Chart | None:
    """One metric of several runs on the same validation sets, by its key."""
    lines = [Line(name=run.name, points=_points(run, key), style=style) for style, run in enumerate(runs)]
    sets = runs[0].sets
    name, metric = split_key(key, sets)
    rows = "" if name else " on the validation rows"
    title, unit = f"{spoken_key(key, sets)}{rows}", "loss" if metric == LOSS else "score"
    return _chart(lines, None, unit, title, from_zero=False)


def spoken_key(key: str, sets: Sequence[str]) -> str:
    """A key in words: ``dev_ood/overall_f1`` becomes "overall F1 on dev_ood"."""
    name, metric = split_key(key, sets)
    return f"{spoken(metric)} on {name}" if name else spoken(metric)


def spoken(metric: str) -> str:
    """A metric, without the name of a validation set, in words: ``overall_f1`` becomes "overall F1"."""
    names = {"rmse": "root mean squared error", "exact": "exact match", "spearmanr": "Spearman", "pearson": "Pearson"}
    names |= {"map": "mean average precision", "mrr": "mean reciprocal rank"}
    return names.get(metric, metric.replace("_", " ").replace("f1", "F1").replace("matthews", "Matthews"))


def _chart(lines: Sequence[Line], run: Run | None, unit: str, title: str, *, from_zero: bool) -> Chart | None:
    """Lines over the steps of training; None without points. ``run``: marks the step of its best model."""
    values = [y for line in lines for _, y in line.points if y is not None]
    if not values:
        return None
    last = float(max(x for line in lines for x, _ in line.points))
    known = {line.name: [y for _, y in line.points if y is not None] for line in lines}
    ends = "; ".join(f"{name} from {found[0]:.3g} to {found[-1]:.3g}" for name, found in known.items() if found)
    return Chart(
        title=title,
        description=f"{title} by step: {ends}.",
        x=Axis(name="step", low=0.0, high=last),
        y=Axis.around(unit, [0.0, *values] if from_zero else values),
        lines=tuple(lines),
        rule=None if run is None or run.summary is None else (float(run.summary["best_step"]), "best model"),
    )


def _points(run: Run, metric: str) -> list[Point]:
    return [(event["step"], event["metrics"].get(metric)) for event in run.evaluations]


def calibration_chart(calibration: Calibration, confidence_in: str) -> Chart:
    """The accuracy of predictions by their confidence; a point's area is the number of predictions."""
    most = max(one.count for one in calibration.bins)
    shares = "; ".join(f"at {one.confidence:.2f} {one.accuracy:.2f} of {one.count}" for one in calibration.bins)
    perfect = Line(name="perfectly calibrated", points=((0.0, 0.0), (1.0, 1.0)), style=7, marked=False)
    return Chart(
        title="Calibration",
        description=f"Calibration, expected calibration error {calibration.ece:.3f}. Share that is correct: {shares}.",
        x=Axis(name=f"confidence in the {confidence_in}", low=0.0, high=1.0),
        y=Axis(name="share that is correct", low=0.0, high=1.0),
        lines=(perfect,),
        points=tuple((one.confidence, one.accuracy, 3.5 + 7 * math.sqrt(one.count / most)) for one in calibration.bins),
        note=(
            f"Expected calibration error {calibration.ece:.3f}: the mean gap between confidence and accuracy. A larger "
            "point stands for more predictions."
        ),
    )
