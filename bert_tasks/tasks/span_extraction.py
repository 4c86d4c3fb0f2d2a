"""Span extraction, the part of a context that answers a question, or "no answer".

windows/contexts.py cuts contexts, and outputs/answer.py has everything behind the logits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from bert_tasks.data.columns import Column, Row
from bert_tasks.data.features import Truncation
from bert_tasks.data.profile import ColumnProfile
from bert_tasks.encoder import heads
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import Head
from bert_tasks.errors import UsageError
from bert_tasks.outputs.answer import Answer, SpanPrediction
from bert_tasks.outputs.base import Output
from bert_tasks.outputs.explanation import TokenSpan
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.settings import require
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.suggestions import Suggestion
from bert_tasks.tasks.windows.contexts import (
    ContextTokens,
    answer_characters,
    answer_tokens,
    tokenized_contexts,
    window_offsets,
)
from bert_tasks.tasks.windows.frame import Frame
from bert_tasks.tasks.windows.texts import tokenized
from bert_tasks.tasks.windows.words import cut, richest_windows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FEWEST_SPECIAL_TOKENS, MOST_SPECIAL_TOKENS = 3, 4  # around a pair, most for RoBERTa

_NOTICE = (
    "The library opens at nine on weekdays and at ten on Saturdays. It is closed on Sundays. "
    "Members may borrow six books for three weeks."
)


@dataclass(frozen=True, kw_only=True)
class SpanExtraction(Task[SpanPrediction]):
    """Questions whose answers are parts of a context.

    It is extractive question answering as on SQuAD. A long context is read in overlapping windows, each with the whole
    question, and the best span of all windows is the answer. Its time grows with the number of windows.

    Attributes:
        max_length: Maximum length of a window with question, part of the context and special tokens.
        doc_stride: The OVERLAP of two neighbouring windows in tokens, as in transformers (in Google's BERT and in FARM
            the word means the step from one to the next).
        max_query_length: Maximum number of tokens of a question. Longer ones are truncated, and counted in a warning.

    Examples:
        >>> TaskModel.from_pretrained(base, task=SpanExtraction).predict([("Who sings?", "Ada sings in Paris.")])
    """

    name: ClassVar[str] = "span-extraction"
    outputs: ClassVar[tuple[type[Output[Any]], ...]] = (Answer,)
    row_shapes: ClassVar[tuple[tuple[str, ...], ...]] = (("question", "context", "answers"),)
    row_needs: ClassVar[str] = "a question, its context, and answers that are copied from it"
    usual_names: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            "question": ("question", "query"),
            "context": ("context", "passage", "paragraph"),
            "answers": ("answers", "answer", "answer_text", "answer_span", "spans"),
        }
    )
    has_dense_labels: ClassVar[bool] = True
    sample: ClassVar[Literal["row", "window", "group"]] = "window"
    example_rows: ClassVar[Sequence[Row]] = (
        {"question": "Who wrote it?", "context": "The letter was written by Ada in May."},
        {"question": "How many books may members borrow?", "context": _NOTICE},
        {"question": "Who founded the library?", "context": _NOTICE},
    )
    output: Answer
    max_length: int = 384
    doc_stride: int = 128
    max_query_length: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.max_query_length >= 1, f"max_query_length is {self.max_query_length}, expected at least 1")
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

    @classmethod
    def limited(cls, usable_length: int) -> dict[str, int]:
        """Returns the default lengths, made smaller for models with a short input."""
        max_length = min(cls.max_length, usable_length)
        max_query_length = min(cls.max_query_length, max_length // 4)
        room = max_length - max_query_length - MOST_SPECIAL_TOKENS
        doc_stride = min(cls.doc_stride, room // 2)
        return {"max_length": max_length, "max_query_length": max_query_length, "doc_stride": doc_stride}

    # Rows and windows

    @property
    def columns(self) -> tuple[Column, ...]:
        return (
            Column(name="id", kind="id", required=False),
            Column(name="question", kind="text"),
            Column(name="context", kind="text"),
            self.output.column,
        )

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
        features: list[Feature] = []
        for number, (row, question) in enumerate(zip(rows, questions, strict=True)):
            context = contexts[row["context"]]
            features += self._row_features(number, row.get("answers"), question, context, frame)
        return features

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
        # A token is the start of an answer only in the window in which it has the most context on its poorer side. The
        # bonus for long windows is that of the original BERT code.
        richest = richest_windows(range(len(context.ids) + 1), windows, bonus=0.01)
        context_start = len(frame.before) + len(question) + len(frame.between)  # where the context begins
        spans = _answer_spans(answers, context, windows)
        is_answered = answers is not None and len(answers["text"]) > 0
        lost_answers = int(is_answered and not any(spans))
        for number, (window, span) in enumerate(zip(windows, spans, strict=True)):
            ids, types = frame.join(question, context.ids[window.start : window.stop])
            labels: list[float] | None = None
            if span is not None:
                labels = [float(context_start + token) for token in span]
            elif answers is not None:
                labels = [0.0, 0.0]
            is_richest = richest[window.start : window.stop] == number
            yield Feature(
                row=row,
                input_ids=ids,
                token_type_ids=types,
                labels=labels,
                offsets=window_offsets(context, window, is_richest, before=context_start, after=len(frame.after)),
                lost_tokens=lost_tokens,
                lost_answers=lost_answers,
            )
            lost_tokens, lost_answers = 0, 0  # the first window counts for the row

    def _windows(self, question: Sequence[Any], context: ContextTokens, frame: Frame) -> list[range]:
        """Returns the tokens of the context in each window, next to a truncated question."""
        capacity = self.max_length - len(question) - frame.size
        return cut(range(len(context.ids) + 1), room=capacity, overlap=self.doc_stride)

    def cut_notes(self, cuts: Truncation) -> tuple[str, ...]:
        """Returns sentences about questions that were truncated, and about those whose answer is in no window."""
        notes = []
        if cuts.cut_rows:
            limit = f"max_query_length = {self.max_query_length} tokens"
            are, were = "are", "were"
            if cuts.cut_rows == 1:
                are, were = "is", "was"
            notes.append(f"{cuts.share(cuts.cut_rows)} questions {are} longer than {limit} and {were} truncated")
        if cuts.lost_answers:
            have = "has" if cuts.lost_answers == 1 else "have"
            notes.append(
                f"{cuts.share(cuts.lost_answers)} questions {have} an answer that no window of max_length = "
                f"{self.max_length} tokens holds whole. Training takes them for questions without an "
                "answer. Raise max_length, or doc_stride to the length of the longest answer"
            )
        return tuple(notes)

    def token_spans(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[list[TokenSpan | None]]:
        if not rows:
            return []
        frame = Frame.of(tokenizer, texts=2)
        before = [None] * len(frame.before)
        between = [None] * len(frame.between)
        after = [None] * len(frame.after)
        contexts = tokenized_contexts([row["context"] for row in rows], tokenizer)
        questions = [row["question"] for row in rows]
        offsets = tokenized([text.lstrip() for text in questions], tokenizer, offsets=True)["offset_mapping"]
        row_spans: list[list[TokenSpan | None]] = []
        for row, question, places in zip(rows, questions, offsets, strict=True):
            shift = len(question) - len(question.lstrip())  # leading white space is not tokenized
            asked = [TokenSpan("question", start + shift, end + shift) for start, end in places]
            asked = asked[: self.max_query_length]
            context = contexts[row["context"]]
            read = zip(context.starts.tolist(), context.ends.tolist(), strict=True)
            spans = [TokenSpan("context", start, end) for start, end in read]
            for window in self._windows(asked, context, frame):
                row_spans.append([*before, *asked, *between, *spans[window.start : window.stop], *after])
        return row_spans

    # The model

    def head(self, config: EncoderConfig) -> Head:
        return heads.PerTokenHead(config, self.output.size, dropout=config.head.span_dropout)

    # For init

    @classmethod
    def implied_settings(cls, profiles: Mapping[str, ColumnProfile], kind: str) -> dict[str, Any]:
        """Returns whether some questions have no answer."""
        return {"version_2_with_negative": profiles["answers"].empty > 0}

    @classmethod
    def suggested(cls, words: int, longest: int) -> list[Suggestion]:
        length = min(cls.max_length, longest)
        question_length = min(cls.max_query_length, length // 4)
        return [
            Suggestion("max_length", length, "tokens of a window. Longer contexts have several windows"),
            Suggestion("doc_stride", min(cls.doc_stride, length // 3), "OVERLAP in tokens of two windows"),
            Suggestion("max_query_length", question_length, "tokens. Longer questions are truncated"),
        ]


def _answer_spans(
    answers: Mapping[str, Any] | None, context: ContextTokens, windows: Sequence[range]
) -> list[tuple[int, int] | None]:
    """Returns the first and last token of a row's first answer in each window, counted from the window's start.

    None for a window that does not hold all of the answer, and if there is no answer.
    """
    if answers is None or not len(answers["text"]):
        return [None] * len(windows)
    start = answers["answer_start"][0]
    characters = answer_characters(context, start, start + len(answers["text"][0]))
    if characters is None:
        return [None] * len(windows)
    return [answer_tokens(context, window, *characters) for window in windows]
