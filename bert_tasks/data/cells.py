"""Parses cells of any format as texts, label names, lists or numbers.

A cell is a text in a csv file, any JSON value in JSON lines, and a Python or NumPy object in a DataFrame. The functions
here are lenient about forms that people and tools write for the same value, and strict about everything else, because a
guess about a label trains a wrong model without an error.
"""

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
        # The error handler "surrogateescape" passes on an undecodable byte so (https://peps.python.org/pep-0383/).
        if 0xDC80 <= code <= 0xDCFF:
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
    if hasattr(value, "tolist"):  # a scalar of NumPy
        value = value.tolist()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool | int | float):
        return str(value)
    if not isinstance(value, str):
        raise CellError("not a label name", "Write a text or a number.")
    name = value.strip()
    if _WHOLE_FLOAT.fullmatch(name):
        name = name.partition(".")[0]
    if name == "":
        raise CellError("missing label")
    return parse_text(name)


def label_value(name: str) -> float | None:
    """Returns the number that pandas reads for a label, or None for a word."""
    if name.lower() in ("true", "false"):
        return float(name.lower() == "true")
    if "_" in name:  # Python reads "1_000" as a number, and pandas does not
        return None
    try:
        return float(name)
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
    if cell.strip() == "":
        return []
    return [name.strip() for name in cell.split(separator)]


# A list as Python prints it, which is what pandas writes into a csv file for a column of lists. ``ast.literal_eval``
# alone would join neighbouring texts without a comma, and take time for expressions that are no list.
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
    if not isinstance(value, list):
        return None
    return value


def numbered_columns(name: str, present: Iterable[str]) -> list[str]:
    """Returns the columns of single choices in order, choice0, ... or choice_a, ..."""
    stem = re.escape(name.removesuffix("s"))
    # A small letter needs a mark before it, because "choices" itself would be "choice" with the letter s.
    pattern = re.compile(rf"{stem}s?(?:[ _]?([0-9]{{1,3}}|[A-Z])|[ _]([a-z]))")
    numbered = []
    for column in present:
        match = pattern.fullmatch(str(column))
        if match is None:
            continue
        suffix = match[1]
        if suffix is None:
            suffix = match[2]
        if suffix.isdecimal():
            numbered.append((int(suffix), column))
        else:
            numbered.append((ord(suffix), column))
    if len(numbered) < 2:
        return []
    return [column for _, column in sorted(numbered)]


def column_parts(name: str) -> list[str]:
    """Returns the columns in a name with commas."""
    return [column.strip() for column in name.split(",")]


def joined_names(columns: Mapping[str, str | Sequence[str]]) -> dict[str, str]:
    """Returns column names, in which several names are joined by commas.

    Examples:
        >>> joined_names({"labels": ["toxic", "insult"]})
        {'labels': 'toxic,insult'}
    """
    joined = {}
    for task, name in columns.items():
        if not isinstance(name, str):
            name = ",".join(name)
        joined[task] = name
    return joined


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
        if not cells.keys() >= set(parts):
            return cells
        return {**cells, name: join({field: cells[field] for field in parts})}
    value: Any = cells
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return cells
        value = value[key]
    return {**cells, name: value}
