"""Hyper-parameter search: each trial is an ordinary run, and the best values are trained again with fresh seeds.

Owns the folder of a search (``study.db``, a folder of trials for each sampler, ``baseline``, ``best.toml``,
``search.json``), what of it is kept, and the tables for people and programs. What is suggested and pruned is in
study.py.
"""

import json
import math
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bert_tasks.data.problems import counted
from bert_tasks.distributed import broadcast_from_main, main_process_first, make_accelerator
from bert_tasks.errors import BertTasksError, CheckpointError, DataError, DivergedError, RecipeError, UsageError
from bert_tasks.experiments.group import RunGroup, format_number, format_table, run_folder, with_changes
from bert_tasks.experiments.seeds import SEEDS, SeedsResult, train_seeds
from bert_tasks.experiments.study import Study, Trial, check_installed
from bert_tasks.metrics.tables import split_key
from bert_tasks.recipe.schema import Recipe, load_recipe, resolved_toml, silent_settings, with_values
from bert_tasks.recipe.search import Sampler, SearchSection
from bert_tasks.recipe.toml import literal
from bert_tasks.storage import LOCK, check_writable, locked
from bert_tasks.tasks.base import Task
from bert_tasks.terminal import write_message
from bert_tasks.training import files as outputs
from bert_tasks.training.evaluation import metric_metadata
from bert_tasks.training.run import LoadedRecipe, prepare, train

SEARCH, STUDY, BEST = "search.json", "study.db", "best.toml"
_BASELINE, _FRESH = "baseline", "fresh"
_SAMPLERS: tuple[Sampler, ...] = ("tpe", "random", "grid")
_RANDOM: tuple[Sampler, ...] = ("random",)
_RUN_FOLDER = re.compile(r"trial-\d{3,}|seed-\d+")
# What may differ when the same command continues a search: how long it is, and what follows the trials.
_FREE = {f"search.{key}" for key in ("trials", "hours", "sampler", "fresh_seeds", "baseline")}
_FREE |= {"run.output_dir", "data.train", "data.validation", "data.dir", *silent_settings()}  # rows have fingerprints
_FEW = 20  # trials, below which importance says little
_SHOWN = 6  # settings in a message
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """The trials of one sampler.

    Attributes:
        best: the trial with the best score; None: none has one.
        run: the folder of its run; of several seeds, of the best.
        fresh: the best values, trained again with fresh seeds.
        importance: see ``Study.importance``.
    """

    sampler: Sampler
    trials: tuple[Trial, ...]
    best: Trial | None
    run: Path | None
    fresh: SeedsResult | None
    importance: Mapping[str, float] = field(default_factory=dict)

    def to_json(self, metric: str) -> dict[str, Any]:
        return {
            "sampler": self.sampler,
            "trials": [trial.to_json() for trial in self.trials],
            "best": None if self.best is None else self.best.number,
            "run": None if self.run is None else str(self.run),
            "fresh": _seeds_json(self.fresh, metric),
            "importance": dict(self.importance),
        }


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """A search that is complete.

    Attributes:
        metric: what trials are compared by.
        studies: the recipe's sampler first, then others whose trials are in the folder.
        baseline: the recipe as it is, trained with the fresh seeds.
        notes: sentences that a reader of the scores must know.
    """

    output_dir: Path
    metric: str
    lower_is_better: bool
    studies: tuple[StudyResult, ...]
    baseline: SeedsResult | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The content of ``search.json``."""
        return {
            "metric": self.metric,
            "lower_is_better": self.lower_is_better,
            "studies": [study.to_json(self.metric) for study in self.studies],
            "baseline": _seeds_json(self.baseline, self.metric),
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """For people."""
        first = self.studies[0]
        keys = list(first.trials[0].values) if first.trials else []
        rows: list[tuple[str, ...]] = [("trial", self.metric, *keys, "")]
        for trial in first.trials:
            remark = "best" if trial == first.best else trial.note
            score = "-" if trial.score is None else format_number(trial.score)
            rows.append((str(trial.number), score, *(shown_value(trial.values[key]) for key in keys), remark))
        lines = [*format_table(rows), "", *format_table(self._summary_rows()), ""]
        if first.best is not None:
            lines.append(f"best values: {_values_text(first.best.values)}")
        if first.importance:
            lines.append("importance: " + ", ".join(f"{key} {share:.0%}" for key, share in first.importance.items()))
        lines += [f"note: {note}" for note in self.notes]
        if first.run is not None:
            if (first.run / outputs.MODEL).is_dir():
                lines.append(f"model: {first.run / outputs.MODEL}")
            lines.append(f"recipe with the best values: {self.output_dir / BEST}")
        return lines

    def _summary_rows(self) -> list[tuple[str, ...]]:
        direction = "lower" if self.lower_is_better else "higher"
        rows: list[tuple[str, ...]] = [
            (f"{self.metric} ({direction} is better)", "best trial", "fresh seeds: mean", "std", "runs")
        ]
        for study in self.studies:
            score = math.nan if study.best is None or study.best.score is None else study.best.score
            name = f"{study.sampler}, {counted(len(study.trials), 'trial')}"
            rows.append((name, format_number(score), *_spread_cells(study.fresh, self.metric)))
        if self.baseline is not None:
            rows.append(("the recipe as it is", "-", *_spread_cells(self.baseline, self.metric)))
        return rows


def _seeds_json(seeds: SeedsResult | None, metric: str) -> dict[str, Any] | None:
    if seeds is None:
        return None
    spread = seeds.metrics.get(metric)
    return {
        "output_dir": str(seeds.output_dir),
        "values": {str(run.seed): run.value(metric) for run in seeds.runs},
        "runs": 0 if spread is None else spread.runs,
        "mean": None if spread is None else spread.mean,
        "std": None if spread is None else spread.std,
    }


def _spread_cells(seeds: SeedsResult | None, metric: str) -> tuple[str, str, str]:
    spread = None if seeds is None else seeds.metrics.get(metric)
    if spread is None:
        return "-", "-", "0"
    return format_number(spread.mean), format_number(spread.std), str(spread.runs)


def shown_value(value: Any) -> str:
    """A value of a key, for people."""
    return f"{value:.4g}" if isinstance(value, float) else literal(value)


def _values_text(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {shown_value(value)}" for key, value in values.items())


def search(
    recipe: Recipe | str | Path, *, compare_random: bool = False, overwrite: bool = False, progress: bool = True
) -> SearchResult:
    """Searches for better values of the keys in the recipe's ``[search]``.

    Call it again to resume a search that was interrupted: trials that have ended are not repeated, the one that was
    running goes on from its checkpoint, and what is suggested is what it would have been. With more trials in the
    recipe a complete search is extended.

    Args:
        recipe: a recipe with ``[search]`` and ``run.output_dir``, or the path of its TOML file.
        compare_random: also search with random values in as many trials, to see what the sampler is worth.
        overwrite: search again, in place of what is in the folder.
        progress: report on standard error.

    Raises:
        UsageError: Optuna is not installed, or the folder is in use or holds something else or a search with other
            settings or rows.
        RecipeError: the recipe has no ``[search]``, or values that do not go together.
        DataError, CheckpointError, StoppedError: as ``train``. A trial that diverges, or whose values the model
            refuses, is one without a score.
    """
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    if loaded.search is None:
        raise RecipeError("the recipe has nothing to search: add a section [search] with keys and their ranges")
    if loaded.run.output_dir is None:
        raise RecipeError("the search needs a folder: set run.output_dir in the recipe, or pass --output-dir")
    if loaded.folds is not None:
        raise RecipeError("[folds]: a search has one validation set; remove the section, and cross-validate the result")
    if loaded.run.seeds is not None:
        raise RecipeError("run.seeds: a search has seeds of its own; remove the key, and set run.seed and search.seeds")
    check_installed()
    accelerator = make_accelerator(loaded.optim.mixed_precision)
    folder = Path(loaded.run.output_dir)
    with ExitStack() as stack:
        broadcast_from_main(accelerator, lambda: _check_folder(folder))
        broadcast_from_main(accelerator, lambda: stack.enter_context(locked(folder)))
        with main_process_first(accelerator):
            prepared = prepare(loaded)
        searched = _Search(prepared, loaded.search, folder, progress=progress)
        stack.callback(searched.close)
        broadcast_from_main(accelerator, lambda: searched.begin(overwrite=overwrite))
        return searched.run(compare_random=compare_random)


def _check_folder(folder: Path) -> None:
    """Raises UsageError unless the folder is new, empty or that of a search."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, expected a folder for the search: choose another output folder")
    existing = {path.name for path in folder.iterdir()} - {LOCK} if folder.is_dir() else set()
    if outputs.RUN in existing:
        raise UsageError(f"{folder} holds a run: choose another folder for the search")
    if existing and STUDY not in existing:  # a recipe alone may be the user's
        names = ", ".join(sorted(existing)[:3])
        raise UsageError(f"{folder} is not empty and holds no search (it contains {names}): choose another folder")
    check_writable(folder)


def _remove(folder: Path) -> None:
    """Removes the search in a folder, its trials last; files that no search writes stay."""
    for name in (*_SAMPLERS, _BASELINE):
        _remove_runs(folder / name)
    for name in (SEARCH, BEST, outputs.REPORT, outputs.RECIPE, f"{STUDY}-journal", STUDY):
        (folder / name).unlink(missing_ok=True)


def _remove_runs(folder: Path) -> None:
    """Removes the runs in a folder, and the folder if it is empty then."""
    if not folder.is_dir() or folder.is_symlink():
        return
    for path in folder.iterdir():
        if _RUN_FOLDER.fullmatch(path.name) and (path / outputs.RUN).is_file() and not path.is_symlink():
            shutil.rmtree(path)
        elif _RUN_FOLDER.fullmatch(path.name) or path.name == _FRESH:
            _remove_runs(path)
    (folder / SEEDS).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


class _Search:
    """A search in its folder. Only the main process has the studies; the others learn what they need."""

    def __init__(self, prepared: LoadedRecipe, section: SearchSection, folder: Path, *, progress: bool) -> None:
        self.recipe, self.task, self.section, self.folder = prepared.recipe, prepared.task, section, folder
        self.accelerator, self.progress = make_accelerator(self.recipe.optim.mixed_precision), progress
        sets = list(prepared.splits.validation)
        metadata = metric_metadata(prepared.task, self.recipe.run, sets)
        self.metric: str = metadata["best"]
        self.lower_is_better = split_key(self.metric, sets)[1] in metadata["lower_is_better"]
        data = outputs.data_metadata(prepared.splits)
        self.facts = {f"the rows of {name}": split["fingerprint"] for name, split in data.items()}
        self.facts["the metric"] = self.metric
        self.studies: dict[Sampler, Study] = {}

    def close(self) -> None:
        """Closes the file of the trials."""
        for study in self.studies.values():
            study.close()

    def begin(self, *, overwrite: bool) -> None:
        """Writes the recipe, or compares it with the recipe of the search in the folder.

        Raises:
            UsageError: the search in the folder has other settings.
        """
        if overwrite:
            _remove(self.folder)
        path = self.folder / outputs.RECIPE
        if path.is_file():
            try:
                before = _flat(load_recipe(path))
            except RecipeError as error:
                raise UsageError(f"{path} is damaged; choose another folder, or --overwrite: {error}") from None
            now = _flat(self.recipe)
            differing = [
                f"{key} = {now.get(key, 'not set')} (was {before.get(key, 'not set')})"
                for key in sorted({*before, *now} - _FREE)
                if before.get(key) != now.get(key)
            ]
            if differing:
                raise UsageError(
                    f"{self.folder} holds a search with other settings: {'; '.join(differing[:_SHOWN])}. "
                    "Choose another folder, or --overwrite to search again"
                )
        self._study(self.section.sampler)  # before the recipe, because its file marks the folder as a search's
        outputs.write_text(path, resolved_toml(self.recipe))

    def run(self, *, compare_random: bool) -> SearchResult:
        """Runs all trials, then the best values and the recipe as it is with fresh seeds."""
        samplers = dict.fromkeys([self.section.sampler, *_RANDOM] if compare_random else [self.section.sampler])
        for sampler in samplers:
            self._run_trials(sampler)
        earlier = self._on_main(lambda: [name for name in _SAMPLERS if any((self.folder / name).glob("trial-*"))])
        studies = tuple(self._result(sampler) for sampler in dict.fromkeys([*samplers, *earlier]))
        baseline, notes = None, []
        if self.section.baseline and self.section.fresh_seeds:
            try:
                baseline = self._train_seeds({}, self.folder / _BASELINE)
            except (RecipeError, UsageError) as error:
                if not _is_of_values(error):
                    raise
                notes.append(f"the recipe as it is cannot be trained: {error}")
        result = SearchResult(
            output_dir=self.folder,
            metric=self.metric,
            lower_is_better=self.lower_is_better,
            studies=studies,
            baseline=baseline,
            notes=tuple(dict.fromkeys([*notes, *self._notes(studies, baseline)])),
        )
        self._on_main(lambda: self._write(result))
        return result

    def _on_main(self, work: Callable[[], Value]) -> Value:
        return broadcast_from_main(self.accelerator, work)

    def _message(self, text: str) -> None:
        if self.progress and self.accelerator.is_main_process:
            write_message(text)

    def _notes(self, studies: Sequence[StudyResult], baseline: SeedsResult | None) -> Iterator[str]:
        fresh = {f"fresh seeds of {study.sampler}": study.fresh for study in studies} | {
            "the recipe as it is": baseline
        }
        for name, seeds in fresh.items():
            if seeds is not None:
                yield from (*seeds.notes, *(f"{name}: {fault}" for fault in seeds.faults))
        first = studies[0]
        if first.importance and len(first.trials) < _FEW:
            yield f"importance from {counted(len(first.trials), 'trial')} is a rough guess: {_FEW} or more are better"
        if self.section.fresh_seeds:
            yield (
                "the score of the best trial is too good on average, because it was chosen for it; expect the mean of "
                "the fresh seeds"
            )

    def _write(self, result: SearchResult) -> None:
        best = result.studies[0].best
        if best is not None:
            recipe = with_changes(with_values(self.recipe, best.values), run={"output_dir": None})
            outputs.write_text(self.folder / BEST, resolved_toml(recipe))
        outputs.write_json(self.folder / SEARCH, result.to_json())

    def _study(self, sampler: Sampler) -> Study:
        """Returns the trials of a sampler; for the main process."""
        if sampler not in self.studies:
            space, current = self.section.space, _current_values(self.recipe, self.task, list(self.section.space))
            is_inside = all(current[key] in space[key] for key in space)
            self.studies[sampler] = Study(
                self.folder / STUDY,
                sampler=sampler,
                search=self.section,
                start=current if is_inside and sampler == "tpe" else None,
                seed=self.recipe.run.seed,
                lower_is_better=self.lower_is_better,
            )
            self.studies[sampler].check_facts(self.facts)
        return self.studies[sampler]

    def _next_trial(self, sampler: Sampler, total: int) -> tuple[int, dict[str, Any]] | None:
        """Returns the number and the values of the next trial, or None if there are enough or it is too late."""
        study = self._study(sampler)
        trials = study.trials
        self._remove_weights(sampler, trials)
        hours = math.inf if self.section.hours is None else self.section.hours
        is_late = sum(trial.seconds for trial in trials) >= hours * 3600
        return None if is_late or len(trials) >= total else study.suggest()

    def _run_trials(self, sampler: Sampler) -> None:
        total = min(self.section.trials, len(self.section.grid())) if sampler == "grid" else self.section.trials
        while (suggested := self._on_main(lambda: self._next_trial(sampler, total))) is not None:
            number, values = suggested
            self._message(f"{sampler}: trial {number} of {total}: {_values_text(values)}")
            began = time.monotonic()
            try:
                trial = self._run_trial(sampler, number, values)
            except (RecipeError, UsageError, DataError, CheckpointError) as error:
                if not _is_of_values(error):
                    named = type(error)(f"trial {number} ({_values_text(values)}): {error}")
                    named.collective = error.collective
                    raise named from error
                trial = Trial(number=number, values=values, state="failed", note=" ".join(str(error).split()))
            ended = replace(trial, seconds=round(time.monotonic() - began, 3))
            self._on_main(partial(self._add, sampler, ended))
            score = trial.note if trial.score is None else f"{self.metric} {format_number(trial.score)}"
            self._message(f"{sampler}: trial {number}: {score}")

    def _add(self, sampler: Sampler, trial: Trial) -> None:
        self._study(sampler).add(trial)

    def _run_trial(self, sampler: Sampler, number: int, values: dict[str, Any]) -> Trial:
        """Trains the runs of a trial, one for each seed; the first decides whether it is pruned."""
        recipes = self._trial_recipes(sampler, number, values)
        trial, first, scores = Trial(number=number, values=values), run_folder(recipes[0]), list[float]()

        def is_pruned() -> bool:
            return self._on_main(lambda: self._prunes(sampler, first))

        def callback(event: Mapping[str, Any]) -> bool:  # called on the main process, which tells the others
            return event["event"] == "evaluation" and self._prunes(sampler, first)

        for recipe in recipes:
            if is_pruned():  # by its first run, or killed before it could end
                break
            try:
                result = train(recipe, progress=self.progress, callback=None if scores else callback)
            except DivergedError as error:
                return replace(trial, state="failed", note=f"diverged: {error}")
            scores.append(result.metrics[self.metric])
        history = self._on_main(lambda: _best_so_far(first, self.metric, self.lower_is_better))
        trial = replace(trial, scores=tuple(history))
        if is_pruned():
            return replace(trial, state="pruned", note=f"pruned after {counted(len(history), 'evaluation')}")
        score = statistics.fmean(scores)
        if not math.isfinite(score):
            return replace(trial, state="failed", note=f"{self.metric} is not a number")
        return replace(trial, score=score)

    def _prunes(self, sampler: Sampler, folder: Path) -> bool:
        """Returns True if the run is to end, or has ended, at its last evaluation, before its last step."""
        metadata = outputs.read_run_metadata(folder)
        steps = [event["step"] for event in outputs.read_events(folder) if event["event"] == "evaluation"]
        if metadata is None or not steps:
            return False
        scores = _best_so_far(folder, self.metric, self.lower_is_better)
        return self._study(sampler).prunes(scores) and steps[-1] < metadata["steps"]

    def _trial_recipes(self, sampler: Sampler, number: int, values: Mapping[str, Any]) -> list[Recipe]:
        """Returns the recipe of each run of a trial, one for each seed."""
        home = self._home(sampler, number)
        recipe = with_changes(with_values(self.recipe, values), run={"output_dir": str(home)})
        seeds = self._seeds(0, self.section.seeds)
        if len(seeds) == 1:
            return [recipe]
        return list(RunGroup.plan(recipe, "seed", {seed: {"run": {"seed": seed}} for seed in seeds}).recipes.values())

    def _home(self, sampler: Sampler, number: int) -> Path:
        return self.folder / sampler / f"trial-{number:03d}"

    def _seeds(self, start: int, count: int) -> list[int]:
        return [(self.recipe.run.seed + start + offset) % 2**32 for offset in range(count)]

    def _train_seeds(self, values: Mapping[str, Any], home: Path) -> SeedsResult:
        """Trains the recipe with these values and the fresh seeds."""
        seeds = self._seeds(self.section.seeds, self.section.fresh_seeds)
        text = _values_text(values) if values else "the recipe as it is"
        self._message(f"fresh seeds {', '.join(map(str, seeds))}: {text}")
        recipe = with_changes(with_values(self.recipe, values), run={"output_dir": str(home)})
        result = train_seeds(recipe, seeds, progress=self.progress)
        self._on_main(lambda: _remove_checkpoints(run.output_dir for run in result.runs))
        return result

    def _result(self, sampler: Sampler) -> StudyResult:
        def read() -> tuple[list[Trial], Path | None, dict[str, float]]:
            study = self._study(sampler)
            trials = study.trials
            self._remove_weights(sampler, trials)
            return trials, self._best_run(sampler, trials), study.importance()

        trials, run, importance = self._on_main(read)
        best, fresh = _best(trials, self.lower_is_better), None
        if best is not None and self.section.fresh_seeds:
            home = self.folder / sampler / _FRESH / self._home(sampler, best.number).name
            fresh = self._train_seeds(best.values, home)
        return StudyResult(
            sampler=sampler, trials=tuple(trials), best=best, run=run, fresh=fresh, importance=importance
        )

    def _remove_weights(self, sampler: Sampler, trials: Sequence[Trial]) -> None:
        """Removes the checkpoints of all trials that have ended, and all models but the model of the best."""
        best = _best(trials, self.lower_is_better)
        for trial in trials:
            for folder in self._run_folders(sampler, trial):
                if folder.is_dir():
                    outputs.remove_weights(folder, keep_model=trial == best)

    def _run_folders(self, sampler: Sampler, trial: Trial) -> list[Path]:
        home, seeds = self._home(sampler, trial.number), self._seeds(0, self.section.seeds)
        return [home] if len(seeds) == 1 else [home / f"seed-{seed}" for seed in seeds]

    def _best_run(self, sampler: Sampler, trials: Sequence[Trial]) -> Path | None:
        """Returns the run of the best trial that has the best score."""
        best = _best(trials, self.lower_is_better)
        scores = {
            folder: scores[-1]
            for folder in ([] if best is None else self._run_folders(sampler, best))
            if (scores := _best_so_far(folder, self.metric, self.lower_is_better))
        }
        pick = min if self.lower_is_better else max
        return pick(scores, key=scores.__getitem__) if scores else None


def _remove_checkpoints(folders: Iterable[Path]) -> None:
    for folder in folders:
        outputs.remove_weights(folder, keep_model=True)


def _is_of_values(error: BertTasksError) -> bool:
    """Returns True if the values of a trial are the cause on all processes: the model or other settings reject them."""
    return isinstance(error, RecipeError | UsageError) and error.collective


def _best(trials: Sequence[Trial], lower_is_better: bool) -> Trial | None:
    """Returns the trial with the best score, of equal ones the first."""
    scored = [(trial.score, trial) for trial in trials if trial.score is not None]
    pick = min if lower_is_better else max
    return pick(scored, key=lambda pair: pair[0])[1] if scored else None


def _best_so_far(folder: Path, metric: str, lower_is_better: bool) -> list[float]:
    """Returns the best score of a run after each of its evaluations; NaN before the first that is a number."""
    best, history = math.nan, []
    for event in outputs.read_events(folder):
        if event["event"] == "evaluation":
            value = event["metrics"].get(metric)
            score = math.nan if value is None else float(value)
            is_better = score < best if lower_is_better else score > best
            best = score if is_better or math.isnan(best) else best
            history.append(best)
    return history


def _current_values(recipe: Recipe, task: Task, keys: Sequence[str]) -> dict[str, Any]:
    """Returns the values of keys in the recipe as it is."""
    sections: dict[str, Any] = {"optim": recipe.optim, "settings": task, "model": recipe.model}
    split = {key: key.split(".", 1) for key in keys}
    return {key: getattr(sections[section], name, None) for key, (section, name) in split.items()}


def _flat(recipe: Recipe) -> dict[str, str]:
    """Returns ``section.key`` -> its value as text; what is nested deeper is one value."""
    document = json.loads(json.dumps(recipe.model_dump(exclude_none=True), default=str))
    flat = {"task": json.dumps(document.pop("task"))}
    for section, values in document.items():
        flat |= {f"{section}.{key}": json.dumps(value, sort_keys=True) for key, value in values.items()}
    return flat
