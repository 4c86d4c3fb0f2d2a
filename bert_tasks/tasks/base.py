"""The task contract: rows -> features -> logits -> loss -> predictions -> metrics.

Owns the class that a task derives from and the types that training, inference and the model share with it. Everything
that the package knows about a task is a member of its class: other packages ask the task and name none.

Shape legend: N tokens, B sequences (windows), S samples (rows or windows), R tokens a head reads, H hidden, L labels.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Literal, NotRequired, Self, TypedDict, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from typing_extensions import TypeVar

from bert_tasks.data.columns import Column, Row
from bert_tasks.data.profile import ColumnProfile
from bert_tasks.data.table import RowTable, Truncation
from bert_tasks.data.writers import FORMS
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import Head, HeadKind
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import UsageError
from bert_tasks.metrics.tables import MetricTable
from bert_tasks.tasks.shared.detection import Suggestion, TaskGuess, UserHints, suggested_length
from bert_tasks.tasks.shared.outputs import DISTILLATION, softmax_divergence
from bert_tasks.tasks.shared.report import ReportSections

Item = TypeVar("Item", bound=Hashable)

# For people, about a saved model whose head transformers lacks.
NO_HF_HEAD = (
    "transformers lacks this model's head: use the folder with bert_tasks. Pipelines of transformers end in an error "
    "or give other predictions, with LABEL_0, LABEL_1, ... in place of the labels."
)

_EXAMPLE_TEXTS = (
    "The room was clean and the staff were kind.",
    "We waited an hour and the soup was cold.",
    "The train leaves at nine from platform two.",
)


NOT_WRITTEN: Mapping[str, Any] = MappingProxyType({"exclude": True})  # pydantic's name, so that OpenAPI lacks it, too
ON_REQUEST = ("logits", "explanation")  # fields of predictions that only some calls compute


def float_list(vector: NDArray[np.float32]) -> list[float]:
    """Returns the numbers with nine digits, which name a float32 exactly; in double precision they would have more."""
    return [float(f"{value:.9g}") for value in vector.tolist()]


class Feature(TypedDict):
    """One window of one row: flat, so that Arrow stores it as it is.

    Attributes:
        row: index of the row it came from; features of a row are neighbours.
        labels: as numbers; absent (or None, from Arrow) where the row has no label.
        gather_positions: the tokens that a head with logits per token reads, ascending; absent (or None): all.
        word_ids: for each of these tokens the number of its word in the row, for ``decode``.
        offsets: three numbers per token of a span task: its first character, last character + 1, and role; for
            ``compact_logits`` and ``decode``. Training does not load ``offsets``.
        lost_tokens: how many of the row's tokens no window holds.
        lost_answers: how many of the row's answers no window holds whole, so that training does not see them.
        sentence_starts: the tokens at which sentences begin, for a task that makes pairs of them.
        fields: further numbers for ``loss``, by name; never cached, ``prepare`` makes them.
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


@dataclass(frozen=True, kw_only=True)
class LossTerm:
    """One term of a loss: a sum and what the mean divides it by.

    Attributes:
        name: of the term, unique within a task and the same in every batch.
        total, count: 0-dimensional tensors on the logits' device.
        weight: of the term's mean in the loss of a step; the same in every batch.
    """

    name: str
    total: Tensor
    count: Tensor
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class FeatureKeys:
    """Sources of random numbers for ``Task.prepare``: one for each feature, in any batch, process and order of steps.

    Attributes:
        numbers: of each feature among all features of its split, in evaluation a hash of its tokens.
        is_evaluation: the features are evaluated. They must look alike in every corpus, so count nothing over it.
    """

    seed: int
    epoch: int
    numbers: Sequence[int]
    is_evaluation: bool = False

    def generator(self, i: int) -> np.random.Generator:
        """A new generator for the ``i``-th feature, seeded by (seed, epoch, number of the feature)."""
        return np.random.default_rng((self.seed, self.epoch, self.numbers[i]))


@dataclass(frozen=True)
class Prediction:
    """What a task predicts for one row: a frozen dataclass that is its own schema.

    Its fields are what ``predict`` returns, the keys of the written JSON, Arrow columns, and the server's OpenAPI
    document. A field with a default is optional: JSON has it only if its value differs from the default. A field with
    the metadata ``NOT_WRITTEN`` is for metrics and reports only.
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


@dataclass(frozen=True, kw_only=True)
class Task(ABC, Generic[PredictionT]):
    """One kind of task; one frozen instance per model, whose fields are its settings.

    A subclass is a frozen dataclass with a ``name`` and the nine abstract members: ``columns``, ``features``, ``head``,
    ``loss``, ``counts``, ``decode``, ``metrics``, ``primary_metric`` and ``hf_config``. All other members have
    defaults, with which a task trains, predicts, and is reported, exported and served; it overrides those that it can
    improve. The members are in groups: rows and features, the head, the loss, predictions, metrics, settings, reports,
    output formats, the server and model cards, and the command ``init``. The fields are what a recipe may state under
    ``[settings]`` and what ``config.json`` stores, so they hold plain values only.

    Attributes:
        aliases: further names that users may write for the task, those of the hub's pipelines.
        tuned: the fields that are fitted to data, never stated by a user.
        sample: what has one joint loss and counts for ``batch_size``: a row (all its windows), or each window.
        default_head: the head of transformers that models of this task have; None where transformers has none.
            A folder of transformers is read as the first built-in task with its head.
        pipeline_tag: the hub's name of the task, for model cards; None where the hub has none.
        file_formats: the extensions that ``render`` knows.
        row_formats: the formats that predictions can be written in row by row.
        renders_labels: ``render`` shows the labels of the rows beside the predictions.
        rejected_columns: columns that a request to the server must not hold -> why.
        row_needs: in words, what rows ``detect`` looks for; empty: ``init`` cannot detect the task.
        has_dense_labels: a row trains many of its tokens, so that ``init`` suggests a higher learning rate and, for
            many rows, fewer epochs.
        lower_is_better: the keys of ``metrics`` for which lower is better; for all others higher is better.
        neutral_metrics: the keys of ``metrics`` that are no scores (a number of questions, a threshold).
        labels: the names of the classes, which fix their order; without them they are found in the training rows.
        max_length: of the longest window in tokens, special tokens included.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    fitted_fields: ClassVar[tuple[str, ...]] = ()
    sample: ClassVar[Literal["row", "window"]] = "row"
    default_head: ClassVar[HeadKind | None] = None
    pipeline_tag: ClassVar[str | None] = None
    file_formats: ClassVar[tuple[str, ...]] = ()
    row_formats: ClassVar[tuple[str, ...]] = FORMS
    renders_labels: ClassVar[bool] = False
    rejected_columns: ClassVar[Mapping[str, str]] = MappingProxyType({})
    row_needs: ClassVar[str] = ""
    has_dense_labels: ClassVar[bool] = False
    lower_is_better: ClassVar[frozenset[str]] = frozenset()
    neutral_metrics: ClassVar[frozenset[str]] = frozenset()
    labels: tuple[str, ...] = ()
    max_length: int = 128

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if get_origin(kind) is Literal and value not in get_args(kind):
                raise ValueError(f"{name} is {value!r}, expected one of {', '.join(map(repr, get_args(kind)))}")
        if isinstance(self.labels, str):
            raise ValueError(f"labels is the text {self.labels!r}, expected a tuple of names")
        repeated = sorted({label for label in self.labels if self.labels.count(label) > 1})
        if repeated:
            raise ValueError(f"labels: {', '.join(map(repr, repeated))} appears more than once")
        if self.max_length < 3:
            raise ValueError(f"max_length is {self.max_length}, expected at least 3 (two special tokens and one more)")

    # Rows and features.

    @property
    @abstractmethod
    def columns(self) -> tuple[Column, ...]:
        """The columns of a row, those of the labels included; recipes may map them to other names."""

    @abstractmethod
    def features(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[Feature]:
        """The windows of some rows, deterministic, because they are cached.

        Args:
            rows: in canonical form; labels may be missing.
            tokenizer: of the model.

        Returns:
            At least one feature for each row, in row order; ``row`` counts from 0 within ``rows``. Where
            samples are windows, a window may hold several rows; it belongs to the first of them.

        Raises:
            DataError: a row cannot be read for this task.
        """

    def prepare(
        self,
        features: Sequence[Feature],
        keys: FeatureKeys,
        corpus: Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
    ) -> Sequence[Feature]:
        """The features as a step sees them, by default unchanged. Called for training and for labelled evaluation.

        A task that masks tokens or draws random partners overrides this.

        Args:
            features: as ``features`` made them; the windows of a row are neighbours.
            keys: a source of random numbers for each feature.
            corpus: all features of the split, in evaluation in an order that only their content decides.
            tokenizer: of the model, for the ids of special tokens.

        Returns:
            As many features in the same order, each of at most ``max_length`` tokens.
        """
        return features

    @property
    def is_dynamic(self) -> bool:
        """Whether a step may see tokens that are not in the features, because ``prepare`` is overridden."""
        return type(self).prepare is not Task.prepare

    def check_split(self, rows: RowTable, source: str) -> None:
        """Checks what only all rows of a split can tell, before a run begins; by default nothing.

        Args:
            rows: of the training set or of a validation set.
            source: their name in messages.

        Raises:
            DataError: ``prepare`` would fail for these rows.
        """

    @property
    def feature_libraries(self) -> tuple[str, ...]:
        """Further libraries whose versions decide what ``features`` makes; they are a part of the cache's key."""
        return ()

    @property
    def needs_document_context(self) -> bool:
        """Whether the features of a row depend on the rows around it: then all rows come in one call."""
        return False

    def cut_notes(self, cuts: Truncation) -> tuple[str, ...]:
        """Sentences for people about rows of which no window holds everything; none where nothing was cut."""
        are, were = ("is", "was") if cuts.cut_rows == 1 else ("are", "were")
        note = f"rows {are} longer than max_length = {self.max_length} tokens and {were} cut"
        return (f"{cuts.share(cuts.cut_rows)} {note}",) if cuts.cut_rows else ()

    # The head, here and in transformers.

    @abstractmethod
    def head(self, config: EncoderConfig) -> Head:
        """A new head: ``select(layout)`` names the rows it reads, ``forward(hidden, layout, embeddings)`` gives logits.

        Its weights start as its constructor leaves them, which draws random ones from torch's global generator.
        """

    def generator(self) -> "tuple[Task, float] | None":
        """The task of a smaller model that makes the inputs of training, and its width as a share of the model's."""
        return None

    @property
    def hf_head(self) -> HeadKind | None:
        """The head of transformers that has the parameters of ours with these settings; None where there is none."""
        return self.default_head

    @property
    def has_hf_head(self) -> bool:
        """Whether transformers has the head, so that it computes the same logits from a saved folder.

        Otherwise the folder holds the labels under our key only: transformers must not print them beside the scores of
        a head that it draws at random.
        """
        return self.hf_head is not None

    @property
    @abstractmethod
    def hf_config(self) -> dict[str, Any]:
        """The entries of transformers' config for this task: id2label, label2id, problem_type."""

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any], labels: tuple[str, ...], usable_length: int) -> dict[str, Any]:
        """The fields that a config of transformers implies; ``labels`` are its id2label, empty where it has none."""
        return {"labels": labels, "max_length": min(cls.max_length, usable_length)}

    # The loss.

    @abstractmethod
    def loss(self, logits: Any, batch: PackedBatch) -> tuple[LossTerm, ...]:
        """The terms of the loss, each summed over the labelled items of the batch, with the number of these items.

        A batch without labelled items for a term has that term all the same, with count 0 and a total that is 0 times
        the logits, because processes that train together wait for each other's gradients.

        Args:
            logits: what the head returned for the batch: a tensor, or a ``VocabularyOutput``.
            batch: with the labels.
        """

    @abstractmethod
    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        """The count of each term of ``loss`` for a batch of these features, under the term's name.

        Training needs the counts of a whole step before its first backward pass.
        """

    def distillation_loss(self, student: Any, teacher: Any, batch: PackedBatch, temperature: float) -> LossTerm:
        """How far a student's logits are from a teacher's for the same batch, with ``distillation_count``.

        The default is the divergence of the softmax of each row of logits. A task whose logits mean something else, or
        of which a window has many rows, overrides both members.

        Args:
            student, teacher: logits as ``loss`` gets them; only those of the student have a gradient.
            batch: what they were computed from, with or without labels.
            temperature: logits of classes are divided by it; see ``softmax_divergence``.
        """
        total = softmax_divergence(student, teacher, temperature)
        return LossTerm(name=DISTILLATION, total=total, count=student.new_full((), len(batch.label_counts)))

    def distillation_count(self, features: Sequence[Feature]) -> float:
        """The count of ``distillation_loss`` for a batch of these features, labelled or not; default: the windows.

        Raises:
            UsageError: with these settings the task cannot learn from a teacher.
        """
        return float(len(features))

    def mean_logits(self, logits: Iterable[Any], windows: Sequence[int]) -> Any:
        """Logits of the mean of several models' predictions for a batch, so that all else is as for one model.

        Args:
            logits: of each model, as ``loss`` gets them; they may be computed when they are asked for, once.
            windows: the number of sequences of each row; where samples are rows, these are all of the row.

        Raises:
            UsageError: the task has no such mean.
        """
        raise UsageError(f"{self.name} has no mean of the predictions of several models: name one of the models")

    # Predictions.

    def inputs_of(self, feature: Feature, tokenizer: PreTrainedTokenizerBase) -> Iterable[Feature]:
        """What the model gets, one by one, to predict for a feature, of which ``decode`` sees the results together.

        Default: the feature itself. A task whose model reads a feature several times overrides this.
        """
        return (feature,)

    def compact_logits(self, logits: Sequence[Any], features: Sequence[Feature]) -> Sequence[Tensor]:
        """What ``decode`` needs of each feature's float32 logits (``[L]``, or ``[R, L]``), still on their device.

        A task whose logits are many overrides this, so that only the result is copied to the host. In evaluation the
        features are those of ``prepare``.
        """
        return logits

    @abstractmethod
    def decode(
        self, compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]
    ) -> Sequence[PredictionT]:
        """One prediction per row, in row order.

        Args:
            reduced: what ``compact_logits`` gave for each feature, on the CPU.
            features: without tokens; ``row`` (from 0 within ``rows``), ``gather_positions``, ``word_ids`` and
                ``offsets`` are there.
            rows: the rows, with or without labels.
        """

    def with_logits(
        self, predictions: Sequence[PredictionT], compact: Sequence[Tensor], features: Sequence[Feature]
    ) -> Sequence[PredictionT]:
        """The predictions of ``decode`` with the logits that they were made of.

        Raises:
            UsageError: the task has none for a row.
        """
        raise UsageError(f"{self.name} gives no logits: predict without them")

    def with_texts(
        self, predictions: Sequence[PredictionT], tokenizer: PreTrainedTokenizerBase
    ) -> Sequence[PredictionT]:
        """The predictions of ``decode`` with the texts of tokens that they name by id; default: unchanged."""
        return predictions

    def same_predictions(self, predictions: Sequence[PredictionT], others: Sequence[PredictionT]) -> list[bool]:
        """Whether two models agree, for each label, number or span that they predict for the same rows.

        Export to int8 keeps a graph only if enough of the predictions stay the same. The default compares ``to_json``
        without floating-point numbers, which are scores.

        Args:
            predictions: of the model.
            others: of the model that is compared with it, in the same order.

        Returns:
            One value for each row, or for each word or other item that has a prediction of its own.

        Raises:
            DataError: these predictions cannot show whether the models agree.
        """
        return [
            _without_scores(one.to_json()) == _without_scores(other.to_json())
            for one, other in zip(predictions, others, strict=True)
        ]

    # Metrics.

    @abstractmethod
    def metrics(self, predictions: Sequence[PredictionT], rows: Sequence[Row]) -> dict[str, float]:
        """Metrics with the names and scales of Hugging Face's evaluate; of what was decided, without fitted values.

        Args:
            predictions: as ``decode`` gave them.
            rows: as many; those without a label do not count.
        """

    @property
    @abstractmethod
    def primary_metric(self) -> str:
        """The key of ``metrics`` by which the best checkpoint is chosen."""

    def metric_table(self, metrics: Mapping[str, float]) -> MetricTable:
        """What ``metrics`` gave (and the loss) for people: each number once, those of single classes in a table."""
        return MetricTable(overall=metrics)

    @property
    def curve_metrics(self) -> tuple[str, ...]:
        """The keys of ``metrics`` that a report draws as learning curves."""
        return (self.primary_metric,)

    # Settings, and values fitted to data.

    def settings(self) -> dict[str, Any]:
        """The fields a user states: all but ``labels`` (stored apart) and what is fitted to data."""
        names = [field.name for field in fields(self) if field.name not in ("labels", *self.fitted_fields)]
        return {name: getattr(self, name) for name in names}

    @classmethod
    def compatible_fields(cls, known: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the known fields that hold beside fields which a caller gives; they are all but the given ones.

        A task whose fields exclude each other, or follow the labels' order, overrides this.
        """
        return {name: value for name, value in known.items() if name not in given}

    def drop_fitted_values(self) -> Self:
        """Returns the task with its labels and settings alone, without the values of ``fitted_fields``."""
        return type(self)(labels=self.labels, **self.settings())

    def fit_to_train(self, rows: Iterable[Row]) -> Self:
        """Returns the task with its ``fitted_fields`` computed from the training rows."""
        return self

    def tune_on_validation(self, predictions: Sequence[PredictionT], rows: Sequence[Row]) -> Self:
        """The task with decision thresholds chosen on validation predictions."""
        return self

    # Reports.

    def report_sections(self, predictions: Sequence[PredictionT], rows: Sequence[Row]) -> ReportSections | None:
        """What a report shows of the labelled rows; None: only the metrics, curves and settings of the run."""
        return None

    def collapse(self, predictions: Sequence[PredictionT], rows: Sequence[Row]) -> str | None:
        """What the model predicts for every row although the labels differ, such as "predicts 'calm' for every row".

        None where the predictions differ, where all labels are equal, and where a task has no such rule. Rows without
        a label do not count.
        """
        return None

    @property
    def collapse_remedies(self) -> tuple[str, ...]:
        """Settings that are not in use and may keep a model from predicting one label only, as a recipe states them."""
        return ()

    # Output formats.

    def vector_columns(self, config: EncoderConfig) -> Mapping[str, int]:
        """The fields of ``to_json`` that are vectors, as base64 of float32 numbers, and how many numbers each has."""
        return {}

    def check_render(self, extension: str, rows: Iterable[Row]) -> tuple[str, ...]:
        """Checks rows that ``render`` will get, before they are predicted.

        Args:
            extension: one of ``file_formats``.
            rows: in the order in which they will be predicted.

        Returns:
            Sentences for people about what the format cannot hold, so that ``render`` changes it.

        Raises:
            DataError: the format cannot hold these rows.
        """
        return ()

    def render(self, extension: str, predictions: Sequence[PredictionT], rows: Sequence[Row]) -> Mapping[str, str]:
        """The predictions in one of ``file_formats``.

        Returns:
            Suffix of a file name -> text of the file; the suffix "" is the file that was asked for.

        Raises:
            UsageError: the task does not have this format.
        """
        raise UsageError(f"{self.name} has no output format {extension!r}")

    # The server and model cards.

    @property
    def prediction_type(self) -> type[Prediction]:
        """The dataclass of the task's predictions. Default: the type argument of ``Task``."""
        for base in type(self).__mro__:
            for argument in (part for generic in getattr(base, "__orig_bases__", ()) for part in get_args(generic)):
                if isinstance(argument, type) and issubclass(argument, Prediction):
                    return argument
        return Prediction

    @property
    def prediction_fields(self) -> tuple[str, ...]:
        """The fields that predictions with these settings have, without those that are computed on request only."""
        names = [field.name for field in fields(self.prediction_type) if not field.metadata.get("exclude")]
        return tuple(name for name in names if name not in ON_REQUEST)

    @property
    def example_rows(self) -> Sequence[Row]:
        """Three rows without labels, in plain English, to try a model with, for the server and model cards."""
        columns = [column for column in self.columns if column.required]
        return [
            {column.name: text.split() if column.kind == "words" else text for column in columns}
            for text in _EXAMPLE_TEXTS
        ]

    def pipeline_inputs(self, row: Row) -> Sequence[Any]:
        """What a tokenizer of transformers gets of a row, for model cards: texts, or lists of texts."""
        return [row[column.name] for column in self.columns if column.required]

    @property
    def limits(self) -> tuple[str, ...]:
        """Sentences for the model card on what these settings leave out, besides ``max_length``."""
        return ()

    # The command init.

    @classmethod
    def detect(cls, profiles: Sequence[ColumnProfile], rows: Sequence[Row], hints: UserHints) -> TaskGuess | None:
        """How rows with unknown columns can be read for this task; ``init`` asks this of every built-in task.

        Args:
            profiles: what is in each column.
            rows: a sample of the rows, as the file has them.
            hints: what the user says about the columns.

        Returns:
            The columns and settings that fit best; None where none fit, or where a task has no such rule.
        """
        return None

    @classmethod
    def suggested_settings(cls, words: int, longest: int) -> list[Suggestion]:
        """The lengths with which ``init`` starts a recipe.

        Args:
            words: how many words and punctuation marks 95 of 100 rows have at most.
            longest: how many tokens the model reads at most.
        """
        comment = f"tokens; 95 of 100 rows have at most {words} words and marks"
        return [Suggestion("max_length", suggested_length(words, longest), comment)]


def _without_scores(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_scores(item) for key, item in value.items() if not isinstance(item, float)}
    if isinstance(value, list | tuple):
        return [_without_scores(item) for item in value if not isinstance(item, float)]
    return value


def labelled(rows: Sequence[Row], predictions: Sequence[PredictionT], column: str) -> list[tuple[Row, PredictionT]]:
    """The rows that have labels in this column, each with its prediction."""
    pairs = zip(rows, predictions, strict=True)
    return [(row, prediction) for row, prediction in pairs if row.get(column) is not None]


def sole_prediction(predictions: Iterable[Item], labels: Iterable[Hashable]) -> Item | None:
    """The prediction that all rows (or words) share although their labels differ; None if there is no such one."""
    found = set(predictions)
    return found.pop() if len(found) == 1 and len(set(labels)) > 1 else None
