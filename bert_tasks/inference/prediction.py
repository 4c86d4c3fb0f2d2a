"""Prediction over files, tables and streams, on one or many processes.

Owns how an output comes about: rows are read, predicted chunk by chunk, and appear all at once under the output's name,
or in a stream as they come. Owns also which process takes which chunk of a table: a chunk is one of the model's own, so
its predictions do not depend on who makes them. A format of a task, such as CoNLL columns, is made of all predictions
at once, in memory.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from platform import python_version
from typing import IO, Any, Literal, TypeVar, Unpack, cast, overload

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from bert_tasks.data.columns import FAULT, PassthroughColumns
from bert_tasks.data.formats import named_format
from bert_tasks.data.readers import ReadingArguments, ReadOptions
from bert_tasks.data.table import RowTable, Truncation
from bert_tasks.data.unknown_tokens import UnknownTokens
from bert_tasks.data.writers import vector_text, whole_file
from bert_tasks.distributed import broadcast_from_main, main_process_first, make_accelerator
from bert_tasks.environment import installed_version
from bert_tasks.errors import DataError, UsageError
from bert_tasks.inference.output import (
    STANDARD,
    Chunk,
    ChunkResult,
    OutputDestination,
    Predicted,
    Predictor,
    Progress,
    StreamWriter,
    UnfinishedOutput,
    WriteOptions,
    finalize_output,
    model_fingerprint,
    output_destination,
    sibling_output,
    unfinished_output,
    write_rejects,
)
from bert_tasks.inference.streams import (
    STDIN,
    STDIN_NAME,
    WHOLE_FORMATS,
    can_open,
    detected,
    predict_stream,
    stored_input,
)
from bert_tasks.model import task_model
from bert_tasks.model.explanation import explainable_task
from bert_tasks.model.inputs import Data, in_memory, load_table, load_trained, vocabulary_name
from bert_tasks.model.precision import DType, logits_of
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks.base import PredictionT, Task, float_list

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
    return cast("list[PredictionT]", list(loaded.predict_rows(table, run=run, logits=logits, explain=explain)))


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
    own = type(model.task) if isinstance(model, TaskModel) else task
    destination = output_destination(output, data, writing, own if isinstance(own, type) else None)
    is_standard = isinstance(data, str) and data == STANDARD
    format = None if options.format is None or not is_standard else named_format(options.format).name
    accelerator = make_accelerator()
    broadcast_from_main(accelerator, partial(destination.check_places, data))
    if is_standard and sys.stdin is None:
        raise UsageError("standard input is closed: name a file, or send rows through a pipe")
    if is_standard and accelerator.num_processes > 1:
        raise UsageError("several processes cannot share standard input: write it to a file first")
    stated: dict[str, Any] = {"task": task, "settings": settings, "revision": revision}
    loaded = load_trained(model, data=data, reading=options, ensembles=True, **stated).to(accelerator.device)
    destination.check_task(loaded.task, data, writing)
    if writing.explain:
        explainable_task(loaded, loaded.task, dtype)
    predictor = Predictor(
        model=loaded,
        run=logits_of(loaded, dtype),
        writing=writing,
        encode_vector=vector_text if destination.form in ("parquet", "npy") else float_list,
        names=options.columns,
    )
    if is_standard and destination.stream is not None and format not in WHOLE_FORMATS and can_open(STDIN):
        writer = StreamWriter(destination.stream, form=destination.form, raw=writing.csv_raw)
        predicted = predict_stream(predictor, options, writer, destination.rejects, STDIN, progress)
    else:
        run = _TableRun(
            accelerator=accelerator, predictor=predictor, destination=destination, dtype=dtype, progress=progress
        )
        with stored_input(sys.stdin.buffer, format) if is_standard else nullcontext() as stored:
            if stored is None:
                predicted = run.predict(data, options, "rows")
            else:
                predicted = run.predict(stored, detected(options, stored, loaded), STDIN_NAME)
    cuts = loaded.task.cut_notes(Truncation(rows=predicted.rows, cut_rows=predicted.truncated))
    warnings = predicted.unknown.warnings(vocabulary_name(loaded))
    return replace(predicted, rejects=destination.rejects, cuts=cuts, warnings=warnings)


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


@dataclass(frozen=True, kw_only=True)
class _TableRun:
    """One prediction of a table: the model at work, where its rows go, and the processes that share them."""

    accelerator: Accelerator
    predictor: Predictor
    destination: OutputDestination
    dtype: DType
    progress: Progress

    def predict(self, data: Data, options: ReadOptions, name: str) -> Predicted:
        """Predicts the rows of a file or of memory; ``name`` is theirs in messages."""
        predictor, destination, task = self.predictor, self.destination, self.predictor.model.task
        given = None
        if not isinstance(data, str | Path | RowTable):
            data = given = in_memory(data, task)
        names = predictor.model.columns
        if isinstance(data, str | Path):
            options = options.for_file(data, names, [column for column in task.columns if not column.is_label])
        run = replace(self, predictor=replace(predictor, given=given, names=options.columns))
        with main_process_first(self.accelerator):
            table = load_table(
                data,
                task,
                names=names,
                reading=options,
                labels="optional" if destination.rendered and task.renders_labels else "unread",
                name=name,
                passthrough="none" if destination.rendered else predictor.writing.keep_columns,
                skip_faulty=predictor.writing.on_error == "skip",
            )
        fingerprints = gather_object([table.fingerprint])
        other = next((rank for rank, one in enumerate(fingerprints) if one != fingerprints[0]), None)
        if other is not None:
            error = DataError(
                f"{table.source}: process {other} reads other rows than process 0; give all processes the same file"
            )
            error.collective = True
            raise error
        # Where a row's features depend on the rows around it, all rows are one chunk.
        chunk = task_model.EXPLAINED_ROWS if predictor.writing.explain else task_model.CHUNK_ROWS
        size = max(len(table), 1) if task.needs_document_context else chunk
        if destination.stream is not None:
            predicted = run._to_stream(table, size, destination.stream)
        elif destination.path is None:
            raise UsageError("an output is a file or a stream")
        elif destination.rendered:
            predicted = run._to_rendered_files(table, size, destination.path)
        else:
            predicted = run._to_file(table, size, destination.path)
        return replace(predicted, notes=(*table.notes, *predicted.notes))

    def _to_stream(self, table: RowTable, size: int, stream: IO[bytes]) -> Predicted:
        """The first process writes chunks as they come, in row order."""
        writer = StreamWriter(stream, form=self.destination.form, raw=self.predictor.writing.csv_raw)
        rows = truncated = 0
        unknown = UnknownTokens()

        def write(chunks: Sequence[Chunk]) -> None:
            nonlocal rows, truncated, unknown
            for chunk in chunks:
                writer.write(chunk.content)
                rows, truncated = rows + chunk.rows, truncated + chunk.truncated
                unknown = UnknownTokens.total([unknown, chunk.unknown])
                self.progress(rows, len(table))

        if self.destination.rejects is not None:
            broadcast_from_main(self.accelerator, partial(write_rejects, table, self.destination.rejects))
        self.progress(0, len(table))
        map_chunks_distributed(self.accelerator, table, size=size, work=self.predictor.output_chunk, take=write)
        return Predicted(rows=rows, truncated=truncated, rejected=len(table) - rows, unknown=unknown)

    def _to_file(self, table: RowTable, size: int, path: Path) -> Predicted:
        """The first process keeps completed chunks beside the output until all of them are there."""
        predictor, accelerator, writing = self.predictor, self.accelerator, self.predictor.writing
        keep = writing.keep_columns
        opened: list[UnfinishedOutput] = []  # on the first process: it cannot be sent to others
        with ExitStack() as stack:

            def open_unfinished() -> int:
                settings = {
                    "columns": None if predictor.names is None else dict(predictor.names),
                    "part_rows": size,
                    "keep_columns": keep if isinstance(keep, str) else list(keep),
                    "on_error": writing.on_error,
                    "logits": writing.logits,
                    "explain": writing.explain,
                    "dtype": self.dtype,
                    "device": predictor.model.device.type,
                }
                # What must be equal for two attempts to write the same output; the number of processes does not count.
                metadata = {
                    "input": table.fingerprint,
                    "model": model_fingerprint(predictor.model),
                    "settings": settings,
                    "versions": {name: installed_version(name) for name in _VERSIONED} | {"python": python_version()},
                }
                opened.append(stack.enter_context(unfinished_output(path, metadata)))
                self.progress(opened[0].resumed, len(table))
                return len(opened[0].entries)

            completed = broadcast_from_main(accelerator, open_unfinished)

            def append(chunks: Sequence[Chunk]) -> None:
                opened[0].append(chunks)
                self.progress(sum(entry.rows for entry in opened[0].entries), len(table))

            map_chunks_distributed(
                accelerator, table, size=size, completed=completed, work=predictor.output_chunk, take=append
            )

            def finalize() -> Predicted:
                unfinished = opened[0]
                if self.destination.rejects is not None:
                    write_rejects(table, self.destination.rejects)
                vectors = predictor.model.task.vector_columns(predictor.model.config)
                finalize_output(
                    unfinished.lines, path, form=self.destination.form, raw=writing.csv_raw, vectors=vectors
                )
                return Predicted(
                    rows=sum(entry.rows for entry in unfinished.entries),
                    truncated=sum(entry.truncated for entry in unfinished.entries),
                    rejected=sum(entry.rejected for entry in unfinished.entries),
                    resumed=unfinished.resumed,
                    unknown=UnknownTokens.total(entry.unknown for entry in unfinished.entries),
                )

            return broadcast_from_main(accelerator, finalize)

    def _to_rendered_files(self, table: RowTable, size: int, path: Path) -> Predicted:
        """Writes the files of a task's format, made of all predictions; the one asked for appears last.

        Raises:
            DataError: the format has no place for these rows; before any is predicted.
        """
        task, destination = self.predictor.model.task, self.destination
        results: list[ChunkResult] = []

        def collect(chunks: Sequence[ChunkResult]) -> None:
            results.extend(chunks)
            self.progress(sum(len(result.rows) for result in results), len(table))

        usable = (row for row in table if row.get(FAULT) is None)
        notes = broadcast_from_main(self.accelerator, lambda: task.check_render(destination.form, usable))
        self.progress(0, len(table))
        map_chunks_distributed(self.accelerator, table, size=size, work=self.predictor.predict, take=collect)

        def write() -> Predicted:
            if destination.rejects is not None:
                write_rejects(table, destination.rejects)
            predictions = [prediction for result in results for prediction in result.predictions]
            rows = [row for result in results for row in result.rows]
            files = task.render(destination.form, predictions, rows)
            for name in sorted(files, reverse=True):
                with whole_file(sibling_output(path, name) if name else path) as file:
                    file.write(files[name])
            truncated = sum(result.truncated for result in results)
            unknown = UnknownTokens.total(result.unknown for result in results)
            rejected = len(table) - len(rows)
            return Predicted(rows=len(rows), truncated=truncated, rejected=rejected, notes=notes, unknown=unknown)

        return broadcast_from_main(self.accelerator, write)
