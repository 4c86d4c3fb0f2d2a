"""The trials of a hyper-parameter search in SQLite, and what is suggested next. The only module that imports Optuna.

Owns the rule that makes a search reproducible: the values of trial k, and whether it is pruned, are a function of the
seed, k and the trials before it. The file holds ended trials only, so a trial that was killed gets its values again.
"""

import importlib.util
import math
import random
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from bert_tasks.data.problems import shortened
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.recipe.search import Sampler, SearchSection, Space
from bert_tasks.recipe.toml import literal
from bert_tasks.storage import sha256

if TYPE_CHECKING:
    import optuna

_RANDOM_TRIALS = 5  # before tpe and the pruners learn from what has ended
_FACTS, _SECONDS, _NOTE, _FAILED = "facts", "seconds", "note", "failed"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial that has ended.

    Attributes:
        values: ``section.key`` -> value.
        score: the mean of its runs at their best evaluations; None: it was pruned or failed.
        scores: of the first run, the best so far after each evaluation.
        seconds: how long the trial took since the search last began.
        note: why it has no score.
    """

    number: int
    values: Mapping[str, Any]
    score: float | None = None
    scores: tuple[float, ...] = ()
    state: Literal["complete", "pruned", "failed"] = "complete"
    seconds: float = 0.0
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def check_installed() -> None:
    """Raises UsageError if Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise UsageError("optuna not installed, needed for searches: pip install '.[search]'")


class Study:
    """The trials of one sampler.

    Attributes:
        trials: those that have ended, in order.
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
        """Opens a study, or begins it.

        Args:
            path: the SQLite file, which may hold the studies of other samplers, too.
            sampler: what suggests; it need not be the section's.
            search: the space and the pruner.
            start: the values of trial 0, if they are known.
            seed: of all suggestions.
            lower_is_better: the direction of scores.

        Raises:
            CheckpointError: the file cannot be read or written, or is not the file of a search.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.path, self.sampler, self.search, self.start, self.seed = path, sampler, search, start, seed
        self._direction: Literal["minimize", "maximize"] = "minimize" if lower_is_better else "maximize"
        self._distributions = {key: _distribution(space) for key, space in search.space.items()}
        self._asked: optuna.Trial | None = None
        self._reported, self._is_pruned = 0, False
        with self._file_errors():
            from sqlalchemy import URL

            self._check_file()
            url = URL.create("sqlite", database=str(path)).render_as_string()
            self._storage = optuna.storages.RDBStorage(url)
            self._stored = optuna.create_study(
                storage=self._storage, study_name=sampler, direction=self._direction, load_if_exists=True
            )

    def close(self) -> None:
        """Closes the file."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        """Compares what all trials must have in common, such as the rows, with what the first trial had.

        Args:
            facts: a name for people -> plain value.

        Raises:
            UsageError: something differs; the message names it.
        """
        with self._file_errors():
            before = self._stored.user_attrs.get(_FACTS)
            if before is None and not self._stored.get_trials(deepcopy=False):
                self._stored.set_user_attr(_FACTS, dict(facts))
                return
            if not isinstance(before, Mapping):
                raise ValueError(f"{_FACTS} is {shortened(before)}, expected an object")
            different = [name for name in facts if before.get(name) != facts[name]]
        if different:
            raise UsageError(
                f"{self.path} holds trials that cannot be compared with new ones: {', '.join(different)} changed. "
                "Choose another folder, or --overwrite to search again"
            )

    @property
    def trials(self) -> list[Trial]:
        with self._file_errors():
            direction = self._stored.direction.name.lower()
            if direction != self._direction:
                raise ValueError(f"direction is {direction}, expected {self._direction}")
            trials = [self._read(found) for found in self._stored.get_trials(deepcopy=False)]
            if [trial.number for trial in trials] != list(range(len(trials))):
                raise ValueError("the trials are not numbered 0, 1, 2, and so on")
            return trials

    def suggest(self) -> tuple[int, dict[str, Any]]:
        """The number and the values of the next trial; the same ones until it is added."""
        import optuna

        with self._file_errors():
            ended = self._stored.get_trials(deepcopy=False)
        number = len(ended)
        seed = int(sha256(f"{self.seed} {self.sampler} {number}")[:8], 16)
        samplers = optuna.samplers
        sampler = (
            samplers.TPESampler(n_startup_trials=_RANDOM_TRIALS, seed=seed)
            if self.sampler == "tpe"
            else samplers.RandomSampler(seed=seed)
        )
        study = optuna.create_study(direction=self._direction, sampler=sampler, pruner=self._pruner())
        with self._file_errors():
            study.add_trials(ended)
        fixed = self._grid[number] if self.sampler == "grid" else self.start if number == 0 else None
        if fixed is not None:
            study.enqueue_trial({key: self._encoded(key, value) for key, value in fixed.items()})
        self._asked = study.ask(self._distributions)
        self._reported, self._is_pruned = 0, False
        return number, self._decoded(self._asked.params)

    def prunes(self, scores: Sequence[float]) -> bool:
        """Whether to end the suggested trial.

        Args:
            scores: its scores so far, as in ``Trial``; those that were given before are not counted twice.
        """
        if self._asked is None:
            raise ValueError("no trial was suggested")
        for number in range(self._reported, len(scores)):
            self._asked.report(scores[number], number + 1)
            self._is_pruned = self._asked.should_prune()
            self._reported = number + 1
        return self._is_pruned

    def add(self, trial: Trial) -> None:
        """Stores the suggested trial, which has ended."""
        import optuna

        if self._asked is None:
            raise ValueError("no trial was suggested")
        self.prunes(trial.scores)
        asked = self._asked.study.get_trials(deepcopy=False)[trial.number]
        states = optuna.trial.TrialState
        ended = optuna.trial.create_trial(
            # A trial that failed is one without a score, which tpe takes for the worst.
            state=states.COMPLETE if trial.state == "complete" else states.PRUNED,
            value=trial.score,
            params=asked.params,
            distributions=self._distributions,
            system_attrs=asked.system_attrs,
            intermediate_values={} if trial.state == "failed" else asked.intermediate_values,
            user_attrs={_SECONDS: trial.seconds, _NOTE: trial.note, _FAILED: trial.state == "failed"},
        )
        with self._file_errors():
            self._stored.add_trial(ended)
        self._asked = None

    def importance(self) -> dict[str, float]:
        """Each key's share in how much the scores differ (fANOVA, Hutter et al. 2014); none for one of either."""
        import optuna

        if len(self._distributions) < 2 or sum(trial.score is not None for trial in self.trials) < 2:
            return {}
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        try:
            shares = optuna.importance.get_param_importances(self._stored, evaluator=evaluator)
        except (RuntimeError, ValueError):  # equal scores
            return {}
        return {} if any(map(math.isnan, shares.values())) else {key: float(share) for key, share in shares.items()}

    def _pruner(self) -> "optuna.pruners.BasePruner":
        import optuna

        if self.search.pruner == "median":
            return optuna.pruners.MedianPruner(n_startup_trials=_RANDOM_TRIALS)
        if self.search.pruner == "halving":
            return optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
        return optuna.pruners.NopPruner()

    @property
    def _grid(self) -> list[dict[str, Any]]:
        grid = self.search.grid()
        random.Random(self.seed).shuffle(grid)
        return grid

    def _check_file(self) -> None:
        """Checks that the file, if there is one, is that of a search: Optuna would add its tables to any other.

        Raises:
            ValueError, sqlite3.Error: it is something else.
        """
        if not self.path.exists():
            return
        if not self.path.is_file():
            raise ValueError("not a file")
        with closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=rw", uri=True)) as connection:
            names = {name for (name,) in connection.execute("SELECT study_name FROM studies")}
        if not names <= set(get_args(Sampler)):
            raise ValueError(f"it holds the study {shortened(min(map(str, names - set(get_args(Sampler)))))}")

    def _read(self, stored: "optuna.trial.FrozenTrial") -> Trial:
        """Returns a trial of the file.

        Raises:
            ValueError: a value is one that no trial of this search has.
        """
        attributes, is_complete = stored.user_attrs, stored.state.name == "COMPLETE"
        expected = {
            "state": (stored.state.name, stored.state.name in ("COMPLETE", "PRUNED")),
            "score": (stored.value, not is_complete or _is_number(stored.value)),
            _SECONDS: (attributes.get(_SECONDS), _is_number(attributes.get(_SECONDS))),
            _NOTE: (attributes.get(_NOTE), isinstance(attributes.get(_NOTE), str)),
            _FAILED: (attributes.get(_FAILED), isinstance(attributes.get(_FAILED), bool)),
        }
        values = self._decoded(stored.params)
        expected |= {key: (values[key], values[key] in space) for key, space in self.search.space.items()}
        for name, (value, fits) in expected.items():
            if not fits:
                raise ValueError(f"trial {stored.number}: {name} is {shortened(value)}")
        return Trial(
            number=stored.number,
            values=values,
            score=stored.value if is_complete else None,
            scores=tuple(float(value) for _, value in sorted(stored.intermediate_values.items())),
            state="complete" if is_complete else "failed" if attributes[_FAILED] else "pruned",
            seconds=attributes[_SECONDS],
            note=attributes[_NOTE],
        )

    def _encoded(self, key: str, value: Any) -> Any:
        return value if self.search.space[key].choices is None else literal(value)

    def _decoded(self, params: Mapping[str, Any]) -> dict[str, Any]:
        values = {}
        for key, space in self.search.space.items():
            value = params.get(key)
            if space.choices is not None:
                value = {literal(choice): choice for choice in space.choices}.get(str(value))
            values[key] = value
        return values

    @contextmanager
    def _file_errors(self) -> Iterator[None]:
        from optuna.exceptions import OptunaError
        from sqlalchemy.exc import SQLAlchemyError

        damaged = (RuntimeError, LookupError, ValueError, TypeError, AttributeError, AssertionError, ArithmeticError)
        try:
            yield
        except (OptunaError, SQLAlchemyError, sqlite3.Error, *damaged) as error:
            cause = error if error.__cause__ is None else error.__cause__
            reason = next(iter(str(cause).splitlines()), type(cause).__name__)
            raise CheckpointError(
                f"{self.path}: the trials cannot be read or written ({reason}): is the disk full, or the file damaged? "
                "Choose another folder, or --overwrite to search again"
            ) from error


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _distribution(space: Space) -> "optuna.distributions.BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if space.choices is not None:
        return CategoricalDistribution(list(map(literal, space.choices)))
    low, high = space.probes
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=space.log)
    return FloatDistribution(float(low), float(high), log=space.log)
