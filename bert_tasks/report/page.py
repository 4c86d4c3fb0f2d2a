"""The HTML of a report, from templates that escape all values.

This module owns what a page holds at most, the order of its parts and the format of its numbers. The templates and the
style sheet are in ``templates/``.
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
from bert_tasks.report.settings import circumstances, repeat_command, setting_groups
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
    items: list[tuple[str, float | None]] = []
    if run.folds is None:  # the table of the folds has all metrics already
        items = list(overall_metrics(run).items())
    recorded = items
    if len(items) > _MOST_METRICS:
        half = _MOST_METRICS // 2
        recorded = items[:half] + items[-half:]  # both ends hold overall ones
    share = len(results) + (on_file is not None)  # the number of data sets, which share what a page may hold
    sets = [_set_section(run, name, results_on_set, share) for name, results_on_set in results.items()]
    if on_file is not None:
        sets.append(_file_section(on_file, share))
    issue_rows = None
    issue_count = 0
    if issues is not None:
        issue_count = len(issues)
        issue_rows = [(issue, _issue_texts(run, issue)) for issue in issues[:_MOST_ISSUES]]
    fold_rows: list[tuple[str, list[str]]] = []
    if run.folds is not None:
        fold_rows = _fold_rows(run.folds)
    recipe = None
    if run.recipe is not None:
        recipe = escape(run.recipe[:_MOST_RECIPE])  # markup is not cut again to the limit of other texts
    return (
        page_environment()
        .get_template("run.html")
        .render(
            title=f"{run.name} · bert-tasks report",
            run=run,
            summaries=_summaries(run, results, on_file),
            circumstances=circumstances(run),
            subtitle=_subtitle(run, results),
            sets=sets,
            is_whole=share == 1,
            curves=[chart for chart in (charts.loss_chart(run), charts.metric_chart(run)) if chart is not None],
            evaluations=run.evaluations[-_MOST_EVALUATIONS:],
            loss=metric_key(run.sets[0], LOSS),
            metrics=[(key, display_name(key, run.sets)) for key in drawn_metrics(run)],
            recorded=[(cut(name, _MOST_NAME), value) for name, value in recorded],
            unrecorded=len(items) - len(recorded),
            folds=run.folds,
            fold_rows=fold_rows,
            issues=issue_rows,
            issue_count=issue_count,
            groups=setting_groups(run),
            command=repeat_command(run),
            recipe=recipe,
        )
    )


def _summaries(run: Run, results: Mapping[str, Results], on_file: FileResults | None) -> list[str]:
    """Returns a sentence about each data set that says how good the model is. They are what a page says first."""
    role = "validation" if run.folds is None else "held-out"
    sentences = []
    for name, results_on_set in results.items():
        rows = f"{results_on_set.rows:,} {role} {results_on_set.sections.unit}"
        if name:
            rows = f"{rows} of {name}"
        sentences.append((rows, results_on_set.sections.summary))
    if on_file is not None and on_file.results is not None:
        file_name = cut(Path(on_file.source).name, _MOST_NAME)
        rows = f"{on_file.results.rows:,} {on_file.results.sections.unit} of {file_name}"
        sentences.append((rows, on_file.results.sections.summary))
    summaries = [f"On {rows}, {summary}." for rows, summary in sentences if summary]
    if not summaries:
        summaries = _recorded_score(run)
    return summaries


def _recorded_score(run: Run) -> list[str]:
    """Returns a sentence with the metric that selects the best model. The list is empty before an evaluation."""
    name, metric = run.best_metric
    value = run.metrics.get(metric_key(name, metric))
    if value is None:
        return []
    score = f"{display_name(metric_key(name, metric), run.sets)} {number(value)}"
    if run.folds is not None:
        return [f"The models of all folds have {score} on the held-out rows."]
    if run.summary is None:
        return [f"The latest evaluation gives {score} on the validation rows."]
    return [f"The best model has {score} on the validation rows."]


def _subtitle(run: Run, results: Mapping[str, Results]) -> list[str]:
    """Returns the task, the model and the numbers of rows, which stand below the title."""
    parts = [run.metadata.task]
    model = run.metadata.settings.get("model.name")
    if model is not None:
        parts.append(f"from {model}")
    role = "held-out"
    if run.folds is None:
        role = "validation"
        parts.append(f"{run.metadata.rows:,} training rows")
    for name, results_on_set in results.items():
        parts.append(f"{results_on_set.rows:,} {role} {results_on_set.sections.unit} {name}".rstrip())
    return parts


def _fold_rows(folds: FoldsRecord) -> list[tuple[str, list[str]]]:
    """Returns the name of each metric, with its value over all folds, mean, standard deviation and value in each."""
    rows = []
    for name, metric in folds.metrics.items():
        values = [metric.out_of_fold, *(fold.metrics.get(name) for fold in folds.runs)]
        numbers = [value for value in values if value is not None and math.isfinite(value)]
        # The records have counts as floats. ``number`` shows an int without decimals.
        is_count = any(value > 1 for value in numbers) and all(value == int(value) for value in numbers)
        cells = []
        for value in values:
            if is_count and value in numbers:
                value = int(value)
            elif is_count:
                value = None
            cells.append(number(value))
        overall, *of_folds = cells
        rows.append((cut(name, _MOST_NAME), [overall, number(metric.mean), number(metric.std), *of_folds]))
    return rows


def _issue_texts(run: Run, issue: LabelIssue) -> list[str]:
    """Returns the texts of a row, in the order of the task's columns."""
    texts: list[str] = []
    for column in run.predicted[0].task.columns:
        value = issue.row.get(column.name)
        if value is not None:
            texts += column.type.texts(value)
    return texts


def comparison_page(
    runs: Sequence[Run], results: Sequence[Mapping[str, Results]], comparisons: Sequence[Comparison]
) -> str:
    """Returns the page about several runs.

    Args:
        runs: Two or more runs.
        results: The results of each run, by validation set.
        comparisons: A comparison for each validation set.
    """
    drawn: dict[str, None] = {}
    for run in runs:
        drawn |= dict.fromkeys(drawn_metrics(run))
    names = list(drawn)
    loss_keys = [metric_key(name, LOSS) for name in runs[0].sets]
    losses = [key for key in loss_keys if key in runs[0].metrics]
    curves = [charts.runs_chart(runs, key) for key in [*losses[:1], *names[:1]]]
    properties: list[dict[str, str]] = []
    for run in runs:
        of_run: dict[str, str] = {}
        for group in setting_groups(run).values():
            of_run |= group
        properties.append(of_run)
    property_names: dict[str, None] = {}
    for entries in properties:
        property_names |= dict.fromkeys(entries)
    same: dict[str, str] = {}
    different = []
    for name in property_names:
        values = [entries.get(name, _NOTHING) for entries in properties]
        if len(set(values)) == 1:
            same[name] = values[0]
        else:
            different.append((name, values))
    shared = [name for name in results[0] if all(name in results_of_run for results_of_run in results)]
    tables = []
    for name in shared:
        results_on_set = [results_of_run[name] for results_of_run in results]
        tables.append(_f1_table(name, results_on_set, len(runs) * len(shared)))
    return (
        page_environment()
        .get_template("comparison.html")
        .render(
            title=f"{len(runs)} runs · bert-tasks report",
            runs=runs,
            comparisons=comparisons,
            curves=[chart for chart in curves if chart is not None],
            metrics=[(name, display_name(name, runs[0].sets)) for name in [*names, *losses]],
            same=same,
            different=different,
            tables=tables,
        )
    )


def _f1_table(name: str, results: Sequence[Results], share: int) -> dict[str, Any]:
    """Returns the F1 of the most frequent labels in every run."""
    scores_of_runs = []
    for results_of_run in results:
        scores_of_runs.append({row.name: row.scores["f1"] for row in results_of_run.table})
    rows = []
    for row in _most_frequent(results[0].table, share):
        # A label that another run does not have has no value there.
        scores = [scores_of_run.get(row.name, Estimate(value=None)) for scores_of_run in scores_of_runs]
        rows.append((row.name, row.count, scores))
    return {"name": name, "word": results[0].sections.label_word, "rows": rows}


def _most_frequent(table: Sequence[ScoreRow], share: int) -> list[ScoreRow]:
    """Returns the rows of the most frequent labels, in the order of the table."""
    # A task may have thousands of labels. Those that are not shown are counted below the table.
    most = max(1, _MOST_LABELS // share)
    frequent = {row.name for row in sorted(table, key=lambda row: -row.count)[:most]}
    return [row for row in table if row.name in frequent]


def _set_section(run: Run, name: str, results: Results, share: int) -> dict[str, Any]:
    """Returns a validation set with its title, results, charts and notes.

    Args:
        run: The run.
        name: The name of the validation set.
        results: The results on it.
        share: The number of data sets on the page.
    """
    best_set, best = run.best_metric
    headline = dict(results.headline)
    if best_set == name and best not in results.estimates and run.summary is not None:
        # The loss, for example, is no formula of sums over rows, so it has a value but no interval.
        headline = {best: Estimate(value=run.metrics.get(metric_key(best_set, best))), **headline}
    tries = len(run.evaluations)
    # What was chosen or fitted on these rows makes their scores better than those of new rows.
    reasons = []
    if best_set == name and tries > 1:
        reasons.append(f"the best of {tries:,} checkpoints was chosen")
    if untuned(run.metadata.metrics.primary) in run.metrics_of(name):
        reasons.append("thresholds were tuned")
    if results.sections.uncalibrated is not None:
        reasons.append("the temperature was fitted")
    caution = " and ".join(reasons)
    if caution:
        caution = f"{title_case(caution)} on this data, so expect worse scores on new data. The intervals ignore this."
    unit = results.sections.unit
    if run.folds is not None:
        fitted_on = "on the validation rows of each fold's run"
    elif name == run.sets[0]:
        fitted_on = f"on these {unit}"
    else:
        fitted_on = f"on the {unit} of {run.sets[0]}"
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
    name = cut(Path(on_file.source).name, _MOST_NAME)
    results = on_file.results
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
    """Returns results and charts, cut to what the page may hold. ``fitted_on`` names the rows of fitted values."""
    sections = results.sections
    table = _most_frequent(results.table, share)
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
    for chart in sections.charts:
        if chart.is_fitted:
            chart = replace(chart, note=f"{chart.note}. It was chosen {fitted_on}.")
        drawn.append(chart)
    # A page without examples of mistakes says whether there are none.
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
        autoescape=True,  # texts of rows and names of labels may hold HTML
        undefined=StrictUndefined,  # a misspelt name is an error and not an empty text
        finalize=_shortened,
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
        "strip": charts.Strip,
        "interval_axis": charts.interval_axis,
        "row_per_cent": row_per_cent,
        "level": LEVEL,
        "replicates": REPLICATES,
    }
    return environment


def _shortened(value: Any) -> Any:
    """Cuts a text to what a page can hold. Markup stays whole, because a cut might leave a tag open."""
    # ``Markup`` is a subclass of str, so isinstance would find it, too.
    if type(value) is str:
        return cut(value, _MOST_TEXT)
    return value


def number(value: float | None, percent: bool | None = None) -> str:
    """Formats with one decimal on a scale of 0 to 100, and three on a scale of 0 to 1.

    The value decides the scale if it is not set. A whole number without a scale is a count, and has no decimals.
    """
    if value is None or value != value:  # NaN differs from itself
        return _NOTHING
    if percent is None and isinstance(value, int):
        return f"{value:,}".replace("-", "\N{MINUS SIGN}")
    if percent is None:
        percent = abs(value) >= 2
    decimals = 1 if percent else 3
    return f"{value:,.{decimals}f}".replace("-", "\N{MINUS SIGN}")


def row_per_cent(count: int, total: int) -> str:
    """Formats a cell of a confusion matrix in per cent of its row, in which only all are 100 and only none are 0."""
    if 0 < count < 0.005 * total:
        return "<1%"
    if 0.995 * total < count < total:
        return ">99%"
    return f"{count / total:.0%}"


def signed(value: float) -> str:
    """Formats a contribution with a sign and three decimals, or with two digits if it is small."""
    text = f"{value:+.3f}" if abs(value) >= 0.01 else f"{value:+.2g}"
    return text.replace("-", "\N{MINUS SIGN}")


def title_case(text: str) -> str:
    """Returns the text with a capital first letter."""
    return text[:1].upper() + text[1:]


def p_value(value: float | None) -> str:
    """Formats a p-value with three decimals, or a dash if there is none."""
    if value is None:
        return _NOTHING
    if value < 0.001:
        return "< 0.001"
    return f"{value:.3f}"
