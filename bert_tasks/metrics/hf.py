"""The pure metric functions as ``evaluate.Metric`` classes that work offline: nothing is loaded by name.

Owns argument names, features and result keys as HF evaluate has them; the numbers come from ``classification``,
``tagging`` and ``squad``. Must not compute anything itself. evaluate writes its inputs to a cache folder: give
``cache_dir`` where the default one cannot be written.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import datasets
import evaluate
from numpy.typing import ArrayLike

from bert_tasks.errors import DataError, UsageError
from bert_tasks.metrics import classification, squad, tagging


class OfflineMetric(evaluate.Metric):  # type: ignore[misc]  # evaluate is untyped
    """What the metrics below share: one reference and one prediction per row.

    ``value`` is the type of predictions, and of references where they have no ``target`` type of their own.
    """

    value: ClassVar[Any] = datasets.Value("int64")
    target: ClassVar[Any] = None

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=str(type(self).__doc__),
            citation="",
            features=datasets.Features(
                {"predictions": self.value, "references": self.value if self.target is None else self.target}
            ),
        )


class Accuracy(OfflineMetric):
    """The share of rows predicted right."""

    def _compute(self, predictions: ArrayLike, references: ArrayLike) -> dict[str, float]:
        return {"accuracy": classification.accuracy(references, predictions)}


class F1(OfflineMetric):
    """F1 of one class (``average="binary"``), or over all classes (``"macro"``, ``"micro"``)."""

    def _compute(
        self, predictions: ArrayLike, references: ArrayLike, average: str = "binary", pos_label: int = 1
    ) -> dict[str, float]:
        if average == "binary":
            return {"f1": classification.class_f1(references, predictions, positive=pos_label)}
        averages = {"macro": classification.macro_f1, "micro": classification.micro_f1}
        if average not in averages:
            raise UsageError(f"F1: average={average!r}, expected 'binary', 'macro' or 'micro'.")
        return {"f1": averages[average](references, predictions)}


class MultilabelF1(OfflineMetric):
    """F1 over the labels of 0/1 rows (``average="macro"`` or ``"micro"``)."""

    value = datasets.Sequence(datasets.Value("int64"))

    def _compute(self, predictions: ArrayLike, references: ArrayLike, average: str = "macro") -> dict[str, float]:
        averages = {"macro": classification.multilabel_macro_f1, "micro": classification.multilabel_micro_f1}
        if average not in averages:
            raise UsageError(f"MultilabelF1: average={average!r}, expected 'macro' or 'micro'.")
        return {"f1": averages[average](references, predictions)}


class MatthewsCorrelation(OfflineMetric):
    """Matthews' correlation for any number of classes."""

    def _compute(self, predictions: ArrayLike, references: ArrayLike) -> dict[str, float]:
        return {"matthews_correlation": classification.matthews_correlation(references, predictions)}


class Pearson(OfflineMetric):
    """Pearson's correlation of two columns of numbers."""

    value = datasets.Value("float64")

    def _compute(self, predictions: ArrayLike, references: ArrayLike) -> dict[str, float]:
        return {"pearson": classification.pearson(references, predictions)}


class Spearman(OfflineMetric):
    """Spearman's rank correlation of two columns of numbers."""

    value = datasets.Value("float64")

    def _compute(self, predictions: ArrayLike, references: ArrayLike) -> dict[str, float]:
        return {"spearmanr": classification.spearmanr(references, predictions)}


class Tagging(OfflineMetric):
    """The metrics of sentences tagged word by word, IOB2 or raw; flat keys ``TYPE_f1`` where seqeval's are nested."""

    value = datasets.Sequence(datasets.Value("string"))

    def _compute(
        self, predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]], raw: bool | None = None
    ) -> dict[str, float]:
        return tagging.tagging_metrics(references, predictions, raw=raw)


_ANSWERS = {
    "text": datasets.Sequence(datasets.Value("string")),
    "answer_start": datasets.Sequence(datasets.Value("int32")),
}
_QUESTION = {"id": datasets.Value("string"), "answers": _ANSWERS}


class Squad(OfflineMetric):
    """SQuAD 1.1's scores, 0 to 100, of ``{"id", "prediction_text"}`` against ``{"id", "answers"}``."""

    value: ClassVar[Any] = {"id": datasets.Value("string"), "prediction_text": datasets.Value("string")}
    target: ClassVar[Any] = _QUESTION

    def _compute(
        self, predictions: Sequence[Mapping[str, Any]], references: Sequence[Mapping[str, Any]]
    ) -> dict[str, float]:
        golds, given = _by_id(predictions, references)
        return squad.squad_v1_metrics(golds, [answer["prediction_text"] for answer in given])


class SquadV2(OfflineMetric):
    """SQuAD 2.0's scores, 0 to 100; predictions have ``no_answer_probability`` too, or null odds of any scale.

    A question counts as answered by "" where that number exceeds ``no_answer_threshold``.
    """

    value: ClassVar[Any] = {**Squad.value, "no_answer_probability": datasets.Value("float32")}
    target: ClassVar[Any] = _QUESTION

    def _compute(
        self,
        predictions: Sequence[Mapping[str, Any]],
        references: Sequence[Mapping[str, Any]],
        no_answer_threshold: float = 1.0,
    ) -> dict[str, float]:
        golds, given = _by_id(predictions, references)
        odds = [answer["no_answer_probability"] for answer in given]
        texts = [answer["prediction_text"] for answer in given]
        return squad.squad_v2_metrics(golds, texts, odds, threshold=no_answer_threshold)


def _by_id(
    predictions: Sequence[Mapping[str, Any]], references: Sequence[Mapping[str, Any]]
) -> tuple[list[Sequence[str]], list[Mapping[str, Any]]]:
    """The gold answers of each question, and its prediction.

    Raises:
        DataError: ids stand twice, or are not the same on both sides.
    """
    answers = {answer["id"]: answer for answer in predictions}
    wanted = [question["id"] for question in references]
    if len(answers) < len(predictions) or len(set(wanted)) < len(wanted) or answers.keys() != set(wanted):
        raise DataError(
            f"SQuAD metrics: {len(predictions)} predictions and {len(references)} questions, expected one prediction "
            "for the id of each question"
        )
    return [question["answers"]["text"] for question in references], [answers[name] for name in wanted]
