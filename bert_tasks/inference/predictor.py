"""The model at work on chunks of rows: of a table, shared between processes, or of standard input.

Owns which process takes which chunk, and how rows are read that cannot be read twice. A chunk of a table is one of the
model's own, so its predictions do not depend on who makes them.
"""

import json
import os
import queue
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import gather_object

from bert_tasks.data.columns import FAULT, PASSTHROUGH, Row
from bert_tasks.data.formats import named_format
from bert_tasks.data.problems import BadRowsError, Problems
from bert_tasks.data.readers import ReadOptions, file_records, known_names, peeked, with_columns, with_file_options
from bert_tasks.data.records import detected_format, detected_records
from bert_tasks.data.table import RowTable, cache_folder
from bert_tasks.data.validator import RowValidator, make_column_mapping, plain
from bert_tasks.data.writers import json_line
from bert_tasks.distributed import broadcast_from_main
from bert_tasks.errors import BertTasksError, DataError
from bert_tasks.inference.output import (
    INPUT,
    LINE,
    Chunk,
    Predicted,
    Progress,
    StreamWriter,
    WriteOptions,
    reject_line,
)
from bert_tasks.model import task_model
from bert_tasks.model.task_model import Logits, TaskModel
from bert_tasks.tasks.base import Feature, Prediction


@dataclass(frozen=True, kw_only=True)
class ChunkResult:
    """The rows of a chunk that were predicted, their predictions, and how many were truncated at the maximum length."""

    rows: list[Row]
    predictions: list[Prediction]
    truncated: int


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A model that predicts for an output.

    Attributes:
        model: the model.
        run: what runs a batch in place of the model.
        writing: what is written for each row.
        names: the task's columns -> the file's.
        given: rows in memory as they were given, which columns are kept from.
    """

    model: TaskModel
    run: Logits | None
    writing: WriteOptions
    names: Mapping[str, str] | None = None
    given: Sequence[Row] | None = None

    def predict(self, first: int, rows: Sequence[Row]) -> ChunkResult:
        """Predicts the usable ones of some rows; ``first`` is the number of the first one, for messages."""
        usable = [row for row in rows if row.get(FAULT) is None]
        seen: list[Sequence[Feature]] = []
        logits = self.writing.logits
        predictions = list(self.model.predict_rows(usable, run=self.run, first=first, note=seen.append, logits=logits))
        cut = [{feature["row"] for feature in features if feature.get("lost_tokens", 0) > 0} for features in seen]
        return ChunkResult(rows=usable, predictions=predictions, truncated=sum(map(len, cut)))

    def output_chunk(self, first: int, rows: Sequence[Row]) -> Chunk:
        """Predicts some rows, and makes their output: of each row the columns to keep, then the prediction.

        A column that the prediction repeats in a field of the same name is left out; any other one with such a name is
        called ``input.NAME``.
        """
        result = self.predict(first, rows)
        keep, names = self.writing.keep_columns, {} if self.names is None else self.names
        read = [column.name for column in self.model.task.columns if not column.is_label]
        repeated = {name for name in read if names.get(name, name) == name}
        lines = []
        for number, (row, prediction) in enumerate(zip(result.rows, result.predictions, strict=True), start=first):
            if keep == "none":
                kept: Mapping[str, Any] = {}
            elif PASSTHROUGH in row:
                kept = json.loads(row[PASSTHROUGH])
            else:  # rows in memory, of which none is ever left out
                cells = row if self.given is None else self.given[number]
                own = LINE if self.given is None else None
                kept = {k: plain(v) for k, v in cells.items() if k != own and (keep == "all" or k in keep)}
            predicted = prediction.to_json()
            taken = {field.name for field in fields(prediction)}.union(predicted)
            output: dict[str, Any] = {LINE: row[LINE]} if self.writing.on_error == "skip" else {}
            for name, value in kept.items():
                if name in predicted and name in repeated:
                    continue
                is_taken = name in taken or name.partition(".")[0] in taken or name in output
                output[f"{INPUT}{name}" if is_taken or name.startswith(INPUT) else name] = value
            lines.append(json_line(output | predicted))
        return Chunk(
            content="".join(lines).encode(),
            rows=len(result.rows),
            truncated=result.truncated,
            rejected=len(rows) - len(result.rows),
        )


Result = TypeVar("Result")
Rows = list[dict[str, Any]]


def map_chunks_distributed(
    accelerator: Accelerator,
    table: RowTable,
    *,
    size: int,
    work: Callable[[int, Rows], Result],
    take: Callable[[Sequence[Result]], None],
    completed: int = 0,
) -> None:
    """Runs ``work`` on every chunk of a table, each on one process.

    Args:
        size: rows of a chunk.
        work: gets the number of the chunk's first row, and its rows.
        take: gets results in row order, as they come, on the first process only.
        completed: the number of first chunks that are left out.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    rows, count = iter(table), -(-len(table) // size)
    chunks = ((number, list(islice(rows, size))) for number in range(count))
    own = (chunk for chunk in chunks if chunk[0] >= completed and (chunk[0] - completed) % world == rank)
    for _ in range(completed, count, world):
        chunk = next(own, None)
        results = gather_object([] if chunk is None else [work(chunk[0] * size, chunk[1])])
        broadcast_from_main(accelerator, partial(take, results))


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
    return {column.name for column in inputs} | set(known_names(model.reading, inputs).values())


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
    most = None if predictor.model.task.reads_neighbours else task_model.CHUNK_ROWS
    rows = truncated = rejected = 0
    with nullcontext() if rejects is None else rejects.open("w", encoding="utf-8") as file:
        while chunk := reader.chunk(most):
            faulty = [row for row in chunk if row.get(FAULT) is not None]
            usable = chunk[: chunk.index(faulty[0])] if faulty and not skips else chunk
            made = replace(predictor, names=reader.names).output_chunk(rows, usable)
            writer.write(made.content)
            rows, truncated, rejected = rows + made.rows, truncated + made.truncated, rejected + made.rejected
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
    return Predicted(rows=rows, truncated=truncated, rejected=rejected)


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
        how = with_file_options(self._reading, model.reading, None)
        # What is detected has the columns that it names: no format's own names or labels apply.
        layout = named_format("jsonl" if how.format is None else how.format)
        try:
            source = file_records(self._source, layout, how)
            if how.format is None:
                headers = _headers(model)
                source = detected_records(self._source, encoding=how.encoding, headers=headers, name=STDIN_NAME)
            with source as found:
                records, present = peeked(found)
                names = with_columns(how, model.reading, columns, present).columns
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
        except (BertTasksError, OSError) as error:
            self._failure = error
        finally:
            self._rows.put(None)
