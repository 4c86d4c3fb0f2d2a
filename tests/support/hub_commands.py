"""Owns commands run one after the other in one process of its own: a process for each would take seconds to start."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_RUN = """
import contextlib, io, json, os, sys
from bert_tasks.cli import main
ended = []
for changes, arguments in json.loads(sys.argv[1]):
    for name, value in changes.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    sys.argv = ["bert-tasks", *arguments]
    code = 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as end:
            code = end.code
    ended.append([code if isinstance(code, int) else int(code is not None), out.getvalue(), err.getvalue()])
print("ENDED" + json.dumps(ended))
"""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


def run_commands(
    environment: Mapping[str, str],
    commands: Sequence[tuple[Mapping[str, str | None], Sequence[object]]],
    *,
    cwd: Path,
    tracer: Sequence[str] = (),
) -> list[Ended]:
    """Runs ``bert-tasks`` with each list of arguments, after its changes to the environment (None: unset).

    Args:
        tracer: a command that runs the whole as its last arguments.
    """
    listed: list[Any] = [[dict(changes), list(map(str, arguments))] for changes, arguments in commands]
    program = [*tracer, sys.executable, "-W", "ignore", "-c", _RUN, json.dumps(listed)]
    variables = {**environment, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, env=variables, cwd=cwd, capture_output=True, text=True, timeout=240)
    before, mark, after = done.stdout.rpartition("ENDED")
    assert mark, done.stderr
    assert before.strip() == ""
    return [Ended(*ended) for ended in json.loads(after)]
