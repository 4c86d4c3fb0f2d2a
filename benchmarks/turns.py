"""Sides of a benchmark in turns, each measurement in a fresh process (Linux only), with its memory peaks.

Must not know what is measured. A script that is measured runs itself with ``--job``, a JSON object, and prints its
figures as the last line.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memory import MIB, watched
from result_files import write_results

from bert_tasks.training.files import environment

Job = Mapping[str, Any]
Figures = dict[str, float]


def in_turns(sides: Sequence[str], job: Job, repeats: int) -> dict[str, list[Figures]]:
    """Returns the figures of each side, turn by turn."""
    figures: dict[str, list[Figures]] = {side: [] for side in sides}
    for turn in range(repeats):
        first = turn % len(sides)
        for side in (*sides[first:], *sides[:first]):  # each side is the first one in some turn
            figures[side].append(_measured({**job, "side": side}))
    return figures


def _measured(job: Job) -> Figures:
    """Returns figures and peaks of one process. Its caches and ``job["output"]`` are in a folder that is removed."""
    with tempfile.TemporaryDirectory() as name:
        caches = {"HF_DATASETS_CACHE": name, "TORCHINDUCTOR_CACHE_DIR": f"{name}/inductor"}
        variables = os.environ | caches | {"OMP_NUM_THREADS": str(job["threads"])}
        command = [sys.executable, sys.argv[0], "--job", json.dumps({**job, "output": f"{name}/run"})]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=variables, text=True) as process:
            anonymous, usage = watched(process)
            printed = "" if process.stdout is None else process.stdout.read()
    if process.returncode != 0:
        raise SystemExit(f"{job['side']} failed")
    figures: Figures = json.loads(printed.splitlines()[-1])
    # Linux counts ru_maxrss in kilobytes.
    return {**figures, "peak_rss_mib": usage.ru_maxrss * 1024 / MIB, "peak_anonymous_mib": anonymous / MIB}


def report(figures: Mapping[str, Sequence[Figures]], columns: Mapping[str, str], *, baseline: str) -> list[str]:
    """Returns a line for each side: medians over the turns, and in brackets the ratio to the baseline of the turn.

    Args:
        columns: names of figures and their titles.
    """
    lines = [f"{'':10}" + "".join(f"{title:>20}" for title in columns.values())]
    for side, turns in figures.items():
        cells = []
        for name in columns:
            cell = f"{statistics.median(turn[name] for turn in turns):,.2f}".removesuffix(".00")
            if baseline in figures and side != baseline:
                # The median of the ratios, not the ratio of the medians: both sides of a turn had the same machine.
                pairs = zip(turns, figures[baseline], strict=True)
                cell += f" ({statistics.median(turn[name] / other[name] for turn, other in pairs):.3f})"
            cells.append(f"{cell:>20}")
        lines.append(f"{side:10}" + "".join(cells))
    return lines


def write_figures(path: Path, figures: Mapping[str, Sequence[Figures]]) -> None:
    content = {"command": ["python", *sys.argv], "environment": environment(), "figures": figures}
    write_results(path, content)
