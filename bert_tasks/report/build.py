"""``make_report``, which gathers runs, computes their results, and writes the page and the files of rows.

This module owns which options go together, the order of the steps, and what a report says on a terminal. Paths and
options are checked before a model predicts, because predictions take by far the longest.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from html import escape
from pathlib import Path
from typing import Any, Literal

from bert_tasks.data.issues import counted
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.writers import DELIMITERS, TableWriter, check_place, flat, json_line, whole_file
from bert_tasks.environment import check_libraries
from bert_tasks.errors import UsageError
from bert_tasks.experiments.search import STUDY
from bert_tasks.model.explanation import check_explainable
from bert_tasks.model.multitask import AnyModel
from bert_tasks.report.collect import GivenRows, Run, gather, with_file_columns
from bert_tasks.report.comparison import Comparison, check_comparable, compare
from bert_tasks.report.explanations import with_explanations
from bert_tasks.report.label_issues import ISSUE_COLUMNS, LabelIssue, issue_cells, label_issues_of, weak_folds_note
from bert_tasks.report.page import comparison_page, run_page
from bert_tasks.report.results import (
    FileResults,
    Results,
    file_cells,
    label_column,
    model_of,
    results_of,
    results_on_file,
    slices_of,
)
from bert_tasks.report.search import search_page
from bert_tasks.storage import check_path
from bert_tasks.tables import Result, json_fields
from bert_tasks.training import files as outputs

_MISTAKE_COLUMNS = ("label", "prediction", "score")
_RENAMED = ("line", "set", *_MISTAKE_COLUMNS)  # a column of the input with such a name is called ``input.NAME``
_ONE_RUN = "--data, --by, --mistakes, --label-issues and --explain are for one run"


@dataclass(frozen=True, kw_only=True)
class WrittenRows:
    """A file of rows that a report has written, and the number of these rows."""

    file: Path
    rows: int


@dataclass(frozen=True, kw_only=True)
class Report(Result):
    """A report that was written.

    Attributes:
        output: The file of the page.
        runs: The runs that the page describes. A search has none here.
        results: For each run the results on each validation set, by its name.
        comparisons: The comparison of several runs, one for each validation set.
        on_file: The results on ``data``, if it was given.
        mistakes, label_issues: The files of mistakes and of rows whose label is probably wrong, if they were asked for.
    """

    output: Path
    # What the page says in full is not repeated where Python prints the object.
    runs: tuple[Run, ...] = field(default=(), repr=False)
    results: tuple[Mapping[str, Results], ...] = field(default=(), repr=False)
    comparisons: tuple[Comparison, ...] = field(default=(), repr=False)
    on_file: FileResults | None = field(default=None, repr=False)
    mistakes: WrittenRows | None = None
    label_issues: WrittenRows | None = None

    def _repr_html_(self) -> str:
        """Shows the page in a notebook. A frame keeps the notebook's style away from it."""
        page = escape(self.output.read_text("utf-8"))
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 700px; border: 0"></iframe>'

    def to_json(self) -> dict[str, Any]:
        """Returns the figures of the page, without its texts."""
        runs = []
        for run, results_by_set in zip(self.runs, self.results, strict=True):
            figures: dict[str, Any] = {
                "name": run.name,
                "folder": str(run.folder),
                "metrics": dict(run.metrics),
                "validation": {name: results.to_json() for name, results in results_by_set.items()},
                "notes": list(run.notes),
                "missing": list(run.missing),
            }
            if run.folds is not None:
                figures["folds"] = run.folds.to_json()
            runs.append(figures)
        figures = {
            "report": str(self.output),
            "runs": runs,
            "comparisons": [comparison.to_json() for comparison in self.comparisons],
            "data": None,
            "mistakes": None,
            "label_issues": None,
        }
        if self.on_file is not None:
            figures["data"] = self.on_file.to_json()
        if self.mistakes is not None:
            figures["mistakes"] = json_fields(self.mistakes)
        if self.label_issues is not None:
            figures["label_issues"] = json_fields(self.label_issues)
        return figures

    def lines(self) -> list[str]:
        """Returns notes and tables for a terminal. Several runs have the tables of their comparison only."""
        lines = []
        for run in self.runs:
            for note in (*run.notes, *run.missing):
                lines.append(f"{run.name}: {note}")
        if len(self.results) == 1:
            for name, results in self.results[0].items():
                lines += results.metric_table().lines(name)
                for slices in results.slices:
                    lines += slices.lines()
        if self.on_file is not None:
            lines += self.on_file.lines()
        for comparison in self.comparisons:
            lines += comparison.lines()
        if self.mistakes is not None:
            lines.append(f"{counted(self.mistakes.rows, 'mistake')}: {self.mistakes.file}")
        if self.label_issues is not None:
            count = self.label_issues.rows
            labels = "1 label that is" if count == 1 else f"{count} labels that are"
            lines.append(f"{labels} probably wrong: {self.label_issues.file}")
        return [*lines, f"report: {self.output}"]


def make_report(
    runs: Sequence[str | Path] | str | Path,
    output: str | Path | None = None,
    *,
    data: str | Path | None = None,
    by: Sequence[str] = (),
    mistakes: str | Path | None = None,
    label_issues: str | Path | None = None,
    explain: int = 0,
    reading: ReadOptions | None = None,
    on_error: Literal["fail", "skip"] | None = None,
    fit_rows: GivenRows | None = None,
) -> Report:
    """Writes one self-contained HTML file about a run, several runs or a search.

    The page has no scripts and needs no network, so it can be sent to someone who has neither the model nor the rows.
    About one run it shows curves, metrics with bootstrap intervals, tables by class, the most confident mistakes and
    the settings. About several runs it shows their differences with p-values of a permutation test (``train_seeds``
    makes such runs). About a search it shows the best values and all trials.

    A run keeps no predictions, so the saved model predicts the validation rows again, which takes as long as one
    evaluation. If these rows are missing or have changed, the report shows curves, metrics and settings only, and says
    so.

    Args:
        runs: Output folders of ``train``, where a folder of seeds stands for its runs, or the folder of one search.
        output: The file. Default: ``report.html`` in the folder of the run, or in the current folder for several runs.
        data: A file with labels on which the model of a single run is evaluated, too. Default: none.
        by: Columns whose values have scores of their own. They are columns of ``data``, or of the validation rows and
            of all rows of a cross-validation. Default: none.
        mistakes: A .csv, .tsv or .jsonl file for the wrongly predicted rows of ``data`` or of the validation sets.
            Default: none is written.
        label_issues: A file of one of these kinds for the rows of a cross-validation whose label is probably wrong. It
            needs the extra ``labels``. Default: none is written.
        explain: The number of examples of each data set whose words are shaded by their contributions. Default: 0.
        reading: How to read ``data``. Default: as the training file was read, if it has its extension.
        on_error: "fail" or "skip" for rows of ``data`` that cannot be used. Default: as in training.
        fit_rows: The validation rows of a run of ``fit``, which has no recipe.

    Returns:
        The report, with the results of each run and the paths of the written files. ``print`` shows them as tables.

    Raises:
        UsageError: A folder has no run, the runs cannot be compared, or options or columns do not fit.
        DataError: ``data`` has bad rows.
        CheckpointError: The model cannot be loaded, or the report cannot be written.

    Examples:
        >>> report = make_report("runs/first", data="test.csv", mistakes="mistakes.csv")
        >>> report.mistakes.file.name, report.output.name
        ('mistakes.csv', 'report.html')
    """
    folders = _folders_of(runs)
    _check_paths([*folders, output, data, mistakes, label_issues])
    page_path = _page_path(output, folders)
    if data is None:
        _check_nothing_is_read(reading, on_error)
    written_to = [page_path]
    if data is not None:
        written_to.append(Path(data))
    # No file of rows may replace the page, the file that is read, or another file of rows.
    for path, content in ((mistakes, "mistakes"), (label_issues, "labels")):
        if path is not None:
            check_rows_file(Path(path), written_to, content)
            written_to.append(Path(path))
    is_for_one_run = bool(by) or explain > 0 or any(path is not None for path in (data, mistakes, label_issues))
    if len(folders) == 1 and (folders[0] / STUDY).is_file():
        if is_for_one_run:
            raise UsageError(f"{folders[0]} holds a search. {_ONE_RUN}. Name one of its runs")
        outputs.write_text(page_path, search_page(folders[0]))
        return Report(output=page_path)
    gathered = gather(folders, fit_rows)
    if len(gathered) > 1:
        if is_for_one_run:
            raise UsageError(f"{_ONE_RUN}, not for {len(gathered)}. Name one of them")
        return _report_on_runs(gathered, page_path)
    (run,) = gathered
    issues = None
    if label_issues is not None:
        check_libraries(["cleanlab"], extra="labels", purpose="--label-issues")
        run, issues = _with_label_issues(run)
    model = None
    if explain != 0:
        model = model_of(run, "to explain predictions")
        _check_explainable(model)
    # With a file, the columns are those of the file.
    columns = by if data is None else ()
    results = run_results(run, by=columns)
    on_file = None
    if data is not None:
        options = ReadOptions() if reading is None else reading
        on_file = results_on_file(run, data, by=by, read_options=options, on_error=on_error)
    # Explanations are part of the page only, so they come before it and behind all figures.
    if model is not None:
        results, on_file = _explained(run, model, explain, results, on_file)
    # The page is written last, so that a report stands for all of its files.
    wrong_rows = None
    if mistakes is not None:
        wrong_rows = _write_mistakes(Path(mistakes), run, results, on_file)
    rows_to_correct = None
    if label_issues is not None and issues is not None:
        cells = [issue_cells(issue, file_cells(issue.row)) for issue in issues]
        rows_to_correct = write_rows(Path(label_issues), cells, last=ISSUE_COLUMNS)
    outputs.write_text(page_path, run_page(run, results, on_file, issues))
    return Report(
        output=page_path,
        runs=(run,),
        results=(results,),
        on_file=on_file,
        mistakes=wrong_rows,
        label_issues=rows_to_correct,
    )


def _page_path(output: str | Path | None, folders: Sequence[Path]) -> Path:
    """Returns the file of the page, whose folder exists."""
    if output is not None:
        page_path = Path(output)
    elif len(folders) == 1:
        page_path = folders[0] / outputs.REPORT
    else:
        page_path = Path(outputs.REPORT)
    if page_path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{page_path}: expected a name that ends in .html for the report")
    # The folder of a run, which is the default, is looked at later, with a better message if it does not exist.
    if output is not None and not page_path.absolute().parent.is_dir():
        raise UsageError(f"{page_path}: there is no folder {page_path.parent} for the report. Make it first")
    return page_path


def _report_on_runs(runs: Sequence[Run], page_path: Path) -> Report:
    """Writes the page about several runs, which is a comparison with the first of them."""
    check_comparable(runs)
    results = [run_results(run) for run in runs]
    comparisons = compare(runs, results)
    outputs.write_text(page_path, comparison_page(runs, results, comparisons))
    return Report(output=page_path, runs=tuple(runs), results=tuple(results), comparisons=tuple(comparisons))


def _explained(
    run: Run, model: AnyModel, count: int, results: Mapping[str, Results], on_file: FileResults | None
) -> tuple[dict[str, Results], FileResults | None]:
    """Returns the results of the run and of a file with explanations of the first ``count`` examples of each."""
    explained = dict(results)
    for predicted in run.predicted:
        title = predicted.title
        head = model.heads[predicted.head]
        if title in explained:
            explained[title] = with_explanations(explained[title], head, count)
    if on_file is not None and on_file.results is not None:
        on_file = replace(on_file, results=with_explanations(on_file.results, model.one_task(), count))
    return explained, on_file


def _check_nothing_is_read(reading: ReadOptions | None, on_error: str | None) -> None:
    """Raises UsageError if options say how a file is read, although there is none."""
    stated = []
    if reading is not None:
        stated = [name for name, value in vars(reading).items() if value not in (None, {})]
    if on_error is not None:
        stated.append("on_error")
    if stated:
        raise UsageError(f"{', '.join(stated)}: this says how a file is read. Name the file with --data")


def _check_explainable(model: AnyModel) -> None:
    """Raises UsageError if examples of a head cannot be explained."""
    for head in model.heads.values():
        check_explainable(head, head.task)
        names = {field.name for field in fields(head.task.output.prediction)}
        # A prediction of several spans or relations holds one explanation for each of them.
        if "explanation" not in names:
            raise UsageError(
                f"--explain shades one explanation for an example, but {head.task.name} has several for a row. Use "
                "bert-tasks predict --explain"
            )


def _with_label_issues(run: Run) -> tuple[Run, tuple[LabelIssue, ...]]:
    """Returns the run, with a caution if its models are weak, and the label issues of a cross-validation."""
    issues = label_issues_of(run)
    caution = weak_folds_note(run)
    if caution is None:
        return run, issues
    return replace(run, missing=(*run.missing, caution)), issues


def _folders_of(runs: Sequence[str | Path] | str | Path) -> list[Path]:
    """Returns one or several folders as a list."""
    if isinstance(runs, str | Path):
        return [Path(runs)]
    folders = [Path(run) for run in runs]
    if not folders:
        raise UsageError("no run to report on. Name at least one output folder of `bert-tasks train`")
    return folders


def _check_paths(paths: Sequence[str | Path | None]) -> None:
    """Raises UsageError for a path that no file can have."""
    for path in paths:
        if path is not None:
            check_path(path)


def run_results(run: Run, *, by: Sequence[str] = ()) -> dict[str, Results]:
    """Returns the results on each validation set, with the best model's metric first.

    Args:
        run: The run. Each of several tasks has results of its own, with its name behind the name of the set.
        by: Columns of the file, or of the task, whose values have scores of their own.

    Raises:
        UsageError: ``by`` needs predictions that cannot be made, or a column does not exist.
    """
    predicted_sets = run.predicted
    if by and run.predicted:
        predicted_sets = with_file_columns(run).predicted
    results: dict[str, Results] = {}
    for predicted in predicted_sets:
        task, predictions, rows = predicted.task, predicted.predictions, predicted.rows
        result = results_of(task, predictions, rows, first=run.best_metric[1])
        if result is not None:
            slices = slices_of(task, predictions, rows, columns=by, names=list(result.headline))
            results[predicted.title] = replace(result, slices=slices)
    if by and not results:
        reasons = " ".join(run.missing) if run.missing else "Its task has no figures for a report."
        needed = "the validation rows, or a file named with --data" if run.folds is None else "the rows of all folds"
        raise UsageError(f"{run.folder}: --by needs {needed}. {reasons}")
    return results


def check_rows_file(path: Path, others: Sequence[Path], content: str) -> None:
    """Raises UsageError if the file is also another output or cannot hold rows."""
    if path.suffix[1:] not in ("jsonl", *DELIMITERS):
        raise UsageError(f"{path}: expected a name that ends in .csv, .tsv or .jsonl for the {content}")
    check_place(path)
    for other in others:
        # ``samefile`` also finds hard links and names that differ in case, but both files must exist.
        with suppress(OSError):
            if os.path.realpath(path) == os.path.realpath(other) or path.samefile(other):
                raise UsageError(f"{path}: the {content} would overwrite {other}. Choose another name")


def _write_mistakes(path: Path, run: Run, results: Mapping[str, Results], on_file: FileResults | None) -> WrittenRows:
    """Writes the wrongly predicted rows of a file or of validation sets, by score."""
    sets = dict(results)
    label_columns = {each.title: label_column(each.task) for each in run.predicted}
    if on_file is not None:
        sets, label_columns = {}, {"": on_file.label_column}
        if on_file.results is not None:
            sets = {"": on_file.results}
    if not sets:
        reasons = " ".join(run.missing) if run.missing else "The task does not say which rows are wrong. Use `predict`."
        raise UsageError(f"{run.folder}: there are no predictions to write mistakes of. {reasons}")
    wrong = []
    for name, results_on_set in sets.items():
        wrong += [(name, row) for row in results_on_set.sections.results if not row.is_correct]
    rows: list[dict[str, Any]] = []
    # The most confident mistakes come first, because they often are mistakes of the labels.
    for name, result in sorted(wrong, key=lambda pair: -pair[1].score):
        cells = {"line": result.row.get("line")}
        if len(sets) > 1:
            cells["set"] = name
        for column, value in file_cells(result.row).items():
            if column == "label" and label_columns[name] == "label":
                continue  # it is the true label, which stands beside the prediction
            if column in _RENAMED:
                column = f"input.{column}"
            cells[column] = value
        cells |= {"label": result.label, "prediction": result.prediction, "score": result.score}
        rows.append(cells)
    return write_rows(path, rows, last=_MISTAKE_COLUMNS)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], *, last: Sequence[str]) -> WrittenRows:
    """Writes rows as JSON lines or as a table, with the columns ``last`` at its end."""
    with whole_file(path) as file:
        if path.suffix == ".jsonl":
            for row in rows:
                file.write(json_line(row))
        else:
            # A table needs all of its columns before its first row. Rows of several files may differ in theirs.
            flat_rows = [flat(row) for row in rows]
            columns: dict[str, None] = {"line": None}
            for row in flat_rows:
                columns |= dict.fromkeys(name for name in row if name not in last)
            columns |= dict.fromkeys(last)
            writer = TableWriter(file, list(columns), DELIMITERS[path.suffix[1:]], raw=False)
            for row in flat_rows:
                writer.write(row)
    return WrittenRows(file=path, rows=len(rows))
