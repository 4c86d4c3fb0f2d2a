"""What is written for a row: its own columns, then its prediction.

Owns the names in the output, and where rows go that are not kept until the end. Must not know models or processes.
"""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, Literal

from bert_tasks.data.kept import Keep
from bert_tasks.data.writers import DELIMITERS, TableWriter, flat, json_line
from bert_tasks.errors import ClosedPipeError, UsageError
from bert_tasks.tasks.base import Prediction, Task

LINE = "line"
Progress = Callable[[int, int | None], None]  # gets the rows that are done, and all, if their number is known
INPUT = "input."  # before the name of a column that a prediction's field has too


@dataclass(frozen=True, kw_only=True)
class Writing:
    """What is written for each row, and how.

    Attributes:
        keep_columns: which of the input's columns stand before the prediction. One with the name of a field of the
            prediction is called ``input.NAME`` there; one that the prediction repeats is left out.
        on_error: ``skip`` leaves rows that cannot be used out and gives every other row its ``line``.
        rejects: the file for what was left out; default: the output's name with ``.rejects.jsonl`` after it.
        csv_raw: write texts that a spreadsheet would take for a formula as they are.
        format: jsonl, csv, tsv or parquet, where the output's name does not say it.
        logits: write the logits of every row, too.
    """

    keep_columns: Keep = "all"
    on_error: Literal["fail", "skip"] = "fail"
    rejects: Path | None = None
    csv_raw: bool = False
    format: str | None = None
    logits: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.keep_columns, str) and self.keep_columns not in ("all", "none"):
            raise UsageError(f"keep_columns is {self.keep_columns!r}, expected 'all', 'none' or a list of names")

    @property
    def skips(self) -> bool:
        return self.on_error == "skip"


def output_row(
    given: Mapping[str, Any], prediction: Prediction, *, repeated: Sequence[str], line: int | None
) -> dict[str, Any]:
    """The row of the output.

    Args:
        given: the columns to keep.
        repeated: names of columns whose values stand in a field of this name.
        line: where the row stands in its file; None: not written.
    """
    answer = prediction.to_json()
    names = {field.name for field in fields(prediction)}.union(answer)  # type: ignore[arg-type]
    row: dict[str, Any] = {} if line is None else {LINE: line}
    for name, value in given.items():
        if name in answer and name in repeated:
            continue
        taken = name in names or name.partition(".")[0] in names or name.startswith(INPUT) or name in row
        row[INPUT + name if taken else name] = value
    return row | answer


def repeated_columns(task: Task, names: Mapping[str, str] | None) -> list[str]:
    """The columns that the task reads under their own name and that are no targets."""
    renamed = {} if names is None else names
    read = [column.name for column in task.columns if not column.is_target]
    return [name for name in read if renamed.get(name, name) == name]


class StreamWriter:
    """Rows to an open stream as they come: JSON lines, or a table whose columns are those of the first rows."""

    def __init__(self, stream: IO[bytes], *, form: str, raw: bool) -> None:
        self._stream, self._form, self._raw = stream, form, raw
        self._text = io.StringIO()
        self._table: TableWriter | None = None

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raises ClosedPipeError if nobody reads any more; UsageError if they cannot be written."""
        self._send("".join(map(json_line, rows)) if self._form == "jsonl" else self._lines(rows))

    def write_lines(self, lines: bytes) -> None:
        """As ``write``, of rows that are JSON lines."""
        text = lines.decode()
        self._send(text if self._form == "jsonl" else self._lines(list(map(json.loads, text.split("\n")[:-1]))))

    def _send(self, text: str) -> None:
        try:
            self._stream.write(text.encode())
            self._stream.flush()
        except BrokenPipeError:
            raise ClosedPipeError("the output's reader has closed it") from None
        except OSError as error:
            raise UsageError(f"cannot write the output ({error.strerror})") from None

    def _lines(self, rows: Sequence[Mapping[str, Any]]) -> str:
        columns = [flat(row) for row in rows]
        if self._table is None:
            names = list(dict.fromkeys(name for row in columns for name in row))
            self._table = TableWriter(self._text, names, DELIMITERS[self._form], raw=self._raw)
        for row in columns:
            new = [name for name in row if name not in self._table.names]
            if new:
                raise UsageError(
                    f"a row brings the column {new[0]!r}, which the header lacks: write jsonl, or to a file"
                )
            self._table.write(row)
        text = self._text.getvalue()
        self._text.seek(0)
        self._text.truncate()
        return text
