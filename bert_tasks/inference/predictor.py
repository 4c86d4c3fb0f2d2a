"""What is done with a part's rows: predicted, and made into the rows of the output.

Owns neither files nor processes, and must not know them.

The rows of a table shared between processes, part by part, with results in row order on the first one.

Owns which process takes which part. A part is a chunk of the model's own, so what comes of it does not depend on who
runs it. Must not know files or what is made of rows.

Prediction on standard input: row by row as they come, or stored first where a file is wanted.

Owns how rows that nobody can read twice are read. Must not know processes.
"""

import json
import os
import queue
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import gather_object

from bert_tasks.data.columns import FAULT, KEPT, Row
from bert_tasks.data.formats import Format, named_format
from bert_tasks.data.problems import Problems, raise_problems
from bert_tasks.data.readers import ReadOptions, file_records, peeked
from bert_tasks.data.records import Records, detected_format, detected_records
from bert_tasks.data.stored_reading import known_names, with_columns, with_file_options
from bert_tasks.data.table import RowTable, cache_folder
from bert_tasks.data.validator import ColumnMapping, RowValidator, check_columns, is_kept, make_column_mapping, plain
from bert_tasks.data.writers import json_line
from bert_tasks.distributed import broadcast_from_main
from bert_tasks.errors import BertTasksError, DataError
from bert_tasks.inference.output import (
    LINE,
    Part,
    Progress,
    StreamWriter,
    WriteOptions,
    output_row,
    reject_line,
    repeated_columns,
)
from bert_tasks.model import predicting
from bert_tasks.model.predicting import Logits, predict_rows
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks.base import Feature, Prediction, Task


@dataclass(frozen=True, kw_only=True)
class ChunkResult:
    """Rows that were predicted: what they were, what came of them, how many were cut at the longest length."""

    rows: list[Row]
    predictions: list[Prediction]
    truncated: int


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A model at work for an output.

    Attributes:
        run: what runs a batch in place of the model.
        names: the task's columns -> the file's.
        given: rows in memory, whose columns are kept from there.
    """

    model: TaskModel
    run: Logits | None
    writing: WriteOptions
    names: Mapping[str, str] | None = None
    given: Sequence[Row] | None = None

    def done(self, first: int, rows: Sequence[Row]) -> ChunkResult:
        """``first``: the number of the first row, for messages."""
        good = [row for row in rows if row.get(FAULT) is None]
        truncated = 0

        def count(features: Sequence[Feature]) -> None:
            nonlocal truncated
            truncated += len({feature["row"] for feature in features if feature.get("lost_tokens", 0) > 0})

        logits = self.writing.logits
        predictions = list(predict_rows(self.model, good, run=self.run, first=first, note=count, logits=logits))
        return ChunkResult(rows=good, predictions=predictions, truncated=truncated)

    def part(self, first: int, rows: Sequence[Row]) -> Part:
        done = self.done(first, rows)
        content = "".join(map(json_line, self.output_rows(done, first)))
        return Part(
            content=content.encode(),
            rows=len(done.rows),
            truncated=done.truncated,
            rejected=len(rows) - len(done.rows),
        )

    def output_rows(self, done: ChunkResult, first: int) -> list[dict[str, Any]]:
        repeated = repeated_columns(self.model.task, self.names)
        return [
            output_row(
                self._kept(row, first + number),
                prediction,
                repeated=repeated,
                line=row[LINE] if self.writing.skips else None,
            )
            for number, (row, prediction) in enumerate(zip(done.rows, done.predictions, strict=True))
        ]

    def _kept(self, row: Row, number: int) -> Mapping[str, Any]:
        """The columns to keep; ``number`` counts all rows in memory, of which none is ever left out."""
        keep = self.writing.keep_columns
        if keep == "none":
            return {}
        if KEPT in row:
            kept: Mapping[str, Any] = json.loads(row[KEPT])
            return kept
        cells = {name: row[name] for name in row if name != LINE} if self.given is None else self.given[number]
        return {name: plain(value) for name, value in cells.items() if is_kept(name, keep)}


Result = TypeVar("Result")
Rows = list[dict[str, Any]]


def part_rows(task: Task, table: RowTable) -> int:
    """Rows of a part; all of them where a row's features depend on the rows around it."""
    return max(len(table), 1) if task.reads_neighbours else predicting.CHUNK_ROWS


def check_same_rows(accelerator: Accelerator, table: RowTable) -> None:
    """Raises DataError, on every process, if processes read different rows."""
    if accelerator.num_processes == 1:
        return
    found = gather_object([table.fingerprint])
    other = next((rank for rank, fingerprint in enumerate(found) if fingerprint != found[0]), None)
    if other is not None:
        error = DataError(f"{table.source}: process {other} reads other rows than process 0; give all the same file")
        error.collective = True
        raise error


def map_chunks_distributed(
    accelerator: Accelerator,
    table: RowTable,
    *,
    size: int,
    done: int,
    work: Callable[[int, Rows], Result],
    take: Callable[[Sequence[Result]], None],
) -> None:
    """Runs ``work`` on every part from number ``done`` on, each on one process.

    Args:
        size: rows of a part.
        work: gets the number of the part's first row, and its rows.
        take: gets results in row order, as they come, on the first process only.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    parts: Iterator[tuple[int, Rows]] = table.blocks(size, lambda n: n >= done and (n - done) % world == rank)
    for _ in range(done, -(-len(table) // size), world):
        part = next(parts, None)
        results = gather_object([] if part is None else [work(part[0] * size, part[1])])
        broadcast_from_main(accelerator, partial(take, results))


STDIN = Path("/dev/stdin")
STDIN_NAME = "standard input"
_PATIENCE = 0.05  # seconds after which the rows that are there are predicted, though more may come
_FORGOTTEN = 2 * 86400  # seconds after which nobody reads a stored input any more
_WHOLE = ("parquet", "squad")  # formats that must be read whole


def checked_format(reading: ReadOptions) -> str | None:
    """The format of standard input; None where it is to be detected. Raises DataError for an unknown one."""
    return None if reading.format is None else named_format(reading.format).name


def detected(reading: ReadOptions, path: Path, model: TaskModel) -> ReadOptions:
    """The options with a format for what was stored of standard input."""
    if reading.format is not None:
        return reading
    found = detected_format(path, encoding=reading.codec, headers=_headers(model), called=STDIN_NAME)
    return replace(reading, format=found)


def can_stream(format: str | None) -> bool:
    return format not in _WHOLE


def _headers(model: TaskModel) -> set[str]:
    """What a header of a table would name."""
    inputs = [column for column in model.task.columns if not column.is_target]
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
    """A file of what comes from standard input, in the cache, as long as it is needed; memory does not grow."""
    folder = cache_folder(None, "input")
    for left in folder.iterdir():  # by a process that was killed
        with suppress(OSError):  # another one sweeps, too
            if time.time() - left.stat().st_mtime > _FORGOTTEN:
                left.unlink()
    path = folder / f"{uuid.uuid4().hex}{'' if format is None else named_format(format).extensions[0]}"
    try:
        _store(source, path)
        yield path
    finally:
        path.unlink(missing_ok=True)


def _store(source: IO[bytes], path: Path) -> None:
    try:
        with path.open("wb") as file:
            shutil.copyfileobj(source, file)
    except OSError as error:
        message = f"{STDIN_NAME}: cannot be stored ({error}); set HF_DATASETS_CACHE to a folder with enough space"
        raise DataError(message) from None


@dataclass
class Streamed:
    """Counts of what went through."""

    rows: int = 0
    truncated: int = 0
    rejected: int = 0


def predict_stream(
    work: Predictor,
    reading: ReadOptions,
    out: StreamWriter,
    rejects: Path | None,
    source: Path,
    progress: Progress = lambda done, total: None,
) -> Streamed:
    """Predicts rows as they come; a block is written before the next one is predicted.

    Raises:
        BadRowsError: at the first block with a row that cannot be used (unless such rows are skipped), when the rows
            before it are written.
        DataError: no rows, or a column is not there.
        ClosedPipeError: nobody reads the output any more.
    """
    writing, reader = work.writing, _Reader(work, reading, source)
    done = Streamed()
    with ExitStack() as stack:
        file = None if rejects is None else stack.enter_context(rejects.open("w", encoding="utf-8"))
        for block in _blocks(reader, whole=work.model.task.reads_neighbours):
            work = replace(work, names=reader.names)
            bad = next((number for number, row in enumerate(block) if row.get(FAULT) is not None), len(block))
            _predict_block(work, block if writing.skips else block[:bad], out, done)
            progress(done.rows, None)
            faults = [row for row in block if row.get(FAULT) is not None]
            if faults and not writing.skips:
                _refuse(faults)
            if file is not None:
                file.writelines(reject_line(row[FAULT]) for row in faults)
                file.flush()
    return done


def _predict_block(work: Predictor, rows: list[Row], out: StreamWriter, done: Streamed) -> None:
    found = work.done(done.rows, rows)
    out.write(work.output_rows(found, done.rows))
    done.rows += len(found.rows)
    done.truncated += found.truncated
    done.rejected += len(rows) - len(found.rows)


def _refuse(faults: list[Row]) -> None:
    problems = Problems(source=STDIN_NAME)
    for row in faults:
        problems.add(row[LINE], json.loads(row[FAULT])["reason"])
    raise_problems([problems])


def _blocks(reader: "_Reader", *, whole: bool) -> Iterator[list[Row]]:
    while block := reader.block(None if whole else predicting.CHUNK_ROWS):
        yield block
    reader.check()


class _Reader:
    """Reads rows beside the work on them, so that a slow source does not hold back those that are there."""

    def __init__(self, work: Predictor, reading: ReadOptions, source: Path) -> None:
        """``names``, the task's columns -> the input's, are known when the first row is."""
        self.names: Mapping[str, str] = {}
        self._work, self._reading, self._source = work, reading, source
        self._rows: queue.Queue[Row | None] = queue.Queue(maxsize=2 * predicting.CHUNK_ROWS)
        self._ended = self._complete = False
        self._failure: Exception | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def block(self, most: int | None) -> list[Row]:
        """The next rows, up to ``most``: those that come soon after the first; none at the end."""
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

    def _records(self, how: ReadOptions, layout: Format) -> AbstractContextManager[Records]:
        if how.format is not None:
            return file_records(self._source, layout, how)
        headers = _headers(self._work.model)
        return detected_records(self._source, encoding=how.codec, headers=headers, called=STDIN_NAME)

    def _plan(self, reading: ReadOptions, layout: Format, present: Collection[str]) -> ColumnMapping:
        """``present``: the columns that are there, as far as the first row tells."""
        model = self._work.model
        columns = [column for column in model.task.columns if not column.is_target]
        names = with_columns(reading, model.reading, columns, present).columns
        known = {column.name for column in columns}
        self.names = {} if names is None else {task: name for task, name in names.items() if task in known}
        keep = self._work.writing.keep_columns
        return make_column_mapping(
            columns, self.names, layout.columns, layout, "optional", None, STDIN_NAME, keep=keep, skips=True
        )

    def _read(self) -> None:
        how = with_file_options(self._reading, self._work.model.reading, None)
        # What is detected has the columns that it names: no format's own names or labels apply.
        layout = named_format("jsonl" if how.format is None else how.format)
        try:
            with self._records(how, layout) as found:
                records, present = peeked(found)
                plan = self._plan(how, layout, present)
                if records.columns is not None:
                    check_columns(records.columns, plan)
                judge = RowValidator(plan, set() if records.columns is None else set(records.columns))
                for row in judge.rows(records.rows):
                    self._rows.put(row)
            judge.finish()
            self._complete = True
        except (BertTasksError, OSError) as error:
            self._failure = error
        finally:
            self._rows.put(None)
