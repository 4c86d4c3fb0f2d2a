"""Prediction of standard input, whose rows come one by one and cannot be read twice.

Owns how such rows are read: as they come, or from a stored copy if they are needed whole.
"""

import io
import os
import select
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from bert_tasks.data.columns import PassthroughColumns, Row
from bert_tasks.data.formats import Format, StreamFormat, named_format
from bert_tasks.data.readers import ReadOptions, peeked
from bert_tasks.data.records import open_text
from bert_tasks.data.table import cache_folder
from bert_tasks.data.validator import RowValidator
from bert_tasks.errors import DataError
from bert_tasks.model.task_model import TaskModel

STDIN = Path("/dev/stdin")
STDIN_NAME = "standard input"
_PATIENCE = 0.05  # seconds after which the rows that are there are predicted, though more may come
_FORGOTTEN = 2 * 86400  # seconds after which nobody reads a stored input any more


def detected(reading: ReadOptions, path: Path, model: TaskModel) -> ReadOptions:
    """The options with a format for what was stored of standard input."""
    if reading.format is not None:
        return reading
    with open_text(path, encoding=reading.encoding, newline="\n") as lines:
        return replace(reading, format=_stream_format(model).detect(lines.peek_line()).name)


def _stream_format(model: TaskModel) -> StreamFormat:
    """The format that the first line shows, unless it is the header of a table with the model's columns."""
    inputs = [column for column in model.task.columns if not column.is_label]
    headers = {name for column in inputs for name in (column.name, model.columns.get(column.name, column.name))}
    return StreamFormat(name=STDIN_NAME, headers=headers)


def can_open(source: Path) -> bool:
    """Whether it can be read under its name: a socket cannot, nor another user's pipe."""
    try:
        os.close(os.open(source, os.O_RDONLY))
    except OSError:
        return False
    return True


@contextmanager
def stored_input(source: IO[bytes], format: Format | None) -> Iterator[Path]:
    """A file with the content of standard input, in the cache, as long as it is needed; memory does not grow."""
    folder = cache_folder(None, "input")
    for leftover in folder.iterdir():  # of a process that was killed
        with suppress(OSError):  # another process may remove it, too
            if time.time() - leftover.stat().st_mtime > _FORGOTTEN:
                leftover.unlink()
    path = folder / f"{uuid.uuid4().hex}{'' if format is None else format.extensions[0]}"
    try:
        try:
            with path.open("wb") as file:
                shutil.copyfileobj(source, file)
        except OSError as error:
            message = f"{STDIN_NAME}: cannot be stored ({error}); set HF_DATASETS_CACHE to a folder with enough space"
            raise DataError(message) from None
        yield path
    finally:
        path.unlink(missing_ok=True)


class StandardInput(io.RawIOBase):
    """A source of bytes that calls a function before it waits for more.

    Args:
        source: The path of a pipe, a terminal or a file.
        before_wait: Called when nothing has come for ``_PATIENCE``, so that the rows that are there are predicted.
    """

    def __init__(self, source: Path, before_wait: Callable[[], None]) -> None:
        self._file, self._before_wait = os.open(source, os.O_RDONLY), before_wait

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not select.select([self._file], [], [], _PATIENCE)[0]:
            self._before_wait()
        return os.readv(self._file, [buffer])

    def close(self) -> None:
        if not self.closed:
            os.close(self._file)
        super().close()


class _StandardPath(type(Path())):  # type: ignore[misc]  # the class of this platform
    """A path whose content is read by ``StandardInput``."""

    before_wait: Callable[[], None]

    def open(self, *_: Any, **__: Any) -> Any:
        return io.BufferedReader(StandardInput(Path(str(self)), self.before_wait))


@contextmanager
def stream_rows(
    source: Path,
    model: TaskModel,
    reading: ReadOptions,
    keep_columns: PassthroughColumns,
    before_wait: Callable[[], None],
) -> Iterator[tuple[Iterator[Row], Mapping[str, str]]]:
    """Opens rows that come one by one, validated; a row that cannot be used has its ``ROW_ERROR``.

    Args:
        source: What is read, once.
        model: The model that predicts the rows.
        reading: How to read them.
        keep_columns: The columns of the source that rows carry along.
        before_wait: See ``StandardInput``.

    Returns:
        The rows, and the task's columns -> the source's, if they differ.
    """
    path = _StandardPath(source)
    path.before_wait = before_wait
    columns = [column for column in model.task.columns if not column.is_label]
    # What is detected has the columns that it names: no format's own names or labels apply.
    layout = _stream_format(model) if reading.format is None else named_format(reading.format)
    with layout.open(path, reading) as records:
        records, present = peeked(records)
        renames = reading.with_names(model.columns, columns, present).columns
        task_columns = {column.name for column in columns}
        names = {} if renames is None else {task: name for task, name in renames.items() if task in task_columns}
        validator = RowValidator(columns, names, layout=layout, passthrough=keep_columns, skip_errors=True)
        yield validator.rows(records, STDIN_NAME), names
