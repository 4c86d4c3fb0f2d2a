"""A line on a terminal that says how far a command is, and how quick. Owns when it is shown.

The command that writes predictions: predict.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bert_tasks.cli.app import (
    Columns,
    DataFormat,
    Delimiter,
    ModelName,
    OwnTask,
    Precision,
    Revision,
    Settings,
    TrainedEncoding,
    TrainedHeader,
    app,
    column_names,
    is_first_process,
    kept_columns,
    note,
    result_stream,
    settings,
    task_class,
    tell,
)
from bert_tasks.terminal import message_stream

if TYPE_CHECKING:
    from bert_tasks.inference import Predicted, WriteOptions

_INTERVAL = 0.2  # seconds between two states of the line


@contextmanager
def rows_progress(*, quiet: bool) -> Iterator[Callable[[int, int | None], None]]:
    """What takes the numbers of rows that are done, and of all, and shows them with the rows per second.

    Nothing is shown if ``quiet``, where standard error is no terminal, and by others than the first process.
    """
    if quiet or not message_stream().isatty() or not is_first_process():
        yield lambda done, total: None
        return
    line = _Line()
    try:
        yield line.show
    finally:
        line.clear()


class _Line:
    """The line, which each state writes over. Speed counts from the first state on: before it the model is loaded."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._shown = 0.0
        self._width = 0

    def show(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now, done
        if now - self._shown < _INTERVAL and done != total:
            return
        self._shown = now
        self._write(f"{done:,} rows" if total is None else f"{done:,} of {total:,} rows", self._speed(now, done))

    def clear(self) -> None:
        if self._width:
            self._show("\r" + " " * self._width + "\r")

    def _speed(self, now: float, done: int) -> str:
        start, before = (now, done) if self._first is None else self._first
        return f", {(done - before) / (now - start):,.0f} rows/s" if done > before and now > start else ""

    def _write(self, state: str, speed: str) -> None:
        text = state + speed
        self._show("\r" + text.ljust(self._width))
        self._width = max(self._width, len(text))

    def _show(self, text: str) -> None:
        stream = message_stream()
        stream.write(text)
        stream.flush()


Texts = Annotated[
    list[str] | None, typer.Option("--text", help="A text to predict instead of a file; may be given often.")
]


@app.command()
def predict(
    model: ModelName,
    data: Annotated[
        str | None,
        typer.Option(help="A csv, tsv, jsonl or parquet file, or - for standard input, the default if it is a pipe."),
    ] = None,
    text: Texts = None,
    output: Annotated[str, typer.Option(help="A .jsonl, .csv, .tsv or .parquet file, or - for standard output.")] = "-",
    format: DataFormat = None,
    column: Columns = None,
    delimiter: Delimiter = None,
    encoding: TrainedEncoding = None,
    header: TrainedHeader = None,
    keep_columns: Annotated[str, typer.Option(help="The input's columns to write too: all, none, or id,text.")] = "all",
    on_error: Annotated[
        Literal["fail", "skip"], typer.Option(help="skip: leave bad rows out and write them, with reasons, to a file.")
    ] = "fail",
    rejects: Annotated[Path | None, typer.Option(help="That file; default: OUTPUT + .rejects.jsonl.")] = None,
    output_format: Annotated[
        str | None, typer.Option(help="jsonl, csv, tsv or parquet, if the output's name does not say it.")
    ] = None,
    csv_raw: Annotated[
        bool, typer.Option("--csv-raw", help="Write csv cells such as =1+1 as they are; default: with ' in front.")
    ] = False,
    logits: Annotated[bool, typer.Option("--logits", help="Write the logits, too.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    task: OwnTask = None,
    set_: Settings = None,
    revision: Revision = None,
    dtype: Precision = "float32",
    dist_timeout: Annotated[
        float | None, typer.Option(min=1, help="Seconds that processes wait for each other; default: torch's.")
    ] = None,
) -> None:
    """Write a prediction with its probabilities for every row of a file, for texts, or for each line of a pipe.

    The same command resumes an output that was interrupted. Columns, format, delimiter and encoding that are not
    given are those of the training file, where they fit.

    Example: bert-tasks predict runs/first --data new.csv --output answers.jsonl

    Example: bert-tasks predict runs/first --text "a fine film"
    """
    from bert_tasks.data.readers import ReadOptions
    from bert_tasks.inference import WriteOptions, make_accelerator

    if dist_timeout is not None:
        make_accelerator(timeout=dist_timeout)
    reading = ReadOptions(
        columns=column_names(column), format=format, delimiter=delimiter, encoding=encoding, header=header
    )
    keep = kept_columns(keep_columns)
    writing = WriteOptions(
        keep_columns=keep, on_error=on_error, rejects=rejects, csv_raw=csv_raw, format=output_format, logits=logits
    )
    options: dict[str, Any] = {"task": task_class(task), "settings": settings(set_), "revision": revision}
    options |= {"reading": reading, "dtype": dtype}
    with _interruption(output), rows_progress(quiet=quiet or (output == "-" and sys.stdout.isatty())) as progress:
        done = _predict(model, _source(data, text), output, writing, {**options, "progress": progress})
    _print_summary(done, output)


@contextmanager
def _interruption(output: str) -> Iterator[None]:
    """Says what Ctrl-C leaves of an output, and ends the command with the signal's exit code."""
    from bert_tasks.inference.output import unfinished_folder
    from bert_tasks.paths import is_folder

    try:
        yield
    except KeyboardInterrupt:
        kept = unfinished_folder(Path(output))
        if output == "-":
            tell("interrupted: the rest of the rows was not predicted")
        elif is_folder(kept):
            tell(f"interrupted: {output} is not complete; the same command resumes from the rows in {kept}")
        else:
            tell(f"interrupted: {output} was not written")
        raise typer.Exit(128 + signal.SIGINT) from None


def _source(data: str | None, texts: list[str] | None) -> str | list[str]:
    if data is not None and texts:
        raise typer.BadParameter("--data and --text exclude each other: give one of them")
    if texts:
        return texts
    if data is None and sys.stdin is not None and sys.stdin.isatty():
        raise typer.BadParameter("nothing to predict: give --data FILE or --text TEXT, or send rows through a pipe")
    return "-" if data is None else data


def _predict(
    model: str, data: str | list[str], output: str, writing: "WriteOptions", options: dict[str, Any]
) -> "Predicted":
    from bert_tasks.inference import predict_file

    if output != "-":
        return predict_file(model, data, output, writing=writing, **options)
    with result_stream() as stream:
        return predict_file(model, data, stream, writing=writing, **options)


def _print_summary(done: "Predicted", output: str) -> None:
    if output == "-":
        tell(f"{done.rows} predictions")
    else:
        note(f"{done.rows} predictions: {output}")
    for line in done.lines():
        tell(line)
