"""The command line's application, its help pages, and everything that a command prints.

Owns standard output and standard error while a command runs. Only the first of several processes prints.
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
from contextlib import contextmanager, suppress
from typing import Annotated, Any, BinaryIO, NoReturn, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandFunctionType

from bert_tasks.errors import ClosedPipeError, UsageError
from bert_tasks.terminal import message_stream, printable, printable_json, write_message

BOXES = 80  # columns of a terminal below which the boxes of help pages would cut words


# The order and the panels of the commands in ``bert-tasks --help``.
GROUPS: dict[str, tuple[str, ...]] = {
    "Start": ("init", "check", "train"),
    "Use": ("predict", "evaluate", "embed", "serve", "export"),
    "Study": ("report", "search"),
    "Share": ("push",),
    "Tools": ("inspect", "tokenizer", "env"),
}


class _Parser:
    """How a command or the application reads its arguments, as a mix-in for typer's classes."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters as ``--help`` shows them. Metavars name the units, so typer's types and ranges are hidden."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of the typer class beside it
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
            elif param.type_descriptor.is_choice:
                param.metavar = param.display_type(ctx).strip("<>")
            if param.param_type_name == "argument":
                param.display_type_rich = lambda ctx: None
            param._get_number_range_help_str = str  # an empty text
        return params

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with _write_errors_raised():  # help and version are printed here
            return super().make_context(*arguments, **options)  # type: ignore[misc]


class _Command(_Parser, TyperCommand):
    pass


class _Group(_Parser, TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in GROUPS.values() for name in names]

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print_err("interrupted")
            raise typer.Exit(128 + signal.SIGINT) from None


class _App(typer.Typer):
    def command(self, name: str | None = None, **options: Any) -> Callable[[CommandFunctionType], CommandFunctionType]:
        panel = next(panel for panel, names in GROUPS.items() if name in names)
        return super().command(name, cls=_Command, rich_help_panel=panel, **options)


app = _App(
    cls=_Group,
    help="Pre-train, fine-tune, distil, evaluate, serve and export BERT-family encoders.",
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown" if shutil.get_terminal_size().columns >= BOXES else None,  # which shows [brackets]
    context_settings={"help_option_names": ["-h", "--help"]},
)


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        print_out(f"bert-tasks {installed('bert-tasks')}")
        raise typer.Exit
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableFormatter("%(name)s: %(message)s" if debug else "note: %(message)s"))
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, handlers=[handler])


def print_result(content: dict[str, Any], lines: list[str], *, as_json: bool) -> None:
    """Prints a command's result on standard output, as lines or as JSON (see ``print_out``)."""
    if as_json:  # a metric that is not a number becomes null: JSON has no NaN
        plain = json.loads(json.dumps(content, default=str), parse_constant=lambda _: None)
        encoding = sys.stdout.encoding  # None: of a stream that a program has put there
        is_unicode = encoding is not None and encoding.lower().replace("-", "").startswith("utf")
        lines = [printable_json(json.dumps(plain, indent=2, ensure_ascii=not is_unicode))]
    print_out("\n".join(lines))


def print_out(text: str) -> None:
    """Prints a command's result on standard output.

    Raises:
        ClosedPipeError: the reader has closed the pipe.
        UsageError: it cannot be written.
    """
    if is_printing_process():
        with _write_errors_raised():
            print(printable(text), flush=True)


@contextmanager
def _write_errors_raised() -> Iterator[None]:
    try:
        yield
    except (BrokenPipeError, SystemExit) as end:
        if isinstance(end, SystemExit) and end.code != 1:  # rich ends the process with 1 if a pipe is closed
            raise
        raise ClosedPipeError("the output's reader has closed it") from None
    except OSError as error:
        discard_output(1)
        raise UsageError(f"cannot write to standard output ({error.strerror})") from None


def print_notice(text: str) -> None:
    """Prints a line on standard output that is not the command's result. Ignores a failure to write it."""
    if is_printing_process():
        try:
            print(printable(text), flush=True)
        except OSError:
            discard_output(1)


def print_err(text: str) -> None:
    """Prints a line on standard error. Ignores a failure to write it."""
    if is_printing_process():
        write_message(text)


class _EscapedRows:
    """A terminal for rows, which escapes terminal control characters as in JSON."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, content: bytes) -> int:
        return self._stream.write(printable_json(content.decode("utf-8", errors="backslashreplace")).encode())

    def flush(self) -> None:
        self._stream.flush()


@contextmanager
def result_stream() -> Iterator[BinaryIO]:
    """Standard output for one result. Everything else that is printed meanwhile goes to standard error."""
    sys.stdout.flush()
    stream = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        yield cast(BinaryIO, _EscapedRows(stream)) if stream.isatty() else stream
        stream.flush()
    finally:
        sys.stdout.flush()
        os.dup2(stream.fileno(), 1)
        with suppress(OSError):  # unwritten rows fail here once more, which must not hide the first error
            stream.close()


@contextmanager
def standard_streams() -> Iterator[None]:
    """Prepares the standard streams for a command, so that messages cannot fail and every character can be encoded.

    A descriptor that the shell has closed (``>&-``) is reserved, so that no file gets its number. Writing to it then
    fails as writing to a full disk does. Standard error takes messages only and drops what cannot be written.
    """
    for descriptor, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, mode)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    before, format_warning = sys.stderr, warnings.formatwarning
    sys.stderr = message_stream()
    warnings.formatwarning = lambda *arguments, **options: printable(format_warning(*arguments, **options))
    try:
        yield
    finally:
        sys.stderr, warnings.formatwarning = before, format_warning
        for descriptor, last in ((2, before), (1, sys.stdout)):
            if last is None:
                continue
            try:  # text that is still buffered and cannot be written would make Python's exit code 120
                last.flush()
            except (OSError, ValueError):
                discard_output(descriptor)
                with suppress(OSError, ValueError):
                    last.flush()


def discard_output(descriptor: int) -> None:
    """Redirects a descriptor that cannot be written to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def process_count() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_printing_process() -> bool:
    """Returns True if this process prints. Only the first of several processes does.

    The launcher's variable says so before the command line has loaded accelerate, which ``distributed`` asks.
    """
    return os.environ.get("RANK", "0") == "0"


def exit_without_shutdown(code: str | int | None) -> NoReturn:
    """Ends this process without Python's shutdown.

    In a run of several processes, a communication thread that is still alive at shutdown would abort the process and
    replace its exit code. In a server, Python would wait for the thread that loads a model.
    """
    if "bert_tasks.distributed" in sys.modules:
        from bert_tasks.distributed import leave_process_group

        leave_process_group()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
