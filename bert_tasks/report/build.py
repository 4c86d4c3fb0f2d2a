"""From folders of runs to a file: gather the runs, compute their results, render the page and write it."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_tasks.data.readers import ReadOptions
from bert_tasks.data.writers import DELIMITERS, TableWriter, check_place, flat, json_line, whole_file
from bert_tasks.errors import UsageError
from bert_tasks.report.collect import GivenRows, Run, gather
from bert_tasks.report.comparison import Comparison, check_comparable, compared
from bert_tasks.report.page import comparison_page, run_page
from bert_tasks.report.results import FileResults, Results, file_cells, results_of, results_on_file
from bert_tasks.run_dir import files as outputs
from bert_tasks.storage import is_folder, resolved

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
    """

    output: Path
    runs: tuple[Run, ...]
    results: tuple[Mapping[str, Results], ...]
    comparisons: tuple[Comparison, ...]
    on_file: FileResults | None = None
    mistakes: Mistakes | None = None

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
        }

    def lines(self) -> list[str]:
        """For people."""
        notes = [f"{run.name}: {note}" for run in self.runs for note in (*run.notes, *run.missing)]
        results = {} if self.comparisons else self.results[0]
        tables = [line for name, one in results.items() for line in one.metric_table().lines(name)]
        compared = [line for comparison in self.comparisons for line in comparison.lines()]
        on_file = [] if self.on_file is None else self.on_file.lines()
        wrong = [] if self.mistakes is None else [f"{self.mistakes.rows} mistakes: {self.mistakes.path}"]
        return [*notes, *tables, *on_file, *compared, *wrong, f"report: {self.output}"]


def make_report(
    runs: Sequence[str | Path] | str | Path,
    output: str | Path | None = None,
    *,
    data: str | Path | None = None,
    by: Sequence[str] = (),
    mistakes: str | Path | None = None,
    reading: ReadOptions | None = None,
    given: GivenRows | None = None,
) -> Report:
    """Writes one self-contained HTML file: no scripts, no network, light and dark.

    The saved model predicts the run's validation rows again. If these are gone or have changed, the report shows what
    the folder has (curves, metrics, settings) and says what is missing.

    Args:
        runs: output folders of ``train``; that of ``train --seeds`` stands for all of its runs.
        output: default: ``report.html`` in the folder that was given, in the current folder for several.
        data: a file with labels to evaluate the model on, too; for one run only.
        by: columns of that file: the scores are shown for each of their values.
        mistakes: a .csv, .tsv or .jsonl file for the rows whose prediction is wrong: those of ``data``, else those of
            the validation sets.
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
    default = folders[0] / outputs.REPORT if len(folders) == 1 else Path(outputs.REPORT)
    page_path = default if output is None else Path(output)
    if page_path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{page_path}: expected a name that ends in .html for the report")
    if output is not None and not is_folder(page_path.absolute().parent):
        raise UsageError(f"{page_path}: there is no folder {page_path.parent} for the report; make it first")
    mistakes_path = None if mistakes is None else Path(mistakes)
    if data is None:
        if by:
            raise UsageError(f"--by {by[0]} selects a column of a file: name the file with --data")
        options = {} if reading is None else vars(reading)
        stated = [name for name, value in options.items() if value not in (None, {})]
        if stated:
            raise UsageError(f"{', '.join(stated)}: this says how a file is read; name the file with --data")
    if mistakes_path is not None:
        check_mistakes_file(mistakes_path, [page_path, *([] if data is None else [Path(data)])])
    found = gather(folders, given)
    if len(found) > 1:
        if data is not None or mistakes_path is not None:
            raise UsageError(f"--data and --mistakes are for one run, not for {len(found)}: name one of them")
        check_comparable(found)
    results = [_run_results(run) for run in found]
    on_file, written = None, None
    if data is not None:
        on_file = results_on_file(found[0], data, by, read_options=ReadOptions() if reading is None else reading)
    if mistakes_path is not None:
        written = Mistakes(path=mistakes_path, rows=_write_mistakes(mistakes_path, found[0], results[0], on_file))
    comparisons = compared(found, results) if len(found) > 1 else []
    page = comparison_page(found, results, comparisons) if len(found) > 1 else run_page(found[0], results[0], on_file)
    outputs.write_text(page_path, page)
    return Report(
        output=page_path,
        runs=tuple(found),
        results=tuple(results),
        comparisons=tuple(comparisons),
        on_file=on_file,
        mistakes=written,
    )


def _run_results(run: Run) -> dict[str, Results]:
    """The results on each validation set; the metric that the best model was chosen by comes first."""
    if run.task is None:
        return {}
    found = {
        one.name: results_of(run.task, one.predictions, one.rows, first=run.best_metric[1]) for one in run.predicted
    }
    return {name: results for name, results in found.items() if results is not None}


def check_mistakes_file(path: Path, others: Sequence[Path]) -> None:
    """Refuses an unusable file for the mistakes before any work is done.

    Args:
        path: the file.
        others: files that must not be overwritten.

    Raises:
        UsageError: its extension or folder is not usable, or it is one of the others.
    """
    if path.suffix[1:] not in _FORMATS:
        raise UsageError(f"{path}: expected a name that ends in .csv, .tsv or .jsonl for the mistakes")
    check_place(path)
    for other in others:
        with suppress(OSError):
            if resolved(path) == resolved(other) or path.samefile(other):
                raise UsageError(f"{path}: the mistakes would overwrite {other}; choose another name")


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
    with whole_file(path) as file:
        if path.suffix == ".jsonl":
            file.writelines(map(json_line, rows))
            return len(rows)
        tables = [flat(row) for row in rows]
        first, last = ["line", *(["set"] if is_named else [])], list(_OWN[2:])
        given_names = dict.fromkeys(name for row in tables for name in row if name not in _OWN)
        writer = TableWriter(file, [*first, *given_names, *last], DELIMITERS[path.suffix[1:]], raw=False)
        for row in tables:
            writer.write(row)
    return len(rows)
