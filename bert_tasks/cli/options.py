"""Arguments and options that several commands share, and the values that commands get from them.

typer makes the options of a command from its signature. ``shared_options`` puts the parameters of a function such as
``read_options`` into the signature, so that the same option has the same name, type and help in every command.
"""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from bert_tasks.data.options import ReadOptions
    from bert_tasks.inference import WriteOptions

# An option in a panel of the help page. The panels follow "Options", which holds the essential ones.
reading_option = partial(typer.Option, rich_help_panel="Reading options")
model_option = partial(typer.Option, rich_help_panel="Model options")
output_option = partial(typer.Option, rich_help_panel="Output options")
prediction_option = partial(typer.Option, rich_help_panel="Prediction options")
request_option = partial(typer.Option, rich_help_panel="Request options")
device_option = partial(typer.Option, rich_help_panel="Devices and processes")

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe, a TOML file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Value of a recipe's key, e.g. optim.epochs=1.")
]
OutputDir = Annotated[
    Path | None,
    typer.Option("--output-dir", "-o", metavar="FOLDER", help="Folder of the run. Default: run.output_dir."),
]
ModelFolder = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a model or run.")]
ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="Folder of a model or run, hub id, or package:NAME/PATH.")
]
Format = Annotated[
    str | None, reading_option(metavar="NAME", help="Format, e.g. glue/sst2. Default: by the extension.")
]
Delimiter = Annotated[
    str | None, reading_option(metavar="CHARACTER", help=r"Separator of columns in a csv file, e.g. ';' or '\t'.")
]
Encoding = Annotated[str | None, reading_option(metavar="NAME", help="Encoding of a text file. Default: utf-8.")]
Header = Annotated[
    bool | None, reading_option("--header/--no-header", help="First line of csv is a header (else columns 0, 1, ...).")
]
DataOrPipe = Annotated[
    str | None, typer.Argument(metavar="FILE", help="Rows in csv, tsv, jsonl or parquet. Default: -, a pipe.")
]
LabelSeparator = Annotated[
    str | None, reading_option(metavar="TEXT", help="Separator of labels in a cell, e.g. '|'. Default: ';'.")
]
SplitColumn = Annotated[
    str | None, reading_option(metavar="COLUMN", help="Column of splits. Reads test rows. Default: all rows.")
]
LabelledRowErrors = Annotated[
    Literal["fail", "skip"] | None,
    output_option("--on-error", help="Action for bad rows. skip omits them. Default: as trained."),
]
Revision = Annotated[str | None, model_option(metavar="NAME", help="Branch, tag or commit of a hub id.")]
Adapter = Annotated[str | None, model_option(metavar="FOLDER", help="Adapters to add to MODEL, their base.")]
Precision = Annotated[
    Literal["float32", "bf16", "int8"], device_option(help="Number format. int8 needs `quantize` and a CPU.")
]


def _set_process_timeout(seconds: float | None) -> None:
    """Starts the processes with a timeout. The first call of ``make_accelerator`` decides about it."""
    from bert_tasks.distributed import make_accelerator

    if seconds is not None:
        make_accelerator(timeout=seconds)


ProcessTimeout = Annotated[
    float | None,
    device_option(
        min=1,
        metavar="SECONDS",
        callback=_set_process_timeout,
        help="Time that processes wait for each other. Default: torch's.",
    ),
]
NewFolder = Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder to write, new or empty.")]
RowsOutput = Annotated[
    str, typer.Option("--output", "-o", metavar="FILE", help="File, with the format's extension. - is standard output.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what the output folder holds.")]
Texts = Annotated[
    list[str] | None, typer.Option("--text", metavar="TEXT", help="Text instead of a file. May be repeated.")
]
Quiet = Annotated[bool, output_option("--quiet", "-q", help="Show no progress.")]
AsJson = Annotated[bool, output_option("--json", help="Print JSON.")]
WithReport = Annotated[bool, output_option("--report/--no-report", help="Write report.html to the folder.")]


def shared_options(**groups: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a command, where a parameter gets what its group, a function of options, returns.

    Args:
        groups: For each of these parameters of the command, the function whose parameters are the options.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = {name: inspect.signature(group).parameters for name, group in groups.items()}
        signature: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(command).parameters.items():
            if name in groups:
                signature += options[name].values()
            else:
                signature.append(parameter)
        # Keywords may follow in any order, whether they have a default or not.
        parameters = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in signature]

        def call(**values: Any) -> None:
            for name, group in groups.items():
                chosen = {option: values.pop(option) for option in options[name]}
                values[name] = group(**chosen)
            command(**values)

        call.__name__ = command.__name__
        call.__doc__ = command.__doc__
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        # typer reads the options of a command from its signature and its annotations.
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # PEP 362
        return call

    return decorate


def model_options(
    task: Annotated[
        str | None, model_option(metavar="NAME", help="Task, MODULE:CLASS, or name of one of several tasks.")
    ] = None,
    set_: Annotated[
        list[str] | None, model_option("--set", metavar="KEY=VALUE", help="Setting of the task, e.g. max_length=256.")
    ] = None,
    revision: Revision = None,
) -> dict[str, Any]:
    """Returns the arguments ``task``, ``settings`` and ``revision`` of functions that load a model."""
    from bert_tasks.recipe.schema import load_task_class
    from bert_tasks.recipe.toml import parse_value

    pairs = _key_value_pairs("--set", set_, expected="KEY=VALUE, e.g. max_length=256")
    values = {key.removeprefix("settings."): parse_value(value) for key, value in pairs.items()}
    named: Any = task
    if task is not None and ":" in task:  # MODULE:CLASS, a task of the user's own
        named = load_task_class(task)
    return {"task": named, "settings": values, "revision": revision}


def served_adapters(
    adapter: Annotated[
        list[str] | None, model_option("--adapter", metavar="NAME=FOLDER", help="Adapters to serve. May be repeated.")
    ] = None,
) -> dict[str, str]:
    """Returns the argument ``adapters`` of ``serve``."""
    pairs = _key_value_pairs("--adapter", adapter, expected="NAME=FOLDER, e.g. mood=runs/mood/adapter")
    if adapter is not None and len(pairs) < len(adapter):
        raise typer.BadParameter(f"two of --adapter {' --adapter '.join(adapter)} have the same name. Rename one")
    return pairs


def read_options(
    format: Format = None,
    column: Annotated[
        list[str] | None,
        reading_option("--column", metavar="NAME=COLUMN", help="Column, e.g. text=review. Default: as trained."),
    ] = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    header: Header = None,
    label_separator: LabelSeparator = None,
    split_column: SplitColumn = None,
) -> "ReadOptions":
    """Returns how a file is read that a trained model gets."""
    from bert_tasks.data.options import ReadOptions

    return ReadOptions(
        columns=_key_value_pairs("--column", column, expected="NAME=COLUMN, e.g. text=review"),
        format=format,
        delimiter=delimiter,
        encoding=encoding,
        header=header,
        label_separator=label_separator,
        split_column=split_column,
    )


def _key_value_pairs(option: str, texts: list[str] | None, *, expected: str) -> dict[str, str]:
    """Returns the parts of texts such as KEY=VALUE. A later value of a key replaces an earlier one."""
    pairs: dict[str, str] = {}
    if texts is None:
        return pairs
    for text in texts:
        key, sign, value = text.partition("=")
        if not (key and sign and value):
            raise typer.BadParameter(f"{option} {text}: expected {expected}")
        pairs[key] = value
    return pairs


def write_options(
    keep_columns: Annotated[
        str, output_option(metavar="NAMES", help="Input columns to keep: all, none, or e.g. id,text.")
    ] = "all",
    on_error: Annotated[
        Literal["fail", "skip"], output_option(help="Action for bad rows. skip writes them to --rejects.")
    ] = "fail",
    rejects: Annotated[
        Path | None, output_option(metavar="FILE", help="File of skipped rows. Default: OUTPUT.rejects.jsonl.")
    ] = None,
    output_format: Annotated[
        str | None, output_option(metavar="NAME", help="Format of the output, e.g. npy. Default: by its extension.")
    ] = None,
) -> "WriteOptions":
    """Returns what a command writes for each row, and where bad rows go."""
    from bert_tasks.inference import WriteOptions

    names = tuple(name.strip() for name in keep_columns.split(","))
    if not all(names):
        raise typer.BadParameter(f"--keep-columns {keep_columns!r}: expected all, none, or names such as id,text")
    kept_columns: Any = names
    if keep_columns in ("all", "none"):
        kept_columns = keep_columns
    return WriteOptions(
        keep_columns=kept_columns,
        on_error=on_error,
        rejects=rejects,
        format=output_format,
    )
