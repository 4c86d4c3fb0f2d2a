"""Profiles of columns, with counts, lengths, numbers and names.

`init` writes a recipe for a file that it has never seen, so each task must recognise its columns by their values. This
module owns the figures by which tasks do so, and the description of a column for people. A figure is a share of the
cells that have a value, because files have holes. All rules are heuristics, and their thresholds are chosen so that the
usual data sets of each task are recognised.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bert_tasks.data.cells import label_parts, label_value, list_in_cell
from bert_tasks.data.issues import counted, first_few

MOST_CLASSES = 20  # more distinct numbers than this are amounts
SEPARATORS = (";", "|", ",")  # of several labels in a cell, in the order in which they are tried
_LONGEST_NAME = 60
_SHOWN = 6
# Characters of scripts that put no spaces between words count as words.
_IDEOGRAPHS = r"\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\s{_IDEOGRAPHS}]+")
_PIECE = re.compile(rf"[{_IDEOGRAPHS}]|[^\W{_IDEOGRAPHS}]+|[^\w\s]")
_DATE = r"(\d{4}-\d\d-\d\d|\d\d?/\d\d?/\d{2,4}|\d\d?\.\d\d?\.\d{2,4})"
_TIME = r".{0,20}\b\d\d?:\d\d:\d\d\b.{0,16}"  # with a date and a time zone in any form
_REFERENCE = re.compile(rf"(https?://|www\.)\S+|{_DATE}([T ]\d\d:\d\d.{{0,16}})?|{_TIME}")
_MOST_REFERENCES = 0.9
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
# Not ``float``, which also reads "nan", "infinity" and "1_000".
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True, kw_only=True)
class ColumnProfile:
    """A column in figures, with shares of the ``filled`` cells.

    Attributes:
        distinct: Number of distinct values. ``common`` has values as short as a name, most frequent first.
        words: Mean number of words.
        numbers: Share of numbers, from ``low`` to ``high``. With ``decimals``, some are not whole.
        sets: Share of cells with several names, split at ``separator``. ``names`` has the distinct names in all cells.
            It is empty if any cell holds something else.
        references: Share of dates, times and web addresses.
        nested: Share of lists and objects. ``lists`` is the share of lists, also inside a text cell.
        repeats: True if a list has a value twice, so that the lists are no sets.
        empty: Number of cells without a value, also of empty lists and of objects of these.
    """

    name: str
    rows: int
    filled: int
    distinct: int
    common: tuple[tuple[str, int], ...]
    words: float
    numbers: float
    low: float
    high: float
    decimals: bool
    sets: float
    names: tuple[str, ...]
    separator: str
    references: float
    nested: float
    lists: float
    repeats: bool
    empty: int

    @property
    def known(self) -> str:
        """The name without outer spaces and in lower case, to compare it with usual names."""
        return self.name.strip().lower()

    @property
    def is_number(self) -> bool:
        """True if all values are numbers."""
        return self.numbers == 1.0

    @property
    def is_id(self) -> bool:
        """True if each row has another value without spaces, and it is no amount."""
        is_amount = self.decimals or self.has_decimal_commas
        return self.filled == self.distinct == self.rows > 2 and self.words < 2 and not is_amount

    @property
    def has_decimal_commas(self) -> bool:
        """True if all values are numbers with a comma before the decimals."""
        return len(self.common) > 0 and all(_DECIMAL_COMMA.fullmatch(value.strip()) for value, _ in self.common)

    @property
    def is_reference(self) -> bool:
        """True for dates, times and web addresses."""
        return self.references >= _MOST_REFERENCES

    @property
    def is_text(self) -> bool:
        """True if the values have three words or more on average, and differ."""
        return self.words >= 3 and not self.is_number and self.nested == 0 and self.distinct > 1

    @property
    def is_classes(self) -> bool:
        """True if few short values repeat, as the names of classes do."""
        # Names of many classes are still classes, but many different numbers are ratings or amounts.
        few = self.distinct <= MOST_CLASSES or (not self.is_number and self.distinct <= self.rows / 10)
        return few and self.is_repeated

    @property
    def is_repeated(self) -> bool:
        """True if short values repeat, however many, that are no decimals and no lists."""
        short = sum(count for _, count in self.common) == self.filled and self.words <= 5
        return short and 1 < self.distinct <= max(2, self.rows / 2) and not self.decimals and self.nested == 0

    @property
    def is_sets(self) -> bool:
        """True if names repeat in other sets, several in some cells, or lists of them."""
        has_sets = self.sets > 0 or self.lists > 0
        return has_sets and not self.repeats and _come_back(self.names, self.distinct, self.rows)

    @property
    def is_amount(self) -> bool:
        """True for numbers that a regression may learn, which are neither ids nor numbers of classes."""
        return self.is_number and not self.is_id and self.distinct > 2 and not self.is_classes

    @property
    def hidden_value(self) -> str | None:
        """The value of rows without a label, or None.

        It is "-" among several words, as in SNLI, and -1 among the class numbers 0, 1, 2, ..., as in GLUE. -1 to 1 are
        classes of their own, such as negative, neutral and positive.
        """
        values = {value for value, _ in self.common}
        # Beside "+" a "-" is a class, as in data of sentiment.
        if "-" in values and "+" not in values and len(values) > 2 and self.numbers == 0:
            return "-"
        if self.is_number and self.low == -1 and self.high == self.distinct - 2 and self.high > 1:
            return next((value for value in values if label_value(value) == -1), None)  # as written, such as "-1.0"
        return None

    def counts(self) -> str:
        """Returns the most frequent values with their counts."""
        return listed([f"{value} {count}" for value, count in self.common])

    def described_as_text(self) -> str:
        """Returns the number of texts and their mean length, for people."""
        return f"{counted(self.distinct, 'different text')} of {self.words:.0f} words on average"

    def described(self) -> str:
        """Returns what the column holds, for people who look for the column to name."""
        if self.filled == 0:
            return "empty"
        if self.has_decimal_commas:
            return f"numbers with a decimal comma, such as {self.common[0][0]!r}. Write a decimal point instead"
        if self.nested > 0 and self.names:
            return f"lists of {counted(len(self.names), 'different value')} ({listed(self.names)})"
        if self.nested > 0:
            return "lists or objects"
        if self.is_number and not self.is_classes:
            return f"numbers from {self.low:g} to {self.high:g}, {self.distinct} different"
        if self.is_classes:
            return f"{self.distinct} classes ({self.counts()})"
        if self.is_text:
            return self.described_as_text()
        return f"{counted(self.distinct, 'different value')} in {counted(self.rows, 'row')}"


def profile(name: str, values: Sequence[Any], separator: str | None = None) -> ColumnProfile:
    """Returns the profile of a column. None and the empty text are no values.

    Args:
        name: Name of the column.
        values: Its cells. Lists with one value each count as these values.
        separator: Separator of several names in a cell. None means that it is detected.
    """
    cells = [value for value in values if value is not None and value != ""]
    filled = _only_values(cells)
    texts = list(map(str, filled))
    counts = Counter(texts)
    words = 0
    numbers: list[float] = []
    references = 0
    for text in texts:
        words += len(_WORD.findall(text))
        stripped = text.strip()
        if _NUMBER.fullmatch(stripped):
            numbers.append(float(text))
        if _REFERENCE.fullmatch(stripped):
            references += 1
    nested, lists, repeats = 0, 0, False
    for value in filled:
        items = _list_of(value)
        nested += isinstance(value, list | dict)
        lists += items is not None
        repeats = repeats or _repeats(items)
    tried: Sequence[str] = SEPARATORS
    if separator is not None:
        tried = (separator,)
    separator, sets = _name_sets(filled, tried, distinct=len(counts), rows=len(values))
    if filled is not cells:  # lists of one value each, which is no set even if it holds a separator
        sets = [[text] for text in texts]
    return ColumnProfile(
        name=name,
        rows=len(values),
        filled=len(filled),
        distinct=len(counts),
        common=tuple((text, count) for text, count in counts.most_common() if len(text) <= _LONGEST_NAME),
        words=_share(words, filled),
        numbers=_share(len(numbers), filled),
        low=min(numbers, default=0.0),
        high=max(numbers, default=0.0),
        decimals=len(numbers) == len(texts) and not all(map(float.is_integer, numbers)),
        sets=_share(sum(len(names) > 1 for names in sets), filled),
        names=_different(sets),
        separator=separator,
        references=_share(references, filled),
        nested=_share(nested, filled),
        lists=_share(lists, filled),
        repeats=repeats,
        empty=sum(map(is_empty, values)),
    )


def pieces(text: str) -> int:
    """Counts the words and punctuation marks of a text, almost as a tokenizer does."""
    return len(_PIECE.findall(text))


def percentile(lengths: Sequence[int]) -> int:
    """Returns the length that 95 of 100 lengths do not exceed, or 0 if there are none."""
    if not lengths:
        return 0
    return sorted(lengths)[math.ceil(0.95 * len(lengths)) - 1]


def listed(parts: Sequence[str]) -> str:
    """Returns the first few parts for a description, with commas between them."""
    return first_few(parts, _SHOWN)


def _only_values(cells: Sequence[Any]) -> Sequence[Any]:
    """Returns the values of lists if each list has exactly one, such as ``["joy"]``."""
    values = []
    for cell in cells:
        items = _list_of(cell)
        if items is None or len(items) != 1 or not isinstance(items[0], str | int | float):
            return cells
        values.append(items[0])
    return values


def _name_sets(
    values: Sequence[Any], separators: Sequence[str], *, distinct: int, rows: int
) -> tuple[str, list[list[str]]]:
    """Returns the first separator of cells into repeated names, and the names, if any."""
    for separator in separators:
        names = []
        for value in values:
            cell = _names(value, separator)
            if cell is not None:
                names.append(cell)
        # One cell that is no set of names, such as a sentence, means that the column holds no sets.
        if len(names) < len(values) or (separator == "," and _are_decimals(names)):
            continue
        # Sentences have commas, too. Names repeat in several combinations, and parts of sentences do not.
        come_back = any(len(cell) > 1 for cell in names) and _come_back(_different(names), distinct, rows)
        if come_back or len(separators) == 1 or all(_list_of(value) is not None for value in values):
            return separator, names
    return separators[0], []


def _names(value: Any, separator: str) -> list[str] | None:
    """Returns the names in a cell of a set, or None for another cell."""
    parts = value
    if not isinstance(parts, list):
        parts = label_parts(str(value), separator)
    names: dict[str, None] = {}
    for part in parts:
        if not isinstance(part, str | int):
            return None
        name = str(part).strip()
        if len(name) > _LONGEST_NAME:
            return None
        if name != "":
            names[name] = None
    return list(names)


def _different(sets: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Returns the distinct names in sets, sorted."""
    return tuple(sorted(set[str]().union(*sets)))


def _come_back(names: Sequence[str], distinct: int, rows: int) -> bool:
    """Returns True if there are no more names than combinations of them, and few in relation to the rows."""
    return 2 <= len(names) <= min(distinct, max(2, rows / 5))


def _are_decimals(sets: Sequence[Sequence[str]]) -> bool:
    """Returns True if the commas are decimal commas, as in many languages."""
    return all(len(names) <= 2 and all(name.lstrip("+-").isdecimal() for name in names) for names in sets)


def is_empty(value: Any) -> bool:
    """Returns True for no value, an empty list, and an object of these, as the answers to a question may be."""
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    return value is None or value == "" or value == []


def _repeats(values: list[Any] | None) -> bool:
    """Returns True if a list has a value twice."""
    if values is None:
        return False
    return len(set(map(str, values))) < len(values)


def _list_of(value: Any) -> list[Any] | None:
    """Returns a list, also one that a text holds, or None."""
    if isinstance(value, list):
        return value
    if isinstance(value, str):
        return list_in_cell(value)
    return None


def _share(count: int, of: Sequence[Any]) -> float:
    """Returns a count as a share of some values. It is 0 if there are none."""
    if not of:
        return 0.0
    return count / len(of)
