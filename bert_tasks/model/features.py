"""The features of a table for a model, and the input that a model does not read.

They need the model's configuration and tokenizer and no weights, so its tensors may be on the device "meta".
"""

import inspect
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from bert_tasks.data.features import Samples, SampleUnit, Truncation, cached_features
from bert_tasks.data.rows import Rows
from bert_tasks.data.unknown_tokens import UnknownTokens
from bert_tasks.environment import installed_version
from bert_tasks.errors import DataError
from bert_tasks.model.multitask import AnyModel
from bert_tasks.model.windows import features_of
from bert_tasks.outputs.settings import Settings
from bert_tasks.storage import sha256_file

FEATURE_ROWS = 1000  # rows per call of ``Task.features``


def vocabulary_name(model: AnyModel) -> str:
    """Returns the name of a vocabulary, which is the model's or the tokenizer's."""
    tokenizer = str(model.require_tokenizer().name_or_path)
    if model.origin is not None:
        return model.origin.name
    if tokenizer:
        return tokenizer
    return "the tokenizer"


def unknown_tokens(samples: Samples, model: AnyModel) -> UnknownTokens:
    """Counts the unknown tokens of a table's features."""
    return UnknownTokens.of_features(samples.features, model.require_tokenizer())


def input_notes(samples: Samples, model: AnyModel, *, rows: int) -> tuple[str, ...]:
    """Returns messages about truncated input and unknown tokens."""
    return (*cut_notes(samples, model, rows=rows), *unknown_tokens(samples, model).notes(vocabulary_name(model)))


def cut_notes(samples: Samples, model: AnyModel, *, rows: int) -> tuple[str, ...]:
    """Returns messages about truncated input.

    Tasks that read the same texts may give the same message, which is returned once.
    """
    cuts = Truncation.of(samples.features, rows=rows)
    notes: list[str] = []
    for task in model.tasks.values():
        notes += task.cut_notes(cuts)
    return tuple(dict.fromkeys(notes))


def tokenized(table: Rows, model: AnyModel) -> Samples:
    """Returns the table's features, from the cache if the rows were tokenised before.

    A part has the features of the whole table, unless the features of a row depend on the rows around it.

    Raises:
        DataError: A window is longer than the model's positions.
        UsageError: An id of a feature has no embedding.
    """
    needs_document = any(task.needs_document for task in model.tasks.values())
    if table.part is not None and not needs_document:
        # The parts of folds and learning curves differ, but the whole table is tokenized once for all of them.
        whole, rows = table.part
        return tokenized(whole, model).of_rows(rows)
    # All that decides the features. A change of any of it, also of the code, makes the cache compute them again.
    about_tasks = []
    for name, task in model.tasks.items():
        code = [_code_of(part) for part in (type(task), type(task.output))]
        about_tasks.append([name, code, list(task.output.labels), task.settings()])
    key = {
        "tasks": about_tasks,
        "embeddings": [model.config.vocab_size, model.config.type_vocab_size],  # what the ids are checked against
        "version": version("bert-tasks"),
        **{name: installed_version(name) for name in feature_libraries(model)},
    }
    batch_size = None if needs_document else FEATURE_ROWS  # None for the whole table, so that no document is cut
    features = cached_features(
        table,
        features=partial(features_of, model),
        tokenizer=model.require_tokenizer(),
        key=key,
        batch_size=batch_size,
    )
    samples = Samples.of(features, _sample_unit(model), count=len(table))
    # A task of a user may make longer windows than ``max_length``, for which there are no position embeddings.
    longest = int(samples.tokens.max(initial=0))
    if longest > model.config.usable_length:
        raise DataError(
            f"{table.source}: a window has {longest} tokens, the model {model.config.usable_length} positions"
        )
    return replace(samples, tables=tuple(rows for _, rows in table.joined_sources))


def feature_libraries(model: AnyModel) -> tuple[str, ...]:
    """Returns the libraries on whose versions the features depend."""
    libraries: list[str] = []
    for task in model.tasks.values():
        libraries += task.libraries
    return tuple(libraries)


def _code_of(part: type) -> dict[str, str]:
    """Returns each class of the package or of a user that makes up a task or an output, with the digest of its file."""
    digests = {}
    for base in part.__mro__:  # a method that decides the features may be inherited
        if issubclass(base, Settings) and base is not Settings:
            digests[f"{base.__module__}:{base.__qualname__}"] = sha256_file(Path(inspect.getfile(base)))
    return digests


def _sample_unit(model: AnyModel) -> SampleUnit:
    """Returns what a sample is. Several tasks share all windows of a row."""
    only, *others = model.tasks.values()
    if others:
        return "row"
    return only.sample


def training_samples(table: Rows, model: AnyModel) -> Samples:
    """Returns the features of ``tokenized``, with all rows of a group as one sample."""
    samples = tokenized(table, model)
    if _sample_unit(model) != "group":
        return samples
    return samples.grouped(model.one_task().task.groups(table))
