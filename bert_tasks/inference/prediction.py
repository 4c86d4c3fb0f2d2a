"""Predictions in a format of their task: CoNLL columns, SQuAD's files.

Owns that such an output is made of all predictions at once, in memory. Must not know the formats.

Prediction over files, tables and streams, on one or many processes.

Owns how an output comes about: rows are read, predicted part by part, and appear whole under its name, or in a stream
as they come. Must not know training.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, cast, overload

import torch
from accelerate import Accelerator

from bert_tasks.data.columns import FAULT, PassthroughColumns
from bert_tasks.data.features import Cuts
from bert_tasks.data.readers import ReadOptions
from bert_tasks.data.table import RowTable
from bert_tasks.data.writers import whole_file
from bert_tasks.distributed import broadcast_from_main, main_process_first, make_accelerator
from bert_tasks.errors import UsageError
from bert_tasks.inference.output import (
    STANDARD,
    OutputDestination,
    Part,
    Parts,
    Predicted,
    Progress,
    StreamWriter,
    WriteOptions,
    beside_output,
    finish,
    prediction_facts,
    target_of,
    unfinished,
    write_rejects,
)
from bert_tasks.inference.predictor import (
    STDIN,
    STDIN_NAME,
    ChunkResult,
    Predictor,
    can_open,
    can_stream,
    check_same_rows,
    checked_format,
    detected,
    map_chunks_distributed,
    part_rows,
    predict_stream,
    stored_input,
)
from bert_tasks.model.inputs import Data, as_trained, in_memory, load_table
from bert_tasks.model.onnx import DType, logits_of
from bert_tasks.model.predicting import predict_rows
from bert_tasks.model.task_model import TaskModel
from bert_tasks.run_dir.trained import load_trained
from bert_tasks.tasks.base import PredictionT, Task


def predict_rendered(
    accelerator: Accelerator,
    work: Predictor,
    table: RowTable,
    target: OutputDestination,
    path: Path,
    progress: Progress,
) -> Predicted:
    """Predicts all rows and writes the files of the target's format; the one asked for appears last.

    Raises:
        DataError: the format has no place for these rows; before any is predicted.
    """
    found: list[ChunkResult] = []
    size = part_rows(work.model.task, table)

    def take(parts: Sequence[ChunkResult]) -> None:
        found.extend(parts)
        progress(sum(len(part.rows) for part in found), len(table))

    good = (row for row in table if row.get(FAULT) is None)
    notes = broadcast_from_main(accelerator, lambda: work.model.task.check_render(target.form, good))
    progress(0, len(table))
    map_chunks_distributed(accelerator, table, size=size, done=0, work=work.done, take=take)

    def write() -> Predicted:
        if target.rejects is not None:
            write_rejects(table, target.rejects)
        predictions = [prediction for part in found for prediction in part.predictions]
        rows = [row for part in found for row in part.rows]
        files = work.model.task.render(target.form, predictions, rows)
        for name in sorted(files, reverse=True):
            with whole_file(beside_output(path, name) if name else path) as file:
                file.write(files[name])
        truncated = sum(part.truncated for part in found)
        return Predicted(rows=len(rows), truncated=truncated, rejected=len(table) - len(rows), notes=notes)

    return broadcast_from_main(accelerator, write)


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
    columns: Mapping[str, str] | None = None,
    format: str | None = None,
    delimiter: str | None = None,
    encoding: str | None = None,
    header: bool | None = None,
    label_separator: str | None = None,
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
    columns: Mapping[str, str] | None = None,
    format: str | None = None,
    delimiter: str | None = None,
    encoding: str | None = None,
    header: bool | None = None,
    label_separator: str | None = None,
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
    columns: Mapping[str, str] | None = None,
    format: str | None = None,
    delimiter: str | None = None,
    encoding: str | None = None,
    header: bool | None = None,
    label_separator: str | None = None,
) -> list[PredictionT] | int:
    """One prediction per row, in row order; with ``output`` they go there as they are made, and only their number back.

    The output is .jsonl, .csv, .tsv or .parquet, which a file of any size fits through; or a format of the task, which
    holds all predictions in memory: .conll (words, gold tags where there are any, tags), or .json for span extraction
    (predictions in SQuAD's form, beside NAME.json NAME.nbest.json and NAME.null_odds.json). A file appears whole or not
    at all; the same call goes on with one that was interrupted. On several processes each predicts its share, and the
    first one writes. Targets in the data are not needed. See ``evaluate`` for the other arguments.

    Args:
        data: a file, or rows as ``TaskModel.predict`` takes them; with an output also "-" for standard input: JSON
            lines or one text a line, else its ``format`` must be given.
        output: also "-" for standard output, or an open binary file: rows go there as they come.
        keep_columns: the input's columns written before the prediction: "all", "none", or names; see ``WriteOptions``.
        on_error: "skip" leaves rows of a file that cannot be used out, and says why in the file ``rejects`` (default:
            the output's name with .rejects.jsonl after it).
        csv_raw: write texts that a spreadsheet would take for a formula without the ``'`` in front.
        output_format: jsonl, csv, tsv or parquet, where the output's extension does not say it.
        logits: give the predictions their logits, and write them.

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
    )
    if output is None and writing != WriteOptions(logits=logits):
        raise UsageError("keep_columns, on_error, rejects, csv_raw and output_format are for an output: give one")
    options: dict[str, Any] = {"task": task, "settings": settings, "revision": revision}
    how = ReadOptions(
        columns=columns,
        format=format,
        delimiter=delimiter,
        encoding=encoding,
        header=header,
        label_separator=label_separator,
    )
    if output is not None:
        return predict_file(model, data, output, dtype=dtype, writing=writing, reading=how, **options).rows
    return _in_memory(load_trained(model, data=data, reading=how, **options), data, how, dtype, logits=logits)


def _in_memory(
    model: TaskModel[PredictionT], data: Data, reading: ReadOptions, dtype: DType, *, logits: bool
) -> list[PredictionT]:
    if torch.cuda.is_available():
        model.to("cuda")
    run = logits_of(model, dtype)
    data, reading = as_trained(model, data, reading)
    table = load_table(data, model.task, reading=reading, targets="unread")
    return cast("list[PredictionT]", list(predict_rows(model, table, run=run, logits=logits)))


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
    progress: Progress = lambda done, total: None,
) -> Predicted:
    """``predict`` with an output, and what became of it.

    Args:
        progress: is told, on the first process, how many rows are done, and of how many; None: of a stream.
    """
    how, writing = ReadOptions() if reading is None else reading, WriteOptions() if writing is None else writing
    own = type(model.task) if isinstance(model, TaskModel) else task
    target = target_of(output, data, writing, own if isinstance(own, type) else None)
    form = checked_format(how) if isinstance(data, str) and data == STANDARD else None
    accelerator = make_accelerator()
    broadcast_from_main(accelerator, partial(target.check_places, data))
    if data == STANDARD and sys.stdin is None:
        raise UsageError("standard input is closed: name a file, or send rows through a pipe")
    if data == STANDARD and accelerator.num_processes > 1:
        raise UsageError("standard input cannot be shared by several processes: write it to a file first")
    known: dict[str, Any] = {"task": task, "settings": settings, "revision": revision}
    loaded = load_trained(model, data=data, reading=how, **known).to(accelerator.device)
    target.check_task(loaded.task, data, logits=writing.logits)
    work = Predictor(model=loaded, run=logits_of(loaded, dtype), writing=writing, names=how.columns)
    job = _Job(accelerator=accelerator, work=work, target=target, dtype=dtype, progress=progress)
    if not isinstance(data, str) or data != STANDARD:
        return _predict_table(job, data, how, "rows")
    if target.stream is not None and can_stream(form) and can_open(STDIN):
        return _predict_stream(job, how, target.stream)
    with stored_input(sys.stdin.buffer, form) as path:
        return _predict_table(job, path, detected(how, path, loaded), STDIN_NAME)


@dataclass(frozen=True, kw_only=True)
class _Job:
    accelerator: Accelerator
    work: Predictor
    target: OutputDestination
    dtype: DType
    progress: Progress

    def told(self, done: Predicted, notes: tuple[str, ...] = ()) -> Predicted:
        cuts = self.work.model.task.cut_notes(Cuts(rows=done.rows, cut_rows=done.truncated))
        return replace(done, notes=(*notes, *done.notes), rejects=self.target.rejects, cuts=cuts)


def _predict_stream(job: _Job, reading: ReadOptions, stream: IO[bytes]) -> Predicted:
    out = StreamWriter(stream, form=job.target.form, raw=job.work.writing.csv_raw)
    done = predict_stream(job.work, reading, out, job.target.rejects, STDIN, job.progress)
    return job.told(Predicted(rows=done.rows, truncated=done.truncated, rejected=done.rejected))


def _predict_table(job: _Job, data: Data, reading: ReadOptions, name: str) -> Predicted:
    target, task, skips = job.target, job.work.model.task, job.work.writing.skips
    shows_targets = target.rendered and task.renders_labels
    if not isinstance(data, str | Path | RowTable):
        data = in_memory(data, task)
        job = replace(job, work=replace(job.work, given=data))
    read, reading = as_trained(job.work.model, data, reading)
    job = replace(job, work=replace(job.work, names=reading.columns))
    keep = "none" if target.rendered else job.work.writing.keep_columns

    def load() -> RowTable:
        targets: Literal["optional", "unread"] = "optional" if shows_targets else "unread"
        return load_table(read, task, reading=reading, targets=targets, name=name, keep=keep, skips=skips)

    table = main_process_first(job.accelerator, load)
    check_same_rows(job.accelerator, table)
    if target.stream is not None:
        done = _to_stream(job, table, target.stream)
    elif target.path is None:
        raise UsageError("an output is a file or a stream")
    elif target.rendered:
        done = predict_rendered(job.accelerator, job.work, table, target, target.path, job.progress)
    else:
        done = _to_file(job, table, target.path)
    return job.told(done, table.notes)


def _to_stream(job: _Job, table: RowTable, stream: IO[bytes]) -> Predicted:
    """The first process writes parts as they come in row order."""
    out = StreamWriter(stream, form=job.target.form, raw=job.work.writing.csv_raw)
    rows = truncated = 0

    def take(parts: Sequence[Part]) -> None:
        nonlocal rows, truncated
        for part in parts:
            out.write_lines(part.content)
            rows, truncated = rows + part.rows, truncated + part.truncated
            job.progress(rows, len(table))

    size = part_rows(job.work.model.task, table)
    if job.target.rejects is not None:
        broadcast_from_main(job.accelerator, partial(write_rejects, table, job.target.rejects))
    job.progress(0, len(table))
    map_chunks_distributed(job.accelerator, table, size=size, done=0, work=job.work.part, take=take)
    return Predicted(rows=rows, truncated=truncated, rejected=len(table) - rows)


def _to_file(job: _Job, table: RowTable, path: Path) -> Predicted:
    """The first process keeps finished parts beside the output until they are all there."""
    writing, accelerator = job.work.writing, job.accelerator
    size = part_rows(job.work.model.task, table)
    keep = writing.keep_columns if isinstance(writing.keep_columns, str) else list(writing.keep_columns)
    settings = {"part_rows": size, "keep_columns": keep, "on_error": writing.on_error, "logits": writing.logits}
    names = None if job.work.names is None else dict(job.work.names)
    with ExitStack() as stack:

        def begin() -> Parts:
            facts = prediction_facts(job.work.model, table.fingerprint, job.dtype, columns=names, **settings)
            return stack.enter_context(unfinished(path, facts))

        parts = _on_first(accelerator, begin)
        done = broadcast_from_main(accelerator, lambda: 0 if parts is None else len(parts))

        def take(found: Sequence[Part]) -> None:
            if parts is not None:
                parts.append(found)
                job.progress(parts.total("rows"), len(table))

        job.progress(0 if parts is None else parts.total("rows"), len(table))
        map_chunks_distributed(accelerator, table, size=size, done=done, work=job.work.part, take=take)
        return broadcast_from_main(accelerator, lambda: _finished(job, table, path, parts))


def _on_first(accelerator: Accelerator, begin: Callable[[], Parts]) -> Parts | None:
    """What cannot be sent between processes stays on the first."""
    held: list[Parts] = []
    broadcast_from_main(accelerator, lambda: held.append(begin()))
    return held[0] if held else None


def _finished(job: _Job, table: RowTable, path: Path, parts: Parts | None) -> Predicted:
    if parts is None:
        raise UsageError("only the first process finishes an output")
    if job.target.rejects is not None:
        write_rejects(table, job.target.rejects)
    finish(parts.lines, path, form=job.target.form, raw=job.work.writing.csv_raw)
    rows, truncated, rejected = (parts.total(name) for name in ("rows", "truncated", "rejected"))
    return Predicted(rows=rows, truncated=truncated, rejected=rejected, resumed=parts.resumed)
