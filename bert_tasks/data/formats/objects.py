"""Files of JSON that are one object, which holds the rows in a list or column by column.

These are the forms that pandas' ``to_json`` (https://pandas.pydata.org/docs/reference/api/pandas.DataFrame.to_json.html)
and the answers of web services have. A file of one object per line is not read here, nor is an object that may be a row
itself.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from bert_tasks.data.batch import Record, Records
from bert_tasks.data.columns import Column
from bert_tasks.data.formats.base import Format
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.parsers import joined, json_rows
from bert_tasks.errors import DataError

# An object over several lines, or whose first line has a list of objects or lists, or an object with numbers as keys.
_START = re.compile(r'\s*\{\s*\n|\s*\{[^\n]*:\s*(?:\[\s*(?:[\[{]|\]\s*\})|\{\s*"\d+"\s*:)|\s*\{\s*"\d+"\s*:\s*\{')
# Texts that describe a list of rows. Another text beside a list makes the object a row, such as a text and its spans.
_METADATA = {
    *("version", "name", "title", "description", "source", "license", "author", "date", "created", "updated"),
    *("id", "url", "next", "previous", "status", "split", "dataset", "language"),
}


class JsonObjectFormat(Format):
    """One object, with the rows in a list or column by column, as ``DataFrame.to_json`` writes them."""

    can_stream: ClassVar[bool] = False

    def matches(self, start: str, columns: Sequence[Column] | None) -> bool:
        first, _, others = start.partition("\n")
        if others.strip() and _is_json(first):
            return False  # one object per line
        return _START.match(start) is not None

    def records(self, lines: Iterator[str], path: Path, options: ReadOptions) -> Records:
        # A first line that is JSON, and another line that is not blank, mean that the file has one object per line.
        ahead = [next(lines, "")]
        if _is_json(ahead[0]):
            for line in lines:
                ahead.append(line)
                if line.strip():  # one object per line
                    return Records(None, json_rows(chain(ahead, lines), path))
        text = "".join(ahead) + joined(lines)
        has_lines = ".jsonl" in path.name.lower()  # also compressed
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            if has_lines and not _is_several_objects(error):  # each line may be read or skipped by itself
                return Records(None, json_rows(iter(text.splitlines(keepends=True)), path))
            raise DataError(f"{path}: {_problem(error, path)}") from error
        if has_lines and [*value.values()] == [[]]:
            return Records(None, iter([Record(1, value)]))  # a row with an empty list
        rows, note = object_rows(value)
        notes: tuple[str, ...] = ()
        if note is not None:
            notes = (note,)
        return Records(None, (Record(number, row) for number, row in enumerate(rows, start=1)), notes)


def _is_json(text: str) -> bool:
    """Returns True if a text is one JSON value."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _is_several_objects(error: Exception) -> bool:
    """Returns True if a JSON value ended before the text did."""
    return isinstance(error, json.JSONDecodeError) and error.msg == "Extra data"


def _problem(error: Exception, path: Path) -> str:
    """Returns why a file is no JSON, and what to do."""
    if _is_several_objects(error):
        advice = f"Write one object per line, for example with `jq -c . {path.name} > rows.jsonl`"
        return f"several objects that are written over several lines. {advice}"
    return f"not valid JSON ({error})"


def object_rows(value: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
    """Returns the rows in an object with a note on their place. An object that may be a row itself is one row.

    Examples:
        >>> object_rows({"count": 1, "items": [{"text": "a"}]})
        ([{'text': 'a'}], "the rows are in the list 'items'")
    """
    table = _split_table(value)
    if table is not None:
        return table, "the rows are in the list 'data' below the names in 'columns', as pandas writes them"
    by_column = _column_table(value)
    if by_column is not None:
        return by_column, "the rows are put together from the columns of one object, as pandas writes them"
    lists = {name: rows for name, rows in value.items() if _has_objects(rows)}
    if len(value) == 1 and [*value.values()] == [[]]:
        return [], None
    texts = {name for name, item in value.items() if isinstance(item, str)}
    if len(lists) == 1 and texts <= _METADATA:
        ((name, rows),) = lists.items()
        return rows, f"the rows are in the list {name!r}"
    return [dict(value)], None


def _has_objects(value: Any) -> bool:
    """Returns True for a list of objects, which may be rows."""
    return isinstance(value, list) and len(value) > 0 and all(isinstance(item, dict) for item in value)


def _split_table(value: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Returns the rows of ``to_json(orient="split")``, or None."""
    names, rows = value.get("columns"), value.get("data")
    if not isinstance(names, list) or not isinstance(rows, list) or not value.keys() <= {"columns", "index", "data"}:
        return None
    if any(not isinstance(row, list) or len(row) != len(names) for row in rows):
        return None
    return [dict(zip(map(str, names), row, strict=True)) for row in rows]


def _column_table(value: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Returns the rows of ``to_json`` with its default or ``orient="index"``, whose keys are numbers, or None."""
    if not value or any(not isinstance(item, dict) or not item for item in value.values()):
        return None
    if all(map(str.isdecimal, value)):
        return list(value.values())
    keys: dict[str, None] = {}  # the index of the DataFrame, of which a column may lack an entry
    for item in value.values():
        keys |= dict.fromkeys(item)
    if not all(map(str.isdecimal, keys)):
        return None
    return [{name: item.get(key) for name, item in value.items()} for key in keys]


ALL: tuple[Format, ...] = (JsonObjectFormat(name="json-object", extensions=(".json", ".jsonl")),)
