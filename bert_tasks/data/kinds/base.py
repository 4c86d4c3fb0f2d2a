"""The class of column kinds, which parse and store cells for tasks."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import pyarrow
from pydantic import StringConstraints

from bert_tasks.data.cells import LABEL_SEPARATOR, column_parts, numbered_columns
from bert_tasks.data.problems import RowError

REMARKS = "remarks on the row"  # beside the columns of a row, with notes for people

KINDS: "dict[str, ColumnKind]" = {}


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column that a task reads.

    Args:
        name: The task's name of the column.
        kind: Name of a class of ``data/kinds``, which says what a valid value is: text, texts (a list), id, label (the
            name of a class), labels (a set of names), number, words, tags (one for each word), spans (characters of a
            text that are entities), answers (to the row's question), choices (texts), choice (the right one).
        required: True if the column must be in every file. Labels may be missing if only predictions
            are wanted, all other columns always. Default: true.

    Raises:
        ValueError: The kind does not exist.

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
        """The class of the column's kind."""
        return KINDS[self.kind]

    @property
    def is_label(self) -> bool:
        """True if the task learns to predict the column."""
        return not self.required and self.type.is_label


class ColumnKind:
    """The values of a column. A subclass with a ``name`` is a kind for columns.

    Attributes:
        name: Name of the kind.
        noun: Noun for a value in messages. Default: the name.
        is_label: The task learns to predict the values.
        has_classes: The values are names of classes, which are the labels of a model.
        is_single_class: Each value is the name of one class.
        is_set: Each value is a set of names of classes.
        needed_label: Label without which a model cannot be trained.
        is_open: Validation rows may have classes that no training row has.
        has_texts: A model reads the texts of the values.
        is_text: The caller may pass the value as a text.
        is_pretokenized: A text is split into words before a model reads it.
        may_be_missing: A row without a value can be used, even if the column is required.
        is_numbered: A value may be spread over columns with numbers.
        is_joined: A value may be spread over several columns that are named.
        group_column: Column whose rows stay together in a split. ``group_noun`` is the noun for rows without it.
        article_column: A further column of files whose rows stay together in folds.
        strata_name: Name of the values that a split spreads evenly, for people.
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
    is_joined: ClassVar[bool] = False
    group_column: ClassVar[str | None] = None
    group_noun: ClassVar[str] = "text"
    article_column: ClassVar[str | None] = None
    strata_name: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            cls.noun = cls.__dict__.get("noun", cls.name)
            KINDS[cls.name] = cls()

    def parse(self, value: Any, separator: str = LABEL_SEPARATOR) -> Any:
        """Returns the value of a cell in canonical form, or None if there is no value.

        NumPy's scalars and arrays count as Python's values, and a float that is not a number as no value.

        Args:
            value: The cell, of any format.
            separator: Separator of several labels in one cell.

        Raises:
            RowError: The cell does not hold a value of this kind.
        """
        value = value.tolist() if hasattr(value, "tolist") else value
        return self._parse(None if isinstance(value, float) and math.isnan(value) else value, separator)

    def _parse(self, value: Any, separator: str) -> Any:
        raise NotImplementedError

    def arrow_type(self) -> Any:
        """Returns the Arrow type of the values. Default: a text."""
        return pyarrow.string()

    def request_type(self, most: int) -> Any:
        """Returns the type of values of ``most`` characters in a request. Default: a text."""
        return Annotated[str, StringConstraints(max_length=most)]

    def texts(self, value: Any) -> Sequence[str]:
        """Returns the texts of a value that a model reads. Default: none."""
        return ()

    def labels_of(self, value: Any) -> Sequence[str]:
        """Returns the names under which a census counts a value. Default: none."""
        return ()

    def normalized(self, value: Any) -> Sequence[str]:
        """Returns ``labels_of`` in the spelling of inferred labels."""
        return self.labels_of(value)

    def rename(self, value: Any, label: Callable[[str], str | None]) -> Any:
        """Returns the value with other names of its classes. Default: the value."""
        return value

    def unknown(self, names: Iterable[str], labels: Collection[str], *, strict: bool = False) -> Iterator[RowError]:
        """Yields an error for each name that is no known label. Its ``value`` is the name.

        Args:
            names: Names from ``labels_of``.
            labels: The known labels, in their order.
            strict: Check a kind whose classes are open, too.
        """
        yield from ()

    def strata(self, values: Sequence[Any]) -> list[Sequence[str]]:
        """Returns names that a split spreads evenly, for each value. Default: none differ."""
        return [("",)] * len(values)

    def columns_in(self, name: str, present: Collection[str]) -> list[str]:
        """Returns the source's columns for the column ``name``. See ``with_named_cell``."""
        parts = column_parts(name)
        if name not in present and len(parts) > 1:
            return parts if self.is_joined and set(parts) <= set(present) else []
        holders = dict.fromkeys((name, name.split(".")[0]))
        numbered = numbered_columns(name, present) if self.is_numbered else []
        return [*[holder for holder in holders if holder in present][:1], *numbered]

    def join(self, cells: Mapping[str, Any]) -> Any:
        """Returns one cell for the cells of several named columns (if ``is_joined``).

        Raises:
            RowError: The cells do not make one value.
        """
        raise RowError(f"several columns for one {self.noun}", "Name one column.")

    def replacement(self, columns: Sequence[Column]) -> Column | None:
        """Returns the column from which a missing value is derived. Default: None."""
        return None

    def derive(self, value: Any) -> Any:
        """Returns the value derived from a value of the replacement, or None."""
        return None

    def remark(self, cell: Any) -> str | None:
        """Returns a note for people on a cell, beside its line. Default: None."""
        return None

    def complete(
        self, cells: Mapping[str, Any], column: Column, columns: Sequence[Column], names: Mapping[str, str]
    ) -> Mapping[str, Any]:
        """Returns the cells with the value of a column, if other cells define it.

        Args:
            cells: The row under the source's names.
            column: A column of this kind.
            columns: All columns of the task.
            names: The task's columns -> the cells' columns, if they differ.
        """
        source = self.replacement(columns)
        name = names.get(column.name, column.name)
        if source is None or cells.get(name) is not None:
            return cells
        derived = self.derive(cells.get(names.get(source.name, source.name)))
        return cells if derived is None else {**cells, name: derived}

    def resolve(self, value: Any, row: Mapping[str, Any], cells: Mapping[str, Any], columns: Sequence[Column]) -> Any:
        """Returns the value that fits its row, or None if it means nothing without others.

        Args:
            value: A canonical value of this kind.
            row: Canonical values of the row.
            cells: Cells of the row, under the task's names.
            columns: All columns of the task.

        Raises:
            RowError: The value contradicts another value.
        """
        return value
