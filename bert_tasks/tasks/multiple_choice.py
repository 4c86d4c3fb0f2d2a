"""Multiple choice of the answer that fits a row's context and question.

Each choice is a sequence of its own, read as the pair of the context and the question followed by the choice (Zellers
et al., arXiv:1808.05326, as Devlin et al. read it). A row is one sample. The softmax runs over its choices, and each
row may have another number. Texts longer than ``max_length`` are cut from their longer part first.

Shape legend: B sequences (choices), S samples (rows), C choices of the row that has most.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from bert_tasks.data.cells import numbered_columns
from bert_tasks.data.columns import Column, Row
from bert_tasks.data.profile import ColumnProfile, percentile, pieces
from bert_tasks.data.validator import RowValidator
from bert_tasks.encoder import heads, packing
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import Head
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import DataError
from bert_tasks.tasks.base import Feature, LossTerm, OutputKind, Part, Prediction, labelled
from bert_tasks.tasks.shared.calibration import CalibratedFitting, CalibratedTask
from bert_tasks.tasks.shared.card import Card
from bert_tasks.tasks.shared.class_loss import FocalTask, cross_entropy
from bert_tasks.tasks.shared.detection import (
    COMPARED_ROWS,
    LABEL_NAMES,
    QUESTION_NAMES,
    Detection,
    TaskGuess,
    UserHints,
    count_pieces,
    other_columns,
)
from bert_tasks.tasks.shared.encoding import token_characters, truncated_texts
from bert_tasks.tasks.shared.explanation import Explainable, ExplainedLogit, Explanation, TokenSpan
from bert_tasks.tasks.shared.hf_config import HFConfig
from bert_tasks.tasks.shared.outputs import choice_logits, windows_by_row
from bert_tasks.tasks.shared.rendering import MOST_CHARACTERS, Rendering
from bert_tasks.tasks.shared.report import RowResult, cut
from bert_tasks.tasks.shared.row_report import RowReport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT, QUESTION, CHOICES, LABEL = "context", "question", "choices", "label"

# Names that people give to columns, in lower case.
_CHOICES = ("choices", "choice", "options", "option", "endings", "ending", "answers", "answer", "candidates")
_CONTEXTS = (CONTEXT, "ctx", "article", "passage", "premise", "sent1", "startphrase", "paragraph", "story")
_QUESTIONS = (*QUESTION_NAMES, "sent2")
_RIGHT = (*LABEL_NAMES, "answer", "answerkey", "correct", "gold")


@dataclass(frozen=True, kw_only=True)
class ChoicePrediction(Prediction):
    """The prediction for one row of choices.

    Attributes:
        label: Index of the most probable choice, from 0. None if its score is too low for the caller.
        answer: Text of the choice.
        score: Probability of the choice among the row's choices.
        scores, logits: Probability and logit of every choice, in their order. Logits only on request.
        explanation: Explanation of the most probable choice. Only on request.
    """

    label: int | None
    answer: str | None
    score: float
    scores: tuple[float, ...]
    logits: tuple[float, ...] | None = None
    explanation: Explanation | None = None


class ChoiceDetection(Detection):
    """Detects rows of multiple choice for ``init``."""

    row_needs: ClassVar[str] = "a context, choices, and which of them is right"

    def guess(self, profiles: Sequence[ColumnProfile], rows: Sequence[Row], hints: UserHints) -> TaskGuess | None:
        compared = rows[:COMPARED_ROWS]
        fitting = [
            (columns, base)
            for columns in _choice_columns(profiles, hints)
            for base in _label_bases(profiles, columns)
            if _read_choices(compared, columns, base)
        ]
        if not fitting:
            return None
        columns, base = fitting[0]
        others = [other for other, _ in fitting[1:]]
        read = _read_choices(rows, columns, base)
        counts = sorted({len(choices) for choices in read})
        several = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        texts = [columns[name] for name in (CONTEXT, QUESTION) if name in columns]
        longest = [max(map(pieces, choices)) for choices in read]
        counting = ", counted from 1" if base else ""
        return TaskGuess(
            task=self.task.name,
            columns=columns,
            words=percentile([count_pieces(row, texts) for row in rows]) + percentile(longest),
            precedence=3,
            settings={"label_base": base} if base else {},
            reasons=(
                f"{columns[CHOICES]}: {several} choices in a row, and {columns[LABEL]} names the right one{counting}",
                f"{', '.join(texts)}: what the choices are about",
            ),
            alternatives=other_columns(columns, others, profiles),
        )


class ChoiceFormats(Card, Rendering, HFConfig):
    """Multiple choice on cards, in prediction files and in a config of transformers."""

    pipeline_tag: ClassVar[str] = "multiple-choice"
    has_labels: ClassVar[bool] = False
    default_head: ClassVar[Literal["choice"]] = "choice"
    limits: ClassVar[tuple[str, ...]] = ("If context, question and choice are longer together, they are cut.",)
    example_rows: ClassVar[Sequence[Row]] = (
        {
            CONTEXT: "The pan was still hot. She wanted to move it to the table.",
            QUESTION: "First she",
            CHOICES: ["put on her gloves.", "switched on the radio.", "counted the chairs."],
        },
        {
            CONTEXT: "The library opens at nine on weekdays and at ten on Saturdays.",
            QUESTION: "When does it open on a Monday?",
            CHOICES: ["at nine", "at ten"],
        },
        {
            CONTEXT: "It had rained all night.",
            QUESTION: "In the morning",
            CHOICES: ["the street was wet.", "the street was sold.", "the street was hungry.", "nobody had slept."],
        },
    )

    def check_rows(self, rows: Sequence[Row]) -> None:
        repeated = 0
        for row in rows:
            question = "" if row.get(QUESTION) is None else row[QUESTION]
            repeated += (len(row[CHOICES]) - 1) * len(question)
        if repeated > MOST_CHARACTERS:
            raise DataError(
                f"each choice is read behind the question, which repeats {repeated:,} characters, and at most "
                f"{MOST_CHARACTERS:,} are read. Use fewer choices, or write a long text into {CONTEXT!r}, which is not "
                "repeated"
            )

    def pipeline_inputs(self, row: Row) -> Sequence[Any]:
        endings = [_ending(row.get(QUESTION), choice) for choice in row[CHOICES]]
        return [[row[CONTEXT]] * len(endings), endings]


class ChoiceExplainable(Explainable):
    """Explains a logit of multiple choice."""

    task: "MultipleChoice"

    def token_spans(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[list[TokenSpan | None]]:
        """Counts a token of both the question and the choice as a token of the choice."""
        if not rows:
            return []
        pairs = _pairs(rows)
        encoded = truncated_texts(pairs, tokenizer, max_length=self.task.max_length)
        questions = [row.get(QUESTION) for row in rows for _ in row[CHOICES]]
        characters = token_characters(encoded, pairs, tokenizer)
        return [_choice_spans(*sequence) for sequence in zip(questions, characters, strict=True)]

    def explained_logit(
        self, prediction: ChoicePrediction, windows: Mapping[int, Tensor], features: Sequence[Feature], row: Row
    ) -> ExplainedLogit:
        """Returns the logit of the most probable choice, whose words are in its column."""
        texts = {name: row[name] for name in (CONTEXT, QUESTION) if row.get(name) is not None}
        term = (list(windows)[prediction.scores.index(prediction.score)], 0, 1.0)
        return ExplainedLogit(label=prediction.answer, texts=texts | {CHOICES: prediction.answer}, terms=(term,))


class ChoiceFitting(CalibratedFitting):
    """Training of multiple choice."""

    def label_of(self, row: Row) -> int | None:
        return row.get(LABEL)


class ChoiceReport(RowReport):
    """The report of multiple choice."""

    def describe(self, decision: int) -> str:
        return f"choice {decision} for every row"

    def result(self, row: Row, prediction: ChoicePrediction) -> RowResult:
        return replace(super().result(row, prediction), label=row[CHOICES][row[LABEL]], prediction=prediction.answer)

    def candidates(self, row: Row, prediction: ChoicePrediction) -> tuple[tuple[str, float], ...]:
        pairs = zip((cut(choice, 200) for choice in row[CHOICES]), prediction.scores, strict=True)
        return tuple(sorted(pairs, key=lambda pair: -pair[1]))


@dataclass(frozen=True, kw_only=True)
class MultipleChoice(FocalTask[ChoicePrediction], CalibratedTask[ChoicePrediction]):
    """Contexts with choices, one of them right.

    Attributes:
        labels: None. Do not set them.
        max_length: Maximum length in tokens of context, question, one choice and special tokens together.
        label_base: The number that labels give to the first choice, 0 or 1.

    Example:
        >>> model = TaskModel.from_pretrained(base, task=MultipleChoice)
        >>> model.predict({"context": "It rains.", "choices": ["Take a coat.", "Eat."]})[0].answer
    """

    label_base: Literal[0, 1] = 0

    name: ClassVar[str] = "multiple-choice"
    output_kind: ClassVar[OutputKind] = "choice"
    primary_metric: ClassVar[str] = "accuracy"
    parts: ClassVar[tuple[type[Part], ...]] = (
        ChoiceDetection,
        ChoiceFormats,
        ChoiceFitting,
        ChoiceExplainable,
        ChoiceReport,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels:
            raise ValueError("labels do not apply to multiple choice, where every row has choices of its own")
        if self.max_length < 5:
            raise ValueError(f"max_length is {self.max_length}, a context and a choice need at least 5")

    @property
    def columns(self) -> tuple[Column, ...]:
        return (
            Column(name=CONTEXT, kind="text"),
            Column(name=QUESTION, kind="text", required=False),
            Column(name=CHOICES, kind="choices"),
            Column(name=LABEL, kind="choice" if self.label_base == 0 else "choice from 1", required=False),
        )

    def head(self, config: EncoderConfig) -> Head:
        return heads.ChoiceHead(config)

    def features(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[Feature]:
        """Returns one window for each choice. The first has the row's label.

        Special tokens written in a text stay plain characters.
        """
        if not rows:
            return []
        encoded = iter(truncated_texts(_pairs(rows), tokenizer, max_length=self.max_length))
        features = []
        for number, row in enumerate(rows):
            labels = None if row.get(LABEL) is None else [float(row[LABEL])]
            for _ in row[CHOICES]:
                features.append(next(encoded).feature(row=number, labels=labels))
                labels = None
        return features

    def loss(self, logits: Tensor, batch: PackedBatch) -> tuple[LossTerm]:
        """Computes the cross entropy over the choices of labelled rows, which are counted."""
        labelled = batch.labelled_rows
        if not labelled:
            return (LossTerm(name=self.name, total=logits.sum() * 0.0, count=logits.new_zeros(())),)
        samples = choice_logits(logits, batch.windows, absent=-torch.inf)  # [S, C]
        if len(labelled) < len(samples):
            samples = samples.index_select(0, packing.device_tensor(labelled, samples.device, torch.long))
        total = cross_entropy(samples, batch.labels.long(), gamma=self.focal_gamma)
        return (LossTerm(name=self.name, total=total, count=logits.new_full((), len(labelled))),)

    def decode(
        self, compact: Sequence[Tensor], features: Sequence[Feature], rows: Sequence[Row]
    ) -> list[ChoicePrediction]:
        predictions = []
        for logits, row in zip(self.row_logits(compact, features), rows, strict=True):
            scores = self.calibrated(logits).softmax(dim=0).tolist()
            best = max(range(len(scores)), key=scores.__getitem__)
            prediction = ChoicePrediction(
                label=best, answer=row[CHOICES][best], score=scores[best], scores=tuple(scores)
            )
            predictions.append(prediction)
        return predictions

    def row_logits(self, compact: Sequence[Tensor], features: Sequence[Feature]) -> list[Tensor]:
        """Returns ``S x [C]`` the logits of the choices of each row."""
        return [torch.cat([compact[window] for window in windows]) for windows in windows_by_row(features)]

    def metrics(self, predictions: Sequence[ChoicePrediction], rows: Sequence[Row]) -> dict[str, float]:
        pairs = labelled(rows, predictions, LABEL)
        correct = [prediction.label == row[LABEL] for row, prediction in pairs]
        error = self.calibration_metrics([prediction.score for _, prediction in pairs], correct)
        return {"accuracy": sum(correct) / len(correct)} | error if correct else {}


def _ending(question: str | None, choice: str) -> str:
    """Returns the second text of the pair."""
    return choice if question is None or question == "" else f"{question} {choice}"


def _choice_spans(question: str | None, characters: Sequence[tuple[int, int, int] | None]) -> list[TokenSpan | None]:
    """Returns the spans of a sequence, whose second text is the question, a space and the choice."""
    first = 0 if question is None or question == "" else len(question) + 1  # where the choice begins
    spans: list[TokenSpan | None] = []
    for token in characters:
        if token is None:
            spans.append(None)
            continue
        side, start, end = token
        if side == 0:
            spans.append(TokenSpan(CONTEXT, start, end))
        elif end > first or (start == end == first):
            spans.append(TokenSpan(CHOICES, max(start, first) - first, end - first))
        else:
            spans.append(TokenSpan(QUESTION, start, end))
    return spans


def _pairs(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Returns the first and the second text of each sequence."""
    pairs = [(row[CONTEXT], _ending(row.get(QUESTION), choice)) for row in rows for choice in row[CHOICES]]
    return [context for context, _ in pairs], [ending for _, ending in pairs]


def _choice_columns(profiles: Sequence[ColumnProfile], hints: UserHints) -> Iterator[dict[str, str]]:
    """Columns that may be context, question, choices and label, likeliest first."""
    for choices, parts in _choice_sources(profiles):
        others = [column for column in profiles if column.name not in (choices, *parts)]
        for label in _label_columns(others, parts, hints):
            texts = [column for column in others if column is not label and not column.is_number and not column.nested]
            context, question = _context_and_question(texts, hints)
            if context is not None:
                asked = {} if question is None else {QUESTION: question}
                yield {CONTEXT: context, **asked, CHOICES: choices, LABEL: label.name}


def _label_columns(profiles: Sequence[ColumnProfile], parts: Sequence[str], hints: UserHints) -> list[ColumnProfile]:
    """Returns columns of labels, by their names or by names of the choices' columns."""
    if hints.label is not None:
        return [column for column in profiles if column.name == hints.label]
    named = sorted((c for c in profiles if c.known in _RIGHT), key=lambda column: _RIGHT.index(column.known))
    return [*named, *(c for c in profiles if c not in named and parts and _values(c) and _values(c) <= set(parts))]


def _values(column: ColumnProfile) -> set[str]:
    return {value for value, _ in column.common}


def _label_bases(profiles: Sequence[ColumnProfile], columns: Mapping[str, str]) -> tuple[Literal[0, 1], ...]:
    """Returns the numbers of the first choice to try, likeliest first."""
    label = next(column for column in profiles if column.name == columns[LABEL])
    return (1, 0) if label.is_number and label.low == 1 else (0,)


def _context_and_question(texts: Sequence[ColumnProfile], hints: UserHints) -> tuple[str | None, str | None]:
    """Returns the columns of the hints, else of such names, else of the longest texts.

    A question alone is the context.
    """
    context, question = (*hints.texts, None, None)[:2]
    free = [column for column in texts if column.name not in hints.texts]
    if question is None:
        question = next((column.name for column in free if column.known in _QUESTIONS), None)
    if context is None:
        left = [column for column in free if column.name != question]
        named = sorted((c for c in left if c.known in _CONTEXTS), key=lambda column: _CONTEXTS.index(column.known))
        longest = sorted((c for c in left if c.is_text), key=lambda column: -column.words)
        context = next((column.name for column in (*named, *longest)), None)
    return (question, None) if context is None else (context, None if question == context else question)


def _choice_sources(profiles: Sequence[ColumnProfile]) -> Iterator[tuple[str, list[str]]]:
    """Returns columns of lists, and the names without numbers of columns of choices."""
    for column in profiles:
        if column.known in _CHOICES and column.filled and (column.nested == 1 or column.lists == 1):
            yield column.name, []
    names = [column.name for column in profiles]
    for stem in dict.fromkeys(re.sub(r"[ _]?([0-9]+|[A-Z])$|[ _][a-z]$", "", name) for name in names):
        parts = numbered_columns(stem, names)
        if parts and stem.strip().lower() in _CHOICES:
            yield (CHOICES if stem == CHOICES.removesuffix("s") else stem), parts
    letters = list(takewhile(names.__contains__, "ABCDEFGH"))
    for values in (set(letters), *map(_values, profiles)):  # a column's values may be the names of others
        parts = [name for name in names if name in values]
        if len(parts) == len(values) > 1:
            yield ",".join(parts), parts


def _read_choices(rows: Sequence[Row], columns: Mapping[str, str], base: Literal[0, 1]) -> list[list[str]]:
    """Returns the choices of labelled rows, or none if one of the rows is unreadable."""
    validator, read = RowValidator(MultipleChoice(label_base=base).columns, columns), []
    for row in rows:
        values, errors = validator.validate(row)
        if any(error.column in (columns[CHOICES], columns[LABEL]) for error in errors):
            return []
        if LABEL in values:
            read.append(values[CHOICES])
    return read
