"""The commands around a recipe: train, check, init.

The command that trains a saved run again and compares: reproduce.

The command that prints the JSON schema of recipes: schema.

The command that shows the machine and the software: env.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bert_tasks.cli.app import (
    AsJson,
    DataFormat,
    Delimiter,
    Encoding,
    Header,
    LabelSeparator,
    OutputDir,
    Overrides,
    RecipeFile,
    app,
    say,
    show,
    tell,
)
from bert_tasks.errors import DivergedError
from bert_tasks.paths import exists

if TYPE_CHECKING:
    from bert_tasks.recipe.schema import Recipe
    from bert_tasks.tasks.base import Task


@app.command()
def train(
    recipe: RecipeFile,
    set_: Overrides = None,
    output_dir: OutputDir = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, train and write nothing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in the folder.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="At the end, write report.html to OUTPUT_DIR.")
    ] = True,
    seeds: Annotated[str | None, typer.Option(metavar="1,2,3", help="One run per seed, in OUTPUT_DIR/seed-N.")] = None,
    dist_timeout: Annotated[
        float | None, typer.Option(min=1, help="Seconds that processes wait for each other; default: torch's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a recipe; the best model ends in OUTPUT_DIR/model. With several seeds the runs are compared.

    The same command goes on with a run that was stopped or killed, and reports a finished one.

    Example: bert-tasks train recipes/quickstart.toml --set optim.epochs=1 --output-dir runs/first
    """
    from bert_tasks.experiments.seeds import dry_run_seeds, parse_seeds
    from bert_tasks.inference import make_accelerator
    from bert_tasks.recipe.schema import load_recipe
    from bert_tasks.training.run import dry_run as plan_run

    loaded = load_recipe(recipe, overrides=[] if set_ is None else set_, output_dir=output_dir)
    if dist_timeout is not None:
        make_accelerator(loaded.optim.mixed_precision, timeout=dist_timeout)
    chosen = loaded.run.seeds if seeds is None else parse_seeds(seeds)
    if dry_run:
        several = chosen is not None
        plan = dry_run_seeds(loaded, chosen, overwrite=overwrite) if several else plan_run(loaded, overwrite=overwrite)
        show(plan.to_json(), plan.lines(), as_json=as_json)
    elif chosen is None:
        _train_once(loaded, overwrite=overwrite, quiet=quiet, report=report, as_json=as_json)
    else:
        _train_seeds(loaded, chosen, overwrite=overwrite, quiet=quiet, report=report, as_json=as_json)


def _train_once(loaded: "Recipe", *, overwrite: bool, quiet: bool, report: bool, as_json: bool) -> None:
    from bert_tasks.api import train
    from bert_tasks.cli.models import report_on  # not above: commands stand in the order in which they are imported

    result = train(loaded, overwrite=overwrite, progress=not quiet)
    known = result.reused and exists(result.output_dir / "report.html")
    page = report_on(result.output_dir) if report and not known else None
    if quiet or result.reused:  # otherwise the run itself has said so
        for note in result.notes:
            tell(f"note: {note}")
    summary = {
        "metrics": result.metrics,
        "best_step": result.best_step,
        "collapse": result.collapse,
        "notes": list(result.notes),
        "model": str(result.output_dir / "model"),
    }
    lines = [f"best model after step {result.best_step} of {result.steps}"]
    for name, table in result.metric_tables().items():
        lines += table.lines(name)
    lines += ["this run was complete already; nothing was trained"] if result.reused else []
    lines += [] if page is None else [f"report: {page}"]
    lines += [f"model: {result.output_dir / 'model'}", *_stock_note(result.task)]
    show(summary | {"report": page}, lines, as_json=as_json)


def _stock_note(task: "Task") -> list[str]:
    from bert_tasks.tasks.base import NO_STOCK_HEAD

    return [] if task.is_stock_head else [f"note: {NO_STOCK_HEAD}"]


def _train_seeds(
    loaded: "Recipe", seeds: tuple[int, ...], *, overwrite: bool, quiet: bool, report: bool, as_json: bool
) -> None:
    from bert_tasks.api import train_seeds
    from bert_tasks.cli.models import report_on

    result = train_seeds(loaded, seeds, overwrite=overwrite, progress=not quiet)
    page = report_on(result.output_dir) if report and len(result.failed) < len(result.runs) else None
    lines = ([] if page is None else [f"report: {page}"]) + result.lines()[-1:]
    tasks = [run.result.task for run in result.runs if run.result is not None]
    lines += _stock_note(tasks[0]) if tasks else []
    show(result.to_json(), [*result.lines()[:-1], *lines], as_json=as_json)
    if result.failed:
        raise typer.Exit(DivergedError.exit_code)


@app.command()
def check(recipe: RecipeFile, set_: Overrides = None, as_json: AsJson = False) -> None:
    """Check a recipe and report on its data: labels, lengths, truncation, duplicates, overlap.

    Example: bert-tasks check recipes/quickstart.toml
    """
    from bert_tasks.recipe.schema import load_recipe
    from bert_tasks.training import run

    loaded = load_recipe(recipe, overrides=[] if set_ is None else set_)
    report = run.check(loaded)
    show(report.to_json(), [*report.lines(), f"{recipe}: fit to train"], as_json=as_json)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="csv, tsv, jsonl, parquet, CoNLL, CoNLL-U or SQuAD.")],
    validation: Annotated[Path | None, typer.Option(help="A second file; default: set rows aside.")] = None,
    model: Annotated[str | None, typer.Option(help="A folder, a hub id, or package:NAME/PATH.")] = None,
    output: Annotated[Path, typer.Option(help="The recipe to write; it must not exist.")] = Path("recipe.toml"),
    task: Annotated[str | None, typer.Option(metavar="NAME", help="Its name; default: found out.")] = None,
    text: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Of the texts or words; twice for two texts.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Of the labels, numbers, tags or answers.")
    ] = None,
    label_separator: LabelSeparator = None,
    format: DataFormat = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    header: Header = None,
    as_json: AsJson = False,
) -> None:
    """Look at a data file, guess its task and write a commented recipe for it; options say what is known.

    Example: bert-tasks init reviews.csv --output reviews.toml
    """
    from bert_tasks.recipe.init import init_recipe

    draft = init_recipe(
        file,
        validation=validation,
        model=model,
        output=output,
        format=format,
        delimiter=delimiter,
        encoding=encoding,
        header=header,
        task=task,
        text=[] if text is None else text,
        label=label,
        label_separator=label_separator,
    )
    show(draft.to_json(), draft.lines(), as_json=as_json)


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
    from bert_tasks.experiments.reproduce import reproduce

    result = reproduce(run, output_dir=output_dir, progress=not quiet)
    show(result.to_json(), result.lines(), as_json=as_json)
    if not result.equal:
        raise typer.Exit(DivergedError.exit_code)


@app.command()
def schema(
    task: Annotated[
        str | None, typer.Argument(metavar="TASK", help="Only for recipes of this task; MODULE:CLASS for your own.")
    ] = None,
) -> None:
    """Print the JSON schema of recipes, by which editors complete and check them.

    Example: bert-tasks schema > recipe.schema.json
    """
    from bert_tasks.recipe.json_schema import recipe_schema, schema_text

    say(schema_text(recipe_schema(task)).rstrip("\n"))


@app.command()
def env(as_json: AsJson = False) -> None:
    """Print versions, devices, folders and variables for a bug report; secrets are masked.

    Example: bert-tasks env --json
    """
    from bert_tasks.environment import environment, environment_lines

    content = environment()
    show(content, environment_lines(content), as_json=as_json)
