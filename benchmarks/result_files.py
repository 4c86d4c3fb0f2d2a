"""The files in which benchmarks record their results, with what identifies a run."""

import json
import re
import subprocess
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any


def write_results(path: Path, content: dict[str, Any]) -> None:
    """Writes results as JSON, after the date, the commit and the model of the processor."""
    path.write_text(json.dumps(origin() | content, indent=1) + "\n", encoding="utf-8")


def origin() -> dict[str, str]:
    """Returns the date, the commit and the model of the processor, as far as the system knows them."""
    values = {"date": datetime.now(tz=UTC).date().isoformat(), "commit": _commit(), "cpu_model": _cpu_model()}
    return {name: value for name, value in values.items() if value is not None}


def _commit() -> str | None:
    """Returns the commit, with "-dirty" if Python files were changed, or None without git or a repository."""
    git = partial(subprocess.run, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    try:
        head = git(["git", "rev-parse", "--short", "HEAD"])
        # Results are written into the repository, so changed data files say nothing about the code.
        is_dirty = git(["git", "diff", "--quiet", "HEAD", "--", "*.py"]).returncode == 1
    except OSError:
        return None
    return f"{head.stdout.strip()}{'-dirty' if is_dirty else ''}" if head.returncode == 0 else None


def _cpu_model() -> str | None:
    """Returns family and model of the processor, which tell generations of one name apart, or None outside Linux."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return None
    numbers = [re.search(rf"^{name}\s*: (\d+)$", text, re.MULTILINE) for name in ("cpu family", "model")]
    family, model = (match[1] if match is not None else "unknown" for match in numbers)
    return f"family {family}, model {model}"
