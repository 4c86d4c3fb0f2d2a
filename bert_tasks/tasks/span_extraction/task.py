"""Span extraction, the part of a context that answers a question, or "no answer".

Owns the settings, features, loss, predictions and metrics of the task. windows.py cuts contexts, and search.py searches
the best spans.

Shape legend: R tokens of a batch, B windows, T tokens of the longest window, K n_best_size.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bert_tasks.data.columns import Column, Row
from bert_tasks.data.table import Truncation
from bert_tasks.encoder import heads
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import Head
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import DataError, UsageError
from bert_tasks.metrics.squad import squad_v1_metrics, squad_v2_metrics, tune_null_threshold
from bert_tasks.tasks.base import NOT_WRITTEN, Feature, LossTerm, OutputKind, Part, Prediction, Task, labelled
from bert_tasks.tasks.shared.card import Card
from bert_tasks.tasks.shared.encoding import tokenized
from bert_tasks.tasks.shared.explanation import Explainable, ExplainedLogit, Explanation, TokenSpan
from bert_tasks.tasks.shared.fitting import Fitting
from bert_tasks.tasks.shared.hf_config import HFConfig
from bert_tasks.tasks.shared.outputs import position_logits, windows_by_row
from bert_tasks.tasks.shared.rendering import Rendering
from bert_tasks.tasks.shared.special_tokens import Frame
from bert_tasks.tasks.shared.windows import Windows, cut, richest_windows
from bert_tasks.tasks.span_extraction.detection import SpanDetection
from bert_tasks.tasks.span_extraction.report import SpanReport
from bert_tasks.tasks.span_extraction.search import Span, merge_windows, window_candidates
from bert_tasks.tasks.span_extraction.windows import (
    ContextTokens,
    answer_characters,
    answer_tokens,
    tokenized_contexts,
    window_offsets,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FEWEST_SPECIAL_TOKENS, MOST_SPECIAL_TOKENS = 3, 4  # around a pair, most for RoBERTa


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


_MOST_ANSWERS = 1000  # n_best_size. A window pairs as many starts with as many ends


class SpanFormats(Card, Rendering, HFConfig):
    """Span extraction on cards, in prediction files and in transformers' config."""

    task: "SpanExtraction"
    pipeline_tag: ClassVar[str] = "question-answering"
    file_formats: ClassVar[tuple[str, ...]] = (".json",)
    has_labels: ClassVar[bool] = False
    default_head: ClassVar[Literal["span"]] = "span"

    @property
    def example_rows(self) -> Sequence[Row]:
        notice = (
            "The library opens at nine on weekdays and at ten on Saturdays. It is closed on Sundays. "
            "Members may borrow six books for three weeks."
        )
        return [
            {"question": "Who wrote it?", "context": "The letter was written by Ada in May."},
            {"question": "How many books may members borrow?", "context": notice},
            {"question": "Who founded the library?", "context": notice},
        ]

    def check(self, extension: str, rows: Iterable[Row]) -> tuple[str, ...]:
        """Checks that the official files have one answer for each id.

        Raises:
            DataError: two rows have the same id.
        """
        _file_ids(row.get("id") for row in rows)
        return ()

    def render(self, extension: str, predictions: Sequence[SpanPrediction], rows: Sequence[Row]) -> Mapping[str, str]:
        """Writes answers by id, ``nbest.json`` and, for 2.0 only, ``null_odds.json``.

        These are the official files. Rows without an id have their number, from 0.

        Raises:
            DataError: Two rows have the same id.
        """
        if extension not in self.file_formats:
            return super().render(extension, predictions, rows)
        named = dict(zip(_file_ids(prediction.id for prediction in predictions), predictions, strict=True))
        official = {"text": "text", "probability": "score", "start_logit": "start_logit", "end_logit": "end_logit"}
        files: dict[str, Mapping[str, Any]] = {
            "": {name: prediction.answer for name, prediction in named.items()},
            "nbest.json": {
                name: [{key: getattr(span, field) for key, field in official.items()} for span in prediction.n_best]
                for name, prediction in named.items()
            },
        }
        if self.task.version_2_with_negative:
            files["null_odds.json"] = {name: prediction.null_odds for name, prediction in named.items()}
        return {name: json.dumps(content, indent=4) + "\n" for name, content in files.items()}

    def implied_fields(
        self, hf_config: Mapping[str, Any], labels: tuple[str, ...], usable_length: int
    ) -> dict[str, Any]:
        """Returns the defaults, made smaller for models with a short input."""
        max_length = min(self.task.max_length, usable_length)
        max_query_length = min(self.task.max_query_length, max_length // 4)
        room = max_length - max_query_length - MOST_SPECIAL_TOKENS
        doc_stride = min(self.task.doc_stride, room // 2)
        return {"max_length": max_length, "max_query_length": max_query_length, "doc_stride": doc_stride}


class SpanFitting(Fitting, Windows):
    """Training of span extraction, and the notes on skipped context."""

    task: "SpanExtraction"
    fields: ClassVar[tuple[str, ...]] = ("null_threshold",)
    sample: ClassVar[Literal["row", "window"]] = "window"

    def fit_to_train(self, rows: Iterable[Row]) -> Any:
        """Returns the task, or raises DataError for unexpected unanswered questions."""
        if not self.task.version_2_with_negative:
            _refuse_unanswerable(rows)
        return self.task

    def tune_on_validation(self, predictions: Sequence[SpanPrediction], rows: Sequence[Row]) -> Any:
        """Sets the threshold with the best F1, if ``version_2_with_negative``."""
        answered, labels = _answered_rows(predictions, rows)
        if not self.task.version_2_with_negative or not answered:
            return self.task
        spans, odds = [prediction.best.text for prediction in answered], list(map(_null_odds, answered))
        return replace(self.task, null_threshold=tune_null_threshold(labels, spans, odds))

    def cut_notes(self, cuts: Truncation) -> tuple[str, ...]:
        """Questions that were cut, and those whose answer is in no window."""
        notes = []
        if cuts.cut_rows:
            limit = f"max_query_length = {self.task.max_query_length} tokens"
            are, were = ("is", "was") if cuts.cut_rows == 1 else ("are", "were")
            notes.append(f"{cuts.share(cuts.cut_rows)} questions {are} longer than {limit} and {were} cut")
        if cuts.lost_answers:
            have = "has" if cuts.lost_answers == 1 else "have"
            notes.append(
                f"{cuts.share(cuts.lost_answers)} questions {have} an answer that no window of max_length = "
                f"{self.task.max_length} tokens holds whole. Training takes them for questions without an "
                "answer. Raise max_length, or doc_stride to the length of the longest answer"
            )
        return tuple(notes)


class SpanExplainable(Explainable):
    """Explains a logit of span extraction."""

    task: "SpanExtraction"

    def token_spans(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[list[TokenSpan | None]]:
        if not rows:
            return []
        frame = Frame.of(tokenizer, texts=2)
        contexts = tokenized_contexts([row["context"] for row in rows], tokenizer)
        texts = [row["question"] for row in rows]
        questions = tokenized([text.lstrip() for text in texts], tokenizer, offsets=True)["offset_mapping"]
        before, between, after = ([None] * len(ids) for ids in (frame.before, frame.between, frame.after))
        row_spans: list[list[TokenSpan | None]] = []
        for row, text, offsets in zip(rows, texts, questions, strict=True):
            shift, context = len(text) - len(text.lstrip()), contexts[row["context"]]
            asked = [TokenSpan("question", start + shift, end + shift) for start, end in offsets]
            asked = asked[: self.task.max_query_length]
            read = zip(context.starts.tolist(), context.ends.tolist(), strict=True)
            spans = [TokenSpan("context", start, end) for start, end in read]
            row_spans += [
                [*before, *asked, *between, *spans[window.start : window.stop], *after]
                for window in self.task._windows(asked, context, frame)
            ]
        return row_spans

    def explained_logit(
        self, prediction: SpanPrediction, windows: Mapping[int, Tensor], features: Sequence[Feature], row: Row
    ) -> ExplainedLogit:
        """Explains start and end logit of the answer, or token 0 for "no answer"."""
        candidates: list[tuple[float, int, int, int]] = []  # score, window, start and end token
        for window, table in windows.items():
            offsets, (null, *spans) = _offsets(features[window]), table.tolist()
            if prediction.answer == "":
                candidates.append((-null[2] - null[3], window, 0, 0))  # decode takes the lowest score of "no answer"
                continue
            candidates += [
                (first + last, window, int(start), int(end))
                for start, end, first, last in spans
                if start >= 0
                and (offsets[3 * int(start)], offsets[3 * int(end) + 1]) == (prediction.start, prediction.end)
            ]
        _, window, start, end = max(candidates, key=lambda candidate: candidate[0])
        return ExplainedLogit(
            label=prediction.answer,
            texts={"question": row["question"], "context": row["context"]},
            terms=((window, 2 * start, 1.0), (window, 2 * end + 1, 1.0)),
        )


@dataclass(frozen=True, kw_only=True)
class SpanExtraction(Task[SpanPrediction]):
    """Questions whose answers are parts of a context.

    Attributes:
        labels: None. Do not set them.
        max_length: Maximum length of a window with question, part of the context and special tokens.
        doc_stride: The OVERLAP of two neighbouring windows in tokens, as in transformers (in Google's BERT and in FARM
            the word means the step from one to the next).
        max_query_length: longer questions are cut to that many tokens, and counted.
        n_best_size: Number of answers per question, and of starts and ends of a window that are paired.
        max_answer_length: in tokens.
        version_2_with_negative: questions may have no answer (SQuAD 2.0).
        null_threshold: Null odds above which the prediction is "no answer", chosen on validation rows. None means 0.

    Example:
        >>> TaskModel.from_pretrained(base, task=SpanExtraction).predict([("Who sings?", "Ada sings in Paris.")])
    """

    name: ClassVar[str] = "span-extraction"
    columns: ClassVar[tuple[Column, ...]] = (
        Column(name="id", kind="id", required=False),
        Column(name="question", kind="text"),
        Column(name="context", kind="text"),
        Column(name="answers", kind="answers", required=False),
    )
    output_kind: ClassVar[OutputKind] = "position"
    primary_metric: ClassVar[str] = "f1"
    parts: ClassVar[tuple[type[Part], ...]] = (SpanDetection, SpanFormats, SpanFitting, SpanExplainable, SpanReport)
    max_length: int = 384
    doc_stride: int = 128
    max_query_length: int = 64
    n_best_size: int = 20
    max_answer_length: int = 30
    version_2_with_negative: bool = False
    null_threshold: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels:
            raise ValueError("labels do not apply to span extraction. Remove them")
        for name in ("max_query_length", "n_best_size", "max_answer_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.n_best_size > _MOST_ANSWERS:
            raise ValueError(f"n_best_size is {self.n_best_size}, expected at most {_MOST_ANSWERS}")
        if self.null_threshold is not None and not isfinite(self.null_threshold):
            raise ValueError(f"null_threshold is {self.null_threshold}, expected a finite number")
        problem = self._no_room(FEWEST_SPECIAL_TOKENS)
        if problem is not None:
            raise ValueError(problem)

    def _no_room(self, special: int) -> str | None:
        """Returns why windows lack room, because tokenizers would abort the process."""
        room = self.max_length - self.max_query_length - special
        taken = f"max_query_length = {self.max_query_length} and {special} special tokens"
        if room < 1:
            return f"max_length is {self.max_length}, but {taken} leave no room for the context. Lower max_query_length"
        if not 0 <= self.doc_stride < room:
            return (
                f"doc_stride is {self.doc_stride}, but windows of {self.max_length} tokens with {taken} can overlap "
                f"by 0 to {room - 1} tokens"
            )
        return None

    def head(self, config: EncoderConfig) -> Head:
        return heads.PerTokenHead(config, 2, dropout=config.head.span_dropout)

    def features(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[Feature]:
        """Returns windows, the first of a row with the number of lost tokens.

        Raises:
            UsageError: This tokenizer's special tokens leave no room for ``doc_stride``.
        """
        if not rows:
            return []
        frame = Frame.of(tokenizer, texts=2)
        problem = self._no_room(frame.size)
        if problem is not None:
            raise UsageError(f"{self.name}: {problem}")
        contexts = tokenized_contexts([row["context"] for row in rows], tokenizer)
        questions = tokenized([row["question"].lstrip() for row in rows], tokenizer)["input_ids"]
        return [
            feature
            for number, (row, ids) in enumerate(zip(rows, questions, strict=True))
            for feature in self._row_features(number, row.get("answers"), ids, contexts[row["context"]], frame)
        ]

    def _row_features(
        self, row: int, answers: Any, question: list[int], context: ContextTokens, frame: Frame
    ) -> Iterator[Feature]:
        """Yields the windows of one row.

        Their labels are the first and last token of the answer, and 0 and 0 ("no answer") where a window does not hold
        all of it.
        """
        lost_tokens = max(0, len(question) - self.max_query_length)
        question = question[: self.max_query_length]
        windows = self._windows(question, context, frame)
        richest = richest_windows(range(len(context.ids) + 1), windows, bonus=0.01)
        context_start = len(frame.before) + len(question) + len(frame.between)  # where the context begins
        is_answered = answers is not None and len(answers["text"]) > 0
        characters = None
        if is_answered:
            start = answers["answer_start"][0]
            characters = answer_characters(context, start, start + len(answers["text"][0]))
        spans = [None if characters is None else answer_tokens(context, window, *characters) for window in windows]
        lost = int(is_answered and not any(spans))
        for number, (window, span) in enumerate(zip(windows, spans, strict=True)):
            ids, types = frame.join(question, context.ids[window.start : window.stop])
            labels = [0.0, 0.0] if span is None else [float(context_start + token) for token in span]
            is_richest = richest[window.start : window.stop] == number
            yield Feature(
                row=row,
                input_ids=ids,
                token_type_ids=types,
                labels=None if answers is None else labels,
                offsets=window_offsets(context, window, is_richest, before=context_start, after=len(frame.after)),
                lost_tokens=0 if number else lost_tokens,
                lost_answers=0 if number else lost,
            )

    def _windows(self, question: Sequence[Any], context: ContextTokens, frame: Frame) -> list[range]:
        """Returns the tokens of the context in each window, next to a cut question."""
        capacity = self.max_length - len(question) - frame.size
        return cut(range(len(context.ids) + 1), room=capacity, overlap=self.doc_stride)

    def loss(self, logits: Tensor, batch: PackedBatch) -> tuple[LossTerm]:
        """Computes the cross entropy of start and end over a labelled window's tokens."""
        parts = torch.split(logits, list(batch.layout.gather_counts))
        labelled = [window for window, count in zip(parts, batch.label_counts, strict=True) if count]
        if not labelled:
            return (LossTerm(name=self.name, total=logits.sum() * 0.0, count=logits.new_zeros(())),)
        scores = position_logits(labelled, absent=-torch.inf)  # [2 B, T]
        total = F.cross_entropy(scores, batch.labels.long(), reduction="sum")
        return (LossTerm(name=self.name, total=total, count=logits.new_full((), len(scores))),)

    def compact_logits(self, logits: Sequence[Tensor], features: Sequence[Feature]) -> Sequence[Tensor]:
        """Returns ``[K + 1, 4]`` for each window from ``window_candidates``."""
        roles = [bytes(_offsets(feature)[2::3]) for feature in features]
        candidates = window_candidates(logits, roles, n_best=self.n_best_size, max_answer_length=self.max_answer_length)
        # One copy from the device for all windows. As views they would each be sent with the memory of all.
        return [window.clone() for window in candidates.cpu()]

    def decode(
        self, compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]
    ) -> list[SpanPrediction]:
        windows = [len(numbers) for numbers in windows_by_row(features)]
        ranked = merge_windows(
            compact,
            [_offsets(feature) for feature in features],
            windows,
            [row["context"] for row in rows],
            n_best=self.n_best_size,
            with_null=self.version_2_with_negative,
        )
        predictions, threshold = [], 0.0 if self.null_threshold is None else self.null_threshold
        for spans, row in zip(ranked, rows, strict=True):
            answer, null = spans.answer(threshold), spans.null
            predictions.append(
                SpanPrediction(
                    id=row.get("id"),
                    answer=answer.text,
                    start=answer.start,
                    end=answer.end,
                    score=answer.score,
                    n_best=spans.n_best,
                    best=spans.best,
                    null_score=None if null is None else null.start_logit + null.end_logit,
                    null_odds=spans.null_odds,
                )
            )
        return predictions

    def metrics(self, predictions: Sequence[SpanPrediction], rows: Sequence[Row]) -> dict[str, float]:
        """Returns SQuAD's metrics on a scale of 0 to 100.

        They are 2.0's with ``version_2_with_negative``, else 1.1's. The scores count the answers, whatever threshold
        decided about each. ``best_f1`` and the like are scores of the best spans with one threshold for all.

        Raises:
            DataError: A question has no answer and the settings do not expect that, or no row has answers.
        """
        answered, labels = _answered_rows(predictions, rows)
        answers = [prediction.answer for prediction in answered]
        if self.version_2_with_negative:
            spans, odds = [prediction.best.text for prediction in answered], list(map(_null_odds, answered))
            return {**squad_v2_metrics(labels, spans, odds), **squad_v2_metrics(labels, answers, None)}
        _refuse_unanswerable(rows)
        return squad_v1_metrics(labels, answers)


def _offsets(feature: Feature) -> Sequence[int]:
    offsets = feature.get("offsets")
    return () if offsets is None else offsets


def _null_odds(prediction: SpanPrediction) -> float:
    return 0.0 if prediction.null_odds is None else prediction.null_odds


def _answered_rows(
    predictions: Sequence[SpanPrediction], rows: Sequence[Row]
) -> tuple[list[SpanPrediction], list[list[str]]]:
    """Returns the predictions for the rows that have answers, and the answers' texts."""
    pairs = labelled(rows, predictions, "answers")
    return [prediction for _, prediction in pairs], [row["answers"]["text"] for row, _ in pairs]


def _refuse_unanswerable(rows: Iterable[Row]) -> None:
    for number, row in enumerate(rows):
        answers, name = row.get("answers"), row.get("id")
        if answers is not None and not answers["text"]:
            source = f"row {number}" if name is None else f"row {number} (id {name!r})"
            raise DataError(
                f"{source}: the question has no answer, expected at least one. Set version_2_with_negative = true "
                "(SQuAD 2.0), or remove such questions"
            )


def _file_ids(ids: Iterable[str | None]) -> list[str]:
    """Returns the ids of rows in the official files, or their numbers without ids."""
    names = [str(number) if name is None else name for number, name in enumerate(ids)]
    name, count = Counter(names).most_common(1)[0] if names else ("", 0)
    if count > 1:
        raise DataError(
            f"id {name!r} appears {count} times (a row without an id has its number, from 0), but a .json file has one "
            "answer for each id. Change the ids, or write .jsonl, which has a line for each row"
        )
    return names
