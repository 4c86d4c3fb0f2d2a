"""Workbooks of Excel, opened so that a damaged or hostile one cannot fill the memory.

A workbook is a zip archive of XML files. openpyxl reads most of them as a whole, and a sheet row by row. What it reads
at a time is limited here, in decompressed bytes and in XML tags, because one tag takes far more memory than its bytes.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipExtFile, ZipFile, ZipInfo

from bert_tasks.data import limits
from bert_tasks.data.limits import too_large
from bert_tasks.errors import DataError

if TYPE_CHECKING:
    from openpyxl import Workbook

_MOST_STREAMED_TAGS = 2**23  # of the shared strings, which are 2 million texts
_MOST_TAGS = 2**20  # of one row, or of a part that is not streamed, such as the styles
_MOST_PART_BYTES = 2**26  # of a part that is not streamed
_MOST_ROWS = 1_048_576  # of one sheet, which is Excel's own limit
_ADVICE = "Save the sheet as a .csv file"
_PROLOG = 2**12  # bytes in which the first element must begin
_ELEMENT = re.compile(rb"<[A-Za-z_]")


class BoundedArchive(ZipFile):
    """A zip archive whose files end in an error where one of them becomes too large.

    Files that are read in pieces may have any size, as long as ``next_row`` is called in between.
    """

    def __init__(self, path: Path) -> None:
        self._opened: list[IO[bytes]] = []
        super().__init__(path)
        self.most_tags = _MOST_STREAMED_TAGS
        self.next_row()

    def next_row(self) -> None:
        """Begins to count from zero, because what was read before is no longer in the memory."""
        self._bytes = self._tags = 0

    def open(
        self, name: str | ZipInfo, mode: Any = "r", pwd: bytes | None = None, *, force_zip64: bool = False
    ) -> IO[bytes]:
        self.next_row()
        info = name
        if not isinstance(info, ZipInfo):
            info = self.getinfo(info)
        if info.compress_type not in (ZIP_STORED, ZIP_DEFLATED):  # which cannot be decompressed in small pieces
            raise DataError(f"{self.filename}: {info.filename!r} is compressed in a way that workbooks are not")
        entry: Any = super().open(name, mode, pwd, force_zip64=force_zip64)
        self._opened.append(entry)
        return cast(IO[bytes], _BoundedEntry(self, entry))

    def close(self) -> None:
        """Closes the archive with its files, which openpyxl leaves open after an error."""
        for entry in self._opened:
            entry.close()
        super().close()

    def count(self, content: bytes, *, name: str, most_bytes: int, most_tags: int) -> None:
        """Adds what was read of a file.

        Raises:
            DataError: It is more than the limits.
        """
        self._bytes += len(content)
        self._tags += content.count(b"<")
        where = f"{self.filename}: a row, or a part, of {name!r}"
        if self._bytes > most_bytes:
            raise too_large(where, most_bytes, "bytes", advice=_ADVICE)
        if self._tags > most_tags:
            raise too_large(where, most_tags, "cells and other elements", advice=_ADVICE)


class _BoundedEntry(io.BufferedIOBase):
    """A file in the archive, which counts what is read of it."""

    def __init__(self, archive: BoundedArchive, entry: ZipExtFile) -> None:
        self._archive, self._entry = archive, entry
        self._is_checked = False

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        name = self._entry.name
        if size is None or size < 0:
            content = self._entry.read(_MOST_PART_BYTES + 1)
            self._archive.count(content, name=name, most_bytes=_MOST_PART_BYTES, most_tags=_MOST_TAGS)
        else:
            content = self._entry.read(size)
            self._archive.count(content, name=name, most_bytes=limits.LARGEST_WHOLE, most_tags=self._archive.most_tags)
        if not self._is_checked:
            self._is_checked = True
            self._check_prolog(content)
        return content

    def _check_prolog(self, content: bytes) -> None:
        """Rejects document type declarations, whose entities can stand for texts of any size."""
        start = content[:_PROLOG].replace(b"\0", b"")  # of UTF-16
        element = _ELEMENT.search(start)
        if element is None or b"<!DOCTYPE" in start[: element.start()]:
            raise DataError(
                f"{self._archive.filename}: {self._entry.name!r} does not begin as the XML of a workbook does. Save "
                "the workbook again"
            )

    def close(self) -> None:
        self._entry.close()
        super().close()


@contextmanager
def open_workbook(path: Path, *, has_formulas: bool = False) -> Iterator["Workbook"]:
    """Opens a workbook to read the rows of its sheets with ``sheet_rows``.

    Args:
        path: The workbook.
        has_formulas: Cells have their formulas instead of the values that Excel computed last.

    Raises:
        DataError: openpyxl is missing, or a part of the workbook is too large.
    """
    try:
        from openpyxl.reader.excel import ExcelReader
    except ImportError as error:
        raise DataError(f"{path}: reading it needs openpyxl. Run `pip install openpyxl`") from error
    with BoundedArchive(path) as archive, path.open("rb") as file:
        # openpyxl opens a zip archive of its own, which has no limits. It is replaced before anything is read of it.
        reader = ExcelReader(file, read_only=True, data_only=not has_formulas)
        reader.archive.close()
        reader.archive = archive
        reader.read()
        archive.most_tags = _MOST_TAGS
        yield reader.wb


def sheet_rows(sheet: Any, path: Path) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yields the numbers and values of a sheet's rows, without the rows that have none.

    Raises:
        DataError: A row's number is larger than a sheet of Excel can have.
    """
    sheet.reset_dimensions()  # they are stated in the file, which may be wrong
    for number, row in enumerate(sheet.iter_rows(values_only=True), start=1):
        sheet.parent._archive.next_row()
        if number > _MOST_ROWS:
            raise DataError(
                f"{path}: the sheet {sheet.title!r} has a row after row {_MOST_ROWS:,}, which is the last "
                "that Excel can have. Save the workbook again"
            )
        if any(cell is not None for cell in row):
            yield number, row
