"""The console script, which runs a command and turns its errors into one short message and an exit code."""

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
from bert_tasks.terminal import printable
from bert_tasks.variables import disable_telemetry, limit_primitive_caches

# Parts of what gloo and nccl report when another process has ended or does not respond.
_TRAINING = ("train", "search")
_WITH_RECIPES = ("train", "search", "check")
# New objects until Python looks for unused cycles. Modules create hundreds of thousands of objects that stay, and to
# look through them again and again takes a tenth of the time that a short command needs.
_GC_THRESHOLD = 50_000
_LOST = (
    *("closed by peer", "reset by peer", "onnection refused", "imed out", "Broken pipe", "pair closure"),
    *("likely closed", "likely been closed"),
)


def main() -> None:
    """The console script. ``--debug`` may be given before or after the command."""
    gc.set_threshold(_GC_THRESHOLD)
    limit_primitive_caches()  # torch's own GELU fills them, too; in the process of another program it may
    disable_telemetry()
    words = ["--help"] if len(sys.argv) < 2 else sys.argv[1:]
    arguments = [argument for argument in words if argument != "--debug"]
    debug = len(arguments) < len(words)
    with messages_with_options(), standard_streams():
        try:
            _end(app(["--debug", *arguments] if debug else arguments, standalone_mode=False))
        except SystemExit as end:
            _end(end.code)
        except Exception as error:  # noqa: BLE001  # outer boundary: the command line
            _end(_report_error(_memory_error(error) if is_out_of_memory(error) else error, debug=debug))


def _end(code: str | int | None) -> None:
    if process_count() > 1:
        exit_without_shutdown(code)
    raise SystemExit(0 if code is None else code) from None


def _memory_error(error: Exception) -> CheckpointError:
    """Returns advice for a user whose memory is used up. The notes of the error say during which work."""
    work = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
    reason = masked(str(error)).partition("\n")[0][:200]
    smaller = "Choose a smaller model, or shorter texts (settings.max_length)."
    if any(argument in _TRAINING for argument in sys.argv[1:]):
        smaller = f"Lower optim.micro_batch_tokens. {smaller}"
    elif "serve" in sys.argv[1:]:
        smaller = f"Lower --batch-tokens. {smaller}"
    result = CheckpointError(f"out of memory{work}{f' ({reason})' if reason else ''}. {smaller}")
    result.__cause__ = error
    return result


def _report_error(error: Exception, *, debug: bool) -> int:
    """Prints what the user needs to know, and returns the exit code."""
    if isinstance(error, TyperException):
        error = UsageError(_parser_message(error))
    if isinstance(error, ClosedPipeError | BrokenPipeError):
        discard_output(1)
        return ClosedPipeError.exit_code
    if debug or (process_count() > 1 and not isinstance(error, BertTasksError) and not _is_lost_connection(error)):
        sys.stderr.write(printable(masked("".join(traceback.format_exception(error)))))
    sys.stderr.write(printable(_message(error, debug=debug)))
    if isinstance(error, BertTasksError):
        return error.exit_code
    return UsageError.exit_code if isinstance(error, OSError) else 1  # an unusable file is no defect of the package


def _parser_message(error: TyperException) -> str:
    """Returns what is wrong with the arguments, and where to read about them."""
    message = error.format_message().replace("Value error, ", "")  # pydantic's prefix
    setting = _setting_hint(error)
    if setting:
        return f"No such option: {getattr(error, 'option_name', '')}. {setting}."
    hint = f" See '{context.command_path} --help'." if (context := getattr(error, "ctx", None)) else ""
    return f"{message}{'' if message.endswith(('.', '?')) else '.'}{hint}"


def _setting_hint(error: TyperException) -> str:
    """Returns how to set the key of a recipe that was typed as an option of a command with recipes, if it is one."""
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if option is None or context is None or context.info_name not in _WITH_RECIPES:
        return ""
    from bert_tasks.recipe.schema import option_hint  # which imports pydantic

    return option_hint(option, _typed_value(option))


def _typed_value(option: str) -> str:
    """Returns the value of an unknown option in the command, or VALUE if it has none."""
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
    """The message on standard error. Each of several processes reports only what the first does not know."""
    rank, several = int(os.environ.get("RANK", "0")), process_count() > 1
    prefix = f"process {rank} of {process_count()}: " if several else ""
    if isinstance(error, StoppedError):
        # The command that resumes the run: this one, without the option that would replace the saved run.
        command = shlex.join(["bert-tasks", *(argument for argument in sys.argv[1:] if argument != "--overwrite")])
        how = "start the same processes again, without --overwrite" if several else command
        return f"note: {error}\nresume: {how}\n" if rank == 0 else ""
    if isinstance(error, BertTasksError):
        return "" if error.collective and rank > 0 else f"{prefix if rank > 0 else ''}error: {error}\n"
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
