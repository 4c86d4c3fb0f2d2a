"""The output of replaced-token detection, with one logit for each token.

Owns its predictions, loss, metrics and report (Clark et al., arXiv:2003.10555). Only evaluation knows which tokens the
generator replaced, so predictions of other texts have neither metrics nor a report.

Shape legend: T tokens of a window, N tokens of a batch or of all windows of a row.
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
MeasuredToken = tuple[float, bool, bool]  # (logit, is replaced, is masked) of a token in evaluation
_DETECTED_ABOVE = 0.5  # the probability above which a token counts as detected
# The columns of the tables that ``Replaced.compact`` returns. A float32 holds ids exactly up to 2**24, which is more
# than any vocabulary has.
_ORIGINAL_ID, _IS_WORD, _LOGIT, _IS_REPLACED, _IS_MASKED, _INPUT_ID = range(6)
_EVALUATED_COLUMNS = 4  # those from _LOGIT on, which ``ReplacedTokenOutput.split`` returns
_UNKNOWN = -1.0  # in the columns after _LOGIT, if nothing was replaced


@dataclass(frozen=True, kw_only=True)
class ReplacedTokenPrediction(Prediction):
    """The prediction for one row of replaced-token detection.

    Attributes:
        tokens, ids: Texts and ids of the tokens that the discriminator took as input, without special tokens.
        scores: Probability of each of these tokens that it replaces another one.
        measured: (logit, is replaced, is masked) of each token, special tokens included, so it may be longer than
            ``tokens``. In evaluation only.
        originals: Id of each of ``tokens`` before the generator replaced some. In evaluation only.
        example: The text as a report shows it, without its line. Only for rows with the largest errors.
    """

    tokens: tuple[str, ...]
    scores: tuple[float, ...]
    measured: tuple[MeasuredToken, ...] = field(default=(), metadata=NOT_WRITTEN)
    ids: tuple[int, ...] = field(default=(), metadata=NOT_WRITTEN)
    originals: tuple[int, ...] = field(default=(), metadata=NOT_WRITTEN)
    example: Example | None = field(default=None, metadata=NOT_WRITTEN)

    @property
    def largest_error(self) -> float:
        """The largest distance of a score from 1 (replaced) or 0 (original).

        It is 0 outside of evaluation, and for a row without tokens.
        """
        if not self.originals:
            return 0.0
        errors: list[float] = []
        for token_id, original_id, score in zip(self.ids, self.originals, self.scores, strict=True):
            is_replaced = token_id != original_id
            errors.append(abs(is_replaced - score))
        return max(errors)


@dataclass(frozen=True, kw_only=True)
class Replaced(Output[ReplacedTokenPrediction]):
    """Predicts whether each token replaces another one, by a sigmoid over a logit.

    It is the output of ELECTRA's pre-training (Clark et al., https://arxiv.org/abs/2003.10555), which learns from every
    token of a text instead of the masked ones only. A small masked language model, the generator, fills in the masks,
    and the discriminator, which is the model that is kept, finds what it has replaced. In training and evaluation the
    logits are a ``ReplacedTokenOutput`` with those of the generator, otherwise a tensor of the discriminator's.

    Attributes:
        labels: None. Do not set them.
        discriminator_weight: Weight of the discriminator's loss. The generator's loss has the weight 1.

    Examples:
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
    size: ClassVar[int] = 1  # the logit of each token
    discriminator_weight: float = 50.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.labels, "labels do not apply to replaced token detection. Remove them")
        weight = self.discriminator_weight
        require(weight > 0, f"discriminator_weight is {weight}, expected more than 0")

    # Training

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        """Returns the numbers of masked tokens and of all tokens.

        Only windows that ``Task.prepare`` has masked count.
        """
        masked, tokens = 0, 0
        for feature in features:
            labels = feature.get("labels")
            # Empty labels are not None: the discriminator learns from a window that has nothing to mask, too.
            if labels is not None:
                masked += len(labels)
                tokens += len(feature["input_ids"])
        return {GENERATOR: float(masked), DISCRIMINATOR: float(tokens)}

    def loss(self, logits: Any, batch: PackedBatch) -> tuple[LossTerm, ...]:
        """Returns the cross entropies of the generator and of the discriminator.

        The generator's is over the masked tokens, and the discriminator's, of replaced or not, over all tokens.

        Raises:
            UsageError: The logits come from a model without its generator.
        """
        weight = self.discriminator_weight
        if not isinstance(logits, ReplacedTokenOutput):
            if len(batch.labels) > 0:
                raise UsageError(f"{self.name}: a loss needs what the generator returns, not logits alone")
            return (no_loss(GENERATOR, logits), no_loss(DISCRIMINATOR, logits, weight=weight))
        generator_total = logits.generator.cross_entropy(batch.labels.long())
        generator_count = generator_total.new_full((), len(logits.generator)).detach()
        # If the generator draws the original token, it counts as not replaced, as in ELECTRA.
        is_replaced = logits.replaced.to(logits.dtype)  # [N]
        discriminator_total = F.binary_cross_entropy_with_logits(logits.logits, is_replaced, reduction="sum")
        discriminator_count = discriminator_total.new_full((), len(logits.logits)).detach()
        return (
            LossTerm(name=GENERATOR, total=generator_total, count=generator_count),
            LossTerm(name=DISCRIMINATOR, total=discriminator_total, count=discriminator_count, weight=weight),
        )

    # Predictions

    def compact(self, logits: Sequence[Tensor], features: Sequence[Feature]) -> Sequence[Tensor]:
        """Returns ``[T, 6]`` for each window.

        The columns are the original id, whether it is of a word, the logit, whether the token is replaced, whether it
        is masked, and the id that the discriminator took as input. The last three are -1 if nothing was replaced.

        Args:
            logits: For each window ``[T, 4]`` as ``ReplacedTokenOutput.split`` returns it, or ``[T, 1]`` logits alone,
                if nothing was replaced.
            features: The features, in evaluation with masks.
        """
        tables = []
        for window_logits, feature in zip(logits, features, strict=True):
            word_ids = feature["word_ids"]
            # For the type checker, because the task always sets word_ids. Lists of two lengths would fail below.
            are_words = [] if word_ids is None else [float(word != NO_WORD) for word in word_ids]
            known = torch.tensor([_original_ids(feature), are_words], dtype=window_logits.dtype)  # [2, T]
            known = known.t().to(window_logits.device)  # [T, 2]
            evaluated = window_logits  # [T, 4]
            if evaluated.shape[1] != _EVALUATED_COLUMNS:  # logits alone
                evaluated = F.pad(window_logits, (0, _EVALUATED_COLUMNS - 1), value=_UNKNOWN)
            tables.append(torch.cat([known, evaluated], dim=1))
        return tables

    def decode(
        self,
        compact: Sequence[Tensor],
        features: Sequence[Feature],
        rows: Sequence[Row],
        tokenizer: "PreTrainedTokenizerBase",
    ) -> list[ReplacedTokenPrediction]:
        predictions = []
        for window_indices in windows_by_row(features):
            tables = [compact[index] for index in window_indices]
            predictions.append(_prediction(torch.cat(tables), tokenizer))
        return _with_examples(predictions, tokenizer)

    # Metrics and report

    def metrics(self, predictions: Sequence[ReplacedTokenPrediction], rows: Sequence[Row]) -> dict[str, float]:
        """Returns metrics of the discriminator, and the accuracy of the generator.

        The accuracy of the discriminator is not among them, because "not replaced" for every token has a high accuracy.

        Raises:
            DataError: No token was masked.
        """
        if not any(is_masked for _, _, is_masked in _measured_tokens(predictions)):
            raise DataError("no token was masked, because the texts are empty")
        metrics = {}
        for name, value in _measure(predictions).values().items():
            # None is undefined, such as the recall if the generator has drawn the original tokens only.
            metrics[name] = math.nan if value is None else value
        return metrics

    def decisions(self, prediction: ReplacedTokenPrediction) -> Sequence[bool]:
        """Returns for each token whether it seems to be replaced."""
        return [score > _DETECTED_ABOVE for score in prediction.scores]

    def degeneracy(self, predictions: Sequence[ReplacedTokenPrediction], rows: Sequence[Row]) -> str | None:
        """Returns what the model predicts for every token in evaluation, if it is one and the same.

        ``Output.degeneracy`` takes labels from the rows, but here they come from the generator. None if these are all
        alike, because then it may be right to predict one and the same.
        """
        labels = set[bool]()
        decisions = set[bool]()
        for logit, is_replaced, _ in _measured_tokens(predictions):
            labels.add(is_replaced)
            decisions.add(logit > 0)  # a logit above 0 is a probability above one half
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
            if prediction.measured:  # otherwise the prediction is not from evaluation
                pairs.append((row, prediction))
                results.append(_result(row, prediction))
        evaluated = [prediction for _, prediction in pairs]
        figures = {"tokens": 0, "masked": 0, "replaced": 0}
        for _, is_replaced, is_masked in _measured_tokens(evaluated):
            figures["tokens"] += 1
            figures["masked"] += is_masked
            figures["replaced"] += is_replaced
        return ReportSections(
            measure=_measure(evaluated),
            unit="texts",
            headline=("auc", "precision", "recall", "generator_accuracy"),
            results=tuple(results),
            examples=_examples(pairs, figures),
            figures=figures,
        )


def _original_ids(feature: Feature) -> list[int]:
    """Returns the ids of a window before some were masked.

    The labels of a masked window are the ids that were at its ``gather_positions``. A window that was not masked has
    none of them.
    """
    ids = list(feature["input_ids"])
    positions, labels = feature.get("gather_positions"), feature.get("labels")
    if positions is not None and labels is not None:
        for position, label in zip(positions, labels, strict=True):
            ids[position] = int(label)
    return ids


def _prediction(table: Tensor, tokenizer: "PreTrainedTokenizerBase") -> ReplacedTokenPrediction:
    """Returns the prediction of a row, without an example.

    Args:
        table: ``[N, 6]`` the columns of ``Replaced.compact`` for all of its windows.
        tokenizer: The tokenizer of the model.
    """
    measured: list[MeasuredToken] = []
    for logit, replaced, masked in table[:, _LOGIT:_INPUT_ID].tolist():
        if masked != _UNKNOWN:
            measured.append((logit, replaced > 0, masked > 0))
    of_words = table[table[:, _IS_WORD] > 0]
    ids: tuple[int, ...] = tuple(of_words[:, _ORIGINAL_ID].long().tolist())
    originals: tuple[int, ...] = ()
    if measured:  # the generator has replaced tokens, so the discriminator's are not those of the text
        originals = ids
        ids = tuple(of_words[:, _INPUT_ID].long().tolist())
    tokens = tokenizer.convert_ids_to_tokens(list(ids))
    return ReplacedTokenPrediction(
        tokens=tuple(str(token) for token in tokens),
        scores=tuple(of_words[:, _LOGIT].sigmoid().tolist()),
        measured=tuple(measured),
        ids=ids,
        originals=originals,
    )


def _with_examples(
    predictions: Sequence[ReplacedTokenPrediction], tokenizer: "PreTrainedTokenizerBase"
) -> list[ReplacedTokenPrediction]:
    """Returns the predictions, those with the largest errors with an example.

    Examples are made here because ``Replaced.report`` has no tokenizer, and for few rows because decoding takes time.
    """
    ranking: list[tuple[float, int]] = []  # the largest error first, and of equal ones the first row, as in _examples
    for index, prediction in enumerate(predictions):
        if prediction.originals:
            ranking.append((-prediction.largest_error, index))
    ranking.sort()
    with_examples = list(predictions)
    for _, index in ranking[:MOST_EXAMPLES]:
        prediction = predictions[index]
        with_examples[index] = replace(prediction, example=_example(prediction, tokenizer))
    return with_examples


def _measured_tokens(predictions: Sequence[ReplacedTokenPrediction]) -> list[MeasuredToken]:
    """Returns the tokens of all rows in evaluation, special tokens included."""
    return list(chain.from_iterable(prediction.measured for prediction in predictions))


def _measure(predictions: Sequence[ReplacedTokenPrediction]) -> MetricFormula:
    """Returns the metrics of all tokens in evaluation, as a formula over rows."""
    # Without the reshape, an array of no tokens would have no columns.
    table = np.array(_measured_tokens(predictions), dtype=np.float64).reshape(-1, 3)
    logits, replaced, masked = table.T
    sizes = [len(prediction.measured) for prediction in predictions]
    return replaced_token_measure(sizes, logits, replaced > 0, masked > 0)


def _result(row: Row, prediction: ReplacedTokenPrediction) -> RowResult:
    """Returns a row of the report.

    Its label is the list of replaced tokens, its prediction the list of detected tokens, and its score the largest
    error.
    """
    replaced: list[str] = []
    detected: list[str] = []
    is_correct = True
    tokens = zip(prediction.tokens, prediction.ids, prediction.originals, prediction.scores, strict=True)
    for text, token_id, original_id, score in tokens:
        is_replaced = token_id != original_id
        is_detected = score > _DETECTED_ABOVE
        if is_replaced:
            replaced.append(text)
        if is_detected:
            detected.append(text)
        if is_replaced != is_detected:
            is_correct = False
    error = prediction.largest_error
    return RowResult(row=row, label=replaced, prediction=detected, score=error, is_correct=is_correct)


def _examples(pairs: Sequence[tuple[Row, ReplacedTokenPrediction]], figures: Mapping[str, int]) -> Examples | None:
    """Returns the examples with the largest errors, or None if there are none.

    Args:
        pairs: Rows with their predictions.
        figures: The numbers of ``tokens``, of ``masked`` tokens and of ``replaced`` tokens in all rows.
    """
    worst_pairs = sorted(pairs, key=lambda pair: -pair[1].largest_error)[:MOST_EXAMPLES]
    items: list[Example] = []
    for row, prediction in worst_pairs:
        # Without ids before the replacement, which only evaluation knows, there is no example.
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
    """Returns the text of a row, with each replaced or detected token marked.

    Each of these tokens is a segment, and so is the text between them. A replaced token has a remark with its score.
    """
    segments: list[Segment] = []
    remarks: list[Remark] = []
    compared = zip(prediction.ids, prediction.originals, prediction.scores, strict=True)
    for is_marked, neighbours in groupby(compared, key=_is_marked):
        if not is_marked:
            # Decoded together, so that the tokenizer joins the pieces of words and sets the spaces.
            text = tokenizer.decode([token_id for token_id, _, _ in neighbours])
            segments.append(Segment(text=f" {text} "))
            continue
        for token_id, original_id, score in neighbours:
            text = str(tokenizer.decode([token_id])).strip()
            is_detected = score > _DETECTED_ABOVE
            label = ""
            if token_id != original_id:
                label = f"instead of {str(tokenizer.decode([original_id])).strip()}"
                tone: Literal["good", "bad"] = "good" if is_detected else "bad"
                remarks.append(Remark(name=f"{text} {label}", value=score, tone=tone))
            predicted_label = "replaced" if is_detected else ""
            segments.append(Segment(text=f" {text} ", label=label, prediction=predicted_label))
    return Example(line=None, excerpt=tuple(segments), remarks=tuple(remarks))


def _is_marked(compared: tuple[int, int, float]) -> bool:
    """Returns whether a token, as (id, original id, score), is replaced or detected."""
    token_id, original_id, score = compared
    return token_id != original_id or score > _DETECTED_ABOVE
