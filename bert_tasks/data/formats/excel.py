"""Workbooks of Excel, whose table need not begin in the first row of the first sheet.

People put a page of notes before the table, and a title above its column names. So this module searches the table, and
tells the user in a note what it found, unless there was no choice.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, time
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from bert_tasks.data.batch import Batches, Record, Records
from bert_tasks.data.formats.base import Format, without_warnings
from bert_tasks.data.formats.workbooks import open_workbook, sheet_rows
from bert_tasks.data.options import ReadOptions
from bert_tasks.errors import DataError

_FIRST_ROWS = 50  # of a sheet, in which the table begins
_COUNTED_ROWS = 1000  # of a sheet, which tell the longest table
_NEXT_ROWS = 10  # below a header, which must be about as wide as they are
_OLD_WORKBOOK = bytes.fromhex("d0cf11e0a1b11ae1")
_LONGEST_NAME = 5  # words of the name of a single column. A longer one is a sentence

Cells = Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class SheetTable:
    """The table of a sheet.

    Attributes:
        sheet: Name of the sheet.
        header: Number of the row with the column names, from 1.
        names: Places of the columns, from 0 -> their names. Columns without a name are left out.
        rows: Number of rows below the header, at most ``_COUNTED_ROWS``.
        empty: Places of the columns that none of these rows fills.
    """

    sheet: str
    header: int
    names: dict[int, str]
    rows: int
    empty: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ExcelFormat(Format):
    """A sheet of a workbook (extra ``excel``).

    Attributes:
        sheet: Name of the sheet. None means the sheet whose table has the most rows, and the first of equal sheets.
    """

    sheet: str | None = None

    is_text: ClassVar[bool] = False
    can_stream: ClassVar[bool] = False

    def part(self, name: str) -> Format:
        return replace(self, name=f"{self.name}/{name}", sheet=name)

    @contextmanager
    def parse(
        self, path: Path, options: ReadOptions, *, columns_to_read: Sequence[str] | None = None
    ) -> Iterator[Batches]:
        _check_start(path)
        with open_workbook(path) as book:
            table, notes = self._choose(book, path)
            if table.empty:
                with open_workbook(path, has_formulas=True) as formulas:
                    _refuse_formulas(formulas[table.sheet], table, path)
            records = _records(sheet_rows(book[table.sheet], path), table)
            yield Records(tuple(table.names.values()), without_warnings(records), notes).in_batches()

    def _choose(self, book: Any, path: Path) -> tuple[SheetTable, tuple[str, ...]]:
        """Returns the table to read, with notes for people unless it is the only one and begins in the first row."""
        names = [sheet.title for sheet in book.worksheets]
        listed = ", ".join(map(repr, names))
        if self.sheet is not None and self.sheet not in names:
            raise DataError(f"{path}: no sheet {self.sheet!r}. The sheets are {listed}")
        searched = [sheet.title for sheet in book.worksheets if sheet.sheet_state == "visible"]
        if self.sheet is not None:
            searched = [self.sheet]  # also a hidden one
        tables = []
        for name in searched:
            table = _find_table(book[name], path)
            if table is not None:
                tables.append(table)
        several = [table for table in tables if len(table.names) > 1]
        if not several and len(tables) == 1 and len(names) == 1:
            several = tables  # a single column of texts is a table if there is nothing else
        if not several:
            advice = "Write a row with at least two different column names above the rows"
            raise DataError(f"{path}: no sheet has a table. {advice}. The sheets are {listed}")
        table = max(several, key=lambda table: table.rows)  # of equal ones the first
        counts = Counter(table.names.values())
        twice = sorted(repr(name) for name, count in counts.items() if count > 1)
        if twice:
            where = f"{path}: row {table.header} of the sheet {table.sheet!r}"
            raise DataError(f"{where} names {', '.join(twice)} more than once. Use each name for one column")
        notes: list[str] = []
        if self.sheet is None:
            notes += _sheet_notes(table, names, several)
        if table.header > 1:
            place = f"row {table.header} of the sheet {table.sheet!r}"
            notes.append(f"the column names are in {place}, so the rows above are not read")
        return table, tuple(notes)


def _check_start(path: Path) -> None:
    """Raises `DataError` if the file is no zip archive, with what it is instead."""
    with path.open("rb") as file:
        start = file.read(len(_OLD_WORKBOOK))
    if start == _OLD_WORKBOOK:
        what = "a workbook of Excel 97, or one with a password"
        raise DataError(f"{path}: {what}. Save it without a password as .xlsx or .csv")
    if not start.startswith(b"PK"):
        raise DataError(f"{path}: not a workbook of Excel. If it is a table in text, name it .csv")


def _sheet_notes(table: SheetTable, names: Sequence[str], tables: Sequence[SheetTable]) -> Iterator[str]:
    """Yields a note on the choice of a sheet, unless there was none."""
    others = [other.sheet for other in tables if other is not table]
    if others:
        listed = ", ".join(map(repr, others))
        yield (
            f"the sheet {table.sheet!r} is read, because it has the most rows. There are also tables in {listed}. "
            f'Choose another sheet with format = "xlsx/{others[0]}"'
        )
    elif table.sheet != names[0]:
        yield f"the sheet {table.sheet!r} is read, because the sheets before it are hidden or have no table"


def _find_table(sheet: Any, path: Path) -> SheetTable | None:
    """Returns the table of a sheet, or None."""
    header = _header_row(sheet, path)
    if header is None:
        return None
    return _table_below(sheet, path, header)


def _header_row(sheet: Any, path: Path) -> int | None:
    """Returns the number of the row with the names of a table's columns, or None if the sheet has no table.

    It is the first row with at least two names that is directly above another row and is about as wide as the rows
    below. A single column is a table if the first row of the sheet has a short name.
    """
    widths = dict[int, int]()  # The values are not kept, because each row may be as large as the limit of a row.
    begins_with_name = False
    for number, cells in islice(sheet_rows(sheet, path), _FIRST_ROWS):
        filled = _filled(cells)
        widths[number] = len(filled)
        if number == 1:
            begins_with_name = _is_name(*filled.values())
    for number, width in widths.items():
        if width == 0 or widths.get(number + 1, 0) == 0:
            continue
        below = [other_width for other, other_width in widths.items() if other > number]
        widest = max(below[:_NEXT_ROWS])
        # A header may lack the name of one column, often that of an index. A title above a table is much narrower.
        is_single = number == 1 and widest == 1 and begins_with_name
        if is_single or (width >= 2 and width >= widest - 1):
            return number
    return None


def _is_name(*cells: object) -> bool:
    """Returns True for a single cell with a text that is short enough for the name of a column."""
    return len(cells) == 1 and len(str(cells[0]).split()) <= _LONGEST_NAME


def _table_below(sheet: Any, path: Path, header: int) -> SheetTable:
    """Returns the table whose columns the row ``header`` names. Its rows are counted."""
    names = dict[int, str]()
    filled = set[int]()
    count = 0
    for number, cells in islice(sheet_rows(sheet, path), _COUNTED_ROWS):
        if number == header:
            names = {place: str(value).strip() for place, value in _filled(cells).items()}
        elif number > header:
            filled |= _filled(cells).keys()
            count += 1
    empty = tuple(place for place in names if place not in filled)
    return SheetTable(sheet=sheet.title, header=header, names=names, rows=count, empty=empty)


def _filled(cells: Cells) -> dict[int, Any]:
    """Returns the places of the cells that are not empty, with their values."""
    return {place: value for place, value in enumerate(cells) if value is not None and str(value).strip() != ""}


def _refuse_formulas(sheet: Any, table: SheetTable, path: Path) -> None:
    """Raises `DataError` if an empty column has formulas, whose values only Excel computes.

    Excel stores both the formula and its last value. Some programs that write workbooks store the formula alone.
    """
    for number, cells in islice(sheet_rows(sheet, path), _COUNTED_ROWS):
        if number <= table.header:
            continue
        for place in table.empty:
            if place < len(cells) and isinstance(cells[place], str) and cells[place].startswith("="):
                message = f"the column {table.names[place]!r} has formulas without values"
                advice = "Open the workbook in Excel or LibreOffice, which compute them, and save it"
                raise DataError(f"{path}: {message}. {advice}")


def _records(rows: Iterator[tuple[int, Cells]], table: SheetTable) -> Iterator[Record]:
    """Yields the rows below the header that have any value."""
    for number, cells in rows:
        values = {name: _plain(cells[place]) for place, name in table.names.items() if place < len(cells)}
        if number > table.header and any(value is not None for value in values.values()):
            yield Record(number, values)


def _plain(value: Any) -> Any:
    """Returns a date as text, because neither a text nor a label is a date."""
    if isinstance(value, date | time):
        return value.isoformat()
    return value


ALL: tuple[Format, ...] = (ExcelFormat(name="xlsx", extensions=(".xlsx", ".xlsm")),)
