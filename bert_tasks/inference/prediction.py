"""Prediction of files, tables and streams, which is returned or written.

``predict`` returns predictions, and ``predict_file`` writes them. Both read rows, cut them into batches, and predict
the batches with a ``Predictor``. The predictions that are written go to a sink (sinks.py).
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from platform import python_version
from typing import IO, Any, Literal, Unpack, cast

from accelerate.utils import gather_object

from bert_tasks.checkpoints.load import tensors_digest
from bert_tasks.data.columns import RECORD, REJECT, Row
from bert_tasks.data.features import Truncation, tokenizer_content
from bert_tasks.data.formats import named_format
from bert_tasks.data.issues import RowIssue, RowIssues
from bert_tasks.data.options import ReadingArguments, ReadOptions
from bert_tasks.data.reading import index_of
from bert_tasks.data.rows import Rows
from bert_tasks.data.split_column import rows_of_split
from bert_tasks.data.trained_reading import options_for_file
from bert_tasks.data.unknown_tokens import UnknownTokens
from bert_tasks.distributed import broadcast_from_main, check_agreement, main_process_first, make_accelerator
from bert_tasks.environment import installed_version
from bert_tasks.errors import BertTasksError, UsageError
from bert_tasks.inference.precision import DType, default_device
from bert_tasks.inference.predictor import Predictor
from bert_tasks.inference.sinks import LineEncoder, LineFile, LineStream, Sink, TaskFiles
from bert_tasks.inference.streams import STDIN_NAME, detected, has_descriptor, stored_input, stream_rows
from bert_tasks.inference.writing import (
    LINE,
    STANDARD,
    OutputDestination,
    Progress,
    WriteOptions,
    Written,
    reject_line,
    write_rejects,
)
from bert_tasks.model.features import vocabulary_name
from bert_tasks.model.inputs import Data, in_memory, load_table, load_trained, reading_for_prediction
from bert_tasks.model.multitask import AnyModel
from bert_tasks.model.prediction import prediction_of_row
from bert_tasks.model.task_model import TaskModel
from bert_tasks.outputs.notebook import Predictions
from bert_tasks.outputs.prediction import PredictionT
from bert_tasks.storage import sha256_json
from bert_tasks.tasks.base import Task

# The packages whose versions must be equal for an output to be resumed.
_VERSIONED = ("bert-tasks", "torch", "transformers", "tokenizers", "onnxruntime")


def predict(
    model: TaskModel[PredictionT] | AnyModel | str | Path,
    data: Data,
    *,
    task: str | type[Task[PredictionT]] | None = None,
    settings: Mapping[str, Any] | None = None,
    revision: str | None = None,
    adapter: str | Path | None = None,
    dtype: DType = "float32",
    logits: bool = False,
    explain: bool = False,
    abstain_below: float = 0.0,
    **reading: Unpack[ReadingArguments],
) -> Predictions[PredictionT]:
    """Returns one prediction for each row, in row order.

    It loads the model, reads the rows of a file or takes those in memory, and runs on a GPU if there is one. If you
    predict repeatedly, open the model once and call ``TaskModel.predict``. All predictions are held in memory:
    ``predict_file`` writes the predictions of data of any size.

    Args:
        model: A model or its name. The folder of a run stands for its best model.
        data: A file, or rows as ``TaskModel.predict`` takes them.
        task: Name or class of the task. See ``evaluate``.
        settings: Fields of the task to change. See ``evaluate``.
        revision: See ``TaskModel.from_pretrained``.
        adapter: See ``TaskModel.from_pretrained``.
        dtype: Precision of the encoder. See ``evaluate``.
        logits: True to return the logits, too. See ``TaskModel.predict``.
        explain: True to explain the predictions. See ``TaskModel.predict``.
        abstain_below: Lowest score, from 0 to 1, with which one label or choice is kept. Below it the label is None, so
            that a person can decide. Default: 0, which keeps all.
        reading: Fields of `ReadOptions`. Default: columns with the names of the training data.

    Returns:
        The predictions, one for each row, because rows in memory are never skipped. ``to_frame`` of them has the index
        of a DataFrame or Series. A model of several tasks returns a dict for each row, as ``MultiTaskModel.predict``
        does.

    Raises:
        DataError: Rows cannot be used. The message names all of them.
        UsageError: An option is unknown, or the model cannot compute what it asks for.
        CheckpointError: The model cannot be loaded.

    Examples:
        >>> predict("runs/first", "test.csv")[0].label
        'complaint'
    """
    options = ReadOptions.from_arguments(predict, reading)
    model = load_trained(
        model, data=data, reading=options, task=task, settings=settings, revision=revision, adapter=adapter
    )
    model.to(default_device())  # in place, as modules of torch are moved
    predictor = Predictor(model, dtype=dtype, logits=logits, explain=explain, abstain_below=abstain_below)
    options = reading_for_prediction(model, data, options)
    table = load_table(data, model.row_columns, names=model.columns, reading=options, labels="unread")
    predictions: list[Any] = []
    for rows in predictor.batches(table):
        predictions += map(prediction_of_row, predictor.predict_batch(rows).predictions)
    return Predictions(predictions, index=index_of(data))


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
    logits: bool = False,
    explain: bool = False,
    abstain_below: float = 0.0,
    reading: ReadOptions | None = None,
    writing: WriteOptions | None = None,
    progress: Progress | None = None,
) -> Written:
    """Writes one prediction for each row of data of any size, in row order.

    The output is .jsonl, .csv, .tsv or .parquet, which are written batch by batch, so that memory does not depend on
    the number of rows. It may also have a format of the task, which holds all predictions in memory: .conll, or .json
    for span extraction (the form of SQuAD). The output appears complete or not at all. Until then its rows are in a
    folder with the end ``.parts`` next to it, and the same call resumes an interrupted prediction. Under ``accelerate
    launch`` several processes divide the rows, and the first one writes.

    Args:
        model: A model or its name. The folder of a run stands for its best model.
        data: A file, rows as ``TaskModel.predict`` takes them, or "-" for standard input with JSON lines or one text a
            line, unless the format of ``reading`` is another.
        output: A file, "-" for standard output, or an open binary file.
        task: Name or class of the task. See ``evaluate``.
        settings: Fields of the task to change. See ``evaluate``.
        revision: See ``TaskModel.from_pretrained``.
        adapter: See ``TaskModel.from_pretrained``.
        dtype: Precision of the encoder. See ``evaluate``.
        logits: True to write the logits, too.
        explain: True to explain the predictions. See ``TaskModel.predict``.
        abstain_below: Lowest score with which a label is kept. See ``predict``.
        reading: How the data are read. Default: columns with the names of the training data.
        writing: Which columns and rows are written, and in which form. Default: all columns of the input and the
            prediction, and no row may be unusable.
        progress: Called on the first process with the number of completed rows and of all rows, which is None for a
            stream.

    Returns:
        The number of rows, and messages about them.

    Raises:
        DataError: Rows cannot be used. The message names all of them.
        UsageError: The extension of the output is unknown, another process is writing it, or an option does not fit.
        CheckpointError: The model cannot be loaded.

    Examples:
        >>> predict_file("runs/first", "test.csv", "answers.jsonl").rows
        5
    """
    if reading is None:
        reading = ReadOptions()
    if writing is None:
        writing = WriteOptions()
    for name, options, expected in (("reading", reading, ReadOptions), ("writing", writing, WriteOptions)):
        if not isinstance(options, expected):
            raise UsageError(f"{name} is {options!r}, expected {expected.__name__}(...)")
    # All that can be checked without the model is checked before it is loaded, which may take a minute.
    task_class: type[Task] | None = None
    if isinstance(model, TaskModel):
        task_class = type(model.task)
    elif isinstance(task, type):
        task_class = task
    destination = OutputDestination(output, data, writing, task_class)
    can_stream = reading.format is None or data != STANDARD or named_format(reading.format).can_stream
    accelerator = make_accelerator()
    broadcast_from_main(accelerator, destination.check_places)
    is_standard = isinstance(data, str) and data == STANDARD
    if is_standard and sys.stdin is None:
        raise UsageError("standard input is closed. Name a file, or send rows through a pipe")
    if is_standard and accelerator.num_processes > 1:
        raise UsageError("several processes cannot share standard input. Write it to a file first")
    model = load_trained(
        model, data=data, reading=reading, task=task, settings=settings, revision=revision, adapter=adapter
    ).to(accelerator.device)
    destination.check_model(model, logits=logits, explain=explain)
    predictor = Predictor(model, dtype=dtype, logits=logits, explain=explain, abstain_below=abstain_below)
    run = PredictionRun(predictor, destination, writing, progress)
    if not is_standard:
        return run.predict_table(data, reading, "rows")
    if destination.stream is not None and can_stream and has_descriptor(sys.stdin.buffer):
        return run.predict_stream(sys.stdin.buffer, reading)
    with stored_input(sys.stdin.buffer) as stored:
        return run.predict_table(stored, detected(reading, stored, model), STDIN_NAME)


class PredictionRun:
    """One prediction that is written, on one process or several.

    Args:
        predictor: The model, and what is computed for each row.
        destination: The output.
        writing: Options of the output.
        progress: See ``predict_file``.
    """

    def __init__(
        self,
        predictor: Predictor,
        destination: OutputDestination,
        writing: WriteOptions,
        progress: Progress | None = None,
    ) -> None:
        self._predictor, self._destination, self._writing = predictor, destination, writing
        self._progress = progress
        self._model = predictor.model
        self._accelerator = make_accelerator()
        self._written = Written(rejects=destination.rejects)

    def predict_table(self, data: Data, reading: ReadOptions, name: str) -> Written:
        """Predicts the rows of a file or of memory, which are called ``name`` in messages."""
        destination = self._destination
        records: Sequence[Row] | None = None  # rows in memory, as they were given
        if isinstance(data, str | Path):
            reading = reading_for_prediction(self._model, data, reading)
            reading = options_for_file(reading, data, self._model.columns, self._model.input_columns)
        elif not isinstance(data, Rows):
            records = in_memory(data, self._model.row_columns)
            if reading.split_column is not None:
                records = rows_of_split(records, reading.split_column, reading.split, name)
            data = records
        table = self._read_table(data, reading, name)
        rejected = 0
        if destination.rejects is not None:
            rejected = broadcast_from_main(self._accelerator, write_rejects, table, destination.rejects)
        self._written = replace(self._written, rejected=rejected, notes=table.notes)
        # Generators, because the table is a file whose rows need not fit into memory.
        rows: Iterable[Row]
        if records is None:
            rows = (row for row in table if row.get(REJECT) is None)
        else:
            rows = ({**row, RECORD: record} for row, record in zip(table, records, strict=True))
        total = len(table) - rejected
        sink: Sink
        if destination.rendered:
            rows = list(rows)
            sink = TaskFiles(cast("Path", destination.path), destination.form, self._model)
            notes = broadcast_from_main(self._accelerator, sink.check, rows)
            self._written = replace(self._written, notes=(*table.notes, *notes))
        elif destination.path is None:
            sink = LineStream(cast("IO[bytes]", destination.stream), self._encoder(reading.columns))
        else:
            # A resumed output keeps whole batches, so their size belongs to what must be equal.
            batch_rows = self._predictor.batch_rows
            if batch_rows is None:  # all rows are one batch
                batch_rows = total
            sink = LineFile(
                destination.path,
                self._encoder(reading.columns),
                metadata=self._metadata(table, reading.columns, batch_rows),
                batch_rows=max(batch_rows, 1),
                total=total,
            )
        self._fill(sink, rows, total)
        return self._result()

    def _read_table(self, data: Data, reading: ReadOptions, name: str) -> Rows:
        """Reads and checks all rows, with the columns that the output keeps."""
        model, destination = self._model, self._destination
        passthrough = self._writing.keep_columns
        labels: Literal["optional", "unread"] = "unread"
        if destination.rendered:
            file_format = model.one_task().task.output.files[destination.form]
            passthrough = "all" if file_format.with_other_columns else "none"
            if file_format.with_labels:
                labels = "optional"
        with main_process_first(self._accelerator):
            table = load_table(
                data,
                model.row_columns,
                known_labels=model.labels,
                names=model.columns,
                reading=reading,
                labels=labels,
                name=name,
                passthrough=passthrough,
                skip_errors=self._writing.on_error == "skip",
            )
        check_agreement({"the content of the data": table.fingerprint}, found_in_data=("the content",))
        return table

    def predict_stream(self, source: IO[bytes], reading: ReadOptions) -> Written:
        """Predicts rows as they come. A batch is written before the next one is predicted.

        Raises:
            RowIssues: At the first row that cannot be used (unless such rows are skipped), after the rows before it
                were written.
            DataError: There are no rows, or a column is missing.
            ClosedPipeError: The output's reader has closed it.
        """
        size, pending = self._predictor.batch_rows, list[Row]()
        sink: LineStream

        def flush() -> None:
            rows = pending.copy()
            pending.clear()
            if rows:
                self._predict([rows], sink, None)

        def before_wait() -> None:
            if size is not None:  # else the rows that come later decide the features of these rows
                flush()

        with (
            self._rejects_file() as file,
            stream_rows(source, self._model, reading, self._writing.keep_columns, before_wait) as (rows, renames),
        ):
            sink = LineStream(cast("IO[bytes]", self._destination.stream), self._encoder(renames))
            try:
                for row in rows:
                    fault = row.get(REJECT)
                    if fault is None:
                        pending.append(row)
                    elif file is None:
                        errors = RowIssues()
                        errors.add(STDIN_NAME, RowIssue(what=json.loads(fault)["reason"], line=row[LINE]))
                        raise errors
                    else:
                        file.write(reject_line(fault))
                        self._written = replace(self._written, rejected=self._written.rejected + 1)
                    if len(pending) == size:
                        flush()
            except (BertTasksError, OSError):
                flush()  # the rows before the error are written
                raise
            flush()
        return self._result()

    def _rejects_file(self) -> AbstractContextManager[IO[str] | None]:
        """Opens the file for the skipped rows of a stream, which has each line as soon as it is known."""
        rejects = self._destination.rejects
        if rejects is None:
            return nullcontext()
        return rejects.open("w", encoding="utf-8", buffering=1)

    def _encoder(self, renames: Mapping[str, str] | None) -> LineEncoder:
        """Returns what makes the lines of the output. ``renames`` are the task's columns -> those of the data."""
        if renames is None:
            renames = {}
        return LineEncoder(self._model, self._writing, form=self._destination.form, renames=renames)

    def _fill(self, sink: Sink, rows: Iterable[Row], total: int) -> None:
        """Predicts all rows that a sink does not have yet. Only the first process opens and completes the sink."""
        with ExitStack() as stack:

            def open_sink() -> int:
                return stack.enter_context(sink).completed

            completed = broadcast_from_main(self._accelerator, open_sink)
            self._written = replace(self._written, rows=completed, resumed=completed)
            if self._accelerator.is_main_process:
                self._show_progress(total)
            self._predict(self._predictor.batches(islice(rows, completed, None)), sink, total)
            broadcast_from_main(self._accelerator, sink.finish)
        self._written = broadcast_from_main(self._accelerator, lambda: self._written)

    def _predict(self, batches: Iterable[Sequence[Row]], sink: Sink, total: int | None) -> None:
        """Predicts batches. Each process takes every n-th one, and the first process writes all of them in order."""
        rank, world = self._accelerator.process_index, self._accelerator.num_processes
        remaining = iter(batches)
        # All processes take part in each gather, also those for which the last group has no batch.
        while group := list(islice(remaining, world)):
            results = gather_object([self._encoded(rows, sink) for rows in group[rank : rank + 1]])
            broadcast_from_main(self._accelerator, self._append, results, sink, total)

    def _encoded(self, rows: Sequence[Row], sink: Sink) -> tuple[Written, Any]:
        """Returns the counts of a batch, and its predictions as the sink takes them."""
        batch = self._predictor.predict_batch(rows)
        counts = Written(rows=len(rows), truncated=batch.truncated, unknown=batch.unknown, labels=batch.labels)
        return counts, sink.encode(batch)

    def _append(self, results: Sequence[tuple[Written, Any]], sink: Sink, total: int | None) -> None:
        for counts, encoded in results:
            sink.append(encoded)
            written = self._written
            self._written = replace(
                written,
                rows=written.rows + counts.rows,
                truncated=written.truncated + counts.truncated,
                unknown=UnknownTokens.total([written.unknown, counts.unknown]),
                labels=written.labels + counts.labels,
            )
            self._show_progress(total)

    def _show_progress(self, total: int | None) -> None:
        if self._progress is not None:
            self._progress(self._written.rows, total)

    def _result(self) -> Written:
        """Returns the counts with the messages on them."""
        written = self._written
        truncation = Truncation(rows=written.rows - written.resumed, cut_rows=written.truncated)
        warnings: list[str] = []
        for task in self._model.tasks.values():
            warnings += task.cut_notes(truncation)
        warnings += written.unknown.warnings(vocabulary_name(self._model))
        # Tasks that read the same texts may give the same warning.
        return replace(written, warnings=tuple(dict.fromkeys(warnings)))

    def _metadata(self, table: Rows, renames: Mapping[str, str] | None, batch_rows: int) -> dict[str, Any]:
        """Returns what must be equal to resume, which the number of processes need not be."""
        predictor, keep = self._predictor, self._writing.keep_columns
        columns = {} if renames is None else dict(renames)
        keep_columns = keep if isinstance(keep, str) else list(keep)
        settings = {
            "columns": columns,
            "part_rows": batch_rows,
            "keep_columns": keep_columns,
            "on_error": self._writing.on_error,
            "logits": predictor.logits,
            "explain": predictor.explain,
            "lowest_score": predictor.abstain_below,
            "dtype": predictor.dtype,
            "device": self._model.device.type,
        }
        versions = {name: installed_version(name) for name in _VERSIONED} | {"python": python_version()}
        model = model_fingerprint(self._model)
        return {"input": table.fingerprint, "model": model, "settings": settings, "versions": versions}


def model_fingerprint(model: AnyModel) -> str:
    """Returns a sha256 over weights or graph, task, configuration and tokenizer.

    The weights themselves are hashed, because a model in memory may have been trained since it was loaded.
    """
    weights = [tensors_digest(model.state_dict()), getattr(model, "graph_sha256", None)]
    about = []
    for name, task in model.tasks.items():
        task_class = f"{type(task).__module__}:{type(task).__qualname__}"
        about.append([name, task_class, task.output.labels, task.settings(), task.fitted_values()])
    return sha256_json(weights, about, model.hf_config, tokenizer_content(model.require_tokenizer()))
