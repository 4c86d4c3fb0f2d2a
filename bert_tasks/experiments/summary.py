"""The summary of several runs of one recipe: statistics over the seeds, and which runs collapsed.

Owns the statistics and the tables for people and programs.
"""

import math
import statistics
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_tasks.metrics.tables import MetricTable, metric_key, metrics_by_set
from bert_tasks.training.state import FitResult

_RECORDED = ("best_step", "steps", "metrics")  # of a result


@dataclass(frozen=True, kw_only=True)
class SeedRun:
    """One seed's run.

    Attributes:
        result: None if the run diverged; ``failure`` names the step.
    """

    seed: int
    output_dir: Path
    result: FitResult | None = None
    failure: str | None = None

    @property
    def collapse(self) -> str | None:
        """See ``FitResult``."""
        return None if self.result is None else self.result.collapse

    def value(self, metric: str) -> float:
        """A metric of the best model; NaN if there is none."""
        return math.nan if self.result is None else self.result.metrics.get(metric, math.nan)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A metric over several runs; it has no mean if it is NaN in some run.

    Attributes:
        runs: the number of runs that have it.
        std: the sample standard deviation (divided by runs - 1); NaN for a single run.
        best, best_seed: the highest (if lower is better, the lowest) and its seed; among equal ones the first.
    """

    runs: int
    mean: float
    std: float
    median: float
    best: float
    best_seed: int | None


@dataclass(frozen=True, kw_only=True)
class SeedsResult:
    """All runs of a recipe, in the order of the seeds.

    Attributes:
        metric: the one that picks the best model.
        lower_is_better: the metrics for which lower is better.
        notes: sentences that a reader of the statistics must know.
    """

    output_dir: Path
    metric: str
    runs: tuple[SeedRun, ...]
    lower_is_better: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[SeedRun, ...]:
        """The runs that diverged."""
        return tuple(run for run in self.runs if run.failure is not None)

    @property
    def collapsed(self) -> tuple[SeedRun, ...]:
        return tuple(run for run in self.runs if run.collapse is not None)

    @property
    def sound(self) -> tuple[SeedRun, ...]:
        """The runs that neither diverged nor collapsed."""
        return tuple(run for run in self.runs if run.failure is None and run.collapse is None)

    @property
    def metrics(self) -> dict[str, Spread]:
        """Every metric over the runs that did not diverge, in the order in which runs report them."""
        return spreads(self.runs, self.lower_is_better)

    def to_json(self) -> dict[str, Any]:
        """The content of ``seeds.json``."""
        without = {name: vars(spread) for name, spread in spreads(self.sound, self.lower_is_better).items()}
        return {
            "metric": self.metric,
            "seeds": [run.seed for run in self.runs],
            "metrics": {name: vars(spread) for name, spread in self.metrics.items()},
            "collapsed": {str(run.seed): run.collapse for run in self.collapsed},
            "failed": {str(run.seed): run.failure for run in self.failed},
            "metrics_without_collapsed": without if self.collapsed else None,
            "runs": [
                {
                    "seed": run.seed,
                    "output_dir": str(run.output_dir),
                    "value": run.value(self.metric),
                    **({} if run.result is None else {key: getattr(run.result, key) for key in _RECORDED}),
                    "failure": run.failure,
                    "collapse": run.collapse,
                }
                for run in self.runs
            ],
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """For people."""
        first = next((run.result for run in self.runs if run.result is not None), None)
        tables: dict[str, MetricTable] = {}  # validation set -> the means of its metrics; none if every run diverged
        if first is not None:
            means = {name: spread.mean for name, spread in self.metrics.items()}
            by_set = metrics_by_set(means, first.validation_sets)
            tables = {name: first.task.metric_table(metrics) for name, metrics in by_set.items()}
        shown = {metric_key(name, metric) for name, table in tables.items() for metric in table.overall}
        spread_rows: list[tuple[str, ...]] = [("metric", "mean", "std", "median", "best", "of seed")]
        for name, one in self.metrics.items():
            if name in shown:
                seed = "-" if one.best_seed is None else str(one.best_seed)
                spread_rows.append((name, *map(_number, (one.mean, one.std, one.median, one.best)), seed))
        lines = [*_aligned([("seed", self.metric, "best step", ""), *map(self._run_cells, self.runs)]), ""]
        lines += _aligned(spread_rows)
        for name, table in tables.items():
            if table.rows:
                title = f"means of each {table.word}{f' of {name}' if name else ''}:"
                lines += ["", title, *table.class_lines(), ""]
        if self.failed:
            lines.append(f"{_counted(self.failed, self.runs)} diverged and are not counted")
        if self.collapsed:
            left = spreads(self.sound, self.lower_is_better).get(self.metric)
            rest = "no other is left"
            if left is not None:
                rest = f"without: {self.metric} mean {_number(left.mean)}, std {_number(left.std)}"
            lines.append(f"{_counted(self.collapsed, self.runs)} collapsed; {rest}")
        lines += dict.fromkeys(note for run in self.runs if run.result is not None for note in run.result.notes)
        return [*lines, *self.notes, f"runs: {self.output_dir}"]

    def _run_cells(self, run: SeedRun) -> tuple[str, ...]:
        if run.result is None:
            return (str(run.seed), "-", "-", f"diverged: {run.failure}")
        steps = f"{run.result.best_step} of {run.result.steps}"
        remarks = ["complete already"] if run.result.reused else []
        remarks += [] if run.collapse is None else [f"collapsed: {run.collapse}"]
        return (str(run.seed), _number(run.value(self.metric)), steps, "; ".join(remarks))


def spreads(runs: Sequence[SeedRun], lower_is_better: Set[str] = frozenset()) -> dict[str, Spread]:
    """Every metric over the runs that have it."""
    results = {run.seed: run.result.metrics for run in runs if run.result is not None}
    found = {}
    for name in dict.fromkeys(name for metrics in results.values() for name in metrics):
        values = {seed: metrics[name] for seed, metrics in results.items() if name in metrics}
        numbers = list(values.values())
        whole = all(map(math.isfinite, numbers))
        comparable = [seed for seed, value in values.items() if not math.isnan(value)]
        pick = min if name in lower_is_better else max
        best = pick(comparable, key=values.__getitem__) if comparable else None
        found[name] = Spread(
            runs=len(numbers),
            mean=statistics.fmean(numbers) if whole else math.nan,
            std=statistics.stdev(numbers) if whole and len(numbers) > 1 else math.nan,
            median=statistics.median(numbers) if whole else math.nan,
            best=math.nan if best is None else values[best],
            best_seed=best,
        )
    return found


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.6g}"


def _counted(some: Sequence[SeedRun], runs: Sequence[SeedRun]) -> str:
    seeds = ", ".join(str(run.seed) for run in some)
    return f"{len(some)} of {len(runs)} runs (seed{'s' if len(some) > 1 else ''} {seeds})"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
