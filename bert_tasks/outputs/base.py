"""The contract of outputs: from logits to everything else.

Owns the class that an output derives from, and the terms of a loss. A task names its output. The output has the labels
and every setting that decides what logits mean.

Shape legend: N tokens, B sequences (windows), S samples (rows or windows), R tokens a head reads, L labels.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, get_type_hints

from torch import Tensor

from bert_tasks.data.columns import Column, Row
from bert_tasks.data.writers import FORMS
from bert_tasks.encoder.config import EncoderConfig, HeadKind
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import UsageError
from bert_tasks.metrics.tables import MetricTable
from bert_tasks.outputs.explanation import ExplainedLogit, Explanation
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.files import FileFormat
from bert_tasks.outputs.hf_config import label_config
from bert_tasks.outputs.prediction import ON_REQUEST, Prediction, PredictionT, without_scores
from bert_tasks.outputs.sections import ReportSections
from bert_tasks.outputs.settings import Settings, require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class LossTerm:
    """One term of a loss, with a sum and the count by which the mean divides it.

    ``Output.loss`` returns sums instead of means, because a step may consist of several batches on several processes.
    Only the sum of all totals, divided by the sum of all counts, is the mean over the whole step, however it is split.

    Attributes:
        name: Name of the term, unique in a loss, and the same in every batch.
        total: Sum of the losses of the labelled items, a 0-dimensional tensor on the logits' device, with a gradient.
        count: The divisor of the mean, a 0-dimensional tensor on the logits' device.
        weight: Weight of the mean in the loss, the same in every batch. Default: 1.

    Examples:
        >>> LossTerm(name="tags", total=torch.tensor(3.0), count=torch.tensor(2.0))
    """

    name: str
    total: Tensor
    count: Tensor
    weight: float = 1.0


def no_loss(name: str, logits: Tensor, *, weight: float = 1.0) -> LossTerm:
    """Returns a term without labelled items, which is 0 times the logits.

    ``Output.loss`` returns it for a batch without labels, instead of leaving the term out. Processes that train
    together wait for each other's gradients, so every batch needs a gradient for every parameter.

    Args:
        name: Name of the term.
        logits: The logits of the head, of any shape.
        weight: Weight of the term, as in the other batches.

    Returns:
        A term with the total 0 and the count 0.

    Examples:
        >>> no_loss("tags", torch.ones(2, 3)).total
        tensor(0.)
    """
    return LossTerm(name=name, total=logits.sum() * 0.0, count=logits.new_zeros(()), weight=weight)


@dataclass(frozen=True, kw_only=True)
class Output(Settings, ABC, Generic[PredictionT]):
    """The base class of outputs, from logits to loss, predictions, metrics, report and files.

    A subclass is a frozen dataclass with a ``name`` and the abstract members. Its fields are settings, which stand
    beside the task's in ``[settings]`` of a recipe and in config.json, so they hold plain values. Fields made by
    ``fitted`` are fitted to data instead.

    Attributes:
        labels: Names of the classes, in their order. Default: the labels of the training rows, whole
            numbers by their value, and others by their text.
        name: The name of the output, and of the term of its loss.
        prediction: The dataclass of its predictions.
        has_labels: True if a model has named labels, which it takes from the training rows if nobody names them.
        head_kind: The head of transformers that has the parameters of this output's head. None if there is none.
        pipeline_tag: The name of the task on the Hugging Face Hub. None if the hub has none.
        lower_is_better: Metrics for which lower is better. For all others higher is better.
        neutral_metrics: Metrics that are no scores (a number of questions, a threshold).
        row_formats: Formats in which predictions can be written row by row.
        files: Extension -> the format of a file with the predictions of all rows, such as SQuAD's.

    Examples:
        >>> task.output.metric_table({"accuracy": 0.5})
    """

    name: ClassVar[str]
    prediction: ClassVar[type[Prediction]] = Prediction
    has_labels: ClassVar[bool] = True
    head_kind: ClassVar[HeadKind | None] = None
    pipeline_tag: ClassVar[str | None] = None
    lower_is_better: ClassVar[frozenset[str]] = frozenset()
    neutral_metrics: ClassVar[frozenset[str]] = frozenset()
    row_formats: ClassVar[tuple[str, ...]] = FORMS
    files: ClassVar[Mapping[str, FileFormat]] = MappingProxyType({})
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        # A text is a sequence of texts, too. Without the check, "good" would be the labels g, o, o and d.
        require(not isinstance(self.labels, str), f"labels is the text {self.labels!r}, expected a tuple of names")
        repeated = sorted({repr(label) for label in self.labels if self.labels.count(label) > 1})
        require(not repeated, f"labels: {', '.join(repeated)} appears more than once")

    # What the logits are

    @property
    @abstractmethod
    def column(self) -> Column | None:
        """The column of the labels. None if rows have no labels."""

    @property
    def size(self) -> int:
        """The number of logits of a window or of a token, L. Default: the number of labels.

        It is 0 before labels are known, and for a head that takes its size from the model (a vocabulary).
        """
        return len(self.labels)

    @property
    def has_hf_head(self) -> bool:
        """True if transformers computes the same logits from a saved folder.

        Otherwise the folder holds the labels under our key only, so that transformers does not print them beside the
        scores of a head that it draws at random.
        """
        return self.head_kind is not None

    def hf_config(self) -> dict[str, Any]:
        """Returns the entries id2label, label2id and problem_type of transformers' config.

        ``save_pretrained`` writes them, so that transformers and the Hugging Face Hub show the same names of labels.
        """
        if self.has_labels:
            return label_config(self.labels)
        return {**label_config(("LABEL_0", "LABEL_1")), "problem_type": None}  # transformers' names of two outputs

    # Training

    def encode(self, row: Row) -> list[float] | None:
        """Returns the labels of a row for the loss, or None if the row has none.

        Default: None, for an output whose labels depend on the window, so that its task makes them.

        Args:
            row: A row in canonical form, whose labels are in the column ``column``.

        Returns:
            The labels as numbers, as many for every row, for example the index of a class.

        Raises:
            DataError: The row has a label that the output does not know.
        """
        return None

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        """Returns the count of each term of ``loss`` for a batch of these features, by the name of the term.

        Training needs the counts of a whole step before its first backward pass, so they equal the counts of ``loss``
        and do not depend on logits. Default: the number of labels, for one term with the name of the output.
        """
        count = 0
        for feature in features:
            labels = feature.get("labels")
            if labels:
                count += len(labels)
        return {self.name: float(count)}

    @abstractmethod
    def loss(self, logits: Any, batch: PackedBatch) -> tuple[LossTerm, ...]:
        """Returns the terms of the loss, summed over the labelled items of a batch, with the number of these items.

        If a batch has no labelled item for a term, the term is ``no_loss``.

        Args:
            logits: The output of the head, a tensor or a ``HeadOutput``.
            batch: The batch with its labels.
        """

    @property
    def no_teacher_reason(self) -> str | None:
        """Why a model cannot learn from a teacher, as a sentence. None if it can (``divergence``)."""
        return "a model of this task cannot learn from a teacher, because the distance of its logits is not defined"

    def divergence(self, student: Any, teacher: Any, batch: PackedBatch, temperature: float) -> tuple[Tensor, float]:
        """Returns the distance of a student's logits from its teacher's, summed over a batch, and its count.

        Sums over classes are multiplied by the square of the temperature, which keeps the size of the gradient (Hinton,
        Vinyals and Dean, arXiv:1503.02531).

        Args:
            student: Logits as ``loss`` gets them, with a gradient.
            teacher: Logits of the teacher.
            batch: The batch, with or without labels.
            temperature: Logits of classes are divided by it.
        """
        raise NotImplementedError

    def divergence_count(self, features: Sequence[Feature]) -> float:
        """Returns the count of ``divergence`` for a batch of these features, with or without labels.

        As ``counts``, it is needed before the first backward pass, so it must not depend on logits.
        """
        raise NotImplementedError

    # Values fitted to data

    def fit_rows(self, rows: Iterable[Row]) -> Self:
        """Returns the output with the fields that are computed from the training rows. Default: unchanged.

        Args:
            rows: The training rows, with or without labels. They may be read once only.

        Raises:
            DataError: The rows do not suit the settings, for example because a label has no row.
        """
        return self

    @property
    def calibrates(self) -> bool:
        """True if ``calibrate`` needs the logits of the validation rows."""
        return False

    def calibrate(self, compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]) -> Self:
        """Returns the output with the temperature that fits validation rows. Takes the arguments of ``decode``."""
        return self

    def tune(self, predictions: Sequence[PredictionT], rows: Sequence[Row]) -> Self:
        """Returns the output with decision thresholds that are chosen on validation predictions.

        Args:
            predictions: Predictions that were decoded before ``calibrate``.
            rows: As many rows.
        """
        return self

    @property
    def remedies(self) -> tuple[str, ...]:
        """Settings that are not in use and may keep a model from predicting one label only, as a recipe has them."""
        return ()

    # Predictions

    def compact(self, logits: Sequence[Any], features: Sequence[Feature]) -> Sequence[Tensor]:
        """Returns what ``decode`` needs of the logits. Default: the logits.

        Only the result is copied to the host, so an output with many logits overrides this method.

        Args:
            logits: float32 logits of each feature, ``[L]`` or ``[R, L]``, on the device.
            features: The features. In evaluation they are the result of ``Task.prepare``.
        """
        return logits

    @abstractmethod
    def decode(
        self,
        compact: Sequence[Tensor],
        features: Sequence[Feature],
        rows: Sequence[Row],
        tokenizer: "PreTrainedTokenizerBase",
    ) -> list[PredictionT]:
        """Returns one prediction for each row, in row order.

        Args:
            compact: The result of ``compact`` for each feature, on the CPU.
            features: The features without tokens: ``row`` (from 0 within ``rows``), ``gather_positions``, ``word_ids``
                and ``offsets``.
            rows: The rows, with or without labels.
            tokenizer: The tokenizer of the model, for the texts of tokens.
        """

    @property
    def can_abstain(self) -> bool:
        """True if a prediction has one label with a score, so that it can be left out if the score is low."""
        return False

    def with_logits(
        self, predictions: Sequence[PredictionT], compact: Sequence[Tensor], features: Sequence[Feature]
    ) -> list[PredictionT]:
        """Returns the predictions with the logits of each label, choice, or word and label.

        It is called only for a user who asks for logits, so that others do not pay for them.

        Args:
            predictions: Predictions of ``decode``.
            compact: The result of ``compact`` for each feature, on the CPU.
            features: The features, as in ``decode``.

        Raises:
            UsageError: The predictions have no such logits.
        """
        raise UsageError("the predictions of this model have no logits. Predict without them")

    @property
    def no_explanations_reason(self) -> str | None:
        """Why predictions cannot be explained, and what to do. None if they can (``explained_logits``)."""
        return (
            "the predictions of this model have no explanations. They are for tasks that predict a label, number, "
            "choice, answer or entities for a row. Predict without them"
        )

    def explained_logits(
        self,
        predictions: Sequence[PredictionT],
        compact: Sequence[Tensor],
        features: Sequence[Feature],
        rows: Sequence[Row],
        texts: Sequence[str],
    ) -> list[ExplainedLogit]:
        """Returns the logits to explain, row after row.

        The contributions of the words to each of them are computed by integrated gradients, which takes many forward
        and backward passes of the row (``Explanation``).

        Args:
            predictions: Predictions of ``decode``, whose other arguments follow.
            texts: The columns of the texts that the model reads.
        """
        raise NotImplementedError

    def with_explanations(
        self, predictions: Sequence[PredictionT], explanations: Sequence[Explanation]
    ) -> list[PredictionT]:
        """Returns the predictions with the explanations of ``explained_logits``.

        Default: each prediction has one, in its field ``explanation``.
        """
        explained: list[Any] = [*predictions]
        pairs = zip(explained, explanations, strict=True)
        return [replace(prediction, explanation=explanation) for prediction, explanation in pairs]

    # The written form of predictions

    @classmethod
    def written_fields(cls) -> tuple[str, ...]:
        """Returns the fields of predictions that are written, without those that are computed on request only."""
        names = [field.name for field in fields(cls.prediction) if not field.metadata.get("exclude")]
        return tuple(name for name in names if name not in ON_REQUEST)

    def column_types(self) -> dict[str, Any]:
        """Returns the type of each written field. Raises TypeError if the output does not say what it predicts."""
        names = self.written_fields()
        if not names:
            raise TypeError(f"{self.name} does not say what its predictions hold")
        hints = get_type_hints(self.prediction)  # evaluates annotations that are texts
        return {name: hints[name] for name in names}

    def vector_columns(self, config: EncoderConfig) -> Mapping[str, int]:
        """Returns the fields of predictions that are vectors, and their sizes."""
        return {}

    # Metrics and report

    @abstractmethod
    def metrics(self, predictions: Sequence[PredictionT], rows: Sequence[Row]) -> dict[str, float]:
        """Returns metrics with the names and scales of Hugging Face's evaluate.

        Args:
            predictions: Predictions of ``decode``.
            rows: As many rows. Rows without labels do not count.
        """

    def metric_inputs(self, predictions: Sequence[PredictionT], rows: Sequence[Row]) -> tuple[list[Any], list[Any]]:
        """Returns what a metric of one's own gets, the predictions and the references (labels) of labelled rows.

        They have the form that Hugging Face's evaluate documents for such predictions
        (https://huggingface.co/docs/evaluate), as new lists, in row order.

        Args:
            predictions: Predictions of ``decode``.
            rows: As many rows. Rows without labels are left out.

        Raises:
            UsageError: The output has no such form. This is the default.
        """
        raise UsageError(
            f"predictions of the output '{self.name}' have no form for metrics of your own. Remove these metrics, or "
            "override metric_inputs in a class of your own"
        )

    @property
    @abstractmethod
    def primary_metric(self) -> str:
        """The key of ``metrics`` by which training chooses the best checkpoint."""

    @property
    def curves(self) -> tuple[str, ...]:
        """Keys of ``metrics`` that a report draws as learning curves."""
        return (self.primary_metric,)

    def metric_table(self, metrics: Mapping[str, float]) -> MetricTable:
        """Returns metrics (and the loss) for people, with each number once and single classes in a table."""
        return MetricTable(overall=metrics)

    def report(
        self, predictions: Sequence[PredictionT], rows: Sequence[Row], texts: Sequence[str]
    ) -> ReportSections | None:
        """Returns what a report shows of the labelled rows. None for only metrics, curves and settings of the run.

        Args:
            predictions: Predictions of ``decode``.
            rows: As many rows.
            texts: The columns of the texts that the model reads.
        """
        return None

    def truths(self, row: Row) -> Sequence[Hashable]:
        """Returns the labels of a row, one for each of ``decisions``, which must be overridden, too. Default: none."""
        return ()

    def decisions(self, prediction: PredictionT) -> Sequence[Any]:
        """Returns the decision of a prediction, a value for the row or for each of its words or other items.

        The default is ``to_json`` without floating-point numbers, which are scores.
        """
        return (without_scores(prediction.to_json()),)

    def describe(self, decision: Any) -> str:
        """Returns the words for a decision that is the same everywhere, such as "'calm' for every row"."""
        return f"{decision!r} for every row"

    def degeneracy(self, predictions: Sequence[PredictionT], rows: Sequence[Row]) -> str | None:
        """Returns what the model predicts for every row although the labels differ, "predicts 'calm' for every row".

        Training warns about such a degenerate run, because its metrics can look good: if nine of ten rows have the same
        label, predicting that label for every row has an accuracy of 0.9.

        Returns:
            The second half of a sentence. None if the predictions differ, if all labels are equal, and for outputs
            without ``truths``. Rows without labels do not count.
        """
        labels = set[Hashable]()
        decisions = set[Hashable]()
        for prediction, row in zip(predictions, rows, strict=True):
            truths = self.truths(row)
            if truths:
                labels.update(truths)
                decisions.update(self.decisions(prediction))
        if len(decisions) == 1 and len(labels) > 1:
            return f"predicts {self.describe(decisions.pop())}"
        return None

    def agreements(self, predictions: Sequence[PredictionT], others: Sequence[PredictionT]) -> list[bool]:
        """Returns whether two models agree, for each of their ``decisions`` for the same rows.

        `export` to int8 and `quantize` write their files only if enough decisions stay the same.

        Args:
            predictions: Predictions of the model.
            others: Predictions of the model that is compared with it, in the same order.

        Raises:
            DataError: These predictions cannot show whether the models agree.
        """
        agreements = []
        for prediction, other in zip(predictions, others, strict=True):
            pairs = zip(self.decisions(prediction), self.decisions(other), strict=True)
            agreements += [decision == of_other for decision, of_other in pairs]
        return agreements


def labelled(rows: Sequence[Row], predictions: Sequence[PredictionT], column: str) -> list[tuple[Row, PredictionT]]:
    """Returns the rows that have labels in this column, each with its prediction.

    Metrics and reports begin with it, because validation data may have rows without labels, which do not count.

    Args:
        rows: The rows, with or without labels.
        predictions: A prediction for each row, in the same order.
        column: The column of the labels. A row has no label if the column is missing, or None.

    Raises:
        ValueError: There are not as many predictions as rows.

    Examples:
        >>> rows = [{"text": "Kind staff.", "label": "praise"}, {"text": "Cold soup.", "label": None}]
        >>> len(labelled(rows, model.predict(rows), "label"))
        1
    """
    pairs = zip(rows, predictions, strict=True)
    return [(row, prediction) for row, prediction in pairs if row.get(column) is not None]
