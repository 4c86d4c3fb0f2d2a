"""Prediction over files, tables and streams, from rows over chunks to a writer.

An output appears all at once under its name, or in a stream as rows come. A chunk is a chunk of the model, so its
predictions do not depend on the process that makes them.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from platform import python_version
from typing import IO, Any, Literal, NamedTuple, Unpack, cast, overload

import numpy as np
from accelerate.utils import gather_object

from bert_tasks.data.columns import PASSTHROUGH, ROW_ERROR, PassthroughColumns, Row, stored_names
from bert_tasks.data.formats import named_format
from bert_tasks.data.problems import RowError, RowErrors
from bert_tasks.data.readers import ReadingArguments, ReadOptions, index_of
from bert_tasks.data.split_column import rows_of_split
from bert_tasks.data.table import RowTable, Truncation
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
    passthrough_name,
    reject_line,
    reserved_columns,
    sibling_output,
    write_rejects,
    written_columns,
)
from bert_tasks.inference.streams import (
    STDIN_NAME,
    detected,
    has_descriptor,
    stored_input,
    stream_rows,
)
from bert_tasks.model.encoder_with_heads import predictions_of_row
from bert_tasks.model.explanation import check_explainable
from bert_tasks.model.features import vocabulary_name
from bert_tasks.model.inputs import Data, in_memory, load_table, load_trained, reading_for_prediction
from bert_tasks.model.multitask import AnyModel
from bert_tasks.model.precision import DType, default_device, logits_of
from bert_tasks.model.task_model import TaskModel
from bert_tasks.outputs.calibration import check_abstention, without_label
from bert_tasks.outputs.notebook import Predictions
from bert_tasks.outputs.prediction import Prediction, PredictionT, float_list
from bert_tasks.tasks.base import Task

# The packages whose versions must be equal for an output to be resumed.
_VERSIONED = ("bert-tasks", "torch", "transformers", "tokenizers", "onnxruntime")


@overload
def predict(
    model: TaskModel[PredictionT] | AnyModel | str | Path,
    data: Data,
    *,
    output: None = None,
    task: str | type[Task[PredictionT]] | None = None,
    settings: Mapping[str, Any] | None = None,
    revision: str | None = None,
    adapter: str | Path | None = None,
    dtype: DType = "float32",
    logits: bool = False,
    explain: bool = False,
    abstain_below: float = 0.0,
    **reading: Unpack[ReadingArguments],
) -> Predictions[PredictionT]: ...


@overload
def predict(
    model: TaskModel[PredictionT] | AnyModel | str | Path,
    data: Data,
    *,
    output: str | Path | IO[bytes],
    task: str | type[Task[PredictionT]] | None = None,
    settings: Mapping[str, Any] | None = None,
    revision: str | None = None,
    adapter: str | Path | None = None,
    dtype: DType = "float32",
    keep_columns: PassthroughColumns = "all",
    on_error: Literal["fail", "skip"] = "fail",
    rejects: str | Path | None = None,
    csv_raw: bool = False,
    output_format: str | None = None,
    logits: bool = False,
    explain: bool = False,
    abstain_below: float = 0.0,
    **reading: Unpack[ReadingArguments],
) -> int: ...


def predict(
    model: TaskModel[PredictionT] | AnyModel | str | Path,
    data: Data,
    *,
    output: str | Path | IO[bytes] | None = None,
    task: str | type[Task[PredictionT]] | None = None,
    settings: Mapping[str, Any] | None = None,
    revision: str | None = None,
    adapter: str | Path | None = None,
    dtype: DType = "float32",
    keep_columns: PassthroughColumns = "all",
    on_error: Literal["fail", "skip"] = "fail",
    rejects: str | Path | None = None,
    csv_raw: bool = False,
    output_format: str | None = None,
    logits: bool = False,
    explain: bool = False,
    abstain_below: float = 0.0,
    **reading: Unpack[ReadingArguments],
) -> Predictions[PredictionT] | int:
    """Returns one prediction for each row, in row order, or writes them to a file.

    The file is .jsonl, .csv, .tsv or .parquet, for data of any size. Or it has a format of the task, which holds all
    predictions in memory: .conll, or .json for span extraction (SQuAD's form). It appears complete or not at all. The
    same call resumes an interrupted prediction. Several processes divide the rows.

    Args:
        model, task, settings, revision, adapter, dtype: See ``evaluate``.
        data: A file, or rows as ``TaskModel.predict`` takes them. With an output also "-" for standard input with JSON
            lines or one text a line, unless ``format`` names another format.
        output: A file, "-" for standard output, or an open binary file. Default: the predictions are returned.
        keep_columns: Columns of the input to write before the prediction: "all" (default), "none", or names.
        on_error: "fail" (default), or "skip" to skip rows of a file that cannot be used.
        rejects: File of the skipped rows and reasons. Default: the output's name followed by .rejects.jsonl.
        csv_raw: True to write texts that a spreadsheet takes for a formula without the ``'`` in front.
        output_format: jsonl, csv, tsv or parquet. Default: by the output's extension.
        logits, explain: True to compute logits and explanations of the predictions (``TaskModel.predict``).
        abstain_below: Lowest score with which one label or choice is kept. Below it the label is None. 0 keeps all.
        reading: Fields of `ReadOptions`. Default: columns with the names of the training data.

    Returns:
        The predictions, one for each row, because rows in memory are never skipped. ``to_frame`` of them has the index
        of a DataFrame or Series. A model of several tasks returns a dict for each row, as ``MultiTaskModel.predict``
        does. With ``output`` their number.

    Raises:
        DataError: Rows cannot be used. The message names all of them.
        UsageError: The extension of the output is unknown, or another process is writing it.
        CheckpointError: The model cannot be loaded.

    Example:
        >>> predict("runs/first", "test.csv", output="answers.jsonl")
        5
    """
    writing = WriteOptions(
        keep_columns=keep_columns if isinstance(keep_columns, str) else tuple(keep_columns),
        on_error=on_error,
        rejects=None if rejects is None else Path(rejects),
        csv_raw=csv_raw,
        format=output_format,
        logits=logits,
        explain=explain,
        abstain_below=abstain_below,
    )
    if output is None and (keep_columns, on_error, rejects, csv_raw, output_format) != (
        "all",
        "fail",
        None,
        False,
        None,
    ):
        raise UsageError("keep_columns, on_error, rejects, csv_raw and output_format are for an output. Set output")
    options: dict[str, Any] = {"task": task, "settings": settings, "revision": revision, "adapter": adapter}
    how = ReadOptions.from_arguments(predict, reading)
    if output is not None:
        return predict_file(model, data, output, dtype=dtype, writing=writing, reading=how, **options).rows
    model = load_trained(model, data=data, reading=how, **options)
    model.to(default_device())
    if explain:
        check_explainable(model, model.one_task().task, dtype)
    forward_fn = logits_of(model, dtype)
    how = reading_for_prediction(model, data, how)
    table = load_table(data, model.row_columns, names=model.columns, reading=how, labels="unread")
    predictions = model.predict_rows(table, forward_fn=forward_fn, logits=logits, explain=explain)
    if abstain_below:
        check_abstention(model.one_task().task.output, abstain_below)
        predictions = (without_label(each, abstain_below) for each in predictions)
    return cast("Predictions[PredictionT]", Predictions(predictions, index=index_of(data)))


def predict_file(
    model: AnyModel | str | Path,
    data: Data,
    output: str | Path | IO[bytes],
    *,
    task: str | type[Task] | None = None,
    settings: Mapping[str, Any] | None = None,
    revision: str | None = None,
    adapter: str | Path | None = None,
    dtype: DType = "float32",
    writing: WriteOptions | None = None,
    reading: ReadOptions | None = None,
    progress: Progress = lambda completed, total: None,
) -> Predicted:
    """Predicts into an output, as ``predict`` does, and returns the result.

    Args:
        progress: Called on the first process with the number of completed rows and of all rows, which is None for a
            stream.
    """
    reading, writing = ReadOptions() if reading is None else reading, WriteOptions() if writing is None else writing
    task_class = type(model.task) if isinstance(model, TaskModel) else task
    destination = OutputDestination(output, data, writing, task_class if isinstance(task_class, type) else None)
    can_stream = reading.format is None or data != STANDARD or named_format(reading.format).can_stream
    accelerator = make_accelerator()
    broadcast_from_main(accelerator, destination.check_places)
    is_standard = isinstance(data, str) and data == STANDARD
    if is_standard and sys.stdin is None:
        raise UsageError("standard input is closed. Name a file, or send rows through a pipe")
    if is_standard and accelerator.num_processes > 1:
        raise UsageError("several processes cannot share standard input. Write it to a file first")
    options: dict[str, Any] = {"task": task, "settings": settings, "revision": revision, "adapter": adapter}
    model = load_trained(model, data=data, reading=reading, **options).to(accelerator.device)
    destination.check_model(model)
    if writing.explain:
        check_explainable(model, model.one_task().task, dtype)
    run = PredictionRun(model, destination, writing, dtype=dtype, progress=progress)
    if not is_standard:
        return run.predict_table(data, reading, "rows")
    if destination.stream is not None and can_stream and has_descriptor(sys.stdin.buffer):
        return run.predict_stream(sys.stdin.buffer, reading)
    with stored_input(sys.stdin.buffer) as stored:
        return run.predict_table(stored, detected(reading, stored, model), STDIN_NAME)


class Chunk(NamedTuple):
    """Predictions of neighbouring rows as JSON lines, or as pairs for a task's format."""

    counts: Predicted
    lines: bytes
    pairs: Sequence[tuple[Row, Mapping[str, Prediction]]]


class PredictionRun:
    """One prediction with an output, on one process or several."""

    def __init__(
        self,
        model: AnyModel,
        destination: OutputDestination,
        writing: WriteOptions,
        *,
        dtype: DType = "float32",
        progress: Progress = lambda completed, total: None,
    ) -> None:
        self.model, self.destination, self.writing = model, destination, writing
        self.dtype, self.progress = dtype, progress
        self.accelerator = make_accelerator()
        self._forward_fn = logits_of(model, dtype)
        self._tasks = model.tasks
        self._reserved = reserved_columns(self._tasks)
        self._renames: Mapping[str, str] = {}  # the task's columns -> the file's, if they differ
        self._counts = Predicted(rejects=destination.rejects)
        if writing.abstain_below:
            check_abstention(model.one_task().task.output, writing.abstain_below)

    def predict_table(self, data: Data, reading: ReadOptions, name: str) -> Predicted:
        """Predicts the rows of a file or of memory, which are called ``name`` in messages."""
        model, destination = self.model, self.destination
        rows_as_given: Sequence[Row] | None = None
        if isinstance(data, str | Path):
            reading = reading_for_prediction(self.model, data, reading)
            reading = reading.for_file(data, model.columns, model.input_columns)
        elif not isinstance(data, RowTable):
            rows_as_given = in_memory(data, model.row_columns)
            if reading.split_column is not None:
                rows_as_given = rows_of_split(rows_as_given, reading.split_column, reading.split, name)
            data = rows_as_given
        self._renames = {} if reading.columns is None else reading.columns
        passthrough = self.writing.keep_columns
        labels: Literal["optional", "unread"] = "unread"
        if destination.rendered:
            file_format = model.one_task().task.output.files[destination.form]
            passthrough = "all" if file_format.with_other_columns else "none"
            labels = "optional" if file_format.with_labels else "unread"
        with main_process_first(self.accelerator):
            table = load_table(
                data,
                model.row_columns,
                known_labels=model.labels,
                names=model.columns,
                reading=reading,
                labels=labels,
                name=name,
                passthrough=passthrough,
                skip_errors=self.writing.on_error == "skip",
            )
        check_agreement({"the content of the data": table.fingerprint}, found_in_data=("the content",))
        rejected = 0
        if destination.rejects is not None:
            rejected = broadcast_from_main(self.accelerator, write_rejects, table, destination.rejects)
        self._counts = replace(self._counts, rejected=rejected, notes=table.notes)
        if rows_as_given is None:
            rows = (row for row in table if row.get(ROW_ERROR) is None)
        else:
            rows = ({**row, PASSTHROUGH: cells} for row, cells in zip(table, rows_as_given, strict=True))
        total = len(table) - rejected
        if destination.path is None:
            self._predict_chunks(rows, total, self._stream_writer())
        elif destination.rendered:
            self._render(rows, total, destination.path)
        else:
            self._write_file(table, rows, total, destination.path)
        return self._result()

    def predict_stream(self, source: IO[bytes], reading: ReadOptions) -> Predicted:
        """Predicts rows as they come. A chunk is written before the next one is predicted.

        Raises:
            RowErrors: At the first row that cannot be used (unless such rows are skipped), after the rows before it
                were written.
            DataError: There are no rows, or a column is missing.
            ClosedPipeError: The output's reader has closed it.
        """
        size, pending, write = self._chunk_size, list[Row](), self._stream_writer()
        rejects = self.destination.rejects

        def flush() -> None:
            rows = pending.copy()
            pending.clear()
            if rows:
                self._take(self._predict_chunk(rows), write, None)

        before_wait = flush if size is not None else lambda: None
        with (
            nullcontext() if rejects is None else rejects.open("w", encoding="utf-8", buffering=1) as file,
            stream_rows(source, self.model, reading, self.writing.keep_columns, before_wait) as (rows, self._renames),
        ):
            try:
                for row in rows:
                    fault = row.get(ROW_ERROR)
                    if fault is None:
                        pending.append(row)
                    elif file is None:
                        errors = RowErrors()
                        errors.add(STDIN_NAME, row[LINE], RowError(json.loads(fault)["reason"]))
                        raise errors
                    else:
                        file.write(reject_line(fault))
                        self._counts = replace(self._counts, rejected=self._counts.rejected + 1)
                    if len(pending) == size:
                        flush()
            except (BertTasksError, OSError):
                flush()
                raise
            flush()
        return self._result()

    def _result(self) -> Predicted:
        """Returns the counts with the messages on them."""
        counts = self._counts
        truncation = Truncation(rows=counts.rows - counts.resumed, cut_rows=counts.truncated)
        cuts = [note for task in self._tasks.values() for note in task.cut_notes(truncation)]
        return replace(
            counts, cuts=tuple(dict.fromkeys(cuts)), warnings=counts.unknown.warnings(vocabulary_name(self.model))
        )

    @property
    def _chunk_size(self) -> int | None:
        """Number of rows of a chunk. None puts all rows into one chunk."""
        return self.model.chunk_rows(explain=self.writing.explain)

    def _stream_writer(self) -> Callable[[Chunk], None]:
        """Returns the function that writes a chunk to the stream of the output."""
        stream = cast("IO[bytes]", self.destination.stream)
        writer = StreamWriter(stream, form=self.destination.form, raw=self.writing.csv_raw)
        return lambda chunk: writer.write(chunk.lines)

    def _take(self, chunk: Chunk, write: Callable[[Chunk], None], total: int | None) -> None:
        """Writes a chunk and counts it."""
        write(chunk)
        self._counts = self._counts.plus(chunk.counts)
        self.progress(self._counts.rows, total)

    def _predict_chunks(
        self, rows: Iterator[Row], total: int, write: Callable[[Chunk], None], completed: int = 0
    ) -> None:
        """Predicts the remaining rows in chunks. The first process writes them in order."""
        rank, world, size = self.accelerator.process_index, self.accelerator.num_processes, self._chunk_size
        rows = islice(rows, completed, None)
        chunks = iter(lambda: list(islice(rows, size)), [])

        def take(results: Sequence[Chunk]) -> None:
            for chunk in results:
                self._take(chunk, write, total)

        if self.accelerator.is_main_process:
            self.progress(completed, total)
        while group := list(islice(chunks, world)):
            results = gather_object([self._predict_chunk(chunk) for chunk in group[rank : rank + 1]])
            broadcast_from_main(self.accelerator, take, results)
        self._counts = broadcast_from_main(self.accelerator, lambda: self._counts)

    def _write_file(self, table: RowTable, rows: Iterator[Row], total: int, path: Path) -> None:
        """Keeps the lines of completed chunks next to the output until all are complete."""
        size = total if self._chunk_size is None else self._chunk_size
        with ExitStack() as stack:
            partial = PartialOutput(path, self._metadata(table, size), chunk=max(size, 1), total=total)

            def resume() -> int:
                return stack.enter_context(partial).rows

            completed = broadcast_from_main(self.accelerator, resume)
            self._counts = replace(self._counts, rows=completed, resumed=completed)
            self._predict_chunks(rows, total, lambda chunk: partial.append(chunk.lines), completed)

            def finish() -> None:
                vectors: dict[str, int] = {}
                for task in self._tasks.values():
                    vectors |= task.output.vector_columns(self.model.config)
                raw = self.writing.csv_raw
                finalize_output(partial.path, path, form=self.destination.form, raw=raw, vectors=vectors)

            broadcast_from_main(self.accelerator, finish)

    def _metadata(self, table: RowTable, size: int) -> dict[str, Any]:
        """Returns facts that must be equal to resume, without the number of processes."""
        writing, keep = self.writing, self.writing.keep_columns
        settings = {
            "columns": dict(self._renames),
            "part_rows": size,
            "keep_columns": keep if isinstance(keep, str) else list(keep),
            "on_error": writing.on_error,
            "logits": writing.logits,
            "explain": writing.explain,
            "lowest_score": self.writing.abstain_below,
            "dtype": self.dtype,
            "device": self.model.device.type,
        }
        versions = {name: installed_version(name) for name in _VERSIONED} | {"python": python_version()}
        model = model_fingerprint(self.model)
        return {"input": table.fingerprint, "model": model, "settings": settings, "versions": versions}

    def _render(self, rows: Iterator[Row], total: int, path: Path) -> None:
        """Writes the files of a task's format, the requested file last."""
        output, form = self.model.one_task().task.output, self.destination.form
        file_format, all_rows, chunks = output.files[form], list(rows), list[Chunk]()
        notes = broadcast_from_main(self.accelerator, file_format.check, output, form, all_rows)
        self._predict_chunks(iter(all_rows), total, chunks.append)

        def write() -> None:
            pairs = [pair for chunk in chunks for pair in chunk.pairs]
            predictions = [by_head[""] for _, by_head in pairs]
            files = file_format.render(output, form, predictions, [row for row, _ in pairs])
            for name in sorted(files, reverse=True):
                with whole_file(sibling_output(path, name) if name else path) as file:
                    file.write(files[name])

        broadcast_from_main(self.accelerator, write)
        self._counts = replace(self._counts, notes=(*self._counts.notes, *notes))

    def _predict_chunk(self, rows: Sequence[Row]) -> Chunk:
        inputs = stored_names(self.model.input_columns)
        canonical = [{name: row[name] for name in inputs if row.get(name) is not None} for row in rows]
        by_head, features = self.model.predict_by_head(
            canonical, forward_fn=self._forward_fn, logits=self.writing.logits, explain=self.writing.explain
        )
        if self.writing.abstain_below:
            by_head = {"": [without_label(each, self.writing.abstain_below) for each in by_head[""]]}
        token_ids = np.fromiter(chain.from_iterable(feature["input_ids"] for feature in features), np.int64)
        counts = Predicted(
            rows=len(rows),
            truncated=len({feature["row"] for feature in features if feature.get("lost_tokens", 0) > 0}),
            unknown=UnknownTokens.of([token_ids], self.model.require_tokenizer()),
        )
        pairs = [(row, predictions_of_row(by_head, number)) for number, row in enumerate(rows)]
        if self.destination.rendered:
            return Chunk(counts, b"", pairs)
        return Chunk(counts, "".join(self._line(*pair) for pair in pairs).encode(), ())

    def _line(self, row: Row, predictions: Mapping[str, Prediction]) -> str:
        """Returns a row as JSON, the kept columns before the predictions of the heads."""
        keep, kept = self.writing.keep_columns, row.get(PASSTHROUGH, row)
        if keep == "none":
            kept = {}
        elif isinstance(kept, str):
            kept = json.loads(kept)
        else:  # rows in memory
            kept = {k: plain(v) for k, v in kept.items() if keep == "all" or k in keep}
        encode_vector = vector_text if self.destination.form in ("parquet", "npy") else float_list
        content = written_columns(self._tasks, predictions, encode_vector)
        taken = self._reserved.union(content)
        repeated = {name for name in stored_names(self.model.input_columns) if self._renames.get(name, name) == name}
        output: dict[str, Any] = {LINE: row[LINE]} if self.writing.on_error == "skip" else {}
        for name, value in kept.items():
            if name not in content or name not in repeated:
                output[f"{INPUT}{name}" if name in output else passthrough_name(name, taken)] = value
        return json_line(output | content)
