"""The canonical form of one value: what a cell of any file format becomes in a row.

Owns the rules for texts, labels, label sets and numbers. Must not know files, rows or which labels a task
has.
"""

import math
from typing import Any, Literal

LABEL_SEPARATOR = ";"


class BadValueError(ValueError):
    """The value cannot be used; the message says why and what would do."""


def canonical(value: Any, kind: Literal["text", "label", "labels", "number"]) -> str | float | list[str] | None:
    """The value as rows hold it; None where there is none (never for a text cell, which may be empty).

    Raises:
        BadValueError: if the value is not of this kind.
    """
    match kind:
        case "text":
            return _text(value)
        case "label":
            return None if value is None or value == "" else label_name(value)
        case "labels":
            return None if value is None else _label_set(value)
        case "number":
            return None if value is None or value == "" else _number(value)


def label_name(value: Any) -> str:
    if isinstance(value, bool | int):
        return str(int(value))
    if isinstance(value, float):
        raise BadValueError("a number, not a label name; for regression set problem_type = 'regression'")
    if not isinstance(value, str):
        raise BadValueError(f"expected a label name, not {_type_name(value)}")
    name = value.strip()
    if name == "":
        raise BadValueError("missing label")
    if name != value:
        raise BadValueError(f"spaces around a label: {value!r} -> {name!r}")
    return _encodable(value)


def _text(value: Any) -> str:
    if value is None:
        raise BadValueError('missing text; write an empty text as ""')
    if not isinstance(value, str):
        raise BadValueError(f"expected a text, not {_type_name(value)}; write it in quotes")
    return _encodable(value)


def _label_set(value: Any) -> list[str]:
    if isinstance(value, str):
        value = [] if value.strip() == "" else [part.strip() for part in value.split(LABEL_SEPARATOR)]
    if not isinstance(value, list | tuple):
        raise BadValueError(f"expected a list of label names, not {_type_name(value)}")
    names = [label_name(part) for part in value if part is not None and part != ""]
    if len(names) < len(value):
        raise BadValueError("an empty label name; write names with one ';' between two of them")
    if len(set(names)) < len(names):
        raise BadValueError("a label stands twice")
    return names


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadValueError(f"expected a number, not {_type_name(value)}")
    try:
        if isinstance(value, str) and "_" in value:
            raise ValueError
        number = float(value)
    except ValueError:
        raise BadValueError(f"not a number{_decimal_point(value)}") from None
    except OverflowError:
        raise BadValueError("too large for a number") from None
    if not math.isfinite(number):
        raise BadValueError("not a finite number")
    return number


def _decimal_point(value: Any) -> str:
    pointed = str(value).strip().replace(",", ".")
    is_number = pointed.count(".") == 1 and pointed.replace(".", "").lstrip("+-").isdecimal()
    return f": {value!r} -> {pointed!r}?" if is_number else ""


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        if 0xDC80 <= code <= 0xDCFF:  # how the readers hand on a byte that the encoding does not know
            byte = f"byte 0x{code - 0xDC00:02X}"
            raise BadValueError(
                f"{byte} is not valid here; state the file's encoding, e.g. encoding = 'latin-1'"
            ) from None
        raise BadValueError(f"half a character (surrogate U+{code:04X}); replace it") from None
    return text


def _type_name(value: Any) -> str:
    names: dict[type, str] = {bool: "true/false", int: "a number", float: "a number", str: "a text"}
    names |= {list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
