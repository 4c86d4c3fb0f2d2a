"""Prediction over files, tables and streams, on one or many processes.

Owns how an output comes about: rows are read, predicted chunk by chunk, and appear all at once under the output's name,
or in a stream as they come. Owns also which process takes which chunk of a table: a chunk is one of the model's own, so
its predictions do not depend on who makes them. A format of a task, such as CoNLL columns, is made of all predictions
at once, in memory.
"""

import json
import logging
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count, islice
from pathlib import Path
from platform import python_version
from typing import IO, Any, Literal, Unpack, cast, overload

import numpy as np
import torch
from accelerate.utils import gather_object

from bert_tasks.data.columns import PASSTHROUGH, ROW_ERROR, PassthroughColumns, Row
from bert_tasks.data.formats import named_format
from bert_tasks.data.problems import RowError, RowErrors, counted
from bert_tasks.data.readers import ReadingArguments, ReadOptions
from bert_tasks.data.table import RowTable, Truncation, read_batches
from bert_tasks.data.unknown_tokens import UnknownTokens
from bert_tasks.data.validator import plain
from bert_tasks.data.writers import json_line, vector_text, whole_file
from bert_tasks.distributed import broadcast_from_main, check_agreement, main_process_first, make_accelerator
from bert_tasks.environment import installed_version
from bert_tasks.errors import BertTasksError, UsageError
from bert_tasks.inference.output import (
    INPUT,
    LINE,
    STANDARD,
    OutputDestination,
    PartialOutput,
    Predicted,
    Progress,
    StreamWriter,
    WriteOptions,
    finalize_output,
    model_fingerprint,
    output_destination,
    partial_output,
    passthrough_name,
    reject_line,
    reserved_names,
    sibling_output,
    write_rejects,
)
from bert_tasks.inference.streams import (
    STDIN,
    STDIN_NAME,
    can_open,
    detected,
    stored_input,
    stream_rows,
)
from bert_tasks.model import task_model
from bert_tasks.model.explanation import explainable_task
from bert_tasks.model.inputs import Data, in_memory, load_table, load_trained, vocabulary_name
from bert_tasks.model.precision import DType, logits_of
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks.base import Feature, Prediction, PredictionT, Task, float_list
from bert_tasks.tasks.shared.rendering import Rendering
from bert_tasks.tasks.shared.windows import Windows

_log = logging.getLogger("bert_tasks")

# The packages whose versions must be equal for an output to be resumed.
_VERSIONED = ("bert-tasks", "torch", "transformers", "tokenizers", "onnxruntime")


@overload
def predict(
    model: TaskModel[PredictionT] | str | Path,
    data: Data,
    *,
    output: None = None,
    task: str | type[Task[PredictionT]] | None = None,
    settings: Mapping[str, Any] | None = None,
    revision: str | None = None,
    dtype: DType = "float32",
    logits: bool = False,
    explain: bool = False,
    **reading: Unpack[ReadingArguments],
) -> list[PredictionT]: ...


@overload
def predict(
    model: TaskModel[PredictionT] | str | Path,
    data: Data,
    *,
    output: str | Path | IO[bytes],
    task: str | type[Task[PredictionT]] | None = None,
    settings: Mapping[str, Any] | None = None,
    revision: str | None = None,
    dtype: DType = "float32",
    keep_columns: PassthroughColumns = "all",
    on_error: Literal["fail", "skip"] = "fail",
    rejects: str | Path | None = None,
    csv_raw: bool = False,
    output_format: str | None = None,
    logits: bool = False,
    explain: bool = False,
    **reading: Unpack[ReadingArguments],
) -> int: ...


def predict(
    model: TaskModel[PredictionT] | str | Path,
    data: Data,
    *,
    output: str | Path | IO[bytes] | None = None,
    task: str | type[Task[PredictionT]] | None = None,
    settings: Mapping[str, Any] | None = None,
    revision: str | None = None,
    dtype: DType = "float32",
    keep_columns: PassthroughColumns = "all",
    on_error: Literal["fail", "skip"] = "fail",
    rejects: str | Path | None = None,
    csv_raw: bool = False,
    output_format: str | None = None,
    logits: bool = False,
    explain: bool = False,
    **reading: Unpack[ReadingArguments],
) -> list[PredictionT] | int:
    """Predicts one result per row, in row order.

    With ``output`` predictions are written as they are made, and only their number is returned. The output is .jsonl,
    .csv, .tsv or .parquet, for data of any size; or a format of the task, which holds all predictions in memory: .conll
    (words, tags in the data where there are any, predicted tags), or .json for span extraction (SQuAD's form; beside
    NAME.json also NAME.nbest.json and NAME.null_odds.json). A file appears complete or not at all; the same call
    resumes a prediction that was interrupted. Of several processes each predicts its share, and the first one writes.
    Labels in the data are not needed. See ``evaluate`` for the other arguments.

    Args:
        data: a file, or rows as ``TaskModel.predict`` takes them; with an output also "-" for standard input: JSON
            lines or one text a line, else its ``format`` must be given.
        output: also "-" for standard output, or an open binary file, where rows are written as they come.
        keep_columns: the input's columns written before the prediction: "all", "none", or names; see ``WriteOptions``.
        on_error: "skip" leaves out rows of a file that cannot be used, and says why in the file ``rejects`` (default:
            the output's name followed by .rejects.jsonl).
        csv_raw: write texts that a spreadsheet would take for a formula without the ``'`` in front.
        output_format: jsonl, csv, tsv or parquet, where the output's extension does not say it.
        logits: give the predictions their logits, and write them.
        explain: give the predictions their explanations (see ``TaskModel.predict``), and write them.
        reading: How to read the data: ``columns``, ``format``, ``delimiter``, ``encoding``, ``header`` and
            ``label_separator`` of `ReadOptions`. Default: columns with the names of the training data.

    Raises:
        DataError: naming every bad row.
        UsageError: an output whose extension is not known, or one that another process is writing.
        CheckpointError: the model cannot be loaded.
    """
    writing = WriteOptions(
        keep_columns=keep_columns if isinstance(keep_columns, str) else tuple(keep_columns),
        on_error=on_error,
        rejects=None if rejects is None else Path(rejects),
        csv_raw=csv_raw,
        format=output_format,
        logits=logits,
        explain=explain,
    )
    if output is None and writing != WriteOptions(logits=logits, explain=explain):
        raise UsageError("keep_columns, on_error, rejects, csv_raw and output_format are for an output: give one")
    options: dict[str, Any] = {"task": task, "settings": settings, "revision": revision}
    how = ReadOptions.from_arguments(predict, reading)
    if output is not None:
        return predict_file(model, data, output, dtype=dtype, writing=writing, reading=how, **options).rows
    loaded = load_trained(model, data=data, reading=how, ensembles=True, **options)
    if torch.cuda.is_available():
        loaded.to("cuda")
    if explain:
        explainable_task(loaded, loaded.task, dtype)
    run = logits_of(loaded, dtype)
    table = load_table(data, loaded.task, names=loaded.columns, reading=how, labels="unread")
    return cast("list[PredictionT]", list(loaded.predict_rows(table, forward_fn=run, logits=logits, explain=explain)))


def predict_file(
    model: TaskModel | str | Path,
    data: Data,
    output: str | Path | IO[bytes],
    *,
    task: str | type[Task] | None = None,
    settings: Mapping[str, Any] | None = None,
    revision: str | None = None,
    dtype: DType = "float32",
    writing: WriteOptions | None = None,
    reading: ReadOptions | None = None,
    progress: Progress = lambda completed, total: None,
) -> Predicted:
    """``predict`` with an output, and what became of it.

    Args:
        progress: gets, on the first process, the number of rows that are completed, and of all rows; None: of a stream.
    """
    options, writing = ReadOptions() if reading is None else reading, WriteOptions() if writing is None else writing
    task_class = type(model.task) if isinstance(model, TaskModel) else task
    destination = output_destination(output, data, writing, task_class if isinstance(task_class, type) else None)
    is_standard = isinstance(data, str) and data == STANDARD
    format = None if options.format is None or not is_standard else named_format(options.format)
    accelerator = make_accelerator()
    broadcast_from_main(accelerator, destination.check_places, data)
    if is_standard and sys.stdin is None:
        raise UsageError("standard input is closed: name a file, or send rows through a pipe")
    if is_standard and accelerator.num_processes > 1:
        raise UsageError("several processes cannot share standard input: write it to a file first")
    loaded = load_trained(
        model, task=task, settings=settings, revision=revision, data=data, reading=options, ensembles=True
    ).to(accelerator.device)
    destination.check_task(loaded.task, data, writing)
    if writing.explain:
        explainable_task(loaded, loaded.task, dtype)
    run = PredictionRun(loaded, destination, writing, dtype=dtype, progress=progress)
    can_stream = format is None or format.can_stream
    if is_standard and destination.stream is not None and can_stream and can_open(STDIN):
        predicted = run.predict_stream(options, STDIN)
    elif is_standard:
        with stored_input(sys.stdin.buffer, format) as stored:
            predicted = run.predict_table(stored, detected(options, stored, loaded), STDIN_NAME)
    else:
        predicted = run.predict_table(data, options, "rows")
    read = predicted.rows - predicted.resumed
    cuts = Windows.of(loaded.task).cut_notes(Truncation(rows=read, cut_rows=predicted.truncated))
    warnings = predicted.unknown.warnings(vocabulary_name(loaded))
    return replace(predicted, rejects=destination.rejects, cuts=cuts, warnings=warnings)


Rows = Sequence[Row]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The predictions of neighbouring rows.

    Attributes:
        lines: The JSON lines of the output; empty for a format of a task.
        rows, predictions: For a format of a task, which is made of all predictions at once; else empty.
        counts: Numbers of rows and tokens.
    """

    lines: bytes
    rows: Rows
    predictions: Sequence[Prediction]
    counts: Predicted


class PredictionRun:
    """One prediction with an output: rows -> chunks -> writer, on one process or several.

    Args:
        model: The model.
        destination: Where the output goes.
        writing: What is written for each row.
        dtype: The precision.
        progress: See ``predict_file``.
    """

    def __init__(
        self,
        model: TaskModel,
        destination: OutputDestination,
        writing: WriteOptions,
        *,
        dtype: DType = "float32",
        progress: Progress = lambda completed, total: None,
    ) -> None:
        self.model, self.destination, self.writing = model, destination, writing
        self.dtype, self.progress = dtype, progress
        self._accelerator = make_accelerator()
        self._forward_fn = logits_of(model, dtype)
        self._names: Mapping[str, str] = {}  # the task's columns -> the file's, if they differ
        self._given: Rows | None = None  # rows in memory as the caller gave them, whose columns are kept
        self._encode_vector = vector_text if destination.form in ("parquet", "npy") else float_list
        self._counts = Predicted()

    def predict_table(self, data: Data, reading: ReadOptions, name: str) -> Predicted:
        """Predicts the rows of a file or of memory.

        Args:
            name: The name of the rows in messages.
        """
        task, destination = self.model.task, self.destination
        if isinstance(data, str | Path):
            inputs = [column for column in task.columns if not column.is_label]
            reading = reading.for_file(data, self.model.columns, inputs)
        elif not isinstance(data, RowTable):
            data = self._given = in_memory(data, task)
        self._names = {} if reading.columns is None else reading.columns
        with main_process_first(self._accelerator):
            table = load_table(
                data,
                task,
                names=self.model.columns,
                reading=reading,
                labels="optional" if destination.rendered and Rendering.of(task).renders_labels else "unread",
                name=name,
                passthrough="none" if destination.rendered else self.writing.keep_columns,
                skip_errors=self.writing.on_error == "skip",
            )
        check_agreement({"the content of the data": table.fingerprint}, found_in_data=("the content",))
        if destination.rejects is not None:
            broadcast_from_main(self._accelerator, write_rejects, table, destination.rejects)
        if destination.path is None:
            self._map_chunks(table, self._write_to_stream())
        elif destination.rendered:
            self._render(table, destination.path)
        else:
            self._write_file(table, destination.path)
        return replace(self._counts, notes=(*table.notes, *self._counts.notes))

    def predict_stream(self, reading: ReadOptions, source: Path) -> Predicted:
        """Predicts rows as they come. A chunk is written before the next one is predicted.

        Raises:
            RowErrors: At the first row that cannot be used (unless such rows are skipped), after the rows before it
                were written.
            DataError: There are no rows, or a column is missing.
            ClosedPipeError: The output's reader has closed it.
        """
        most, pending, write = self._chunk_rows, list[Row](), self._write_to_stream()
        rejects, skips = self.destination.rejects, self.writing.on_error == "skip"

        def flush() -> None:
            rows = pending.copy()
            pending.clear()
            if rows:
                self._take(self._predict_chunk(self._counts.rows, rows), write, None)
            if file is not None:
                file.writelines(reject_line(row[ROW_ERROR]) for row in rows if row.get(ROW_ERROR) is not None)
                file.flush()

        with nullcontext() if rejects is None else rejects.open("w", encoding="utf-8") as file:
            before_wait = flush if most is not None else lambda: None
            with stream_rows(source, self.model, reading, self.writing.keep_columns, before_wait) as (rows, names):
                self._names = names
                try:
                    for row in rows:
                        if not skips and row.get(ROW_ERROR) is not None:
                            errors = RowErrors()
                            errors.add(STDIN_NAME, row[LINE], RowError(json.loads(row[ROW_ERROR])["reason"]))
                            raise errors
                        pending.append(row)
                        if len(pending) == most:
                            flush()
                except (BertTasksError, OSError):
                    flush()
                    raise
                flush()
        return self._counts

    @property
    def _chunk_rows(self) -> int | None:
        """Number of rows of a chunk; None if a row's features depend on the rows around it: all rows are one chunk."""
        if Windows.of(self.model.task).needs_document_context:
            return None
        return task_model.EXPLAINED_ROWS if self.writing.explain else task_model.CHUNK_ROWS

    def _table_chunk_rows(self, table: RowTable) -> int:
        return max(len(table), 1) if self._chunk_rows is None else self._chunk_rows

    def _write_to_stream(self) -> Callable[[Chunk], None]:
        """Returns the function that writes a chunk to the stream of the output."""
        stream = cast("IO[bytes]", self.destination.stream)
        writer = StreamWriter(stream, form=self.destination.form, raw=self.writing.csv_raw)
        return lambda chunk: writer.write(chunk.lines)

    def _take(self, chunk: Chunk, write: Callable[[Chunk], None], total: int | None) -> None:
        """Writes a chunk and counts it."""
        write(chunk)
        self._counts = self._counts.plus(chunk.counts)
        self.progress(self._counts.rows, total)

    def _map_chunks(self, table: RowTable, write: Callable[[Chunk], None], completed: int = 0) -> None:
        """Predicts the chunks that are not completed, each on one process; the first one writes them in row order."""
        rank, world = self._accelerator.process_index, self._accelerator.num_processes
        size = self._table_chunk_rows(table)
        rows, count = iter(table), -(-len(table) // size)
        chunks = ((number, list(islice(rows, size))) for number in range(count))
        mine = (chunk for chunk in chunks if chunk[0] >= completed and (chunk[0] - completed) % world == rank)

        def take(results: Sequence[Chunk]) -> None:
            for chunk in results:
                self._take(chunk, write, len(table))

        if self._accelerator.is_main_process:
            self.progress(self._counts.rows, len(table))
        for _ in range(completed, count, world):
            number, chunk_rows = next(mine, (-1, []))
            results = gather_object([] if number < 0 else [self._predict_chunk(number * size, chunk_rows)])
            broadcast_from_main(self._accelerator, take, results)
        self._counts = broadcast_from_main(self._accelerator, lambda: self._counts)

    def _write_file(self, table: RowTable, path: Path) -> None:
        """Keeps the lines of completed chunks beside the output until all of them are there."""
        opened, size = list[PartialOutput](), self._table_chunk_rows(table)
        with ExitStack() as stack:

            def resume() -> int:
                """Opens the lines of an earlier attempt; returns the number of chunks that they complete."""
                partial_file = stack.enter_context(partial_output(path, self._metadata(table, size)))
                opened.append(partial_file)  # it cannot be sent to other processes
                ends = [0, *accumulate(usable_rows(table, size))]
                completed = bisect_right(ends, partial_file.rows) - 1
                partial_file.keep(ends[completed])
                rejected = min(completed * size, len(table)) - ends[completed]
                self._counts = replace(self._counts, rows=ends[completed], rejected=rejected, resumed=ends[completed])
                if ends[completed]:
                    _log.warning("%s: resuming after %s", partial_file.path.parent, counted(ends[completed], "row"))
                return completed

            completed = broadcast_from_main(self._accelerator, resume)
            self._map_chunks(table, lambda chunk: opened[0].append(chunk.lines), completed)

            def finish() -> None:
                vectors = Rendering.of(self.model.task).vector_columns(self.model.config)
                raw = self.writing.csv_raw
                finalize_output(opened[0].path, path, form=self.destination.form, raw=raw, vectors=vectors)

            broadcast_from_main(self._accelerator, finish)

    def _metadata(self, table: RowTable, size: int) -> dict[str, Any]:
        """What must be equal for two attempts to write the same output; the number of processes does not count."""
        writing, keep = self.writing, self.writing.keep_columns
        settings = {
            "columns": dict(self._names),
            "part_rows": size,
            "keep_columns": keep if isinstance(keep, str) else list(keep),
            "on_error": writing.on_error,
            "logits": writing.logits,
            "explain": writing.explain,
            "dtype": self.dtype,
            "device": self.model.device.type,
        }
        versions = {name: installed_version(name) for name in _VERSIONED} | {"python": python_version()}
        model = model_fingerprint(self.model)
        return {"input": table.fingerprint, "model": model, "settings": settings, "versions": versions}

    def _render(self, table: RowTable, path: Path) -> None:
        """Writes the files of a task's format, made of all predictions; the file asked for appears last."""
        rendering, form, chunks = Rendering.of(self.model.task), self.destination.form, list[Chunk]()
        usable = (row for row in table if row.get(ROW_ERROR) is None)
        notes = broadcast_from_main(self._accelerator, lambda: rendering.check(form, usable))
        self._map_chunks(table, chunks.append)

        def write() -> None:
            predictions = [prediction for chunk in chunks for prediction in chunk.predictions]
            files = rendering.render(form, predictions, [row for chunk in chunks for row in chunk.rows])
            for name in sorted(files, reverse=True):
                with whole_file(sibling_output(path, name) if name else path) as file:
                    file.write(files[name])

        broadcast_from_main(self._accelerator, write)
        self._counts = replace(self._counts, notes=notes)

    def _predict_chunk(self, first: int, rows: Rows) -> Chunk:
        """Predicts the usable ones of some rows; ``first`` is the number of the first row, for messages."""
        usable, features = [row for row in rows if row.get(ROW_ERROR) is None], list[Sequence[Feature]]()
        asked = {"logits": self.writing.logits, "explain": self.writing.explain}
        predictions = list(
            self.model.predict_rows(usable, forward_fn=self._forward_fn, first=first, note=features.append, **asked)
        )
        truncated = sum(len({one["row"] for one in part if one.get("lost_tokens", 0) > 0}) for part in features)
        ids = (np.fromiter(chain.from_iterable(one["input_ids"] for one in part), np.int64) for part in features)
        counts = Predicted(
            rows=len(usable),
            truncated=truncated,
            rejected=len(rows) - len(usable),
            unknown=UnknownTokens.of(ids, self.model.tokenizer),
        )
        if self.destination.rendered:
            return Chunk(lines=b"", rows=usable, predictions=predictions, counts=counts)
        lines = "".join(map(self._line, count(first), usable, predictions))
        return Chunk(lines=lines.encode(), rows=(), predictions=(), counts=counts)

    def _line(self, number: int, row: Row, prediction: Prediction) -> str:
        """Returns the JSON line of a row: the columns to keep, then the prediction.

        A column that the prediction repeats in a field of the same name is left out; any other one with such a name is
        called ``input.NAME``.
        """
        task, keep = self.model.task, self.writing.keep_columns
        if keep == "none":
            kept: Mapping[str, Any] = {}
        elif PASSTHROUGH in row:
            kept = json.loads(row[PASSTHROUGH])
        else:  # rows in memory, of which none is ever left out
            cells = row if self._given is None else self._given[number]
            line_column = LINE if self._given is None else None
            kept = {k: plain(v) for k, v in cells.items() if k != line_column and (keep == "all" or k in keep)}
        content = prediction.to_json(encode_vector=self._encode_vector)
        taken = reserved_names(task).union(content)
        repeated = {c.name for c in task.columns if not c.is_label and self._names.get(c.name, c.name) == c.name}
        output: dict[str, Any] = {LINE: row[LINE]} if self.writing.on_error == "skip" else {}
        for name, value in kept.items():
            if name not in content or name not in repeated:
                output[f"{INPUT}{name}" if name in output else passthrough_name(name, taken)] = value
        return json_line(output | content)


def usable_rows(table: RowTable, size: int) -> list[int]:
    """Returns the number of usable rows of each chunk of a table."""
    usable = np.ones(len(table), dtype=np.int64)
    if table.file is not None and ROW_ERROR in table.rows.column_names:
        faults = (row[ROW_ERROR] for batch in read_batches(table.file, [ROW_ERROR]) for row in batch)
        usable = np.fromiter((fault is None for fault in faults), np.int64, len(table))
    return [int(usable[start : start + size].sum()) for start in range(0, len(table), size)]
