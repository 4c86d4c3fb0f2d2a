"""The types of /predict: what a request of a task holds, what its answers look like, and example rows.

Owns validation of callers' JSON, with its limits. A task that is not known here by its class gets types made of its
columns, and answers without a schema. Must not know HTTP.
"""

from collections.abc import Mapping, Sequence
from types import GenericAlias, MappingProxyType
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    StrictInt,
    StringConstraints,
    Tag,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from bert_tasks.data.columns import Column, Row
from bert_tasks.data.stored_reading import renamed_row
from bert_tasks.data.text_words import text_of_words, with_words
from bert_tasks.serving.limits import Limits
from bert_tasks.tasks import PairClassification, SequenceClassification, SpanExtraction, TokenClassification
from bert_tasks.tasks.base import Task

INPUTS = "inputs"  # the key of several rows
ONE, MANY = "(one row)", "(several rows)"  # tags of the two forms of a request; errors do not show them


class LabelAnswer(BaseModel):
    """The most probable label, its probability, and every label's."""

    label: str
    score: float
    scores: dict[str, float]


class LabelsAnswer(LabelAnswer):
    """``labels``: those whose probability reaches their threshold."""

    labels: list[str]


class NumberAnswer(BaseModel):
    """The number that the model predicts."""

    score: float


class Entity(BaseModel):
    """``start`` and ``end`` count characters of the row's text; without one of its words with a space between them."""

    entity_group: str
    score: float
    word: str
    start: int
    end: int


class TagsAnswer(BaseModel):
    """A tag and its probability for every word, and the entities that the tags mark."""

    words: list[str]
    tags: list[str]
    scores: list[float]
    entities: list[Entity]


class Candidate(BaseModel):
    """A part of the context; "" at 0 is "no answer"."""

    text: str
    score: float
    start: int
    end: int
    start_logit: float
    end_logit: float


class SpanAnswer(BaseModel):
    """``context[start:end]``; "" at 0: there is no answer."""

    id: str | None = None
    answer: str
    start: int
    end: int
    score: float
    null_score: float | None = None
    null_odds: float | None = None
    n_best: list[Candidate]


class _SingleText(BaseModel):
    """A text, and no second one: a folder of transformers does not say how many its classifier reads."""

    @model_validator(mode="before")
    @classmethod
    def _one_text(cls, row: Any) -> Any:
        if isinstance(row, Mapping) and row.get("text_pair") is not None:
            raise PydanticCustomError(
                "text_pair",
                "text_pair is not read: the model is served as one of single texts; if it reads pairs, "
                "its operator starts it with --task pair-classification",
            )
        return row


class _Envelope(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


def answer_schema(task: Task) -> Any:
    """The type of one prediction."""
    if isinstance(task, TokenClassification):
        return TagsAnswer
    if isinstance(task, SpanExtraction):
        return SpanAnswer
    if isinstance(task, SequenceClassification | PairClassification):
        kinds = {"regression": NumberAnswer, "multi_label_classification": LabelsAnswer}
        return kinds.get(task.problem_type, LabelAnswer)
    return dict[str, Any]


def answers_schema(task: Task) -> type[BaseModel]:
    """The type of the answer to a list of rows."""
    predictions: Any = (GenericAlias(list, (answer_schema(task),)), ...)
    return create_model("Predictions", predictions=predictions)


def request_schema(task: Task, limits: Limits, names: Mapping[str, str] = MappingProxyType({})) -> Any:
    """One row, or ``{"inputs": [rows]}``; which of them it is decides which errors a caller reads.

    Args:
        names: the task's columns -> the names of the training data, which a row may have instead.
    """
    columns = [column for column in task.columns if not column.is_target]
    fields: dict[str, Any] = {column.name: _field(column, limits) for column in columns}
    # A task of one's own may read it.
    base = _SingleText if isinstance(task, SequenceClassification) and "text_pair" not in fields else BaseModel
    others = [f"{name} may be called {names[name]}" for name in fields if name in names]
    told = "; ".join([f"What {task.name} reads; other keys are not read", *others])
    made = create_model("Row", __base__=base, __doc__=f"{told}.", **fields)
    shown = create_model("Row", __base__=base, __doc__=f"{told}.", **_either(columns, fields))
    row: Any = Annotated[made, BeforeValidator(_reader(columns, names), json_schema_input_type=shown)]
    inputs = Annotated[list[row], Field(min_length=1, max_length=limits.max_rows), FailFast()]
    rows = create_model("Rows", __base__=_Envelope, __doc__="Several rows.", inputs=(inputs, ...))
    return Annotated[Annotated[row, Tag(ONE)] | Annotated[rows, Tag(MANY)], Discriminator(_form)]


def _reader(columns: Sequence[Column], names: Mapping[str, str]) -> Any:
    """A validator that gives a row the task's names, and the words of its text where it has no words."""

    def read(row: Any) -> Any:
        return with_words(renamed_row(row, names), columns, {}) if isinstance(row, Mapping) else row

    return read


def _either(columns: Sequence[Column], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, of which words need not be there if there may be a text in their place."""
    words, _ = text_of_words(columns)
    if words is None:
        return dict(fields)
    return {**fields, words.name: (fields[words.name][0], None)}


def rows_of(body: BaseModel) -> tuple[list[Row], bool]:
    """The rows of a request, and whether it was a list."""
    content = body.model_dump(exclude_none=True)
    return (content[INPUTS], True) if isinstance(body, _Envelope) else ([content], False)


def _form(body: Any) -> str:
    return MANY if isinstance(body, dict) and INPUTS in body else ONE


def _field(column: Column, limits: Limits) -> tuple[Any, Any]:
    most = limits.max_characters
    text = Annotated[str, StringConstraints(max_length=most)]
    kinds: dict[str, Any] = {
        "id": text | StrictInt,
        "words": Annotated[list[text], Field(max_length=most), FailFast(), AfterValidator(_shorter_than(most))],
    }
    kind = kinds.get(column.kind, text)
    return (kind, ...) if column.required else (kind | None, None)


def _shorter_than(most: int) -> Any:
    def check(words: list[str]) -> list[str]:
        characters = sum(map(len, words))  # as many as a text has at most whose words these are
        if characters > most:
            raise ValueError(f"the words have {characters} characters, at most {most} are read")
        return words

    return check


_TEXTS = (
    "The room was clean and the staff were kind.",
    "We waited an hour and the soup was cold.",
    "The train leaves at nine from platform two.",
)
_PAIRS = (
    ("A man is playing a guitar on stage.", "Someone is making music."),
    ("The shop closes at six.", "The shop is open all night."),
    ("Two dogs run through the snow.", "Animals are outdoors."),
)
_SENTENCES = (
    "Ada Lovelace met Charles Babbage in London in 1833 .",
    "The European Commission met in Brussels on Monday .",
    "Please book a table at Luigi 's for four on Friday evening .",
)
_NOTICE = (
    "The library opens at nine on weekdays and at ten on Saturdays. It is closed on Sundays. "
    "Members may borrow six books for three weeks."
)
_QUESTIONS = (
    "When does the library open on Saturdays?",
    "How many books may members borrow?",
    "Who founded the library?",
)


def example_rows(task: Task) -> Sequence[Row]:
    """Rows to try a model with; in plain English, because nothing is known of what it was trained on."""
    if isinstance(task, TokenClassification):
        return [{"words": text.split()} for text in _SENTENCES]
    if isinstance(task, SpanExtraction):
        return [{"question": question, "context": _NOTICE} for question in _QUESTIONS]
    if isinstance(task, PairClassification):
        return [{"text": text, "text_pair": pair} for text, pair in _PAIRS]
    given: Mapping[str, Any] = {"words": _SENTENCES[0].split()}
    columns = [column for column in task.columns if column.required]
    return [{column.name: given.get(column.kind, text) for column in columns} for text in _TEXTS]
