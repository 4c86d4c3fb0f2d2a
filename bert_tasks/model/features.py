"""The features of a table for a model, and the input that a model does not read.

A model is described by its configuration and its tokenizer, so that neither weights nor torch are needed.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from bert_tasks.checkpoints.hub import Origin, origin, resolve
from bert_tasks.checkpoints.stored_tokenizers import open_tokenizer
from bert_tasks.checkpoints.tokenizers import with_segments
from bert_tasks.data.table import RowTable, Samples, Truncation, cached_features
from bert_tasks.data.unknown_tokens import UnknownTokens
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.environment import installed_version
from bert_tasks.errors import DataError
from bert_tasks.families import encoder_config, new_hf_config
from bert_tasks.model.pretrained import CheckpointFolder, check_fits
from bert_tasks.storage import sha256_file
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.shared.features import checked_features
from bert_tasks.tasks.shared.fitting import Fitting
from bert_tasks.tasks.shared.windows import Windows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FEATURE_ROWS = 1000  # rows per call of ``Task.features``
_MOST_TOKENS = 2**31 - 1


class Described(Protocol):
    """A model, or a description of it."""

    @property
    def task(self) -> Task: ...
    @property
    def config(self) -> EncoderConfig: ...
    @property
    def origin(self) -> Origin | None: ...
    def require_tokenizer(self) -> "PreTrainedTokenizerBase": ...


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """The facts about a model that need no weights."""

    task: Task
    config: EncoderConfig
    origin: Origin | None
    tokenizer: "PreTrainedTokenizerBase"

    def require_tokenizer(self) -> "PreTrainedTokenizerBase":
        return self.tokenizer

    @classmethod
    def from_pretrained(cls, name: str | Path, *, task: Task, revision: str | None = None) -> Self:
        """Describes the model of ``TaskModel.from_pretrained`` without its weights.

        Raises:
            CheckpointError: Files are missing or damaged, or the family is not supported.
            UsageError: The family does not have the task's head or length.
        """
        folder = CheckpointFolder.open(resolve(name, revision=revision, weights=False))
        config = encoder_config(folder.hf_config)
        check_fits(task, folder.hf_config, config)
        tokenizer = open_tokenizer(folder.tokenizer_path, vocab_size=config.vocab_size, second=config.second_segment)
        model_origin = origin(name, folder.path, revision=revision)
        return cls(task=task, config=config, origin=model_origin, tokenizer=tokenizer)

    @classmethod
    def from_config(cls, settings: Mapping[str, Any], *, task: Task, tokenizer: str | Path) -> Self:
        """Describes the model that ``TaskModel.from_config`` makes.

        Raises:
            CheckpointError, UsageError: See ``from_pretrained``.
        """
        opened = new_tokenizer(settings, tokenizer)
        hf_config = config_with_tokenizer(settings, opened)
        config = encoder_config(hf_config)
        check_fits(task, hf_config, config)
        return cls(task=task, config=config, origin=None, tokenizer=opened)


def new_tokenizer(settings: Mapping[str, Any], name: str | Path) -> "PreTrainedTokenizerBase":
    """Returns the tokenizer of a new model, with the segments of its family.

    Raises:
        CheckpointError: There is no such tokenizer or family.
    """
    second = encoder_config(new_hf_config(settings)).second_segment
    opened = open_tokenizer(resolve(name, weights=False), vocab_size=_MOST_TOKENS, second=second)
    return with_segments(opened, second=second)


def config_with_tokenizer(settings: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """Returns a new model's configuration with its tokenizer's vocabulary and ids.

    Raises:
        CheckpointError: An unknown family or field, or a value that does not fit.
    """
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    return new_hf_config(
        settings,
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        special_ids={name: number for name, number in special.items() if number is not None},
    )


def vocabulary_name(model: Described) -> str:
    """Returns the name of a vocabulary, which is the model's or the tokenizer's."""
    tokenizer = str(model.require_tokenizer().name_or_path)
    return model.origin.name if model.origin is not None else tokenizer if tokenizer else "the tokenizer"


def unknown_tokens(samples: Samples, model: Described) -> UnknownTokens:
    """Counts the unknown tokens of a table's features."""
    return UnknownTokens.of_features(samples.features, model.require_tokenizer())


def input_notes(samples: Samples, model: Described, *, rows: int) -> tuple[str, ...]:
    """Returns messages about truncated input and unknown tokens."""
    cuts = Windows.of(model.task).cut_notes(Truncation.of(samples.features, rows=rows))
    return (*cuts, *unknown_tokens(samples, model).notes(vocabulary_name(model)))


def tokenized(table: RowTable, task: Task, model: Described) -> Samples:
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


def training_samples(table: RowTable, task: Task, model: Described) -> Samples:
    """Returns the features of ``tokenized``, with all rows of a group as one sample."""
    samples, fitting = tokenized(table, task, model), Fitting.of(task)
    return samples.grouped(fitting.groups(table)) if fitting.sample == "group" else samples
