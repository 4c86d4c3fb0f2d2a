"""The file that an internal error leaves behind, for a bug report.

Owns what is in it: the traceback, the command and what ``bert-tasks env`` shows, with secrets masked. Locals are never
in it; a message of a library may quote the user's data, which the file says.

The console script: runs a command and turns its errors into one short message and an exit code.
"""

import os
import shlex
import sys
import tempfile
import time
import traceback
from types import TracebackType

from bert_tasks.cli.app import app, forget_stdout, leave, processes, standard_streams
from bert_tasks.environment import disable_telemetry, environment, environment_lines, masked, masked_arguments
from bert_tasks.errors import BertTasksError, ClosedPipeError, StoppedError, UsageError
from bert_tasks.paths import os_error_message
from bert_tasks.terminal import printable

_NOTE = "Written by bert-tasks for a bug report. Secrets are masked; the error's message may quote your data: read it."


def write_crash(error: Exception) -> str | None:
    """Writes the file, for its owner's eyes only; None where there is no room for it."""
    try:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        handle, path = tempfile.mkstemp(prefix=f"bert-tasks-crash-{stamp}-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(_text(error))
    except OSError:
        return None
    return path


def _text(error: Exception) -> str:
    command = " ".join(["bert-tasks", *masked_arguments(sys.argv[1:])])
    # torch may be what is broken: ask it only if it is there.
    content = environment(devices="torch" in sys.modules)
    trace = masked("".join(traceback.format_exception(error)))
    return "\n".join([_NOTE, "", f"command: {command}", "", trace, *environment_lines(content), ""])


# oneDNN keeps the code that it makes for each shape, of 1024 shapes if nobody says otherwise: 50 MiB over a large file.
# A forward pass has few of them. In a library the choice would not be ours; here the process is.
PRIMITIVES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")

# What gloo and nccl say when another process is gone or does not answer.
_LOST = ("closed by peer", "reset by peer", "onnection refused", "Timed out", "timed out", "Broken pipe")


def main() -> None:
    """The console script. ``--debug`` may stand before or after the command."""
    os.environ.setdefault(*PRIMITIVES)
    disable_telemetry()
    given = sys.argv[1:]
    arguments = [argument for argument in given if argument != "--debug"]
    debug = len(arguments) < len(given)
    with standard_streams():
        try:
            with _ShortErrors(debug=debug):
                app(["--debug", *arguments] if debug else arguments)
        except SystemExit as end:
            if processes() > 1:
                leave(end.code)
            raise


class _ShortErrors:
    """Errors end here as one message and an exit code; a traceback only for those who debug."""

    def __init__(self, *, debug: bool) -> None:
        self.debug = debug

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception):  # SystemExit is how typer ends
            return
        if isinstance(error, ClosedPipeError | BrokenPipeError):
            forget_stdout()
            raise SystemExit(ClosedPipeError.exit_code) from None
        if self.debug or (processes() > 1 and not isinstance(error, BertTasksError)):
            sys.stderr.write(printable(masked("".join(traceback.format_exception(error)))))
        sys.stderr.write(printable(_told(error, debug=self.debug)))
        raise SystemExit(_exit_code(error)) from None


def _exit_code(error: Exception) -> int:
    """A file that cannot be read or written is no defect of the package."""
    if isinstance(error, BertTasksError):
        return error.exit_code
    return UsageError.exit_code if isinstance(error, OSError) else 1


def _told(error: Exception, *, debug: bool) -> str:
    """What standard error gets. Of several processes, each says only what the first does not know."""
    rank, others = int(os.environ.get("RANK", "0")), processes() > 1
    who = f"process {rank} of {processes()}: " if others else ""
    if isinstance(error, StoppedError):
        return f"{error}\n{_resume_line()}" if rank == 0 else ""
    if isinstance(error, BertTasksError):
        if rank == 0:
            return f"error: {error}\n"
        return "" if error.collective else f"{who}error: {error}\n"
    reason = masked(str(error)).partition("\n")[0][:500]
    if others and any(sign in str(error) for sign in _LOST):
        return f"{who}lost the connection to the other processes ({reason}); the one that failed says why\n"
    if isinstance(error, OSError):
        return f"{who}error: {masked(os_error_message(error))[:500]}\n"
    where = "" if debug or others else "  --debug shows where; please report it\n"
    file = write_crash(error)
    kept = "" if file is None else f"  traceback and versions, for the report: {file}\n"
    return f"{who}internal error: {type(error).__name__}: {reason}\n{where}{kept}"


def _resume_line() -> str:
    """The command that goes on with a stopped run: this one, which must not replace what it saved."""
    if processes() > 1:
        return "resume: start the same processes again, without --overwrite\n"
    arguments = [argument for argument in sys.argv[1:] if argument != "--overwrite"]
    return f"resume: {shlex.join(['bert-tasks', *arguments])}\n"
