"""Several runs side by side on the same rows, and whether a difference is chance.

Every run is compared with the first run by a permutation test, which swaps the two models' predictions row by row at
random and counts how often the difference is at least as large as the observed one. Its only assumption is that rows
are independent of each other. It says nothing about what another seed of the same training would give.
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
        run: The name of the run.
        value: The metric of the run. ``difference`` is this value minus that of the first run.
        p: The p-value of the difference, or None if there is none.
        draws: The number of times that predictions were swapped.
        no_p: The reason why there is no p-value. It is empty if there is one, and for the first run.
    """

    run: str
    value: Estimate
    difference: Estimate | None = None
    p: float | None = None
    draws: int | None = None
    no_p: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison(Result):
    """The metric of several runs on a validation set.

    Attributes:
        name: The name of the validation set. Empty if there is one set.
        metric: The metric that is compared.
        rows, unit: The number of rows, and the noun for them.
        percent: True if the metric has a scale of 0 to 100.
        runs: The runs, of which the first is the one that the others are compared with.
    """

    name: str
    metric: str
    rows: int
    unit: str
    percent: bool
    runs: tuple[ComparedRun, ...]

    def lines(self) -> list[str]:
        """Returns the lines for a terminal."""
        on_set = f" on {self.name}" if self.name else ""
        lines = [f"{self.metric}{on_set}, {self.rows} {self.unit}, permutation test:"]
        for run in self.runs:
            value = "-"
            if run.value.value is not None:
                value = f"{run.value.value:.4g}"
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
        UsageError: Two runs differ. The message names them, and says in what they differ.
    """
    first = runs[0]
    for other in runs[1:]:
        if other.metadata.task != first.metadata.task:
            raise UsageError(
                f"{first.name} is a run of {first.metadata.task}, {other.name} of {other.metadata.task}. Runs of "
                "different tasks cannot be compared. Make a report for each alone"
            )
        if other.metadata.validation_fingerprints != first.metadata.validation_fingerprints:
            rows = f"{_validation_rows(first)} and {_validation_rows(other)}"
            raise UsageError(
                f"{first.name} and {other.name} were validated on different rows ({rows}), so "
                "their scores cannot be compared. Make a report for each alone, or set data.validation so that runs "
                "with different seeds have the same validation rows"
            )


def _validation_rows(run: Run) -> str:
    """Names the sources of the validation rows, with the beginning of their fingerprints."""
    splits = [split for name, split in run.metadata.data.items() if name != "train"]
    return ", ".join(f"{split.source} {split.fingerprint[:8]}" for split in splits)


def compare(runs: Sequence[Run], results: Sequence[Mapping[str, Results]]) -> list[Comparison]:
    """Returns a comparison for each validation set on which all runs have results."""
    run_names = [run.name for run in runs]
    comparisons = []
    for name in results[0]:
        if all(name in results_of_run for results_of_run in results):
            results_on_set = [results_of_run[name] for results_of_run in results]
            comparisons.append(_compare_on(name, run_names, results_on_set))
    return comparisons


def _compare_on(name: str, runs: Sequence[str], results: Sequence[Results]) -> Comparison:
    """Compares the runs by the first metric of the first run."""
    first = results[0]
    metric = first.sections.headline[0]
    compared = [ComparedRun(run=runs[0], value=first.estimates[metric])]
    for run, other in zip(runs[1:], results[1:], strict=True):
        compared.append(_against_first(run, first, other, metric))
    return Comparison(
        name=name,
        metric=metric,
        rows=first.rows,
        unit=first.sections.unit,
        percent=first.sections.percent,
        runs=tuple(compared),
    )


def _against_first(run: str, first: Results, other: Results, metric: str) -> ComparedRun:
    """Compares a run with the first one, or says why there is no p-value."""
    if metric not in other.estimates:
        return ComparedRun(run=run, value=Estimate(value=None), no_p=f"it has no {metric}")
    first_formula = first.sections.measure
    formula = other.sections.measure
    # The same rows are drawn for both runs, so what makes rows hard for both does not widen this interval.
    gap = difference(first_formula, formula, metric)
    compared = ComparedRun(run=run, value=other.estimates[metric], difference=gap)
    # Sums over rows can be swapped only if they are the same sums, of the same labels.
    if (first_formula.labels, first_formula.names) != (formula.labels, formula.names):
        return replace(compared, no_p="its labels differ from the labels of the first run")
    test = permutation_test(first_formula, formula, metric)
    if test is None:
        return replace(compared, no_p=f"{metric} has no value in one of the two")
    return replace(compared, p=test.p, draws=test.draws)
