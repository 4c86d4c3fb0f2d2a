"""The end of an output: finished parts become the file that was asked for, and what was left out gets its own.

Owns the order in which files appear. Must not know models or processes.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from bert_tasks.data.arrow_cache import streamed
from bert_tasks.data.kept import FAULT
from bert_tasks.data.parquet_out import write_parquet
from bert_tasks.data.table import RowTable
from bert_tasks.data.writers import DELIMITERS, is_special, whole_file, write_failure, write_table


def finish(lines: Path, target: Path, *, form: str, raw: bool) -> None:
    """Makes the output of its JSON lines; one that was there before stays until then.

    Raises:
        UsageError: it cannot be written; the lines stay.
    """
    if form == "parquet":
        write_parquet(lines, target)
    elif form in DELIMITERS:
        write_table(lines, target, DELIMITERS[form], raw=raw)
    else:
        _move(lines, target)


def _move(lines: Path, target: Path) -> None:
    try:
        with lines.open("rb") as file:
            os.fsync(file.fileno())
        lines.replace(target)
    except OSError as error:
        raise write_failure(error, target, lines) from None


def write_rejects(table: RowTable, target: Path) -> None:
    """Writes a line for each row that cannot be used; a device, such as the null device, is written directly.

    Raises:
        UsageError: the file cannot be written.
    """
    with target.open("w", encoding="utf-8") if is_special(target) else whole_file(target) as file:
        file.writelines(map(reject_line, _faults(table)))


def reject_line(fault: str) -> str:
    """A fault as a line for people; half a character stays an escape, which is all that JSON can say of it."""
    line = json.dumps(json.loads(fault), ensure_ascii=False)
    return f"{line if _is_encodable(line) else fault}\n"


def _is_encodable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _faults(table: RowTable) -> Iterator[str]:
    if table.file is None or FAULT not in table.rows.column_names:
        return
    for batch in streamed(table.file, [FAULT]):
        yield from (row[FAULT] for row in batch if row[FAULT] is not None)
