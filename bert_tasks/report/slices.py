"""Scores of parts of a data set: one for each value of a column of its file.

Owns which rows are together. Must not know how scores are computed or shown.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bert_tasks.data.columns import Row
from bert_tasks.data.kept import KEPT
from bert_tasks.data.problems import did_you_mean
from bert_tasks.errors import UsageError
from bert_tasks.report.statistics import Estimate

SHOWN = 20  # values of a column with a row of their own
NOTHING = "(empty)"

Scores = Mapping[str, Estimate]


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The rows with one value, or with any of those that have no row of their own."""

    value: str
    rows: int
    scores: tuple[Estimate, ...]


@dataclass(frozen=True, kw_only=True)
class Slices:
    """Scores by the values of a column, the most frequent first.

    Attributes:
        names: of the scores.
        others: how many values the last one stands for; 0 where each value has a row.
    """

    column: str
    names: tuple[str, ...]
    slices: tuple[Slice, ...]
    others: int


def given_cells(row: Row) -> Mapping[str, Any]:
    """The columns of a row as its file has them; the task's where these were not kept."""
    kept = row.get(KEPT)
    if kept is None:
        return {name: value for name, value in row.items() if name != "line" and value is not None}
    cells: Mapping[str, Any] = json.loads(kept)
    return cells


def slices_by(
    column: str, rows: Sequence[Row], score: Callable[[Sequence[int]], Scores], names: Sequence[str]
) -> Slices:
    """The scores of the rows of each value.

    Args:
        column: of the file, or of the task.
        rows: of the data set.
        score: the places of some rows -> their scores.
        names: of the scores to tell.

    Raises:
        UsageError: no row has the column.
    """
    values = _values(column, rows)
    counted = Counter(values).most_common()
    own = [value for value, _ in (counted if len(counted) <= SHOWN else counted[: SHOWN - 1])]
    places: dict[str, list[int]] = {value: [] for value in own}
    rest: list[int] = []
    for place, value in enumerate(values):
        places.get(value, rest).append(place)
    others = len(counted) - len(own)
    groups = [*places.items(), *([(f"{others} others", rest)] if others else [])]
    found = []
    for value, chosen in groups:
        scores = score(chosen)
        found.append(Slice(value=value, rows=len(chosen), scores=tuple(scores[name] for name in names)))
    return Slices(column=column, names=tuple(names), slices=tuple(found), others=others)


def _values(column: str, rows: Sequence[Row]) -> list[str]:
    """The text of the column in each row."""
    cells = [given_cells(row) for row in rows]
    known = list(dict.fromkeys(name for row in cells for name in row))
    if column in known:
        return [_text(row.get(column)) for row in cells]
    used = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in (KEPT, "line")]
    if column in used:
        return [_text(row.get(column)) for row in rows]
    names = [*known, *(name for name in used if name not in known)]
    raise UsageError(
        f"--by {column}: no row has this column{did_you_mean(column, names)}; there are {', '.join(map(repr, names))}"
    )


def _text(value: Any) -> str:
    if value is None or value == "":
        return NOTHING
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
