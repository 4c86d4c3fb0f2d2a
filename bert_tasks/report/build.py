"""From folders of runs to a file: gather the runs, compute their results, render the page and write it."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bert_tasks.data.problems import counted, is_or_are
from bert_tasks.data.readers import ReadOptions
from bert_tasks.data.writers import DELIMITERS, TableWriter, check_place, flat, json_line, whole_file
from bert_tasks.errors import UsageError
from bert_tasks.experiments.search import SEARCH, STUDY
from bert_tasks.model.explanation import explainable_task
from bert_tasks.model.task_model import TaskModel
from bert_tasks.report.collect import GivenRows, Run, gather, with_file_columns
from bert_tasks.report.comparison import Comparison, check_comparable, compared
from bert_tasks.report.explanations import with_explanations
from bert_tasks.report.label_issues import ISSUE_COLUMNS, check_label_issues, issue_cells
from bert_tasks.report.label_issues import label_issues as issues_of
from bert_tasks.report.page import comparison_page, run_page
from bert_tasks.report.results import (
    FileResults,
    Results,
    SliceOptions,
    file_cells,
    model_of,
    results_of,
    results_on_file,
    slices_of,
)
from bert_tasks.report.search import search_page
from bert_tasks.training import files as outputs

_FORMATS = ("jsonl", *DELIMITERS)
_OWN = ("line", "set", "label", "prediction", "score")
_INPUT = "input."  # before the name of a column of the input that is called like one of those


@dataclass(frozen=True, kw_only=True)
class Mistakes:
    """A file of rows whose prediction is wrong, and their number."""

    path: Path
    rows: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report that was written.

    Attributes:
        results: for each run the results on each validation set, by its name.
        comparisons: of several runs, one for each validation set.
        on_file: the results on the file that was named.
        mistakes: the file of mistakes, if one was asked for.
        label_issues: the file of rows whose label is probably wrong, likewise.
    """

    output: Path
    runs: tuple[Run, ...]
    results: tuple[Mapping[str, Results], ...]
    comparisons: tuple[Comparison, ...]
    on_file: FileResults | None = None
    mistakes: Mistakes | None = None
    label_issues: Mistakes | None = None

    def to_json(self) -> dict[str, Any]:
        """The figures of the page."""
        runs = [
            {
                "name": run.name,
                "folder": str(run.folder),
                "metrics": dict(run.metrics),
                "validation": {name: one.to_json() for name, one in found.items()},
                "notes": list(run.notes),
                "missing": list(run.missing),
                **({} if run.folds is None else {"folds": run.folds}),
            }
            for run, found in zip(self.runs, self.results, strict=True)
        ]
        return {
            "report": str(self.output),
            "runs": runs,
            "comparisons": [comparison.to_json() for comparison in self.comparisons],
            "data": None if self.on_file is None else self.on_file.to_json(),
            "mistakes": None
            if self.mistakes is None
            else {"file": str(self.mistakes.path), "rows": self.mistakes.rows},
            "label_issues": None
            if self.label_issues is None
            else {"file": str(self.label_issues.path), "rows": self.label_issues.rows},
        }

    def lines(self) -> list[str]:
        """For people."""
        notes = [f"{run.name}: {note}" for run in self.runs for note in (*run.notes, *run.missing)]
        results = self.results[0] if len(self.results) == 1 else {}
        tables = [
            line
            for name, one in results.items()
            for line in (*one.metric_table().lines(name), *(line for part in one.slices for line in part.lines()))
        ]
        compared = [line for comparison in self.comparisons for line in comparison.lines()]
        on_file = [] if self.on_file is None else self.on_file.lines()
        wrong = [] if self.mistakes is None else [f"{counted(self.mistakes.rows, 'mistake')}: {self.mistakes.path}"]
        if self.label_issues is not None:
            count = self.label_issues.rows
            wrong.append(f"{counted(count, 'label')} that {is_or_are(count)} probably wrong: {self.label_issues.path}")
        return [*notes, *tables, *on_file, *compared, *wrong, f"report: {self.output}"]


def make_report(
    runs: Sequence[str | Path] | str | Path,
    output: str | Path | None = None,
    *,
    data: str | Path | None = None,
    by: Sequence[str] = (),
    by_length: bool = False,
    by_confidence: bool = False,
    mistakes: str | Path | None = None,
    label_issues: str | Path | None = None,
    explain: int = 0,
    reading: ReadOptions | None = None,
    given: GivenRows | None = None,
) -> Report:
    """Writes one self-contained HTML file: no scripts, no network, light and dark.

    The saved model predicts the run's validation rows again. If these are gone or have changed, the report shows what
    the folder has (curves, metrics, settings) and says what is missing.

    Args:
        runs: output folders of ``train``; that of ``train --seeds`` stands for all of its runs, that of
            ``train --folds`` is one with all rows. Or that of one ``search``, whose page is about its trials.
        output: default: ``report.html`` in the folder that was given, in the current folder for several.
        data: a file with labels to evaluate the model on, too; for one run only.
        by: columns of that file, or of the task: the scores are shown for each of their values. Without ``data`` the
            rows are the validation rows, or all rows of a cross-validation, with the columns of their files.
        by_length: also show the scores of rows of similar length, in four groups.
        by_confidence: likewise, of rows of whose predictions the model is similarly confident.
        mistakes: a .csv, .tsv or .jsonl file for the rows whose prediction is wrong: those of ``data``, else those of
            the validation sets.
        label_issues: likewise, for the rows of a cross-validation whose label is probably wrong.
        explain: how many examples of each data set have their words shaded by what they contributed to the prediction;
            for one run only.
        reading: how ``data`` is read; what is not stated is as in training.
        given: the validation rows of a run of ``fit``, which has no recipe.

    Returns:
        What was written, and the figures on it.

    Raises:
        UsageError: a folder without a run, runs that cannot be compared, options that do not go together, no such
            column, or an output that is not possible.
        DataError: ``data`` has bad rows.
        CheckpointError: the model cannot be loaded, or the report cannot be written.
    """
    folders = [Path(runs)] if isinstance(runs, str | Path) else [Path(run) for run in runs]
    if not folders:
        raise UsageError("no run: name at least one output folder of `bert-tasks train`")
    page_path = _page_path(folders, output)
    mistakes_path = None if mistakes is None else Path(mistakes)
    issues_path = None if label_issues is None else Path(label_issues)
    if data is None and reading is not None:
        stated = [name for name, value in vars(reading).items() if value not in (None, {})]
        if stated:
            raise UsageError(f"{', '.join(stated)}: this says how a file is read; name the file with --data")
    if mistakes_path is not None:
        check_mistakes_file(mistakes_path, [page_path, *([] if data is None else [Path(data)])])
    if issues_path is not None:
        check_label_issues()
        others = [Path(name) for name in (data, mistakes) if name is not None]
        check_mistakes_file(issues_path, [page_path, *others], "labels")
    slices = SliceOptions(columns=tuple(by), length=by_length, confidence=by_confidence)
    of_one_run = any(one is not None for one in (data, mistakes_path, issues_path)) or not slices.is_empty
    if len(folders) == 1 and any((folders[0] / name).is_file() for name in (SEARCH, STUDY)):
        return _search_report(folders[0], page_path, of_one_run=of_one_run or explain > 0)
    found = gather(folders, given)
    if len(found) > 1:
        if of_one_run:
            raise UsageError(
                "--data, --by, --by-length, --by-confidence, --mistakes and --label-issues are for one run, not for "
                f"{len(found)}: name one of them"
            )
        check_comparable(found)
    model = _explaining_model(found) if explain else None
    results = [_run_results(run) for run in found]
    issues = None if issues_path is None else issues_of(found[0])
    on_file, written, to_correct = None, None, None
    if data is not None:
        options = ReadOptions() if reading is None else reading
        on_file = results_on_file(found[0], data, slices=slices, read_options=options)
    elif not slices.is_empty:
        results = [_with_slices(found[0], results[0], slices)]
    if model is not None:
        results[0], on_file = _explained(results[0], on_file, model, explain)
    if mistakes_path is not None:
        written = Mistakes(path=mistakes_path, rows=_write_mistakes(mistakes_path, found[0], results[0], on_file))
    if issues_path is not None and issues is not None:
        rows = [issue_cells(issue, file_cells(issue.row)) for issue in issues]
        to_correct = Mistakes(path=issues_path, rows=write_rows(issues_path, rows))
    comparisons = compared(found, results) if len(found) > 1 else []
    is_one = len(found) == 1
    page = run_page(found[0], results[0], on_file, issues) if is_one else comparison_page(found, results, comparisons)
    outputs.write_text(page_path, page)
    return Report(
        output=page_path,
        runs=tuple(found),
        results=tuple(results),
        comparisons=tuple(comparisons),
        on_file=on_file,
        mistakes=written,
        label_issues=to_correct,
    )


def _page_path(folders: Sequence[Path], output: str | Path | None) -> Path:
    """The report, whose name and folder are checked."""
    default = folders[0] / outputs.REPORT if len(folders) == 1 else Path(outputs.REPORT)
    path = default if output is None else Path(output)
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{path}: expected a name that ends in .html for the report")
    if output is not None and not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent} for the report; make it first")
    return path


def _search_report(folder: Path, path: Path, *, of_one_run: bool) -> Report:
    """The page about a search."""
    if of_one_run:
        raise UsageError(
            f"{folder} holds a search: for --data, --by, --by-length, --by-confidence, --mistakes, --label-issues and "
            "--explain name one of its runs"
        )
    if not (folder / SEARCH).is_file():
        raise UsageError(f"the search in {folder} is not finished: run the same command again to resume it")
    outputs.write_text(path, search_page(folder))
    return Report(output=path, runs=(), results=(), comparisons=())


def _explaining_model(runs: Sequence[Run]) -> TaskModel:
    """The model whose predictions are explained.

    Raises:
        UsageError: there are several runs or models, or its task has no explanations.
    """
    if len(runs) > 1:
        raise UsageError(f"--explain is for one run, not for {len(runs)}: name one of them")
    model = model_of(runs[0], "to explain predictions")
    explainable_task(model, model.task)
    return model


def _explained(
    results: Mapping[str, Results], on_file: FileResults | None, model: TaskModel, count: int
) -> tuple[dict[str, Results], FileResults | None]:
    """The results of each validation set and of the file, whose first ``count`` examples are explained."""
    explained = {name: with_explanations(one, model, count) for name, one in results.items()}
    if on_file is not None and on_file.results is not None:
        on_file = replace(on_file, results=with_explanations(on_file.results, model, count))
    return explained, on_file


def _run_results(run: Run) -> dict[str, Results]:
    """The results on each validation set; the metric that the best model was chosen by comes first."""
    if run.task is None:
        return {}
    found = {
        one.name: results_of(run.task, one.predictions, one.rows, first=run.best_metric[1]) for one in run.predicted
    }
    return {name: results for name, results in found.items() if results is not None}


def _with_slices(run: Run, results: Mapping[str, Results], options: SliceOptions) -> dict[str, Results]:
    """The results on each validation set with the slices that were asked for.

    Raises:
        UsageError: there are no predictions, or no such column.
    """
    if run.task is None or not results:
        reasons = " ".join(run.missing) if run.missing else "Its task states no figures for a report."
        raise UsageError(
            f"{run.folder}: --by, --by-length and --by-confidence need the validation rows"
            f"{', or a file named with --data' if run.folds is None else ' of all folds'}. {reasons}"
        )
    found = {}
    for one in with_file_columns(run).predicted if options.columns else run.predicted:
        if one.name not in results:
            continue
        slices = slices_of(
            run.task,
            one.predictions,
            one.rows,
            options=options,
            names=list(results[one.name].headline),
            out_of_fold=run.folds is not None,
        )
        found[one.name] = replace(results[one.name], slices=slices)
    return found


def check_mistakes_file(path: Path, others: Sequence[Path], what: str = "mistakes") -> None:
    """Refuses an unusable file for the mistakes before any work is done.

    Args:
        path: the file.
        others: files that must not be overwritten.
        what: is written there, as a word.

    Raises:
        UsageError: its extension or folder is not usable, or it is one of the others.
    """
    if path.suffix[1:] not in _FORMATS:
        raise UsageError(f"{path}: expected a name that ends in .csv, .tsv or .jsonl for the {what}")
    check_place(path)
    for other in others:
        with suppress(OSError):
            if os.path.realpath(path) == os.path.realpath(other) or path.samefile(other):
                raise UsageError(f"{path}: the {what} would overwrite {other}; choose another name")


def _write_mistakes(path: Path, run: Run, results: Mapping[str, Results], on_file: FileResults | None) -> int:
    """Writes the rows whose prediction is wrong, those with the highest score first.

    They are those of the file, else those of the validation rows. A column ``label`` of the input is not written twice.

    Returns:
        The number of mistakes.
    """
    if on_file is not None:
        if on_file.results is None:
            raise UsageError(f"{path}: the task of {run.folder} does not say which rows are wrong; use `predict`")
        sets, label_column = {"": on_file.results}, on_file.label_column
    else:
        if not results:
            reasons = " ".join(run.missing)
            raise UsageError(f"{run.folder}: there are no predictions to write mistakes of. {reasons}".strip())
        columns = [] if run.task is None else run.task.columns
        sets, label_column = dict(results), next((column.name for column in columns if column.is_label), None)
    all_results = [(name, result) for name, each in sets.items() for result in each.sections.results]
    wrong = sorted((one for one in all_results if not one[1].is_correct), key=lambda one: -one[1].score)
    is_named = len({name for name, _ in all_results}) > 1
    rows: list[dict[str, Any]] = []
    for name, result in wrong:
        given = {
            f"{_INPUT}{key}" if key in _OWN else key: value
            for key, value in file_cells(result.row).items()
            if not (key == label_column == "label")
        }
        own = {"label": result.label, "prediction": result.prediction, "score": result.score}
        rows.append({"line": result.row.get("line"), **({"set": name} if is_named else {}), **given, **own})
    return write_rows(path, rows, ["line", *(["set"] if is_named else [])], _OWN)


def write_rows(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    first: Sequence[str] = ("line",),
    own: Sequence[str] = ISSUE_COLUMNS,
) -> int:
    """Writes rows as JSON lines or as a table, and returns their number.

    Args:
        first: the first columns of a table.
        own: the columns that are not the input's; those from the third one on come last.
    """
    with whole_file(path) as file:
        if path.suffix == ".jsonl":
            file.writelines(map(json_line, rows))
            return len(rows)
        tables = [flat(row) for row in rows]
        given_names = dict.fromkeys(name for row in tables for name in row if name not in own)
        writer = TableWriter(file, [*first, *given_names, *own[2:]], DELIMITERS[path.suffix[1:]], raw=False)
        for row in tables:
            writer.write(row)
    return len(rows)
