"""Several runs side by side: the same rows, predicted by each, and whether a difference may be chance.

Every run is compared with the first one; p-values are adjusted for their number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bert_tasks.errors import UsageError
from bert_tasks.report.collect import Run
from bert_tasks.report.results import Results
from bert_tasks.report.statistics import Estimate, difference, holm, mcnemar_p, randomisation_test

MCNEMAR = "McNemar's exact test"
RANDOMISATION = "approximate randomisation"
ASSUMPTIONS: Mapping[str, str] = {
    MCNEMAR: (
        "It tests whether the rows that only one of the two models predicts correctly are divided between them as by a "
        "fair coin. Its only assumption is that rows are independent of each other."
    ),
    RANDOMISATION: (
        "It swaps the two models' predictions row by row at random, many times, and counts how often the difference "
        "is at least as large as the observed one. Its only assumption is that rows are independent of each other."
    ),
}


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """A run's metric and, compared with the first run, the difference, the p-value and its adjustment (Holm's method).

    Attributes:
        draws: how often predictions were swapped (approximate randomisation only).
        only_first, only_this: rows that only one of the two predicts correctly (McNemar's test only).
        no_p: why there is no p-value; empty where there is one.
    """

    run: str
    value: Estimate
    difference: Estimate | None = None
    p: float | None = None
    p_adjusted: float | None = None
    draws: int | None = None
    only_first: int | None = None
    only_this: int | None = None
    no_p: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The runs on one validation set, by the metric that is shown first; ``percent``: its scale is 0 to 100."""

    name: str
    metric: str
    rows: int
    unit: str
    percent: bool
    test: str
    runs: tuple[ComparedRun, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        where = f" on {self.name}" if self.name else ""
        lines = [f"{self.metric}{where}, {self.rows} {self.unit}, {self.test}:"]
        for one in self.runs:
            drawn = "" if one.draws is None else f" of {one.draws:,} draws"
            p = "" if one.p_adjusted is None else f", p {one.p_adjusted:.3g}{drawn} against {self.runs[0].run}"
            reason = f", no p: {one.no_p}" if one.no_p else ""
            lines.append(f"  {one.run}: {'-' if one.value.value is None else f'{one.value.value:.4g}'}{p}{reason}")
        return lines


def check_comparable(runs: Sequence[Run]) -> None:
    """Refuses runs on different tasks or validation rows.

    Raises:
        UsageError: naming the two runs, and on what they differ.
    """

    def rows(run: Run) -> str:
        splits = {split: data for split, data in run.metadata["data"].items() if split != "train"}
        return ", ".join(f"{data['source']} {data['fingerprint'][:8]}" for data in splits.values())

    first = runs[0]
    for other in runs[1:]:
        if other.metadata["task"] != first.metadata["task"]:
            raise UsageError(
                f"{first.name} is a run of {first.metadata['task']}, {other.name} of {other.metadata['task']}: runs of "
                "different tasks cannot be compared; make a report for each alone"
            )
        if other.fingerprints() != first.fingerprints():
            raise UsageError(
                f"{first.name} and {other.name} were validated on different rows ({rows(first)}; {rows(other)}): "
                "their scores cannot be compared. Make a report for each alone, or set data.validation to give runs "
                "with different seeds the same validation rows"
            )


def compared(runs: Sequence[Run], results: Sequence[Mapping[str, Results]]) -> list[Comparison]:
    """One comparison for each validation set that all runs have results on."""
    comparisons = []
    for name, first in results[0].items():
        if not all(name in other for other in results):
            continue
        metric = first.sections.headline[0]
        others = [
            _against_first(run.name, first, each[name], metric) for run, each in zip(runs[1:], results[1:], strict=True)
        ]
        adjusted = iter(holm([one.p for one in others if one.p is not None]))
        rows = [one if one.p is None else replace(one, p_adjusted=next(adjusted)) for one in others]
        comparison = Comparison(
            name=name,
            metric=metric,
            rows=first.rows,
            unit=first.sections.unit,
            percent=first.sections.percent,
            test=MCNEMAR if _is_share_of_rows(first, metric) else RANDOMISATION,
            runs=(ComparedRun(run=runs[0].name, value=first.estimates[metric]), *rows),
        )
        comparisons.append(comparison)
    return comparisons


def _is_share_of_rows(results: Results, metric: str) -> bool:
    """Returns True if McNemar's test applies: the accuracy of masked tokens is not the share of correct texts."""
    return metric == "accuracy" and results.sections.accuracy_of_rows


def _against_first(run: str, first: Results, other: Results, metric: str) -> ComparedRun:
    """The share of correct rows by McNemar's test; other metrics by swapping predictions, if both count the same."""
    if metric not in other.estimates:
        return ComparedRun(run=run, value=Estimate(value=None), no_p=f"it has no {metric}")
    one, two = first.sections.measure, other.sections.measure
    found = ComparedRun(run=run, value=other.estimates[metric], difference=difference(one, two, metric))
    if _is_share_of_rows(first, metric):
        pairs = list(zip(first.sections.results, other.sections.results, strict=True))
        only_first = sum(a.is_correct and not b.is_correct for a, b in pairs)
        only_this = sum(b.is_correct and not a.is_correct for a, b in pairs)
        return replace(found, p=mcnemar_p(only_first, only_this), only_first=only_first, only_this=only_this)
    if (one.labels, one.names) != (two.labels, two.names):
        return replace(found, no_p="its labels are not those of the first run")
    test = randomisation_test(one, two, metric)
    if test is None:
        return replace(found, no_p=f"{metric} has no value in one of the two")
    return replace(found, p=test.p, draws=test.draws)
