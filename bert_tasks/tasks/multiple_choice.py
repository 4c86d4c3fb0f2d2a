"""Multiple choice of the answer that fits a row's context and question.

Each choice is a sequence of its own, read as the pair of the context and the question followed by the choice (Zellers
et al., arXiv:1808.05326, as Devlin et al. read it). A row is one sample. The softmax runs over its choices, and each
row may have another number. Texts longer than ``max_length`` are truncated, the longer part first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from bert_tasks.data.columns import Column, Row
from bert_tasks.data.profile import ColumnProfile
from bert_tasks.encoder import heads
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.encoder.heads import Head
from bert_tasks.errors import DataError
from bert_tasks.outputs.base import Output
from bert_tasks.outputs.choice import Choice, ChoicePrediction
from bert_tasks.outputs.explanation import TokenSpan
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.settings import require
from bert_tasks.tasks.base import MOST_CHARACTERS, Task
from bert_tasks.tasks.windows.texts import token_characters, truncated_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class MultipleChoice(Task[ChoicePrediction]):
    """Contexts with choices, one of them right.

    The encoder reads each choice together with the context and the question, so a row with four choices costs four
    windows. Different rows may have different numbers of choices.

    Attributes:
        max_length: Maximum length in tokens of context, question, one choice and special tokens together.

    Examples:
        >>> model = TaskModel.from_pretrained(base, task=MultipleChoice)
        >>> model.predict({"context": "It rains.", "choices": ["Take a coat.", "Eat."]})[0].answer
    """

    name: ClassVar[str] = "multiple-choice"
    outputs: ClassVar[tuple[type[Output[Any]], ...]] = (Choice,)
    row_shapes: ClassVar[tuple[tuple[str, ...], ...]] = (("context", "choices", "label"),)
    row_needs: ClassVar[str] = "a context, choices, and which of them is right"
    usual_names: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            "context": ("context", "ctx", "article", "passage", "premise", "sent1", "paragraph", "story"),
            "question": ("question", "query", "sent2"),
            "choices": ("choices", "choice", "options", "option", "endings", "ending", "answers", "candidates"),
            "label": ("label", "answer", "answerkey", "correct", "gold", "target", "gold_label"),
        }
    )
    limits: ClassVar[tuple[str, ...]] = ("If context, question and choice are longer together, they are truncated.",)
    example_rows: ClassVar[Sequence[Row]] = (
        {
            "context": "The pan was still hot. She wanted to move it to the table.",
            "question": "First she",
            "choices": ["put on her gloves.", "switched on the radio.", "counted the chairs."],
        },
        {
            "context": "The library opens at nine on weekdays and at ten on Saturdays.",
            "question": "When does it open on a Monday?",
            "choices": ["at nine", "at ten"],
        },
        {
            "context": "It had rained all night.",
            "question": "In the morning",
            "choices": ["the street was wet.", "the street was sold.", "the street was hungry.", "nobody had slept."],
        },
    )
    output: Choice

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.max_length >= 5, f"max_length is {self.max_length}, a context and a choice need at least 5")

    # Rows and windows

    @property
    def columns(self) -> tuple[Column, ...]:
        return (
            Column(name="context", kind="text"),
            Column(name="question", kind="text", required=False),
            Column(name="choices", kind="choices"),
            self.output.column,
        )

    def check_rows(self, rows: Sequence[Row]) -> None:
        repeated = 0
        for row in rows:
            question = row.get("question")
            if question is not None:
                repeated += (len(row["choices"]) - 1) * len(question)
        if repeated > MOST_CHARACTERS:
            raise DataError(
                f"each choice is read behind the question, which repeats {repeated:,} characters, and at most "
                f"{MOST_CHARACTERS:,} are read. Use fewer choices, or write a long text into 'context', which is not "
                "repeated"
            )

    def features(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[Feature]:
        """Returns one window for each choice. The first has the row's label.

        Special tokens written in a text stay plain characters.
        """
        if not rows:
            return []
        encoded = iter(truncated_texts(_pairs(rows), tokenizer, max_length=self.max_length))
        features = []
        for number, row in enumerate(rows):
            labels = self.output.encode(row)
            for _ in row["choices"]:
                features.append(next(encoded).feature(row=number, labels=labels))
                labels = None  # the row has its label once, in its first window
        return features

    def token_spans(self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> list[list[TokenSpan | None]]:
        """Counts a token of both the question and the choice as a token of the choice."""
        if not rows:
            return []
        pairs = _pairs(rows)
        encoded = truncated_texts(pairs, tokenizer, max_length=self.max_length)
        characters = iter(token_characters(encoded, pairs, tokenizer))
        spans = []
        for row in rows:
            for _ in row["choices"]:
                spans.append(_choice_spans(row.get("question"), next(characters)))
        return spans

    # The model

    def head(self, config: EncoderConfig) -> Head:
        return heads.ChoiceHead(config)

    # For readers of a card, and init

    def pipeline_inputs(self, row: Row) -> Sequence[Any]:
        endings = [_ending(row.get("question"), choice) for choice in row["choices"]]
        return [[row["context"]] * len(endings), endings]

    @classmethod
    def implied_settings(cls, profiles: Mapping[str, ColumnProfile], kind: str) -> dict[str, Any]:
        """Returns ``label_base`` if the numbers of the right choices begin at 1."""
        label = profiles["label"]
        if label.is_number and label.low == 1:
            return {"label_base": 1}
        return {}


def _ending(question: str | None, choice: str) -> str:
    """Returns the second text of the pair."""
    if question is None or question == "":
        return choice
    return f"{question} {choice}"


def _pairs(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Returns the first and the second text of each sequence."""
    contexts, endings = [], []
    for row in rows:
        for choice in row["choices"]:
            contexts.append(row["context"])
            endings.append(_ending(row.get("question"), choice))
    return contexts, endings


def _choice_spans(question: str | None, characters: Sequence[tuple[int, int, int] | None]) -> list[TokenSpan | None]:
    """Returns the spans of a sequence, whose second text is the question, a space and the choice."""
    first = len(_ending(question, ""))  # where the choice begins
    spans: list[TokenSpan | None] = []
    for token in characters:
        if token is None:
            spans.append(None)
            continue
        side, start, end = token
        if side == 0:
            spans.append(TokenSpan("context", start, end))
        elif end > first or (start == end == first):
            # Of a token that joins the end of the question and the choice, the part in the choice counts.
            spans.append(TokenSpan("choices", max(start, first) - first, end - first))
        else:
            spans.append(TokenSpan("question", start, end))
    return spans
