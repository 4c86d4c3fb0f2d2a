"""From folders of runs to a file: gather, compute, lay out, write.

Owns the one function that the command line and other programs call, and where the file goes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bert_tasks.data.readers import ReadOptions
from bert_tasks.errors import UsageError
from bert_tasks.paths import is_folder
from bert_tasks.report import classification, spans, tokens
from bert_tasks.report.collect import Answers, GivenRows, Run, gather
from bert_tasks.report.comparison import Comparison, check_comparable, compared
from bert_tasks.report.files import FileResults, check_mistakes_file, results_on_file, write_mistakes
from bert_tasks.report.page import comparison_page, run_page
from bert_tasks.report.results import Results
from bert_tasks.run_dir import files as outputs
from bert_tasks.tasks import PairClassification, SequenceClassification, SpanExtraction, TokenClassification
from bert_tasks.tasks.base import Task

# Other tasks have a report too: their curves, metrics and settings.
RESULTS: Mapping[type[Task], Callable[[Answers], Results]] = MappingProxyType(
    {
        SequenceClassification: classification.results,
        PairClassification: classification.results,
        TokenClassification: tokens.results,
        SpanExtraction: spans.results,
    }
)


@dataclass(frozen=True, kw_only=True)
class Mistakes:
    """A file of rows that were answered wrong."""

    path: Path
    rows: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report that was written.

    Attributes:
        results: for each run the results of each validation set.
        comparisons: of several runs, one for each validation set.
        on_file: of the file that was named.
        mistakes: the file of the mistakes, if one was asked for.
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
        tables = (
            []
            if self.comparisons
            else [line for name, one in self.results[0].items() for line in one.metric_table().lines(name)]
        )
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
    """Writes one HTML file that needs nothing else: no script, no network, light and dark.

    The saved model answers the run's validation rows again. If these are gone or have changed, the report holds what
    the folder tells (curves, metrics, settings) and says what is missing.

    Args:
        runs: output folders of ``train``; that of ``train --seeds`` stands for all of its runs.
        given: the rows that the run was validated on, for one of ``fit``, which keeps no recipe.
        output: default: ``report.html`` in the folder that was given, in the current folder for several.
        data: a file with labels that the model answers too; of one run only.
        by: columns of that file: the scores are told for each of their values.
        mistakes: a .csv, .tsv or .jsonl file for the rows that are answered wrong: those of ``data``, else those of the
            validation sets.
        reading: how ``data`` is read; what is not stated is as in training.

    Raises:
        UsageError: a folder without a run, runs that cannot be compared, options that do not go together, no such
            column, or an output that cannot be.
        DataError: ``data`` has bad rows.
        CheckpointError: the model cannot be loaded, or the report cannot be written.
    """
    folders = [Path(runs)] if isinstance(runs, str | Path) else [Path(run) for run in runs]
    if not folders:
        raise UsageError("no run: name at least one output folder of `bert-tasks train`")
    target, wrong = _target(folders, output), None if mistakes is None else Path(mistakes)
    if data is None:
        _refuse_without_data(by, reading)
    if wrong is not None:
        check_mistakes_file(wrong, [target, *([] if data is None else [Path(data)])])
    found = gather(folders, given)
    if len(found) > 1:
        if data is not None or wrong is not None:
            raise UsageError(f"--data and --mistakes are for one run, not for {len(found)}: name one of them")
        check_comparable(found)
    results = [_results(run) for run in found]
    on_file = None if data is None else _on_file(found[0], data, by, ReadOptions() if reading is None else reading)
    count = None if wrong is None else _write_mistakes(wrong, found[0], results[0], on_file)
    comparisons = compared(found, results) if len(found) > 1 else []
    page = comparison_page(found, results, comparisons) if len(found) > 1 else run_page(found[0], results[0], on_file)
    outputs.write_text(target, page)
    return Report(
        output=target,
        runs=tuple(found),
        results=tuple(results),
        comparisons=tuple(comparisons),
        on_file=on_file,
        mistakes=None if wrong is None or count is None else Mistakes(path=wrong, rows=count),
    )


def _refuse_without_data(by: Sequence[str], reading: ReadOptions | None) -> None:
    """Options that say something about a file need one."""
    if by:
        raise UsageError(f"--by {by[0]} is about the rows of a file: name it with --data")
    stated = (
        {} if reading is None else {name: value for name, value in vars(reading).items() if value not in (None, {})}
    )
    if stated:
        raise UsageError(f"{', '.join(stated)}: this says how a file is read; name the file with --data")


def _on_file(run: Run, data: str | Path, by: Sequence[str], reading: ReadOptions) -> FileResults:
    make = None if run.task is None else RESULTS.get(type(run.task))
    led = None if make is None else partial(_led_results, make, run)
    return results_on_file(run, data, by, reading=reading, make=led)


def _led_results(make: Callable[[Answers], Results], run: Run, answers: Answers) -> Results:
    return _led(make(answers), run)


def _write_mistakes(path: Path, run: Run, results: Mapping[str, Results], on_file: FileResults | None) -> int:
    """Writes the mistakes on the file, else those on the validation rows; returns how many."""
    if on_file is None:
        columns = [] if run.task is None else run.task.columns
        found, target = dict(results), next((column.name for column in columns if column.is_label), None)
        if not found:
            reasons = " ".join(run.missing)
            raise UsageError(f"{run.folder}: there are no answers whose mistakes could be written. {reasons}".strip())
    else:
        found, target = ({} if on_file.results is None else {"": on_file.results}), on_file.target
        if not found:
            raise UsageError(f"{path}: the task of {run.folder} does not say which rows are wrong; use `predict`")
    return write_mistakes(path, [(name, one) for name, each in found.items() for one in each.verdicts], target)


def _target(folders: Sequence[Path], output: str | Path | None) -> Path:
    default = folders[0] / outputs.REPORT if len(folders) == 1 else Path(outputs.REPORT)
    target = default if output is None else Path(output)
    if target.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{target}: expected a name that ends in .html for the report")
    if output is not None and not is_folder(target.absolute().parent):
        raise UsageError(f"{target}: no such folder {target.parent} for the report; make it first")
    return target


def _results(run: Run) -> dict[str, Results]:
    found: dict[str, Results] = {}
    for answers in run.answers:
        make = RESULTS.get(type(answers.task))
        if make is not None:
            found[answers.name] = _led(make(answers), run)
    return found


def _led(results: Results, run: Run) -> Results:
    """The metric that picked the best model stands first."""
    if run.chosen[1] not in results.estimates:
        return results
    return replace(results, headline=tuple(dict.fromkeys([run.chosen[1], *results.headline])))
