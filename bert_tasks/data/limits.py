"""Limits of a row, which hold for every format and are checked before the memory for it is taken.

A small compressed file can expand to more than the memory holds. Files have no limit, because they are read row by
row. What a parser can only read as a whole, for example the shared strings of a workbook, has a limit of its own.
"""

from collections.abc import Mapping
from typing import Any

from bert_tasks.errors import DataError

LARGEST_ROW = 64 * 2**20  # characters of one row
# Characters of a JSON value, or decompressed bytes, that a library parses as a whole. SQuAD has 42 million characters.
LARGEST_WHOLE = 4 * LARGEST_ROW
MOST_COLUMNS = 16_384  # of one row, as in a sheet of Excel

_TEXTS = (str, bytes)
_ROW_ADVICE = "Close its quotes, split its texts, or separate documents by blank lines"
_FILE_ADVICE = "Split it into rows, such as one JSON object per line"


def too_large(subject: str, limit: int, unit: str = "characters", *, advice: str | None = None) -> DataError:
    """Returns the error for a row, or for a part that is read as a whole, above its limit.

    Args:
        subject: What is too large, with its place.
        limit: The limit.
        unit: The unit of the limit.
        advice: What to do. Default: the advice for a row, or for a file that is read as a whole.
    """
    if advice is None and limit == LARGEST_ROW:
        advice = _ROW_ADVICE
    elif advice is None:
        advice = _FILE_ADVICE
    return DataError(f"{subject} has more than {limit:,} {unit}. {advice}")


def check_column_count(count: int, where: str) -> None:
    """Raises `DataError` if a row, or the header of a file, has too many columns."""
    if count > MOST_COLUMNS:
        raise DataError(
            f"{where}: {count:,} columns, but at most {MOST_COLUMNS:,} can be read. Check the delimiter and the line "
            "ends, or store lists in one column of a .jsonl or .parquet file"
        )


def check_row_size(cells: Mapping[str, Any], where: str) -> None:
    """Raises `DataError` if the values of a row have too many characters.

    The lines of a text are limited as they are read. This is for files that are not text. There a text may be in memory
    once and in many cells, such as the shared texts of a workbook or the labels of a DocBin, until a row is stored.
    """
    if sum(map(size_of, cells.values())) > LARGEST_ROW:
        raise too_large(where, LARGEST_ROW)


def size_of(value: Any) -> int:
    """Returns the number of characters in a value, and in the values that it holds."""
    if isinstance(value, _TEXTS):
        return len(value)
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(size_of, value))
    return 0
