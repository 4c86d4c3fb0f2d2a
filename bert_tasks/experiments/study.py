"""The trials of a hyper-parameter search in SQLite, and the next suggestion.

The only module that imports Optuna. Owns the rule that makes a search reproducible. The values of trial k, and whether
it is pruned, are a function of the seed, k and the trials before it. A trial that was killed is still running in the
file, and continues with its values.
"""

import importlib.util
import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from bert_tasks.errors import CheckpointError, UsageError, argument
from bert_tasks.recipe.search import Sampler, SearchSection, Space
from bert_tasks.recipe.toml import literal
from bert_tasks.storage import sha256
from bert_tasks.training.files import differences

if TYPE_CHECKING:
    import optuna

State = Literal["complete", "pruned", "failed"]
_RANDOM_TRIALS = 5  # before tpe and the pruners learn from what has ended
_SHOWN = 6  # differing facts in a message


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial that has ended.

    Attributes:
        values: ``section.key`` -> value.
        score: The mean of its runs at their best evaluations. None if it was pruned or failed.
        scores: The best scores so far after each evaluation of the first run.
        seconds: Duration of the trial since the search last began.
        note: Why it has no score.
    """

    number: int
    values: Mapping[str, Any]
    score: float | None = None
    scores: tuple[float, ...] = ()
    state: State = "complete"
    seconds: float = 0.0
    note: str = ""


def check_installed() -> None:
    """Raises UsageError if Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise UsageError("optuna not installed, needed for searches. Run `pip install '.[search]'`")


class Study:
    """The trials of one sampler.

    Args:
        path: The SQLite file, which may hold the studies of other samplers, too.
        search: The space and the pruner. Its sampler need not be this one.
        start: The values of trial 0, if they are known.
        seed: Seed of all suggestions.
    """

    def __init__(
        self,
        path: Path,
        *,
        sampler: Sampler,
        search: SearchSection,
        start: Mapping[str, Any] | None,
        seed: int,
        lower_is_better: bool,
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.path, self.sampler, self.search, self.start, self.seed = path, sampler, search, start, seed
        self._trial: optuna.Trial  # the one that was suggested
        with self._file_errors():
            from sqlalchemy import URL

            self._storage = optuna.storages.RDBStorage(URL.create("sqlite", database=str(path)).render_as_string())
            direction: Literal["minimize", "maximize"] = "minimize" if lower_is_better else "maximize"
            self._study = optuna.create_study(
                storage=self._storage, study_name=sampler, direction=direction, load_if_exists=True
            )

    def close(self) -> None:
        """Closes the file."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        """Raises UsageError if a fact of all trials, such as the rows, has changed."""
        with self._file_errors():
            if not self._study.get_trials(deepcopy=False):
                self._study.set_user_attr("facts", dict(facts))
            before = dict(self._study.user_attrs["facts"])
        changes = list(map(str, differences(before, facts)))
        if changes:
            raise UsageError(
                f"{self.path.parent} holds a search that differs in {', '.join(changes[:_SHOWN])}. "
                f"Choose another folder, or {argument('overwrite')} to search again"
            )

    @property
    def trials(self) -> list[Trial]:
        """The trials that have ended, in order."""
        with self._file_errors():
            ended = [trial for trial in self._study.get_trials(deepcopy=False) if trial.state.is_finished()]
            read = [self._read(trial) for trial in ended]
            if len({trial.number for trial in read}) < len(read):
                raise ValueError("two trials have the same number")
            return read

    def suggest(self) -> tuple[int, dict[str, Any]]:
        """Returns the number and values of the next trial, equal until it is added."""
        from optuna import Trial as Suggested
        from optuna import pruners, samplers
        from optuna.trial import TrialState

        with self._file_errors():
            trials, space = self._study.get_trials(deepcopy=False), self.search.space
            number = sum(trial.state.is_finished() for trial in trials)
            seed = int(sha256(f"{self.seed} {self.sampler} {number}")[:8], 16)
            is_tpe = self.sampler == "tpe"
            self._study.sampler = (
                samplers.TPESampler(n_startup_trials=_RANDOM_TRIALS, seed=seed)
                if is_tpe
                else samplers.RandomSampler(seed=seed)
            )
            self._study.pruner = {
                "none": pruners.NopPruner(),
                "median": pruners.MedianPruner(n_startup_trials=_RANDOM_TRIALS),
                "halving": pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
            }[self.search.pruner]
            running = [trial for trial in trials if trial.state == TrialState.RUNNING]
            fixed = self.start if number == 0 else None
            if self.sampler == "grid":
                grid = self.search.grid()
                random.Random(self.seed).shuffle(grid)
                fixed = grid[number]
            if fixed is not None and not running:
                params = {key: value if space[key].choices is None else literal(value) for key, value in fixed.items()}
                self._study.enqueue_trial(params, skip_if_exists=True)
            self._trial = Suggested(self._study, running[0]._trial_id) if running else self._study.ask()
            suggested = {key: _suggest(self._trial, key, values) for key, values in space.items()}
            for key, value in suggested.items():
                _check_value(key, value, space[key])
            return number, suggested

    def prunes(self, scores: Sequence[float]) -> bool:
        """Returns True if the suggested trial is to end. Earlier decisions are stored."""
        with self._file_errors():
            decisions = list(self._trial.user_attrs.get("decisions", []))
            for number in range(len(decisions), len(scores)):
                self._trial.report(scores[number], number + 1)
                decisions.append(bool(self._trial.should_prune()))
                self._trial.set_user_attr("decisions", decisions)
        return bool(scores and decisions[len(scores) - 1])

    def add(self, trial: Trial) -> None:
        """Stores the suggested trial, which has ended."""
        from optuna.trial import TrialState

        self.prunes(trial.scores)
        with self._file_errors():
            for name in ("seconds", "note", "state"):
                self._trial.set_user_attr(name, getattr(trial, name))
            # A trial that failed is a pruned one, because tpe ignores trials that Optuna calls failed.
            ended = (TrialState.PRUNED, None) if trial.score is None else (TrialState.COMPLETE, [trial.score])
            self._storage.set_trial_state_values(self._trial._trial_id, *ended)

    def importance(self) -> dict[str, float]:
        """Returns each key's share in the scores' variance (fANOVA, Hutter et al. 2014)."""
        from optuna.importance import FanovaImportanceEvaluator, get_param_importances

        if len(self.search.space) < 2 or sum(trial.score is not None for trial in self.trials) < 2:
            return {}
        try:
            with self._file_errors(RuntimeError, ValueError):
                shares = get_param_importances(self._study, evaluator=FanovaImportanceEvaluator(seed=0))
        except (RuntimeError, ValueError):  # equal scores
            return {}
        return {} if any(map(math.isnan, shares.values())) else {key: float(share) for key, share in shares.items()}

    def _read(self, stored: "optuna.trial.FrozenTrial") -> Trial:
        """Returns a trial of the file, whose values anybody may have edited.

        Raises:
            ValueError, LookupError, TypeError: A value is missing, or is none that a search writes.
        """
        attributes, spaces = stored.user_attrs, self.search.space
        state, score = attributes["state"], None if stored.value is None else _finite(stored.value)
        if state not in get_args(State) or (score is None) == (state == "complete"):
            raise ValueError(f"trial {stored.number} is {state!r} and has the score {score}")
        values = {key: _value(stored.params[key], space) for key, space in spaces.items()}
        for key, value in values.items():
            _check_value(key, value, spaces[key])
        return Trial(
            number=stored.number,
            values=values,
            score=score,
            scores=tuple(_finite(value) for _, value in sorted(stored.intermediate_values.items())),
            state=state,
            seconds=_finite(attributes["seconds"]),
            note=str(attributes["note"]),
        )

    @contextmanager
    def _file_errors(self, *passed: type[Exception]) -> Iterator[None]:
        """Turns any error of Optuna and SQLite about a damaged file into CheckpointError, except ``passed``."""
        from optuna.exceptions import OptunaError
        from sqlalchemy.exc import SQLAlchemyError

        damaged = (RuntimeError, LookupError, ValueError, TypeError, AttributeError, AssertionError, ArithmeticError)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Optuna's, about values that a message of ours refuses
                yield
        except passed:
            raise
        except (OptunaError, SQLAlchemyError, *damaged) as error:
            reason = next(iter(str(error.__cause__ or error).splitlines()), type(error).__name__)
            raise CheckpointError(
                f"{self.path}: the trials cannot be read or written ({reason}). Is the disk full, or the file damaged? "
                f"Choose another folder, or {argument('overwrite')} to search again"
            ) from error


def _suggest(trial: "optuna.Trial", key: str, space: Space) -> Any:
    low, high = space.probes[0], space.probes[-1]
    if space.choices is not None:
        return _value(trial.suggest_categorical(key, list(map(literal, space.choices))), space)
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(key, low, high, log=space.log)
    return trial.suggest_float(key, float(low), float(high), log=space.log)


def _check_value(key: str, value: Any, space: Space) -> None:
    """Raises ValueError for a value that the search cannot have drawn."""
    if space.choices is not None:
        return  # ``_value`` finds no other
    low, high = space.probes[0], space.probes[-1]
    number = _finite(value)
    is_whole = isinstance(low, int) and isinstance(high, int)
    if not low <= number <= high or (is_whole and not isinstance(value, int)):
        raise ValueError(f"{key} is {value!r}, which is outside the range of the search")


def _finite(value: Any) -> float:
    """Returns a number as float. Raises ValueError if it is none, or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)


def _value(stored: Any, space: Space) -> Any:
    """Returns the value of a key. A choice is stored as its text."""
    return stored if space.choices is None else {literal(choice): choice for choice in space.choices}[stored]
