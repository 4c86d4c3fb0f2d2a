"""The file that an internal error leaves behind, for a bug report.

Owns what is in it: the traceback, the command and what ``bert-tasks env`` shows, with secrets masked. Locals are never
in it; a message of a library may quote the user's data, which the file says.
"""

import os
import sys
import tempfile
import time
import traceback

from bert_tasks.environment import environment, environment_lines, masked, masked_arguments

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
