"""Labels that a model was not trained for, by the entailment of a hypothesis for each label.

A model of pairs says whether a text entails a hypothesis, such as "This example is sports." Each window of a row is the
pair of the text and the hypothesis of one label, and its logits become the one logit of that label.

Source: Yin, Hay and Roth (arXiv:1909.00161). Scores equal the scores of transformers' pipeline
``zero-shot-classification``.

Shape legend: B sequences (pairs), S samples (rows), L labels, C labels of the model.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from bert_tasks.data.columns import Row
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.outputs.base import LossTerm
from bert_tasks.outputs.classes import Classes, ClassPrediction
from bert_tasks.outputs.features import Feature, windows_by_row
from bert_tasks.outputs.label_set import LabelSet, LabelSetPrediction
from bert_tasks.outputs.samples import joined_logits, with_joined_logits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TEACHER = "a model with labels that it was not trained for cannot learn from a teacher"
NO_EXPLANATIONS = "a model with labels that it was not trained for has no explanations. Predict without them"


@dataclass(frozen=True, kw_only=True)
class EntailedClasses(Classes):
    """One of several labels, by a softmax over the entailment logits of all labels.

    It is the output of zero-shot classification (``TaskModel.zero_shot``) for labels that exclude each other. It can be
    evaluated with labelled rows, but not trained.

    Attributes:
        entailment: The index of the model's label of entailment.

    Examples:
        >>> EntailedClasses(labels=("sports", "politics"), entailment=2).size
        2
    """

    name: ClassVar[str] = "entailed-classes"
    no_teacher_reason: ClassVar[str | None] = NO_TEACHER
    no_explanations_reason: ClassVar[str | None] = NO_EXPLANATIONS
    entailment: int

    def loss(self, logits: Tensor, batch: PackedBatch) -> tuple[LossTerm, ...]:
        rows = self._label_logits(logits).view(-1, self.size)  # [S, L]
        return super().loss(rows, batch)

    def _label_logits(self, logits: Tensor) -> Tensor:
        """Returns the logit of each pair's label, ``[B, C] -> [B]``."""
        return logits.select(-1, self.entailment)

    def compact(self, logits: Sequence[Tensor], features: Sequence[Feature]) -> Sequence[Tensor]:
        """Returns the logit of each pair's label."""
        return _single_logits(self._label_logits(torch.stack(list(logits))))

    def decode(
        self,
        compact: Sequence[Tensor],
        features: Sequence[Feature],
        rows: Sequence[Row],
        tokenizer: "PreTrainedTokenizerBase",
    ) -> list[ClassPrediction]:
        return super().decode(joined_logits(compact, features), _first_windows(features), rows, tokenizer)

    def with_logits(
        self, predictions: Sequence[ClassPrediction], compact: Sequence[Tensor], features: Sequence[Feature]
    ) -> list[ClassPrediction]:
        return with_joined_logits(predictions, compact, features)


@dataclass(frozen=True, kw_only=True)
class EntailedLabels(LabelSet):
    """Several labels, or a single one, each by a softmax over its logits of entailment and contradiction.

    It is the output of zero-shot classification (``TaskModel.zero_shot``) with ``multi_label=True``, and for a single
    candidate, whose softmax over all labels would always be 1.

    Attributes:
        entailment: The index of the model's label of entailment.

    Examples:
        >>> EntailedLabels(labels=("sports",), entailment=0).size
        1
    """

    name: ClassVar[str] = "entailed-labels"
    no_teacher_reason: ClassVar[str | None] = NO_TEACHER
    no_explanations_reason: ClassVar[str | None] = NO_EXPLANATIONS
    can_abstain: ClassVar[bool] = True
    entailment: int

    def loss(self, logits: Tensor, batch: PackedBatch) -> tuple[LossTerm, ...]:
        rows = self._label_logits(logits).view(-1, self.size)  # [S, L]
        return super().loss(rows, batch)

    def _label_logits(self, logits: Tensor) -> Tensor:
        """Returns the logit of each pair's label, whose sigmoid is that softmax, ``[B, C] -> [B]``.

        The pipeline, too, takes the first label of the model for contradiction, or the last if entailment is the first.
        """
        contradiction = 0 if self.entailment != 0 else -1
        # softmax([c, e])[1] is sigmoid(e - c), so the base class needs to know nothing of the two logits.
        return logits.select(-1, self.entailment) - logits.select(-1, contradiction)

    def compact(self, logits: Sequence[Tensor], features: Sequence[Feature]) -> Sequence[Tensor]:
        """Returns the logit of each pair's label."""
        return _single_logits(self._label_logits(torch.stack(list(logits))))

    def decode(
        self,
        compact: Sequence[Tensor],
        features: Sequence[Feature],
        rows: Sequence[Row],
        tokenizer: "PreTrainedTokenizerBase",
    ) -> list[LabelSetPrediction]:
        return super().decode(joined_logits(compact, features), _first_windows(features), rows, tokenizer)

    def with_logits(
        self, predictions: Sequence[LabelSetPrediction], compact: Sequence[Tensor], features: Sequence[Feature]
    ) -> list[LabelSetPrediction]:
        return with_joined_logits(predictions, compact, features)

    def decisions(self, prediction: LabelSetPrediction) -> Sequence[Hashable]:
        """Returns the most probable label."""
        return (prediction.label,)

    def describe(self, decision: Any) -> str:
        return f"{decision!r} for every row"


def _single_logits(logits: Tensor) -> Sequence[Tensor]:
    """Returns the logits ``[B]`` as B tensors of one logit, ``B x [1]``."""
    return logits.unsqueeze(-1).unbind()


def _first_windows(features: Sequence[Feature]) -> list[Feature]:
    """Returns one feature for each row, because the logits of a row are one tensor now."""
    return [features[windows[0]] for windows in windows_by_row(features)]
