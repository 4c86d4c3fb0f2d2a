"""The task contract from rows over features, logits and loss to metrics.

Owns the class that a task derives from, the types that training, inference and the model share with it, and the base of
the parts that hold everything else about a task, such as how it is reported, detected by ``init`` and rendered.

Shape legend: N tokens, B sequences (windows), S samples (rows or windows), R tokens a head reads, H hidden, L labels.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Literal,
    NotRequired,
    Self,
    TypedDict,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter
from torch import Tensor
from typing_extensions import TypeVar

from bert_tasks.data.columns import Column, Row
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import Head
from bert_tasks.encoder.packing import PackedBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What the logits of a task mean.
#   softmax: classes that exclude each other      sigmoid: labels that are present or absent      value: numbers
#   choice: one logit for each window of a row, with a softmax over these windows
#   position: two logits for each token, each with a softmax over the tokens of a window
#   chain: scores of sequences of labels (a CRF)      vocabulary: a softmax over the vocabulary for each token
OutputKind = Literal["softmax", "sigmoid", "value", "choice", "position", "chain", "vocabulary"]


NOT_WRITTEN: Mapping[str, Any] = MappingProxyType({"exclude": True})  # pydantic's name, so that OpenAPI also lacks it
_LARGEST_SETTING = 2**31 - 1  # torch, Arrow and tokenizers compute with whole numbers of limited size
ON_REQUEST = ("logits", "explanation")  # fields of predictions that only some calls compute


def require(condition: bool, message: str, error: Callable[[str], Exception] = ValueError) -> None:
    """Raises an error with this message if the condition does not hold."""
    if not condition:
        raise error(message)


def typed_setting(task_class: "type[Task[Any]]", name: str, value: Any) -> Any:
    """Returns a value with the type of the field, for example a list as a tuple.

    Raises:
        pydantic.ValidationError: It is of another type. Nothing is converted between texts, numbers and booleans.
    """
    adapter = TypeAdapter[Any](
        get_type_hints(task_class, include_extras=True)[name], config=ConfigDict(allow_inf_nan=False)
    )
    return adapter.validate_json(json.dumps(value, default=str), strict=True)


def float_list(vector: NDArray[np.float32]) -> list[float]:
    """Returns the numbers with the nine digits that identify a float32."""
    return [float(f"{value:.9g}") for value in vector.tolist()]


class Feature(TypedDict):
    """One window of one row, which is flat, so that Arrow stores it as it is.

    Attributes:
        row: Index of the row. The features of a row are neighbours.
        labels: The labels as numbers. Absent (or None, from Arrow) if the row has no label.
        gather_positions: The tokens that a head with logits per token reads, ascending. All if absent or None.
        word_ids: For each of these tokens the number of its word in the row, for ``decode``.
        offsets: For ``compact_logits`` and ``decode``, three numbers per token of a span task, which are its first
            character, last character + 1, and role. Training does not load them.
        lost_tokens, lost_answers: Number of the row's tokens, and answers, that no window holds completely.
        sentence_starts: The tokens at which sentences begin, for a task that makes pairs of sentences.
        fields: More numbers for ``loss``, by name. ``prepare`` makes them, and they are never cached.
        head: The name of the task whose head reads the window, if there are several tasks.

    Example:
        >>> Feature(row=0, input_ids=[101, 7592, 102], token_type_ids=[0, 0, 0], labels=[1.0])
    """

    row: int
    input_ids: list[int]
    token_type_ids: list[int]
    labels: NotRequired[list[float] | None]
    gather_positions: NotRequired[list[int] | None]
    word_ids: NotRequired[list[int] | None]
    offsets: NotRequired[list[int] | None]
    lost_tokens: NotRequired[int]
    lost_answers: NotRequired[int]
    sentence_starts: NotRequired[list[int] | None]
    fields: NotRequired[Mapping[str, Sequence[float]]]
    head: NotRequired[str | None]


@dataclass(frozen=True, kw_only=True)
class LossTerm:
    """One term of a loss, with a sum and the count by which the mean divides it.

    Attributes:
        name, weight: Name of the term, unique in a task, and weight of its mean. Both are the same in every batch.
        total, count: 0-dimensional tensors on the logits' device.

    Example:
        >>> LossTerm(name="words", total=torch.tensor(3.0), count=torch.tensor(2.0))
    """

    name: str
    total: Tensor
    count: Tensor
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class FeatureKeys:
    """Sources of random numbers for ``Task.prepare``, one for each feature.

    They do not depend on batch, process and order of steps.

    Attributes:
        numbers: The number of each feature among all features of its split. In evaluation, a hash of its tokens.
        is_evaluation: True if the features are evaluated. They must look alike in every corpus, so count nothing over
            it.
    """

    seed: int
    epoch: int
    numbers: Sequence[int]
    is_evaluation: bool = False

    def generator(self, i: int) -> np.random.Generator:
        """Returns a generator seeded by seed, epoch and number of the ``i``-th feature."""
        return np.random.default_rng((self.seed, self.epoch, self.numbers[i]))


@dataclass(frozen=True)
class Prediction:
    """The prediction of a task for one row. The frozen dataclass is its own schema.

    Its fields are what ``predict`` returns, the keys of the written JSON, Arrow columns, and the server's OpenAPI
    document. JSON has a field with a default only if its value differs from the default. A field with the metadata
    ``NOT_WRITTEN`` is for metrics and reports only.

    Example:
        >>> ChoicePrediction(label=1, answer="Eat.", score=0.75, scores=(0.25, 0.75)).to_json()
    """

    def to_json(self, *, encode_vector: Callable[[NDArray[np.float32]], Any] = float_list) -> dict[str, Any]:
        """Returns the written fields as plain values, in the order of the fields.

        Args:
            encode_vector: Called with the arrays of vectors. Default: a list of numbers.
        """
        content: dict[str, Any] = _plain_value(self, encode_vector)
        return content


def _plain_value(value: Any, encode_vector: Callable[[NDArray[np.float32]], Any]) -> Any:
    if isinstance(value, np.ndarray):
        return encode_vector(value)
    if is_dataclass(value):
        content = {}
        for field in fields(value):
            item = getattr(value, field.name)
            default = field.default if field.default_factory is MISSING else field.default_factory()
            if not field.metadata.get("exclude") and (default is MISSING or item != default):
                content[field.name] = _plain_value(item, encode_vector)
        return content
    if isinstance(value, Mapping):
        return {key: _plain_value(item, encode_vector) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain_value(item, encode_vector) for item in value]
    return value


# What a task predicts. A model that is loaded by a task's name has predictions of any type for a type checker.
PredictionT = TypeVar("PredictionT", bound=Prediction, default=Any)


class Part:
    """A part of what the package knows about a task, in addition to its contract.

    ``Report``, ``Detection``, ``Rendering``, ``Card``, ``Fitting``, ``HFConfig``, ``Windows`` and ``Explainable`` have
    defaults for every task. ``Task.parts`` names the subclasses that know more.

    Attributes:
        task: The task, or the class of the task for what does not depend on settings.

    Example:
        >>> Report.of(task).table({"accuracy": 0.5})
    """

    def __init__(self, task: Any) -> None:
        self.task = task

    @classmethod
    def of(cls, task: "Task[Any] | type[Task[Any]]") -> Self:
        """Returns this part of a task, which is the task's subclass or the default."""
        return next((subclass for subclass in task.parts if issubclass(subclass, cls)), cls)(task)


@dataclass(frozen=True, kw_only=True)
class Task(ABC, Generic[PredictionT]):
    """The base class of tasks, from rows to features, loss, predictions and metrics.

    A subclass is a frozen dataclass with a ``name`` and the abstract members. Its fields are the settings of the task,
    which a recipe may set under ``[settings]`` and ``config.json`` stores, so they hold plain values. There is one
    instance for each model.

    Attributes:
        name: The name of the task in recipes and in ``config.json``.
        parts: The parts that differ from their defaults.
        labels: Names of the classes, in the order of the logits. Default: the labels of the training rows.
        max_length: Maximum length of a window in tokens, including special tokens.

    Example:
        >>> task.features([{"text": "Cold soup."}], tokenizer)[0]["token_type_ids"]
        [0, 0, 0, 0, 0]
    """

    name: ClassVar[str]
    parts: ClassVar[tuple[type[Part], ...]] = ()
    labels: tuple[str, ...] = ()
    max_length: int = 128

    def __post_init__(self) -> None:
        for name, annotation in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if get_origin(annotation) is Literal and value not in get_args(annotation):
                raise ValueError(f"{name} is {value!r}, expected one of {', '.join(map(repr, get_args(annotation)))}")
            if isinstance(value, int) and value > _LARGEST_SETTING:
                raise ValueError(f"{name} is {value}, expected at most {_LARGEST_SETTING}")
        require(not isinstance(self.labels, str), f"labels is the text {self.labels!r}, expected a tuple of names")
        repeated = sorted({repr(label) for label in self.labels if self.labels.count(label) > 1})
        require(not repeated, f"labels: {', '.join(repeated)} appears more than once")
        require(
            self.max_length >= 3,
            f"max_length is {self.max_length}, expected at least 3 (two special tokens and one more)",
        )

    @property
    @abstractmethod
    def columns(self) -> tuple[Column, ...]:
        """The columns of a row, including its labels. Recipes may map them to other names."""

    @abstractmethod
    def features(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[Feature]:
        """Returns the windows of rows. They are cached, so they must not depend on chance.

        Args:
            rows: Rows in canonical form. Labels may be missing.
            tokenizer: The tokenizer of the model.

        Returns:
            At least one feature for each row, in row order. ``row`` counts from 0 within ``rows``. If each window is a
            sample, a window may hold several rows and belongs to the first of them.

        Raises:
            DataError: The task cannot read a row.
        """

    def prepare(
        self,
        features: Sequence[Feature],
        keys: FeatureKeys,
        corpus: Sequence[Mapping[str, Any]],
        tokenizer: "PreTrainedTokenizerBase",
    ) -> Sequence[Feature]:
        """Returns the features as a step of training or labelled evaluation sees them. Default: unchanged.

        A task that masks tokens or draws random partners overrides this method.

        Args:
            features: Features of ``features``. The windows of a row are neighbours.
            keys: A source of random numbers for each feature.
            corpus: All features of the split. In evaluation, only their content decides their order.
            tokenizer: The tokenizer of the model, for the ids of special tokens.

        Returns:
            As many features in the same order, each with at most ``max_length`` tokens.
        """
        return features

    @abstractmethod
    def head(self, config: EncoderConfig) -> Head:
        """Returns a new head. Its constructor draws its weights from torch's global generator."""

    @property
    def output_kind(self) -> OutputKind:
        """Meaning of the logits, which decides the divergence of distillation."""
        return "softmax"

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        """Returns the count of each term of ``loss`` for a batch of these features, by the name of the term.

        Training needs the counts of a whole step before its first backward pass. Default: the number of labels, for one
        term with the name of the task.
        """
        return {self.name: float(sum(len(labels) for feature in features if (labels := feature.get("labels"))))}

    @abstractmethod
    def loss(self, logits: Any, batch: PackedBatch) -> tuple[LossTerm, ...]:
        """Returns the terms of the loss, summed over the labelled items of a batch, with the number of these items.

        If a batch has no labelled item for a term, the term has count 0 and a total of 0 times the logits, because
        processes that train together wait for each other's gradients.

        Args:
            logits: The output of the head, a tensor or a ``HeadOutput``.
            batch: The batch with its labels.
        """

    def compact_logits(self, logits: Sequence[Any], features: Sequence[Feature]) -> Sequence[Tensor]:
        """Returns what ``decode`` needs of the logits. Default: the logits.

        Only the result is copied to the host, so a task with many logits overrides this method.

        Args:
            logits: float32 logits of each feature, ``[L]`` or ``[R, L]``, on the device.
            features: The features. In evaluation they are the result of ``prepare``.
        """
        return logits

    @abstractmethod
    def decode(
        self, compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]
    ) -> Sequence[PredictionT]:
        """Returns one prediction for each row, in row order.

        Args:
            compact: The result of ``compact_logits`` for each feature, on the CPU.
            features: The features without tokens: ``row`` (from 0 within ``rows``), ``gather_positions``, ``word_ids``
                and ``offsets``.
            rows: The rows, with or without labels.
        """

    @abstractmethod
    def metrics(self, predictions: Sequence[PredictionT], rows: Sequence[Row]) -> dict[str, float]:
        """Returns metrics with the names and scales of Hugging Face's evaluate.

        Args:
            predictions: Predictions of ``decode``.
            rows: As many rows. Rows without labels do not count.
        """

    @property
    @abstractmethod
    def primary_metric(self) -> str:
        """The key of ``metrics`` by which training chooses the best checkpoint."""


def is_dynamic(task: Task[Any]) -> bool:
    """Returns True if ``prepare`` is overridden, so that steps may see other tokens."""
    return type(task).prepare is not Task.prepare


def labelled(rows: Sequence[Row], predictions: Sequence[PredictionT], column: str) -> list[tuple[Row, PredictionT]]:
    """Returns the rows that have labels in this column, each with its prediction."""
    pairs = zip(rows, predictions, strict=True)
    return [(row, prediction) for row, prediction in pairs if row.get(column) is not None]
