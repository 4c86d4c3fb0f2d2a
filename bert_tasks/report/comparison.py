"""Several runs side by side: the same rows, answered by each, and whether a difference may be luck.

Owns which runs may be compared and with which test. Every run is compared with the first one; p-values are adjusted for
their number. Must not know pages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bert_tasks.errors import UsageError
from bert_tasks.report.gathering import Run
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
        "It swaps the two models' answers row by row at random, 10,000 times, and counts how often the difference "
        "comes out at least as large as it is. It assumes that rows are independent of each other; nothing else."
    ),
}


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """A run's figure, and against the first run: the difference, the p-value and that adjusted by Holm's method.

    ``only_first``, ``only_this``: rows that only one of the two has right (McNemar's test only).
    """

    run: str
    value: Estimate
    difference: Estimate | None = None
    p: float | None = None
    p_adjusted: float | None = None
    only_first: int | None = None
    only_this: int | None = None


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
            p = "" if one.p_adjusted is None else f", p {one.p_adjusted:.3g} against {self.runs[0].run}"
            lines.append(f"  {one.run}: {'-' if one.value.value is None else f'{one.value.value:.4g}'}{p}")
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
    discordant = [_discordant(first, other) for other in results]
    if test == MCNEMAR:
        p_values: list[float | None] = [mcnemar_p(*pair) for pair in discordant[1:]]
    else:
        p_values = [_randomised(first, other, metric) for other in results[1:]]
    known = [p for p in p_values if p is not None]
    adjusted = iter(holm(known))
    rows = [ComparedRun(run=names[0], value=first.estimates[metric])]
    for place, p in enumerate(p_values, start=1):
        other = results[place]
        rows.append(
            ComparedRun(
                run=names[place],
                value=other.estimates[metric],
                difference=difference(first.measure, other.measure, metric),
                p=p,
                p_adjusted=None if p is None else next(adjusted),
                only_first=discordant[place][0] if test == MCNEMAR else None,
                only_this=discordant[place][1] if test == MCNEMAR else None,
            )
        )
    return Comparison(name=name, metric=metric, rows=first.rows, unit=first.unit, test=test, runs=tuple(rows))


def _randomised(first: Results, other: Results, metric: str) -> float | None:
    """None too where the runs count different labels: then answers cannot change places."""
    if first.measure.names != other.measure.names:
        return None
    return randomisation_p(first.measure, other.measure, metric)


def _discordant(first: Results, other: Results) -> tuple[int, int]:
    pairs = list(zip(first.right, other.right, strict=True))
    return sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
