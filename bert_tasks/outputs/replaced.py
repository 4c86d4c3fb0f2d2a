"""Tokens that replace others, one logit for each token (Clark et al., arXiv:2003.10555).

Shape legend: B windows, T tokens of a window, R masked tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bert_tasks.data.columns import Column, Row
from bert_tasks.encoder.config import HeadKind
from bert_tasks.encoder.heads import ReplacedTokenOutput
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import DataError, UsageError
from bert_tasks.metrics.formulas import MetricFormula, replaced_token_measure
from bert_tasks.outputs.base import LossTerm, Output, no_loss
from bert_tasks.outputs.features import NO_WORD, Feature, windows_by_row
from bert_tasks.outputs.prediction import NOT_WRITTEN, Prediction
from bert_tasks.outputs.sections import (
    MOST_EXAMPLES,
    Example,
    Examples,
    Remark,
    ReportSections,
    RowResult,
    Segment,
)
from bert_tasks.outputs.settings import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATOR, DISCRIMINATOR = "generator", "discriminator"  # the terms of the loss
_UNKNOWN = -1.0  # instead of what only evaluation knows of a token


@dataclass(frozen=True, kw_only=True)
class ReplacedTokenPrediction(Prediction):
    """The prediction for one row of replaced-token detection.

    Attributes:
        tokens, ids: Texts and ids of its tokens, without the special tokens around it.
        scores: Probability that each replaces another one.
        measured: (logit, replaced, masked) of each token that the discriminator saw. In evaluation only.
        originals: Ids of the tokens before some were replaced. In evaluation only.
        example: A row that a report may show, without its line.
    """

    tokens: tuple[str, ...]
    scores: tuple[float, ...]
    measured: tuple[tuple[float, bool, bool], ...] = field(default=(), metadata=NOT_WRITTEN)
    ids: tuple[int, ...] = field(default=(), metadata=NOT_WRITTEN)
    originals: tuple[int, ...] = field(default=(), metadata=NOT_WRITTEN)
    example: Example | None = field(default=None, metadata=NOT_WRITTEN)

    @property
    def worst(self) -> float:
        """The largest difference of a token's score from the right score, in evaluation."""
        if not self.originals:
            return 0.0
        tokens = zip(self.ids, self.originals, self.scores, strict=True)
        return max((abs((token != original) - score) for token, original, score in tokens), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Replaced(Output[ReplacedTokenPrediction]):
    """Whether each token replaces another one, by a sigmoid over one logit.

    It is the output of ELECTRA's pre-training (Clark et al., https://arxiv.org/abs/2003.10555), which learns from every
    token of a text instead of the masked ones only. A small masked language model, the generator, fills in the masks,
    and the discriminator, which is the model that is kept, finds what it has replaced. In training and evaluation, the
    generator's logits for the masked tokens are part of the output.

    Attributes:
        labels: None. Do not set them.
        discriminator_weight: Weight of the discriminator's loss. The generator's loss has the weight 1.

    Example:
        >>> ReplacedTokens.of().output
        Replaced(labels=(), discriminator_weight=50.0)
    """

    name: ClassVar[str] = "replaced-tokens"
    prediction: ClassVar[type[Prediction]] = ReplacedTokenPrediction
    has_labels: ClassVar[bool] = False
    head_kind: ClassVar[HeadKind | None] = "replaced-token"
    primary_metric: ClassVar[str] = "auc"
    curves: ClassVar[tuple[str, ...]] = ("auc", "generator_accuracy")
    no_teacher_reason: ClassVar[str | None] = (
        "replaced-token detection cannot learn from a teacher, because a generator that learns, too, makes its inputs"
    )
    column: ClassVar[Column | None] = None
    size: ClassVar[int] = 1
    discriminator_weight: float = 50.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.labels, "labels do not apply to replaced token detection. Remove them")
        weight = self.discriminator_weight
        require(weight > 0, f"discriminator_weight is {weight}, expected more than 0")

    # Training

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        """Returns the number of masked tokens, and of all tokens of windows that were prepared."""
        masked, tokens = 0, 0
        for feature in features:
            labels = feature.get("labels")
            if labels is not None:
                masked += len(labels)
                tokens += len(feature["input_ids"])
        return {GENERATOR: float(masked), DISCRIMINATOR: float(tokens)}

    def loss(self, logits: Any, batch: PackedBatch) -> tuple[LossTerm, ...]:
        """Returns the cross entropy of the masked tokens, and of whether each of all tokens was replaced.

        Raises:
            UsageError: The logits come from a model without its generator.
        """
        weight = self.discriminator_weight
        if not isinstance(logits, ReplacedTokenOutput):
            if len(batch.labels) > 0:
                raise UsageError(f"{self.name}: a loss needs what the generator returns, not logits alone")
            return (no_loss(GENERATOR, logits), no_loss(DISCRIMINATOR, logits, weight=weight))
        # A token that the generator happens to draw as it was counts as not replaced, as in ELECTRA.
        masked = logits.generator.cross_entropy(batch.labels.long())
        masked_count = masked.new_full((), len(logits.generator)).detach()
        replaced = F.binary_cross_entropy_with_logits(logits.logits, logits.replaced.to(logits.dtype), reduction="sum")
        count = replaced.new_full((), len(logits.logits)).detach()
        return (
            LossTerm(name=GENERATOR, total=masked, count=masked_count),
            LossTerm(name=DISCRIMINATOR, total=replaced, count=count, weight=weight),
        )

    # Predictions

    def compact(self, logits: Sequence[Tensor], features: Sequence[Feature]) -> Sequence[Tensor]:
        """Returns ``[T, 6]`` for each window.

        The columns are the original id, whether it is of a word, the logit, replaced, masked, and the id that was read.
        The last three are -1 in predictions, for which nothing is replaced.
        """
        tables = []
        for table, feature in zip(logits, features, strict=True):
            word_ids = feature["word_ids"]
            are_words = [] if word_ids is None else [float(word != NO_WORD) for word in word_ids]
            originals = torch.tensor([_original_ids(feature), are_words], dtype=table.dtype).t().to(table.device)
            if table.shape[1] != 4:  # logits alone, because nothing was replaced
                table = F.pad(table, (0, 3), value=_UNKNOWN)
            tables.append(torch.cat([originals, table], dim=1))
        return tables

    def decode(
        self,
        compact: Sequence[Tensor],
        features: Sequence[Feature],
        rows: Sequence[Row],
        tokenizer: "PreTrainedTokenizerBase",
    ) -> list[ReplacedTokenPrediction]:
        predictions = []
        for windows in windows_by_row(features):
            tables = [compact[window] for window in windows]
            predictions.append(_prediction(torch.cat(tables), tokenizer))
        return _with_examples(predictions, tokenizer)

    # Metrics and report

    def metrics(self, predictions: Sequence[ReplacedTokenPrediction], rows: Sequence[Row]) -> dict[str, float]:
        """Returns metrics of the discriminator, and the accuracy of the generator.

        The accuracy of the discriminator is not among them, because "not replaced" for every token has a high accuracy.

        Raises:
            DataError: No token was masked.
        """
        if not any(masked for _, _, masked in _measured_tokens(predictions)):
            raise DataError("no token was masked, because the texts are empty")
        metrics = {}
        for name, value in _measure(predictions).values().items():
            metrics[name] = math.nan if value is None else value
        return metrics

    def decisions(self, prediction: ReplacedTokenPrediction) -> Sequence[bool]:
        """Returns for each token whether it seems to be replaced."""
        return [score > 0.5 for score in prediction.scores]

    def degeneracy(self, predictions: Sequence[ReplacedTokenPrediction], rows: Sequence[Row]) -> str | None:
        """Compares the tokens of evaluation, of which the generator has replaced some."""
        labels = set[bool]()
        decisions = set[bool]()
        for logit, is_replaced, _ in _measured_tokens(predictions):
            labels.add(is_replaced)
            decisions.add(logit > 0)
        if len(labels) < 2 or len(decisions) > 1:
            return None
        word = "replaced" if decisions.pop() else "original"
        return f"predicts {word!r} for every token"

    def report(
        self, predictions: Sequence[ReplacedTokenPrediction], rows: Sequence[Row], texts: Sequence[str]
    ) -> ReportSections:
        pairs: list[tuple[Row, ReplacedTokenPrediction]] = []
        results: list[RowResult] = []
        for row, prediction in zip(rows, predictions, strict=True):
            if prediction.measured:
                pairs.append((row, prediction))
                results.append(_result(row, prediction))
        measured = [prediction for _, prediction in pairs]
        figures = {"tokens": 0, "masked": 0, "replaced": 0}
        for _, is_replaced, is_masked in _measured_tokens(measured):
            figures["tokens"] += 1
            figures["masked"] += is_masked
            figures["replaced"] += is_replaced
        return ReportSections(
            measure=_measure(measured),
            unit="texts",
            headline=("auc", "precision", "recall", "generator_accuracy"),
            results=tuple(results),
            examples=_examples(pairs, figures),
            figures=figures,
        )


def _original_ids(feature: Feature) -> list[int]:
    """Returns the ids of a window before some were masked."""
    ids = list(feature["input_ids"])
    positions, labels = feature.get("gather_positions"), feature.get("labels")
    if positions is not None and labels is not None:
        for position, label in zip(positions, labels, strict=True):
            ids[position] = int(label)
    return ids


def _prediction(table: Tensor, tokenizer: "PreTrainedTokenizerBase") -> ReplacedTokenPrediction:
    """Returns the prediction of a row.

    Args:
        table: ``[T, 6]`` the columns of ``Replaced.compact`` for all of its windows.
        tokenizer: The tokenizer of the model.
    """
    of_words = table[table[:, 1] > 0]
    measured: list[tuple[float, bool, bool]] = []
    for logit, replaced, masked in table[:, 2:5].tolist():
        if masked != _UNKNOWN:
            measured.append((logit, replaced > 0, masked > 0))
    ids: tuple[int, ...] = tuple(of_words[:, 0].long().tolist())
    originals: tuple[int, ...] = ()
    if measured:  # the discriminator read other tokens than those of the text
        originals = ids
        ids = tuple(of_words[:, 5].long().tolist())
    tokens = tokenizer.convert_ids_to_tokens(list(ids))
    return ReplacedTokenPrediction(
        tokens=tuple(str(token) for token in tokens),
        scores=tuple(of_words[:, 2].sigmoid().tolist()),
        measured=tuple(measured),
        ids=ids,
        originals=originals,
    )


def _with_examples(
    predictions: Sequence[ReplacedTokenPrediction], tokenizer: "PreTrainedTokenizerBase"
) -> list[ReplacedTokenPrediction]:
    """Returns the predictions, of which those with the worst mistakes have an example for a report."""
    ranked: list[tuple[float, int]] = []
    for index, prediction in enumerate(predictions):
        if prediction.originals:
            ranked.append((prediction.worst, index))
    ranked.sort()
    shown = list(predictions)
    for _, index in ranked[-MOST_EXAMPLES:]:
        shown[index] = replace(predictions[index], example=_example(predictions[index], tokenizer))
    return shown


def _measured_tokens(predictions: Sequence[ReplacedTokenPrediction]) -> list[tuple[float, bool, bool]]:
    """Returns (logit, replaced, masked) of all tokens that the discriminator saw."""
    return list(chain.from_iterable(prediction.measured for prediction in predictions))


def _measure(predictions: Sequence[ReplacedTokenPrediction]) -> MetricFormula:
    """Returns the metrics of all tokens that the discriminator saw."""
    values = np.array(_measured_tokens(predictions), dtype=np.float64).reshape(-1, 3)
    sizes = [len(prediction.measured) for prediction in predictions]
    return replaced_token_measure(sizes, values[:, 0], values[:, 1] > 0, values[:, 2] > 0)


def _result(row: Row, prediction: ReplacedTokenPrediction) -> RowResult:
    """Returns replaced and detected tokens, with the worst mistake's score."""
    replaced: list[str] = []
    detected: list[str] = []
    is_correct = True
    ids = zip(prediction.ids, prediction.originals, strict=True)
    for (token_id, original), text, score in zip(ids, prediction.tokens, prediction.scores, strict=True):
        is_replaced = token_id != original
        is_detected = score > 0.5
        if is_replaced:
            replaced.append(text)
        if is_detected:
            detected.append(text)
        if is_replaced != is_detected:
            is_correct = False
    return RowResult(row=row, label=replaced, prediction=detected, score=prediction.worst, is_correct=is_correct)


def _examples(pairs: Sequence[tuple[Row, ReplacedTokenPrediction]], figures: Mapping[str, int]) -> Examples | None:
    """Returns the rows with the worst mistakes, or None if none has an example.

    Args:
        pairs: Rows with their predictions.
        figures: The numbers of ``tokens``, of ``masked`` and of ``replaced`` ones.
    """
    worst = sorted(pairs, key=lambda pair: -pair[1].worst)[:MOST_EXAMPLES]
    items: list[Example] = []
    for row, prediction in worst:
        if prediction.example is not None:
            items.append(replace(prediction.example, line=row.get("line")))
    if not items:
        return None
    return Examples(
        word="Replaced tokens",
        title="Texts with the worst mistakes",
        lead=(
            f"Of {figures['tokens']:,} tokens {figures['masked']:,} were masked, and {figures['replaced']:,} of these "
            "replaced by another token. Each text is shown as the model read it. The numbers are the model's "
            "probabilities of being replaced, at replaced tokens."
        ),
        items=tuple(items),
    )


def _example(prediction: ReplacedTokenPrediction, tokenizer: "PreTrainedTokenizerBase") -> Example:
    """Returns replaced and detected tokens, each alone, and the text between them."""
    segments, remarks = [], []
    rows = zip(prediction.ids, prediction.originals, prediction.scores, strict=True)
    for is_marked, tokens in groupby(rows, key=lambda row: row[0] != row[1] or row[2] > 0.5):
        if not is_marked:
            # Decoded together, so that the tokenizer joins the pieces of words and sets the spaces.
            text = tokenizer.decode([token for token, _, _ in tokens])
            segments.append(Segment(text=f" {text} "))
            continue
        for token, original, score in tokens:
            text = str(tokenizer.decode([token])).strip()
            is_detected = score > 0.5
            was = ""
            if token != original:
                was = f"instead of {str(tokenizer.decode([original])).strip()}"
            prediction_word = "replaced" if is_detected else ""
            segments.append(Segment(text=f" {text} ", label=was, prediction=prediction_word))
            if was:
                tone: Literal["good", "bad"] = "good" if is_detected else "bad"
                remarks.append(Remark(name=f"{text} {was}", value=score, tone=tone))
    return Example(line=None, excerpt=tuple(segments), remarks=tuple(remarks))
