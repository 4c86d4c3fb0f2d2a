"""The command line's application, its help pages, and everything that a command prints.

This module owns standard output and standard error while a command runs. Results go to standard output, and everything
else goes to standard error, so that a pipe gets the result alone. Only the first of several processes prints.
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
from typing import Annotated, Any, BinaryIO, Literal, NoReturn, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandFunctionType

from bert_tasks.errors import ClosedPipeError, UsageError
from bert_tasks.terminal import message_stream, message_text, printable, printable_json, write_message

BOXES = 80  # columns of a terminal below which the boxes of help pages would cut words


# The order and the panels of the commands in ``bert-tasks --help``.
GROUPS: dict[str, tuple[str, ...]] = {
    "Start": ("init", "check", "train"),
    "Use": ("predict", "evaluate", "embed", "serve", "calibrate", "quantize", "export"),
    "Study": ("report", "search"),
    "Share": ("push",),
    "Tools": ("inspect", "tokenizer", "env"),
}


class _Parser:
    """How a command or the application reads its arguments, as a mix-in for typer's classes."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the parameters as ``--help`` shows them.

        Metavars name the units, so typer's types and ranges are hidden.
        """
        # typer shows "INTEGER RANGE [1<=x<=20]" and the like, which the metavar and the help already say.
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
        """Parses the arguments."""
        with _write_errors_raised():  # help and version are printed here
            return super().make_context(*arguments, **options)  # type: ignore[misc]


class _Command(_Parser, TyperCommand):
    pass


class _Group(_Parser, TyperGroup):
    """The application, whose help lists the commands by what they are for instead of by their names."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names of the commands in the order of ``GROUPS``."""
        commands: list[str] = []
        for names in GROUPS.values():
            commands += names
        return commands

    def invoke(self, ctx: Any) -> Any:
        """Runs the command. Ctrl-C ends it with the exit code that a shell gives a signal."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print_err("interrupted")
            raise typer.Exit(128 + signal.SIGINT) from None


class _App(typer.Typer):
    """A typer application whose commands are in the panels of ``GROUPS``."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[CommandFunctionType], CommandFunctionType]:
        panel = next(panel for panel, names in GROUPS.items() if name in names)
        return super().command(name, cls=_Command, rich_help_panel=panel, **options)


# Markdown shows [brackets] in texts, which typer's default takes for its own markup.
_MARKUP: Literal["markdown"] | None = "markdown" if shutil.get_terminal_size().columns >= BOXES else None
app = _App(
    cls=_Group,
    help="Pre-train, fine-tune, distil, evaluate, serve and export BERT-family encoders.",
    pretty_exceptions_enable=False,
    rich_markup_mode=_MARKUP,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class _PrintableFormatter(logging.Formatter):
    """Escapes what a file or a library may have put into a message."""

    def format(self, record: logging.LogRecord) -> str:
        return message_text(super().format(record))


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        print_out(f"bert-tasks {installed('bert-tasks')}")
        raise typer.Exit
    layout = "note: %(message)s"
    level = logging.WARNING
    if debug:
        layout = "%(name)s: %(message)s"
        level = logging.DEBUG
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableFormatter(layout))
    logging.basicConfig(level=level, handlers=[handler])


def print_result(content: dict[str, Any], lines: list[str], *, as_json: bool, headline: str = "") -> None:
    """Prints a command's result on standard output, as lines or as JSON (see ``print_out``).

    Before the lines stands the headline, if there is one, the main thing of the result, which a terminal shows in bold.
    """
    if not as_json:
        if headline:
            _print_in_bold(headline)
        print_out(message_text("\n".join(lines)))
        return
    # JSON has no NaN, but Python writes it. Reading it back makes null of a metric that is not a number.
    plain = json.loads(json.dumps(content, default=str), parse_constant=lambda _: None)
    encoding = sys.stdout.encoding  # a stream that a program has put there may have none
    is_unicode = encoding is not None and encoding.lower().replace("-", "").startswith("utf")
    print_out(printable_json(json.dumps(plain, indent=2, ensure_ascii=not is_unicode)))


def print_out(text: str) -> None:
    """Prints a command's result on standard output.

    Raises:
        ClosedPipeError: The reader has closed the pipe.
        UsageError: The result cannot be written, for example to a full disk.
    """
    if is_printing_process():
        with _write_errors_raised():
            print(printable(text), flush=True)


def _print_in_bold(text: str) -> None:
    """Prints a line as ``print_out`` does, on a terminal in bold."""
    from rich.console import Console  # its import takes time

    if is_printing_process():
        with _write_errors_raised():
            Console().out(message_text(text), style="bold", highlight=False)


@contextmanager
def _write_errors_raised() -> Iterator[None]:
    """Turns a failure to write standard output into an error of this package."""
    try:
        yield
    except (BrokenPipeError, SystemExit) as end:
        # rich, which writes help pages, ends the process with 1 if a pipe is closed. Other codes are ends of their own.
        if isinstance(end, SystemExit) and end.code != 1:
            raise
        raise ClosedPipeError("the output's reader has closed it") from None
    except OSError as error:
        discard_output(1)
        raise UsageError(f"cannot write to standard output ({error.strerror})") from None


def print_notice(text: str) -> None:
    """Prints a line on standard output that is not the command's result. Ignores a failure to write it."""
    if is_printing_process():
        try:
            print(message_text(text), flush=True)
        except OSError:
            discard_output(1)  # otherwise the text that is still buffered would fail again at exit


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
    """Yields standard output for one result. Everything else that is printed meanwhile goes to standard error."""
    sys.stdout.flush()
    # The descriptors are exchanged below Python, so that what libraries in C or Rust print does not reach the rows.
    stream = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    rows: BinaryIO = stream
    if stream.isatty():
        rows = cast(BinaryIO, _EscapedRows(stream))
    try:
        yield rows
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
    # In a locale such as C, Python could not print the letters of most languages.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    before = sys.stderr
    format_warning = warnings.formatwarning
    sys.stderr = message_stream()
    warnings.formatwarning = lambda *arguments, **options: printable(format_warning(*arguments, **options))
    try:
        yield
    finally:
        sys.stderr, warnings.formatwarning = before, format_warning
        for descriptor, last in ((2, before), (1, sys.stdout)):
            if last is None:
                continue
            # Text that is still buffered and cannot be written would make Python's exit code 120.
            try:
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
    """Returns the number of processes of the run, which the launcher states."""
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
    # A command that has not imported the module has joined no group of processes.
    if "bert_tasks.distributed" in sys.modules:
        from bert_tasks.distributed import leave_process_group

        leave_process_group()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    sys.stderr.flush()
    if not isinstance(code, int):  # as for sys.exit, None is success and a text is a failure
        code = int(code is not None)
    os._exit(code)
