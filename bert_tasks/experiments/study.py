"""The study of a search, which Optuna keeps in a SQLite file.

This is the only module that imports Optuna, which is an optional extra. Optuna stores the trials, suggests their values
and prunes them. The package asks for one trial after the other, instead of calling ``study.optimize``, because an
interrupted trial has to continue with its values.
"""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.pruners import MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, GridSampler, RandomSampler, TPESampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy import URL, NullPool
from sqlalchemy.exc import SQLAlchemyError

from bert_tasks.data.issues import counted
from bert_tasks.errors import CheckpointError, argument
from bert_tasks.recipe.search import SearchSection, Space

_NAME = "search"
_NOTE = "note"  # the attribute of a trial that says why it has no score
_FACTS = "facts"  # the attribute of the study
_RANDOM_TRIALS = 5  # before tpe learns from those that have ended
_PRUNERS = {
    "none": NopPruner(),
    "median": MedianPruner(),
    "halving": SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
}
_DAMAGED = (RuntimeError, LookupError, ValueError, TypeError, AttributeError, AssertionError, ArithmeticError)


class Study:
    """The study of a search, as Optuna stores it.

    Every method raises CheckpointError if the file is damaged or cannot be written.

    Attributes:
        facts: What all trials have in common, such as the rows, as it is written in the file.
    """

    facts: dict[str, Any]
    _study: optuna.Study
    _trial: Trial  # the one that runs

    def __init__(self, path: Path, search: SearchSection) -> None:
        self.path, self.search = path, search

    def load(self) -> None:
        """Opens the file of an earlier search, to read its trials."""
        with self._file_errors():
            self._study = optuna.load_study(study_name=_NAME, storage=self._storage())
            self.facts = dict(self._study.user_attrs[_FACTS])

    def open(self, facts: Mapping[str, Any], *, first: Mapping[str, Any], seed: int, lower_is_better: bool) -> None:
        """Opens the file, or makes it.

        Args:
            facts: The facts of a new file.
            first: Values of the first trial, as far as they are known. A grid has an order of its own.
            seed: Seed of the suggestions. A search that goes on draws other values than at its start.
            lower_is_better: True if a low score is a good one.
        """
        direction = StudyDirection.MAXIMIZE
        if lower_is_better:
            direction = StudyDirection.MINIMIZE
        with self._file_errors():
            study = optuna.create_study(
                storage=self._storage(), study_name=_NAME, direction=direction, load_if_exists=True
            )
            if _FACTS not in study.user_attrs:
                if self.search.sampler != "grid":
                    study.enqueue_trial(dict(first), skip_if_exists=True)
                study.set_user_attr(_FACTS, dict(facts))
            # Neither the pruner nor the sampler is stored in the file.
            study.pruner = _PRUNERS[self.search.pruner]
            begun = [trial for trial in study.trials if trial.state is not TrialState.WAITING]
            study.sampler = _sampler(self.search, seed=seed, earlier=len(begun))
            self._study, self.facts = study, dict(study.user_attrs[_FACTS])

    def trials(self) -> tuple[FrozenTrial, ...]:
        """Returns the trials that have ended, in order."""
        with self._file_errors():
            trials = self._study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))
            for trial in trials:
                score = trial.value
                if trial.state is TrialState.COMPLETE and (score is None or not math.isfinite(score)):
                    raise ValueError(f"trial {trial.number} has the score {score}")
        return tuple(trials)

    def ask(self) -> tuple[int, dict[str, Any]]:
        """Returns the number and the values of the next trial, which is an interrupted one, if there is one."""
        with self._file_errors():
            interrupted = self._study.get_trials(states=(TrialState.RUNNING,))
            if interrupted:  # a kill left it in this state. Only one trial runs at a time
                self._trial = Trial(self._study, interrupted[0]._trial_id)
            else:
                self._trial = self._study.ask()
            values = {key: _suggest(self._trial, key, space) for key, space in self.search.space.items()}
        return self._trial.number, values

    def prunes(self, score: float, evaluation: int, *, is_last: bool) -> bool:
        """Stores the score of an evaluation, and returns True if the trial is to end before its last one.

        Evaluations are numbered from 1.
        """
        with self._file_errors():
            self._trial.report(score, evaluation)
            if not is_last and self._trial.should_prune():  # stored, because a kill may follow
                self._trial.set_user_attr(_NOTE, f"pruned after {counted(evaluation, 'evaluation')}")
            return _NOTE in self._trial.user_attrs

    def end(self, score: float | None, note: str) -> None:
        """Stores the end of the trial. A trial that was pruned or has a note gets no score."""
        trial = self._trial
        with self._file_errors():
            if note:
                trial.set_user_attr(_NOTE, note)
            # `study.tell` would let the sampler of a grid stop an `optimize` that there is not. A trial that failed is
            # stored as a pruned one, because tpe learns nothing from what Optuna calls failed.
            if score is None or _NOTE in trial.user_attrs:
                trial.storage.set_trial_state_values(trial._trial_id, TrialState.PRUNED)
            else:
                trial.storage.set_trial_state_values(trial._trial_id, TrialState.COMPLETE, [score])

    def _storage(self) -> optuna.storages.RDBStorage:
        """Returns the SQLite file as Optuna reads and writes it. Silences Optuna's own log."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        url = URL.create("sqlite", database=str(self.path)).render_as_string()
        return optuna.storages.RDBStorage(url, engine_kwargs={"poolclass": NullPool})  # which keeps no file open

    @contextmanager
    def _file_errors(self) -> Iterator[None]:
        """Turns the errors of Optuna and of SQLAlchemy into CheckpointError.

        A damaged file makes Optuna fail anywhere, so ordinary errors such as KeyError count, too.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Optuna's, about choices that are lists
                yield
        except (optuna.exceptions.OptunaError, SQLAlchemyError, *_DAMAGED) as error:
            reason = next(iter(str(error.__cause__ or error).splitlines()), type(error).__name__)
            raise CheckpointError(
                f"{self.path}: the trials cannot be read or written ({reason}). Is the disk full, or the file damaged? "
                f"Choose another folder, or search again with {argument('overwrite')}"
            ) from error


def _sampler(search: SearchSection, *, seed: int, earlier: int) -> BaseSampler:
    """Returns the sampler of a search that continues after some earlier trials.

    The state of a sampler's random numbers is not stored. With the seed alone, a search that continues would draw the
    values of its first trials again, so the number of earlier trials is added. A grid knows which cells are done.
    """
    if search.sampler == "grid":
        return GridSampler({key: list(space.values) for key, space in search.space.items()}, seed=seed)
    fresh_seed = (seed + earlier) % 2**32
    if search.sampler == "random":
        return RandomSampler(seed=fresh_seed)
    return TPESampler(seed=fresh_seed, n_startup_trials=_RANDOM_TRIALS)


def _suggest(trial: Trial, key: str, space: Space) -> Any:
    """Returns the trial's value of a key, which Optuna draws unless the trial has one."""
    low, high = space.low, space.high
    if low is None or high is None:
        return trial.suggest_categorical(key, space.values)
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(key, low, high, log=space.log)
    return trial.suggest_float(key, low, high, log=space.log)
