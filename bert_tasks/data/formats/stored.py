"""Tables of other programs, sheets of Excel and saved data sets of ``datasets``."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date, time
from pathlib import Path
from typing import Any, ClassVar
from xml.etree.ElementTree import ParseError
from zipfile import BadZipFile

from bert_tasks.data.formats.base import Format
from bert_tasks.data.records import ParseOptions, Record, Records, dataset_records
from bert_tasks.errors import DataError


class ExcelFormat(Format):
    """The first sheet of a workbook with column names in row 1 (extra ``excel``)."""

    is_text: ClassVar[bool] = False
    can_stream: ClassVar[bool] = False

    @contextmanager
    def open(
        self, path: Path, options: ParseOptions, *, columns_to_read: Sequence[str] | None = None
    ) -> Iterator[Records]:
        self.check_header(path, options)
        try:
            from openpyxl import load_workbook
            from openpyxl.utils.exceptions import InvalidFileException
        except ImportError as error:
            raise DataError(f"{path}: reading it needs openpyxl. Run `pip install openpyxl`") from error
        try:
            book = load_workbook(path, read_only=True, data_only=True)
        except (BadZipFile, InvalidFileException, KeyError, ValueError) as error:
            raise DataError(f"{path}: not a workbook of Excel ({error})") from error
        try:
            rows = next(iter(book.worksheets)).iter_rows(values_only=True)
            names = [str(name) for name in next(rows, ()) if name is not None]
            if not names or len(set(names)) < len(names):
                raise DataError(f"{path}: the first row of the sheet must give each column a name of its own")
            filled = ((n, row) for n, row in enumerate(rows, start=2) if any(cell is not None for cell in row))
            cells = ((n, dict(zip(names, map(_plain, row), strict=False))) for n, row in filled)
            yield Records(tuple(names), (Record(number, row) for number, row in cells))
        except (ParseError, StopIteration) as error:
            raise DataError(f"{path}: a workbook that cannot be read ({error})") from error
        finally:
            book.close()


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, date | time) else value


class DatasetFormat(Format):
    """The folder of a ``datasets.Dataset`` on disk. Class ids become names."""

    is_text: ClassVar[bool] = False
    can_stream: ClassVar[bool] = False

    def files(self, path: Path) -> tuple[Path, ...]:
        return tuple(sorted(file for file in path.iterdir() if file.is_file()))

    @contextmanager
    def open(
        self, path: Path, options: ParseOptions, *, columns_to_read: Sequence[str] | None = None
    ) -> Iterator[Records]:
        import datasets

        self.check_header(path, options)
        try:
            rows = datasets.load_from_disk(path)
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{path}: not a data set that save_to_disk wrote ({error})") from error
        yield dataset_records(rows)


ALL: tuple[Format, ...] = (
    ExcelFormat(name="xlsx", extensions=(".xlsx",)),
    DatasetFormat(name="datasets", extensions=()),
)
