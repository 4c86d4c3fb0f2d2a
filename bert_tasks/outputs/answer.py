"""The answer to a question as a span of its context, or "no answer".

Owns loss, predictions, metrics and explanations. span_search.py searches the best spans, answer_report.py has what a
report shows of them, and squad_files.py the official files.

Shape legend: B windows, T tokens of the longest window, K n_best_size.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, tanh
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from bert_tasks.data.columns import Column, Row
from bert_tasks.encoder.config import HeadKind
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import DataError
from bert_tasks.metrics.squad import squad_v1_metrics, squad_v2_metrics, tune_null_threshold
from bert_tasks.metrics.tables import MetricTable
from bert_tasks.outputs.answer_report import answer_sections, answer_table, degenerate_answers, exact_match_name
from bert_tasks.outputs.base import LossTerm, Output, labelled, no_loss
from bert_tasks.outputs.explanation import ExplainedLogit, Explanation
from bert_tasks.outputs.features import Feature, windows_by_row
from bert_tasks.outputs.files import FileFormat
from bert_tasks.outputs.logits import NO_LOGIT, position_logits, softmax_divergence
from bert_tasks.outputs.prediction import NOT_WRITTEN, Prediction
from bert_tasks.outputs.sections import ReportSections
from bert_tasks.outputs.settings import fitted, require
from bert_tasks.outputs.span_search import Span, merge_windows, window_candidates
from bert_tasks.outputs.squad_files import SQUAD_FILES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_ANSWERS = 1000  # n_best_size. A window pairs as many starts with as many ends


@dataclass(frozen=True, kw_only=True)
class SpanPrediction(Prediction):
    """The prediction for one question, with names of transformers' former pipeline.

    Attributes:
        id: Id of the row, if it has one.
        answer: ``context[start:end]``. "" at 0 says that there is no answer.
        score: Probability of the answer among ``n_best``.
        null_score: Start and end logit of "no answer". None without ``version_2_with_negative``.
        null_odds: ``null_score`` minus the score of ``best``, or None. Above the threshold the answer is "".
        n_best: The best spans, best first. With ``version_2_with_negative`` "no answer" is among them.
        best: The best span that is not empty, or "no answer" if there is none.
        explanation: Explanation of ``answer``. Only on request.
    """

    id: str | None = None
    answer: str
    start: int
    end: int
    score: float
    null_score: float | None = None
    null_odds: float | None = None
    n_best: Sequence[Span]
    best: Span = field(metadata=NOT_WRITTEN)
    explanation: Explanation | None = None


@dataclass(frozen=True, kw_only=True)
class Answer(Output[SpanPrediction]):
    """A span of the context, by one softmax over the starts and one over the ends of a window.

    It is the output of extractive question answering, as Devlin et al. train BERT on SQuAD
    (https://arxiv.org/abs/1810.04805, section 4.2). Answers are copied from the context, never written freely. Rows
    have a ``context``. The windows' ``offsets`` say which of its characters a token stands for. Metrics are those of
    SQuAD's official scripts.

    Attributes:
        labels: None. Do not set them.
        n_best_size: Number of answers per question, and of starts and ends of a window that are paired.
        max_answer_length: Maximum number of tokens of an answer.
        version_2_with_negative: True if questions may have no answer (SQuAD 2.0).
        null_threshold: Null odds above which the prediction is "no answer", chosen on validation rows. None means 0.

    Examples:
        >>> Answer(version_2_with_negative=True).curves
        ('exact', 'f1')
    """

    name: ClassVar[str] = "answer"
    prediction: ClassVar[type[Prediction]] = SpanPrediction
    has_labels: ClassVar[bool] = False
    head_kind: ClassVar[HeadKind | None] = "span"
    pipeline_tag: ClassVar[str | None] = "question-answering"
    neutral_metrics: ClassVar[frozenset[str]] = frozenset(
        {"total", "HasAns_total", "NoAns_total", "best_exact_thresh", "best_f1_thresh"}
    )
    files: ClassVar[Mapping[str, FileFormat]] = MappingProxyType({".json": SQUAD_FILES})
    column: ClassVar[Column] = Column(name="answers", kind="answers", required=False)
    size: ClassVar[int] = 2
    no_teacher_reason: ClassVar[str | None] = None
    no_explanations_reason: ClassVar[str | None] = None
    primary_metric: ClassVar[str] = "f1"
    n_best_size: int = 20
    max_answer_length: int = 30
    version_2_with_negative: bool = False
    null_threshold: float | None = fitted(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.labels, "labels do not apply to span extraction. Remove them")
        require(self.n_best_size >= 1, f"n_best_size is {self.n_best_size}, expected at least 1")
        require(self.max_answer_length >= 1, f"max_answer_length is {self.max_answer_length}, expected at least 1")
        require(
            self.n_best_size <= _MOST_ANSWERS,
            f"n_best_size is {self.n_best_size}, expected at most {_MOST_ANSWERS}",
        )
        require(
            self.null_threshold is None or isfinite(self.null_threshold),
            f"null_threshold is {self.null_threshold}, expected a finite number",
        )

    # Training

    def loss(self, logits: Tensor, batch: PackedBatch) -> tuple[LossTerm, ...]:
        """Returns the summed cross entropy of start and end over the tokens of labelled windows."""
        parts = torch.split(logits, list(batch.layout.gather_counts))
        labelled_windows = [window for window, count in zip(parts, batch.label_counts, strict=True) if count]
        if not labelled_windows:
            return (no_loss(self.name, logits),)
        # A start and an end are two examples each with a class for every token. Their mean is transformers' loss.
        scores = position_logits(labelled_windows, absent=-torch.inf)  # [2 B, T]
        total = F.cross_entropy(scores, batch.labels.long(), reduction="sum")
        return (LossTerm(name=self.name, total=total, count=logits.new_full((), len(scores))),)

    def divergence(
        self, student: Tensor, teacher: Tensor, batch: PackedBatch, temperature: float
    ) -> tuple[Tensor, float]:
        """Returns the divergence of the starts and of the ends of each window."""
        sizes = list(batch.layout.gather_counts)
        of_student = position_logits(torch.split(student, sizes), absent=NO_LOGIT)  # [2 B, T]
        of_teacher = position_logits(torch.split(teacher, sizes), absent=NO_LOGIT)  # [2 B, T]
        return softmax_divergence(of_student, of_teacher, temperature), float(len(of_student))

    def divergence_count(self, features: Sequence[Feature]) -> float:
        return float(self.size * len(features))

    # Values fitted to data

    def fit_rows(self, rows: Iterable[Row]) -> Self:
        """Returns the output, or raises DataError for unexpected unanswered questions."""
        if not self.version_2_with_negative:
            _refuse_unanswerable(rows)
        return self

    def tune(self, predictions: Sequence[SpanPrediction], rows: Sequence[Row]) -> Self:
        """Sets the threshold with the best F1, if ``version_2_with_negative``."""
        answered, labels = _answered_rows(predictions, rows)
        if not self.version_2_with_negative or not answered:
            return self
        # The best span of each question, also if the present threshold made "no answer" of it.
        spans = [prediction.best.text for prediction in answered]
        odds = [_null_odds(prediction) for prediction in answered]
        return replace(self, null_threshold=tune_null_threshold(labels, spans, odds))

    # Predictions

    def compact(self, logits: Sequence[Tensor], features: Sequence[Feature]) -> Sequence[Tensor]:
        """Returns ``[K + 1, 4]`` for each window from ``window_candidates``."""
        roles = [bytes(_offsets(feature)[2::3]) for feature in features]
        candidates = window_candidates(logits, roles, n_best=self.n_best_size, max_answer_length=self.max_answer_length)
        # One copy from the device for all windows. As views they would each be sent with the memory of all.
        return [window.clone() for window in candidates.cpu()]

    def decode(
        self,
        compact: Sequence[Tensor],
        features: Sequence[Feature],
        rows: Sequence[Row],
        tokenizer: "PreTrainedTokenizerBase",
    ) -> list[SpanPrediction]:
        offsets = [_offsets(feature) for feature in features]
        counts = [len(windows) for windows in windows_by_row(features)]
        contexts = [row["context"] for row in rows]
        with_null = self.version_2_with_negative
        ranked = merge_windows(compact, offsets, counts, contexts, n_best=self.n_best_size, with_null=with_null)
        threshold = 0.0 if self.null_threshold is None else self.null_threshold
        predictions = []
        for spans, row in zip(ranked, rows, strict=True):
            answer = spans.answer(threshold)
            null_score = None
            if spans.null is not None:
                null_score = spans.null.start_logit + spans.null.end_logit
            prediction = SpanPrediction(
                id=row.get("id"),
                answer=answer.text,
                start=answer.start,
                end=answer.end,
                score=answer.score,
                null_score=null_score,
                null_odds=spans.null_odds,
                n_best=spans.n_best,
                best=spans.best,
            )
            predictions.append(prediction)
        return predictions

    def with_logits(
        self, predictions: Sequence[SpanPrediction], compact: Sequence[Tensor], features: Sequence[Feature]
    ) -> list[SpanPrediction]:
        """Returns the predictions, because ``n_best`` has the start and end logit of every span."""
        return [*predictions]

    def explained_logits(
        self,
        predictions: Sequence[SpanPrediction],
        compact: Sequence[Tensor],
        features: Sequence[Feature],
        rows: Sequence[Row],
        texts: Sequence[str],
    ) -> list[ExplainedLogit]:
        """Explains start and end logit of the answer, or token 0 for "no answer"."""
        explained = []
        for prediction, windows, row in zip(predictions, windows_by_row(features), rows, strict=True):
            window, start, end = _answer_tokens(prediction, windows, compact, features)
            logit = ExplainedLogit(
                label=prediction.answer,
                texts={name: row[name] for name in texts},
                terms=((window, 2 * start, 1.0), (window, 2 * end + 1, 1.0)),
            )
            explained.append(logit)
        return explained

    # Metrics and report

    def metrics(self, predictions: Sequence[SpanPrediction], rows: Sequence[Row]) -> dict[str, float]:
        """Returns SQuAD's metrics on a scale of 0 to 100.

        They are 2.0's with ``version_2_with_negative``, else 1.1's. The scores count the answers, whatever threshold
        decided about each. ``best_f1`` and the like are scores of the best spans with one threshold for all.

        Raises:
            DataError: A question has no answer and the settings do not expect that, or no row has answers.
        """
        answered, labels = _answered_rows(predictions, rows)
        answers = [prediction.answer for prediction in answered]
        if not self.version_2_with_negative:
            _refuse_unanswerable(rows)
            return squad_v1_metrics(labels, answers)
        spans = [prediction.best.text for prediction in answered]
        odds = [_null_odds(prediction) for prediction in answered]
        with_best_threshold = squad_v2_metrics(labels, spans, odds)
        return {**with_best_threshold, **squad_v2_metrics(labels, answers, None)}

    def metric_inputs(
        self, predictions: Sequence[SpanPrediction], rows: Sequence[Row]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Returns the answers by the ids of their rows. Rows have their numbers instead if ids are missing or repeated.

        It is the form of evaluate's squad (https://huggingface.co/spaces/evaluate-metric/squad), and with
        ``version_2_with_negative`` of squad_v2 (https://huggingface.co/spaces/evaluate-metric/squad_v2). There the
        probability of no answer is the sigmoid of the null odds.
        """
        predicted, references = [], []
        pairs = labelled(rows, predictions, "answers")
        ids = [row.get("id") for row, _ in pairs]
        has_ids = None not in ids and len(set(ids)) == len(ids)
        for number, (row, prediction) in enumerate(pairs):
            name = ids[number] if has_ids else str(number)
            answer: dict[str, Any] = {"id": name, "prediction_text": prediction.answer}
            if self.version_2_with_negative:
                # The sigmoid, written as a tanh, which cannot overflow.
                answer["no_answer_probability"] = 0.5 + 0.5 * tanh(_null_odds(prediction) / 2)
            predicted.append(answer)
            texts, starts = row["answers"]["text"], row["answers"]["answer_start"]
            references.append({"id": name, "answers": {"text": list(texts), "answer_start": list(starts)}})
        return predicted, references

    @property
    def curves(self) -> tuple[str, ...]:
        return (exact_match_name(version_2=self.version_2_with_negative), "f1")

    def metric_table(self, metrics: Mapping[str, float]) -> MetricTable:
        """Adds rows for ``version_2_with_negative``'s questions with and without answer."""
        return answer_table(metrics)

    def report(
        self, predictions: Sequence[SpanPrediction], rows: Sequence[Row], texts: Sequence[str]
    ) -> ReportSections:
        return answer_sections(
            labelled(rows, predictions, "answers"),
            version_2=self.version_2_with_negative,
            null_threshold=self.null_threshold,
        )

    def decisions(self, prediction: SpanPrediction) -> Sequence[tuple[int, str]]:
        return ((prediction.start, prediction.answer),)

    def degeneracy(self, predictions: Sequence[SpanPrediction], rows: Sequence[Row]) -> str | None:
        """Treats answers with one text, or at one position of different contexts, as equal."""
        return degenerate_answers(labelled(rows, predictions, "answers"))


def _answer_tokens(
    prediction: SpanPrediction, windows: Sequence[int], compact: Sequence[Tensor], features: Sequence[Feature]
) -> tuple[int, int, int]:
    """Returns the window with the best logits of an answer, and the answer's first and last token in it.

    Args:
        prediction: The prediction for a row.
        windows: The indices of the row's features.
        compact: The result of ``Answer.compact`` for all features.
        features: All features.
    """
    candidates: list[tuple[float, int, int, int]] = []  # score, window, start and end token
    for window in windows:
        null, *spans = compact[window].tolist()
        if prediction.answer == "":
            candidates.append((-null[2] - null[3], window, 0, 0))  # decode takes the lowest score of "no answer"
            continue
        offsets = _offsets(features[window])
        for first_token, last_token, start_logit, end_logit in spans:
            if first_token < 0:  # fewer spans than rows
                continue
            start, end = int(first_token), int(last_token)
            if (offsets[3 * start], offsets[3 * end + 1]) == (prediction.start, prediction.end):  # see ``Feature``
                candidates.append((start_logit + end_logit, window, start, end))
    _, window, start, end = max(candidates, key=lambda candidate: candidate[0])
    return window, start, end


def _offsets(feature: Feature) -> Sequence[int]:
    """Returns the characters and the role of each token of a window, three numbers for each."""
    offsets = feature.get("offsets")
    return () if offsets is None else offsets


def _null_odds(prediction: SpanPrediction) -> float:
    """Returns the null odds of a prediction, and 0 if "no answer" was not allowed."""
    return 0.0 if prediction.null_odds is None else prediction.null_odds


def _answered_rows(
    predictions: Sequence[SpanPrediction], rows: Sequence[Row]
) -> tuple[list[SpanPrediction], list[list[str]]]:
    """Returns the predictions for the rows that have answers, and the answers' texts."""
    answered: list[SpanPrediction] = []
    texts: list[list[str]] = []
    for row, prediction in labelled(rows, predictions, "answers"):
        answered.append(prediction)
        texts.append(row["answers"]["text"])
    return answered, texts


def _refuse_unanswerable(rows: Iterable[Row]) -> None:
    """Raises DataError if a question has no answer in its context. Rows without ``answers`` have no label."""
    for number, row in enumerate(rows):
        answers = row.get("answers")
        if answers is None or answers["text"]:
            continue
        source = f"row {number}"
        if row.get("id") is not None:
            source = f"row {number} (id {row['id']!r})"
        raise DataError(
            f"{source}: the question has no answer, expected at least one. Set version_2_with_negative = true "
            "(SQuAD 2.0), or remove such questions"
        )
