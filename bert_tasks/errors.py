"""The exceptions this package raises on purpose, each with the exit code its command ends with.

Owns the contract between the API (typed exceptions) and the command line (exit codes, one short message). Anything
else that escapes is a defect of the package: exit code 1.
"""


class BertTasksError(Exception):
    """A failure the user can act on. The message names what, where, what was expected and the next step.

    ``collective``: all processes of a job raise it, and the first one tells it.
    """

    exit_code = 1
    collective = False


class UsageError(BertTasksError):
    """A wrong argument, or a launcher that does not match the run (exit code 2)."""

    exit_code = 2
    collective = True  # the command and its surroundings are the same for all


class PathError(UsageError):
    """A path that the system does not let this process examine: its permissions, its length, links in a circle.

    Another process of the job may see another disk, so each tells its own.
    """

    collective = False


class RecipeError(BertTasksError):
    """A recipe that cannot be read or does not fit the schema (exit code 2)."""

    exit_code = 2
    collective = True


class DataError(BertTasksError):
    """Rows, files or data sets that cannot be used (exit code 3)."""

    exit_code = 3


class CheckpointError(BertTasksError):
    """A model folder, weights file or tokenizer that cannot be used (exit code 4)."""

    exit_code = 4


class DivergedError(BertTasksError):
    """Training met a non-finite loss or gradient; the weights are those before that step (exit code 5)."""

    exit_code = 5
    collective = True


class StoppedError(BertTasksError):
    """A signal asked the run to stop; it is saved, and the same command goes on with it (143: SIGTERM, 130: SIGINT)."""

    collective = True

    def __init__(self, message: str, *, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class ClosedPipeError(BertTasksError):
    """Whoever read our output has closed the pipe, as head does (128 + SIGPIPE). The command line says nothing."""

    exit_code = 141
    collective = True


class GivenUpError(Exception):
    """An evaluation that was asked to stop before its end. The training loop takes it; it never leaves the package."""
