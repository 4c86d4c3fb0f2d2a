"""From folders of runs to a file: gather, compute, lay out, write.

Owns the one function that the command line and other programs call, and where the file goes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bert_tasks.errors import UsageError
from bert_tasks.report import classification, spans, tokens
from bert_tasks.report.comparison import Comparison, check_comparable, compared
from bert_tasks.report.gathering import Answers, Run, gather
from bert_tasks.report.page import comparison_page, run_page
from bert_tasks.report.results import Results
from bert_tasks.tasks import PairClassification, SequenceClassification, SpanExtraction, TokenClassification
from bert_tasks.tasks.base import Task
from bert_tasks.training import outputs

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
class Report:
    """A report that was written.

    Attributes:
        results: for each run the results of each validation set.
        comparisons: of several runs, one for each validation set.
    """

    output: Path
    runs: tuple[Run, ...]
    results: tuple[Mapping[str, Results], ...]
    comparisons: tuple[Comparison, ...]

    def to_json(self) -> dict[str, Any]:
        """The figures of the page."""
        runs = [
            {
                "name": run.name,
                "folder": str(run.folder),
                "metrics": dict(run.metrics),
                "validation": {name: one.to_json() for name, one in found.items()},
                "missing": list(run.missing),
            }
            for run, found in zip(self.runs, self.results, strict=True)
        ]
        return {
            "report": str(self.output),
            "runs": runs,
            "comparisons": [comparison.to_json() for comparison in self.comparisons],
        }

    def lines(self) -> list[str]:
        """For people."""
        notes = [f"{run.name}: {note}" for run in self.runs for note in run.missing]
        tables = (
            []
            if self.comparisons
            else [line for name, one in self.results[0].items() for line in one.metric_table().lines(name)]
        )
        compared = [line for comparison in self.comparisons for line in comparison.lines()]
        return [*notes, *tables, *compared, f"report: {self.output}"]


def make_report(runs: Sequence[str | Path] | str | Path, output: str | Path | None = None) -> Report:
    """Writes one HTML file that needs nothing else: no script, no network, light and dark.

    The saved model answers the run's validation rows again. If these are gone or have changed, the report holds what
    the folder tells (curves, metrics, settings) and says what is missing.

    Args:
        runs: output folders of ``train``; that of ``train --seeds`` stands for all of its runs.
        output: default: ``report.html`` in the folder that was given, in the current folder for several.

    Raises:
        UsageError: a folder without a run, runs that cannot be compared, or an output that cannot be.
        CheckpointError: the file cannot be written.
    """
    folders = [Path(runs)] if isinstance(runs, str | Path) else [Path(run) for run in runs]
    if not folders:
        raise UsageError("no run: name at least one output folder of `bert-tasks train`")
    target = _target(folders, output)
    found = gather(folders)
    if len(found) > 1:
        check_comparable(found)
    results = [_results(run) for run in found]
    comparisons = compared(found, results) if len(found) > 1 else []
    page = comparison_page(found, results, comparisons) if len(found) > 1 else run_page(found[0], results[0])
    outputs.write_text(target, page)
    return Report(output=target, runs=tuple(found), results=tuple(results), comparisons=tuple(comparisons))


def _target(folders: Sequence[Path], output: str | Path | None) -> Path:
    default = folders[0] / outputs.REPORT if len(folders) == 1 else Path(outputs.REPORT)
    target = default if output is None else Path(output)
    if target.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{target}: expected a name that ends in .html for the report")
    if output is not None and not target.absolute().parent.is_dir():
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
