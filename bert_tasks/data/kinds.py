"""Column kinds: what a column holds, and everything that the package knows about it.

Owns one class for each kind. A class says how a cell is parsed, how it is stored, which of its parts a model reads,
which labels it has, and what a split spreads evenly or keeps together. No other module lists kinds: a new kind is one
class here. Imports nothing heavy.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypedDict

from bert_tasks.data.cells import LABEL_SEPARATOR, label_name, label_parts, list_in_cell, numbered_columns, parse_text
from bert_tasks.data.conll import is_chunk_tag, to_iob2
from bert_tasks.data.problems import RowError, counted, first_few, shortened, suggestion
from bert_tasks.data.spans import parse_spans, word_tags
from bert_tasks.data.words import place_words, word_spans

CONTEXT = "context"  # the column that answers and choices are about
REMARKS = "remarks on the row"  # beside the columns of a row: what people should know of it
UNKNOWN_START = -1  # of an answer whose start the source does not say
_C1 = re.compile("[\x80-\x9f]")  # controls that nobody writes; Windows has quotes and dashes at these bytes
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LARGEST_START = 2**31
_TENTHS = 10

KINDS: "dict[str, ColumnKind]" = {}


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column that a task reads.

    Args:
        name: The task's name of the column.
        kind: The name of a class of ``data/kinds.py``, which says what a valid value is: text, texts (a list of texts),
            id, label (the name of a class), labels (a set of names), number, words, tags (one for each word), spans
            (characters of a text that are entities), answers (to the row's question), choices (texts; one is right),
            choice (which of them is right).
        required: The column must be in every file. Columns that are not required may be missing: labels if only
            predictions are wanted, all others always.

    Raises:
        ValueError: There is no such kind.

    Example:
        >>> Column(name="score", kind="number", required=False).is_label
        True
    """

    name: str
    kind: str
    required: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"column {self.name!r}: unknown kind {self.kind!r}. There are {', '.join(KINDS)}.")

    @property
    def type(self) -> "ColumnKind":
        """What the package knows about the kind of the column."""
        return KINDS[self.kind]

    @property
    def is_label(self) -> bool:
        """Whether the column holds what the task learns to predict."""
        return not self.required and self.type.is_label


class ColumnKind:
    """What a column holds. A subclass with a ``name`` is a kind, and columns can be declared with its name.

    Attributes:
        name: The name of the kind.
        noun: What a message calls a value; default: the name.
        is_label: The task learns to predict the values.
        has_classes: The values are names of classes, which are the labels of a model.
        is_single_class: Each value is the name of one class.
        is_set: Each value is a set of names of classes.
        needed_label: The label without which a model cannot be trained.
        is_open: Validation rows may have classes that no training row has.
        has_texts: A model reads the texts of the values.
        is_text: The caller may pass the value as a text.
        is_pretokenized: A text is split into words before a model reads it.
        may_be_missing: A row without a value can be used, even if the column must be there.
        is_numbered: A value may be spread over columns with numbers.
        group_column: The column whose rows stay together in a split; ``group_noun``: what rows are without it.
        article_column: A further column of files whose rows stay together in folds.
        strata_name: What a split spreads evenly, for people.
    """

    name: ClassVar[str]
    noun: ClassVar[str]
    is_label: ClassVar[bool] = False
    has_classes: ClassVar[bool] = False
    is_single_class: ClassVar[bool] = False
    is_set: ClassVar[bool] = False
    needed_label: ClassVar[str] = ""
    is_open: ClassVar[bool] = False
    has_texts: ClassVar[bool] = False
    is_text: ClassVar[bool] = False
    is_pretokenized: ClassVar[bool] = False
    may_be_missing: ClassVar[bool] = False
    is_numbered: ClassVar[bool] = False
    group_column: ClassVar[str | None] = None
    group_noun: ClassVar[str] = "text"
    article_column: ClassVar[str | None] = None
    strata_name: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            cls.noun = cls.__dict__.get("noun", cls.name)
            KINDS[cls.name] = cls()

    def parse(self, value: Any, separator: str = LABEL_SEPARATOR) -> Any:
        """Returns the value of a cell in canonical form; None if there is no value.

        NumPy's scalars and arrays count as Python's values, and a float that is not a number as no value.

        Args:
            value: The cell, of any format.
            separator: What separates several labels in one cell.

        Raises:
            RowError: The cell does not hold a value of this kind.
        """
        value = value.tolist() if hasattr(value, "tolist") else value
        return self._parse(None if isinstance(value, float) and math.isnan(value) else value, separator)

    def _parse(self, value: Any, separator: str) -> Any:
        raise NotImplementedError

    def arrow_type(self) -> Any:
        """Returns the type of the values in a table of Arrow; default: a text."""
        import pyarrow

        return pyarrow.string()

    def request_type(self, most: int) -> Any:
        """Returns the documented type of the values in a request, of ``most`` characters at most; default: a text."""
        from pydantic import StringConstraints

        return Annotated[str, StringConstraints(max_length=most)]

    def texts(self, value: Any) -> Sequence[str]:
        """Returns the texts of a value that a model reads; default: none."""
        return ()

    def labels_of(self, value: Any) -> Sequence[str]:
        """Returns the names under which a value is counted in a census; default: none."""
        return ()

    def normalized(self, value: Any) -> Sequence[str]:
        """Returns ``labels_of`` in the spelling that labels are inferred in."""
        return self.labels_of(value)

    def rename(self, value: Any, label: Callable[[str], str | None]) -> Any:
        """Returns the value with other names of its classes; default: the value."""
        return value

    def unknown(self, names: Iterable[str], labels: Collection[str], *, strict: bool = False) -> Iterator[RowError]:
        """Yields an error for each name that is not a known label; ``value`` of the error is the name.

        Args:
            names: Names as ``labels_of`` returns them.
            labels: The known labels, in their order.
            strict: A kind whose classes are open checks them nevertheless.
        """
        yield from ()

    def strata(self, values: Sequence[Any]) -> list[Sequence[str]]:
        """Returns for each value what a split spreads evenly, one name or several; default: values are alike."""
        return [("",)] * len(values)

    def columns_in(self, name: str, present: Collection[str]) -> list[str]:
        """Returns the columns of a source that hold the values of the column ``name``."""
        return [*([name] if name in present else []), *(numbered_columns(name, present) if self.is_numbered else [])]

    def replacement(self, columns: Sequence[Column]) -> Column | None:
        """Returns the column from which a row's value is derived if the row has none; default: no column."""
        return None

    def derive(self, value: Any) -> Any:
        """Returns the value that is derived from one of the replacement; None if it cannot be."""
        return None

    def remark(self, cell: Any) -> str | None:
        """Returns what people should know of a cell, beside its line; default: nothing."""
        return None

    def complete(
        self, cells: Mapping[str, Any], column: Column, columns: Sequence[Column], names: Mapping[str, str]
    ) -> Mapping[str, Any]:
        """Returns the cells with the value of a column, if other cells say what it is.

        Args:
            cells: The row under the source's names.
            column: A column of this kind.
            columns: All columns of the task.
            names: The task's columns -> the cells' columns, where they differ.
        """
        source = self.replacement(columns)
        name = names.get(column.name, column.name)
        if source is None or cells.get(name) is not None:
            return cells
        derived = self.derive(cells.get(names.get(source.name, source.name)))
        return cells if derived is None else {**cells, name: derived}

    def resolve(self, value: Any, row: Mapping[str, Any], cells: Mapping[str, Any], columns: Sequence[Column]) -> Any:
        """Returns a canonical value that fits the other values of its row; None if it means nothing without them.

        Args:
            value: A canonical value of this kind.
            row: The canonical values of the row.
            cells: The cells of the row, under the task's names.
            columns: All columns of the task.

        Raises:
            RowError: The value contradicts another one.
        """
        return value


class Text(ColumnKind):
    """A text."""

    name = "text"
    has_texts = True
    is_text = True

    def _parse(self, value: Any, separator: str) -> str:
        return parse_text(value)

    def texts(self, value: Any) -> Sequence[str]:
        return (value,)

    def remark(self, cell: Any) -> str | None:
        if isinstance(cell, str) and _C1.search(cell) is not None:
            return "hold control characters from U+0080 to U+009F: is the encoding 'cp1252'?"
        return None

    def replacement(self, columns: Sequence[Column]) -> Column | None:
        return next((column for column in columns if isinstance(column.type, Texts)), None)

    def derive(self, value: Any) -> str | None:
        """Returns the text that sentences form, one on each line."""
        try:
            sentences = KINDS["texts"].parse(value)
        except RowError:  # reading the column of sentences reports it
            return None
        return None if sentences is None else "\n".join(sentences)


class Id(ColumnKind):
    """A text or a whole number that names something, as a text."""

    name = "id"
    may_be_missing = True

    def _parse(self, value: Any, separator: str) -> str | None:
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise RowError("not an id", "Write a text or a whole number.")
        return parse_text(str(value))

    def request_type(self, most: int) -> Any:
        return super().request_type(most) | int


class _TextList(ColumnKind):
    """A list of texts, such as the words of a sentence."""

    item: ClassVar[str]
    first: ClassVar[int] = 1  # the number of the first part in messages
    least: ClassVar[int] = 0  # the least number of parts

    def arrow_type(self) -> Any:
        import pyarrow

        return pyarrow.list_(pyarrow.string())

    def request_type(self, most: int) -> Any:
        from pydantic import Field

        text: Any = super().request_type(most)
        return Annotated[list[text], Field(min_length=self.least, max_length=most)]

    def texts(self, value: Any) -> Sequence[str]:
        return tuple(value)

    def _parts(self, values: Iterable[Any], convert: Callable[[Any], str]) -> list[str]:
        parts = []
        for number, value in enumerate(values, start=self.first):
            try:
                parts.append(convert(value))
            except RowError as error:
                raise RowError(f"{error.what} ({self.item} {number})", error.hint) from None
        return parts

    def _list_or_names(self, value: Any) -> list[Any]:
        """The parts of a list, or of a cell that holds a list or names with white space between them."""
        if isinstance(value, str):
            names = list_in_cell(value)
            if names is None and value.startswith("["):
                raise RowError("not a JSON list", f'Write the {self.noun} as ["a", "b"].')
            value = value.split() if names is None else names
        if not isinstance(value, list | tuple):
            raise RowError(f"not a list of {self.noun}", f'Write the {self.noun} as ["a", "b"].')
        return list(value)


class Texts(_TextList):
    """A list of texts, such as the sentences of a text, which is not read twice."""

    name = "texts"
    item = "text"

    def _parse(self, value: Any, separator: str) -> list[str] | None:
        if value is None:
            return None
        parts = list_in_cell(value) if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            raise RowError("not a list of texts", 'Write a list such as ["...", "..."].')
        return self._parts(parts, parse_text)

    def texts(self, value: Any) -> Sequence[str]:
        return ()


class Words(_TextList):
    """The words of a sentence: a list, or names with white space between them."""

    name = "words"
    item = "word"
    has_texts = True
    is_text = True
    is_pretokenized = True

    def _parse(self, value: Any, separator: str) -> list[str]:
        if value is None:
            raise RowError("missing words", "Write an empty sentence as [].")
        return self._parts(self._list_or_names(value), parse_text)

    def replacement(self, columns: Sequence[Column]) -> Column | None:
        return next((column for column in columns if isinstance(column.type, Text)), None)

    def derive(self, value: Any) -> list[str] | None:
        """Returns the words of a text."""
        return [value[start:end] for start, end in word_spans(value)] if isinstance(value, str) else None


class Label(ColumnKind):
    """The name of a class."""

    name = "label"
    is_label = True
    has_classes = True
    is_single_class = True
    strata_name = "labels"

    def _parse(self, value: Any, separator: str) -> Any:
        return None if value is None or value == "" else label_name(value)

    def remark(self, cell: Any) -> str | None:
        parts = cell if isinstance(cell, list | tuple) else [cell]
        has_spaces = any(part != part.strip() for part in parts if isinstance(part, str))
        return "changed: white space around a label was removed" if has_spaces else None

    def labels_of(self, value: Any) -> Sequence[str]:
        return (value,)

    def rename(self, value: Any, label: Callable[[str], str | None]) -> Any:
        return label(value)

    def unknown(self, names: Iterable[str], labels: Collection[str], *, strict: bool = False) -> Iterator[RowError]:
        yield from (unknown_name("label", name, labels) for name in names if name not in labels)

    def strata(self, values: Sequence[Any]) -> list[Sequence[str]]:
        return [self.labels_of(value) if value else ("",) for value in values]


class Labels(Label):
    """A set of names of classes: a list, or in one cell names with a separator between them."""

    name = "labels"
    is_single_class = False
    is_set = True
    strata_name = "sets of labels"

    def _parse(self, value: Any, separator: str) -> list[str] | None:
        if value is None:
            return None
        if isinstance(value, str):
            value = label_parts(value, separator)
        if isinstance(value, bool | int | float):  # pandas reads a column of cells with one number each as numbers
            value = [value]
        if not isinstance(value, list | tuple):
            raise RowError("not a list of label names", f"Write names with {separator!r} between them.")
        names = [label_name(part) for part in value if part is not None and part != ""]
        if len(names) < len(value):
            raise RowError("empty label name", f"Write one {separator!r} between two names.")
        if len(set(names)) < len(names):
            raise RowError("repeated label", "Write each label once.")
        return names

    def arrow_type(self) -> Any:
        return KINDS["texts"].arrow_type()

    def labels_of(self, value: Any) -> Sequence[str]:
        return tuple(value)

    def rename(self, value: Any, label: Callable[[str], str | None]) -> Any:
        return [label(name) for name in value]


class Tags(_TextList, Labels):
    """One tag for each of the row's words. Chunk tags of any scheme are counted in IOB2."""

    name = "tags"
    item = "tag"
    is_set = False
    is_open = True
    group_column = "document"
    group_noun = "sentence"
    strata_name = ""

    def _parse(self, value: Any, separator: str) -> list[str] | None:
        if value is None:
            return None
        parts = self._list_or_names(value)
        # A class id below 0 means "hidden" on the hub; readers pass it on as None where the ids have names.
        hidden = [part is None or (isinstance(part, int) and part < 0) for part in parts]
        if len(parts) > 0 and all(hidden):
            return None
        if any(hidden):
            problem = f"hidden tag (tag {hidden.index(True) + 1} of {len(parts)})"
            raise RowError(problem, "Give all tags of a sentence or none.")
        return self._parts(parts, self._tag)

    def remark(self, cell: Any) -> str | None:
        return None

    def replacement(self, columns: Sequence[Column]) -> Column | None:
        return next((column for column in columns if isinstance(column.type, Spans)), None)

    def _tag(self, value: Any) -> str:
        tag = value.strip() if isinstance(value, str) else value
        if tag == "":
            raise RowError("empty tag", "Write 'O' for a word that is part of nothing.")
        if isinstance(tag, float):
            raise RowError("not a tag name", "Write a text or a whole number.")
        return label_name(tag)

    def texts(self, value: Any) -> Sequence[str]:
        return ()

    def normalized(self, value: Any) -> Sequence[str]:
        return to_iob2(value)

    def rename(self, value: Any, label: Callable[[str], str | None]) -> Any:
        return value

    def unknown(self, names: Iterable[str], labels: Collection[str], *, strict: bool = False) -> Iterator[RowError]:
        """Yields tags that the labels cannot express; unless ``strict``, types that the labels do not have pass."""
        if strict:
            names_known = known_tags(list(labels))
            yield from (unknown_name("tag", name, names_known) for name in names if name not in names_known)
            return
        unclear = [name for name in dict.fromkeys(names) if not is_chunk_tag(name)]
        if unclear and all(map(is_chunk_tag, labels)):
            yield from (RowError("unknown tag", "Expected O or a tag such as B-TYPE.", value=name) for name in unclear)

    def resolve(self, value: Any, row: Mapping[str, Any], cells: Mapping[str, Any], columns: Sequence[Column]) -> Any:
        for column in columns:
            words = row.get(column.name) if column.type.is_pretokenized else None
            if words is not None and len(words) != len(value):
                problem = f"{counted(len(words), 'word')} and {counted(len(value), 'tag')}"
                start = " ".join(words[:5]) + (" ..." if len(words) > 5 else "")
                hint = f"Give each word of the sentence {start!r} one tag."
                raise RowError(problem, hint, value=" ".join(value))
        return value


class Spans(ColumnKind):
    """Entities by their characters in the row's text: ``[[0, 5, "PER"]]``, and the other forms of ``parse_spans``.

    They become tags of the row's words. A row that has both is read by its spans.
    """

    name = "spans"
    is_label = True

    def _parse(self, value: Any, separator: str) -> None:
        """Returns no value, because ``complete`` has made tags of it."""

    def complete(
        self, cells: Mapping[str, Any], column: Column, columns: Sequence[Column], names: Mapping[str, str]
    ) -> Mapping[str, Any]:
        """Returns the cells with the words of the text and their tags.

        Without a text the spans count the characters of all words with a space between them.
        """
        name = names.get(column.name, column.name)
        if cells.get(name) in (None, ""):
            return cells
        sources = {other.kind: names.get(other.name, other.name) for other in columns}
        text, tags = cells.get(sources["text"]), cells.get(sources["tags"])
        try:
            spans, words = parse_spans(cells[name]), KINDS["words"].parse(cells.get(sources["words"]))
            text = " ".join(words) if text is None else parse_text(text)
            places = place_words(words, text)
            if places is None:
                raise RowError("spans of a text that does not have the row's words")
            span_tags, moved = word_tags(spans, places, text)
        except RowError as error:
            raise error.at(name, cells[name]) from None
        remarks = list(cells.get(REMARKS, ()))
        remarks += ["changed: spans that begin or end within a word were moved to its borders"] if moved else []
        if tags is not None and to_iob2(KINDS["tags"].parse(tags)) != span_tags:
            remarks.append("changed: the spans replaced other tags")
        return {**cells, sources["words"]: words, sources["tags"]: span_tags, REMARKS: remarks}


class Number(ColumnKind):
    """A finite number."""

    name = "number"
    is_label = True
    strata_name = "tenths of the numbers"

    def _parse(self, value: Any, separator: str) -> float | None:
        if value is None or value == "":
            return None
        try:
            if isinstance(value, bool) or not isinstance(value, str | int | float) or "_" in str(value):
                raise ValueError
            number = float(value)
        except (ValueError, OverflowError):
            hint = "Write a decimal point." if isinstance(value, str) and value.count(",") == 1 else ""
            raise RowError("not a number", hint) from None
        if not math.isfinite(number):
            raise RowError("not a finite number")
        return number

    def arrow_type(self) -> Any:
        import pyarrow

        return pyarrow.float64()

    def strata(self, values: Sequence[Any]) -> list[Sequence[str]]:
        """Returns the tenth of the numbers in which each number is."""
        import numpy as np

        numbers = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
        bounds = np.nanquantile(numbers, np.linspace(0, 1, _TENTHS + 1)[1:-1])
        return [(str(tenth),) for tenth in np.searchsorted(bounds, numbers, side="right")]


class AnswerTexts(TypedDict):
    """The answers to one question, as SQuAD's data sets on the hub have them; empty lists: it has no answer.

    ``answer_start`` counts characters of the row's context from 0.
    """

    text: list[str]
    answer_start: list[int]


class Answers(ColumnKind):
    """The texts that answer the row's question, and where they start in its ``context``; see ``AnswerTexts``.

    Also a list of such objects or of texts, or in one cell the same as JSON or the text itself. An answer without a
    start is at the first place where the context has it.
    """

    name = "answers"
    is_label = True
    needed_label = "answerable"
    group_column = CONTEXT
    group_noun = "context"
    article_column = "title"  # SQuAD's name of the article that a question is about
    strata_name = "questions with and without an answer"
    _example: ClassVar[str] = 'Write answers such as {"text": ["Paris"], "answer_start": [17]}.'

    def _parse(self, value: Any, separator: str) -> AnswerTexts | None:
        if value is None:
            return None
        if isinstance(value, str):
            try:
                value = json.loads(value) if value.startswith(("[", "{")) else [value]
            except (ValueError, RecursionError):
                raise RowError("not JSON", self._example) from None
        if not isinstance(value, Mapping | list | tuple):
            raise RowError("not a list of answers", self._example)
        pairs = [pair for part in ([value] if isinstance(value, Mapping) else value) for pair in self._pairs(part)]
        if [text for text, _ in pairs] == [""]:
            pairs = []
        for number, (text, start) in enumerate(pairs, start=1):
            if not isinstance(text, str) or text.strip() == "":
                raise RowError(f"answer {number} is not a text", "Write an empty list if there is no answer.")
            if isinstance(start, bool) or not isinstance(start, int) or not UNKNOWN_START <= start < _LARGEST_START:
                raise RowError(f"answer_start that is not a whole number from 0 (answer {number})", self._example)
        return AnswerTexts(text=[parse_text(text) for text, _ in pairs], answer_start=[start for _, start in pairs])

    def _pairs(self, item: Any) -> list[tuple[Any, Any]]:
        """Texts with their starts, of one text, one answer, or an object that holds a list of both."""
        if not isinstance(item, Mapping):
            return [(item, UNKNOWN_START)]
        if "text" not in item:
            raise RowError("no 'text' in answers", self._example)
        texts = item["text"] if isinstance(item["text"], list | tuple) else [item["text"]]
        starts = item.get("answer_start")
        starts = [UNKNOWN_START] * len(texts) if starts is None else starts
        starts = starts if isinstance(starts, list | tuple) else [starts]
        if len(texts) != len(starts):
            problem = f"{counted(len(texts), 'answer')} and {len(starts)} answer_start"
            raise RowError(problem, "Give each answer a text and a start.")
        return list(zip(texts, starts, strict=True))

    def arrow_type(self) -> Any:
        import pyarrow

        starts = pyarrow.list_(pyarrow.int64())
        return pyarrow.struct({"text": pyarrow.list_(pyarrow.string()), "answer_start": starts})

    def labels_of(self, value: Any) -> Sequence[str]:
        return ("answerable" if value["text"] else "unanswerable",)

    def strata(self, values: Sequence[Any]) -> list[Sequence[str]]:
        return [self.labels_of(value) for value in values]

    def resolve(self, value: Any, row: Mapping[str, Any], cells: Mapping[str, Any], columns: Sequence[Column]) -> Any:
        if all(column.name != CONTEXT for column in columns):
            raise RowError("answers without a context", f"Add a column {CONTEXT!r}.")
        context = row.get(CONTEXT)
        if context is None:
            return value
        starts = []
        for text, position in zip(value["text"], value["answer_start"], strict=True):
            start = context.find(text) if position == UNKNOWN_START else position
            if start < 0 or not context.startswith(text, start):
                raise RowError("misplaced answer", _misplaced(text, position, context), value=text)
            starts.append(start)
        return AnswerTexts(text=list(value["text"]), answer_start=starts)


def _misplaced(text: str, start: int, context: str) -> str:
    """A sentence on where an answer is that is not where it should be."""
    places = [match.start() for match in re.finditer(f"(?={re.escape(text)})", context)]
    if places:
        return f"The text is at {min(places, key=lambda position: abs(position - start))}."
    folded = context.lower().find(text.lower())
    there = shortened(context[folded : folded + len(text)])
    return "Copy the text from the context exactly." if folded < 0 else f"At {folded} the context has {there}."


class Choices(_TextList):
    """Two or more texts, one of them right: a list, or an object with it as ``text`` and their names as ``label``.

    A row may have a column for each choice instead: choice0, choice1, ... Empty ones at the end are no choices.
    """

    name = "choices"
    item = "choice"
    first = 0
    least = 2
    has_texts = True
    is_numbered = True
    group_column = CONTEXT
    group_noun = "question"

    def _parse(self, value: Any, separator: str) -> list[str]:
        parts = value.get("text") if isinstance(value, Mapping) else value
        parts = list_in_cell(parts) if isinstance(parts, str) else parts
        if not isinstance(parts, list | tuple):
            raise RowError("not a list of choices", 'Write a list such as ["...", "..."].')
        choices = self._parts(parts, parse_text)
        if len(choices) < self.least:
            raise RowError(counted(len(choices), "choice"), "Give at least 2.")
        return choices

    def complete(
        self, cells: Mapping[str, Any], column: Column, columns: Sequence[Column], names: Mapping[str, str]
    ) -> Mapping[str, Any]:
        """Returns the cells with an object of the choices and their columns if each choice has a column.

        Raises:
            RowError: The numbers of the columns are not 0, 1, 2, ... or 1, 2, 3, ...
        """
        name = names.get(column.name, column.name)
        numbered = [] if cells.get(name) is not None else numbered_columns(name, cells)
        numbers = [int(re.sub(r".*\D", "", column_name)) for column_name in numbered]
        if numbers and numbers not in (list(range(len(numbers))), list(range(1, len(numbers) + 1))):
            columns_shown = ", ".join(map(repr, numbered))
            raise RowError(
                f"the columns of single choices are {columns_shown}", "Number them 0, 1, 2, ... or 1, 2, 3, ..."
            )
        while numbered and cells[numbered[-1]] in (None, ""):
            numbered.pop()
        choices = {"text": [cells[column_name] for column_name in numbered], "label": numbered}
        return {**cells, name: choices} if numbered else cells


class Choice(ColumnKind):
    """Which of the row's choices is right: a number, a text, a letter, or the name of a column; as an index from 0."""

    name = "choice"
    is_label = True
    base: ClassVar[int] = 0  # the number of the first choice

    def _parse(self, value: Any, separator: str) -> int | str | None:
        if value is None or value in ("", -1, "-1", "-1.0"):
            return None
        if isinstance(value, float) and value.is_integer():  # tables with hidden labels have no whole numbers
            return int(value)
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise RowError("not a choice", "Write its number, its text, its letter or its column.")
        return value if isinstance(value, int) else parse_text(value)

    def arrow_type(self) -> Any:
        import pyarrow

        return pyarrow.int64()

    def labels_of(self, value: Any) -> Sequence[str]:
        return (f"choice {value}",)

    def resolve(self, value: Any, row: Mapping[str, Any], cells: Mapping[str, Any], columns: Sequence[Column]) -> Any:
        for column in columns:
            if isinstance(column.type, Choices):
                choices, cell = row.get(column.name), cells.get(column.name)
                called = cell.get("label") if isinstance(cell, Mapping) else ()
                called = list(map(str, called)) if isinstance(called, list | tuple) else ()
                return None if choices is None else self.index(value, choices, called)
        return value

    def index(self, value: int | str, choices: Sequence[str], names: Sequence[str] = ()) -> int:
        """Returns the index of the right choice, from 0.

        Args:
            value: A number, the text of a choice, its letter, or what the row calls it.
            choices: The texts.
            names: What the row calls its choices, such as the columns that hold them.

        Raises:
            RowError: There is no such choice, or the value can mean several.
        """
        count, places = len(choices), set[int]()
        if isinstance(value, int):
            places = {value - self.base}
        else:
            text = value.strip()
            if re.fullmatch(r"-?[0-9]+\.0", text) and text not in {*names, *map(str.strip, choices)}:
                text = text.removesuffix(".0")  # how pandas writes whole numbers of a column with empty cells
            places = {place for place, name in enumerate(names[:count]) if name == text}
            if not places and len(text) == 1 and text in _LETTERS[:count]:
                places = {_LETTERS.index(text)}
            elif not places and re.fullmatch(r"-?[0-9]{1,3}", text):
                places = {int(text) - self.base}
            places |= {place for place, choice in enumerate(choices) if choice.strip() == text}
        inside = sorted(places.intersection(range(count)))
        if len(inside) == 1:
            return inside[0]
        last = self.base + count - 1
        if inside:
            meanings = " or ".join(str(place + self.base) for place in inside)
            hint = f"Write the number without quotes, or the letter (A is {self.base})."
            raise RowError(f"ambiguous choice ({meanings})", hint)
        raise RowError("no such choice", f"Write a number from {self.base} to {last}, or the text of a choice.")


class ChoiceFromOne(Choice):
    """``Choice`` whose numbers begin at 1."""

    name = "choice from 1"
    noun = "choice"
    base = 1


def unknown_name(noun: str, name: str, names: Collection[str]) -> RowError:
    """Returns the error of a label that is not known, with the label that was meant."""
    meant = suggestion(name, names)
    hint = f"Expected one of {first_few(names, 10)}." if meant is None else f"Did you mean {meant!r}?"
    return RowError(f"unknown {noun}", hint, value=name)


def known_tags(labels: Sequence[str]) -> tuple[str, ...]:
    """Returns the tags that a set of labels can express: itself, and its types in IOB2, whatever the scheme is."""
    if not all(map(is_chunk_tag, labels)):
        return tuple(labels)
    types = dict.fromkeys(label.partition("-")[2] for label in labels if "-" in label)
    return tuple(dict.fromkeys([*labels, *(f"{prefix}-{kind}" for kind in types for prefix in "BI")]))
