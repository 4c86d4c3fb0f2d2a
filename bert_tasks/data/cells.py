"""Parses cells of any format as texts, label names, lists or numbers."""

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bert_tasks.data.issues import CellError

LABEL_SEPARATOR = ";"
HIDDEN_LABELS = ("-", "-1")  # of rows without a label, in SNLI's files and on the hub
# Not latin-1, which reads the bytes 0x80 to 0x9f, quotes and dashes of Windows, as control characters without an error.
ENCODING_EXAMPLE = "such as 'cp1252' for Western European or 'gb18030' for Chinese text"


def parse_text(value: Any) -> str:
    """Returns a text.

    Raises:
        CellError: The value is not a text, or holds characters that UTF-8 cannot encode.
    """
    if value is None:
        raise CellError("missing text", 'Write an empty text as "".')
    if not isinstance(value, str):
        raise CellError("not a text", "Write it in quotes.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        code = ord(value[error.start])
        if 0xDC80 <= code <= 0xDCFF:  # how readers pass on an undecodable byte
            hint = f"Set the file's encoding, {ENCODING_EXAMPLE}."
            raise CellError(f"invalid byte 0x{code - 0xDC00:02X}", hint) from None
        raise CellError(f"half a character (surrogate U+{code:04X})", "Replace it.") from None
    return value


def is_encodable(text: str) -> bool:
    """Returns True if the text has no undecodable bytes and no half characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_WHOLE_FLOAT = re.compile(r"-?\d+\.0+")


def label_name(value: Any) -> str:
    """Returns the name of a label, without white space around it.

    Numbers and booleans have the names that Python prints. Whole floats have no ``.0``, because pandas turns whole
    numbers into floats if a column has missing values.

    Raises:
        CellError: The value is neither a number nor a name.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else str(value)
    if isinstance(value, bool | int):
        return str(value)
    if not isinstance(value, str):
        raise CellError("not a label name", "Write a text or a number.")
    name = value.strip()
    name = name.partition(".")[0] if _WHOLE_FLOAT.fullmatch(name) else name
    if name == "":
        raise CellError("missing label")
    return parse_text(name)


def label_value(name: str) -> float | None:
    """Returns the number that pandas reads for a label, or None for a word."""
    if name.lower() in ("true", "false"):
        return float(name.lower() == "true")
    try:
        return None if "_" in name else float(name)
    except ValueError:
        return None


def is_integer(name: str) -> bool:
    """Returns True if a label is a whole number with few enough digits for Python."""
    return re.fullmatch(r"[+-]?\d{1,4300}", name) is not None


def label_parts(cell: str, separator: str = LABEL_SEPARATOR) -> list[Any]:
    """Returns the names in a cell, which is a JSON or Python list or has separators."""
    names = list_in_cell(cell)
    if names is not None:
        return names
    return [] if cell.strip() == "" else [name.strip() for name in cell.split(separator)]


_PYTHON_ESCAPE = r"\\(?:[\\'\"abfnrtv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})"
_PYTHON_ITEM = re.compile(rf"'(?:[^'\\]|{_PYTHON_ESCAPE})*'|\"(?:[^\"\\]|{_PYTHON_ESCAPE})*\"|-?\d+")
_PYTHON_LIST = re.compile(rf"\[\s*(?:(?:{_PYTHON_ITEM.pattern})(?:\s*,\s*(?:{_PYTHON_ITEM.pattern}))*)?\s*\]")


def list_in_cell(cell: str) -> list[Any] | None:
    """Returns the list that a cell holds as JSON or in Python's ``repr``, or None.

    ``['a' 'b']``, as numpy prints, is one text.
    """
    if not cell.lstrip().startswith("["):
        return None
    try:
        value = json.loads(cell)
    except (ValueError, RecursionError):
        if _PYTHON_LIST.fullmatch(cell.strip()) is None:
            return None
        try:
            return [ast.literal_eval(item) for item in _PYTHON_ITEM.findall(cell)]
        except (ValueError, SyntaxError):  # a character or a number that is too large
            return None
    return value if isinstance(value, list) else None


def numbered_columns(name: str, present: Iterable[str]) -> list[str]:
    """Returns the columns of single choices in order, choice0, ... or choice_a, ..."""
    stem = re.escape(name.removesuffix("s"))
    pattern = re.compile(rf"{stem}s?(?:[ _]?([0-9]{{1,3}}|[A-Z])|[ _]([a-z]))")
    matches = ((pattern.fullmatch(str(column)), column) for column in present)
    places = ((match[1] or match[2], column) for match, column in matches if match is not None)
    numbered = sorted((int(suffix) if suffix.isdecimal() else ord(suffix), column) for suffix, column in places)
    return [column for _, column in numbered] if len(numbered) > 1 else []


def column_parts(name: str) -> list[str]:
    """Returns the columns in a name with commas."""
    return [column.strip() for column in name.split(",")]


def joined_names(columns: Mapping[str, str | Sequence[str]]) -> dict[str, str]:
    """Returns column names, in which several names are joined by commas.

    Example:
        >>> joined_names({"labels": ["toxic", "insult"]})
        {'labels': 'toxic,insult'}
    """
    return {task: name if isinstance(name, str) else ",".join(name) for task, name in columns.items()}


def with_named_cell(cells: Mapping[str, Any], name: str, join: Callable[[Mapping[str, Any]], Any]) -> Mapping[str, Any]:
    """Returns the cells with a cell of this name, if the name stands for others.

    Args:
        cells: The row.
        name: Name of a cell, a path into objects such as ``document.text``, or the names of several cells.
        join: Makes one value of several cells.
    """
    parts = column_parts(name)
    if name in cells:
        return cells
    if len(parts) > 1:
        return {**cells, name: join({field: cells[field] for field in parts})} if cells.keys() >= set(parts) else cells
    value: Any = cells
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return cells
        value = value[key]
    return {**cells, name: value}
