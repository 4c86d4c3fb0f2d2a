"""The command that serves a model over HTTP."""

from typing import Annotated

import typer

from bert_tasks.cli.app import app, leave, note
from bert_tasks.cli.options import ModelName, OwnTask, Precision, Revision, Settings, settings, task_class


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
        tell=note,
    )
    if still_loading:
        leave(0)
