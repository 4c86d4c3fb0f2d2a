"""The trials of a hyper-parameter search in SQLite, and what is suggested next. The only module that imports Optuna.

Owns the rule that makes a search reproducible: the values of trial k, and whether it is pruned, are a function of the
seed, k and the trials before it. The file holds ended trials only, so a trial that was killed gets its values again.
"""

import importlib.util
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.recipe.search import Sampler, SearchSection, Space
from bert_tasks.recipe.toml import literal
from bert_tasks.storage import sha256
from bert_tasks.training.files import Change

if TYPE_CHECKING:
    import optuna

_RANDOM_TRIALS = 5  # before tpe and the pruners learn from what has ended
_SHOWN = 6  # differing facts in a message


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
            CheckpointError: the file cannot be read or written.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.path, self.sampler, self.search, self.start, self.seed = path, sampler, search, start, seed
        self._direction: Literal["minimize", "maximize"] = "minimize" if lower_is_better else "maximize"
        self._distributions = {key: _distribution(space) for key, space in search.space.items()}
        self._decisions: list[bool] = []  # for each score of the suggested trial, whether to prune it
        with self._file_errors():
            from sqlalchemy import URL

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
            if not self._stored.get_trials(deepcopy=False):
                self._stored.set_user_attr("facts", dict(facts))
            before = dict(self._stored.user_attrs["facts"])
        changes = [
            str(Change(name=name, before=before.get(name, "not set"), now=facts.get(name, "not set")))
            for name in sorted({*before, *facts})
            if before.get(name) != facts.get(name)
        ]
        if changes:
            raise UsageError(
                f"{self.path.parent} holds a search with other settings: {'; '.join(changes[:_SHOWN])}. "
                "Choose another folder, or --overwrite to search again"
            )

    @property
    def trials(self) -> list[Trial]:
        with self._file_errors():
            return [self._read(trial) for trial in self._stored.get_trials(deepcopy=False)]

    def suggest(self) -> tuple[int, dict[str, Any]]:
        """Returns the number and the values of the next trial; the same ones until it is added."""
        from optuna import create_study, pruners, samplers

        with self._file_errors():
            ended = self._stored.get_trials(deepcopy=False)
        number = len(ended)
        seed = int(sha256(f"{self.seed} {self.sampler} {number}")[:8], 16)
        is_tpe, pruner = self.sampler == "tpe", self.search.pruner
        study = create_study(
            direction=self._direction,
            sampler=samplers.TPESampler(n_startup_trials=_RANDOM_TRIALS, seed=seed)
            if is_tpe
            else samplers.RandomSampler(seed=seed),
            pruner=pruners.MedianPruner(n_startup_trials=_RANDOM_TRIALS)
            if pruner == "median"
            else pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
            if pruner == "halving"
            else pruners.NopPruner(),
        )
        with self._file_errors():
            study.add_trials(ended)
        fixed = self.start if number == 0 else None
        if self.sampler == "grid":
            grid = self.search.grid()
            random.Random(self.seed).shuffle(grid)
            fixed = grid[number]
        if fixed is not None:
            space = self.search.space
            study.enqueue_trial(
                {k: value if space[k].choices is None else literal(value) for k, value in fixed.items()}
            )
        self._asked = study.ask(self._distributions)
        self._decisions = []
        return number, self._values(self._asked.params)

    def prunes(self, scores: Sequence[float]) -> bool:
        """Returns True if the suggested trial is to end.

        Args:
            scores: its scores so far, as in ``Trial``; those of earlier calls are not counted twice.
        """
        for number in range(len(self._decisions), len(scores)):
            self._asked.report(scores[number], number + 1)
            self._decisions.append(self._asked.should_prune())
        return self._decisions[-1:] == [True]

    def add(self, trial: Trial) -> None:
        """Stores the suggested trial, which has ended."""
        from optuna.trial import TrialState, create_trial

        self.prunes(trial.scores)
        asked = self._asked.study.get_trials(deepcopy=False)[trial.number]
        ended = create_trial(
            # A trial that failed is one without a score, which tpe takes for the worst.
            state=TrialState.COMPLETE if trial.state == "complete" else TrialState.PRUNED,
            value=trial.score,
            params=asked.params,
            distributions=self._distributions,
            system_attrs=asked.system_attrs,
            intermediate_values={} if trial.state == "failed" else asked.intermediate_values,
            user_attrs={"seconds": trial.seconds, "note": trial.note, "state": trial.state},
        )
        with self._file_errors():
            self._stored.add_trial(ended)

    def importance(self) -> dict[str, float]:
        """Returns each key's share in how much the scores differ (fANOVA, Hutter et al. 2014), if there are several."""
        from optuna.importance import FanovaImportanceEvaluator, get_param_importances

        if len(self._distributions) < 2 or sum(trial.score is not None for trial in self.trials) < 2:
            return {}
        try:
            shares = get_param_importances(self._stored, evaluator=FanovaImportanceEvaluator(seed=0))
        except (RuntimeError, ValueError):  # equal scores
            return {}
        return {} if any(map(math.isnan, shares.values())) else {key: float(share) for key, share in shares.items()}

    def _read(self, stored: "optuna.trial.FrozenTrial") -> Trial:
        attributes = stored.user_attrs
        return Trial(
            number=stored.number,
            values=self._values(stored.params),
            score=stored.value,
            scores=tuple(float(value) for _, value in sorted(stored.intermediate_values.items())),
            state=attributes["state"],
            seconds=float(attributes["seconds"]),
            note=str(attributes["note"]),
        )

    def _values(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: params[key]
            if space.choices is None
            else {literal(choice): choice for choice in space.choices}[params[key]]
            for key, space in self.search.space.items()
        }

    @contextmanager
    def _file_errors(self) -> Iterator[None]:
        """Turns what Optuna and SQLite raise about a damaged file, which may be anything, into CheckpointError."""
        from optuna.exceptions import OptunaError
        from sqlalchemy.exc import SQLAlchemyError

        damaged = (RuntimeError, LookupError, ValueError, TypeError, AttributeError, AssertionError, ArithmeticError)
        try:
            yield
        except (OptunaError, SQLAlchemyError, *damaged) as error:
            reason = next(iter(str(error.__cause__ or error).splitlines()), type(error).__name__)
            raise CheckpointError(
                f"{self.path}: the trials cannot be read or written ({reason}): is the disk full, or the file damaged? "
                "Choose another folder, or --overwrite to search again"
            ) from error


def _distribution(space: Space) -> "optuna.distributions.BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if space.choices is not None:
        return CategoricalDistribution(list(map(literal, space.choices)))
    low, high = space.probes
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=space.log)
    return FloatDistribution(float(low), float(high), log=space.log)
