"""The console script, which runs a command and turns its errors into one short message and an exit code.

An error of the package says what to do. Any other error is a defect, and its message says how to report it. Of several
processes the first one reports what all of them know, because the same message from each would hide the cause.
"""

import gc
import os
import shlex
import sys
import traceback

from typer.exceptions import TyperException

from bert_tasks.cli.app import app, discard_output, exit_without_shutdown, process_count, standard_streams
from bert_tasks.environment import masked
from bert_tasks.errors import (
    BertTasksError,
    CheckpointError,
    ClosedPipeError,
    StoppedError,
    UsageError,
    is_out_of_memory,
    messages_with_options,
)
from bert_tasks.storage import os_error_message
from bert_tasks.terminal import message_text, printable
from bert_tasks.variables import disable_telemetry, limit_primitive_caches

_TRAINING = ("train", "search")
_WITH_RECIPES = ("train", "search", "check")
# New objects until Python looks for unused cycles. Modules create hundreds of thousands of objects that stay, and to
# look through them again and again takes a tenth of the time that a short command needs.
_GC_THRESHOLD = 50_000
# Parts of what gloo and nccl report when another process has ended or does not respond.
_LOST = (
    *("closed by peer", "reset by peer", "onnection refused", "imed out", "Broken pipe", "pair closure"),
    *("likely closed", "likely been closed"),
)


def main() -> None:
    """Runs the command that was typed. ``--debug`` may be given before or after it."""
    gc.set_threshold(_GC_THRESHOLD)
    # Both set variables for the whole process, which is this command's own. A program that imports the package decides
    # about the caches itself, which torch's own GELU fills, too.
    limit_primitive_caches()
    disable_telemetry()
    words = ["--help"] if len(sys.argv) < 2 else sys.argv[1:]
    arguments = [argument for argument in words if argument != "--debug"]
    debug = len(arguments) < len(words)
    if debug:
        arguments = ["--debug", *arguments]
    with messages_with_options(), standard_streams():
        try:
            _end(app(arguments, standalone_mode=False))
        except SystemExit as end:
            _end(end.code)
        except Exception as error:  # noqa: BLE001  # outer boundary: the command line
            reported = _memory_error(error) if is_out_of_memory(error) else error
            _end(_report_error(reported, debug=debug))


def _end(code: str | int | None) -> None:
    """Ends this process with the exit code of the command."""
    if process_count() > 1:
        exit_without_shutdown(code)
    if code is None:
        code = 0
    raise SystemExit(code) from None


def _memory_error(error: Exception) -> CheckpointError:
    """Returns advice for a user whose memory is used up. The notes of the error say during which work."""
    work = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
    reason = masked(str(error)).partition("\n")[0][:200]
    smaller = "Choose a smaller model, or shorter texts (settings.max_length)."
    if any(argument in _TRAINING for argument in sys.argv[1:]):
        smaller = f"Lower optim.micro_batch_tokens. {smaller}"
    elif "serve" in sys.argv[1:]:
        smaller = f"Lower --batch-tokens. {smaller}"
    cause = f" ({reason})" if reason else ""
    result = CheckpointError(f"out of memory{work}{cause}. {smaller}")
    result.__cause__ = error
    return result


def _report_error(error: Exception, *, debug: bool) -> int:
    """Prints what the user needs to know, and returns the exit code."""
    if isinstance(error, TyperException):
        error = UsageError(_parser_message(error))
    # A reader such as ``head`` has all it wants, so nothing is said about it.
    if isinstance(error, ClosedPipeError | BrokenPipeError):
        discard_output(1)
        return ClosedPipeError.exit_code
    is_expected = isinstance(error, BertTasksError) or _is_lost_connection(error)
    # A defect of one of several processes may not occur again, so its traceback is shown at once.
    if debug or (process_count() > 1 and not is_expected):
        sys.stderr.write(printable(masked("".join(traceback.format_exception(error)))))
    sys.stderr.write(message_text(_message(error, debug=debug)))
    if isinstance(error, BertTasksError):
        return error.exit_code
    if isinstance(error, OSError):  # an unusable file is no defect of the package
        return UsageError.exit_code
    return 1


def _parser_message(error: TyperException) -> str:
    """Returns what is wrong with the arguments, and where to read about them."""
    message = error.format_message().replace("Value error, ", "")  # pydantic's prefix
    setting = _setting_hint(error)
    if setting:
        return f"No such option: {getattr(error, 'option_name', '')}. {setting}."
    if not message.endswith((".", "?")):
        message = f"{message}."
    context = getattr(error, "ctx", None)
    if context:
        message = f"{message} See '{context.command_path} --help'."
    return message


def _setting_hint(error: TyperException) -> str:
    """Returns how to set the key of a recipe that was typed as an option of a command with recipes, if it is one."""
    option = getattr(error, "option_name", None)
    context = getattr(error, "ctx", None)
    if option is None or context is None or context.info_name not in _WITH_RECIPES:
        return ""
    from bert_tasks.recipe.schema import option_hint  # it imports pydantic, which takes time

    return option_hint(option, _typed_value(option))


def _typed_value(option: str) -> str:
    """Returns the value of an unknown option in the command, or VALUE if it has none."""
    # The parser stops at an unknown option, so its value is looked up in what was typed.
    for word, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        if word == option and following != "" and not following.startswith("--"):
            return following
    return "VALUE"


def _is_lost_connection(error: Exception) -> bool:
    """Returns True if another process ended or does not respond, so that its error is the cause."""
    is_of_torch = process_count() > 1 and isinstance(error, RuntimeError)
    return is_of_torch and any(sign in str(error) for sign in _LOST)


def _message(error: Exception, *, debug: bool) -> str:
    """Returns the message for standard error. Each of several processes reports only what the first does not know."""
    rank = int(os.environ.get("RANK", "0"))
    several = process_count() > 1
    prefix = f"process {rank} of {process_count()}: " if several else ""
    if isinstance(error, StoppedError):
        if rank > 0:
            return ""
        how = "start the same processes again, without --overwrite"
        if not several:
            # This command resumes the run, without the option that would replace the saved run.
            how = shlex.join(["bert-tasks", *(word for word in sys.argv[1:] if word != "--overwrite")])
        return f"note: {error}\nresume: {how}\n"
    if isinstance(error, BertTasksError):
        if rank == 0:
            return f"error: {error}\n"
        if error.collective:
            return ""
        return f"{prefix}error: {error}\n"
    # The message of a library may be long, and may quote an address with a password.
    reason = masked(str(error)).partition("\n")[0][:500]
    if _is_lost_connection(error):
        other = f"process {1 - rank}" if process_count() == 2 else "another process"
        return f"{prefix}error: lost the connection to {other}, which failed first or does not respond ({reason})\n"
    if isinstance(error, OSError):
        return f"{prefix}error: {masked(os_error_message(error))[:500]}\n"
    message = f"{prefix}error: internal error {type(error).__name__} ({reason})\n"
    if not debug and not several:
        message += "  Add --debug to see where, and please report it with what `bert-tasks env` prints\n"
    return message
