"""The features of a table for a model, and the input that a model does not read.

They need the model's configuration and tokenizer and no weights, so its tensors may be on the device "meta".
"""

import inspect
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from bert_tasks.data.table import RowTable, Samples, Truncation, cached_features
from bert_tasks.data.unknown_tokens import UnknownTokens
from bert_tasks.environment import installed_version
from bert_tasks.errors import DataError
from bert_tasks.model.task_model import TaskModel
from bert_tasks.storage import sha256_file
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.shared.features import checked_features
from bert_tasks.tasks.shared.fitting import Fitting
from bert_tasks.tasks.shared.windows import Windows

FEATURE_ROWS = 1000  # rows per call of ``Task.features``


def vocabulary_name(model: TaskModel) -> str:
    """Returns the name of a vocabulary, which is the model's or the tokenizer's."""
    tokenizer = str(model.require_tokenizer().name_or_path)
    return model.origin.name if model.origin is not None else tokenizer if tokenizer else "the tokenizer"


def unknown_tokens(samples: Samples, model: TaskModel) -> UnknownTokens:
    """Counts the unknown tokens of a table's features."""
    return UnknownTokens.of_features(samples.features, model.require_tokenizer())


def input_notes(samples: Samples, model: TaskModel, *, rows: int) -> tuple[str, ...]:
    """Returns messages about truncated input and unknown tokens."""
    cuts = Windows.of(model.task).cut_notes(Truncation.of(samples.features, rows=rows))
    return (*cuts, *unknown_tokens(samples, model).notes(vocabulary_name(model)))


def tokenized(table: RowTable, task: Task, model: TaskModel) -> Samples:
    """Returns the table's features, from the cache if the rows were tokenised before.

    A part has the features of the whole table, unless the features of a row depend on the rows around it.

    Raises:
        DataError: A window is longer than the model's positions.
        UsageError: An id of a feature has no embedding.
    """
    if table.part is not None and not Windows.of(task).needs_document_context:
        whole, rows = table.part
        return tokenized(whole, task, model).of_rows(rows)
    key = {
        "task": f"{type(task).__module__}:{type(task).__qualname__}",
        "code": sha256_file(Path(inspect.getfile(type(task)))),
        "labels": list(task.labels),
        "settings": Fitting.of(task).settings(),
        "embeddings": [model.config.vocab_size, model.config.type_vocab_size],  # what the ids are checked against
        "version": version("bert-tasks"),
        **{name: installed_version(name) for name in Windows.of(task).libraries},
    }
    features = cached_features(
        table,
        features=lambda rows, tokenizer: checked_features(task, rows, tokenizer, model.config),
        tokenizer=model.require_tokenizer(),
        key=key,
        batch_size=None if Windows.of(task).needs_document_context else FEATURE_ROWS,
    )
    samples = Samples.of(features, Fitting.of(task).sample, count=len(table))
    longest = int(samples.tokens.max(initial=0))
    if longest > model.config.usable_length:
        raise DataError(
            f"{table.source}: a window has {longest} tokens, the model {model.config.usable_length} positions"
        )
    return replace(samples, tables=tuple(rows for _, rows in table.joined_sources))


def training_samples(table: RowTable, task: Task, model: TaskModel) -> Samples:
    """Returns the features of ``tokenized``, with all rows of a group as one sample."""
    samples, fitting = tokenized(table, task, model), Fitting.of(task)
    return samples.grouped(fitting.groups(table)) if fitting.sample == "group" else samples
