"""Charts as inline SVG: lines, points and small intervals.

Owns scales, ticks and marks. Colours, dashes and fonts are the page's style sheet (classes ``s0`` to ``s7``), so that
one picture serves light and dark. Everything is escaped, and every chart says in words what it shows. Must not know
what is drawn.

Learning curves from the lines of metrics.jsonl.

Owns which losses and metrics are drawn. Must not know how a page is laid out.

The charts of one validation set's results: calibration, regression, the threshold of "no answer".

Owns what they show and say. Must not know tasks or how a page is laid out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

from markupsafe import Markup

from bert_tasks.metrics.tables import LOSS, metric_key, metrics_by_set, split_key
from bert_tasks.report.collect import Run
from bert_tasks.report.results import Results

WIDTH, HEIGHT = 480, 290
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 24, 44  # above the plot there is room for one line of text
STYLES = 8
MOST_POINTS = 400  # of a line
_MARKED = 40  # lines with at most so many points show each of them


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line; ``style`` is the number of its colour and dashes, ``points`` are (x, y), with gaps where y is None."""

    name: str
    points: Sequence[tuple[float, float | None]]
    style: int = 0
    marked: bool = True


@dataclass(frozen=True, kw_only=True)
class Axes:
    """What the axes say; ``x_range`` and ``y_range`` are stretched to round numbers unless ``exact``."""

    x: str
    y: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    exact: bool = False

    def __post_init__(self) -> None:
        for name in ("x_range", "y_range"):
            object.__setattr__(self, name, _apart(*getattr(self, name)))

    @property
    def x_ticks(self) -> list[float]:
        return ticks(*self.x_range, most=6)

    @property
    def y_ticks(self) -> list[float]:
        return ticks(*self.y_range, most=6)

    def across(self, x: float) -> float:
        low, high = self.x_range
        return LEFT + (x - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def up(self, y: float) -> float:
        low, high = self.y_range
        return HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def ticks(low: float, high: float, *, most: int) -> list[float]:
    """Round numbers between two values: steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def nice(low: float, high: float) -> tuple[float, float]:
    """The range, stretched to the next round numbers."""
    low, high = _apart(low, high)
    step = ticks(low, high, most=6)
    width = step[1] - step[0] if len(step) > 1 else high - low
    return math.floor(low / width + 1e-9) * width, math.ceil(high / width - 1e-9) * width


def _apart(low: float, high: float) -> tuple[float, float]:
    """The range; around values that are equal up to rounding one that can be divided into steps."""
    size = max(1.0, abs(low), abs(high))
    if high - low > 1e-9 * size:
        return low, high
    half = max(0.5, 1e-6 * size)
    return low - half, high + half


def line_chart(lines: Sequence[Line], axes: Axes, *, label: str, rule: tuple[float, str] | None = None) -> Markup:
    """Lines over common axes; ``rule``: a vertical line at an x, and what it marks."""
    drawn = Markup("").join(_line(line, axes) for line in lines)
    mark = Markup("") if rule is None else _rule(*rule, axes)
    return _svg(_grid(axes) + mark + drawn, label)


def point_chart(points: Sequence[tuple[float, float, float]], axes: Axes, *, label: str, line: Line | None) -> Markup:
    """Points of (x, y, radius), and a line to compare them with."""
    circle = Markup('<circle class="point" cx="{}" cy="{}" r="{}"/>')
    drawn = Markup("").join(circle.format(_at(axes.across(x)), _at(axes.up(y)), _at(radius)) for x, y, radius in points)
    compared = Markup("") if line is None else _line(line, axes)
    return _svg(_grid(axes) + compared + drawn, label)


def interval(value: float | None, low: float | None, high: float | None, *, top: float = 1.0) -> Markup:
    """A small picture of an estimate on a scale from 0; the numbers stand beside it, so it is not read aloud."""
    if value is None or low is None or high is None:
        return Markup("")
    left, right, middle = (4 + 112 * max(0.0, min(1.0, number / top)) for number in (low, high, value))
    return Markup(
        '<svg class="interval" viewBox="0 0 120 16" aria-hidden="true" focusable="false">'
        '<line class="scale" x1="4" y1="8" x2="116" y2="8"/><line class="range" x1="{0}" y1="8" x2="{1}" y2="8"/>'
        '<line class="value" x1="{2}" y1="2" x2="{2}" y2="14"/></svg>'
    ).format(_at(left), _at(right), _at(middle))


def sample(style: int) -> Markup:
    """A piece of a line, for legends."""
    return Markup(
        '<svg class="sample" viewBox="0 0 28 8" aria-hidden="true" focusable="false">'
        '<line class="line s{}" x1="1" y1="4" x2="27" y2="4"/></svg>'
    ).format(style % STYLES)


def thinned(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """At most ``MOST_POINTS`` of them, evenly spread, the last one among them."""
    if len(points) <= MOST_POINTS:
        return list(points)
    step = (len(points) - 1) / (MOST_POINTS - 1)
    return [points[round(place * step)] for place in range(MOST_POINTS)]


def text_of(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _svg(content: Markup, label: str) -> Markup:
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, HEIGHT, label, content
    )


def _grid(axes: Axes) -> Markup:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    drawn = Markup("")
    for value in axes.y_ticks:
        y = axes.up(value)
        drawn += Markup('<line class="grid" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(LEFT, _at(y), right, _at(y))
        drawn += Markup('<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>').format(
            LEFT - 7, _at(y + 4), text_of(value)
        )
    for value in axes.x_ticks:
        drawn += Markup('<text class="tick" x="{}" y="{}" text-anchor="middle">{}</text>').format(
            _at(axes.across(value)), bottom + 17, text_of(value)
        )
    drawn += Markup('<line class="axis" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(LEFT, bottom, right, bottom)
    drawn += Markup('<text class="name" x="{}" y="{}" text-anchor="end">{}</text>').format(right, HEIGHT - 8, axes.x)
    middle = (TOP + bottom) / 2
    return drawn + Markup(
        '<text class="name" transform="translate(13 {}) rotate(-90)" text-anchor="middle">{}</text>'
    ).format(_at(middle), axes.y)


def _line(line: Line, axes: Axes) -> Markup:
    points = thinned(line.points)
    placed = [None if y is None else (_at(axes.across(x)), _at(axes.up(y))) for x, y in points]
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


def _rule(x: float, name: str, axes: Axes) -> Markup:
    """The name stands above the plot, where no line can be."""
    across = axes.across(x)
    anchor, shift = ("end", 4) if across > WIDTH / 2 else ("start", -4)
    return Markup(
        '<line class="rule" x1="{0}" y1="{1}" x2="{0}" y2="{2}"/>'
        '<text class="note" x="{3}" y="{4}" text-anchor="{5}">{6}</text>'
    ).format(_at(across), TOP, HEIGHT - BOTTOM, _at(across + shift), TOP - 10, anchor, name)


def _at(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


# Metrics worth a line, by the first that the run has: entities, spans, numbers, several labels, words, classes.
_CHOICES = (
    ("overall_f1", "overall_precision", "overall_recall"),
    ("exact_match", "f1"),
    ("exact", "f1"),
    ("pearson", "spearmanr"),
    ("micro_f1", "f1"),
    ("overall_accuracy", "macro_f1"),
    ("accuracy", "macro_f1"),
)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A picture, its lines' (name, style) for the legend, and its caption."""

    svg: Markup
    legend: tuple[tuple[str, int], ...]
    caption: str


def evaluations(run: Run) -> list[Mapping[str, Any]]:
    return [event for event in run.events if event["event"] == "evaluation"]


def overall_metrics(run: Run) -> dict[str, float | None]:
    """What the run recorded, each number once, without the metrics of single classes; all of it of an unknown task."""
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
    """Names of the metrics that are drawn and tabled: first the one that picked the best model.

    With several validation sets the first choice of each.
    """
    scores = {name: [m for m in run.metrics_of(name) if not run.is_lower_better(m)] for name in run.sets}
    known = [metric_key(name, metric) for name, metrics in scores.items() for metric in metrics]
    picked = metric_key(*run.chosen)
    found = [picked] if picked in run.metrics and run.chosen[1] != LOSS else []
    for name in run.sets:
        keys = [[metric_key(name, metric) for metric in names] for names in _CHOICES]
        usual = next((names for names in keys if names[0] in known), [])
        found += [metric for metric in usual if metric in known][: 3 if len(run.sets) == 1 else 1]
    return list(dict.fromkeys(found if found else known[:3]))


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
    """A key as people write it: ``dev_ood/overall_f1`` becomes "overall F1 on dev_ood"."""
    name, metric = split_key(key, sets)
    return f"{spoken(metric)} on {name}" if name else spoken(metric)


def spoken(metric: str) -> str:
    """A metric's name, without that of a validation set, as people write it: ``overall_f1`` becomes "overall F1"."""
    names = {"rmse": "root mean squared error", "exact": "exact match", "spearmanr": "Spearman", "pearson": "Pearson"}
    names |= {"map": "mean average precision", "mrr": "mean reciprocal rank"}
    return names.get(metric, metric.replace("_", " ").replace("f1", "F1").replace("matthews", "Matthews"))


def _points(run: Run, metric: str) -> list[tuple[float, float | None]]:
    return [(event["step"], event["metrics"].get(metric)) for event in evaluations(run)]


def _chart(lines: Sequence[Line], run: Run | None, unit: str, title: str, *, from_zero: bool) -> Chart | None:
    values = [y for line in lines for _, y in line.points if y is not None]
    steps = [x for line in lines for x, _ in line.points]
    if not values:
        return None
    low, high = nice(0.0 if from_zero else min(values), max(values))
    axes = Axes(x="step", y=unit, x_range=(0.0, float(max(steps))), y_range=(low, high))
    ends = "; ".join(f"{line.name} {_ends(line.points)}" for line in lines if _ends(line.points))
    best = None if run is None or run.summary is None else (float(run.summary["best_step"]), "best model")
    svg = line_chart(lines, axes, label=f"{title} by step: {ends}.", rule=best)
    return Chart(svg=svg, legend=tuple((line.name, line.style) for line in lines), caption=title)


def _ends(points: Sequence[tuple[float, float | None]]) -> str:
    known = [y for _, y in points if y is not None]
    return f"from {known[0]:.3g} to {known[-1]:.3g}" if known else ""


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
