"""Ranking of documents by a model of pairs, as ``CrossEncoder.rank`` does it."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from bert_tasks.errors import UsageError
from bert_tasks.outputs.ranking import RankedClasses, Ranking
from bert_tasks.outputs.settings import require
from bert_tasks.tasks.base import Task

_NO_RANKING = (
    "rank needs a model of pair-classification with problem_type = 'regression' or two labels. Load a CrossEncoder "
    "with task='pair-classification'"
)


def can_rank(task: Task[Any]) -> bool:
    """Returns True if a task has one score, or two labels, for a pair of texts."""
    return _ranking_output(task) is not None


def _ranking_output(task: Task[Any]) -> RankedClasses | Ranking | None:
    """Returns the output of a task by whose predictions documents can be ranked, or None."""
    output = task.output
    if not isinstance(output, RankedClasses | Ranking) or not output.can_rank:
        return None
    return output


def ranking_task(task: Task[Any], documents: Sequence[str], top_k: int | None) -> Task[Any]:
    """Returns the task of a model that can rank these documents.

    Raises:
        UsageError: It cannot, ``documents`` is a text, or ``top_k`` is below 1.
    """
    reject = partial(require, error=UsageError)  # what the caller gave is wrong, not the settings of a task
    reject(can_rank(task), _NO_RANKING)
    reject(not isinstance(documents, str), "documents is one text, expected a list of texts")
    reject(top_k is None or top_k >= 1, f"top_k is {top_k}, expected at least 1")
    return task


def rank_documents(task: Task[Any], predictions: Sequence[Any], hf_config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns ``corpus_id`` and ``score`` of each prediction, the most relevant first.

    Equal scores keep their order, as in sentence-transformers.

    Args:
        task: The task of the model.
        predictions: A prediction for each document.
        hf_config: The config.json of the model. It may name the function that CrossEncoder applies to a single output.
            Default: a sigmoid.

    Raises:
        UsageError: The task cannot rank, or the function is neither a sigmoid nor the identity.
    """
    output = _ranking_output(task)
    if output is None:
        raise UsageError(_NO_RANKING)
    name, function = "Sigmoid", _stored_activation(hf_config)
    if function is not None:
        name = str(function).rpartition(".")[2]  # of a path such as torch.nn.modules.linear.Identity
    if name not in ("Sigmoid", "Identity"):
        raise UsageError(f"config.json: activation function {function!r} is not supported. Remove it, or call predict")
    relevance = [output.relevance(prediction) for prediction in predictions]
    scores = torch.tensor(relevance)
    is_probability = bool(output.labels)  # of the second of two classes, which needs no sigmoid
    if not is_probability and name == "Sigmoid":
        scores = scores.sigmoid()
    # By the numbers before the sigmoid, which is 1 for all large numbers.
    order = sorted(range(len(relevance)), key=lambda number: -relevance[number])
    return [{"corpus_id": number, "score": scores[number].item()} for number in order]


def _stored_activation(hf_config: Mapping[str, Any]) -> Any:
    """Returns the function that a newer or an older sentence-transformers has stored, or None."""
    stored = hf_config.get("sentence_transformers")
    if isinstance(stored, Mapping) and stored.get("activation_fn") is not None:
        return stored["activation_fn"]
    return hf_config.get("sbert_ce_default_activation_function")
