"""The HTML of a report, from templates that escape whatever they are given.

Owns what stands where and how numbers are written. The templates and the style sheet lie in ``templates/``. Must not
know how figures are computed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import escape

from bert_tasks.metrics.tables import LOSS, metric_key, untuned
from bert_tasks.report import charts
from bert_tasks.report import charts as pictures
from bert_tasks.report.charts import (
    drawn_metrics,
    evaluations,
    loss_chart,
    metric_chart,
    overall_metrics,
    runs_chart,
    spoken,
    spoken_key,
)
from bert_tasks.report.collect import Run
from bert_tasks.report.comparison import ASSUMPTIONS, Comparison
from bert_tasks.report.files import FileResults
from bert_tasks.report.results import Results, cut
from bert_tasks.report.statistics import LEVEL, REPLICATES, Estimate

_MOST_LINES = 60  # of the table of evaluations
_MOST_METRICS = 300  # of the table of what the run recorded
_MOST_NAME = 200  # characters of a metric's name
_MOST_RECIPE = 20_000  # characters
_MOST_TEXT = 5_000  # characters of any other text
_MOST_LABEL = 80  # characters of a label
_MOST_BYTES = 2_000_000  # of a page
_SHARES = (1, 2, 4, 8, 16, 32)  # what a page shows of tables and examples: all, a half, ...
_NOTHING = "\N{EN DASH}"
_HUES = 6  # of entity types in the style sheet


def run_page(run: Run, results: Mapping[str, Results], on_file: FileResults | None = None) -> str:
    """The page about one run, and about its model on a file, with as much of tables and examples as it has room for."""
    return _fitting(lambda share: _run_page(run, results, on_file, share))


def _fitting(made: Callable[[int], str]) -> str:
    """The first page that is small enough; ``made`` gets what part of tables and examples it may show: 1 / share."""
    page = ""
    for share in _SHARES:
        page = made(share)
        if len(page.encode()) < _MOST_BYTES:
            break
    return page


def _part(results: Results, share: int) -> Results:
    """The most frequent labels of the table, in its order, and the first examples."""
    if share == 1:
        return results
    most = max(1, len(results.table) // share)
    frequent = {row.label for row in sorted(results.table, key=lambda row: -row.support)[:most]}
    table = tuple(row for row in results.table if row.label in frequent)
    return replace(
        results,
        table=table,
        left_out=results.left_out + len(results.table) - len(table),
        texts=results.texts[: max(1, len(results.texts) // share)],
        sentences=results.sentences[: max(1, len(results.sentences) // share)],
        questions=results.questions[: max(1, len(results.questions) // share)],
    )


def _run_page(run: Run, results: Mapping[str, Results], on_file: FileResults | None, share: int) -> str:
    template = _environment().get_template("run.html")
    results = {name: _part(one, share) for name, one in results.items()}
    if on_file is not None and on_file.results is not None:
        on_file = replace(on_file, results=_part(on_file.results, share))
    sets = [_shown(run, name, one) for name, one in results.items()]
    return template.render(
        title=f"{run.name} · bert-tasks report",
        run=run,
        sets=sets if on_file is None else [*sets, _shown_file(run, on_file)],
        subtitle=_subtitle(run, results),
        curves=[chart for chart in (loss_chart(run), metric_chart(run)) if chart is not None],
        evaluations=_evaluation_rows(run),
        evaluated=[spoken_key(name, run.sets) for name in drawn_metrics(run)],
        recorded=_recorded(run),
        unrecorded=len(overall_metrics(run)) - len(_recorded(run)),
        facts=_facts(run),
        recipe=None if run.recipe is None else escape(run.recipe[:_MOST_RECIPE]),
        is_whole=share == 1,
    )


def comparison_page(
    runs: Sequence[Run], results: Sequence[Mapping[str, Results]], comparisons: Sequence[Comparison]
) -> str:
    """The page about several runs, with as much of the tables as it has room for."""
    return _fitting(lambda share: _comparison_page(runs, results, comparisons, share))


def _comparison_page(
    runs: Sequence[Run], results: Sequence[Mapping[str, Results]], comparisons: Sequence[Comparison], share: int
) -> str:
    results = [{name: _part(one, share) for name, one in each.items()} for each in results]
    template = _environment().get_template("comparison.html")
    names = list(dict.fromkeys(name for run in runs for name in drawn_metrics(run)))
    losses = [key for key in (metric_key(name, LOSS) for name in runs[0].sets) if key in runs[0].metrics]
    drawn = [chart for chart in (runs_chart(runs, name) for name in [*losses[:1], *names[:1]]) if chart is not None]
    return template.render(
        title=f"{len(runs)} runs · bert-tasks report",
        runs=runs,
        comparisons=comparisons,
        assumptions=ASSUMPTIONS,
        curves=drawn,
        metrics=[(name, spoken_key(name, runs[0].sets)) for name in [*names, *losses]],
        tables=[_side_by_side(name, results) for name in results[0] if all(name in other for other in results)],
        facts=_shared_facts([dict(_facts(run)) for run in runs]),
        is_whole=share == 1,
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("bert_tasks.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_short,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "p_value": p_value,
        "spoken": spoken,
        "title_case": title_case,
        "cut": cut,
        "label": lambda label: cut(label, _MOST_LABEL),
    }
    environment.globals |= {
        "interval": charts.interval,
        "sample": charts.sample,
        "level": LEVEL,
        "replicates": REPLICATES,
    }
    return environment


def _short(value: object) -> object:
    """What a template prints: no text is longer than a page can hold, markup stays whole."""
    return cut(value, _MOST_TEXT) if type(value) is str else value


def number(value: float | None, digits: int | None = None) -> str:
    """Three decimals for shares and losses, one for scores up to 100, a dash for nothing."""
    if value is None or value != value:
        return _NOTHING
    places = (3 if abs(value) < 2 else 1) if digits is None else digits
    return f"{value:,.{places}f}".replace("-", "\N{MINUS SIGN}")


def title_case(text: str) -> str:
    """With a capital first letter, the others as they are."""
    return text[:1].upper() + text[1:]


def p_value(value: float | None) -> str:
    if value is None:
        return _NOTHING
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _recorded(run: Run) -> list[tuple[str, float | None]]:
    """The metrics as the run recorded them, each number once, without those of single classes.

    Of very many, from a task that does not tell them apart, the first and the last, where the overall ones stand.
    """
    found = list(overall_metrics(run).items())
    kept = found if len(found) <= _MOST_METRICS else found[: _MOST_METRICS // 2] + found[-_MOST_METRICS // 2 :]
    return [(cut(name, _MOST_NAME), value) for name, value in kept]


def _headline(run: Run, name: str, results: Results) -> list[tuple[str, Estimate]]:
    """The figures that stand first; one that picked the best model and follows from no sums has no interval."""
    found = [(metric, results.estimates[metric]) for metric in results.headline]
    if run.chosen[0] != name or run.chosen[1] in results.estimates or run.summary is None:
        return found
    value = run.metrics.get(metric_key(*run.chosen))
    return [(run.chosen[1], Estimate(value=value, low=None, high=None)), *found]


def _favoured(run: Run, name: str) -> str:
    """Why the figures of a validation set are better than those of new rows; empty where they are not."""
    tries, before = len(evaluations(run)), untuned(run.facts["metrics"]["primary"])
    reasons = [f"the best of {tries:,} evaluations was picked"] if run.chosen[0] == name and tries > 1 else []
    reasons += ["thresholds were tuned"] if before in run.metrics_of(name) else []
    if not reasons:
        return ""
    return f"On these rows {' and '.join(reasons)}: expect less of new rows; the intervals leave that out."


def _shown(run: Run, name: str, results: Results) -> dict[str, Any]:
    """A validation set's results with their pictures."""
    regression = [pictures.scatter_chart(results), pictures.residual_chart(results)] if results.pairs else []
    return {
        "title": f"Results on {name}" if name else "Results",
        "of": f" of {name}" if name else "",
        "results": results,
        "slices": (),
        "metrics": (),
        "digits": 1 if results.unit == "questions" else 3,
        "headline": _headline(run, name, results),
        "favoured": _favoured(run, name),
        "tuned_on": "these questions" if name == run.sets[0] else f"those of {run.sets[0]}",
        "calibration": pictures.calibration_chart(results),
        "threshold": pictures.threshold_chart(results),
        "regression": regression,
        "types": {row.label: place % _HUES for place, row in enumerate(results.table)},
    }


def _shown_file(run: Run, found: FileResults) -> dict[str, Any]:
    """The same of a file, on whose rows nothing was chosen, with the scores by its columns."""
    name = cut(Path(found.source).name, _MOST_NAME)
    more = {
        "title": f"On {name}",
        "of": f" of {name}",
        "slices": found.slices,
        "metrics": list(found.table.overall.items())[:_MOST_METRICS],
    }
    results = found.results
    if results is None:
        empty = {"results": None, "favoured": "", "digits": 3, "regression": (), "calibration": None, "threshold": None}
        return {**empty, "headline": (), "types": {}, "tuned_on": "", **more}
    headline = [(metric, results.estimates[metric]) for metric in results.headline]
    shown = _shown(run, "", results)
    return {**shown, "headline": headline, "favoured": "", "tuned_on": "the validation rows", **more}


def _side_by_side(name: str, results: Sequence[Mapping[str, Results]]) -> dict[str, Any]:
    """F1 of every class in every run."""
    found = [each[name] for each in results]
    scores = [{row.label: row.f1 for row in one.table} for one in found]
    none = Estimate(value=None, low=None, high=None)
    rows = [(row.label, row.support, [labels.get(row.label, none) for labels in scores]) for row in found[0].table]
    return {"name": name, "word": found[0].label_word, "rows": rows}


def _subtitle(run: Run, results: Mapping[str, Results]) -> list[str]:
    model = run.facts["settings"].get("model.name")
    parts = [str(run.facts["task"])] + ([] if model is None else [f"from {model}"])
    parts.append(f"{run.facts['rows']:,} training rows")
    parts += [f"{one.rows:,} validation {one.unit} {name}".rstrip() for name, one in results.items()]
    return parts


def _evaluation_rows(run: Run) -> list[tuple[int, int, float | None, list[float | None]]]:
    """(step, epoch, loss, metrics) of the newest evaluations."""
    names, loss = drawn_metrics(run), metric_key(run.sets[0], LOSS)
    return [
        (event["step"], event["epoch"], event["metrics"].get(loss), [event["metrics"].get(name) for name in names])
        for event in evaluations(run)[-_MOST_LINES:]
    ]


def _facts(run: Run) -> list[tuple[str, str]]:
    """What was run, for a list of names and values."""
    facts, settings, summary = run.facts, run.facts["settings"], run.summary
    found = [("task", facts["task"]), ("model", settings.get("model.name"))]
    found += [(f"{split} rows from", data["source"]) for split, data in facts["data"].items()]
    found += [(f"{split} fingerprint", data["fingerprint"][:12]) for split, data in facts["data"].items()]
    found += [("training rows", f"{facts['rows']:,}"), ("steps", f"{facts['steps']:,}")]
    if summary is not None:
        found += [
            ("best model after step", f"{summary['best_step']:,}"),
            ("training time", _time(summary["train_seconds"])),
        ]
        found += [("stopped early", "yes" if summary["stopped_early"] else "no")]
    found += [(name, settings.get(f"optim.{key}")) for name, key in _SETTINGS]
    found += [("metric for best model", settings.get("run.metric_for_best_model"))]
    found += [("seed", facts["seed"]), ("processes", f"{facts['processes']} x {facts['device']}")]
    found += [("attention", facts["attention"]), ("machine", facts["platform"]), ("python", facts["python"])]
    found += list(facts["versions"].items())
    return [(name, str(value)) for name, value in found if value is not None]


_SETTINGS = (
    ("epochs", "epochs"),
    ("batch size", "batch_size"),
    ("learning rate", "learning_rate"),
    ("warm-up ratio", "warmup_ratio"),
    ("weight decay", "weight_decay"),
    ("mixed precision", "mixed_precision"),
)


def _shared_facts(facts: Sequence[Mapping[str, str]]) -> dict[str, list[tuple[str, Any]]]:
    """Facts that are the same in all runs, and those that differ with each run's."""
    names = list(dict.fromkeys(name for one in facts for name in one))
    rows = [(name, [one.get(name, _NOTHING) for one in facts]) for name in names]
    return {
        "same": [(name, values[0]) for name, values in rows if len(set(values)) == 1],
        "different": [(name, values) for name, values in rows if len(set(values)) > 1],
    }


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
