"""One recipe with several seeds, which shows how much of a score is due to chance.

Owns the folder of the runs: ``seed-1``, ``seed-2``, ... and ``seeds.json``.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bert_tasks.data.problems import shortened
from bert_tasks.distributed import broadcast_from_main, make_accelerator
from bert_tasks.errors import BertTasksError, DivergedError, RecipeError, UsageError
from bert_tasks.experiments.summary import SeedRun, SeedsResult
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
_SHOWN = 3  # settings in a note
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
    folder = _folder(recipe)
    if exists(folder) and not is_folder(folder):
        raise UsageError(f"{folder} is a file, expected a folder for the runs: choose another output folder")
    existing = sorted(path.name for path in folder.iterdir()) if is_folder(folder) else []
    if outputs.RUN in existing or outputs.SUMMARY in existing:
        raise UsageError(f"{folder} holds a run of one seed: choose another folder for several")
    if existing and not any(name == SEEDS or _SEED_FOLDER.fullmatch(name) for name in existing):
        raise UsageError(f"{folder} is not empty and holds no runs ({', '.join(existing[:3])}): choose another folder")
    for made in recipes:
        home = _folder(made)
        outputs.check_folder(home)
        metadata = None if overwrite else outputs.read_run_metadata(home)
        if metadata is not None:  # not of another recipe, as far as that shows without reading data
            stated = outputs.flat_settings(made.model.model_dump(), made.optim, made.run)
            before = {name: value for name, value in metadata["settings"].items() if name in stated}
            outputs.changes(home, before, stated, finished=outputs.read_summary(home) is not None)
    return recipes


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
    try:
        sets = metadata["metrics"]["sets"]
        result = FitResult.from_summary(summary, output_dir=folder, task=task, validation_sets=sets)
    except (LookupError, TypeError, AttributeError):
        raise UsageError(f"{folder / outputs.SUMMARY} is damaged") from None
    return SeedRun(seed=seed, output_dir=folder, result=result)


def _metadata(folder: Path) -> dict[str, Any]:
    """The content of run.json."""
    metadata: dict[str, Any] = json.loads((folder / outputs.RUN).read_text(encoding="utf-8"))
    return metadata


def _validation(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Split of the validation rows -> their fingerprint, in the order of evaluation."""
    return {split: data["fingerprint"] for split, data in metadata["data"].items() if split != "train"}
