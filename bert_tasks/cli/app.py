"""The standard streams of a command: each can be written without a crash, whatever the shell made of it.

Owns their state while a command runs. Must not know what is written.

Arguments and options that several commands share, and what their values become.

The command line's application, its common options, and how commands speak.

Owns standard output: of several processes only the first one speaks. Must not know any command.
"""

import io
import json
import logging
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal, NoReturn, TextIO, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException
from typer.models import CommandFunctionType

from bert_tasks.errors import ClosedPipeError, UsageError
from bert_tasks.terminal import message_stream, printable, printable_json, write_message

if TYPE_CHECKING:
    from bert_tasks.data.columns import PassthroughColumns
    from bert_tasks.tasks.base import Task


@contextmanager
def standard_streams() -> Iterator[None]:
    """While a command runs, messages cannot fail, and no character is beyond an encoding.

    A descriptor that the shell closed (``>&-``) is taken, so that no file gets its number: writing to it fails as
    writing to a full disk does. Standard error takes messages only, and loses what cannot be written.
    """
    for number, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        _claim(number, mode)
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    before, formatted = sys.stderr, warnings.formatwarning
    sys.stderr, warnings.formatwarning = message_stream(), _printable_warning(formatted)
    try:
        yield
    finally:
        sys.stderr, warnings.formatwarning = before, formatted
        _give_up(before, 2)
        _give_up(sys.stdout, 1)


def forget_stdout() -> None:
    """It cannot be written any more, and Python would complain when it flushes what is left."""
    discard(1)


def discard(descriptor: int) -> None:
    """Sends what is still written to a descriptor nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


class PrintableFormatter(logging.Formatter):
    """Log lines without what would act on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _claim(number: int, mode: int) -> None:
    try:
        os.fstat(number)
    except OSError:
        opened = os.open(os.devnull, mode)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)


def _give_up(stream: TextIO | None, descriptor: int) -> None:
    """What a stream still holds and cannot write would make Python's exit code 120."""
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        discard(descriptor)
        with suppress(OSError, ValueError):
            stream.flush()


def _printable_warning(formatted: Callable[..., str]) -> Callable[..., str]:
    return lambda *arguments, **options: printable(formatted(*arguments, **options))


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
    from bert_tasks.recipe.schema import load_task_class

    return load_task_class(name)


def settings(options: list[str] | None) -> dict[str, Any]:
    from bert_tasks.recipe.toml import parse_value

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


def kept_columns(text: str) -> "PassthroughColumns":
    """``all``, ``none``, or names with commas between them; spaces around a comma do not belong to the names."""
    if text in ("all", "none"):
        return text
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise typer.BadParameter(f"--keep-columns {text!r}: expected all, none, or names such as id,text")
    return names


CUT = "\u2026"  # what rich puts where it cuts a word


def _without_flag_types(params: list[Any]) -> list[Any]:
    """The parameters as ``--help`` shows them: a flag takes no value, so it shows no type of one."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


def _format_whole_help(command: Any, formats: Callable[[Any, Any], None], ctx: Any, formatter: Any) -> None:
    """The page in boxes, or as plain text where a narrow terminal would cut words in them, names of options too."""
    with redirect_stdout(io.StringIO()) as drafted:
        formats(ctx, formatter)
    if CUT not in drafted.getvalue():
        with _result_written():
            formats(ctx, formatter)
        return
    command.rich_markup_mode = None
    formatter.width = max(shutil.get_terminal_size().columns - 1, 20)
    formatter.write_dl = partial(formatter.write_dl, col_max=max(formatter.width // 4, 6))
    formats(ctx, formatter)


@contextmanager
def _printable_errors() -> Iterator[None]:
    """Errors of the parser quote what was typed."""
    try:
        yield
    except TyperException as error:
        error.message = printable(error.message)
        raise


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_types(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _format_whole_help(self, super().format_help, ctx, formatter)


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_types(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _format_whole_help(self, super().format_help, ctx, formatter)

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with _printable_errors():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        with _printable_errors():
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                tell("interrupted")
                raise typer.Exit(128 + signal.SIGINT) from None


class _App(typer.Typer):
    def command(self, name: str | None = None, **options: Any) -> Callable[[CommandFunctionType], CommandFunctionType]:
        return super().command(name, **{"cls": _Command, **options})


app = _App(
    cls=_Group,
    help="Fine-tune, evaluate and run BERT-family encoders.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        say(f"bert-tasks {installed('bert-tasks')}")
        raise typer.Exit
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(name)s: %(message)s"))
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, handlers=[handler])


def show(content: dict[str, Any], lines: list[str], *, as_json: bool) -> None:
    """Writes a command's result on standard output; see ``say``."""
    if as_json:  # a metric that is not a number becomes null: JSON has no NaN
        plain = json.loads(json.dumps(content, default=str), parse_constant=lambda _: None)
        lines = [printable_json(json.dumps(plain, indent=2, ensure_ascii=not _takes_unicode()))]
    say("\n".join(lines))


def say(text: str) -> None:
    """Writes a command's result on standard output.

    Raises:
        ClosedPipeError: nobody reads it any more.
        UsageError: it cannot be written.
    """
    if is_first_process():
        with _result_written():
            print(printable(text), flush=True)


@contextmanager
def _result_written() -> Iterator[None]:
    try:
        yield
    except (BrokenPipeError, SystemExit):  # rich ends the process where a pipe is closed
        raise ClosedPipeError("the output's reader has closed it") from None
    except OSError as error:
        forget_stdout()
        raise UsageError(f"cannot write to standard output ({error.strerror})") from None


def note(text: str) -> None:
    """Writes a line on standard output that is not the command's result: lost where it cannot be written."""
    if is_first_process():
        try:
            print(printable(text), flush=True)
        except OSError:
            forget_stdout()


def _takes_unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")


def warn(text: str) -> None:
    """What went wrong beside a command that has done its work."""
    tell(f"warning: {text}")


def tell(text: str) -> None:
    """On standard error: what must not mix with a result on standard output. It is lost where it cannot be written."""
    if is_first_process():
        write_message(text)


class _TerminalRows:
    """Rows for a terminal: what it would obey is escaped as in JSON. Files and pipes get the rows as they are."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, content: bytes) -> int:
        return self._stream.write(printable_json(content.decode("utf-8", errors="backslashreplace")).encode())

    def flush(self) -> None:
        self._stream.flush()


@contextmanager
def result_stream() -> Iterator[BinaryIO]:
    """Standard output for one result; what anything else prints meanwhile goes to standard error."""
    sys.stdout.flush()
    stream = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        yield cast(BinaryIO, _TerminalRows(stream)) if stream.isatty() else stream
        stream.flush()
    finally:
        sys.stdout.flush()
        os.dup2(stream.fileno(), 1)
        with suppress(OSError):  # what could not be written fails here once more, and must not hide why
            stream.close()


def processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Of several that a launcher started, only the first speaks; they all end with the same code."""
    return os.environ.get("RANK", "0") == "0"


def leave(code: str | int | None) -> NoReturn:
    """Ends this process without Python's shutdown.

    Of several processes, a communication thread that is still alive then would abort it and replace its exit code; for
    one that loads a model Python would wait.
    """
    if "bert_tasks.inference" in sys.modules:
        from bert_tasks.inference import leave_process_group

        leave_process_group()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
