"""The trials of a search in the SQLite file of an Optuna study.

The only module that imports Optuna, which stores the trials, suggests their values and prunes them. A trial that was
killed is still running in the file, and continues with its values.
"""

import importlib.util
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_tasks.data.problems import counted
from bert_tasks.distributed import make_accelerator, on_main_process
from bert_tasks.errors import CheckpointError, UsageError, argument
from bert_tasks.recipe.search import SearchSection, Space
from bert_tasks.recipe.toml import literal
from bert_tasks.training.files import differences

if TYPE_CHECKING:
    import optuna

_RANDOM_TRIALS = 5  # before tpe learns from those that have ended
_SHOWN = 6  # differing facts in a message


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A run with values of its own.

    Attributes:
        values: ``section.key`` -> value.
        score: The metric of the best model. None if the trial was pruned or failed.
        scores: The metric at each evaluation.
        state: "complete", "pruned" or "failed".
        seconds: Duration of the trial since the search last began.
        note: Why it has no score.
    """

    number: int
    values: Mapping[str, Any]
    score: float | None = None
    scores: tuple[float, ...] = ()
    state: str = "complete"
    seconds: float = 0.0
    note: str = ""


def check_installed() -> None:
    """Raises UsageError if Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise UsageError("optuna not installed, needed for searches. Run `pip install '.[search]'`")


class Study:
    """The study of a search. The main process asks Optuna, and all processes get the answers."""

    _storage: "optuna.storages.RDBStorage | None" = None
    _study: "optuna.Study"
    _trial: "optuna.Trial"  # the one that was suggested last

    def __init__(self, path: Path, search: SearchSection, *, mixed_precision: str = "no") -> None:
        self.path, self.search = path, search
        self.accelerator = make_accelerator(mixed_precision)

    @on_main_process
    def open(
        self, facts: Mapping[str, Any], *, start: Mapping[str, Any] | None, seed: int, lower_is_better: bool
    ) -> None:
        """Opens the file, or makes it.

        Args:
            facts: What all trials have in common, such as the rows.
            start: The values of the first trial, if they are known.
            seed: Seed of the suggestions.
            lower_is_better: True if a low score is a good one.

        Raises:
            UsageError: The trials in the file have other facts.
            CheckpointError: The file is damaged.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with self._file_errors():
            from sqlalchemy import URL

            url = URL.create("sqlite", database=str(self.path)).render_as_string()
            self._storage = optuna.storages.RDBStorage(url)
            self._study = optuna.create_study(
                storage=self._storage,
                study_name="search",
                direction="minimize" if lower_is_better else "maximize",
                pruner=_pruner(self.search),
                load_if_exists=True,
            )
            earlier = len(self._study.get_trials(deepcopy=False))
            self._study.sampler = _sampler(self.search, seed=seed, earlier=earlier)
            if "facts" not in self._study.user_attrs:
                if start is not None:
                    params = {key: _stored(value, self.search.space[key]) for key, value in start.items()}
                    self._study.enqueue_trial(params, skip_if_exists=True)
                self._study.set_user_attr("facts", dict(facts))
            before = dict(self._study.user_attrs["facts"])
        changes = list(map(str, differences(before, facts)))
        if changes:
            raise UsageError(
                f"{self.path.parent} holds a search that differs in {', '.join(changes[:_SHOWN])}. "
                f"Choose another folder, or {argument('overwrite')} to search again"
            )

    def close(self) -> None:
        """Closes the file."""
        if self._storage is not None:
            self._storage.remove_session()
            self._storage.engine.dispose()

    @on_main_process
    def trials(self) -> list[Trial]:
        """Returns the trials that have ended, in order."""
        with self._file_errors():
            return [self._read(stored, number) for number, stored in enumerate(self._ended())]

    @on_main_process
    def ask(self) -> Trial:
        """Returns the next trial, which is the one that a kill or a signal stopped, if there is one."""
        from optuna import Trial as Suggested
        from optuna.trial import TrialState

        with self._file_errors():
            running = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            if running:
                self._trial = Suggested(self._study, running[0]._trial_id)
            else:
                self._trial = self._study.ask()
            values = {key: _suggest(self._trial, key, space) for key, space in self.search.space.items()}
            return Trial(number=len(self._ended()), values=values)

    def prunes(self, score: float, evaluation: int, *, is_last: bool) -> bool:
        """Stores the score of an evaluation, and returns True if the trial is to end before its last one.

        Call it on the main process. Evaluations are numbered from 1.
        """
        with self._file_errors():
            self._trial.report(score, evaluation)
            if not is_last and self._trial.should_prune():  # stored, because a kill may follow
                self._trial.set_user_attr("pruned", evaluation)
            return "pruned" in self._trial.user_attrs

    @on_main_process
    def end(self, score: float | None, *, note: str, seconds: float) -> None:
        """Stores that the trial has ended. A trial that was pruned loses its score."""
        from optuna.trial import TrialState

        trial = self._trial
        with self._file_errors():
            if "pruned" in trial.user_attrs:
                score = None
                note = f"pruned after {counted(trial.user_attrs['pruned'], 'evaluation')}"
            trial.set_user_attr("note", note)
            trial.set_user_attr("seconds", round(seconds, 3))
            # `study.tell` would let the sampler of a grid stop an `optimize` that there is not. A trial that failed is
            # stored as a pruned one, because tpe learns nothing from what Optuna calls failed.
            if score is None:
                trial.storage.set_trial_state_values(trial._trial_id, TrialState.PRUNED)
            else:
                trial.storage.set_trial_state_values(trial._trial_id, TrialState.COMPLETE, [score])

    def _ended(self) -> "list[optuna.trial.FrozenTrial]":
        from optuna.trial import TrialState

        return self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))

    def _read(self, stored: "optuna.trial.FrozenTrial", number: int) -> Trial:
        """Returns a trial of the file. Raises ValueError, LookupError or TypeError if it is damaged."""
        attributes = stored.user_attrs
        state = "pruned" if "pruned" in attributes else "failed"
        score = None
        if stored.value is not None:
            state, score = "complete", float(stored.value)
            if not math.isfinite(score):
                raise ValueError(f"trial {number} has the score {score}")
        return Trial(
            number=number,
            values={key: _value(stored.params[key], space) for key, space in self.search.space.items()},
            score=score,
            scores=tuple(value for _, value in sorted(stored.intermediate_values.items())),
            state=state,
            seconds=float(attributes["seconds"]),
            note=str(attributes["note"]),
        )

    @contextmanager
    def _file_errors(self) -> Iterator[None]:
        """Turns any error of Optuna and SQLite about a damaged file into CheckpointError."""
        from optuna.exceptions import OptunaError
        from sqlalchemy.exc import SQLAlchemyError

        damaged = (RuntimeError, LookupError, ValueError, TypeError, AttributeError, AssertionError, ArithmeticError)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Optuna's, about values that a message of ours refuses
                yield
        except (OptunaError, SQLAlchemyError, *damaged) as error:
            reason = next(iter(str(error.__cause__ or error).splitlines()), type(error).__name__)
            raise CheckpointError(
                f"{self.path}: the trials cannot be read or written ({reason}). Is the disk full, or the file damaged? "
                f"Choose another folder, or {argument('overwrite')} to search again"
            ) from error


def _sampler(search: SearchSection, *, seed: int, earlier: int) -> "optuna.samplers.BaseSampler":
    """Returns Optuna's sampler. A search that goes on draws other values than at its start."""
    from optuna import samplers

    if search.sampler == "grid":
        grid = {key: [_stored(value, space) for value in space.values] for key, space in search.space.items()}
        return samplers.GridSampler(grid, seed=seed)
    fresh_seed = (seed + earlier) % 2**32
    if search.sampler == "random":
        return samplers.RandomSampler(seed=fresh_seed)
    return samplers.TPESampler(seed=fresh_seed, n_startup_trials=_RANDOM_TRIALS)


def _pruner(search: SearchSection) -> "optuna.pruners.BasePruner":
    from optuna import pruners

    if search.pruner == "none":
        return pruners.NopPruner()
    if search.pruner == "median":
        return pruners.MedianPruner()
    return pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)


def _suggest(trial: "optuna.Trial", key: str, space: Space) -> Any:
    """Returns the trial's value of a key, which Optuna draws unless the trial has one."""
    low, high = space.low, space.high
    if low is None or high is None:
        return _value(trial.suggest_categorical(key, [_stored(choice, space) for choice in space.values]), space)
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(key, low, high, log=space.log)
    return trial.suggest_float(key, low, high, log=space.log)


def _stored(value: Any, space: Space) -> Any:
    """Returns a value as Optuna stores it. A choice is stored as its text, because it may be a list."""
    return value if space.choices is None else literal(value)


def _value(stored: Any, space: Space) -> Any:
    """Returns the value of a key. Raises KeyError if it is no choice."""
    if space.choices is None:
        return stored
    return {literal(choice): choice for choice in space.choices}[stored]
