"""Learning curves from the lines of metrics.jsonl.

Owns which losses and metrics are drawn. Must not know how a page is laid out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from bert_tasks.metrics.keys import LOSS, metric_key, metrics_by_set, split_key
from bert_tasks.report.charts import Axes, Line, line_chart, nice
from bert_tasks.report.gathering import Run

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
