"""The commands for the hub: card, push."""

from pathlib import Path
from typing import Annotated

import typer

from bert_tasks.cli.app import app, note, show
from bert_tasks.cli.options import AsJson


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
