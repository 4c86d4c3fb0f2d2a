"""The command that trains a saved run again and compares: reproduce."""

from pathlib import Path
from typing import Annotated

import typer

from bert_tasks.cli.app import app, show
from bert_tasks.cli.options import AsJson
from bert_tasks.errors import DivergedError


@app.command()
def reproduce(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    output_dir: Annotated[Path | None, typer.Option(help="The second run's folder; default: RUN-reproduced.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a saved run again in another folder and compare metrics and weights bit for bit.

    Exits with 0 only if all are equal; with 5 and a table of what differs otherwise.

    Example: bert-tasks reproduce runs/first
    """
    from bert_tasks.training.reproducing import reproduce

    result = reproduce(run, output_dir=output_dir, progress=not quiet)
    show(result.to_json(), result.lines(), as_json=as_json)
    if not result.equal:
        raise typer.Exit(DivergedError.exit_code)
