"""What a table may carry beside the columns of its task: the row as it was given, and why it cannot be used.

Owns the two columns that do so, and how a row that was given becomes JSON. Must not know formats or tasks.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from bert_tasks.data.records import Record

KEPT, FAULT = "given row", "fault of the row"  # columns of the table; no task can have these names

Keep = Literal["all", "none"] | Sequence[str]


def is_kept(column: str, keep: Keep) -> bool:
    return keep == "all" or (keep != "none" and column in keep)


def kept_cells(cells: Mapping[str, Any], keep: Keep) -> str:
    """The cells to keep, as a JSON object."""
    chosen = {name: value for name, value in cells.items() if is_kept(name, keep)}
    try:
        text = json.dumps(chosen, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError):  # UnicodeError is a ValueError
        text = json.dumps(plain(chosen), ensure_ascii=False)
    return text


def fault_of(record: Record, reasons: Sequence[str]) -> str:
    """A line of a reject file, in ASCII: the record's place, what is wrong with it, and all of it as it stands."""
    raw = record.raw if record.raw is not None else dict(record.cells)
    name = {} if record.name is None else {"id": record.name}
    return json.dumps({"line": record.line, **name, "reason": "; ".join(reasons), "raw": raw}, default=str)


def plain(value: Any) -> Any:
    """The value in types that JSON has: a number that is none becomes None, half a character U+FFFD."""
    if isinstance(value, Mapping):
        return {str(plain(name)): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    text = value if isinstance(value, str) else str(value)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
