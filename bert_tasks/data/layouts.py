"""Layouts, which turn the columns of a source into the columns of a task.

A source may call a column otherwise, keep it inside of an object, spread it over several columns, or have another
column from which it follows. This module has one function for each of these layouts. For the columns that a source has,
it yields a step for each column of the task that the layout applies to. A step changes the cells of a batch. The steps
are chosen once for a source that declares its columns, and else once for each set of columns that its rows have.

To add a layout, write such a function and name it in ``LAYOUTS``. Most steps fill only what a row lacks.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from bert_tasks.data.batch import MISSING, Cells
from bert_tasks.data.cells import column_parts, label_value, numbered_columns
from bert_tasks.data.conll import to_iob2
from bert_tasks.data.issues import CellError, RowIssue
from bert_tasks.data.kinds import KINDS, Choices, Column, ColumnKind, Labels, Spans, Tags, Text, Texts, Words
from bert_tasks.data.spans import parse_spans, word_tags
from bert_tasks.data.words import place_words, word_spans

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MOVED = "had spans that begin or end within a word, which were moved to its borders"
_REPLACED = "had other tags, which the spans replaced"

Step = Callable[[Cells], list[RowIssue]]  # changes the cells of a batch, and returns the issues of its rows


@dataclass(frozen=True, kw_only=True)
class Names:
    """The columns that a task reads, and their names in a source.

    Attributes:
        columns: Columns of the task.
        names: Each of these columns -> its name in the source.
        others: Columns -> another name, which rows may have instead.
    """

    columns: Sequence[Column]
    names: Mapping[str, str]
    others: Mapping[str, str] = field(default_factory=dict)

    def source_of(self, column: Column) -> str:
        """Returns the name of a column in the source."""
        return self.names[column.name]

    def sources_of(self, column: Column) -> list[str]:
        """Returns the names that a column may have in the source."""
        names = [self.names[column.name]]
        if column.name in self.others:
            names.append(self.others[column.name])
        return names

    def first(self, kind: type[ColumnKind]) -> Column | None:
        """Returns the first column of a kind."""
        return next((column for column in self.columns if isinstance(column.type, kind)), None)


# The kind of a column that follows from another -> the kind of the other.
_SOURCES: Mapping[type[ColumnKind], type[ColumnKind]] = {Text: Texts, Words: Text, Tags: Spans}


def derived_from(column: Column, columns: Sequence[Column]) -> Column | None:
    """Returns the column from which a missing column follows, such as the text from which words are cut."""
    for kind, source in _SOURCES.items():
        if isinstance(column.type, kind):
            return next((other for other in columns if isinstance(other.type, source)), None)
    return None


def holders(column: Column, name: str, present: Collection[str]) -> list[str]:
    """Returns the columns of a source that hold a column of a task.

    Args:
        column: The column of the task.
        name: Its name in the source.
        present: The columns of the source.
    """
    parts = column_parts(name)
    if name not in present and len(parts) > 1:
        if isinstance(column.type, Labels | Choices) and set(parts) <= set(present):
            return parts
        return []
    found: list[str] = []
    outer = name.split(".")[0]  # of ``document.text``, the column with the object
    if name in present:
        found.append(name)
    elif outer in present:
        found.append(outer)
    if isinstance(column.type, Choices):
        found += numbered_columns(name, present)
    return found


def unread_columns(columns: Sequence[Column], names: Mapping[str, str], usual: Mapping[str, str]) -> set[str]:
    """Returns the optional columns whose name in the source is set for another column.

    They are not read. With ``context = "question"``, a task that may also have a ``question`` would otherwise read the
    question twice. The text of words is always read, because it defines the positions of the words and is no further
    input.

    Args:
        columns: The columns that the task reads.
        names: The task's columns -> the source's columns, as set by the caller.
        usual: The same for columns that the caller does not set, if they have another name.
    """
    # A name that the caller sets for two columns is meant, so only names that nobody set are given up.
    taken = set(names.values())
    text: Column | None = None
    words = next((column for column in columns if isinstance(column.type, Words)), None)
    if words is not None:
        text = derived_from(words, columns)
    unread = set()
    for column in columns:
        is_stated = column.required or column == text or column.name in names
        if not is_stated and usual.get(column.name, column.name) in taken:
            unread.add(column.name)
    return unread


def nested_cells(read: Names, present: Collection[str]) -> Iterator[Step]:
    """Reads a column inside of an object, which its name leads to, such as ``document.text``."""
    for column in read.columns:
        for name in read.sources_of(column):
            first, *rest = name.split(".")
            if rest and first in present:  # a column "document.text" of a csv file has no column "document" beside it
                yield partial(_unnest, name, first, rest)


def _unnest(name: str, first: str, rest: Sequence[str], cells: Cells) -> list[RowIssue]:
    """Fills the cells of a column from the objects in another, for rows that do not have it under its full name."""
    column = list(cells.get(name, [MISSING] * len(cells[first])))
    for row, cell in enumerate(cells[first]):
        if column[row] is MISSING:
            column[row] = _member(cell, rest)
    cells[name] = column
    return []


def _member(value: Any, keys: Sequence[str]) -> Any:
    """Returns the value to which keys lead in nested objects, or ``MISSING``."""
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            return MISSING
        value = value[key]
    return value


def several_columns(read: Names, present: Collection[str]) -> Iterator[Step]:
    """Reads a value in several columns, which are labels of 0 and 1 or choices."""
    for column in read.columns:
        for name in read.sources_of(column):
            parts = _parts(name, present)
            if parts:
                yield partial(_join, name, parts, column.type)


def _parts(name: str, present: Collection[str]) -> list[str]:
    """Returns the columns of a name with commas, if the source has all of them."""
    parts = column_parts(name)
    if len(parts) < 2 or not set(parts) <= set(present):
        return []
    return parts


def _join(name: str, parts: Sequence[str], kind: ColumnKind, cells: Cells) -> list[RowIssue]:
    """Joins the cells of several columns, for rows that have all of them."""
    # A layout copies a column before it changes it, because the batch shows its rows in messages.
    joined = list(cells.get(name, [MISSING] * len(cells[parts[0]])))
    issues: list[RowIssue] = []
    columns = [cells[part] for part in parts]
    for row, values in enumerate(zip(*columns, strict=True)):
        if joined[row] is not MISSING or any(cell is MISSING for cell in values):
            continue
        try:
            joined[row] = _joined(dict(zip(parts, values, strict=True)), kind)
        except CellError as error:
            issues.append(replace(error.issue, row=row))
    cells[name] = joined
    return issues


def _joined(cells: Mapping[str, Any], kind: ColumnKind) -> Any:
    """Returns the value of a kind that several cells of a row make together."""
    if isinstance(kind, Labels):
        return set_labels(cells)
    if isinstance(kind, Choices):
        return _filled_choices(cells)
    raise CellError(f"several columns for one {kind.noun}", "Name one column.")


def _is_empty(cell: Any) -> bool:
    """Returns True for no cell, no value, and the empty text, which is how csv writes that there is none."""
    return cell is MISSING or cell is None or (isinstance(cell, str) and cell == "")


def set_labels(cells: Mapping[str, Any]) -> list[str] | None:
    """Returns the columns that have a 1.

    Raises:
        CellError: A cell is neither 0 nor 1, in a row that has any value. An empty cell is no 0, because it may as well
            mean that nobody looked.
    """
    if all(map(_is_empty, cells.values())):
        return None
    labels = []
    for name, value in cells.items():
        number = None
        if value is not None:
            number = label_value(str(value))
        if number not in (0.0, 1.0):  # true and 1.0 are 1 for label_value, as pandas writes them
            error = CellError("neither 0 nor 1", "Write 1 where the label applies, and 0 elsewhere.")
            error.issue = error.issue.at(name, value)
            raise error
        if number:
            labels.append(name)
    return labels


def _filled_choices(cells: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns the choices with the names of their columns. Empty columns at the end are no choices."""
    # Questions of one file may have three or four choices. A hole between two choices stays, because labels count it.
    filled = [number for number, value in enumerate(cells.values(), start=1) if not _is_empty(value)]
    names = list(cells)[: max(filled, default=0)]
    return {"text": [cells[name] for name in names], "label": names}


def numbered_choices(read: Names, present: Collection[str]) -> Iterator[Step]:
    """Reads choices in columns that are called choice0, choice1, ... or choice_a, choice_b, ..."""
    for column in read.columns:
        if not isinstance(column.type, Choices):
            continue
        for name in read.sources_of(column):
            numbered = numbered_columns(name, present)
            if numbered:
                yield partial(_join_numbered, name, numbered)


def _join_numbered(name: str, numbered: Sequence[str], cells: Cells) -> list[RowIssue]:
    """Makes the choices of a row from its columns of single choices, unless it has a list of choices."""
    issues: list[RowIssue] = []
    joined = list(cells.get(name, [MISSING] * len(cells[numbered[0]])))
    for row, cell in enumerate(joined):
        names = [each for each in numbered if cells[each][row] is not MISSING]  # rows of JSON lines may lack some
        has_value = cell is not None and cell is not MISSING
        if has_value or len(names) < 2:
            continue
        try:
            _check_numbers(names)
        except CellError as error:
            issues.append(replace(error.issue, row=row))
            continue
        choices = _filled_choices({each: cells[each][row] for each in names})
        if choices["text"]:
            joined[row] = choices
    cells[name] = joined
    return issues


def _check_numbers(names: Sequence[str]) -> None:
    """Checks that columns are called 0, 1, 2, ... or 1, 2, 3, ... or a, b, c, ... after the name of the choices."""
    ends = [re.findall(r"[0-9]+$|[A-Za-z]$", name)[0].upper() for name in names]
    count = len(ends)
    if ends not in ([*map(str, range(count))], [*map(str, range(1, count + 1))], list(_LETTERS[:count])):
        shown = ", ".join(map(repr, names))
        raise CellError(f"the columns of single choices are {shown}", "Number them 0, 1, 2, ... or 1, 2, 3, ...")


def joined_words(read: Names, present: Collection[str]) -> Iterator[Step]:
    """Joins the words of a column that is named as the text, as in ``columns = {text = "words"}``."""
    for column in read.columns:
        name = read.source_of(column)
        if isinstance(column.type, Text) and name != column.name:
            yield partial(_join_words, name)


def _join_words(name: str, cells: Cells) -> list[RowIssue]:
    """Replaces lists of words in a column by texts."""
    if name in cells:
        cells[name] = [_text_of_words(cell) for cell in cells[name]]
    return []


def _text_of_words(cell: Any) -> Any:
    """Returns the text of a list of words, and any other cell as it is."""
    words = cell
    if hasattr(words, "tolist"):  # pandas has lists of parquet files as arrays of NumPy
        words = words.tolist()
    if isinstance(words, list | tuple) and len(words) > 0 and all(isinstance(word, str) for word in words):
        return " ".join(words)
    return cell


def other_names(read: Names, present: Collection[str]) -> Iterator[Step]:
    """Reads a column under its other name where a row does not have it under its name."""
    moved = [column for column in read.columns if column.name in read.others]
    if moved:
        yield partial(_read_others, read, moved)


def _read_others(read: Names, moved: Sequence[Column], cells: Cells) -> list[RowIssue]:
    """Moves cells from the other names of columns to their names, for rows that have the other name only.

    The cells are moved and not copied, because the other name may be that of another column of the task.
    """
    unread = unread_columns(read.columns, read.others, {})
    # Two columns may have exchanged their names, so all cells are taken as they were before the first move.
    given, read_twice = dict(cells), Cells()
    for column in moved:
        name, other = read.source_of(column), read.others[column.name]
        if other not in given:
            continue
        own = list(given.get(name, [MISSING] * len(given[other])))
        left = list(given[other])
        may_be_words = isinstance(column.type, Text) and other != column.name
        for row, cell in enumerate(given[other]):
            if own[row] is MISSING:
                own[row], left[row] = cell, MISSING
                if may_be_words:
                    own[row] = _text_of_words(cell)
        cells[name] = own
        if other in unread:  # no optional column reads it a second time
            read_twice[other] = left
    cells |= read_twice
    return []


def text_of_sentences(read: Names, present: Collection[str]) -> Iterator[Step]:
    """Makes a text of its sentences, one on each line."""
    yield from _derived(read, Text, _text_of_sentences)


def _text_of_sentences(cell: Any) -> Any:
    """Returns the text of a list of sentences, or ``MISSING`` if the cell holds none."""
    try:
        sentences = KINDS["texts"].parse(cell)
    except CellError:  # reading the column of sentences reports it
        return MISSING
    if sentences is None:
        return MISSING
    return "\n".join(sentences)


def words_of_text(read: Names, present: Collection[str]) -> Iterator[Step]:
    """Cuts a text into words, for a task that reads words and a row that has none."""
    yield from _derived(read, Words, _words_of_text)


def _words_of_text(cell: Any) -> Any:
    """Returns the words of a text, or ``MISSING`` for a cell that is no text."""
    if not isinstance(cell, str):
        return MISSING
    return [cell[start:end] for start, end in word_spans(cell)]


def _derived(read: Names, kind: type[ColumnKind], derive: Callable[[Any], Any]) -> Iterator[Step]:
    """Yields a step for each column of a kind that follows from another column where it has no value."""
    for column in read.columns:
        source = derived_from(column, read.columns)
        if isinstance(column.type, kind) and source is not None:
            yield partial(_derive, read.source_of(column), read.source_of(source), derive)


def _derive(name: str, source: str, derive: Callable[[Any], Any], cells: Cells) -> list[RowIssue]:
    """Fills the cells of a column that have no value from those of another column."""
    if source not in cells:
        return []
    column = list(cells.get(name, [MISSING] * len(cells[source])))
    for row, cell in enumerate(cells[source]):
        has_value = column[row] is not MISSING and column[row] is not None
        if has_value or cell is MISSING:
            continue
        derived = derive(cell)
        if derived is not MISSING:
            column[row] = derived
    cells[name] = column
    return []


def entity_tags(read: Names, present: Collection[str]) -> Iterator[Step]:
    """Makes tags of entities that are spans of a text.

    Without a text the spans count the characters of all words with a space between them.
    """
    names = []
    for kind in (Spans, Tags, Words, Text):
        column = read.first(kind)
        if column is None:
            return
        if kind is Spans and not holders(column, read.source_of(column), present):
            return
        names.append(read.source_of(column))
    spans, tags, words, text = names
    yield partial(_tag_entities, spans, tags, words, text)


def _tag_entities(spans: str, tags: str, words: str, text: str, cells: Cells) -> list[RowIssue]:
    """Replaces words and tags of the rows that have spans.

    Columns that are not there are read as missing. An error of a row names the column that causes it, because a user
    corrects a text elsewhere than its spans.
    """
    rows = len(cells[spans])
    columns = {name: list(cells.get(name, [MISSING] * rows)) for name in (tags, words, text)}
    issues: list[RowIssue] = []
    for row, cell in enumerate(cells[spans]):
        if _is_empty(cell):
            continue
        try:
            # The layouts run before the columns are converted, so the cells are still those of the source.
            text_of_row = _parsed("text", text, columns[text][row])
            words_of_row = _parsed("words", words, columns[words][row])
            given = _parsed("tags", tags, columns[tags][row])
            if words_of_row is None:
                raise CellError("spans without a text", f"Add a column {text!r}.")
            span_tags, moved = _tags_of(cell, words_of_row, text_of_row)
        except CellError as error:
            issues.append(replace(error.issue.at(spans, cell), row=row))
            continue
        if moved:
            issues.append(RowIssue(what=_MOVED, row=row, severity="note"))
        if given is not None and to_iob2(given) != span_tags:
            issues.append(RowIssue(what=_REPLACED, row=row, severity="note"))
        columns[words][row], columns[tags][row] = words_of_row, span_tags
    cells |= {name: columns[name] for name in (tags, words)}
    return issues


def _parsed(kind: str, name: str, cell: Any) -> Any:
    """Returns the value of a cell beside spans, or None if there is none. An error names its own column."""
    if cell is MISSING or cell is None:
        return None
    try:
        return KINDS[kind].parse(cell)
    except CellError as error:
        error.issue = error.issue.at(name, cell)
        raise


def _tags_of(cell: Any, words: Sequence[str], text: str | None) -> tuple[list[str], int]:
    """Returns the tags of the words of a row, and the number of spans that were moved to borders of words."""
    spans = parse_spans(cell)
    if text is None:
        text = " ".join(words)
    places = place_words(words, text)
    if places is None:
        raise CellError("spans of a text that does not have the row's words")
    return word_tags(spans, places, text)


Layout = Callable[[Names, Collection[str]], Iterator[Step]]
# In the order in which their steps run. Values are found first and derived then, and the spans come last, because they
# need the words of the text.
LAYOUTS: list[Layout] = [
    nested_cells,
    several_columns,
    numbered_choices,
    other_names,
    joined_words,
    text_of_sentences,
    words_of_text,
    entity_tags,
]


def steps_of(read: Names, present: Collection[str]) -> list[Step]:
    """Returns the steps that turn the columns of a source into those of a task."""
    steps: list[Step] = []
    for layout in LAYOUTS:
        steps += layout(read, present)
    return steps
