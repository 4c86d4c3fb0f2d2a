"""The pure metric functions as ``evaluate.Metric`` classes that work offline: nothing is loaded by name.

Owns argument names, features and result keys as HF evaluate has them; the numbers come from
``classification`` and ``tagging``. Must not compute anything itself. evaluate writes its inputs to a cache folder: give
``cache_dir`` where the default one cannot be written.
"""

from collections.abc import Sequence
from typing import ClassVar

import datasets
import evaluate
from numpy.typing import ArrayLike

from bert_tasks.errors import UsageError
from bert_tasks.metrics import classification, tagging


class OfflineMetric(evaluate.Metric):  # type: ignore[misc]  # evaluate is untyped
    """What the metrics below share: one reference and one prediction per row, of the type ``value``."""

    value: ClassVar[datasets.Value | datasets.Sequence] = datasets.Value("int64")

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=str(type(self).__doc__),
            citation="",
            features=datasets.Features({"predictions": self.value, "references": self.value}),
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
