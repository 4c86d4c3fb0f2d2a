"""What the package knows about the kind of a column: how a cell is parsed and stored, and what a task may ask of it."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from bert_tasks.data.cells import LABEL_SEPARATOR, column_parts, numbered_columns
from bert_tasks.data.problems import RowError

REMARKS = "remarks on the row"  # beside the columns of a row: what people should know of it

KINDS: "dict[str, ColumnKind]" = {}


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column that a task reads.

    Args:
        name: The task's name of the column.
        kind: Name of a class of ``data/kinds``, which says what a valid value is: text, texts (a list), id, label (the
            name of a class), labels (a set of names), number, words, tags (one for each word), spans (characters of a
            text that are entities), answers (to the row's question), choices (texts), choice (the right one).
        required: Whether the column must be in every file. Others may be missing: labels if only predictions are
            wanted, all others always. Default: true.

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
        is_joined: A value may be spread over several columns that are named.
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

    def row_of(self, texts: Sequence[str]) -> Mapping[str, str] | None:
        """Returns the row of a source for texts that the caller passes; default: None, the value is no row."""
        return None

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
        """Returns the columns of a source that hold the values of the column ``name``; see ``with_named_cell``."""
        parts = column_parts(name)
        if name not in present and len(parts) > 1:
            return parts if self.is_joined and set(parts) <= set(present) else []
        holders = dict.fromkeys((name, name.split(".")[0]))
        numbered = numbered_columns(name, present) if self.is_numbered else []
        return [*[holder for holder in holders if holder in present][:1], *numbered]

    def source_columns(self, column: Column) -> Sequence[Column]:
        """Returns the columns of a request from which a column of this kind is read; default: the column."""
        return (column,)

    def join(self, cells: Mapping[str, Any]) -> Any:
        """Returns one cell for several, of columns that the caller names; only if ``is_joined``.

        Raises:
            RowError: The cells do not make one value.
        """
        raise RowError(f"several columns for one {self.noun}", "Name one column.")

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
