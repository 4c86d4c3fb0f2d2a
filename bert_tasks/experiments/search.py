"""Hyper-parameter search, in which each trial is an ordinary run.

The best values are trained again with fresh seeds. Owns the folder of a search (``study.db``, a folder of trials for
each sampler, ``baseline``, ``best.toml``, ``search.json``), the removal of its files, and the tables for people and
programs. study.py suggests and prunes.
"""

import json
import math
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bert_tasks.data.problems import counted
from bert_tasks.distributed import broadcast_from_main, main_process_first, make_accelerator, on_main_process
from bert_tasks.errors import DivergedError, RecipeError, UsageError
from bert_tasks.experiments.group import (
    check_experiment_folder,
    format_table,
    remove_runs,
    with_changes,
)
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
from bert_tasks.training.run import run_folder, train

SEARCH, STUDY, BEST = "search.json", "study.db", "best.toml"
_BASELINE, _FRESH = "baseline", "fresh"
_SAMPLERS: tuple[Sampler, ...] = ("tpe", "random", "grid")
_RUN_FOLDER = re.compile(r"trial-\d{3,}|seed-\d+")
# What may differ when the same command continues a search: how long it is, and what follows the trials.
_FREE = {f"search.{key}" for key in ("trials", "hours", "sampler", "fresh_seeds", "baseline")}
_FREE |= {"run.output_dir", "data.train", "data.validation", "data.dir", *silent_settings()}  # rows have fingerprints
_FEW = 20  # trials, below which importance says little


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """The trials of one sampler.

    Attributes:
        best: The trial with the best score. None if no trial has a score.
        run: The folder of its run, or of its best run over several seeds.
        fresh: The best values, trained again with fresh seeds.
        importance: See ``Study.importance``.
    """

    sampler: Sampler
    trials: tuple[Trial, ...]
    best: Trial | None
    run: Path | None
    importance: Mapping[str, float]
    fresh: SeedsResult | None = None


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """A complete search.

    Attributes:
        metric: The metric by which trials are compared.
        studies: The trials of the recipe's sampler, then of others whose trials are in the folder.
        baseline: The recipe without changes, trained with the fresh seeds.
        notes: Sentences that a reader of the scores must know.
    """

    output_dir: Path
    metric: str
    lower_is_better: bool
    studies: tuple[StudyResult, ...]
    baseline: SeedsResult | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the content of ``search.json``."""
        return {
            "metric": self.metric,
            "lower_is_better": self.lower_is_better,
            "studies": [
                {
                    "sampler": study.sampler,
                    "trials": [dict(vars(trial)) for trial in study.trials],
                    "best": None if study.best is None else study.best.number,
                    "run": None if study.run is None else str(study.run),
                    "fresh": self._seeds_json(study.fresh),
                    "importance": dict(study.importance),
                }
                for study in self.studies
            ],
            "baseline": self._seeds_json(self.baseline),
            "notes": list(self.notes),
        }

    def _seeds_json(self, seeds: SeedsResult | None) -> dict[str, Any] | None:
        if seeds is None:
            return None
        spread = seeds.metrics.get(self.metric)
        values = {str(run.seed): run.value(self.metric) for run in seeds.runs}
        numbers = {"runs": 0, "mean": None, "std": None}
        if spread is not None:
            numbers = {key: getattr(spread, key) for key in numbers}
        return {"output_dir": str(seeds.output_dir), "values": values, **numbers}

    def lines(self) -> list[str]:
        """Returns the lines for a terminal."""
        first = self.studies[0]
        keys = list(first.trials[0].values) if first.trials else []
        rows: list[tuple[str, ...]] = [("trial", self.metric, *keys, "")]
        for trial in first.trials:
            remark = "best" if trial == first.best else trial.note
            values = (shown_value(trial.values[key]) for key in keys)
            rows.append((str(trial.number), format_number(trial.score), *values, remark))
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
        title = f"{self.metric} ({'lower' if self.lower_is_better else 'higher'} is better)"
        rows: list[tuple[str, ...]] = [(title, "best trial", "fresh seeds: mean", "std", "runs")]
        named = [(f"{s.sampler}, {counted(len(s.trials), 'trial')}", s.best, s.fresh) for s in self.studies]
        named += [] if self.baseline is None else [("the recipe as it is", None, self.baseline)]
        for name, best, seeds in named:
            spread = None if seeds is None else seeds.metrics.get(self.metric)
            cells = ("-", "-", "0")
            if spread is not None:
                cells = (format_number(spread.mean), format_number(spread.std), str(spread.runs))
            rows.append((name, format_number(None if best is None else best.score), *cells))
        return rows


def shown_value(value: Any) -> str:
    """Returns a value of a key, for people."""
    return f"{value:.4g}" if isinstance(value, float) else literal(value)


def _values_text(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {shown_value(value)}" for key, value in values.items())


def search(
    recipe: Recipe | str | Path, *, compare_random: bool = False, overwrite: bool = False, progress: bool = True
) -> SearchResult:
    """Searches for better values of the keys in the recipe's ``[search]``.

    Call it again to resume an interrupted search. It continues with the values of an uninterrupted search. With more
    trials in the recipe it extends a complete search. A trial that diverges, or whose values the model rejects, has no
    score.

    Args:
        recipe: A recipe with ``[search]`` and ``run.output_dir``, or the path of its TOML file.
        compare_random: True to try random values in as many trials, too, which shows how much the sampler helps.
        overwrite: True to replace an earlier search in the folder.
        progress: True to show progress on standard error.

    Raises:
        RecipeError, DataError, CheckpointError, UsageError, StoppedError: See ``fit``.

    Example:
        >>> search("search.toml").studies[0].best.values
    """
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    if loaded.search is None:
        raise RecipeError("the recipe has nothing to search. Add a section [search] with keys and their ranges")
    if loaded.folds is not None:
        raise RecipeError("a search has one validation set. Remove [folds], and cross-validate the result")
    if loaded.run.seeds is not None:
        raise RecipeError("a search has its own seeds. Remove run.seeds, and set run.seed and search.seeds")
    check_installed()
    accelerator, folder = make_accelerator(loaded.optim.mixed_precision), run_folder(loaded)
    with ExitStack() as stack:
        broadcast_from_main(accelerator, check_experiment_folder, folder, {STUDY})
        broadcast_from_main(accelerator, lambda: stack.enter_context(locked(folder)))
        with main_process_first(accelerator):
            prepared = prepare(loaded)
        searched = _Search(prepared, loaded.search, folder, progress=progress)
        stack.callback(searched.close)
        searched.begin(overwrite=overwrite)
        return searched.run(compare_random=compare_random)


def _remove(folder: Path) -> None:
    """Removes the search in a folder. Files that no search writes are kept."""
    for name in (*_SAMPLERS, _BASELINE):
        for path in sorted((folder / name).rglob("*"), reverse=True):
            if _RUN_FOLDER.fullmatch(path.name):
                remove_runs([path])
            elif path.name == SEEDS:
                path.unlink()
            with suppress(OSError):  # it is a file, or holds other files
                path.rmdir()
        with suppress(OSError):
            (folder / name).rmdir()
    for name in (SEARCH, BEST, outputs.REPORT, outputs.RECIPE, f"{STUDY}-journal", STUDY):
        (folder / name).unlink(missing_ok=True)


class _Search:
    """A search in its folder. Only the main process has the studies."""

    def __init__(self, prepared: LoadedRecipe, section: SearchSection, folder: Path, *, progress: bool) -> None:
        self.recipe, self.task, self.section, self.folder = prepared.recipe, prepared.task, section, folder
        self.accelerator, self.progress = make_accelerator(self.recipe.optim.mixed_precision), progress
        sets = list(prepared.splits.validation)
        metadata = metric_metadata(prepared.task, self.recipe.run, sets)
        self.metric: str = metadata["best"]
        self.lower_is_better = split_key(self.metric, sets)[1] in metadata["lower_is_better"]
        self.pick = min if self.lower_is_better else max
        data = outputs.data_metadata(prepared.splits)
        self.facts = {key: value for key, value in _flat(self.recipe).items() if key not in _FREE}
        self.facts |= {f"the rows of {name}": split["fingerprint"] for name, split in data.items()}
        self.facts["the metric"] = self.metric
        self.studies: dict[Sampler, Study] = {}

    def close(self) -> None:
        """Closes the file of the trials."""
        for study in self.studies.values():
            study.close()

    @on_main_process
    def begin(self, *, overwrite: bool) -> None:
        """Opens the file of the trials, which marks the folder, and writes the recipe.

        Raises:
            UsageError: The search in the folder has other settings or rows.
        """
        if overwrite:
            _remove(self.folder)
        self._study(self.section.sampler)
        outputs.write_text(self.folder / outputs.RECIPE, resolved_toml(self.recipe))

    def run(self, *, compare_random: bool) -> SearchResult:
        """Runs all trials, then the best values and the recipe as it is with fresh seeds."""
        samplers: list[Sampler] = [self.section.sampler, *(["random"] if compare_random else [])]  # type: ignore[list-item]
        for sampler in samplers:
            self._run_trials(sampler)
        studies = tuple(map(self._result, dict.fromkeys([*samplers, *self._earlier_samplers()])))
        baseline, notes = None, list[str]()
        if self.section.baseline and self.section.fresh_seeds:
            try:
                baseline = self._train_seeds({}, self.folder / _BASELINE)
            except (RecipeError, UsageError) as error:
                if not error.collective:
                    raise
                notes.append(f"the recipe as it is cannot be trained ({error})")
        fresh = {f"fresh seeds of {study.sampler}": study.fresh for study in studies}
        for name, seeds in (fresh | {"the recipe as it is": baseline}).items():
            if seeds is not None:
                notes += [*seeds.notes, *(f"{name}: {fault}" for fault in seeds.faults)]
        if studies[0].importance and len(studies[0].trials) < _FEW:
            trials = counted(len(studies[0].trials), "trial")
            notes.append(f"importance from {trials} is a rough guess. {_FEW} or more are better")
        if self.section.fresh_seeds:
            notes.append(
                "the score of the best trial is too good on average, because it was chosen for it. Expect the mean of "
                "the fresh seeds"
            )
        result = SearchResult(
            output_dir=self.folder,
            metric=self.metric,
            lower_is_better=self.lower_is_better,
            studies=studies,
            baseline=baseline,
            notes=tuple(dict.fromkeys(notes)),
        )
        if self.accelerator.is_main_process:
            if studies[0].best is not None:
                recipe = with_changes(with_values(self.recipe, studies[0].best.values), run={"output_dir": None})
                outputs.write_text(self.folder / BEST, resolved_toml(recipe))
            outputs.write_json(self.folder / SEARCH, result.to_json())
        return result

    def _message(self, text: str) -> None:
        if self.progress and self.accelerator.is_main_process:
            write_message(text)

    def _study(self, sampler: Sampler) -> Study:
        """Returns the trials of a sampler. Call it on the main process."""
        if sampler not in self.studies:
            sections: dict[str, Any] = {"optim": self.recipe.optim, "settings": self.task, "model": self.recipe.model}
            space = self.section.space
            split = {key: key.split(".", 1) for key in space}
            current = {key: getattr(sections[section], name, None) for key, (section, name) in split.items()}
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

    @on_main_process
    def _earlier_samplers(self) -> list[Sampler]:
        return [name for name in _SAMPLERS if any((self.folder / name).glob("trial-*"))]

    @on_main_process
    def _next_trial(self, sampler: Sampler, total: int) -> tuple[int, dict[str, Any]] | None:
        """Returns the number and values of the next trial, or None. Removes old weights."""
        study = self._study(sampler)
        trials = study.trials
        best = self._best(trials)
        for trial in trials:
            for folder in self._run_folders(sampler, trial.number):
                outputs.remove_weights(folder, keep_model=trial == best)
        hours = math.inf if self.section.hours is None else self.section.hours
        is_late = sum(trial.seconds for trial in trials) >= hours * 3600
        return None if is_late or len(trials) >= total else study.suggest()

    def _run_trials(self, sampler: Sampler) -> None:
        total = min(self.section.trials, len(self.section.grid())) if sampler == "grid" else self.section.trials
        while (suggested := self._next_trial(sampler, total)) is not None:
            trial = Trial(number=suggested[0], values=suggested[1])
            self._message(f"{sampler} trial {trial.number} of {total}: {_values_text(trial.values)}")
            began = time.monotonic()
            try:
                trial = self._run_trial(sampler, trial)
            except DivergedError as error:
                trial = replace(trial, state="failed", note=f"diverged at {error}")
            except (RecipeError, UsageError) as error:  # the model or other settings reject the values
                if not error.collective:
                    raise
                trial = replace(trial, state="failed", note=" ".join(str(error).split()))
            self._add(sampler, replace(trial, seconds=round(time.monotonic() - began, 3)))
            score = trial.note if trial.score is None else f"{self.metric} {format_number(trial.score)}"
            self._message(f"{sampler} trial {trial.number}, {score}")

    @on_main_process
    def _add(self, sampler: Sampler, trial: Trial) -> None:
        self._study(sampler).add(trial)

    def _run_trial(self, sampler: Sampler, trial: Trial) -> Trial:
        """Trains a trial's run for each seed. The first decides whether it is pruned."""
        folders = self._run_folders(sampler, trial.number)
        metrics = list[float]()

        def callback(event: Mapping[str, Any]) -> bool:  # called on the main process, which tells the others
            return event["event"] == "evaluation" and self._history(sampler, folders[0])[1]

        for seed, folder in zip(self._seeds(0, self.section.seeds), folders, strict=True):
            if self._shared_history(sampler, folders[0])[1]:  # by its first run, or killed before it could end
                break
            run = {"output_dir": str(folder), "seed": seed}
            recipe = with_changes(with_values(self.recipe, trial.values), run=run)
            result = train(recipe, progress=self.progress, callback=None if metrics else callback)
            metrics.append(result.metrics[self.metric])
        scores, is_pruned = self._shared_history(sampler, folders[0])
        trial = replace(trial, scores=tuple(scores))
        if is_pruned:
            return replace(trial, state="pruned", note=f"pruned after {counted(len(scores), 'evaluation')}")
        score = statistics.fmean(metrics)
        if not math.isfinite(score):
            return replace(trial, state="failed", note=f"{self.metric} is not a number")
        return replace(trial, score=score)

    @on_main_process
    def _shared_history(self, sampler: Sampler, folder: Path) -> tuple[list[float], bool]:
        return self._history(sampler, folder)

    def _history(self, sampler: Sampler, folder: Path) -> tuple[list[float], bool]:
        """Returns `_best_so_far` of a run, and True if it ends before its last step."""
        metadata, scores = outputs.read_run_metadata(folder), self._best_so_far(folder)
        if metadata is None or not scores:
            return [], False
        last = [event["step"] for event in outputs.read_events(folder) if event["event"] == "evaluation"][-1]
        return scores, self._study(sampler).prunes(scores) and last < metadata["steps"]

    def _best_so_far(self, folder: Path) -> list[float]:
        """Returns the best score after each evaluation, NaN before the first number."""
        best, history = math.nan, []
        for event in outputs.read_events(folder):
            if event["event"] == "evaluation":
                score = event["metrics"].get(self.metric)
                best = best if score is None else score if math.isnan(best) else self.pick(best, score)
                history.append(best)
        return history

    def _run_folders(self, sampler: Sampler, number: int) -> list[Path]:
        """Returns the folder of each run of a trial, one for each seed."""
        home, seeds = self.folder / sampler / f"trial-{number:03d}", self._seeds(0, self.section.seeds)
        return [home] if len(seeds) == 1 else [home / f"seed-{seed}" for seed in seeds]

    def _seeds(self, start: int, count: int) -> list[int]:
        return [(self.recipe.run.seed + start + offset) % 2**32 for offset in range(count)]

    def _train_seeds(self, values: Mapping[str, Any], home: Path) -> SeedsResult:
        """Trains the recipe with these values and the fresh seeds."""
        seeds = self._seeds(self.section.seeds, self.section.fresh_seeds)
        text = _values_text(values) if values else "the recipe as it is"
        self._message(f"fresh seeds {', '.join(map(str, seeds))}: {text}")
        recipe = with_changes(with_values(self.recipe, values), run={"output_dir": str(home)})
        return train_seeds(recipe, seeds, progress=self.progress)

    def _result(self, sampler: Sampler) -> StudyResult:
        result = self._read_study(sampler)
        if result.best is None or not self.section.fresh_seeds:
            return result
        home = self.folder / sampler / _FRESH / f"trial-{result.best.number:03d}"
        return replace(result, fresh=self._train_seeds(result.best.values, home))

    @on_main_process
    def _read_study(self, sampler: Sampler) -> StudyResult:
        study = self._study(sampler)
        trials = study.trials
        best = self._best(trials)
        folders = [] if best is None else self._run_folders(sampler, best.number)
        scores = {folder: history[-1] for folder in folders if (history := self._best_so_far(folder))}
        return StudyResult(
            sampler=sampler,
            trials=tuple(trials),
            best=best,
            run=self.pick(scores, key=scores.__getitem__) if scores else None,
            importance=study.importance(),
        )

    def _best(self, trials: Sequence[Trial]) -> Trial | None:
        """Returns the trial with the best score, of equal ones the first."""
        scores = {index: trial.score for index, trial in enumerate(trials) if trial.score is not None}
        return trials[self.pick(scores, key=scores.__getitem__)] if scores else None


def _flat(recipe: Recipe) -> dict[str, Any]:
    """Returns ``section.key`` -> its value as JSON."""
    document = json.loads(json.dumps(recipe.model_dump(exclude_none=True), default=str))
    flat = {"task": document.pop("task")}
    for section, values in document.items():
        flat |= {f"{section}.{key}": value for key, value in values.items()}
    return flat
