"""Prediction of standard input, whose rows come one by one and cannot be read twice.

Owns how such rows are read: in a thread of their own as they come, or from a stored copy where they are needed whole.
"""

import json
import os
import queue
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from bert_tasks.data.columns import FAULT, Row
from bert_tasks.data.formats import named_format
from bert_tasks.data.problems import BadRowsError, Problems
from bert_tasks.data.readers import ReadOptions, file_records, peeked
from bert_tasks.data.records import detected_format, detected_records
from bert_tasks.data.table import cache_folder
from bert_tasks.data.unknown_tokens import UnknownTokens
from bert_tasks.data.validator import RowValidator, make_column_mapping
from bert_tasks.errors import BertTasksError, DataError
from bert_tasks.inference.output import (
    LINE,
    Predicted,
    Predictor,
    Progress,
    StreamWriter,
    reject_line,
)
from bert_tasks.model import task_model
from bert_tasks.model.task_model import TaskModel

STDIN = Path("/dev/stdin")
STDIN_NAME = "standard input"
_PATIENCE = 0.05  # seconds after which the rows that are there are predicted, though more may come
_FORGOTTEN = 2 * 86400  # seconds after which nobody reads a stored input any more
WHOLE_FORMATS = ("parquet", "squad")  # formats that must be read whole


def detected(reading: ReadOptions, path: Path, model: TaskModel) -> ReadOptions:
    """The options with a format for what was stored of standard input."""
    if reading.format is not None:
        return reading
    format = detected_format(path, encoding=reading.encoding, headers=_headers(model), name=STDIN_NAME)
    return replace(reading, format=format)


def _headers(model: TaskModel) -> set[str]:
    """The columns that the header of a table would name."""
    inputs = [column for column in model.task.columns if not column.is_label]
    return {name for column in inputs for name in (column.name, model.columns.get(column.name, column.name))}


def can_open(source: Path) -> bool:
    """Whether it can be read under its name: a socket cannot, nor another user's pipe."""
    try:
        os.close(os.open(source, os.O_RDONLY))
    except OSError:
        return False
    return True


@contextmanager
def stored_input(source: IO[bytes], format: str | None) -> Iterator[Path]:
    """A file with the content of standard input, in the cache, as long as it is needed; memory does not grow."""
    folder = cache_folder(None, "input")
    for leftover in folder.iterdir():  # of a process that was killed
        with suppress(OSError):  # another process may remove it, too
            if time.time() - leftover.stat().st_mtime > _FORGOTTEN:
                leftover.unlink()
    path = folder / f"{uuid.uuid4().hex}{'' if format is None else named_format(format).extensions[0]}"
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


def predict_stream(
    predictor: Predictor,
    reading: ReadOptions,
    writer: StreamWriter,
    rejects: Path | None,
    source: Path,
    progress: Progress = lambda completed, total: None,
) -> Predicted:
    """Predicts rows as they come; a chunk is written before the next one is predicted.

    Raises:
        BadRowsError: at the first chunk with a row that cannot be used (unless such rows are skipped), after the rows
            before it were written.
        DataError: there are no rows, or a column is missing.
        ClosedPipeError: the output's reader has closed it.
    """
    skips, reader = predictor.writing.on_error == "skip", _Reader(predictor, reading, source)
    most: int | None = task_model.EXPLAINED_ROWS if predictor.writing.explain else task_model.CHUNK_ROWS
    if predictor.model.task.needs_document_context:
        most = None
    rows = truncated = rejected = 0
    unknown = UnknownTokens()
    with nullcontext() if rejects is None else rejects.open("w", encoding="utf-8") as file:
        while chunk := reader.chunk(most):
            faulty = [row for row in chunk if row.get(FAULT) is not None]
            usable = chunk[: chunk.index(faulty[0])] if faulty and not skips else chunk
            made = replace(predictor, names=reader.names).output_chunk(rows, usable)
            writer.write(made.content)
            rows, truncated, rejected = rows + made.rows, truncated + made.truncated, rejected + made.rejected
            unknown = UnknownTokens.total([unknown, made.unknown])
            progress(rows, None)
            if faulty and not skips:
                problems = Problems(source=STDIN_NAME)
                for row in faulty:
                    problems.add(row[LINE], json.loads(row[FAULT])["reason"])
                raise BadRowsError([problems])
            if file is not None:
                file.writelines(reject_line(row[FAULT]) for row in faulty)
                file.flush()
    reader.check()
    return Predicted(rows=rows, truncated=truncated, rejected=rejected, unknown=unknown)


class _Reader:
    """Reads rows in a thread of its own, so that a slow source does not hold back the rows that are there."""

    def __init__(self, predictor: Predictor, reading: ReadOptions, source: Path) -> None:
        """``names``, the task's columns -> the input's, are known when the first row is."""
        self.names: Mapping[str, str] = {}
        self._predictor, self._reading, self._source = predictor, reading, source
        self._rows: queue.Queue[Row | None] = queue.Queue(maxsize=2 * task_model.CHUNK_ROWS)
        self._ended = self._complete = False
        self._failure: Exception | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def chunk(self, most: int | None) -> list[Row]:
        """The next rows, ``most`` at most: those that come soon after the first one; none at the end."""
        rows: list[Row] = []
        until = 0.0
        while not self._ended and (most is None or len(rows) < most):
            left = max(0.0, until - time.monotonic()) if rows and most is not None else None
            try:
                row = self._rows.get(timeout=left)
            except queue.Empty:
                break
            if row is None:
                self._ended = True
            else:
                until = until if rows else time.monotonic() + _PATIENCE
                rows.append(row)
        return rows

    def check(self) -> None:
        """Raises what ended the reading, if it was not the end of the input."""
        if self._failure is not None:
            raise self._failure
        if not self._complete:
            raise BertTasksError(f"{STDIN_NAME}: reading ended before the input did: please report this")

    def _read(self) -> None:
        model = self._predictor.model
        columns = [column for column in model.task.columns if not column.is_label]
        how = self._reading
        # What is detected has the columns that it names: no format's own names or labels apply.
        layout = named_format("jsonl" if how.format is None else how.format)
        try:
            source = file_records(self._source, layout, how)
            if how.format is None:
                headers = _headers(model)
                source = detected_records(self._source, encoding=how.encoding, headers=headers, name=STDIN_NAME)
            with source as found:
                records, present = peeked(found)
                names = how.with_names(model.columns, columns, present).columns
                known = {column.name for column in columns}
                self.names = {} if names is None else {task: name for task, name in names.items() if task in known}
                mapping = make_column_mapping(
                    columns,
                    self.names,
                    usual_names=layout.columns,
                    layout=layout,
                    source=STDIN_NAME,
                    passthrough=self._predictor.writing.keep_columns,
                    skip_faulty=True,
                )
                validator = RowValidator(mapping, records.columns)
                for row in validator.rows(records.rows):
                    self._rows.put(row)
            self._complete = True
        except (BertTasksError, OSError, MemoryError) as error:
            self._failure = error
        finally:
            self._rows.put(None)
