"""Arguments and options that several commands share, and the values that commands get from them."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from bert_tasks.data.readers import ReadOptions
    from bert_tasks.inference import WriteOptions

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a TOML file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key, e.g. optim.epochs=1.")
]
OutputDir = Annotated[
    Path | None, typer.Option("--output-dir", "-o", help="The run's folder; replaces run.output_dir.")
]
ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="The folder of a model or a run, a hub id, or package:NAME/PATH.")
]
ModelOrFolds = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="The folder of a model, of a run or of all folds (the mean of their models), a hub id, or "
        "package:NAME/PATH.",
    ),
]
Format = Annotated[
    str | None, typer.Option(help="Format of the file, e.g. glue/sst2; default: by the file's extension.")
]
Delimiter = Annotated[str | None, typer.Option(help=r"Separates the columns of a csv file, e.g. ';' or '\t'.")]
Encoding = Annotated[str | None, typer.Option(help="Encoding of a text file; default: utf-8.")]
Header = Annotated[bool | None, typer.Option("--header/--no-header", help="No header: csv columns are named 0, 1, ...")]
DataOrPipe = Annotated[
    str | None,
    typer.Argument(
        metavar="FILE",
        help="A csv, tsv, jsonl or parquet file, or - for standard input, which is the default if it is a pipe.",
    ),
]
LabelSeparator = Annotated[
    str | None, typer.Option(help="Separates several labels in one cell, e.g. '|'; default: ';'.")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
Adapter = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="Adapters to add to MODEL, which is then their base.")
]
Precision = Annotated[
    Literal["float32", "bf16", "int8"],
    typer.Option(
        metavar="NAME",
        help="float32; bf16, for CPUs with avx512_bf16 or AMX and for GPUs; or int8, quantised for the CPU (extra "
        "`export`).",
    ),
]


def _set_process_timeout(seconds: float | None) -> None:
    """Starts the processes with a timeout. The first call of ``make_accelerator`` decides about it."""
    from bert_tasks.distributed import make_accelerator

    if seconds is not None:
        make_accelerator(timeout=seconds)


ProcessTimeout = Annotated[
    float | None,
    typer.Option(
        min=1, callback=_set_process_timeout, help="Seconds that processes wait for each other; default: torch's."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
WithReport = Annotated[bool, typer.Option("--report/--no-report", help="At the end, write report.html to OUTPUT_DIR.")]


def shared_options(**groups: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a command: a parameter gets what its group, a function of options, returns."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = {name: inspect.signature(group).parameters for name, group in groups.items()}
        parameters = [
            option.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command).parameters.items()
            for option in (options[name].values() if name in groups else [parameter])
        ]

        def call(**values: Any) -> None:
            for name, group in groups.items():
                values[name] = group(**{option: values.pop(option) for option in options[name]})
            command(**values)

        call.__name__, call.__doc__ = command.__name__, command.__doc__
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # PEP 362
        return call

    return decorate


def model_options(
    task: Annotated[
        str | None, typer.Option(metavar="NAME", help="Task, MODULE:CLASS, or the name of one of several tasks.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the task, e.g. max_length=256.")
    ] = None,
    revision: Revision = None,
) -> dict[str, Any]:
    """The arguments ``task``, ``settings`` and ``revision`` of functions that load a model."""
    from bert_tasks.recipe.schema import load_task_class
    from bert_tasks.recipe.toml import parse_value

    pairs = _key_value_pairs("--set", set_, expected="KEY=VALUE, e.g. max_length=256")
    values = {key.removeprefix("settings."): parse_value(value) for key, value in pairs.items()}
    named = task if task is None or ":" not in task else load_task_class(task)
    return {"task": named, "settings": values, "revision": revision}


def served_adapters(
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="NAME=FOLDER", help="Adapters of MODEL to serve, too; may be repeated."),
    ] = None,
) -> dict[str, str]:
    """The argument ``adapters`` of ``serve``."""
    pairs = _key_value_pairs("--adapter", adapter, expected="NAME=FOLDER, e.g. mood=runs/mood/adapter")
    if adapter is not None and len(pairs) < len(adapter):
        raise typer.BadParameter(f"--adapter {' --adapter '.join(adapter)}: two have the same name, so rename one")
    return pairs


def read_options(
    format: Format = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            metavar="TASK=FILE",
            help="A column's name in the file, e.g. text=review. Default: as in training, if the file has it.",
        ),
    ] = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    header: Header = None,
    label_separator: LabelSeparator = None,
) -> "ReadOptions":
    """How a file is read that a trained model gets."""
    from bert_tasks.data.readers import ReadOptions

    return ReadOptions(
        columns=_key_value_pairs("--column", column, expected="TASK=FILE, e.g. text=review"),
        format=format,
        delimiter=delimiter,
        encoding=encoding,
        header=header,
        label_separator=label_separator,
    )


def _key_value_pairs(option: str, texts: list[str] | None, *, expected: str) -> dict[str, str]:
    pairs = [text.partition("=") for text in ([] if texts is None else texts)]
    for key, sign, value in pairs:
        if not (key and sign and value):
            raise typer.BadParameter(f"{option} {key}{sign}{value}: expected {expected}")
    return {key: value for key, _, value in pairs}


def write_options(
    keep_columns: Annotated[str, typer.Option(help="The input's columns to write too: all, none, or id,text.")] = "all",
    on_error: Annotated[
        Literal["fail", "skip"], typer.Option(help="skip: leave bad rows out and write them, with reasons, to a file.")
    ] = "fail",
    rejects: Annotated[Path | None, typer.Option(help="That file; default: OUTPUT + .rejects.jsonl.")] = None,
    output_format: Annotated[
        str | None, typer.Option(help="jsonl, csv, tsv, parquet or npy; default: by the output's extension.")
    ] = None,
) -> "WriteOptions":
    """What a command writes for each row."""
    from bert_tasks.inference import WriteOptions

    names = tuple(name.strip() for name in keep_columns.split(","))
    if not all(names):
        raise typer.BadParameter(f"--keep-columns {keep_columns!r}: expected all, none, or names such as id,text")
    return WriteOptions(
        keep_columns=names if keep_columns not in ("all", "none") else keep_columns,
        on_error=on_error,
        rejects=rejects,
        format=output_format,
    )
