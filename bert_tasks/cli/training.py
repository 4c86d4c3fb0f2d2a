"""The commands around recipes and runs (train, search, check, init, tokenizer), and env."""

import os
import shlex
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bert_tasks.cli.app import app, is_printing_process, print_err, print_out, print_result
from bert_tasks.cli.options import (
    AsJson,
    Delimiter,
    Encoding,
    Format,
    Header,
    LabelSeparator,
    NewFolder,
    OutputDir,
    Overrides,
    Overwrite,
    ProcessTimeout,
    Quiet,
    RecipeFile,
    WithReport,
    read_options,
    shared_options,
)
from bert_tasks.errors import DataError, DivergedError, UsageError

if TYPE_CHECKING:
    from bert_tasks.data.columns import Column
    from bert_tasks.data.options import ReadOptions
    from bert_tasks.experiments.folds import FoldsResult
    from bert_tasks.experiments.search import SearchResult
    from bert_tasks.experiments.seeds import SeedsResult
    from bert_tasks.init import RecipeDraft
    from bert_tasks.recipe.schema import Recipe
    from bert_tasks.tasks.base import Task
    from bert_tasks.training.state import FitResult


@app.command("train")
def train(
    recipe: Annotated[Path, typer.Argument(metavar="FILE", help="Recipe (.toml), or rows such as reviews.csv.")],
    set_: Overrides = None,
    output_dir: OutputDir = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and write nothing.")] = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    report: WithReport = True,
    seeds: Annotated[
        str | None, typer.Option(metavar="NUMBERS", help="Seeds of several runs, e.g. 1,2,3 (in OUTPUT_DIR/seed-N).")
    ] = None,
    folds: Annotated[
        int | None, typer.Option(min=2, max=1000, metavar="NUMBER", help="Number of folds of a cross-validation.")
    ] = None,
    dist_timeout: ProcessTimeout = None,
    as_json: AsJson = False,
) -> None:
    """Train a recipe and save the best model in OUTPUT_DIR/model.

    For a file of rows, the command first writes the recipe that init would write, as OUTPUT_DIR.toml, by default
    runs/NAME.toml. It stops if the columns can be read in several ways. Run the command again to resume an interrupted
    run. A finished run is only reported.

    Example: bert-tasks train recipes/quickstart.toml --set optim.epochs=1 --output-dir runs/first

    Example: bert-tasks train reviews.csv
    """
    from bert_tasks.experiments import folds as folded
    from bert_tasks.experiments import seeds as seeded
    from bert_tasks.training.run import dry_run as dry_run_once

    changes = [] if set_ is None else [*set_]
    if folds is not None:
        changes.append(f"folds.count={folds}")
    loaded = _load_or_write(recipe, changes, output_dir, dry_run=dry_run, quiet=quiet)
    several = loaded.run.seeds
    if seeds is not None:
        several = seeded.parse_seeds(seeds)
    divided = loaded.folds is not None and loaded.folds.fold is None
    if loaded.folds is not None and several is not None:
        raise UsageError("--seeds and folds exclude each other, because a cross-validation has one seed, run.seed")
    if dry_run:
        if divided:
            plan = folded.dry_run_folds(loaded, overwrite=overwrite)
        elif several is not None:
            plan = seeded.dry_run_seeds(loaded, several, overwrite=overwrite)
        else:
            plan = dry_run_once(loaded, overwrite=overwrite)
        print_result(plan.to_json(), plan.lines(), as_json=as_json)
    elif divided:
        result = folded.train_folds(loaded, overwrite=overwrite, progress=not quiet)
        _print_runs(result, report=report, as_json=as_json, tasks={"": result.task})
    elif several is None:
        _train_once(loaded, overwrite=overwrite, quiet=quiet, report=report, as_json=as_json)
    else:
        runs = seeded.train_seeds(loaded, several, overwrite=overwrite, progress=not quiet)
        trained = [run.result.tasks for run in runs.runs if run.result is not None]
        tasks = trained[0] if trained else None  # a run that diverged has no result
        _print_runs(runs, report=report and bool(trained), as_json=as_json, tasks=tasks)
        if runs.failed:
            raise typer.Exit(DivergedError.exit_code)


def _load_or_write(file: Path, changes: list[str], output_dir: Path | None, *, dry_run: bool, quiet: bool) -> "Recipe":
    """Loads a recipe. For a file of rows it is OUTPUT_DIR.toml, which is written unless an earlier call wrote it."""
    from bert_tasks.recipe.schema import load_recipe

    if file.suffix.lower() == ".toml":
        return load_recipe(file, overrides=changes, output_dir=output_dir)
    from bert_tasks.data.reading import existing_file, matching_files
    from bert_tasks.distributed import main_process_first, make_accelerator
    from bert_tasks.init import init_recipe, run_name

    # A misspelt file is an error here, before a recipe of its name is looked for.
    if not file.is_dir():
        for source in matching_files(file):
            existing_file(source)
    folder = output_dir
    if folder is None:
        folder = Path("runs", run_name(file))
    path = folder.with_name(f"{folder.name}.toml")
    written_to: AbstractContextManager[str | Path] = nullcontext(path.parent)
    if dry_run and not path.exists():  # it writes nothing that stays
        written_to = TemporaryDirectory()
    with written_to as parent:
        path = Path(parent, path.name)
        with main_process_first(make_accelerator()):
            if path.exists():
                line = f"note: {path} exists already and is used"
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    draft = init_recipe(file, output=path, output_dir=folder)
                except DataError as error:
                    hint = "To name columns or a format, write the recipe with `bert-tasks init`."
                    raise DataError(f"{error}\n{hint}") from None
                if draft.alternatives:
                    path.unlink()  # the next call would take it for the user's choice
                    raise DataError(_question(file, draft))
                findings = [*draft.findings()]
                if not dry_run:
                    findings.append(f"recipe: {path}")
                line = "\n".join(findings)
        if not quiet:
            print_err(line)
        loaded = load_recipe(path, overrides=changes, output_dir=output_dir)
    # An earlier recipe of this name may be about other rows, for example of another folder.
    train = Path(str(loaded.data.train))
    source = Path(os.path.abspath(file))
    if source not in (train, *train.parents):
        raise UsageError(f"{path} trains on {train}, not on {file}. Choose another --output-dir.")
    return loaded


def _question(file: Path, draft: "RecipeDraft") -> str:
    """Returns the message about a file with several readings that are as good, of which the user chooses one."""
    columns = ", ".join(f'{column} = "{name}"' for column, name in draft.columns.items())
    likeliest = draft.task
    if columns:  # several tasks have columns of their own
        likeliest = f"{likeliest} with {columns}"
    command = f"bert-tasks init {shlex.quote(str(file))}"
    lines = [
        f"{file}: there are several ways to read the columns, so nothing was trained. Most likely:",
        f"  {likeliest}",
        "It could also be:",
    ]
    lines += [f"  {other}" for other in draft.alternatives]
    lines.append(
        f"Write a recipe with `{command}`, with options such as --label and --text or with a changed line if the "
        "first is wrong, and train the recipe."
    )
    return "\n".join(lines)


def _train_once(loaded: "Recipe", *, overwrite: bool, quiet: bool, report: bool, as_json: bool) -> None:
    """Trains one run, writes its report and prints its metrics."""
    from bert_tasks.api import write_after_run
    from bert_tasks.training.run import train

    result = train(loaded, overwrite=overwrite, progress=not quiet)
    model = result.output_dir / "model"
    has_report = result.reused and (result.output_dir / "report.html").exists()
    page = write_after_run(result.output_dir, report=report and not has_report)
    if quiet or result.reused:  # otherwise training has printed them
        for note in result.notes:
            print_err(f"note: {note}")
    shown_page = None if page is None else str(page)
    summary = {
        "metrics": result.metrics,
        "best_step": result.best_step,
        "collapse": result.collapse,
        "notes": list(result.notes),
        "model": str(model),
        "report": shown_page,
    }
    lines = [f"best model after step {result.best_step} of {result.steps}"]
    for name, table in result.metric_tables().items():
        lines += table.lines(name)
    if result.reused:
        lines.append("this run was already complete, so it was not trained again")
    if page is not None:
        lines.append(f"report: {page}")
    lines += [f"model: {model}", *_head_note(result.tasks), "next:"]
    lines += [f"  {shlex.join(command)}" for command in _next_commands(loaded, result)]
    print_result(summary, lines, as_json=as_json, headline=result.headline)


def _next_commands(recipe: "Recipe", result: "FitResult") -> list[list[str]]:
    """Returns the commands that use the model of a finished run, with files like the training file to fill in."""
    run = str(result.output_dir)
    suffix = Path(str(recipe.data.train)).suffix
    if suffix in ("", ".gz"):  # rows that are no file, or whose name does not end in the format
        suffix = ".csv"
    if recipe.data.split_column is None:
        commands = [["evaluate", run, f"test{suffix}"]]
    else:
        commands = [["evaluate", run, str(recipe.data.train), "--split-column", recipe.data.split_column]]
    if any(column.is_label for column in _columns(result.tasks)):
        commands.append(["predict", run, f"new{suffix}", "--output", "predictions.jsonl"])
        commands.append(["serve", run])
    else:  # what follows is a model with labels
        commands.append(["init", "labelled.csv", "--model", run])
    return [["bert-tasks", *command] for command in commands]


def _columns(tasks: "Mapping[str, Task]") -> "list[Column]":
    """Returns the columns of all tasks."""
    columns: list[Column] = []
    for task in tasks.values():
        columns += task.columns
    return columns


def _print_runs(
    result: "FoldsResult | SeedsResult | SearchResult",
    *,
    report: bool,
    as_json: bool,
    tasks: "Mapping[str, Task] | None" = None,
) -> None:
    """Writes the report of several runs, and prints what they have in common."""
    from bert_tasks.api import write_after_run

    page = write_after_run(result.output_dir, report=report)
    shown_page = None if page is None else str(page)
    lines = result.lines()
    if page is not None:
        lines.append(f"report: {page}")
    lines += _head_note(tasks)
    print_result({**result.to_json(), "report": shown_page}, lines, as_json=as_json)


def _head_note(tasks: "Mapping[str, Task] | None") -> list[str]:
    """Returns a note on a saved model whose head transformers lacks, as it lacks the heads of several tasks."""
    from bert_tasks.outputs.hf_config import NO_HF_HEAD

    if tasks is None or ("" in tasks and tasks[""].has_hf_head):
        return []
    return [f"note: {NO_HF_HEAD}"]


@app.command("search")
def search(
    recipe: RecipeFile,
    set_: Overrides = None,
    output_dir: OutputDir = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    report: WithReport = True,
    dist_timeout: ProcessTimeout = None,
    as_json: AsJson = False,
) -> None:
    """Search for better values of the keys in a recipe's [search].

    Run the command again to resume an interrupted search. More search.trials extend it. Needs the extra `search`
    (Optuna).

    Example: bert-tasks search recipe.toml --set search.trials=12 --output-dir runs/search
    """
    from bert_tasks.experiments.search import search
    from bert_tasks.recipe.schema import load_recipe

    overrides = [] if set_ is None else set_
    loaded = load_recipe(recipe, overrides=overrides, output_dir=output_dir)
    result = search(loaded, overwrite=overwrite, progress=not quiet)
    _print_runs(result, report=report, as_json=as_json)
    if result.best is None:
        raise typer.Exit(DivergedError.exit_code)


@app.command("check")
def check(recipe: RecipeFile, set_: Overrides = None, as_json: AsJson = False) -> None:
    """Check a recipe and report on the labels, lengths, truncation, duplicates and overlap of its data.

    The command does not read weights, but train --dry-run does.

    Example: bert-tasks check recipes/quickstart.toml
    """
    from bert_tasks.recipe.check import check as check_recipe
    from bert_tasks.recipe.schema import load_recipe

    overrides = [] if set_ is None else set_
    report = check_recipe(load_recipe(recipe, overrides=overrides))
    print_result(report.to_json(), [*report.lines(), f"{recipe}: OK, ready to train."], as_json=as_json)


@app.command("init")
def init(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Rows in csv, tsv, jsonl, parquet, CoNLL, SQuAD or txt.")
    ] = None,
    validation: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Validation rows. Default: a share of the training rows.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="Folder, hub id, or package:NAME/PATH.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Recipe to write, a new file.")] = Path(
        "recipe.toml"
    ),
    task: Annotated[str | None, typer.Option(metavar="NAME", help="Task. Default: detected from the columns.")] = None,
    text: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Column of texts or words. Repeat it for two texts.")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Column of labels, tags or answers. May be repeated.")
    ] = None,
    format: Format = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    header: Header = None,
    label_separator: LabelSeparator = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of recipes (of --task).")] = False,
    as_json: AsJson = False,
) -> None:
    """Inspect a data file, detect its task and write a commented recipe for it. Options override what is detected.

    Example: bert-tasks init reviews.csv --output reviews.toml

    Example: bert-tasks init --schema > recipe.schema.json
    """
    from bert_tasks.init import init_recipe
    from bert_tasks.recipe.json_schema import recipe_schema, schema_text

    if schema:
        print_out(schema_text(recipe_schema(task)).rstrip("\n"))
        return
    if file is None:
        raise typer.BadParameter("nothing to inspect. Pass a file")
    texts = [] if text is None else text
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
        text=texts,
        label=label,
        label_separator=label_separator,
    )
    print_result(draft.to_json(), draft.lines(), as_json=as_json)


@app.command("tokenizer")
@shared_options(reading=read_options)
def tokenizer(
    corpus: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Texts in txt, jsonl, csv or parquet.")],
    type: Annotated[Literal["wordpiece", "bpe", "unigram"], typer.Option(help="Algorithm of BERT, RoBERTa or ALBERT.")],
    vocab_size: Annotated[int, typer.Option(metavar="TOKENS", help="Size of the vocabulary with special tokens.")],
    output: NewFolder,
    reading: "ReadOptions",
    lowercase: Annotated[
        bool | None, typer.Option("--lowercase/--cased", help="Lower letters, or keep capitals. Needed except for bpe.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a tokenizer for models from scratch. Stock transformers opens the folder with AutoTokenizer.

    Example: bert-tasks tokenizer corpus.txt --type bpe --vocab-size 8000 --output tokenizers/mine
    """
    from bert_tasks.checkpoints.tokenizer_training import train_tokenizer

    if not is_printing_process():
        return  # the first of several processes trains the tokenizer
    if lowercase is None and type != "bpe":
        raise UsageError(f"{type}: pass --lowercase or --cased")
    trained = train_tokenizer(
        corpus, output, type=type, vocab_size=vocab_size, lowercase=lowercase is True, reading=reading
    )
    content = {"folder": str(output), "type": type, "vocab_size": len(trained)}
    print_result(content, [f"{type}: {len(trained):,} tokens", f"tokenizer: {output}"], as_json=as_json)


@app.command("env")
def env(as_json: AsJson = False) -> None:
    """Print versions, devices, folders and environment variables for a bug report, with secrets masked.

    Example: bert-tasks env --json
    """
    from bert_tasks.environment import environment, environment_lines

    content = environment()
    print_result(content, environment_lines(content), as_json=as_json)
