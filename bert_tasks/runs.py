"""``fit``, ``train`` and ``train_seeds`` as users call them: training, then the card beside each finished model.

Owns what follows a run. It is finished by then, so nothing that fails here loses it: the failure is logged, and the
same call, which finds the run complete, tries again. Must not know what is written.
"""

import logging
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from bert_tasks.cards.card import write_card
from bert_tasks.errors import BertTasksError
from bert_tasks.inference import is_first_process
from bert_tasks.training import loop, run, seeds
from bert_tasks.training.job import FitResult
from bert_tasks.training.seed_results import SeedsResult

P = ParamSpec("P")
R = TypeVar("R", FitResult, SeedsResult)

_LOG = logging.getLogger(__name__)


def _with_card(work: Callable[P, R]) -> Callable[P, R]:
    @wraps(work)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        result = work(*args, **kwargs)
        if is_first_process():
            for folder in _folders(result):
                _try_card(folder)
        return result

    return call


def _folders(result: FitResult | SeedsResult) -> list[Path]:
    if isinstance(result, FitResult):
        return [result.output_dir]
    return [made.output_dir for made in result.runs if made.result is not None]


def _try_card(folder: Path) -> None:
    try:
        write_card(folder)
    except (BertTasksError, OSError, ValueError, TypeError, LookupError) as error:
        _LOG.warning("the run is complete, but it has no new model card: %s", error)


fit = _with_card(loop.fit)
train = _with_card(run.train)
train_seeds = _with_card(seeds.train_seeds)
