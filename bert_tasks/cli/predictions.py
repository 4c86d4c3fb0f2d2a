"""The command that writes predictions: predict."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bert_tasks.cli.app import app, note, result_stream, tell
from bert_tasks.cli.options import (
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
    column_names,
    kept_columns,
    settings,
    task_class,
)
from bert_tasks.cli.progress import rows_progress

if TYPE_CHECKING:
    from bert_tasks.inference import Predicted, Writing

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
    from bert_tasks.data.readers import Reading
    from bert_tasks.inference import Writing, make_accelerator

    if dist_timeout is not None:
        make_accelerator(timeout=dist_timeout)
    reading = Reading(
        columns=column_names(column), format=format, delimiter=delimiter, encoding=encoding, header=header
    )
    keep = kept_columns(keep_columns)
    writing = Writing(
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
    from bert_tasks.inference.parts import parts_folder
    from bert_tasks.paths import is_folder

    try:
        yield
    except KeyboardInterrupt:
        kept = parts_folder(Path(output))
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
    model: str, data: str | list[str], output: str, writing: "Writing", options: dict[str, Any]
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
