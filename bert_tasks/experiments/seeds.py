"""One recipe with several seeds, which shows how much of a score is due to chance.

Owns ``seeds.json``, the statistics over the runs, and the tables for people and programs.

The seed decides about the weights of a new head, the order of the rows and dropout. Fine-tuned on a small data set, the
same model may differ by several points from seed to seed (Dodge et al., arXiv:2002.06305), and some runs may end with a
model that predicts one class. So a difference between two settings means little unless it is larger than this spread.
"""

import math
import re
import statistics
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, ValidationError

from bert_tasks.data.issues import shortened
from bert_tasks.errors import BertTasksError, DivergedError, RecipeError, UsageError
from bert_tasks.experiments.group import RunGroup
from bert_tasks.metrics.tables import MetricTable, format_number, metric_key, metrics_by_set
from bert_tasks.model.heads import metric_table
from bert_tasks.model.pretrained import CheckpointFolder, stored_tasks
from bert_tasks.recipe.errors import schema_problems
from bert_tasks.recipe.schema import Recipe, RunSection, load_recipe, load_task_class, silent_settings
from bert_tasks.tables import Result, Table
from bert_tasks.tasks.several import SEVERAL
from bert_tasks.training import files as outputs
from bert_tasks.training.records import Count, Metrics, Number, Record, RunRecord, read_record
from bert_tasks.training.run import DryRun, dry_run, train
from bert_tasks.training.state import FitResult

SEEDS = "seeds.json"
_SHOWN = 3  # settings in a note


class SeedRun(Record):
    """The run of one seed, as in ``seeds.json``. A run that diverged has a ``failure``, but no steps and no metrics.

    Attributes:
        value: The metric that selects the best model, which is set only in the file.
        collapse: As in ``FitResult``.
        result: The result of the run. None if it diverged, and in the file.
    """

    seed: Annotated[int, Field(ge=0, lt=2**32)]
    output_dir: Annotated[Path, Field(strict=False)]
    value: Number = math.nan
    best_step: Count | None = None
    steps: Count | None = None
    metrics: Metrics | None = None
    failure: str | None
    collapse: str | None
    result: FitResult | None = Field(default=None, exclude=True)

    @classmethod
    def of(cls, seed: int, output_dir: Path, outcome: FitResult | str) -> Self:
        """Returns a run from its result, or from the reason why it diverged."""
        if isinstance(outcome, str):
            return cls(seed=seed, output_dir=output_dir, failure=outcome, collapse=None)
        return cls(
            seed=seed,
            output_dir=output_dir,
            best_step=outcome.best_step,
            steps=outcome.steps,
            metrics=outcome.metrics,
            failure=None,
            collapse=outcome.collapse,
            result=outcome,
        )

    def metric(self, name: str) -> float:
        """Returns a metric of the best model, or NaN if there is none."""
        if self.metrics is None:
            return math.nan
        return self.metrics.get(name, math.nan)


class Spread(Record):
    """The distribution of a metric over several runs.

    Mean, deviation and median are NaN if the metric is NaN in some run.

    Attributes:
        runs: Number of runs that have the metric.
        std: The sample standard deviation (divided by runs - 1). NaN for a single run.
        best, best_seed: The highest value (if lower is better, the lowest) and its seed. Of equal values it is the
            first.
    """

    model_config = ConfigDict(frozen=True)
    runs: Count
    mean: Number
    std: Number
    median: Number
    best: Number
    best_seed: int | None


class SeedsRecord(Record):
    """The content of ``seeds.json``, whose fields are explained in ``SeedsResult``."""

    metric: str
    seeds: list[int]
    metrics: dict[str, Spread]
    collapsed: dict[str, str]
    failed: dict[str, str]
    metrics_without_collapsed: dict[str, Spread] | None
    runs: list[SeedRun]
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class SeedsResult(Result):
    """All runs of a recipe, in the order of the seeds.

    Attributes:
        output_dir: The folder with the runs and with ``seeds.json``.
        metric, lower_is_better: The metric that selects the best model, and all metrics for which lower is better.
        runs: The run of each seed.
        notes: Warnings about the statistics in whole sentences, for example that runs have different validation rows.
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
        """The runs whose best model predicts the same for every row."""
        return tuple(run for run in self.runs if run.collapse is not None)

    @property
    def metrics(self) -> dict[str, Spread]:
        """Every metric over the runs that did not diverge, in the order of the runs."""
        return spreads(self.runs, self.lower_is_better)

    @property
    def metrics_without_collapsed(self) -> dict[str, Spread]:
        """Every metric over the runs that neither diverged nor collapsed."""
        return spreads([run for run in self.runs if run.collapse is None], self.lower_is_better)

    @property
    def faults(self) -> list[str]:
        """Sentences with the number of runs that diverged or collapsed, and the metric of the others.

        A run that collapsed counts in the statistics, because it has metrics. A few of them move the mean far from what
        a usual run reaches, so the metric of the others is shown, too.
        """
        faults: list[str] = []
        if self.failed:
            faults.append(f"{self._counted(self.failed)} diverged and are not counted")
        if self.collapsed:
            others, rest = self.metrics_without_collapsed.get(self.metric), "No other run is left"
            if others is not None:
                mean, std = format_number(others.mean), format_number(others.std)
                rest = f"The other has {self.metric} {mean}"
                if others.runs > 1:
                    rest = f"The others have mean {self.metric} {mean}, std {std}"
            faults.append(f"{self._counted(self.collapsed)} collapsed. {rest}")
        return faults

    def _counted(self, some: Sequence[SeedRun]) -> str:
        """Returns how many of the runs these are, with their seeds."""
        seeds = ", ".join(str(run.seed) for run in some)
        word = "seeds" if len(some) > 1 else "seed"
        return f"{len(some)} of {len(self.runs)} runs ({word} {seeds})"

    def to_json(self) -> dict[str, Any]:
        """Returns the content of ``seeds.json``."""
        without_collapsed = None
        if self.collapsed:
            without_collapsed = self.metrics_without_collapsed
        failures = {str(run.seed): run.failure for run in self.runs if run.failure is not None}
        collapses = {str(run.seed): run.collapse for run in self.runs if run.collapse is not None}
        record = SeedsRecord(
            metric=self.metric,
            seeds=[run.seed for run in self.runs],
            metrics=self.metrics,
            collapsed=collapses,
            failed=failures,
            metrics_without_collapsed=without_collapsed,
            runs=[run.model_copy(update={"value": run.metric(self.metric)}) for run in self.runs],
            notes=list(self.notes),
        )
        return record.to_json()

    def lines(self) -> list[str]:
        """Returns the lines for a terminal."""
        metrics, results = self.metrics, [run.result for run in self.runs if run.result is not None]
        tables: dict[str, MetricTable] = {}  # the means of the metrics of each validation set, empty if all diverged
        if results:
            means = {name: spread.mean for name, spread in metrics.items()}
            by_set = metrics_by_set(means, results[0].validation_sets)
            tables = {name: metric_table(results[0].tasks, of_set) for name, of_set in by_set.items()}
        of_metrics: dict[str, tuple[str, ...]] = {}
        best = self.metric
        for name, table in tables.items():
            for metric in table.overall:
                key = metric_key(name, metric)
                spread = metrics[key]
                numbers = (spread.mean, spread.std, spread.median, spread.best, spread.best_seed)
                title = metric_key(name, table.title(metric))
                of_metrics[key] = (title, *map(format_number, numbers))
                if key == self.metric:
                    best = title
        of_runs = [self._run_cells(run) for run in self.runs]
        lines = [*Table(columns=("seed", best, "best step", ""), rows=of_runs).lines(), ""]
        columns = ("metric", "mean", "std", "median", "best", "of seed")
        lines += Table(columns=columns, rows=list(of_metrics.values())).lines()
        for name, table in tables.items():
            if table.rows:
                of_set = f" of {name}" if name else ""
                lines += ["", f"means of each {table.word}{of_set}:", *table.class_lines(), ""]
        notes: dict[str, None] = {}  # each once, because most notes are about the data, which all runs share
        for result in results:
            notes |= dict.fromkeys(result.notes)
        return [*lines, *self.faults, *notes, *self.notes, f"runs: {self.output_dir}"]

    def _run_cells(self, run: SeedRun) -> tuple[str, ...]:
        """Returns the row of a run in the table."""
        if run.result is None:
            return (str(run.seed), "-", "-", f"diverged at {run.failure}")
        steps = f"{run.result.best_step} of {run.result.steps}"
        remarks: list[str] = []
        if run.result.reused:
            remarks.append("complete already")
        if run.collapse is not None:
            remarks.append(f"collapsed: {run.collapse}")
        return (str(run.seed), format_number(run.metric(self.metric)), steps, ", ".join(remarks))


def spreads(runs: Sequence[SeedRun], lower_is_better: Set[str] = frozenset()) -> dict[str, Spread]:
    """Returns the distribution of each metric over the runs that have it."""
    results = {run.seed: run.metrics for run in runs if run.metrics is not None}
    names: dict[str, None] = {}
    for metrics in results.values():
        names |= dict.fromkeys(metrics)
    spread_of: dict[str, Spread] = {}
    for name in names:
        values = {seed: metrics[name] for seed, metrics in results.items() if name in metrics}
        numbers = list(values.values())
        mean = std = median = math.nan
        if all(math.isfinite(number) for number in numbers):
            mean, median = statistics.fmean(numbers), statistics.median(numbers)
            if len(numbers) > 1:
                std = statistics.stdev(numbers)
        # NaN compares as False with everything, so min and max would return it or not, depending on the order.
        comparable = [seed for seed, value in values.items() if not math.isnan(value)]
        choose = min if name in lower_is_better else max
        best_seed = choose(comparable, key=values.__getitem__, default=None)
        best = math.nan if best_seed is None else values[best_seed]
        spread_of[name] = Spread(runs=len(numbers), mean=mean, std=std, median=median, best=best, best_seed=best_seed)
    return spread_of


def train_seeds(
    recipe: Recipe | str | Path,
    seeds: Iterable[int] | None = None,
    *,
    overwrite: bool = False,
    progress: bool = True,
) -> SeedsResult:
    """Trains a recipe once for each seed and compares the runs.

    Use it before you compare two models or two settings, because the same recipe may differ by several points from seed
    to seed on a small data set. It costs one run for each seed. Two seeds are too few to tell which side is better, so
    take at least three to five.

    ``OUTPUT_DIR/seed-N`` is the run of the recipe with ``run.seed = N``. A finished run is not repeated, and an
    unfinished one resumes. If a run diverges, the others continue. Runs of other seeds in the folder are compared, too,
    if they have the same settings, so you can add seeds later. The comparison is written to ``seeds.json``.

    Args:
        recipe: A recipe, or the path of its TOML file.
        seeds: The seeds, whole numbers from 0 to 2**32 - 1. Default: the recipe's ``run.seeds``.
        overwrite: True to repeat all runs, and to replace runs of other recipes. Default: False.
        progress: True to show progress on standard error, which is the default.

    Returns:
        All runs, with the mean, the deviation and the median of each metric, and with the best seed.

    Raises:
        RecipeError, DataError, CheckpointError, UsageError, StoppedError: See ``fit``.

    Examples:
        >>> result = train_seeds("recipe.toml", [1, 2])
        >>> [run.seed for run in result.runs]
        [1, 2]
        >>> deviation = result.metrics["accuracy"].std  # over the two runs
    """
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    group = seed_group(loaded, seeds, overwrite=overwrite)
    replaced: list[Path] = []
    if overwrite:
        replaced = [group.home(seed) for seed in group.recipes]
    results = group.run(
        lambda planned: train(planned, overwrite=overwrite, progress=progress), progress=progress, remove=replaced
    )
    runs = []
    for seed, result in results:
        outcome = str(result) if isinstance(result, DivergedError) else result
        runs.append(SeedRun.of(seed, group.home(seed), outcome))
    notes: list[str] = []
    if group.accelerator.is_main_process:
        others = _earlier_runs(group, loaded, notes)
        if others:  # otherwise the order of the recipe stays
            runs = sorted([*runs, *others], key=lambda run: run.seed)
    metadata: list[RunRecord] = []
    for run in runs:
        content = outputs.read_run_metadata(run.output_dir)
        if content is not None:
            metadata.append(content)
    metrics = metadata[0].metrics  # the same for all, because they have the same settings
    # A fraction of the training rows is drawn with the seed of the run.
    if any(other.validation_fingerprints != metadata[0].validation_fingerprints for other in metadata[1:]):
        notes.insert(
            0,
            "the runs have different validation rows, because each seed selects its own, which adds to the spread. "
            "Set data.validation to compare them on the same rows",
        )
    lower_is_better: set[str] = set()
    for name in metrics.sets:
        lower_is_better |= {metric_key(name, metric) for metric in metrics.lower_is_better}
    compared = SeedsResult(
        output_dir=group.folder,
        metric=metrics.best,
        runs=tuple(runs),
        lower_is_better=frozenset(lower_is_better),
        notes=tuple(notes),
    )
    if group.accelerator.is_main_process:
        outputs.write_json(group.folder / SEEDS, compared.to_json())
    return compared


def dry_run_seeds(recipe: Recipe, seeds: Iterable[int] | None = None, *, overwrite: bool = False) -> DryRun:
    """Checks all folders and returns the dry run of the first seed, because the others differ only in the seed."""
    return dry_run(seed_group(recipe, seeds, overwrite=overwrite).first, overwrite=overwrite)


def seed_group(recipe: Recipe, seeds: Iterable[int] | None = None, *, overwrite: bool = False) -> RunGroup:
    """Checks the folders of a recipe's runs and returns the runs.

    Raises:
        RecipeError: There are no seeds, or they are invalid.
        UsageError: A folder holds other files, or runs with other settings.
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
        raise RecipeError("no seeds. Set run.seeds in the recipe, or pass --seeds 1,2,3")
    group = RunGroup(recipe, "seed", {seed: {"run": {"seed": seed, "seeds": None}} for seed in numbers})
    group.check(overwrite=overwrite)
    return group


def parse_seeds(text: str) -> tuple[int, ...]:
    """Returns the seeds of ``1,2,3``. Raises UsageError if it is something else."""
    parts = [seed.strip() for seed in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,20}", seed) for seed in parts):
        raise UsageError(f"--seeds is {shortened(text)}, expected whole numbers with commas, such as 1,2,3")
    return tuple(map(int, parts))


def _earlier_runs(group: RunGroup, recipe: Recipe, notes: list[str]) -> list[SeedRun]:
    """Returns the runs of other seeds in the folder, and adds a note on each that cannot be compared."""
    # Why the runs of some seeds failed. Only the last comparison says it, because a run that diverged has no summary.
    failures: dict[str, str] = {}
    with suppress(UsageError):  # a damaged file counts as none
        failures = read_record(group.folder / SEEDS, SeedsRecord, remedy="").failed
    current = outputs.read_run_metadata(group.home(next(iter(group.recipes))))
    earlier: list[SeedRun] = []
    for seed, folder in group.existing().items():
        try:
            metadata = outputs.read_run_metadata(folder)
            # The runs of this call are compared anyway.
            if metadata is None or current is None or seed in group.recipes:
                continue
            # Metrics of runs with other settings would not show what is due to chance.
            _check_settings(metadata, current)
            summary, failure = outputs.read_summary(folder), failures.get(str(seed))
            if summary is not None:
                task_class = None if recipe.task == SEVERAL else load_task_class(recipe.task)
                tasks = stored_tasks(CheckpointFolder.open(folder / outputs.MODEL), task_class)
                sets = tuple(metadata.metrics.sets)
                result = FitResult(**dict(summary), output_dir=folder, tasks=tasks, validation_sets=sets, reused=True)
                earlier.append(SeedRun.of(seed, folder, result))
            elif failure is not None:
                earlier.append(SeedRun.of(seed, folder, failure))
            else:
                raise UsageError("It is not finished. Train with that seed to resume it")
        except BertTasksError as error:
            notes.append(f"the run of seed {seed} does not count. {error}")
    return earlier


def _check_settings(metadata: RunRecord, current: RunRecord) -> None:
    """Raises UsageError if a run has other settings, except the seed and its rows."""
    differing = {change.name for change in outputs.differences(metadata.settings, current.settings)}
    differing -= {"run.seed", *silent_settings()}
    # If validation rows are taken from the training rows, each seed selects others, so both sets differ.
    if metadata.validation_fingerprints != current.validation_fingerprints:
        differing = {name for name in differing if not name.startswith("data.")}
    if differing:
        names = sorted(differing)[:_SHOWN]
        if len(differing) > _SHOWN:
            names.append("...")
        raise UsageError(f"It has other settings ({', '.join(names)})")
