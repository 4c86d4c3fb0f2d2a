"""The command line's application, its common options, and how commands speak.

Owns standard output: of several processes only the first one speaks. Must not know any command.
"""

import io
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from typing import Annotated, Any, BinaryIO, NoReturn, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException
from typer.models import CommandFunctionType

from bert_tasks.cli.streams import PrintableFormatter, forget_stdout
from bert_tasks.errors import ClosedPipeError, UsageError
from bert_tasks.terminal import printable, printable_json, write_message

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
