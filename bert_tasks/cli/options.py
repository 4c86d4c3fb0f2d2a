"""Arguments and options that several commands share, and what their values become."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from bert_tasks.data.kept import Keep
    from bert_tasks.tasks.base import Task

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a TOML file.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="E.g. optim.epochs=1.")]
OutputDir = Annotated[Path | None, typer.Option(help="The run's folder; replaces run.output_dir.")]
ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="The folder of a model or a run, a hub id, or package:NAME/PATH.")
]
DataFile = Annotated[Path, typer.Option(help="A csv, tsv, jsonl or parquet file.")]
DataFormat = Annotated[str | None, typer.Option(help="E.g. glue/sst2; default: by the file's extension.")]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        metavar="TASK=FILE",
        help="A column's name in the file: text=review. Default: as in training, where the file has it.",
    ),
]
Delimiter = Annotated[str | None, typer.Option(help=r"Of a csv file, e.g. ';' or '\t'.")]
Encoding = Annotated[str | None, typer.Option(help="Of a text file; a byte order mark in it decides.")]
Header = Annotated[
    bool | None, typer.Option("--header/--no-header", help="Whether the first line of a csv file names the columns.")
]
LabelSeparator = Annotated[str | None, typer.Option(help="Between several labels in one cell, e.g. '|'.")]
TrainedEncoding = Annotated[
    str | None, typer.Option("--encoding", help="Of a text file; default: as in training, else utf-8.")
]
TrainedHeader = Annotated[
    bool | None,
    typer.Option("--header/--no-header", help="None: csv columns are called 0, 1, ...; default: as in training."),
]
TrainedLabelSeparator = Annotated[
    str | None,
    typer.Option("--label-separator", help="Between several labels in one cell; default: as in training, else ';'."),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
OwnTask = Annotated[
    str | None, typer.Option("--task", metavar="NAME", help="The task, or MODULE:CLASS, if the folder does not say it.")
]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Of the task: max_length=256.")]
Precision = Annotated[
    Literal["float32", "int8"], typer.Option(help="int8: a quantised copy, on the CPU; needs the extra `export`.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def task_class(name: str | None) -> "type[Task] | None":
    if name is None:
        return None
    from bert_tasks.recipe import load_task_class

    return load_task_class(name)


def settings(options: list[str] | None) -> dict[str, Any]:
    from bert_tasks.recipe_toml import parse_value

    pairs = [option.partition("=") for option in ([] if options is None else options)]
    for key, sign, value in pairs:
        if not (key and sign and value):
            raise typer.BadParameter(f"--set {key}{sign}{value}: expected KEY=VALUE, e.g. max_length=256")
    return {key.removeprefix("settings."): parse_value(value) for key, _, value in pairs}


def column_names(options: list[str] | None) -> dict[str, str]:
    pairs = [option.partition("=") for option in ([] if options is None else options)]
    for name, sign, value in pairs:
        if not (name and sign and value):
            raise typer.BadParameter(f"--column {name}{sign}{value}: expected TASK=FILE, e.g. text=review")
    return {name: value for name, _, value in pairs}


def kept_columns(text: str) -> "Keep":
    """``all``, ``none``, or names with commas between them; spaces around a comma do not belong to the names."""
    if text in ("all", "none"):
        return text
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise typer.BadParameter(f"--keep-columns {text!r}: expected all, none, or names such as id,text")
    return names
