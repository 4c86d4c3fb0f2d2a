"""One recipe with several seeds, which shows how much of a score is due to chance.

Owns the folder of the runs: ``seed-1``, ``seed-2``, ... and ``seeds.json``.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bert_tasks.data.problems import shortened
from bert_tasks.errors import BertTasksError, DivergedError, RecipeError, UsageError
from bert_tasks.experiments.summary import SeedRun, SeedsResult
from bert_tasks.inference import broadcast_from_main, make_accelerator
from bert_tasks.metrics.tables import metric_key
from bert_tasks.model.pretrained import CheckpointFolder, stated_task
from bert_tasks.paths import exists, is_folder
from bert_tasks.recipe.errors import schema_problems
from bert_tasks.recipe.schema import Recipe, RunSection, load_recipe, load_task_class
from bert_tasks.run_dir import files as outputs
from bert_tasks.storage import locked
from bert_tasks.terminal import write_message
from bert_tasks.training.run import DryRun, dry_run, train
from bert_tasks.training.state import FitResult

SEEDS = "seeds.json"
_LONGEST_SEED = 20  # digits
_SEED_FOLDER = re.compile(r"seed-(\d+)")


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
    if overwrite:  # all of them now: the command that resumes an interrupted run does not overwrite
        broadcast_from_main(accelerator, lambda: _remove_runs(planned))
    runs = []
    for number, made in enumerate(planned, start=1):
        if progress and is_main:
            write_message(f"seed {made.run.seed} (run {number} of {len(planned)})")
        runs.append(_run(made, overwrite=overwrite, progress=progress))
    folder = _folder(loaded)
    others, notes = _runs_of_other_seeds(folder, runs, loaded) if is_main else ([], [])
    result = _compared(folder, sorted([*runs, *others], key=lambda run: run.seed) if others else runs, notes)
    if is_main:
        outputs.write_json(folder / SEEDS, result.to_json())
    return result


def dry_run_seeds(recipe: Recipe, seeds: Iterable[int] | None = None, *, overwrite: bool = False) -> DryRun:
    """The dry run of the first seed, after a look at the folders of all; see ``train_seeds`` and ``dry_run``."""
    return dry_run(_planned(recipe, seeds, overwrite=overwrite)[0], overwrite=overwrite)


def seed_recipes(recipe: Recipe, seeds: Iterable[int] | None = None) -> dict[int, Recipe]:
    """Seed -> the recipe of its run; ``seeds`` default to the recipe's.

    Raises:
        RecipeError: no seed, one that appears twice, or one that is out of range.
    """
    chosen = recipe.run.seeds if seeds is None else _checked(tuple(seeds))
    if chosen is None:
        raise RecipeError("no seeds: set run.seeds in the recipe, or pass --seeds 1,2,3")
    folder = recipe.run.output_dir
    homes = {seed: None if folder is None else str(Path(folder) / f"seed-{seed}") for seed in chosen}
    changes = {seed: {"seed": seed, "seeds": None, "output_dir": home} for seed, home in homes.items()}
    return {
        seed: recipe.model_copy(update={"run": recipe.run.model_copy(update=change)})
        for seed, change in changes.items()
    }


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


def _checked(seeds: tuple[int, ...]) -> tuple[int, ...] | None:
    try:
        return RunSection(seeds=seeds).seeds
    except ValidationError as error:
        problems = schema_problems(error, {"seeds": seeds}, (), {})
        raise RecipeError("\n".join(problem.text for problem in problems)) from None


def _planned(recipe: Recipe, seeds: Iterable[int] | None, *, overwrite: bool) -> list[Recipe]:
    """The recipe of each run.

    Raises:
        RecipeError, UsageError: seeds or folders that will not do, also those of the last run.
    """
    if recipe.run.output_dir is None:
        raise RecipeError("the runs need a folder: set run.output_dir in the recipe, or pass --output-dir")
    recipes = list(seed_recipes(recipe, seeds).values())
    _check_folder(_folder(recipe))
    for made in recipes:
        outputs.check_folder(_folder(made))
        if not overwrite:
            _check_settings(made)
    return recipes


def _remove_runs(recipes: Iterable[Recipe]) -> None:
    for recipe in recipes:
        with locked(_folder(recipe)):
            outputs.remove(_folder(recipe))


def _check_settings(recipe: Recipe) -> None:
    """Refuses a folder that holds a run of another recipe, as far as that shows without reading data."""
    metadata = outputs.read_run_metadata(_folder(recipe))
    if metadata is None:
        return
    stated = outputs.flat_settings(recipe.model.model_dump(), recipe.optim, recipe.run)
    before = {name: value for name, value in metadata["settings"].items() if name in stated}
    outputs.changes(_folder(recipe), before, stated, finished=outputs.read_summary(_folder(recipe)) is not None)


def _folder(recipe: Recipe) -> Path:
    return Path(str(recipe.run.output_dir))


def _check_folder(folder: Path) -> None:
    """Whether the folder may hold the folders of runs."""
    if exists(folder) and not is_folder(folder):
        raise UsageError(f"{folder} is a file, expected a folder for the runs: choose another output folder")
    existing = sorted(path.name for path in folder.iterdir()) if is_folder(folder) else []
    if outputs.RUN in existing or outputs.SUMMARY in existing:
        raise UsageError(f"{folder} holds a run of one seed: choose another folder for several")
    if existing and not any(name == SEEDS or _SEED_FOLDER.fullmatch(name) for name in existing):
        raise UsageError(f"{folder} is not empty and holds no runs ({', '.join(existing[:3])}): choose another folder")


def _run(recipe: Recipe, *, overwrite: bool, progress: bool) -> SeedRun:
    seed, folder = recipe.run.seed, _folder(recipe)
    try:
        result = train(recipe, overwrite=overwrite, progress=progress)
    except DivergedError as error:
        return SeedRun(seed=seed, output_dir=folder, failure=str(error))
    return SeedRun(seed=seed, output_dir=folder, result=result)


def _runs_of_other_seeds(folder: Path, runs: Sequence[SeedRun], recipe: Recipe) -> tuple[list[SeedRun], list[str]]:
    """The runs that ended in this folder earlier, and a note on each that cannot be compared with these."""
    found: list[SeedRun] = []
    notes: list[str] = []
    mine, failures = _metadata(runs[0].output_dir), _failures(folder)
    for seed, place in sorted(_seed_folders(folder).items()):
        if seed in {run.seed for run in runs}:
            continue
        try:
            run = _earlier_run(seed, place, mine, failures.get(seed), recipe)
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
    differing = _differing_settings(metadata, mine)
    if differing:
        raise UsageError(f"it has other settings ({', '.join(differing)})")
    if summary is None and failure is None:
        raise UsageError("it is not finished; train with that seed to resume it")
    if summary is None:
        return SeedRun(seed=seed, output_dir=folder, failure=failure)
    model = folder / outputs.MODEL
    task = stated_task(CheckpointFolder.open(model), load_task_class(recipe.task))
    try:
        sets = metadata["metrics"]["sets"]
        result = FitResult.from_summary(summary, output_dir=folder, task=task, validation_sets=sets)
    except (LookupError, TypeError, AttributeError):
        raise UsageError(f"{folder / outputs.SUMMARY} is damaged") from None
    return SeedRun(seed=seed, output_dir=folder, result=result)


def _seed_folders(folder: Path) -> dict[int, Path]:
    """Seed -> its folder; "seed-01" is not one that was made here."""
    matches = [(match, path) for path in folder.iterdir() if (match := _SEED_FOLDER.fullmatch(path.name))]
    return {int(match[1]): path for match, path in matches if path.name == f"seed-{int(match[1])}"}


def _failures(folder: Path) -> dict[int, str]:
    """Seed -> why its run failed, as the last comparison says; none where there is none that can be read."""
    try:
        failed = json.loads((folder / SEEDS).read_text(encoding="utf-8"))["failed"]
        return {int(seed): str(reason) for seed, reason in failed.items()}
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return {}


def _differing_settings(metadata: Mapping[str, Any], mine: Mapping[str, Any], most: int = 3) -> list[str]:
    """The settings besides the seed in which two runs differ.

    Validation rows taken from the training rows differ with the seed; if they are the same, the training rows must be.
    """
    same_validation = _validation(metadata) == _validation(mine)
    before, now = metadata["settings"], mine["settings"]
    apart = {"run.seed", *outputs.SILENT, *(f"data.{split}" for split in _validation(mine) | _validation(metadata))}
    apart |= set() if same_validation else {"data.train"}
    names = [name for name in sorted({*before, *now} - apart) if before.get(name) != now.get(name)]
    return [*names[:most], *(["..."] if len(names) > most else [])]


def _compared(folder: Path, runs: Sequence[SeedRun], notes: Sequence[str]) -> SeedsResult:
    metadata = [_metadata(run.output_dir) for run in runs]
    metrics = metadata[0]["metrics"]
    lowest = {metric_key(name, metric) for name in metrics["sets"] for metric in metrics["lower_is_better"]}
    return SeedsResult(
        output_dir=folder,
        metric=metrics["best"],
        runs=tuple(runs),
        lower_is_better=frozenset(lowest),
        notes=(*_notes(metadata), *notes),
    )


def _metadata(folder: Path) -> dict[str, Any]:
    """The content of run.json."""
    metadata: dict[str, Any] = json.loads((folder / outputs.RUN).read_text(encoding="utf-8"))
    return metadata


def _validation(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Split of the validation rows -> their fingerprint, in the order of evaluation."""
    return {split: data["fingerprint"] for split, data in metadata["data"].items() if split != "train"}


def _notes(metadata: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if any(_validation(other) != _validation(metadata[0]) for other in metadata[1:]):
        yield (
            "the runs have different validation rows, because each seed selects its own, which adds to the spread; "
            "set data.validation to compare them on the same rows"
        )
