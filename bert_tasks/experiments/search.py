"""Hyper-parameter search, in which each trial is an ordinary run.

Owns the folder of a search (``study.db``, the folders of the trials, ``recipe.toml``, ``best.toml``), the removal of
its files, and the tables for people and programs. study.py asks Optuna for values and for the trials that end early.
"""

import json
import math
import shlex
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_tasks.distributed import broadcast_from_main, is_main_process, main_process_first, make_accelerator
from bert_tasks.environment import check_libraries
from bert_tasks.errors import DivergedError, RecipeError, UsageError, argument
from bert_tasks.experiments.group import check_experiment_folder, remove_runs, with_changes
from bert_tasks.inference.own_metrics import own_metrics
from bert_tasks.metrics.tables import format_number, split_key
from bert_tasks.recipe.check import LoadedRecipe, prepare
from bert_tasks.recipe.schema import Recipe, load_recipe, resolved_toml, silent_settings, with_values
from bert_tasks.storage import locked
from bert_tasks.tables import Result, Table
from bert_tasks.terminal import write_message
from bert_tasks.training import files as outputs
from bert_tasks.training.evaluation import metric_metadata
from bert_tasks.training.loop import Trainer, TrainerCallback
from bert_tasks.training.run import run_folder, train

if TYPE_CHECKING:  # Optuna is an extra
    from optuna.trial import FrozenTrial

    from bert_tasks.experiments.study import Study

STUDY, BEST = "study.db", "best.toml"
METRIC, LOWER_IS_BETTER = "the metric", "lower is better"  # two of the facts of the study
_SHOWN = 6  # the most differing facts that a message lists
# What may differ when the same command continues a search. The files may move, because fingerprints tell whether the
# rows are still the same.
_FREE = {"search.trials", "search.hours", "run.output_dir", "data.train", "data.validation", "data.dir"}
_FREE |= silent_settings()
LUCK = (
    "the score of the best trial is too good on average, because it was chosen for it. Compare the means of the best "
    "values and of the recipe as it is with seeds that no trial had"
)


@dataclass(frozen=True, kw_only=True)
class SearchResult(Result):
    """A search, with the trials that have ended.

    Attributes:
        output_dir: The folder of the search.
        metric: The metric by which trials are compared.
        lower_is_better: True if a lower value of the metric is better.
        trials: Optuna's trials, in the order in which they ran. ``params`` has the values and ``value`` the score. If a
            trial has no score, ``user_attrs["note"]`` says why.
        seed: The seed of all trials.
    """

    output_dir: Path
    metric: str
    lower_is_better: bool
    trials: "tuple[FrozenTrial, ...]"
    seed: int

    @property
    def best(self) -> "FrozenTrial | None":
        """The trial with the best score, of equal ones the first. None if no trial has a score."""
        scored = [trial for trial in self.trials if trial.value is not None]
        choose = min if self.lower_is_better else max
        return choose(scored, key=attrgetter("value"), default=None)

    def folder_of(self, number: int) -> Path:
        """Returns the folder of a trial's run."""
        return self.output_dir / f"trial-{number:03d}"

    def note_on(self, trial: "FrozenTrial") -> str:
        """Returns what there is to say about a trial besides its values and its score."""
        if trial == self.best:
            return "best"
        return str(trial.user_attrs.get("note", ""))

    @property
    def next(self) -> list[str]:
        """The commands that train the best values and the recipe as it is with fresh seeds, and compare them.

        The trials all have one seed, with which the best values may just be lucky, so the comparison needs others.
        """
        seeds = ",".join(str((self.seed + number) % 2**32) for number in (1, 2, 3))
        commands, folders = [], []
        for recipe in (BEST, outputs.RECIPE):
            path, folder = self.output_dir / recipe, f"{self.output_dir}-{Path(recipe).stem}"
            commands.append(["bert-tasks", "train", str(path), "--seeds", seeds, "--output-dir", folder])
            folders.append(folder)
        commands.append(["bert-tasks", "report", *folders])
        return [shlex.join(command) for command in commands]

    def to_json(self) -> dict[str, Any]:
        """Returns the search for programs."""
        trials = []
        for trial in self.trials:
            content = {"number": trial.number, "values": trial.params, "score": trial.value}
            trials.append(content | {"note": self.note_on(trial)})
        search: dict[str, Any] = {"metric": self.metric, "lower_is_better": self.lower_is_better, "trials": trials}
        if self.best is None:
            return search | {"best": None, "run": None, "next": []}
        folder = self.folder_of(self.best.number)
        return search | {"best": self.best.number, "run": str(folder), "next": self.next}

    def lines(self) -> list[str]:
        """Returns the lines for a terminal."""
        keys = list(self.trials[0].params)
        rows = []
        for trial in self.trials:
            values = [shown_value(trial.params.get(key)) for key in keys]
            rows.append((str(trial.number), format_number(trial.value), *values, self.note_on(trial)))
        lines = Table(columns=("trial", self.metric, *keys, ""), rows=rows).lines()
        if self.best is not None:
            lines += ["", f"best values: {_values_text(self.best.params)}", f"note: {LUCK}"]
            lines.append(f"model: {self.folder_of(self.best.number) / outputs.MODEL}")
            lines += ["next:", *(f"  {command}" for command in self.next)]
        return lines


def shown_value(value: Any) -> str:
    """Returns a value of a key as people read it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return json.dumps(value, ensure_ascii=False)


def _values_text(values: Mapping[str, Any]) -> str:
    """Returns the values of a trial on one line."""
    return ", ".join(f"{key} = {shown_value(value)}" for key, value in values.items())


def search(recipe: Recipe | str | Path, *, overwrite: bool = False, progress: bool = True) -> SearchResult:
    """Searches for better values of the keys in the recipe's ``[search]``.

    Each trial is a run in ``OUTPUT_DIR/trial-NNN`` with the same seed, so the search costs as much as
    ``search.trials`` runs, or less if a pruner ends bad trials early. The recipe's own values are the first trial,
    unless the sampler is "grid". At the end, ``best.toml`` is the recipe with the best values. The score of the best
    trial is too good on average, because it was chosen for it, so compare the means of the best values and of the
    recipe as it is by `train_seeds`, with seeds that no trial had. ``SearchResult.next`` has the commands.

    Call it again to resume an interrupted search. The trial that was interrupted continues with its values, and later
    ones may have other values than those of an uninterrupted search. With more trials in the recipe it extends a
    complete search. A trial that diverges, or whose values the model rejects, has no score.

    Args:
        recipe: A recipe with ``[search]`` and ``run.output_dir``, or the path of its TOML file.
        overwrite: True to replace an earlier search in the folder. Default: False.
        progress: True to show progress on standard error, which is the default.

    Returns:
        All trials that have ended, of this call and of earlier ones, and the best of them.

    Raises:
        RecipeError, DataError, CheckpointError, UsageError, StoppedError: See ``fit``.

    Examples:
        >>> result = search("search.toml")
        >>> list(result.best.params)
        ['optim.learning_rate']
        >>> commands = result.next  # which train the best values with other seeds, and compare them
    """
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    folder = run_folder(loaded)
    study = _study_of(loaded, folder)
    accelerator = make_accelerator(loaded.optim.mixed_precision)
    with ExitStack() as stack:
        broadcast_from_main(accelerator, check_experiment_folder, folder, {STUDY})
        # The main process holds the folder for all of them.
        broadcast_from_main(accelerator, lambda: stack.enter_context(locked(folder)))
        with main_process_first(accelerator):
            prepared = prepare(loaded)
        if overwrite:
            broadcast_from_main(accelerator, _remove, folder)
        broadcast_from_main(accelerator, _open, study, prepared)
        result = _with_trials(loaded, study, progress=progress)
        broadcast_from_main(accelerator, _write_best, loaded, result)
    return result


def load_search(folder: Path) -> SearchResult:
    """Returns the search in a folder, even if it was interrupted, from the recipe and the trials there."""
    recipe = load_recipe(folder / outputs.RECIPE)
    study = _study_of(recipe, folder)
    study.load()
    return _result(study, recipe)


def _study_of(recipe: Recipe, folder: Path) -> "Study":
    """Returns the study of a recipe, which is not opened yet. Raises RecipeError if the recipe cannot be searched."""
    if recipe.search is None:
        raise RecipeError("the recipe has nothing to search. Add a section [search] with keys and their ranges")
    if recipe.folds is not None:
        raise RecipeError("a search has one validation set. Remove [folds], and cross-validate the result")
    if recipe.run.seeds is not None:
        raise RecipeError("all trials have the seed run.seed. Remove run.seeds, and train the best values with several")
    check_libraries(["optuna"], extra="search", purpose="searches")
    from bert_tasks.experiments.study import Study

    return Study(folder / STUDY, recipe.search)


def _remove(folder: Path) -> None:
    """Removes the search in a folder. Files that no search writes are kept."""
    remove_runs(folder.glob("trial-*"))
    for name in (BEST, outputs.REPORT, outputs.RECIPE, f"{STUDY}-journal", STUDY):
        (folder / name).unlink(missing_ok=True)


def _open(study: "Study", prepared: LoadedRecipe) -> None:
    """Opens the study of a recipe. Raises UsageError if its trials have another recipe or other rows."""
    recipe, folder = prepared.recipe, study.path.parent
    facts = _facts(prepared)
    # The recipe's own values come first, as far as they are in range, so that the best trial is no worse than they are.
    first = {key: facts[key] for key, space in study.search.space.items() if facts.get(key) in space}
    study.open(facts, first=first, seed=recipe.run.seed, lower_is_better=facts[LOWER_IS_BETTER])
    changes = [str(change) for change in outputs.differences(study.facts, facts)]
    if changes:
        raise UsageError(
            f"{folder} holds a search that differs in {', '.join(changes[:_SHOWN])}. "
            f"Choose another folder, or search again with {argument('overwrite')}"
        )
    outputs.write_text(folder / outputs.RECIPE, resolved_toml(recipe))


def _facts(prepared: LoadedRecipe) -> dict[str, Any]:
    """Returns what all trials of a folder have in common, by ``section.key`` or in words.

    Optuna stores the facts as JSON, so they are compared as JSON has them, with lists instead of tuples.
    """
    document = json.loads(json.dumps(prepared.recipe.model_dump(exclude_none=True), default=str))
    facts = {"task": document.pop("task")}
    for section, values in document.items():
        facts |= {f"{section}.{key}": value for key, value in values.items()}
    for name, split in outputs.data_metadata(prepared.splits).items():
        facts[f"the rows of {name}"] = split.fingerprint
    # A metric of one's own decides for itself whether lower is better, so it is loaded here.
    sets = list(prepared.splits.validation)
    tasks = {name: head.task for name, head in prepared.heads.items()}
    run = prepared.recipe.run
    metadata = metric_metadata(tasks, run, sets, own_metrics(run.metrics, tasks))
    facts[METRIC] = metadata.best
    facts[LOWER_IS_BETTER] = split_key(metadata.best, sets)[1] in metadata.lower_is_better
    return {name: value for name, value in facts.items() if name not in _FREE}


def _result(study: "Study", recipe: Recipe) -> SearchResult:
    """Returns the trials that have ended so far."""
    return SearchResult(
        output_dir=study.path.parent,
        metric=str(study.facts.get(METRIC)),
        lower_is_better=study.facts.get(LOWER_IS_BETTER) is True,
        trials=study.trials(),
        seed=recipe.run.seed,
    )


def _with_trials(recipe: Recipe, study: "Study", *, progress: bool) -> SearchResult:
    """Runs the trials that are missing, and returns the search."""
    accelerator, section = make_accelerator(recipe.optim.mixed_precision), study.search
    # All processes go by the clock and by the study of the main process, so that all of them run the same trials.
    began, is_late = broadcast_from_main(accelerator, time.monotonic), False
    # A grid ends when it is complete.
    total = section.trials
    if section.sampler == "grid":
        total = min(total, section.grid_size())
    while True:
        result = broadcast_from_main(accelerator, _result, study, recipe)
        # Before each trial, because the process may have been killed before it could remove those of the last one.
        broadcast_from_main(accelerator, _remove_weights, result)
        if len(result.trials) >= total or is_late:
            return result
        number, values = broadcast_from_main(accelerator, study.ask)
        if progress and is_main_process():
            write_message(f"trial {number} of {total}: {_values_text(values)}")
        callback = _Pruning(study, result.metric)
        score, note = _run_trial(recipe, callback, result.folder_of(number), values, progress=progress)
        broadcast_from_main(accelerator, study.end, score, note)
        seconds = broadcast_from_main(accelerator, time.monotonic) - began
        is_late = section.hours is not None and seconds >= section.hours * 3600


def _remove_weights(result: SearchResult) -> None:
    """Removes the weights of all trials but the best, because a search of large models would fill the disk."""
    for trial in result.trials:
        outputs.remove_weights(result.folder_of(trial.number), keep_model=trial == result.best)


def _run_trial(
    recipe: Recipe, callback: "_Pruning", home: Path, values: Mapping[str, Any], *, progress: bool
) -> tuple[float | None, str]:
    """Trains the run of a trial. Returns its score, or None and the reason why it has none."""
    try:
        planned = with_changes(with_values(recipe, values), run={"output_dir": str(home)})
        result = train(planned, progress=progress, callback=callback)
    except DivergedError as error:  # which is to be expected of the highest learning rates
        return None, f"diverged at {error}"
    except (RecipeError, UsageError) as error:  # the model or other settings reject the values
        # An error that only this process has would leave the others waiting, so it ends the search.
        if not error.collective:
            raise
        return None, " ".join(str(error).split())
    score = result.metrics[callback.metric]
    # NaN cannot be ranked, so such a trial has no score.
    if not math.isfinite(score):
        return None, f"{callback.metric} is not a number"
    return score, ""


class _Pruning(TrainerCallback):
    """Reports each evaluation to the study, and ends the run if it prunes the trial."""

    def __init__(self, study: "Study", metric: str) -> None:
        self.study, self.metric = study, metric

    def on_evaluate(self, trainer: Trainer, record: dict[str, Any]) -> bool:
        # Counted in the file, because a trial that was interrupted continues after some of its evaluations.
        events = outputs.read_events(trainer.output_dir)
        evaluation = sum(event.event == "evaluation" for event in events)
        is_last = record["step"] == trainer.steps.plan.total
        return self.study.prunes(record["metrics"][self.metric], evaluation, is_last=is_last)


def _write_best(recipe: Recipe, result: SearchResult) -> None:
    """Writes the recipe with the best values. It has no output folder, because each run of it needs its own."""
    if result.best is not None:
        best = with_changes(with_values(recipe, result.best.params), run={"output_dir": None})
        outputs.write_text(result.output_dir / BEST, resolved_toml(best))
