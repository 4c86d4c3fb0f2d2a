"""One recipe with several seeds, which shows how much of a score is due to chance.

Owns the folder of the runs (``seed-1``, ``seed-2``, ... and ``seeds.json``), the statistics over them, which of them
collapsed, and the tables for people and programs.
"""

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bert_tasks.data.problems import shortened
from bert_tasks.distributed import broadcast_from_main, make_accelerator
from bert_tasks.errors import BertTasksError, DivergedError, RecipeError, UsageError
from bert_tasks.experiments.group import RunGroup, format_number, format_table, remove_runs
from bert_tasks.metrics.tables import MetricTable, metric_key, metrics_by_set
from bert_tasks.model.pretrained import CheckpointFolder, stated_task
from bert_tasks.recipe.errors import schema_problems
from bert_tasks.recipe.schema import Recipe, RunSection, load_recipe, load_task_class, silent_settings
from bert_tasks.tasks.shared.report import Report
from bert_tasks.training import files as outputs
from bert_tasks.training.records import SeedsRecord, read_record
from bert_tasks.training.run import DryRun, dry_run, run_folder, train
from bert_tasks.training.state import FitResult

SEEDS = "seeds.json"
_SHOWN = 3  # settings in a note


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
        """What the best model predicts for every row; see `FitResult`."""
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

    @property
    def faults(self) -> list[str]:
        """How many runs diverged or collapsed, and what that does to the statistics."""
        faults = [f"{_counted(self.failed, self.runs)} diverged and are not counted"] if self.failed else []
        if self.collapsed:
            left = spreads(self.sound, self.lower_is_better).get(self.metric)
            rest = "no other is left"
            if left is not None:
                mean, std = format_number(left.mean), format_number(left.std)
                others = f"others: mean {mean}, std {std}" if left.runs > 1 else f"other: {mean}"
                rest = f"{self.metric} of the {others}"
            faults.append(f"{_counted(self.collapsed, self.runs)} collapsed; {rest}")
        return faults

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
                    **(
                        {}
                        if run.result is None
                        else {key: getattr(run.result, key) for key in ("best_step", "steps", "metrics")}
                    ),
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
            tables = {name: Report.of(first.task).table(metrics) for name, metrics in by_set.items()}
        shown = {metric_key(name, metric) for name, table in tables.items() for metric in table.overall}
        spread_rows: list[tuple[str, ...]] = [("metric", "mean", "std", "median", "best", "of seed")]
        for name, spread in self.metrics.items():
            if name in shown:
                numbers = map(format_number, (spread.mean, spread.std, spread.median, spread.best))
                spread_rows.append((name, *numbers, format_number(spread.best_seed)))
        lines = [*format_table([("seed", self.metric, "best step", ""), *map(self._run_cells, self.runs)]), ""]
        lines += format_table(spread_rows)
        for name, table in tables.items():
            if table.rows:
                title = f"means of each {table.word}{f' of {name}' if name else ''}:"
                lines += ["", title, *table.class_lines(), ""]
        lines += self.faults
        lines += dict.fromkeys(note for run in self.runs if run.result is not None for note in run.result.notes)
        return [*lines, *self.notes, f"runs: {self.output_dir}"]

    def _run_cells(self, run: SeedRun) -> tuple[str, ...]:
        if run.result is None:
            return (str(run.seed), "-", "-", f"diverged: {run.failure}")
        steps = f"{run.result.best_step} of {run.result.steps}"
        remarks = ["complete already"] if run.result.reused else []
        remarks += [] if run.collapse is None else [f"collapsed: {run.collapse}"]
        return (str(run.seed), format_number(run.value(self.metric)), steps, "; ".join(remarks))


def spreads(runs: Sequence[SeedRun], lower_is_better: Set[str] = frozenset()) -> dict[str, Spread]:
    """Every metric over the runs that have it."""
    results = {run.seed: run.result.metrics for run in runs if run.result is not None}
    spread_of = {}
    for name in dict.fromkeys(name for metrics in results.values() for name in metrics):
        values = {seed: metrics[name] for seed, metrics in results.items() if name in metrics}
        numbers = list(values.values())
        is_finite = all(map(math.isfinite, numbers))
        pick = min if name in lower_is_better else max
        comparable = (seed for seed, value in values.items() if not math.isnan(value))
        best = pick(comparable, key=values.__getitem__, default=None)
        spread_of[name] = Spread(
            runs=len(numbers),
            mean=statistics.fmean(numbers) if is_finite else math.nan,
            std=statistics.stdev(numbers) if is_finite and len(numbers) > 1 else math.nan,
            median=statistics.median(numbers) if is_finite else math.nan,
            best=math.nan if best is None else values[best],
            best_seed=best,
        )
    return spread_of


def _counted(some: Sequence[SeedRun], runs: Sequence[SeedRun]) -> str:
    seeds = ", ".join(str(run.seed) for run in some)
    return f"{len(some)} of {len(runs)} runs (seed{'s' if len(some) > 1 else ''} {seeds})"


def train_seeds(
    recipe: Recipe | str | Path,
    seeds: Iterable[int] | None = None,
    *,
    overwrite: bool = False,
    progress: bool = True,
) -> SeedsResult:
    """Runs a recipe once for each seed and compares the runs.

    ``OUTPUT_DIR/seed-N`` is the run that the recipe with ``run.seed = N`` makes. A finished run is reported, not
    repeated. An unfinished run resumes from its newest checkpoint. The comparison is written to
    ``OUTPUT_DIR/seeds.json``. A run that diverges is reported as failed, and the others continue. Runs of other seeds
    that are in the folder already are part of the comparison if they were made with the same settings; a note names
    the others.

    Args:
        recipe: A recipe, or the path of its TOML file.
        seeds: Default: the recipe's ``run.seeds``.
        overwrite: Repeat all runs, and replace runs of other recipes.
        progress: Report on standard error.

    Raises:
        RecipeError, DataError, CheckpointError, UsageError: as ``train``; all folders are checked before the first run
            starts.

    Example:
        >>> train_seeds("recipe.toml", [1, 2, 3]).metrics["accuracy"].mean  # doctest: +SKIP
    """
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    accelerator = make_accelerator(loaded.optim.mixed_precision)
    group = seed_group(loaded, seeds, overwrite=overwrite)
    if overwrite:  # all of them now: the command that resumes an interrupted run does not overwrite
        broadcast_from_main(accelerator, remove_runs, list(map(run_folder, group.recipes.values())))
    runs = [
        SeedRun(seed=seed, output_dir=run_folder(made), failure=str(result))
        if isinstance(result, DivergedError)
        else SeedRun(seed=seed, output_dir=run_folder(made), result=result)
        for seed, made, result in group.run(
            lambda made: train(made, overwrite=overwrite, progress=progress), progress=progress
        )
    ]
    others, left_out = _earlier_runs(group, runs, loaded) if accelerator.is_main_process else ([], [])
    runs = sorted([*runs, *others], key=lambda run: run.seed) if others else runs
    metadata = [_metadata(run.output_dir) for run in runs]
    metrics, notes = metadata[0]["metrics"], []
    if any(_validation(other) != _validation(metadata[0]) for other in metadata[1:]):
        notes.append(
            "the runs have different validation rows, because each seed selects its own, which adds to the spread; "
            "set data.validation to compare them on the same rows"
        )
    compared = SeedsResult(
        output_dir=group.folder,
        metric=metrics["best"],
        runs=tuple(runs),
        lower_is_better=frozenset(
            metric_key(name, metric) for name in metrics["sets"] for metric in metrics["lower_is_better"]
        ),
        notes=(*notes, *left_out),
    )
    if accelerator.is_main_process:
        outputs.write_json(group.folder / SEEDS, compared.to_json())
    return compared


def dry_run_seeds(recipe: Recipe, seeds: Iterable[int] | None = None, *, overwrite: bool = False) -> DryRun:
    """Returns the dry run of the first seed, after a check of all folders; arguments as in ``train_seeds``."""
    return dry_run(seed_group(recipe, seeds, overwrite=overwrite).first, overwrite=overwrite)


def seed_group(recipe: Recipe, seeds: Iterable[int] | None = None, *, overwrite: bool = False) -> RunGroup:
    """Returns the runs of a recipe, whose folders are checked; arguments as in ``train_seeds``.

    Raises:
        RecipeError: no folder, no seed, a seed that appears twice, or one that is out of range.
        UsageError: a folder that will not do, also of the last run.
    """
    numbers = recipe.run.seeds
    if seeds is not None:
        options = {"seeds": tuple(seeds)}
        try:
            numbers = RunSection.model_validate(options).seeds
        except ValidationError as error:
            problems = schema_problems(error, options, (), {})
            raise RecipeError("\n".join(problem.text for problem in problems)) from None
    if numbers is None:
        raise RecipeError("no seeds: set run.seeds in the recipe, or pass --seeds 1,2,3")
    group = RunGroup.plan(recipe, "seed", {seed: {"run": {"seed": seed, "seeds": None}} for seed in numbers})
    group.check(overwrite=overwrite)
    return group


def parse_seeds(text: str) -> tuple[int, ...]:
    """The seeds of ``1,2,3``.

    Raises:
        UsageError: it is something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,20}", part) for part in parts):
        raise UsageError(f"--seeds {shortened(text)}: expected whole numbers with commas between them, such as 1,2,3")
    return tuple(map(int, parts))


def _earlier_runs(group: RunGroup, runs: Sequence[SeedRun], recipe: Recipe) -> tuple[list[SeedRun], list[str]]:
    """Returns the runs of other seeds in the folder, and a note on each that cannot be compared with ``runs``."""
    failures: dict[str, str] = {}  # seed -> why its run failed, as the last comparison says, if that can be read
    with suppress(UsageError):
        failures = read_record(group.folder / SEEDS, SeedsRecord, remedy="")["failed"]
    current = _metadata(runs[0].output_dir)
    earlier: list[SeedRun] = []
    notes: list[str] = []
    for seed, folder in group.existing().items():
        try:
            metadata = outputs.read_run_metadata(folder)
            if metadata is not None and seed not in {run.seed for run in runs}:
                _check_settings(metadata, current)
                earlier.append(_earlier_run(seed, folder, metadata, failures.get(str(seed)), recipe))
        except BertTasksError as error:
            notes.append(f"the run of seed {seed} is left out: {error}")
    return earlier, notes


def _check_settings(metadata: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raises UsageError if a run was made with other settings, seed and the rows that it selects excepted."""
    before, now = metadata["settings"], current["settings"]
    differing = {name for name in {*before, *now} if before.get(name) != now.get(name)}
    differing -= {"run.seed", *silent_settings()}
    if _validation(metadata) != _validation(current):  # validation rows taken from the training rows differ
        differing = {name for name in differing if not name.startswith("data.")}
    if differing:
        names = ", ".join([*sorted(differing)[:_SHOWN], *(["..."] if len(differing) > _SHOWN else [])])
        raise UsageError(f"it has other settings ({names})")


def _earlier_run(seed: int, folder: Path, metadata: Mapping[str, Any], failure: str | None, recipe: Recipe) -> SeedRun:
    """Returns how a run ended. Raises UsageError or CheckpointError if it is not finished or damaged."""
    summary = outputs.read_summary(folder)
    if summary is None and failure is None:
        raise UsageError("it is not finished; train with that seed to resume it")
    if summary is None:
        return SeedRun(seed=seed, output_dir=folder, failure=failure)
    task = stated_task(CheckpointFolder.open(folder / outputs.MODEL), load_task_class(recipe.task))
    sets = metadata["metrics"]["sets"]
    result = FitResult.from_summary(summary, output_dir=folder, task=task, validation_sets=sets)
    return SeedRun(seed=seed, output_dir=folder, result=result)


def _metadata(folder: Path) -> dict[str, Any]:
    """Returns the content of run.json of a run that has begun."""
    metadata = outputs.read_run_metadata(folder)
    return {} if metadata is None else metadata


def _validation(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Split of the validation rows -> their fingerprint, in the order of evaluation."""
    return {split: data["fingerprint"] for split, data in metadata["data"].items() if split != "train"}
