"""Hyper-parameter search, in which each trial is an ordinary run.

The best values are trained again with fresh seeds. Owns the folder of a search (``study.db``, the folders of the
trials, ``fresh``, ``baseline``, ``best.toml``, ``search.json``), the removal of its files, and the tables for people
and programs. study.py asks Optuna for values and for the trials that end early.
"""

import json
import math
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from bert_tasks.data.problems import counted
from bert_tasks.distributed import broadcast_from_main, is_main_process, main_process_first
from bert_tasks.errors import DivergedError, RecipeError, UsageError
from bert_tasks.experiments.group import check_experiment_folder, format_table, remove_runs, with_changes
from bert_tasks.experiments.seeds import SEEDS, SeedsResult, train_seeds
from bert_tasks.experiments.study import Study, Trial, check_installed
from bert_tasks.metrics.tables import format_number, split_key
from bert_tasks.recipe.check import LoadedRecipe, prepare
from bert_tasks.recipe.schema import Recipe, load_recipe, resolved_toml, silent_settings, with_values
from bert_tasks.recipe.search import Sampler, SearchSection
from bert_tasks.recipe.toml import literal
from bert_tasks.storage import locked
from bert_tasks.terminal import write_message
from bert_tasks.training import files as outputs
from bert_tasks.training.evaluation import metric_metadata
from bert_tasks.training.loop import Trainer, TrainerCallback
from bert_tasks.training.run import run_folder, train

SEARCH, STUDY, BEST = "search.json", "study.db", "best.toml"
_BASELINE, _FRESH = "baseline", "fresh"
# What may differ when the same command continues a search: how long it is, and what follows the trials.
_FREE = {f"search.{key}" for key in ("trials", "hours", "fresh_seeds", "baseline")}
_FREE |= {"run.output_dir", "data.train", "data.validation", "data.dir", *silent_settings()}  # rows have fingerprints
_CHOSEN_FOR_ITS_SCORE = (
    "the score of the best trial is too good on average, because it was chosen for it. Expect the mean of the fresh "
    "seeds"
)


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """A search, with the trials that have ended.

    Attributes:
        metric: The metric by which trials are compared.
        trials: The trials in the order in which they ran.
        fresh: The best values, trained again with fresh seeds.
        baseline: The recipe without changes, trained with the same fresh seeds.
        notes: Sentences that a reader of the scores must know.
    """

    output_dir: Path
    metric: str
    lower_is_better: bool
    sampler: Sampler
    trials: tuple[Trial, ...] = ()
    fresh: SeedsResult | None = None
    baseline: SeedsResult | None = None
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Trial | None:
        """The trial with the best score, of equal ones the first. None if no trial has a score."""
        pick = min if self.lower_is_better else max
        scored = [trial for trial in self.trials if trial.score is not None]
        return pick(scored, key=attrgetter("score"), default=None)

    @property
    def run(self) -> Path | None:
        """The folder of the best trial."""
        return None if self.best is None else self.folder_of(self.best)

    def folder_of(self, trial: Trial) -> Path:
        """Returns the folder of a trial's run."""
        return self.output_dir / f"trial-{trial.number:03d}"

    def to_json(self) -> dict[str, Any]:
        """Returns the content of ``search.json``."""
        return {
            "metric": self.metric,
            "lower_is_better": self.lower_is_better,
            "sampler": self.sampler,
            "trials": [dict(vars(trial)) for trial in self.trials],
            "best": None if self.best is None else self.best.number,
            "run": None if self.run is None else str(self.run),
            "fresh": self._seeds_json(self.fresh),
            "baseline": self._seeds_json(self.baseline),
            "notes": list(self.notes),
        }

    def _seeds_json(self, seeds: SeedsResult | None) -> dict[str, Any] | None:
        if seeds is None:
            return None
        values = {str(run.seed): run.value(self.metric) for run in seeds.runs}
        content: dict[str, Any] = {"output_dir": str(seeds.output_dir), "values": values}
        spread = seeds.metrics.get(self.metric)
        if spread is None:
            return content | {"runs": 0, "mean": None, "std": None}
        return content | {"runs": spread.runs, "mean": spread.mean, "std": spread.std}

    def lines(self) -> list[str]:
        """Returns the lines for a terminal."""
        lines = [*format_table(self._trial_rows()), "", *format_table(self._summary_rows()), ""]
        if self.best is not None:
            lines.append(f"best values: {_values_text(self.best.values)}")
        lines += [f"note: {note}" for note in self.notes]
        if self.run is None:
            return lines
        model = self.run / outputs.MODEL
        if model.is_dir():
            lines.append(f"model: {model}")
        return [*lines, f"recipe with the best values: {self.output_dir / BEST}"]

    def _trial_rows(self) -> list[tuple[str, ...]]:
        keys = list(self.trials[0].values)
        rows: list[tuple[str, ...]] = [("trial", self.metric, *keys, "")]
        for trial in self.trials:
            remark = "best" if trial == self.best else trial.note
            values = [shown_value(trial.values[key]) for key in keys]
            rows.append((str(trial.number), format_number(trial.score), *values, remark))
        return rows

    def _summary_rows(self) -> list[tuple[str, ...]]:
        better = "lower" if self.lower_is_better else "higher"
        best_score = None if self.best is None else self.best.score
        rows: list[tuple[str, ...]] = [
            (f"{self.metric} ({better} is better)", "best trial", "fresh seeds: mean", "std", "runs")
        ]
        name = f"{self.sampler}, {counted(len(self.trials), 'trial')}"
        rows.append((name, format_number(best_score), *self._spread_cells(self.fresh)))
        if self.baseline is not None:
            rows.append(("the recipe as it is", format_number(None), *self._spread_cells(self.baseline)))
        return rows

    def _spread_cells(self, seeds: SeedsResult | None) -> tuple[str, str, str]:
        spread = None if seeds is None else seeds.metrics.get(self.metric)
        if spread is None:
            return ("-", "-", "0")
        return (format_number(spread.mean), format_number(spread.std), str(spread.runs))


def shown_value(value: Any) -> str:
    """Returns a value of a key, for people."""
    return f"{value:.4g}" if isinstance(value, float) else literal(value)


def _values_text(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {shown_value(value)}" for key, value in values.items())


def search(recipe: Recipe | str | Path, *, overwrite: bool = False, progress: bool = True) -> SearchResult:
    """Searches for better values of the keys in the recipe's ``[search]``.

    Call it again to resume an interrupted search. The trial that was interrupted continues with its values, and later
    ones may have other values than those of an uninterrupted search. With more trials in the recipe it extends a
    complete search. A trial that diverges, or whose values the model rejects, has no score.

    Args:
        recipe: A recipe with ``[search]`` and ``run.output_dir``, or the path of its TOML file.
        overwrite: True to replace an earlier search in the folder.
        progress: True to show progress on standard error.

    Raises:
        RecipeError, DataError, CheckpointError, UsageError, StoppedError: See ``fit``.

    Example:
        >>> search("search.toml").best.values
    """
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    section = _checked_section(loaded)
    check_installed()
    folder = run_folder(loaded)
    study = Study(folder / STUDY, section, mixed_precision=loaded.optim.mixed_precision)
    accelerator = study.accelerator
    with ExitStack() as stack:
        broadcast_from_main(accelerator, check_experiment_folder, folder, {STUDY})
        broadcast_from_main(accelerator, lambda: stack.enter_context(locked(folder)))
        with main_process_first(accelerator):
            prepared = prepare(loaded)
        if overwrite:
            broadcast_from_main(accelerator, _remove, folder)
        started = _started(prepared, section)
        stack.callback(study.close)
        study.open(
            _facts(prepared, started.metric),
            start=_first_values(prepared, section),
            seed=loaded.run.seed,
            lower_is_better=started.lower_is_better,
        )
        broadcast_from_main(accelerator, outputs.write_text, folder / outputs.RECIPE, resolved_toml(loaded))
        searched = _run_trials(loaded, study, started, progress=progress)
        result = _with_fresh_seeds(loaded, section, searched, progress=progress)
        broadcast_from_main(accelerator, _write_result, loaded, result)
    return result


def _checked_section(recipe: Recipe) -> SearchSection:
    if recipe.search is None:
        raise RecipeError("the recipe has nothing to search. Add a section [search] with keys and their ranges")
    if recipe.folds is not None:
        raise RecipeError("a search has one validation set. Remove [folds], and cross-validate the result")
    if recipe.run.seeds is not None:
        raise RecipeError("a search has its own seeds. Remove run.seeds, and set run.seed and search.fresh_seeds")
    return recipe.search


def _remove(folder: Path) -> None:
    """Removes the search in a folder. Files that no search writes are kept."""
    several = [*(folder / _FRESH).glob("trial-*"), folder / _BASELINE]
    for home in several:
        remove_runs(home.glob("seed-*"))
        (home / SEEDS).unlink(missing_ok=True)
    remove_runs(folder.glob("trial-*"))
    for home in (*several, folder / _FRESH):
        with suppress(OSError):  # it holds other files
            home.rmdir()
    for name in (SEARCH, BEST, outputs.REPORT, outputs.RECIPE, f"{STUDY}-journal", STUDY):
        (folder / name).unlink(missing_ok=True)


def _started(prepared: LoadedRecipe, section: SearchSection) -> SearchResult:
    """Returns the search without trials. They are compared by the metric that picks the best model of a run."""
    sets = list(prepared.splits.validation)
    metadata = metric_metadata(prepared.task, prepared.recipe.run, sets)
    metric = metadata["best"]
    return SearchResult(
        output_dir=run_folder(prepared.recipe),
        metric=metric,
        lower_is_better=split_key(metric, sets)[1] in metadata["lower_is_better"],
        sampler=section.sampler,
    )


def _facts(prepared: LoadedRecipe, metric: str) -> dict[str, Any]:
    """Returns what all trials of a folder have in common."""
    document = json.loads(json.dumps(prepared.recipe.model_dump(exclude_none=True), default=str))
    facts = {"task": document.pop("task"), "the metric": metric}
    for section, values in document.items():
        facts |= {f"{section}.{key}": value for key, value in values.items()}
    for name, split in outputs.data_metadata(prepared.splits).items():
        facts[f"the rows of {name}"] = split["fingerprint"]
    return {name: value for name, value in facts.items() if name not in _FREE}


def _first_values(prepared: LoadedRecipe, section: SearchSection) -> dict[str, Any] | None:
    """Returns the values of the recipe as it is, from which tpe learns first, if they are in the space."""
    if section.sampler != "tpe":
        return None
    recipe = prepared.recipe
    homes: dict[str, Any] = {"optim": recipe.optim, "settings": prepared.task, "model": recipe.model}
    values: dict[str, Any] = {}
    for key, space in section.space.items():
        home, name = key.split(".", 1)
        values[key] = getattr(homes[home], name, None)
        if values[key] not in space:
            return None
    return values


def _message(text: str, *, progress: bool) -> None:
    if progress and is_main_process():
        write_message(text)


def _run_trials(recipe: Recipe, study: Study, search: SearchResult, *, progress: bool) -> SearchResult:
    """Runs the trials that are missing."""
    section = study.search
    total = section.trials
    if section.sampler == "grid":
        total = min(total, section.grid_size())
    while True:
        search = replace(search, trials=tuple(study.trials()))
        broadcast_from_main(study.accelerator, _remove_weights, search)
        seconds = sum(trial.seconds for trial in search.trials)
        is_late = section.hours is not None and seconds >= section.hours * 3600
        if is_late or len(search.trials) >= total:
            return search
        trial = study.ask()
        _message(f"trial {trial.number} of {total}: {_values_text(trial.values)}", progress=progress)
        began = time.monotonic()
        callback = _Pruning(study, search.metric)
        score, note = _run_trial(recipe, callback, search.folder_of(trial), trial.values, progress=progress)
        study.end(score, note=note, seconds=time.monotonic() - began)
        ended = study.trials()[-1]
        outcome = ended.note if ended.score is None else f"{search.metric} {format_number(ended.score)}"
        _message(f"trial {ended.number}, {outcome}", progress=progress)


def _remove_weights(search: SearchResult) -> None:
    """Removes the weights of all trials but the best."""
    best = search.best
    for trial in search.trials:
        outputs.remove_weights(search.folder_of(trial), keep_model=trial == best)


def _run_trial(
    recipe: Recipe, callback: "_Pruning", home: Path, values: Mapping[str, Any], *, progress: bool
) -> tuple[float | None, str]:
    """Trains the run of a trial. Returns its score, or None and the reason why it has none."""
    try:
        planned = with_changes(with_values(recipe, values), run={"output_dir": str(home)})
        result = train(planned, progress=progress, callback=callback)
    except DivergedError as error:
        return None, f"diverged at {error}"
    except (RecipeError, UsageError) as error:  # the model or other settings reject the values
        if not error.collective:
            raise
        return None, " ".join(str(error).split())
    score = result.metrics[callback.metric]
    if not math.isfinite(score):
        return None, f"{callback.metric} is not a number"
    return score, ""


class _Pruning(TrainerCallback):
    """Reports each evaluation to the study, and ends the run if it prunes the trial."""

    def __init__(self, study: Study, metric: str) -> None:
        self.study, self.metric = study, metric

    def on_evaluate(self, trainer: Trainer, record: dict[str, Any]) -> bool:
        events = outputs.read_events(trainer.output_dir)
        evaluation = sum(event["event"] == "evaluation" for event in events)
        is_last = record["step"] == trainer.steps.plan.total
        return self.study.prunes(record["metrics"][self.metric], evaluation, is_last=is_last)


def _with_fresh_seeds(recipe: Recipe, section: SearchSection, search: SearchResult, *, progress: bool) -> SearchResult:
    """Trains the best values and the recipe as it is with seeds that no trial had."""
    if not section.fresh_seeds:
        return search
    fresh, baseline, notes = None, None, list[str]()
    if search.best is not None:
        home = search.output_dir / _FRESH / search.folder_of(search.best).name
        fresh = _train_seeds(recipe, section, search.best.values, home, progress=progress)
        notes += [*fresh.notes, *(f"fresh seeds: {fault}" for fault in fresh.faults)]
    if section.baseline:
        try:
            baseline = _train_seeds(recipe, section, {}, search.output_dir / _BASELINE, progress=progress)
            notes += [*baseline.notes, *(f"the recipe as it is: {fault}" for fault in baseline.faults)]
        except (RecipeError, UsageError) as error:
            if not error.collective:
                raise
            notes.append(f"the recipe as it is cannot be trained ({error})")
    notes.append(_CHOSEN_FOR_ITS_SCORE)
    return replace(search, fresh=fresh, baseline=baseline, notes=tuple(dict.fromkeys(notes)))


def _train_seeds(
    recipe: Recipe, section: SearchSection, values: Mapping[str, Any], home: Path, *, progress: bool
) -> SeedsResult:
    seeds = [(recipe.run.seed + number) % 2**32 for number in range(1, section.fresh_seeds + 1)]
    text = _values_text(values) if values else "the recipe as it is"
    _message(f"fresh seeds {', '.join(map(str, seeds))}: {text}", progress=progress)
    changed = with_changes(with_values(recipe, values), run={"output_dir": str(home)})
    return train_seeds(changed, seeds, progress=progress)


def _write_result(recipe: Recipe, search: SearchResult) -> None:
    if search.best is not None:
        best = with_changes(with_values(recipe, search.best.values), run={"output_dir": None})
        outputs.write_text(search.output_dir / BEST, resolved_toml(best))
    outputs.write_json(search.output_dir / SEARCH, search.to_json())
