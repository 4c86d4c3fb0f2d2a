"""The rows that a model answered wrong, as a file: the columns they came with, their label, and what was predicted.

Owns the columns of that file. Must not know tasks.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bert_tasks.data.writers import DELIMITERS, TableWriter, check_place, flat, json_line, whole_file
from bert_tasks.errors import UsageError
from bert_tasks.paths import resolved
from bert_tasks.report.results import Verdict
from bert_tasks.report.slices import given_cells

_FORMATS = ("jsonl", *DELIMITERS)
_OWN = ("line", "set", "label", "prediction", "score")
_INPUT = "input."  # before the name of a column of the input that is called like one of those


def check_mistakes_file(path: Path, others: Sequence[Path]) -> None:
    """Refuses a file for the mistakes before any work is done for it.

    Args:
        path: the file.
        others: the files that must stay.

    Raises:
        UsageError: its extension or place will not do, or it is one of the others.
    """
    if path.suffix[1:] not in _FORMATS:
        raise UsageError(f"{path}: expected a name that ends in .csv, .tsv or .jsonl for the mistakes")
    check_place(path)
    for other in others:
        with suppress(OSError):
            if resolved(path) == resolved(other) or path.samefile(other):
                raise UsageError(f"{path}: the mistakes would overwrite {other}; choose another name")


def write_mistakes(path: Path, verdicts: Sequence[tuple[str, Verdict]], target: str | None) -> int:
    """Writes the rows that were answered wrong, those with the highest score first.

    Args:
        path: a .csv, .tsv or .jsonl file.
        verdicts: of the rows of all data sets, each with the name of its set.
        target: the column of the input whose values ``label`` repeats; it is not written twice.

    Returns:
        How many mistakes there are.

    Raises:
        UsageError: the file cannot be written.
    """
    wrong = sorted((one for one in verdicts if not one[1].right), key=lambda one: -one[1].score)
    is_named = len({name for name, _ in verdicts}) > 1
    rows = [_row(name if is_named else None, verdict, target) for name, verdict in wrong]
    with whole_file(path) as file:
        if path.suffix == ".jsonl":
            file.writelines(map(json_line, rows))
            return len(rows)
        tables = [flat(row) for row in rows]
        given = dict.fromkeys(name for row in tables for name in row if name not in _OWN)
        first, last = ["line", *(["set"] if is_named else [])], list(_OWN[2:])
        writer = TableWriter(file, [*first, *given, *last], DELIMITERS[path.suffix[1:]], raw=False)
        for row in tables:
            writer.write(row)
    return len(rows)


def _row(name: str | None, verdict: Verdict, target: str | None) -> dict[str, Any]:
    given = {
        f"{_INPUT}{key}" if key in _OWN else key: value
        for key, value in given_cells(verdict.row).items()
        if not (key == target == "label")
    }
    answer = {"label": verdict.label, "prediction": verdict.prediction, "score": verdict.score}
    return {"line": verdict.row.get("line"), **({} if name is None else {"set": name}), **given, **answer}
