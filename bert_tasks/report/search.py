"""The page about a hyper-parameter search, from its ``search.json``: trials, slices by key, importance, fresh seeds."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_tasks.data.problems import counted
from bert_tasks.errors import UsageError
from bert_tasks.experiments.search import SEARCH, shown_value
from bert_tasks.recipe.schema import load_recipe
from bert_tasks.recipe.search import Space
from bert_tasks.report.charts import spoken
from bert_tasks.report.page import page_environment, title_case
from bert_tasks.tasks.shared.report import Axis, Chart, Line, Scale
from bert_tasks.training import files as outputs
from bert_tasks.training.records import SearchRecord, read_record

_RADIUS = 4.5  # of a trial's point
_MOST_ROWS = 1_000  # of the table of a sampler's trials

Trials = Sequence[Mapping[str, Any]]


def search_page(folder: Path) -> str:
    """The page about the search in a folder.

    Raises:
        UsageError, RecipeError: its files are damaged.
    """
    recipe = load_recipe(folder / outputs.RECIPE)
    space = {} if recipe.search is None else recipe.search.space
    remedy = "run the search again, which writes it anew"
    content = read_record(folder / SEARCH, SearchRecord, remedy=remedy)
    for trial in (trial for study in content["studies"] for trial in study["trials"]):
        other = next((key for key in space if trial["values"].get(key) not in space[key]), None)
        if other is not None:
            raise UsageError(f"{folder / SEARCH} is damaged: trial {trial['number']}: {other}. {remedy.capitalize()}")
    return _page(folder, content, space)


def _page(folder: Path, found: Mapping[str, Any], space: Mapping[str, Space]) -> str:
    studies, metric = found["studies"], found["metric"]
    first = studies[0]
    keys = list(space)
    scored = [trial for trial in first["trials"] if trial["score"] is not None]
    slices = [_slice_chart(scored, key, space[key], metric) for key in keys if space[key].choices is None]
    summary = [
        (f"{study['sampler']}, {counted(len(study['trials']), 'trial')}", _best_score(study), _spread(study["fresh"]))
        for study in studies
    ]
    best: Mapping[str, Any] = next((trial["values"] for trial in scored if trial["number"] == first["best"]), {})
    if found["baseline"] is not None:
        summary.append(("the recipe as it is", None, _spread(found["baseline"])))
    content = {
        "title": f"{folder.absolute().name} · bert-tasks search",
        "name": folder.absolute().name,
        "metric": metric,
        "better": "lower" if found["lower_is_better"] else "higher",
        "keys": keys,
        "tables": [_trial_table(study, keys) for study in studies],
        "ended": "; ".join(map(_ended, studies)),
        "sampler": first["sampler"],
        "best": [(key, shown_value(best[key])) for key in keys if best],
        "summary": summary,
        "history": _history_chart(studies, metric, lower_is_better=found["lower_is_better"]),
        "slices": [chart for chart in slices if chart is not None],
        "choices": [(key, _choice_rows(scored, key)) for key in keys if space[key].choices is not None],
        "importance": list(first["importance"].items()),
        "notes": found["notes"],
    }
    return page_environment().get_template("search.html").render(content)


def _ended(study: Mapping[str, Any]) -> str:
    """The number of trials of a sampler, and how many of them have no score."""
    trials = study["trials"]
    missing = sum(trial["score"] is None for trial in trials)
    return f"{counted(len(trials), 'trial')} of {study['sampler']}" + (
        f", {missing} of them without a score" if missing else ""
    )


def _trial_table(study: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The trials of a sampler in the order in which they ran."""
    trials = study["trials"][:_MOST_ROWS]
    return {
        "sampler": study["sampler"],
        "rows": [
            (trial, [shown_value(trial["values"][key]) for key in keys], trial["number"] == study["best"])
            for trial in trials
        ],
        "unlisted": len(study["trials"]) - len(trials),
    }


def _best_score(study: Mapping[str, Any]) -> float | None:
    return next((trial["score"] for trial in study["trials"] if trial["number"] == study["best"]), None)


def _spread(fresh: Mapping[str, Any] | None) -> tuple[float | None, float | None, int]:
    """Mean and standard deviation of fresh seeds, and the number of runs that they are of."""
    return (None, None, 0) if fresh is None else (fresh["mean"], fresh["std"], fresh["runs"])


def _history_chart(studies: Sequence[Mapping[str, Any]], metric: str, *, lower_is_better: bool) -> Chart | None:
    """The best score so far of each sampler, and the scores of the first one's trials."""
    lines, values = [], []
    for style, study in enumerate(studies):
        points: list[tuple[float, float | None]] = []
        best: float | None = None
        for trial in study["trials"]:
            score = trial["score"]
            if score is not None and (best is None or (score < best if lower_is_better else score > best)):
                best = score
            points.append((float(trial["number"]), best))
        values += [value for _, value in points if value is not None]
        lines.append(Line(name=f"{study['sampler']}, best so far", points=points, style=style, marked=False))
    first = studies[0]
    scored = [trial for trial in first["trials"] if trial["score"] is not None]
    if not scored:
        return None
    unscored = "" if len(scored) == len(first["trials"]) else ", those without a score excepted"
    values += [trial["score"] for trial in scored]
    last = max(len(study["trials"]) for study in studies) - 1
    last_scores = ((line.name, line.points[-1][1]) for line in lines if line.points)
    ends = "; ".join(f"{name} {score:.3g}" for name, score in last_scores if score is not None)
    return Chart(
        title=f"{title_case(spoken(metric))} by trial",
        description=f"{spoken(metric)} by trial: {ends}.",
        x=Axis(name="trial", low=-0.5, high=last + 0.5, scale="whole"),  # no point lies on an edge
        y=Axis.around(spoken(metric), values),
        lines=tuple(lines),
        points=tuple((float(trial["number"]), trial["score"], _RADIUS) for trial in scored),
        note=f"Each point is a trial of {first['sampler']}{unscored}.",
    )


def _slice_chart(scored: Trials, key: str, space: Space, metric: str) -> Chart | None:
    """The scores of the trials by the value of one key."""
    if not scored:
        return None
    values = [trial["values"][key] for trial in scored]
    scale: Scale = "log" if space.log else "whole" if all(isinstance(value, int) for value in values) else "linear"
    places = [math.log10(value) if space.log else float(value) for value in values]
    scores = [float(trial["score"]) for trial in scored]
    pairs = "; ".join(f"{shown_value(one['values'][key])}: {one['score']:.3g}" for one in scored)
    return Chart(
        title=key,
        description=f"{spoken(metric)} by {key}: {pairs}.",
        x=Axis.around(f"{key}, logarithmic scale" if space.log else key, places, scale),
        y=Axis.around(spoken(metric), scores),
        lines=(),
        points=tuple((x, y, _RADIUS) for x, y in zip(places, scores, strict=True)),
    )


def _choice_rows(scored: Trials, key: str) -> list[tuple[str, int, float, float, float]]:
    """For each value that was tried: the number of trials, and the mean, lowest and highest score."""
    found: dict[str, list[float]] = {}
    for trial in scored:
        found.setdefault(shown_value(trial["values"][key]), []).append(trial["score"])
    return [(value, len(some), statistics.fmean(some), min(some), max(some)) for value, some in found.items()]
