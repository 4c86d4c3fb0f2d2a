"""The exceptions that this package raises, with the command line's exit codes.

Any other exception that escapes is a defect (exit code 1). The module also spells arguments in messages, because the
same function may be called from Python or by a command.
"""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_speaks_options = False


@contextmanager
def messages_with_options() -> Iterator[None]:
    """Makes messages spell arguments as options of the command line while the block runs."""
    global _speaks_options
    _speaks_options = True
    try:
        yield
    finally:
        _speaks_options = False


def argument(name: str, value: Any = True) -> str:
    """Returns the spelling of an argument for the reader of a message.

    It is Python's spelling or an option of the command line. With the value None, it is the name alone.

    Examples:
        >>> argument("label_separator", "|")
        "label_separator='|'"
    """
    if not _speaks_options:
        if value is None:
            return name
        return f"{name}={value!r}"
    option = f"--{name.replace('_', '-')}"
    if isinstance(value, Mapping):
        return " ".join(f"{option.removesuffix('s')} {key}={shlex.quote(text)}" for key, text in value.items())
    if value is True or value is None:
        return option
    return f"{option} {shlex.quote(str(value))}"


class BertTasksError(Exception):
    """An error whose message says what happened, where, and what to do about it.

    Attributes:
        exit_code: The exit code of the command line.
        collective: True if all processes of a job raise it, so that only the first process reports it.
    """

    exit_code = 1
    collective = False

    def _render_traceback_(self) -> list[str]:
        """Returns the lines that IPython shows, which are the message without the calls inside the package."""
        return f"{type(self).__name__}: {self}".splitlines()


class UsageError(BertTasksError):
    """A wrong argument, or a launcher that does not match the run (exit code 2)."""

    exit_code = 2
    collective = True  # all processes have the same command and environment


class RecipeError(BertTasksError):
    """A recipe that cannot be read or does not match the schema (exit code 2)."""

    exit_code = 2
    collective = True


class DataError(BertTasksError):
    """Rows, files or data sets that cannot be used (exit code 3)."""

    exit_code = 3


class CheckpointError(BertTasksError):
    """A model folder, weights file or tokenizer that cannot be used (exit code 4)."""

    exit_code = 4


class NoHeadError(CheckpointError):
    """A model folder without a trained head for the task (exit code 4)."""


class NotFiniteScoresError(CheckpointError):
    """A model whose weights or precision make scores infinite or NaN (exit code 4)."""


class DivergedError(BertTasksError):
    """Training stopped before a step with non-finite loss or gradient (exit code 5)."""

    exit_code = 5
    collective = True


class StoppedError(BertTasksError):
    """A signal stopped the run. The same command resumes it (exit code 143 or 130)."""

    collective = True

    def __init__(self, message: str, *, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class ClosedPipeError(BertTasksError):
    """The reader of the output closed the pipe, as ``head`` does (128 + SIGPIPE)."""

    exit_code = 141
    collective = True


# What libraries say if memory is used up. Most of them raise RuntimeError, so the text has to tell.
_NO_MEMORY = ("allocate memory", "not enough memory", "out of memory", "bad_alloc", "alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if Python, the system, torch or a library ran out of memory."""
    if isinstance(error, MemoryError):
        return True
    # Errors about values may quote any text, so theirs tells nothing.
    is_other = isinstance(error, BertTasksError | ValueError | LookupError | TypeError)
    return not is_other and any(sign in str(error).lower() for sign in _NO_MEMORY)


# It is no BertTasksError, because no user sees it.
class GivenUpError(Exception):
    """Training or evaluation that was asked to stop early. The caller always catches it."""
