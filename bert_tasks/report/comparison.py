"""Several runs side by side: the same rows, answered by each, and whether a difference may be luck.

Owns which runs may be compared and with which test. Every run is compared with the first one; p-values are adjusted for
their number. Must not know pages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bert_tasks.errors import UsageError
from bert_tasks.report.collect import Run
from bert_tasks.report.results import Results
from bert_tasks.report.statistics import Estimate, difference, holm, mcnemar_p, randomisation_p

MCNEMAR = "McNemar's exact test"
RANDOMISATION = "approximate randomisation"
ASSUMPTIONS: Mapping[str, str] = {
    MCNEMAR: (
        "It looks at the rows that only one of the two models has right and asks whether a fair coin could have dealt "
        "them out so unevenly. It assumes that rows are independent of each other; nothing else."
    ),
    RANDOMISATION: (
        "It swaps the two models' answers row by row at random, again and again, and counts how often the difference "
        "comes out at least as large as it is. It assumes that rows are independent of each other; nothing else."
    ),
}

_NOTHING = Estimate(value=None, low=None, high=None)


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """A run's figure, and against the first run: the difference, the p-value and that adjusted by Holm's method.

    Attributes:
        draws: how often answers were swapped (approximate randomisation only).
        only_first, only_this: rows that only one of the two has right (McNemar's test only).
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
    """The runs on one validation set, by the metric that stands first."""

    name: str
    metric: str
    rows: int
    unit: str
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
    first = runs[0]
    for other in runs[1:]:
        if other.facts["task"] != first.facts["task"]:
            raise UsageError(
                f"{first.name} is a run of {first.facts['task']}, {other.name} of {other.facts['task']}: runs on "
                "different tasks cannot be compared; report on each alone"
            )
        if other.fingerprints() != first.fingerprints():
            raise UsageError(
                f"{first.name} and {other.name} were validated on different rows ({_rows(first)}; {_rows(other)}): "
                "their scores cannot be compared. Report on each alone; runs that set rows aside by their own seed "
                "need data.validation to share them"
            )


def _rows(run: Run) -> str:
    splits = {split: data for split, data in run.facts["data"].items() if split != "train"}
    return ", ".join(f"{data['source']} {data['fingerprint'][:8]}" for data in splits.values())


def compared(runs: Sequence[Run], results: Sequence[Mapping[str, Results]]) -> list[Comparison]:
    """One comparison for each validation set that all runs have answers to."""
    shared = [name for name in results[0] if all(name in other for other in results)]
    return [_compared(name, [run.name for run in runs], [each[name] for each in results]) for name in shared]


def _compared(name: str, names: Sequence[str], results: Sequence[Results]) -> Comparison:
    first, metric = results[0], results[0].headline[0]
    test = MCNEMAR if metric == "accuracy" else RANDOMISATION
    compare = _by_right_rows if test == MCNEMAR else _by_swapping
    others = [
        compare(run, first, one, metric)
        if metric in one.estimates
        else ComparedRun(run=run, value=_NOTHING, no_p=f"it has no {metric}")
        for run, one in zip(names[1:], results[1:], strict=True)
    ]
    adjusted = iter(holm([one.p for one in others if one.p is not None]))
    rows = [one if one.p is None else replace(one, p_adjusted=next(adjusted)) for one in others]
    runs = (ComparedRun(run=names[0], value=first.estimates[metric]), *rows)
    return Comparison(name=name, metric=metric, rows=first.rows, unit=first.unit, test=test, runs=runs)


def _by_right_rows(run: str, first: Results, other: Results, metric: str) -> ComparedRun:
    pairs = list(zip(first.right, other.right, strict=True))
    only_first, only_this = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    return ComparedRun(
        run=run,
        value=other.estimates[metric],
        difference=difference(first.measure, other.measure, metric),
        p=mcnemar_p(only_first, only_this),
        only_first=only_first,
        only_this=only_this,
    )


def _by_swapping(run: str, first: Results, other: Results, metric: str) -> ComparedRun:
    """Answers can change places where both runs count the same labels."""
    same = (first.measure.labels, first.measure.names) == (other.measure.labels, other.measure.names)
    found = randomisation_p(first.measure, other.measure, metric) if same else None
    reason = f"{metric} has no value in one of the two" if same else "it has other labels to choose from"
    return ComparedRun(
        run=run,
        value=other.estimates[metric],
        difference=difference(first.measure, other.measure, metric),
        p=None if found is None else found.p,
        draws=None if found is None else found.draws,
        no_p="" if found is not None else reason,
    )
