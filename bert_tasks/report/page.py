"""The HTML of a report, from templates that escape all values.

Owns the order of the page and the format of numbers. The templates and the style sheet are in ``templates/``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import escape

from bert_tasks.experiments.folds import FoldsRecord
from bert_tasks.metrics.tables import LOSS, metric_key, untuned
from bert_tasks.outputs.sections import MOST_EXAMPLES, Chart, cut, thinned
from bert_tasks.report import charts
from bert_tasks.report.charts import display_name, drawn_metrics, overall_metrics, spoken
from bert_tasks.report.collect import Run
from bert_tasks.report.comparison import Comparison
from bert_tasks.report.label_issues import LabelIssue
from bert_tasks.report.results import FileResults, Results, ScoreRow
from bert_tasks.report.statistics import LEVEL, REPLICATES, Estimate

# What a page holds at most, so that it stays small whatever the run has.
_MOST_LABELS = 200  # rows of its tables by label, divided by the number of data sets or runs
_MOST_EVALUATIONS = 60  # rows of the table of evaluations
_MOST_ISSUES = 50  # rows whose label is probably wrong
_MOST_METRICS = 300  # rows of the table of recorded metrics
_MOST_NAME = 200  # characters of a metric's name
_MOST_RECIPE = 20_000  # characters
_MOST_TEXT = 5_000  # characters of any other text
_MOST_LABEL = 80  # characters of a label
_NOTHING = "\N{EN DASH}"


def run_page(
    run: Run,
    results: Mapping[str, Results],
    on_file: FileResults | None = None,
    issues: Sequence[LabelIssue] | None = None,
) -> str:
    """Returns the page about one run.

    Args:
        run: The run.
        results: The results on its validation sets, by name.
        on_file: The results of its model on a labelled file.
        issues: Rows whose label is probably wrong, if they were looked for.
    """
    # The table of the folds has all metrics.
    items, half = [] if run.folds is not None else list(overall_metrics(run).items()), _MOST_METRICS // 2
    recorded = items if len(items) <= _MOST_METRICS else items[:half] + items[-half:]  # both ends hold overall ones
    model = run.metadata.settings.get("model.name")
    subtitle = [run.metadata.task, *([] if model is None else [f"from {model}"])]
    subtitle += [] if run.folds is not None else [f"{run.metadata.rows:,} training rows"]
    role = "validation" if run.folds is None else "held-out"
    subtitle += [f"{each.rows:,} {role} {each.sections.unit} {name}".rstrip() for name, each in results.items()]
    share = len(results) + (on_file is not None)
    sets = [_set_section(run, name, each, share) for name, each in results.items()]
    return (
        page_environment()
        .get_template("run.html")
        .render(
            title=f"{run.name} · bert-tasks report",
            run=run,
            subtitle=subtitle,
            sets=sets if on_file is None else [*sets, _file_section(on_file, share)],
            is_whole=share == 1,
            curves=[chart for chart in (charts.loss_chart(run), charts.metric_chart(run)) if chart is not None],
            evaluations=run.evaluations[-_MOST_EVALUATIONS:],
            loss=metric_key(run.sets[0], LOSS),
            metrics=[(key, display_name(key, run.sets)) for key in drawn_metrics(run)],
            recorded=[(cut(name, _MOST_NAME), value) for name, value in recorded],
            unrecorded=len(items) - len(recorded),
            folds=run.folds,
            fold_rows=[] if run.folds is None else _fold_rows(run.folds),
            issues=None if issues is None else [(issue, _issue_texts(run, issue)) for issue in issues[:_MOST_ISSUES]],
            issue_count=0 if issues is None else len(issues),
            properties=_properties(run),
            recipe=None if run.recipe is None else escape(run.recipe[:_MOST_RECIPE]),
        )
    )


def _fold_rows(folds: FoldsRecord) -> list[tuple[str, list[str]]]:
    """Returns each metric's name, total, mean, standard deviation and fold values."""
    rows = []
    for name, metric in folds.metrics.items():
        values = [metric.out_of_fold, *(fold.metrics.get(name) for fold in folds.runs)]
        numbers = [value for value in values if value is not None and math.isfinite(value)]
        is_count = any(value > 1 for value in numbers) and all(value == int(value) for value in numbers)
        if is_count:
            values = [int(value) if value in numbers else None for value in values]
        overall, *each = map(number, values)
        rows.append((cut(name, _MOST_NAME), [overall, number(metric.mean), number(metric.std), *each]))
    return rows


def _issue_texts(run: Run, issue: LabelIssue) -> list[str]:
    """Returns the texts of a row, in the order of the task's columns."""
    columns = run.predicted[0].task.columns
    values = [(column.type, issue.row.get(column.name)) for column in columns]
    return [text for column_type, value in values if value is not None for text in column_type.texts(value)]


def comparison_page(
    runs: Sequence[Run], results: Sequence[Mapping[str, Results]], comparisons: Sequence[Comparison]
) -> str:
    """Returns the page about several runs.

    Args:
        runs: Two or more runs.
        results: The results of each run, by validation set.
        comparisons: A comparison for each validation set.
    """
    names = list(dict.fromkeys(name for run in runs for name in drawn_metrics(run)))
    losses = [key for key in (metric_key(name, LOSS) for name in runs[0].sets) if key in runs[0].metrics]
    curves = [charts.runs_chart(runs, key) for key in [*losses[:1], *names[:1]]]
    properties = [dict(_properties(run)) for run in runs]
    rows = {
        name: [entries.get(name, _NOTHING) for entries in properties]
        for name in dict.fromkeys(name for entries in properties for name in entries)
    }
    shared = [name for name in results[0] if all(name in each for each in results)]
    tables = [_f1_table(name, [each[name] for each in results], len(runs) * len(shared)) for name in shared]
    return (
        page_environment()
        .get_template("comparison.html")
        .render(
            title=f"{len(runs)} runs · bert-tasks report",
            runs=runs,
            comparisons=comparisons,
            curves=[chart for chart in curves if chart is not None],
            metrics=[(name, display_name(name, runs[0].sets)) for name in [*names, *losses]],
            same=[(name, values[0]) for name, values in rows.items() if len(set(values)) == 1],
            different=[(name, values) for name, values in rows.items() if len(set(values)) > 1],
            tables=tables,
        )
    )


def _f1_table(name: str, results: Sequence[Results], share: int) -> dict[str, Any]:
    """Returns the F1 of the most frequent labels in every run."""
    scores = [{row.name: row.scores["f1"] for row in each.table} for each in results]
    rows = [
        (row.name, row.count, [each.get(row.name, Estimate(value=None)) for each in scores])
        for row in _most_frequent(results[0].table, share)
    ]
    return {"name": name, "word": results[0].sections.label_word, "rows": rows}


def _most_frequent(table: Sequence[ScoreRow], share: int) -> list[ScoreRow]:
    """Returns the rows of the most frequent labels, in the order of the table."""
    most = max(1, _MOST_LABELS // share)
    frequent = {row.name for row in sorted(table, key=lambda row: -row.count)[:most]}
    return [row for row in table if row.name in frequent]


def _set_section(run: Run, name: str, results: Results, share: int) -> dict[str, Any]:
    """Returns a validation set with its title, results, charts and notes."""
    best_set, best = run.best_metric
    headline = dict(results.headline)
    if best_set == name and best not in results.estimates and run.summary is not None:
        headline = {best: Estimate(value=run.metrics.get(metric_key(best_set, best))), **headline}
    tries = len(run.evaluations)
    reasons = [f"the best of {tries:,} checkpoints was chosen"] if best_set == name and tries > 1 else []
    if untuned(run.metadata.metrics.primary) in run.metrics_of(name):
        reasons.append("thresholds were tuned")
    if results.sections.uncalibrated is not None:
        reasons.append("the temperature was fitted")
    caution = " and ".join(reasons)
    if caution:
        caution = f"{title_case(caution)} on this data, so expect worse scores on new data. The intervals ignore this."
    unit = results.sections.unit
    fitted_on = f"on these {unit}" if name == run.sets[0] else f"on the {unit} of {run.sets[0]}"
    if run.folds is not None:
        fitted_on = "on the validation rows of each fold's run"
    return {
        "title": f"Results on {name}" if name else "Results",
        "of": f" of {name}" if name else "",
        **_result_content(results, fitted_on, share),
        "headline": headline,
        "caution": caution,
        "slices": results.slices,
        "metrics": (),
    }


def _file_section(on_file: FileResults, share: int) -> dict[str, Any]:
    """Returns the section of a file with the scores by the file's columns."""
    name, results = cut(Path(on_file.source).name, _MOST_NAME), on_file.results
    content: dict[str, Any] = {"results": None, "headline": {}, "charts": (), "is_perfect": False}
    if results is not None:
        content = {**_result_content(results, "on the validation rows", share), "headline": results.headline}
    return {
        **content,
        "title": f"On {name}",
        "of": f" of {name}",
        "caution": "",
        "slices": on_file.slices,
        "metrics": list(on_file.table.overall.items())[:_MOST_METRICS],
    }


def _result_content(results: Results, fitted_on: str, share: int) -> dict[str, Any]:
    """Returns results and charts. ``fitted_on`` names the rows of fitted values."""
    sections, table = results.sections, _most_frequent(results.table, share)
    examples = sections.examples
    if examples is not None:
        items = examples.items[: max(1, MOST_EXAMPLES // share)]
        sections = replace(sections, examples=replace(examples, items=items))
    drawn: list[Chart] = []
    if sections.calibration is not None:
        chart = charts.calibration_chart(
            sections.calibration,
            sections.confidence_in,
            uncalibrated=sections.uncalibrated,
            fitted_on=fitted_on,
        )
        drawn.append(chart)
    drawn += [
        replace(chart, note=f"{chart.note}. It was chosen {fitted_on}.") if chart.is_fitted else chart
        for chart in sections.charts
    ]
    is_perfect = bool(sections.results) and all(row.is_correct for row in sections.results)
    left_out = results.left_out + len(results.table) - len(table)
    return {
        "results": replace(results, sections=sections, table=tuple(table), left_out=left_out),
        "charts": drawn,
        "is_perfect": is_perfect and (examples is None or not examples.items),
    }


@cache
def page_environment() -> Environment:
    """Returns the functions and the settings of the pages' templates."""
    environment = Environment(
        loader=PackageLoader("bert_tasks.report"),
        autoescape=True,
        undefined=StrictUndefined,
        # Texts are cut to what a page can hold, but markup stays whole.
        finalize=lambda value: cut(value, _MOST_TEXT) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "signed": signed,
        "p_value": p_value,
        "spoken": spoken,
        "title_case": title_case,
        "cut": cut,
        "label": lambda label: cut(label, _MOST_LABEL),
        "coordinate": charts.coordinate,
        "thinned": thinned,
    }
    environment.globals |= {
        "plot": charts.Plot,
        "styles": charts.STYLES,
        "scaled": lambda value, top: charts.coordinate(4 + 112 * max(0.0, min(1.0, value / top))),
        "level": LEVEL,
        "replicates": REPLICATES,
    }
    return environment


def number(value: float | None, percent: bool | None = None) -> str:
    """Formats with one decimal on a scale of 0 to 100, and three on a scale of 0 to 1.

    The value decides the scale if it is not set. A whole number without a scale is a count, and has no decimals.
    """
    if value is None or value != value:
        return _NOTHING
    if percent is None and isinstance(value, int):
        return f"{value:,}".replace("-", "\N{MINUS SIGN}")
    is_large = abs(value) >= 2 if percent is None else percent
    return f"{value:,.{1 if is_large else 3}f}".replace("-", "\N{MINUS SIGN}")


def signed(value: float) -> str:
    """Formats a contribution with a sign, and three decimals or two digits."""
    text = f"{value:+.3f}" if abs(value) >= 0.01 else f"{value:+.2g}"
    return text.replace("-", "\N{MINUS SIGN}")


def title_case(text: str) -> str:
    """Returns the text with a capital first letter."""
    return text[:1].upper() + text[1:]


def p_value(value: float | None) -> str:
    """Formats a p-value with three decimals, or a dash if there is none."""
    if value is None:
        return _NOTHING
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _properties(run: Run) -> list[tuple[str, str]]:
    """Names and values of what was run."""
    metadata, settings, summary = run.metadata, run.metadata.settings, run.summary
    facts = [("task", metadata.task), ("model", settings.get("model.name"))]
    facts += [(f"{name} rows from", split.source) for name, split in metadata.data.items()]
    facts += [(f"{name} fingerprint", split.fingerprint[:12]) for name, split in metadata.data.items()]
    if run.folds is not None:
        facts += [("folds", run.folds.summary), ("models", f"one per fold, {run.folder}/fold-N (first one below)")]
    facts += [("training rows", f"{metadata.rows:,}"), ("steps", f"{metadata.steps:,}")]
    if summary is not None:
        minutes, seconds = divmod(round(summary.train_seconds), 60)
        hours, minutes = divmod(minutes, 60)
        time = f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
        facts += [("best model after step", f"{summary.best_step:,}"), ("training time", time)]
        facts += [("stopped early", "yes" if summary.stopped_early else "no")]
    for event in run.events:
        if event.event == "agreement":
            shares = [f"{share:.1%}{f' on {name}' if name else ''}" for name, share in event.agreement.items()]
            facts += [("predictions as the teacher's", ", ".join(shares))]
    in_steps = settings.get("optim.max_steps") is not None
    facts += [(name, settings.get(key)) for name, key in _SETTINGS if not (in_steps and key == "optim.epochs")]
    facts += [("seed", metadata.seed), ("processes", f"{metadata.processes} x {metadata.device}")]
    facts += [("attention", metadata.attention), ("machine", metadata.platform)]
    facts += [("python", metadata.python), *metadata.versions.items()]
    return [(name, str(value)) for name, value in facts if value is not None]


_SETTINGS = (
    ("epochs", "optim.epochs"),
    ("steps at most", "optim.max_steps"),
    ("batch size", "optim.batch_size"),
    ("tokens of a batch", "optim.batch_tokens"),
    ("learning rate", "optim.learning_rate"),
    ("schedule", "optim.lr_scheduler_type"),
    ("warm-up ratio", "optim.warmup_ratio"),
    ("weight decay", "optim.weight_decay"),
    ("mixed precision", "optim.mixed_precision"),
    ("metric for best model", "run.metric_for_best_model"),
    ("layers of the checkpoint", "model.layers"),
    ("teacher", "teacher.name"),
    ("temperature", "teacher.temperature"),
    ("weight of the teacher", "teacher.weight"),
)
