"""The declaration of a column that a task reads, and the class of the kinds of columns."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pyarrow

from bert_tasks.data.cells import LABEL_SEPARATOR
from bert_tasks.data.issues import CellError, RowIssue

KINDS: "dict[str, ColumnKind]" = {}


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column that a task reads.

    A task of your own lists its columns in ``columns``. The reader then finds them in any source, checks each value,
    and reports a wrong one with its line, so that ``features`` and ``encode`` receive valid values only. A user may
    call the column otherwise in a file (``columns = {text = "review"}``), but your task always sees your name.

    Args:
        name: The task's name of the column.
        kind: Name of a class of ``data/kinds``, which says what a valid value is: text, texts (a list), id, label (the
            name of a class), labels (a set of names), number, words, tags (one for each word), spans (characters of a
            text that are entities), answers (to the row's question), choices (texts), choice (the right one).
        required: True if every row must have the column. Otherwise it may be missing. A label, which is never required
            here, may be missing if only predictions are wanted. Default: true.

    Raises:
        ValueError: The kind does not exist.

    Examples:
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
        """The kind of the column, which converts and stores its values."""
        return KINDS[self.kind]

    @property
    def is_label(self) -> bool:
        """True if the task learns to predict the column."""
        return not self.required and isinstance(self.type, LabelKind)


class ColumnKind:
    """The values of a column. A subclass with a ``name`` is a kind for columns.

    To add a kind, derive a class and override ``_parse``, which receives one cell of any format and returns the value
    in its only form. Override ``convert`` if many cells can be converted faster together.

    Attributes:
        name: Name of the kind.
        noun: Noun for a value in messages. Default: the name.

    Examples:
        >>> class Year(ColumnKind):
        ...     name = "year"
        ...
        ...     def _parse(self, value, separator):
        ...         if not str(value).isdecimal():
        ...             raise CellError("not a year", "Write four digits.")
        ...         return str(value)
        >>> KINDS["year"].convert(["1969", "soon"])[0]
        ['1969', None]
    """

    name: ClassVar[str]
    noun: ClassVar[str]

    def __init_subclass__(cls) -> None:
        # Only a class with a name of its own is a kind, so that LabelKind and TextList are none.
        if "name" in cls.__dict__:
            cls.noun = cls.__dict__.get("noun", cls.name)
            KINDS[cls.name] = cls()

    def convert(self, cells: Sequence[Any], separator: str = LABEL_SEPARATOR) -> tuple[list[Any], list[RowIssue]]:
        """Converts the cells of a column.

        Args:
            cells: The cells, of any format.
            separator: Separator of several labels in one cell.

        Returns:
            The values in canonical form, with None where a cell has no value or a wrong one. Then the issues, whose
            ``row`` is the number of the cell.
        """
        values: list[Any] = []
        issues: list[RowIssue] = []
        for row, cell in enumerate(cells):
            try:
                values.append(self.parse(cell, separator))
            except CellError as error:
                values.append(None)
                issues.append(replace(error.issue, row=row))
        return values, issues

    def parse(self, value: Any, separator: str = LABEL_SEPARATOR) -> Any:
        """Returns the value of one cell in canonical form, or None if there is no value.

        NumPy's scalars and arrays count as Python's values, and a float that is not a number as no value.

        Raises:
            CellError: The cell does not hold a value of this kind.
        """
        if hasattr(value, "tolist"):
            value = value.tolist()
        if isinstance(value, float) and math.isnan(value):  # how pandas stores an empty cell
            value = None
        return self._parse(value, separator)

    def _parse(self, value: Any, separator: str) -> Any:
        """Returns the value of one cell, which is no object of NumPy and not nan. Each kind overrides it."""
        raise NotImplementedError

    def arrow_type(self) -> Any:
        """Returns the Arrow type of the values. Default: a text."""
        return pyarrow.string()

    def texts(self, value: Any) -> Sequence[str]:
        """Returns the texts of a value that a model reads. Default: none."""
        return ()


class TextKind(ColumnKind):
    """Values whose texts a model reads, so that rows with equal texts count as duplicates."""


class LabelKind(ColumnKind):
    """Values that a task learns to predict."""

    def classes(self, value: Any) -> Sequence[str]:
        """Returns the names under which a census counts a value. Default: none."""
        return ()

    def strata(self, values: Sequence[Any]) -> list[Sequence[str]] | None:
        """Returns names that a split spreads evenly, for each value or None. Default: none are spread (None)."""
        return None


class ClassKind(LabelKind):
    """Values that are names of classes, which are the labels of a model."""
