"""Standard input, which is read row by row or from a stored copy.

Rows can be predicted as they come if the format has a row for each line and the output is a stream. In all other cases
standard input is stored first, and read as a file.
"""

import io
import os
import select
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

from bert_tasks.data import limits
from bert_tasks.data.arrow import cache_folder
from bert_tasks.data.batch import Cells
from bert_tasks.data.columns import PassthroughColumns, Row, source_columns, text_columns
from bert_tasks.data.formats import StreamFormat, TableFormat, named_format
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.parsers import RowLines, open_text
from bert_tasks.data.reading import conversion_of, peeked
from bert_tasks.data.split_column import of_split
from bert_tasks.errors import DataError
from bert_tasks.model.inputs import input_names
from bert_tasks.model.multitask import AnyModel

STDIN_NAME = "standard input"
_PATIENCE = 0.05  # seconds after which the rows that are there are predicted, though more may come


def detected(reading: ReadOptions, path: Path, model: AnyModel) -> ReadOptions:
    """Returns the options with the format of a stored standard input."""
    if reading.format is not None:
        return reading
    with open_text(path, encoding=reading.encoding, newline="\n") as file:
        lines = RowLines(file, path, limits.LARGEST_WHOLE)  # it may be an array in a single line
        format = _stream_format(model).detect(next(lines, ""))
    if isinstance(format, TableFormat):
        columns = {name: str(number) for number, name in enumerate(format.headless)}
        return replace(reading, format="tsv/plain", header=False, columns=columns)
    return replace(reading, format=format.name)


def _stream_format(model: AnyModel) -> StreamFormat:
    """Returns the format of the first line, unless it is a header of model columns."""
    headers: set[str] = set()
    for column in source_columns(model.input_columns):
        headers |= {column.name, model.columns.get(column.name, column.name)}
    return StreamFormat(name=STDIN_NAME, headers=headers, texts=tuple(text_columns(model.input_columns)))


def has_descriptor(source: IO[bytes]) -> bool:
    """Returns True if the system can say whether more of a stream has come."""
    try:
        source.fileno()
    except OSError:  # io.UnsupportedOperation is an OSError
        return False
    return True


@contextmanager
def stored_input(source: IO[bytes]) -> Iterator[Path]:
    """Stores standard input in a file of the cache while it is needed, to save memory."""
    with NamedTemporaryFile(dir=cache_folder(None, "input")) as file:
        try:
            shutil.copyfileobj(source, file)
            file.flush()
        except OSError as error:
            message = f"{STDIN_NAME}: cannot be stored ({error}). Set HF_DATASETS_CACHE to a folder with enough space"
            raise DataError(message) from None
        yield Path(file.name)


class StandardInput(io.RawIOBase):
    """The bytes of a stream, which calls a function before it waits for more.

    Args:
        source: An open file.
        before_wait: Called if nothing has come for ``_PATIENCE``, so that the rows that are there are predicted.
    """

    def __init__(self, source: IO[bytes], before_wait: Callable[[], None]) -> None:
        self._file, self._before_wait = source.fileno(), before_wait

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        ready, _, _ = select.select([self._file], [], [], _PATIENCE)
        if not ready:
            self._before_wait()
        # ``readv`` returns what is there, where ``read`` of a file object would wait until the buffer is full.
        return os.readv(self._file, [buffer])


class _StreamPath(type(Path())):  # type: ignore[misc]  # the class of this platform
    """A path with the content of ``StandardInput``."""

    content: StandardInput

    def open(self, *_: Any, **__: Any) -> Any:
        return io.BufferedReader(self.content)


@contextmanager
def stream_rows(
    source: IO[bytes],
    model: AnyModel,
    reading: ReadOptions,
    keep_columns: PassthroughColumns,
    before_wait: Callable[[], None],
) -> Iterator[tuple[Iterator[Row], Mapping[str, str]]]:
    """Opens checked rows that come one by one. Rows that cannot be used have the reason in ``REJECT``.

    Returns:
        The rows, which carry ``keep_columns`` along, and the task's columns -> the source's, if they differ.
    """
    # Formats read paths. This one has the content of the stream, whatever its name says.
    path = _StreamPath("/dev/stdin")
    path.content = StandardInput(source, before_wait)
    columns = model.input_columns
    # A detected format has the columns that it names, without a format's own names or labels.
    format = _stream_format(model) if reading.format is None else named_format(reading.format)
    format.check_header(path, reading)
    # Not ``open``: rows are predicted while a stream waits, and their errors are not the file's.
    with format.open_text(path, reading, most=1) as batches:
        if reading.split_column is not None:
            batches = of_split(batches, reading.split_column, reading.split, STDIN_NAME)
        batches, present = peeked(batches)  # the names of the columns, which are known after the first row
        names = input_names(reading, model.columns, columns, present)
        options = replace(reading, columns=names)
        conversion = conversion_of(columns, options, format=format, passthrough=keep_columns, skip_errors=True)
        yield _rows(conversion.checked(batches, STDIN_NAME)), names


def _rows(batches: Iterable[Cells]) -> Iterator[Row]:
    """Yields the rows of batches by column."""
    for cells in batches:
        for values in zip(*cells.values(), strict=True):
            yield dict(zip(cells, values, strict=True))
