"""The command that prints the JSON schema of recipes: schema."""

from typing import Annotated

import typer

from bert_tasks.cli.app import app, say


@app.command()
def schema(
    task: Annotated[
        str | None, typer.Argument(metavar="TASK", help="Only for recipes of this task; MODULE:CLASS for your own.")
    ] = None,
) -> None:
    """Print the JSON schema of recipes, by which editors complete and check them.

    Example: bert-tasks schema > recipe.schema.json
    """
    from bert_tasks.recipe_schema import recipe_schema, schema_text

    say(schema_text(recipe_schema(task)).rstrip("\n"))
