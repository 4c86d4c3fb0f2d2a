"""Masked tokens, and the class of a pair of sentences, from logits over the vocabulary.

Shape legend: B windows, R masked tokens, V vocabulary, K candidates of a masked token, C tokens of context.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bert_tasks.data.columns import Column, Row
from bert_tasks.encoder.config import HeadKind
from bert_tasks.encoder.heads import PretrainingOutput, VocabularyOutput
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import DataError
from bert_tasks.metrics.formulas import MetricFormula, masked_token_measure
from bert_tasks.outputs.base import LossTerm, Output
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.logits import vocabulary_divergence, vocabulary_output
from bert_tasks.outputs.mask_prediction import MASK as MASK
from bert_tasks.outputs.mask_prediction import Candidate as Candidate
from bert_tasks.outputs.mask_prediction import MaskedToken as MaskedToken
from bert_tasks.outputs.mask_prediction import MaskPrediction as MaskPrediction
from bert_tasks.outputs.mask_prediction import with_texts
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.outputs.sections import (
    MOST_EXAMPLES,
    RIGHT,
    WRONG,
    Example,
    Examples,
    Remark,
    ReportSections,
    RowResult,
    Segment,
    per_cent,
)
from bert_tasks.outputs.settings import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SentenceObjective = Literal["none", "nsp", "sop"]

NO_LABELS = "labels do not apply to masked language modeling. Remove them"
MASKED_LM = "masked_lm"  # the term of the loss
PAIR_TERMS: Mapping[SentenceObjective, str] = MappingProxyType({"nsp": "next_sentence", "sop": "sentence_order"})
PAIR = "pair"  # the name in ``Feature.fields``
NO_PAIR = -1.0  # the label of a window that is no pair
_CONTEXT = 8  # tokens on both sides of a masked token that a report shows
_AROUND = 2 * _CONTEXT + 1  # C, the masked token and its context
_NO_TOKEN = -1  # instead of the id of a label, and of a token beyond the ends of a window


@dataclass(frozen=True, kw_only=True)
class Vocabulary(Output[MaskPrediction]):
    """A token of the vocabulary for each masked token, by a softmax over the vocabulary.

    It is the output of masked language modelling, with which encoders are pre-trained (Devlin et al., BERT,
    https://arxiv.org/abs/1810.04805, section 3.1). Only the masked tokens go through the head, because the logits over
    a vocabulary are by far the largest tensor of a step. With a sentence objective, the head also has two logits for
    the pair of sentences in a window.

    Attributes:
        labels: None. Do not set them.
        sentence_objective: Objective for two sentences, in addition to the masked tokens. ``nsp`` is whether the second
            follows the first (BERT), and ``sop`` which of them is the first (ALBERT). Windows then hold whole
            sentences, which are the row's ``sentences`` or the lines of its text.
        top_k: Candidates for each mask.
        score: What ``predict`` returns for a text instead of candidates for its masks: ``pppl``, its pseudo-perplexity,
            or ``pll-word-l2r``, its pseudo-log-likelihood. Each token takes a forward pass of its window.

    Examples:
        >>> MaskedLanguageModeling.of(top_k=3).output
        Vocabulary(labels=(), sentence_objective='none', top_k=3, score='none')
    """

    name: ClassVar[str] = "masked-tokens"
    prediction: ClassVar[type[Prediction]] = MaskPrediction
    has_labels: ClassVar[bool] = False
    head_kind: ClassVar[HeadKind | None] = "masked-lm"
    pipeline_tag: ClassVar[str | None] = "fill-mask"
    primary_metric: ClassVar[str] = "perplexity"
    lower_is_better: ClassVar[frozenset[str]] = frozenset({"perplexity"})
    no_teacher_reason: ClassVar[str | None] = None
    column: ClassVar[Column | None] = None
    sentence_objective: SentenceObjective = "none"
    top_k: int = 5
    score: Literal["none"] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.labels, NO_LABELS)
        require(self.top_k >= 1, f"top_k is {self.top_k}, expected at least 1")

    # Training

    def counts(self, features: Sequence[Feature]) -> dict[str, float]:
        """Returns the number of masked tokens, and the number of pairs if there is a sentence objective."""
        masked, pairs = 0, 0
        for feature in features:
            labels = feature.get("labels")
            if labels:
                masked += len(labels)
            if _pair_label(feature) != NO_PAIR:
                pairs += 1
        counts = {MASKED_LM: float(masked)}
        if self.sentence_objective != "none":
            counts[PAIR_TERMS[self.sentence_objective]] = float(pairs)
        return counts

    def loss(self, logits: Any, batch: PackedBatch) -> tuple[LossTerm, ...]:
        """Returns the cross entropy of the masked tokens and, with a sentence objective, of the pairs."""
        vocabulary = _labelled_tokens(vocabulary_output(logits), batch)
        total = vocabulary.cross_entropy(batch.labels.long())
        masked = LossTerm(name=MASKED_LM, total=total, count=total.new_full((), len(vocabulary)).detach())
        # A teacher's head may have pairs that its student does not learn, or none.
        if self.sentence_objective == "none" or not isinstance(logits, PretrainingOutput):
            return (masked,)
        labels = batch.fields.get(PAIR, logits.pairs.new_full((len(logits.pairs),), NO_PAIR))
        # Windows without a pair stay in the batch and are ignored, so that no number of pairs has to leave the device.
        total = F.cross_entropy(logits.pairs, labels.long(), ignore_index=int(NO_PAIR), reduction="sum")
        count = (labels != NO_PAIR).sum().to(total.dtype)
        return masked, LossTerm(name=PAIR_TERMS[self.sentence_objective], total=total, count=count)

    def divergence(self, student: Any, teacher: Any, batch: PackedBatch, temperature: float) -> tuple[Tensor, float]:
        """Returns the divergence of the masked tokens. Pairs of sentences have no share."""
        return vocabulary_divergence(vocabulary_output(student), vocabulary_output(teacher), temperature)

    def divergence_count(self, features: Sequence[Feature]) -> float:
        """Returns the number of tokens that the head reads."""
        count = 0
        for feature in features:
            positions = feature.get("gather_positions")
            read = feature["input_ids"] if positions is None else positions
            count += len(read)
        return float(count)

    # Predictions

    def compact(self, logits: Sequence[Any], features: Sequence[Feature]) -> Sequence[Tensor]:
        """Returns ``[R, 2 + 2 K + C]`` for each window.

        The columns are the label, its log-probability, the best ids, and their probabilities. The ids around the token
        follow if it has a label. With a sentence objective the first row is the label and the prediction of the pair.
        """
        outputs = [vocabulary_output(each) for each in logits]
        sizes = [len(output) for output in outputs]
        whole = VocabularyOutput.cat(outputs)
        notes: list[list[int]] = []
        for feature, size in zip(features, sizes, strict=True):
            notes += _notes(feature, size)
        table = torch.tensor(notes, dtype=torch.int64).view(len(whole), 1 + _AROUND).to(whole.hidden.device)
        labels = table[:, 0]
        rows = []
        # Chunk by chunk, because all logits over the vocabulary together may not fit into the memory.
        for scores, ids in zip(whole.log_softmax(), torch.split(labels, whole.chunk_rows), strict=True):
            best = scores.topk(min(self.top_k, scores.shape[1]), dim=1)
            of_label = scores.gather(1, ids.clamp(min=0).unsqueeze(1))  # without a label, of token 0, and not read
            rows.append(torch.cat([of_label, best.indices.to(scores.dtype), best.values.exp()], dim=1))
        context = table.to(rows[0].dtype)
        windows = torch.split(torch.cat([context[:, :1], torch.cat(rows), context[:, 1:]], dim=1), sizes)
        if self.sentence_objective == "none":
            return windows
        with_pairs = []
        for output, feature, window in zip(logits, features, windows, strict=True):
            with_pairs.append(torch.cat([_pair_row(output, feature, window), window]))
        return with_pairs

    def decode(
        self,
        compact: Sequence[Tensor],
        features: Sequence[Feature],
        rows: Sequence[Row],
        tokenizer: "PreTrainedTokenizerBase",
    ) -> list[MaskPrediction]:
        predictions = []
        for row, windows in zip(rows, row_values(compact, features, len(rows)), strict=True):
            pairs: list[tuple[int, int]] = []
            masks: list[tuple[Candidate, ...]] = []
            measured: list[MaskedToken] = []
            for window in windows:
                rows_of_tokens = window
                if self.sentence_objective != "none":
                    pair, *rows_of_tokens = window
                    if pair[0] != NO_PAIR:
                        pairs.append((int(pair[0]), int(pair[1])))
                for values in rows_of_tokens:
                    token = _masked_token(values)
                    if token.label == _NO_TOKEN:
                        masks.append(token.candidates)
                    else:
                        measured.append(token)
            prediction = MaskPrediction(
                masks=tuple(masks), row_text=row["text"], measured=tuple(measured), pairs=tuple(pairs)
            )
            predictions.append(prediction)
        return with_texts(predictions, tokenizer)

    # Metrics and report

    def metrics(self, predictions: Sequence[MaskPrediction], rows: Sequence[Row]) -> dict[str, float]:
        """Returns the perplexity and accuracy of masked tokens, and the accuracy of pairs.

        The perplexity is exp of the mean cross entropy.

        Raises:
            DataError: No token was masked.
        """
        if not any(prediction.measured for prediction in predictions):
            raise DataError("no token was masked, because the texts are empty")
        metrics: dict[str, float] = {}
        for name, value in _measure(predictions).values().items():
            metrics[name] = math.inf if value is None else value
        pairs = _pairs_of(predictions)
        if pairs and self.sentence_objective != "none":
            correct = sum(label == predicted for label, predicted in pairs)
            metrics[f"{PAIR_TERMS[self.sentence_objective]}_accuracy"] = correct / len(pairs)
        return metrics

    def decisions(self, prediction: MaskPrediction) -> Sequence[int]:
        """Returns the best candidate for each mask."""
        best = [candidates[0].token for candidates in prediction.masks]
        best += [mask.candidates[0].token for mask in prediction.measured]
        return best

    def degeneracy(self, predictions: Sequence[MaskPrediction], rows: Sequence[Row]) -> str | None:
        """Compares the tokens that evaluation masked, and the pairs that it made."""
        labels = set[int]()
        best: dict[int, str] = {}
        for prediction in predictions:
            for mask in prediction.measured:
                labels.add(mask.label)
                best[mask.candidates[0].token] = mask.candidates[0].token_str
        if len(labels) > 1 and len(best) == 1:
            return f"predicts {best.popitem()[1]!r} for every masked token"
        pairs = _pairs_of(predictions)
        pair_labels = {label for label, _ in pairs}
        pair_classes = {predicted for _, predicted in pairs}
        if len(pair_labels) > 1 and len(pair_classes) == 1:
            return f"predicts class {pair_classes.pop()} for every pair of sentences"
        return None

    def agreements(self, predictions: Sequence[MaskPrediction], others: Sequence[MaskPrediction]) -> list[bool]:
        """See ``Output.agreements``. Texts without a mask cannot show whether models agree."""
        agreements = super().agreements(predictions, others)
        if not agreements:
            raise DataError("no text has a mask ([MASK] or <mask>), so that the predictions cannot be compared")
        return agreements

    def report(
        self, predictions: Sequence[MaskPrediction], rows: Sequence[Row], texts: Sequence[str]
    ) -> ReportSections:
        pairs: list[tuple[Row, MaskPrediction]] = []
        results: list[RowResult] = []
        for row, prediction in zip(rows, predictions, strict=True):
            if prediction.measured:
                pairs.append((row, prediction))
                results.append(_result(row, prediction.measured))
        return ReportSections(
            measure=_measure([prediction for _, prediction in pairs]),
            unit="texts",
            headline=("perplexity", "accuracy"),
            results=tuple(results),
            summary=_summary([prediction for _, prediction in pairs]),
            examples=_examples(pairs),
        )


def row_values(compact: Sequence[Tensor], features: Sequence[Feature], count: int) -> Iterator[list[Any]]:
    """Yields the numbers of each row's windows, for ``count`` rows.

    A row has no window if it is in the window of another one.
    """
    counts = Counter(feature["row"] for feature in features)
    remaining = (window.tolist() for window in compact)
    for number in range(count):
        yield list(islice(remaining, counts[number]))


# The loss


def _labelled_tokens(vocabulary: VocabularyOutput, batch: PackedBatch) -> VocabularyOutput:
    """Returns the tokens with labels. Windows that were not prepared have the masks of their texts, without labels."""
    if all(batch.label_counts):
        return vocabulary
    sizes: list[int] = []  # with labels and without, alternately
    for count, labels in zip(batch.layout.gather_counts, batch.label_counts, strict=True):
        kept = count if labels else 0
        sizes += [kept, count - kept]
    return VocabularyOutput.cat(vocabulary.split(sizes)[::2])


def _pair_label(feature: Feature) -> float:
    """Returns the label of the pair of sentences in a window, or ``NO_PAIR``."""
    return feature.get("fields", {}).get(PAIR, (NO_PAIR,))[0]


# Predictions


def _pair_row(logits: Any, feature: Feature, window: Tensor) -> Tensor:
    """Returns ``[1, width of the window's rows]`` with a pair's label and prediction."""
    row = window.new_zeros(1, window.shape[1])
    row[0, 0] = NO_PAIR
    if isinstance(logits, PretrainingOutput):
        row[0, 0] = _pair_label(feature)
        row[0, 1] = logits.pairs.argmax()
    return row


def _notes(feature: Feature, count: int) -> list[list[int]]:
    """Returns the label of each of ``count`` tokens, and the ids around labels, ``[R, 1 + C]``."""
    positions, labels = feature.get("gather_positions"), feature.get("labels")
    if not labels or positions is None:
        return [[_NO_TOKEN] * (1 + _AROUND)] * count
    ends = [_NO_TOKEN] * _CONTEXT
    padded = [*ends, *feature["input_ids"], *ends]  # token i stands at i + _CONTEXT, so its context begins at i
    notes: list[list[int]] = []
    for position, label in zip(positions, labels, strict=True):
        notes.append([int(label), *padded[position : position + _AROUND]])
    return notes


def _masked_token(values: Sequence[float]) -> MaskedToken:
    """Returns the token of a row of ``Vocabulary.compact``, without texts."""
    label, log_probability = int(values[0]), values[1]
    best, window = values[2:-_AROUND], values[-_AROUND:]
    top_k = len(best) // 2
    candidates: list[Candidate] = []
    for token, score in zip(best[:top_k], best[top_k:], strict=True):
        candidates.append(Candidate(score=score, token=int(token), token_str="", sequence=""))
    before = tuple(int(token) for token in window[:_CONTEXT] if token != _NO_TOKEN)
    after = tuple(int(token) for token in window[_CONTEXT + 1 :] if token != _NO_TOKEN)
    return MaskedToken(
        candidates=tuple(candidates), label=label, log_probability=log_probability, context=(before, after)
    )


# Metrics and report


def _pairs_of(predictions: Sequence[MaskPrediction]) -> list[tuple[int, int]]:
    """Returns the label and the prediction of all pairs of sentences."""
    return list(chain.from_iterable(prediction.pairs for prediction in predictions))


def _measure(predictions: Sequence[MaskPrediction]) -> MetricFormula:
    """Returns perplexity and accuracy over the masked tokens of all rows."""
    counts: list[int] = []
    losses: list[float] = []
    correct: list[int] = []
    for prediction in predictions:
        masks = prediction.measured
        counts.append(len(masks))
        losses.append(-sum(mask.log_probability for mask in masks))
        correct.append(sum(mask.is_correct for mask in masks))
    return masked_token_measure(counts, losses, correct)


def _summary(predictions: Sequence[MaskPrediction]) -> str:
    """Returns in words how many masked tokens are predicted right."""
    masks = list(chain.from_iterable(prediction.measured for prediction in predictions))
    if not masks:
        return ""
    right = sum(mask.is_correct for mask in masks)
    return f"{right:,} of the {len(masks):,} masked tokens are predicted right ({per_cent(right, len(masks))})"


def _result(row: Row, masks: Sequence[MaskedToken]) -> RowResult:
    """Returns masked and predicted tokens, with the score of the most confident mistake."""
    mistakes = [mask.candidates[0].score for mask in masks if not mask.is_correct]
    return RowResult(
        row=row,
        label=[mask.label_str for mask in masks],
        prediction=[mask.candidates[0].token_str for mask in masks],
        score=max(mistakes, default=0.0),
        is_correct=not mistakes,
    )


def _examples(pairs: Sequence[tuple[Row, MaskPrediction]]) -> Examples | None:
    """Returns the least probable token of each row, or None if there is none."""
    shown: list[tuple[Row, MaskedToken]] = []
    for row, prediction in pairs:
        shown += [(row, mask) for mask in prediction.measured if mask.before or mask.after]
    if not shown:
        return None
    shown.sort(key=lambda pair: pair[1].log_probability)
    items = [_example(row, mask) for row, mask in shown[:MOST_EXAMPLES]]
    return Examples(
        word="Masked tokens",
        title="Masked tokens that the model found least probable",
        lead="One of each text, as the model saw it, with the tokens that it found most probable.",
        items=tuple(items),
    )


def _example(row: Row, mask: MaskedToken) -> Example:
    """Returns a masked token in its context, with the most probable tokens."""
    verdict = RIGHT if mask.is_correct else WRONG
    candidates = [(candidate.token_str, candidate.score) for candidate in mask.candidates]
    return Example(
        line=row.get("line"),
        excerpt=(
            Segment(text=f"{mask.before} "),
            Segment(text=mask.label_str.strip(), label="masked"),
            Segment(text=f" {mask.after}"),
        ),
        remarks=(
            verdict,
            Remark(name="masked token", value=mask.label_str),
            Remark(name="prediction", value=mask.candidates[0].token_str),
        ),
        candidates=tuple(candidates),
    )
