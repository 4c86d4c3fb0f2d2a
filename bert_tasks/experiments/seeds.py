"""One recipe with several seeds, which shows how much of a score is due to chance.

Owns the folder of the runs (``seed-1``, ``seed-2``, ... and ``seeds.json``), the statistics over them, which of them
collapsed, and the tables for people and programs.
"""

import json
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
from bert_tasks.metrics.tables import MetricTable, metric_key, metrics_by_set
from bert_tasks.model.pretrained import CheckpointFolder, stated_task
from bert_tasks.recipe.errors import schema_problems
from bert_tasks.recipe.schema import Recipe, RunSection, load_recipe, load_task_class
from bert_tasks.storage import locked
from bert_tasks.terminal import write_message
from bert_tasks.training import files as outputs
from bert_tasks.training.run import DryRun, dry_run, train
from bert_tasks.training.state import FitResult

SEEDS = "seeds.json"
_LONGEST_SEED = 20  # digits
_SHOWN = 3  # settings in a note
_SEED_FOLDER = re.compile(r"seed-(\d+)")
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
                spread_rows.append((name, *map(format_number, (one.mean, one.std, one.median, one.best)), seed))
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


def format_number(value: float) -> str:
    """A number for people; NaN is a dash."""
    return "-" if math.isnan(value) else f"{value:.6g}"


def _counted(some: Sequence[SeedRun], runs: Sequence[SeedRun]) -> str:
    seeds = ", ".join(str(run.seed) for run in some)
    return f"{len(some)} of {len(runs)} runs (seed{'s' if len(some) > 1 else ''} {seeds})"


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def train_seeds(
    recipe: Recipe | str | Path,
    seeds: Iterable[int] | None = None,
    *,
    overwrite: bool = False,
    progress: bool = True,
) -> SeedsResult:
    """Runs a recipe once for each seed and compares the runs.

    ``OUTPUT_DIR/seed-N`` is the run that the recipe with ``run.seed = N`` makes. A finished run is reported, not
    repeated; an unfinished one resumes from its newest checkpoint. The comparison is written to
    ``OUTPUT_DIR/seeds.json``. A run that diverges is reported as failed, and the others continue. Runs of other seeds
    that are in the folder already are part of the comparison if they were made with the same settings; a note names
    those that are not.

    Args:
        seeds: default: the recipe's ``run.seeds``.
        overwrite: repeat all runs, and replace those of other recipes.

    Raises:
        RecipeError, DataError, CheckpointError, UsageError: as ``train``; all folders are looked at before the first
            run starts.
    """
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    accelerator = make_accelerator(loaded.optim.mixed_precision)
    is_main = accelerator.is_main_process
    planned = _planned(loaded, seeds, overwrite=overwrite)

    def remove_runs() -> None:
        for made in planned:
            with locked(_folder(made)):
                outputs.remove(_folder(made))

    if overwrite:  # all of them now: the command that resumes an interrupted run does not overwrite
        broadcast_from_main(accelerator, remove_runs)
    runs = []
    for number, made in enumerate(planned, start=1):
        seed, failure, result = made.run.seed, None, None
        if progress and is_main:
            write_message(f"seed {seed} (run {number} of {len(planned)})")
        try:
            result = train(made, overwrite=overwrite, progress=progress)
        except DivergedError as error:
            failure = str(error)
        runs.append(SeedRun(seed=seed, output_dir=_folder(made), result=result, failure=failure))
    folder = _folder(loaded)
    others, left_out = _runs_of_other_seeds(folder, runs, loaded) if is_main else ([], [])
    runs = sorted([*runs, *others], key=lambda run: run.seed) if others else runs
    metadata = [_metadata(run.output_dir) for run in runs]
    metrics, notes = metadata[0]["metrics"], []
    if any(_validation(other) != _validation(metadata[0]) for other in metadata[1:]):
        notes.append(
            "the runs have different validation rows, because each seed selects its own, which adds to the spread; "
            "set data.validation to compare them on the same rows"
        )
    compared = SeedsResult(
        output_dir=folder,
        metric=metrics["best"],
        runs=tuple(runs),
        lower_is_better=frozenset(
            metric_key(name, metric) for name in metrics["sets"] for metric in metrics["lower_is_better"]
        ),
        notes=(*notes, *left_out),
    )
    if is_main:
        outputs.write_json(folder / SEEDS, compared.to_json())
    return compared


def dry_run_seeds(recipe: Recipe, seeds: Iterable[int] | None = None, *, overwrite: bool = False) -> DryRun:
    """The dry run of the first seed, after a look at the folders of all; see ``train_seeds`` and ``dry_run``."""
    return dry_run(_planned(recipe, seeds, overwrite=overwrite)[0], overwrite=overwrite)


def seed_recipes(recipe: Recipe, seeds: Iterable[int] | None = None) -> dict[int, Recipe]:
    """Seed -> the recipe of its run; ``seeds`` default to the recipe's.

    Raises:
        RecipeError: no seed, one that appears twice, or one that is out of range.
    """
    chosen = recipe.run.seeds
    if seeds is not None:
        given = {"seeds": tuple(seeds)}
        try:
            chosen = RunSection.model_validate(given).seeds
        except ValidationError as error:
            problems = schema_problems(error, given, (), {})
            raise RecipeError("\n".join(problem.text for problem in problems)) from None
    if chosen is None:
        raise RecipeError("no seeds: set run.seeds in the recipe, or pass --seeds 1,2,3")
    folder = recipe.run.output_dir
    made = {}
    for seed in chosen:
        change = {
            "seed": seed,
            "seeds": None,
            "output_dir": None if folder is None else str(Path(folder, f"seed-{seed}")),
        }
        made[seed] = recipe.model_copy(update={"run": recipe.run.model_copy(update=change)})
    return made


def parse_seeds(text: str) -> tuple[int, ...]:
    """The seeds of ``1,2,3``.

    Raises:
        UsageError: it is something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]+", part) for part in parts):
        raise UsageError(f"--seeds {text}: expected whole numbers with commas between them, such as 1,2,3")
    too_large = next((part for part in parts if len(part) > _LONGEST_SEED or int(part) >= 2**32), None)
    if too_large is not None:
        raise UsageError(f"--seeds {shortened(too_large)}: a seed is a whole number from 0 to {2**32 - 1}")
    return tuple(map(int, parts))


def _planned(recipe: Recipe, seeds: Iterable[int] | None, *, overwrite: bool) -> list[Recipe]:
    """The recipe of each run.

    Raises:
        RecipeError, UsageError: seeds or folders that will not do, also those of the last run.
    """
    if recipe.run.output_dir is None:
        raise RecipeError("the runs need a folder: set run.output_dir in the recipe, or pass --output-dir")
    recipes = list(seed_recipes(recipe, seeds).values())
    check_run_folders(_folder(recipe), recipes, SEEDS, _SEED_FOLDER, overwrite=overwrite)
    return recipes


def check_run_folders(
    folder: Path, recipes: Sequence[Recipe], summary: str, runs: re.Pattern[str], *, overwrite: bool
) -> None:
    """Checks that the runs of an experiment may use a folder.

    Args:
        folder: of the experiment.
        recipes: of the runs, with their folders.
        summary: the name of the experiment's file, and ``runs`` that of its runs' folders.

    Raises:
        UsageError: the folder holds something else, or a run there was made with other settings.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, expected a folder for the runs: choose another output folder")
    existing = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if outputs.RUN in existing or outputs.SUMMARY in existing:
        raise UsageError(f"{folder} holds a single run: choose another folder for several")
    if existing and not any(name == summary or runs.fullmatch(name) for name in existing):
        raise UsageError(
            f"{folder} is not empty and contains no such runs (it contains {', '.join(existing[:3])}): choose another "
            "folder"
        )
    for made in recipes:
        home = _folder(made)
        outputs.check_folder(home)
        metadata = None if overwrite else outputs.read_run_metadata(home)
        if metadata is not None:  # not of another recipe, as far as that shows without reading data
            stated = outputs.flat_settings(made.model.model_dump(), made.optim, made.run)
            before = {name: value for name, value in metadata["settings"].items() if name in stated}
            outputs.changes(home, before, stated, finished=outputs.read_summary(home) is not None)


def _folder(recipe: Recipe) -> Path:
    return Path(str(recipe.run.output_dir))


def _runs_of_other_seeds(folder: Path, runs: Sequence[SeedRun], recipe: Recipe) -> tuple[list[SeedRun], list[str]]:
    """The runs that ended in this folder earlier, and a note on each that cannot be compared with these."""
    found: list[SeedRun] = []
    notes: list[str] = []
    failures: dict[int, str] = {}  # seed -> why its run failed, as the last comparison says, if that can be read
    with suppress(OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        failed = json.loads((folder / SEEDS).read_text(encoding="utf-8"))["failed"]
        failures = {int(seed): str(reason) for seed, reason in failed.items()}
    matches = [(match, path) for path in folder.iterdir() if (match := _SEED_FOLDER.fullmatch(path.name))]
    # "seed-01" is not a folder that was made here.
    homes = {int(match[1]): path for match, path in matches if path.name == f"seed-{int(match[1])}"}
    for seed in sorted(homes.keys() - {run.seed for run in runs}):
        try:
            run = _earlier_run(seed, homes[seed], _metadata(runs[0].output_dir), failures.get(seed), recipe)
        except BertTasksError as error:
            notes.append(f"the run of seed {seed} is left out: {error}")
        else:
            found += [] if run is None else [run]
    return found, notes


def _earlier_run(
    seed: int, folder: Path, mine: Mapping[str, Any], failure: str | None, recipe: Recipe
) -> SeedRun | None:
    """How the run in the folder ended; None if there is none.

    Raises:
        UsageError, CheckpointError: it cannot be compared with the run whose run.json is ``mine``.
    """
    metadata, summary = outputs.read_run_metadata(folder), outputs.read_summary(folder)
    if metadata is None:
        return None
    # Validation rows taken from the training rows differ with the seed; where they do not, training rows must be equal.
    before, now = metadata["settings"], mine["settings"]
    apart = {"run.seed", *outputs.SILENT, *(f"data.{split}" for split in _validation(mine) | _validation(metadata))}
    apart |= set() if _validation(metadata) == _validation(mine) else {"data.train"}
    differing = [name for name in sorted({*before, *now} - apart) if before.get(name) != now.get(name)]
    if differing:
        named = [*differing[:_SHOWN], *(["..."] if len(differing) > _SHOWN else [])]
        raise UsageError(f"it has other settings ({', '.join(named)})")
    if summary is None and failure is None:
        raise UsageError("it is not finished; train with that seed to resume it")
    if summary is None:
        return SeedRun(seed=seed, output_dir=folder, failure=failure)
    model = folder / outputs.MODEL
    task = stated_task(CheckpointFolder.open(model), load_task_class(recipe.task))
    sets = metadata["metrics"]["sets"]
    result = FitResult.from_summary(summary, output_dir=folder, task=task, validation_sets=sets)
    return SeedRun(seed=seed, output_dir=folder, result=result)


def _metadata(folder: Path) -> dict[str, Any]:
    """The content of run.json."""
    metadata: dict[str, Any] = json.loads((folder / outputs.RUN).read_text(encoding="utf-8"))
    return metadata


def _validation(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Split of the validation rows -> their fingerprint, in the order of evaluation."""
    return {split: data["fingerprint"] for split, data in metadata["data"].items() if split != "train"}
