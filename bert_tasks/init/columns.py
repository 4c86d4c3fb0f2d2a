"""The columns of a file, as ``init`` sees them.

This module owns the profiles of the columns and of columns that stand for several, and what a column may be by its
profile. Which of the possible columns a task reads is decided in ``readings``.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from bert_tasks.data.cells import column_parts, label_value, numbered_columns, with_named_cell
from bert_tasks.data.columns import Row
from bert_tasks.data.issues import CellError, did_you_mean, end_sentence
from bert_tasks.data.kinds import KINDS, Answers, Choice, Choices, ColumnKind, Spans, Tags, Text, Words
from bert_tasks.data.layouts import set_labels
from bert_tasks.data.profile import ColumnProfile, profile
from bert_tasks.data.split_column import SPLIT_COLUMNS
from bert_tasks.errors import DataError, UsageError

# Names that people and public data sets give to the column of the labels, in lower case.
LABEL_NAMES = (
    *("label", "labels", "class", "category", "target", "gold_label", "y", "score", "similarity", "rating"),
    *("sentiment", "polarity", "intent", "topic", "relation", "relevant", "is_duplicate", "stars", "queue"),
    *("quality", "emotion", "stance", "topics", "tags", "categories", "classes", "intents", "emotions"),
)
_AMOUNT_NAMES = ("score", "stars", "similarity", "rating", "quality", "relevant")  # numbers called so may be amounts
_ID_NAMES = ("id", "ids", "uid", "uuid", "guid", "idx", "index", "url", "uri", "link", "date", "timestamp", "at")
_CHOICE_STEMS = ("choices", "choice", "options", "option", "endings", "ending", "answers", "answer", "candidates")
_LETTERS = tuple("ABCDEFGH")  # columns of choices in exams
_WORD_OF_NAME = re.compile(r"[^\W\d_]+")
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")  # where the next word of a name such as userId begins
_NUMBER_OF_NAME = re.compile(r"[ _]?([0-9]+|[A-Z])$|[ _][a-z]$")  # of option1, optionA, option_1 and option a
_FEWEST_WORDS = 2  # in a text of a corpus on average, because shorter texts are names
_LEAST_CONTEXT = 10  # words of a passage on average
_MOST_TAGS = 200
_MOST_NUMBERS = 0.9  # share of numbers above which other cells of a column are mistakes
_MOST_FLAGS = 0.9  # share of 0 and 1 above which other cells of a column are mistakes

_CLASS, _SET, _NUMBER = KINDS["label"], KINDS["labels"], KINDS["number"]

Rows = Sequence[Row]


@dataclass(frozen=True, kw_only=True)
class UserHints:
    """The user's hints about the rows. Unset hints are detected.

    Attributes:
        task: A name of the task.
        name: The name of the task in the recipe, if it is one of several tasks.
        texts: Columns with one text or two, the words, or the question and its context.
        kind: The kind of the label column, for tasks with ``Task.problems``.
        label: The column of the labels, numbers, tags or answers.
        separator: The separator of several labels in a cell of that column.
    """

    task: str | None = None
    name: str = ""
    kind: str | None = None
    texts: tuple[str, ...] = ()
    label: str | None = None
    separator: str | None = None


def name_words(name: str) -> list[str]:
    """Returns the words in a column's name, in lower case.

    Examples:
        >>> name_words("userId")
        ['user', 'id']
    """
    return [word.lower() for word in _WORD_OF_NAME.findall(_CAPITAL.sub("_", name))]


def name_rank(column: ColumnProfile, usual: Sequence[str]) -> int:
    """Rates a column's name.

    Args:
        column: A column of the file.
        usual: Names of the task's column, its own first.

    Returns:
        3 for the task's own name, 2 for another usual name, 1 if the last word is one, as in product_category, else 0.
    """
    if column.known in usual:
        is_own_name = column.known in (usual[0], f"{usual[0]}s")
        return 3 if is_own_name else 2
    words = name_words(column.name)
    if words and words[-1] in usual:
        return 1
    return 0


def is_id_like(column: ColumnProfile) -> bool:
    """Returns True for ids, dates, web addresses and numbers of folds, which are neither texts nor labels.

    Examples:
        "userId" and "created_at" are like ids, "label_id" is not.
    """
    if column.is_reference:
        return True
    # A flag is a label, whatever it is called.
    if is_flag(column):
        return False
    words = name_words(column.name)
    if column.is_text or not words:
        return False
    if column.is_number and (column.known in SPLIT_COLUMNS or words[-1] == "kfold"):
        return True
    return words[-1] in _ID_NAMES and not set(words).intersection(LABEL_NAMES)


def is_flag(column: ColumnProfile) -> bool:
    """Returns True if each cell of a column is 0 or 1, as those of one label among several are."""
    return column.filled == column.rows and {label_value(value) for value, _ in column.common} == {0.0, 1.0}


def are_flags(rows: Rows, names: Sequence[str]) -> bool:
    """Returns True if almost all cells of each column are 0 or 1."""
    for name in names:
        cells = [with_named_cell(row, name, set_labels).get(name) for row in rows]
        numbers = [label_value(str(cell)) for cell in cells if cell is not None and cell != ""]
        if sum(number in (0.0, 1.0) for number in numbers) < _MOST_FLAGS * len(numbers):
            return False
    return True


@dataclass(frozen=True, kw_only=True)
class FileColumns:
    """The columns of a sample of rows.

    Attributes:
        rows: The rows, with a cell for each column that stands for several.
        profiles: The profiles of all columns.
        label_sets: For each column that stands for several columns of 0 and 1, the names of these.
        choices: For each column that stands for several columns of single choices, the names of these.
        hints: The user's options for the columns.
    """

    rows: Rows
    profiles: Sequence[ColumnProfile]
    label_sets: Mapping[str, Sequence[str]]
    choices: Mapping[str, Sequence[str]]
    hints: UserHints

    @classmethod
    def of(cls, rows: Rows, hints: UserHints) -> Self:
        """Profiles the columns of rows.

        Raises:
            UsageError: A column of the hints does not exist.
            DataError: Columns of labels do not hold 0 and 1.
        """
        stands_alone: set[str] = set()
        for row in rows:
            stands_alone.update(row)
        rows, names = _with_stated_cells(rows, hints)
        profiles = []
        for name in names:
            separator = None
            if name == hints.label:
                separator = hints.separator
            profiles.append(profile(name, [row.get(name) for row in rows], separator))
        label_sets: dict[str, Sequence[str]] = {}
        if hints.label is not None and hints.label not in stands_alone and "," in hints.label:
            label_sets[hints.label] = column_parts(hints.label)
        flags = _flag_columns(profiles, hints)
        if flags:
            name = ",".join(flags)
            rows = _joined(rows, name, flags, set_labels)
            label_sets[name] = flags
        # Several columns that are one to a task get a column of their own, whose cells hold theirs.
        choices = dict(_choice_columns(names))
        for name, columns in choices.items():
            rows = _joined(rows, name, columns, _cells_in_order)
        for name in (*label_sets, *choices):
            if name not in names:
                profiles.append(profile(name, [row.get(name) for row in rows]))
        return cls(rows=rows, profiles=profiles, label_sets=label_sets, choices=choices, hints=hints)

    def sources(self, column: ColumnProfile) -> set[str]:
        """Returns the columns of the file that a column stands for."""
        for parts in (self.label_sets, self.choices):
            if column.name in parts:
                return set(parts[column.name])
        return {column.name}

    @property
    def usable(self) -> list[ColumnProfile]:
        """The columns of the file that are not like ids, or that the user named."""
        stated = (*self.hints.texts, self.hints.label)
        several = {*self.label_sets, *self.choices}
        usable = []
        for column in self.profiles:
            if column.name in stated or (not is_id_like(column) and column.name not in several):
                usable.append(column)
        return usable

    @property
    def corpus(self) -> list[ColumnProfile]:
        """The only column that says something about a row, if it is a text."""
        # A column with one value, such as the source of the rows, says nothing about a row.
        columns = [c for c in self.usable if not c.is_id and (c.distinct > 1 or c.nested > 0)]
        if len(columns) != 1:
            return []
        column = columns[0]
        if column.is_number or column.nested or column.words < _FEWEST_WORDS:
            return []
        return [column]

    def fitting(self, kind: ColumnKind, usual: Sequence[str]) -> list[ColumnProfile]:
        """Returns the columns whose profile fits a kind of column, likeliest first.

        Args:
            kind: The kind of the task's column.
            usual: Usual names of the column.
        """
        if isinstance(kind, Text):
            columns = self._texts(usual)
        elif isinstance(kind, Words | Tags):
            columns = [c for c in self.usable if _has_lists(c) or c.known in usual]
            if isinstance(kind, Words) and columns:
                # Words may also be a text that is split at its spaces, if another column has the tags as a list.
                columns += [c for c in self._texts(usual) if c not in columns]
        elif isinstance(kind, Spans):
            columns = [c for c in self.usable if _has_lists(c)]
        elif isinstance(kind, Answers):
            columns = [c for c in self.usable if c.known in usual or _may_be_copied(c)]
        elif isinstance(kind, Choices):
            lists = [c for c in self.usable if c.known in usual and (c.nested == 1 or c.lists == 1)]
            columns = [*lists, *(c for c in self.profiles if c.name in self.choices)]
        elif isinstance(kind, Choice):
            columns = [c for c in self.usable if c.known in usual]
        else:
            columns = self.labels
        return sorted(columns, key=lambda column: name_rank(column, usual), reverse=True)

    def _texts(self, usual: Sequence[str]) -> list[ColumnProfile]:
        """Returns the texts, longest first, or a single column of shorter ones."""
        plain = [c for c in self.usable if c.nested == 0 and not c.is_number]
        # Texts that repeat may be classes, so they are taken only if nothing else is a text.
        texts = [c for c in plain if (c.is_text and not c.is_classes) or c.known in usual]
        if not texts:
            texts = [c for c in plain if c.is_text]
        if texts:
            return sorted(texts, key=lambda column: column.words, reverse=True)
        short = [c for c in plain if c.distinct > c.rows / 2]
        return sorted(short, key=lambda column: (column.is_id, -column.words))[:1]

    @property
    def labels(self) -> list[ColumnProfile]:
        """The columns that may be labels, likeliest first.

        People usually write the labels behind the texts, so of columns that are alike the last one comes first. Two or
        more columns of 0 and 1 are a single column of sets.
        """
        sets = [column for column in self.profiles if column.name in self.label_sets]
        flags: set[str] = set()
        for column in sets:
            flags |= self.sources(column)
        fitting = []
        for column in self.usable:
            is_named = column.known in LABEL_NAMES
            may_be = column.is_sets or column.is_classes or column.is_amount or column.numbers >= _MOST_NUMBERS
            may_be = may_be or (column.is_repeated and is_named)
            is_filled = column.filled > column.rows / 2 or is_named
            if may_be and is_filled and column.name not in flags:
                fitting.append(column)
        repeated = _repeated_label(fitting)
        fitting = [column for column in fitting if column.name != repeated]
        # Whole numbers that do not repeat may count something, so other labels go before them.
        plain = {c.name: c.is_sets or c.is_classes or c.decimals for c in fitting}
        # The sort is stable, also with ``reverse``, so equal columns stay in this order.
        last_first = fitting[::-1]
        last_first.sort(key=lambda c: (plain[c.name], c.filled), reverse=True)
        return [*sets, *last_first]

    def label_kinds(self, label: ColumnProfile) -> list[ColumnKind]:
        """Returns the kinds of labels that a column may hold, likeliest first. Several of them are a tie."""
        if self.hints.kind is not None:
            return [KINDS[self.hints.kind]]
        if self.hints.separator is not None or label.name in self.label_sets:
            return [_SET]
        return label_kinds(label)


def label_kinds(label: ColumnProfile) -> list[ColumnKind]:
    """Returns the kinds of labels that the profile of a column allows, likeliest first."""
    if label.is_sets:
        # A comma may also be part of the name of a class.
        has_commas = label.separator == "," and label.lists == 0
        return [_SET, _CLASS] if has_commas else [_SET]
    # Class ids have no gaps and start at 0. Amounts rarely do both.
    counts_classes = label.is_number and label.low == 0 and label.high == label.distinct - 1
    if label.is_amount:
        is_class_number = counts_classes and label.is_repeated and label.known in LABEL_NAMES
        return [_CLASS] if is_class_number else [_NUMBER]
    # A few cells such as "n/a" among numbers are mistakes of the file.
    if label.numbers >= _MOST_NUMBERS and not label.is_number and not label.is_classes:
        return [_NUMBER, _CLASS]
    # Numbers such as ratings from 1 to 5 may be classes or an amount, which is a tie. Numbers from 0 without gaps are
    # classes, unless the column is called like an amount.
    is_amount_name = set(name_words(label.name)[-1:]).intersection(_AMOUNT_NAMES)
    is_certain = (counts_classes and not is_amount_name) or label.hidden_value is not None
    if label.is_number and label.distinct > 2 and not is_certain:
        return [_CLASS, _NUMBER]
    return [_CLASS]


def has_few_tags(tags: ColumnProfile, words: ColumnProfile) -> bool:
    """Returns True if the names in a column of lists are fewer than those in the column of words."""
    # Words are drawn from a far larger vocabulary than tags.
    if not tags.names or len(tags.names) > _MOST_TAGS:
        return False
    return not words.names or len(tags.names) < len(words.names)


def is_passage(context: ColumnProfile, answers: ColumnProfile) -> bool:
    """Returns True if texts are long enough for others to be copied from them."""
    return context.words >= _LEAST_CONTEXT and (answers.nested > 0 or answers.words < context.words / 2)


def without_objects(rows: Rows) -> list[Row]:
    """Returns the rows with the values of objects as cells, such as ``document.text``."""
    flat: list[Row] = []
    for row in rows:
        cells = dict[str, Any]()
        for name, value in row.items():
            if isinstance(value, Mapping):
                cells |= {f"{name}.{key}": inner for key, inner in value.items()}
            else:
                cells[name] = value
        flat.append(cells)
    return flat


def _repeated_label(columns: Sequence[ColumnProfile]) -> str | None:
    """Returns the column that repeats another one.

    Formats of annotation tools give the only label of a row as well as all of its labels.
    """
    by_name = {column.name: column for column in columns}
    if not {"label", "labels"} <= by_name.keys():
        return None
    label = by_name["label"]
    labels = by_name["labels"]
    if labels.nested > 0 and labels.is_sets:
        return "label"
    if labels.common == label.common:
        return "labels"
    return None


def _has_lists(column: ColumnProfile) -> bool:
    """Returns True if some cells of a column are lists, as those of words and tags are."""
    return (column.nested > 0 or column.lists > 0) and column.empty < column.rows


def _may_be_copied(column: ColumnProfile) -> bool:
    """Returns True if the cells may be answers, which are copied from a context."""
    return column.nested > 0 or (column.distinct > 1 and not column.is_number and not column.is_classes)


def _flag_columns(profiles: Sequence[ColumnProfile], hints: UserHints) -> list[str]:
    """Returns two or more columns of 0 and 1, which are one set of labels. None of them is called a label."""
    are_stated = hints.kind is not None and KINDS[hints.kind] is not _SET
    if hints.label is not None or are_stated:
        return []
    flags = []
    for column in profiles:
        # Commas and dots stand between names.
        is_free = column.known not in LABEL_NAMES and not set(",.").intersection(column.name)
        if is_flag(column) and is_free and not is_id_like(column) and column.name not in hints.texts:
            flags.append(column.name)
    if len(flags) < 2:
        return []
    return flags


def _choice_columns(names: Sequence[str]) -> Iterable[tuple[str, list[str]]]:
    """Yields columns of single choices, such as option1 and option2 or A and B, with the name that stands for them."""
    stems = dict.fromkeys(_NUMBER_OF_NAME.sub("", name) for name in names)
    for stem in stems:
        parts = numbered_columns(stem, names)
        if parts and stem.strip().lower() in _CHOICE_STEMS and stem not in names:
            name = "choices" if stem == "choice" else stem  # the task itself finds choice0, choice1, ...
            yield name, parts
    letters = [name for name in names if name in _LETTERS]
    if len(letters) > 1 and tuple(letters) == _LETTERS[: len(letters)]:
        yield ",".join(letters), letters


def _joined(rows: Rows, name: str, columns: Sequence[str], join: Callable[[Row], Any]) -> Rows:
    """Returns the rows with a cell that stands for several."""
    joined = []
    for row in rows:
        cells = {column: row.get(column) for column in columns}
        joined.append({**row, name: join(cells)})
    return joined


def _cells_in_order(cells: Row) -> list[Any]:
    return list(cells.values())


def _with_stated_cells(rows: Rows, hints: UserHints) -> tuple[Rows, list[str]]:
    """Returns the rows with the cells of the hints' columns, and the names of the columns."""
    all_names: dict[str, None] = {}  # in the order in which they first occur
    for row in rows:
        all_names |= dict.fromkeys(row)
    names = [name for name in all_names if name.strip()]
    stated = list(hints.texts)
    if hints.label is not None:
        stated.append(hints.label)
    for hint in stated:
        # "a,b" names two columns, unless a column is called so. A dot leads into an object.
        parts = [hint] if hint in names or "." in hint else column_parts(hint)
        for name in parts:
            if name not in names and name.split(".")[0] not in names:
                missing = end_sentence(f"no column {name!r}{did_you_mean(name, names)}")
                raise UsageError(f"{missing} The columns are {', '.join(map(repr, names))}")
    try:
        for name in stated:
            rows = [with_named_cell(row, name, set_labels) for row in rows]
    except CellError as error:
        raise DataError(f"{error} Several columns of labels must hold 0 and 1") from None
    new = [name for name in stated if name not in names]
    spread: set[str] = set()  # the columns that a new one stands for
    for name in new:
        spread.update(column_parts(name))
    return rows, [*(name for name in names if name not in spread), *new]
