"""Tables of other programs, sheets of Excel and saved data sets of ``datasets``."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date, time
from pathlib import Path
from typing import Any, ClassVar

from bert_tasks.data.formats.base import Format, without_warnings
from bert_tasks.data.formats.workbooks import open_workbook, sheet_rows
from bert_tasks.data.records import ParseOptions, Record, Records, dataset_records
from bert_tasks.errors import DataError


class ExcelFormat(Format):
    """The first sheet of a workbook with column names in row 1 (extra ``excel``)."""

    is_text: ClassVar[bool] = False
    can_stream: ClassVar[bool] = False

    @contextmanager
    def parse(
        self, path: Path, options: ParseOptions, *, columns_to_read: Sequence[str] | None = None
    ) -> Iterator[Records]:
        with open_workbook(path) as book:
            sheet = next(iter(book.worksheets), None)
            if sheet is None:
                raise DataError(f"{path}: the workbook has no sheet with cells")
            rows = sheet_rows(sheet, path)
            number, first = next(rows, (0, ()))
            names = [str(name) for name in first if name is not None]
            if number != 1 or len(set(names)) < len(names):
                raise DataError(f"{path}: the first row of the sheet must give each column a name of its own")
            cells = ((number, dict(zip(names, map(_plain, row), strict=False))) for number, row in rows)
            records = (Record(number, row) for number, row in cells)
            yield Records(tuple(names), without_warnings(records))


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, date | time) else value


class DatasetFormat(Format):
    """The folder of a ``datasets.Dataset`` on disk. Class ids become names."""

    is_text: ClassVar[bool] = False
    can_stream: ClassVar[bool] = False

    def files(self, path: Path) -> tuple[Path, ...]:
        return tuple(sorted(file for file in path.iterdir() if file.is_file()))

    @contextmanager
    def parse(
        self, path: Path, options: ParseOptions, *, columns_to_read: Sequence[str] | None = None
    ) -> Iterator[Records]:
        import datasets

        yield dataset_records(datasets.load_from_disk(path))


ALL: tuple[Format, ...] = (
    ExcelFormat(name="xlsx", extensions=(".xlsx",)),
    DatasetFormat(name="datasets", extensions=()),
)
