"""Several runs side by side on the same rows, and whether a difference is chance.

Every run is compared with the first run by a permutation test, which swaps the two models' predictions row by row at
random and counts how often the difference is at least as large as the observed one. Its only assumption is that rows
are independent of each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bert_tasks.errors import UsageError
from bert_tasks.report.collect import Run
from bert_tasks.report.results import Results
from bert_tasks.report.statistics import Estimate, difference, permutation_test
from bert_tasks.tables import Result


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """A run's metric and its difference from the first run, with p-values.

    Attributes:
        draws: Number of times that predictions were swapped.
        no_p: Why there is no p-value. Empty if there is one.
    """

    run: str
    value: Estimate
    difference: Estimate | None = None
    p: float | None = None
    draws: int | None = None
    no_p: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison(Result):
    """The runs on a validation set. ``percent`` means a scale of 0 to 100."""

    name: str
    metric: str
    rows: int
    unit: str
    percent: bool
    runs: tuple[ComparedRun, ...]

    def lines(self) -> list[str]:
        """Returns a table for people."""
        on_set = f" on {self.name}" if self.name else ""
        lines = [f"{self.metric}{on_set}, {self.rows} {self.unit}, permutation test:"]
        for run in self.runs:
            value = "-" if run.value.value is None else f"{run.value.value:.4g}"
            line = f"  {run.run}: {value}"
            if run.p is not None:
                line += f", p {run.p:.3g} of {run.draws:,} draws against {self.runs[0].run}"
            if run.no_p:
                line += f", no p-value because {run.no_p}"
            lines.append(line)
        return lines


def check_comparable(runs: Sequence[Run]) -> None:
    """Refuses runs on different tasks or validation rows.

    Raises:
        UsageError: naming the two runs, and on what they differ.
    """

    def rows(run: Run) -> str:
        splits = [split for name, split in run.metadata.data.items() if name != "train"]
        return ", ".join(f"{split.source} {split.fingerprint[:8]}" for split in splits)

    first = runs[0]
    for other in runs[1:]:
        if other.metadata.task != first.metadata.task:
            raise UsageError(
                f"{first.name} is a run of {first.metadata.task}, {other.name} of {other.metadata.task}. Runs of "
                "different tasks cannot be compared. Make a report for each alone"
            )
        if other.metadata.validation_fingerprints != first.metadata.validation_fingerprints:
            raise UsageError(
                f"{first.name} and {other.name} were validated on different rows ({rows(first)} and {rows(other)}), so "
                "their scores cannot be compared. Make a report for each alone, or set data.validation so that runs "
                "with different seeds have the same validation rows"
            )


def compare(runs: Sequence[Run], results: Sequence[Mapping[str, Results]]) -> list[Comparison]:
    """Returns a comparison for each validation set on which all runs have results."""
    return [
        _compare_on(name, [run.name for run in runs], [each[name] for each in results])
        for name in results[0]
        if all(name in each for each in results)
    ]


def _compare_on(name: str, runs: Sequence[str], results: Sequence[Results]) -> Comparison:
    first = results[0]
    metric = first.sections.headline[0]
    others = [_against_first(run, first, each, metric) for run, each in zip(runs[1:], results[1:], strict=True)]
    return Comparison(
        name=name,
        metric=metric,
        rows=first.rows,
        unit=first.sections.unit,
        percent=first.sections.percent,
        runs=(ComparedRun(run=runs[0], value=first.estimates[metric]), *others),
    )


def _against_first(run: str, first: Results, other: Results, metric: str) -> ComparedRun:
    if metric not in other.estimates:
        return ComparedRun(run=run, value=Estimate(value=None), no_p=f"it has no {metric}")
    formulas = first.sections.measure, other.sections.measure
    compared = ComparedRun(run=run, value=other.estimates[metric], difference=difference(*formulas, metric))
    if (formulas[0].labels, formulas[0].names) != (formulas[1].labels, formulas[1].names):
        return replace(compared, no_p="its labels differ from the labels of the first run")
    test = permutation_test(*formulas, metric)
    if test is None:
        return replace(compared, no_p=f"{metric} has no value in one of the two")
    return replace(compared, p=test.p, draws=test.draws)
