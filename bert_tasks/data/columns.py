"""Columns and values: what a task's column holds, and the canonical form of each value.

Owns the kinds of columns, the rules for texts, labels, sets of labels, numbers, words, tags and answers in cells of any
format, and how a text is split into words where a tagger that was trained on words is given a text. Imports nothing
heavy.
"""

import ast
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypedDict

from bert_tasks.data.problems import counted
from bert_tasks.errors import DataError

Row = Mapping[str, Any]
Kind = Literal["text", "texts", "id", "label", "labels", "number", "words", "tags", "answers", "choices", "choice"]
Document = Literal["blank-line", "line", "file"]  # what a document is in a file of text

# Columns of the table beside the task's; no task can have these names.
PASSTHROUGH, FAULT, FOLD_GROUP = "given row", "fault of the row", "group of a fold"

PassthroughColumns = Literal["all", "none"] | Sequence[str]

LABEL_KINDS: frozenset[Kind] = frozenset({"label", "labels", "number", "tags", "answers", "choice"})


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column that a task reads. Its ``kind`` says what a valid value is.

    text: a string. texts: a list of strings, such as the sentences of a text. id: a string or whole number that names
    something, as a string. label: one of the task's label names. labels: a list of them (a csv cell separates them by
    ``;``). number: a finite number. words: a list of strings. tags: one tag name for each of the row's words. answers:
    the texts that answer the row's question and where they start in its ``context``; none where it cannot be answered.
    choices: a list of two or more texts of which one is right, or columns with one of them each. choice: which of the
    row's choices is right, counted from 0.
    See ``canonical`` for the spellings that a cell may use.

    ``required`` columns must be in every file. Of the others, those with labels may be missing when only predictions
    are wanted; texts, lists of texts, ids and words may always be missing.
    """

    name: str
    kind: Kind
    required: bool = True

    @property
    def is_label(self) -> bool:
        """Whether the column holds what the task learns to predict."""
        return not self.required and self.kind in LABEL_KINDS


def column_of(columns: Iterable[Column], *kinds: Kind) -> Column | None:
    """The first column of one of the kinds."""
    return next((column for column in columns if column.kind in kinds), None)


def has_labels(columns: Iterable[Column]) -> bool:
    """Whether the rows of a task have labels; the documents of a corpus have none."""
    return any(column.is_label for column in columns)


# Over the classes of characters: an abbreviation of letters (U.S.), a word, which may have single marks between letters
# or digits (state-of-the-art, 3.5, O'Neill), a Chinese or Japanese character, or one character of punctuation.
_WORD = re.compile(r"(?:lp){2,}(?![lmw])|[lmw]+(?:[jp][lmw]+)*|cm*|[^s]")
# Han, Hiragana and Katakana, between whose words there are no spaces: corpora such as WikiANN annotate each character.
_CJK = re.compile(
    "[\u3005\u3007\u3040-\u3098\u309b-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f"
    "\U00020000-\U0003ffff]"
)
_JOINING = "'\u2019-"
# As in the Penn Treebank and CoNLL-2003: Luigi 's, did n't.
_CLITIC = re.compile(r"(?<=.)(?:n['\u2019]t|['\u2019](?:s|re|ve|ll|d|m))$", re.IGNORECASE | re.DOTALL)


def word_spans(text: str) -> list[tuple[int, int]]:
    """Where each word of a text begins and ends, in characters. Every character but white space is in one word."""
    spans: list[tuple[int, int]] = []
    for found in _WORD.finditer("".join(map(_class_of, text))):
        start, end = found.span()
        clitic = _CLITIC.search(text[start:end])
        cut = end if clitic is None else start + clitic.start()
        spans += [(start, cut)] if cut == end else [(start, cut), (cut, end)]
    return spans


def place_words(words: Sequence[str], text: str) -> list[tuple[int, int]] | None:
    """The place of each word in the text, one after the other; None if they are not all there."""
    spans: list[tuple[int, int]] = []
    end = 0
    for word in words:
        start = text.find(word, end)
        if start < 0:
            return None
        end = start + len(word)
        spans.append((start, end))
    return spans


def with_words(cells: Mapping[str, Any], columns: Sequence[Column], names: Mapping[str, str]) -> Mapping[str, Any]:
    """The cells, with the words of the text where there is a text and no words.

    Args:
        names: the task's columns -> those of the cells, where they differ.
    """
    words, text = text_of_words(columns)
    if words is None or text is None:
        return cells
    words_name, value = names.get(words.name, words.name), cells.get(names.get(text.name, text.name))
    if cells.get(words_name) is not None or not isinstance(value, str):
        return cells
    return {**cells, words_name: [value[start:end] for start, end in word_spans(value)]}


def text_of_words(columns: Sequence[Column]) -> tuple[Column | None, Column | None]:
    """The column of words, and that of the text that may replace it, of a task that has both."""
    words, text = column_of(columns, "words"), column_of(columns, "text")
    return (None, None) if words is None or text is None else (words, text)


def with_text(cells: Mapping[str, Any], columns: Sequence[Column], names: Mapping[str, str]) -> Mapping[str, Any]:
    """The cells, with a text of its sentences, one on each line, where there are sentences and no text.

    Args:
        names: the task's columns -> those of the cells, where they differ.
    """
    texts, text = column_of(columns, "texts"), column_of(columns, "text")
    if texts is None or text is None or cells.get(names.get(text.name, text.name)) is not None:
        return cells
    try:
        sentences = canonical(cells.get(names.get(texts.name, texts.name)), "texts")
    except BadValueError:  # reading the column reports it
        return cells
    return cells if sentences is None else {**cells, names.get(text.name, text.name): "\n".join(sentences)}


def _class_of(character: str) -> str:
    """l letter, m mark on it, w digit, c Chinese or Japanese, s white space, p full stop, j joining mark, o other."""
    if character.isspace():
        return "s"
    if _CJK.match(character):
        return "c"
    kind = unicodedata.category(character)[0]
    if kind in "LMN":
        return {"L": "l", "M": "m", "N": "w"}[kind]
    return "p" if character == "." else "j" if character in _JOINING else "o"


LABEL_SEPARATOR = ";"
_ANSWERS_EXAMPLE = '{"text": ["Paris"], "answer_start": [17]}'
_MOST_CHARACTERS = 2**31
_PYTHON_ESCAPE = r"\\(?:[\\'\"abfnrtv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})"
_PYTHON_ITEM = re.compile(rf"'(?:[^'\\]|{_PYTHON_ESCAPE})*'|\"(?:[^\"\\]|{_PYTHON_ESCAPE})*\"|-?\d+")
_PYTHON_LIST = re.compile(rf"\[\s*(?:(?:{_PYTHON_ITEM.pattern})(?:\s*,\s*(?:{_PYTHON_ITEM.pattern}))*)?\s*\]")
# Not latin-1: it reads the bytes 0x80 to 0x9f, quotes and dashes of Windows, as control characters without an error.
ENCODING_EXAMPLE = "such as 'cp1252' for Western European text from Windows"
UNKNOWN_START = -1  # of an answer whose start the source does not say


class Answers(TypedDict):
    """The answers to one question, as SQuAD's data sets on the hub have them; empty lists: it has no answer.

    ``answer_start`` counts characters of the row's context from 0.
    """

    text: list[str]
    answer_start: list[int]


class BadValueError(ValueError):
    """The value cannot be used; the message says why, and what to write instead."""


def canonical(value: Any, kind: Kind, label_separator: str = LABEL_SEPARATOR) -> Any:
    """The value in canonical form; None where there is none (never for texts, ids and words, which may be empty).

    label, tags, answers: hidden ones (None, and negative class ids in tags) become None. labels: a list, or in one
    cell a JSON or Python list, or names with ``label_separator`` between them. words, tags: a list, or in one cell a
    JSON or Python list, or names with white space between them. texts: a list, or in one cell a JSON or Python list;
    None where there is none. answers: see ``Answers``; also a list of such objects
    or of texts, or in one cell the same as JSON or the text itself (empty: the question has no answer). choices: a
    list, in one cell a JSON or Python list, or an object with them as ``text``. choice: a number, or a text that
    ``choices.choice_index`` compares with the choices; hidden ones (None, -1) become None.

    NumPy's scalars and arrays count as Python's values, and a float that is not a number as no value.

    Raises:
        BadValueError: the value is not of this kind.
    """
    value = _python_value(value)
    match kind:
        case "text":
            return _text(value)
        case "texts":
            return None if value is None else _texts(value)
        case "id":
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            return str(value) if isinstance(value, int) and not isinstance(value, bool) else _text(value)
        case "label":
            return None if value is None or value == "" else label_name(value)
        case "labels":
            return None if value is None else _label_set(value, label_separator)
        case "number":
            return None if value is None or value == "" else _number(value)
        case "words":
            return _words(value)
        case "tags":
            return None if value is None else _tags(value)
        case "answers":
            return None if value is None else _answers(value)
        case "choices":
            return _choices(value)
        case "choice":
            return _choice(value)


def _python_value(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    return None if isinstance(value, float) and math.isnan(value) else value


def label_name(value: Any) -> str:
    """Returns the name of a label; that of a number or boolean is how Python writes it.

    pandas turns whole numbers into floats where a column has missing values, so whole floats have no ``.0``.

    Raises:
        BadValueError: The value is neither a number nor a name.
    """
    value = _python_value(value)
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else str(value)
    if isinstance(value, bool | int):
        return str(value)
    if not isinstance(value, str):
        raise BadValueError(f"expected a label name, not {_type_name(value)}")
    name = value.strip()
    if name == "":
        raise BadValueError("missing label")
    if name != value:
        raise BadValueError(f"spaces around a label: {value!r} -> {name!r}")
    return _text(value)


def labels_by_value(labels: Iterable[str]) -> dict[float, str]:
    """Returns the label of each number that exactly one label spells; ``true`` spells 1 and ``false`` spells 0."""
    names: dict[float, list[str]] = {}
    for label in labels:
        value = label_value(label)
        if value is not None:
            names.setdefault(value, []).append(label)
    return {value: same[0] for value, same in names.items() if len(same) == 1}


def label_value(name: str) -> float | None:
    """Returns the number that a label spells, in any spelling that pandas reads as this number; None for a word."""
    if name.lower() in ("true", "false"):
        return float(name.lower() == "true")
    try:
        return None if "_" in name else float(name)
    except ValueError:
        return None


def _text(value: Any) -> str:
    if value is None:
        raise BadValueError('missing text; write an empty text as ""')
    if not isinstance(value, str):
        raise BadValueError(f"expected a text, not {_type_name(value)}; write it in quotes")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        code = ord(value[error.start])
        if 0xDC80 <= code <= 0xDCFF:  # how readers pass on an undecodable byte
            byte = f"byte 0x{code - 0xDC00:02X}"
            raise BadValueError(f"{byte} is not valid here; state the file's encoding, {ENCODING_EXAMPLE}") from None
        raise BadValueError(f"half a character (surrogate U+{code:04X}); replace it") from None
    return value


def _label_set(value: Any, separator: str) -> list[str]:
    if isinstance(value, str):
        value = label_parts(value, separator)
    if isinstance(value, bool | int | float):  # pandas reads a column of cells with one number each as numbers
        value = [value]
    if not isinstance(value, list | tuple):
        raise BadValueError(f"expected a list of label names, not {_type_name(value)}")
    names = [label_name(part) for part in value if part is not None and part != ""]
    if len(names) < len(value):
        raise BadValueError(f"an empty label name; write names with one {separator!r} between two of them")
    if len(set(names)) < len(names):
        raise BadValueError("a label appears twice")
    return names


def label_parts(cell: str, separator: str = LABEL_SEPARATOR) -> list[Any]:
    """The names in one cell: a JSON or Python list, or names with the separator between them."""
    names = list_in_cell(cell)
    if names is not None:
        return names
    return [] if cell.strip() == "" else [part.strip() for part in cell.split(separator)]


def list_in_cell(cell: str) -> list[Any] | None:
    """The list that a cell holds as JSON or as Python writes a list of texts and whole numbers; None for another cell.

    Of Python's forms only those that ``repr`` writes are read: ``['a' 'b']``, as numpy prints, is one text there.
    """
    if not cell.lstrip().startswith("["):
        return None
    try:
        value = json.loads(cell)
    except (ValueError, RecursionError):
        if _PYTHON_LIST.fullmatch(cell.strip()) is None:
            return None
        try:
            return [ast.literal_eval(part) for part in _PYTHON_ITEM.findall(cell)]
        except (ValueError, SyntaxError):  # a character or a number that is too large
            return None
    return value if isinstance(value, list) else None


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadValueError(f"expected a number, not {_type_name(value)}")
    try:
        if isinstance(value, str) and "_" in value:
            raise ValueError
        number = float(value)
    except ValueError:
        pointed = str(value).strip().replace(",", ".")
        is_number = pointed.count(".") == 1 and pointed.replace(".", "").lstrip("+-").isdecimal()
        hint = f": {value!r} -> {pointed!r}?" if is_number else ""
        raise BadValueError(f"not a number{hint}") from None
    except OverflowError:
        raise BadValueError("too large for a number") from None
    if not math.isfinite(number):
        raise BadValueError("not a finite number")
    return number


def _words(value: Any) -> list[str]:
    if value is None:
        raise BadValueError("missing words; write an empty sentence as []")
    return [_part("word", number, _text, part) for number, part in enumerate(_parts(value, "words"), start=1)]


def _texts(value: Any) -> list[str]:
    parts = list_in_cell(value) if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise BadValueError(f'expected a list of texts such as ["...", "..."], not {_type_name(value)}')
    return [_part("text", number, _text, part) for number, part in enumerate(parts, start=1)]


def _choices(value: Any) -> list[str]:
    parts = value.get("text") if isinstance(value, Mapping) else value
    parts = list_in_cell(parts) if isinstance(parts, str) else parts
    if not isinstance(parts, list | tuple):
        raise BadValueError(f'expected a list of choices such as ["...", "..."], not {_type_name(value)}')
    choices = [_part("choice", number, _text, part) for number, part in enumerate(parts)]
    if len(choices) < 2:
        raise BadValueError(f"{len(choices)} choice{'' if choices else 's'}; give at least 2")
    return choices


def _choice(value: Any) -> int | str | None:
    if value is None or value in ("", -1, "-1", "-1.0"):
        return None
    if isinstance(value, float) and value.is_integer():  # tables with hidden labels have no whole numbers
        return None if value == -1 else int(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise BadValueError(f"expected the index or the text of the right choice, not {_type_name(value)}")
    return value if isinstance(value, int) else _text(value)


def _tags(value: Any) -> list[str] | None:
    parts = _parts(value, "tags")
    # A class id below 0 means "hidden" on the hub; readers pass it on as None where the ids have names.
    is_hidden = [part is None or (isinstance(part, int) and part < 0) for part in parts]
    hidden = [number for number, hides in enumerate(is_hidden, start=1) if hides]
    if len(hidden) == len(parts) > 0:
        return None
    if hidden:
        raise BadValueError(f"tag {hidden[0]} of {len(parts)} is hidden ({parts[hidden[0] - 1]!r}); give all or none")
    return [_part("tag", number, _tag, part) for number, part in enumerate(parts, start=1)]


def _tag(value: Any) -> str:
    if isinstance(value, float):
        raise BadValueError("a number, not a tag name")
    name = value.strip() if isinstance(value, str) else value
    if name == "":
        raise BadValueError("empty; each word needs a tag, 'O' where it is part of nothing")
    return label_name(name)


def _parts(value: Any, what: str) -> list[Any]:
    if isinstance(value, str):
        found = list_in_cell(value)
        value = value.split() if not value.startswith("[") else _json(value, what) if found is None else found
    if not isinstance(value, list | tuple):
        raise BadValueError(f"expected a list of {what}, not {_type_name(value)}")
    return list(value)


def _part(what: str, number: int, convert: Callable[[Any], str], value: Any) -> str:
    try:
        return convert(value)
    except BadValueError as error:
        raise BadValueError(f"{what} {number}: {error}") from None


def _json(cell: str, what: str) -> Any:
    try:
        return json.loads(cell)
    except (ValueError, RecursionError) as error:
        raise BadValueError(
            f'a cell that starts with {cell[0]!r} must be JSON such as ["a", "b"], and these {what} are not ({error})'
        ) from None


def _answers(value: Any) -> Answers:
    if isinstance(value, str):
        value = _json(value, "answers") if value.startswith(("[", "{")) else [value]
    if not isinstance(value, Mapping | list | tuple):
        raise BadValueError(f"expected answers such as {_ANSWERS_EXAMPLE}, not {_type_name(value)}")
    pairs = [pair for part in ([value] if isinstance(value, Mapping) else value) for pair in _answer_pairs(part)]
    if [text for text, _ in pairs] == [""]:
        pairs = []
    for number, (text, start) in enumerate(pairs, start=1):
        if not isinstance(text, str) or text.strip() == "":
            raise BadValueError(f"answer {number} is {text!r}, expected a text; no answer at all is an empty list")
        if isinstance(start, bool) or not isinstance(start, int) or not UNKNOWN_START <= start < _MOST_CHARACTERS:
            raise BadValueError(f"the answer_start of answer {number} is {start!r}, expected a whole number from 0")
    return Answers(text=[_text(text) for text, _ in pairs], answer_start=[start for _, start in pairs])


def _answer_pairs(part: Any) -> list[tuple[Any, Any]]:
    """Texts with their starts, of one text, one answer, or an object that holds a list of both."""
    if not isinstance(part, Mapping):
        return [(part, UNKNOWN_START)]
    if "text" not in part:
        named = ", ".join(map(repr, part)) if part else "nothing"
        raise BadValueError(f"expected answers such as {_ANSWERS_EXAMPLE}; 'text' is missing, there is {named}")
    texts = part["text"] if isinstance(part["text"], list | tuple) else [part["text"]]
    starts = part.get("answer_start")
    if starts is None:
        starts = [UNKNOWN_START] * len(texts)
    starts = starts if isinstance(starts, list | tuple) else [starts]
    if len(texts) != len(starts):
        counts = f"{counted(len(texts), 'answer text')} and {counted(len(starts), 'value')}"
        raise BadValueError(f"{counts} of answer_start; give one for each")
    return list(zip(texts, starts, strict=True))


def _type_name(value: Any) -> str:
    names: dict[type, str] = {bool: "true/false", int: "a number", float: "a number", str: "a text"}
    names |= {list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def renamed_row(row: Row, names: Mapping[str, str], columns: Sequence[Column] = ()) -> Row:
    """The row with the task's names: a column that it does not have under this name is found under its other one.

    Args:
        names: the task's columns -> other names.
        columns: those that the task reads, of which none takes a value by its name alone that another one has taken.
    """
    found = {name: row[other] for name, other in names.items() if name not in row and other in row}
    if not found:
        return row
    unread = read_for_others(columns, names).intersection(names[name] for name in found)
    return {**{name: value for name, value in row.items() if name not in unread}, **found}


def read_for_others(
    columns: Sequence[Column], stated: Mapping[str, str], usual: Mapping[str, str] = MappingProxyType({})
) -> set[str]:
    """The optional columns that are not read, as what has their name in the source is stated to be another column.

    With ``context = "question"`` stated, a task that may also have a ``question`` would else read the question twice.
    The text of words is read nevertheless: it says where the words are, and is no further input.

    Args:
        stated: the task's columns -> the source's, as the caller states them.
        usual: the same for columns that are not stated, where these have another name.
    """
    taken = set(stated.values())
    _, text = text_of_words(columns)
    unstated = [c.name for c in columns if not c.required and c != text and c.name not in stated]
    return {name for name in unstated if usual.get(name, name) in taken}


def as_row(given: Row | str | tuple[str, ...], columns: Sequence[Column], number: int) -> Row:
    """The row that is given as such, as its text, or as a tuple of its texts in the order of the task's columns.

    Raises:
        DataError: naming the row and what it must be.
    """
    if isinstance(given, Mapping):
        return given
    words, text = text_of_words(columns)
    texts = [column.name for column in columns if column.required and column.kind in ("text", "words")]
    texts = [text.name if text is not None and words is not None and name == words.name else name for name in texts]
    values = given if isinstance(given, tuple) else (given,)
    has_texts = len(values) == len(texts) and column_of(columns, "choices") is None
    if has_texts and all(isinstance(value, str) for value in values):
        return dict(zip(texts, values, strict=True))
    mapping = "{" + ", ".join(f'"{column.name}": ...' for column in columns if column.required) + "}"
    short = ", or a text" if len(texts) == 1 else f", or a tuple of {' and '.join(texts)}"
    short = "" if column_of(columns, "choices") is not None else short
    raise DataError(f"row {number}: expected a mapping such as {mapping}{short}, got {type(given).__name__}")


def as_rows(
    inputs: Row | str | tuple[str, ...] | Iterable[Row | str | tuple[str, ...]], columns: Sequence[Column]
) -> Iterable[Row]:
    """The rows of what ``TaskModel.predict`` is given: one row or several.

    Raises:
        DataError: see ``as_row``.
    """
    texts = sum(column.required and column.kind in ("text", "words") for column in columns)
    is_one = isinstance(inputs, tuple) and texts == len(inputs) > 1 and all(isinstance(part, str) for part in inputs)
    is_one = is_one or isinstance(inputs, Mapping | str) or not isinstance(inputs, Iterable)
    several: Iterable[Any] = [inputs] if is_one else inputs
    return (as_row(given, columns, number) for number, given in enumerate(several))
