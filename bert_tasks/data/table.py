"""The rows of one source in canonical form, memory-mapped.

Owns access to rows by number, in order and in batches. Must not know where they came from or what they are
for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bert_tasks.data.arrow_cache import blocks, digest, streamed
from bert_tasks.data.columns import Column
from bert_tasks.data.problems import Problems, raise_problems
from bert_tasks.data.records import rows_of
from bert_tasks.data.row_checks import checked_together
from bert_tasks.data.values import BadValueError, canonical
from bert_tasks.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset, Features

_BATCH = 1000


@dataclass(frozen=True, kw_only=True)
class HubSplit:
    """A split of a data set on the hub. ``commit`` and ``licence`` (as its page states it) are None where unknown."""

    dataset: str
    config: str | None
    split: str
    commit: str | None
    licence: str | None


@dataclass(frozen=True, kw_only=True)
class RowTable:
    """Rows with the columns' names that the task uses, and ``line``: where a row stands in its file, from 1.

    A target column that the source does not have is absent; a single missing target is None. ``source`` names
    the file in messages. ``fingerprint`` is a sha256 over the contents and the way they were read. ``notes`` are for
    people: what was left out when the rows were read. ``file`` is the Arrow file that holds these rows and no others,
    if there is one: reading them in order then leaves no pages of it in memory. ``hub`` says where on the hub they are.
    """

    rows: "Dataset"
    source: str
    fingerprint: str
    notes: tuple[str, ...] = ()
    file: Path | None = None
    hub: HubSplit | None = None

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Mapping[str, Any]],
        source: str = "rows",
        columns: Sequence[Column] | None = None,
        targets: Literal["required", "optional"] = "optional",
    ) -> "RowTable":
        """A table of rows in memory; with ``columns`` values are checked and made canonical as in files.

        Raises:
            BadRowsError: naming all the rows that cannot be used; with ``targets="required"`` those without one too.
        """
        from datasets import Dataset

        for number, row in enumerate(rows, start=1):
            if not isinstance(row, Mapping):
                raise DataError(f"{source}:{number}: expected a dict such as {{'text': '...'}}, not {row!r:.60}")
        numbered = [{**row, "line": number} for number, row in enumerate(rows, start=1)]
        if columns is None:
            table = Dataset.from_list(numbered)
        else:
            numbered = _checked(numbered, columns, source, targets)
            schema = table_schema(columns)
            table = Dataset.from_dict({name: [row[name] for row in numbered] for name in schema}, features=schema)
            table = without_absent(table, columns)
        return cls(rows=table, source=source, fingerprint=digest(numbered))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self.rows[index]
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.file is not None and self.file.exists():
            batches = streamed(self.file, self.rows.column_names)
        else:
            batches = self.batches(_BATCH)
        for batch in batches:
            yield from batch

    def blocks(self, size: int, wanted: Callable[[int], bool]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """The wanted ones of the blocks of ``size`` rows, each with its number, in order."""
        if self.file is not None and self.file.exists():
            yield from blocks(self.file, self.rows.column_names, size, wanted)
            return
        for number in range(-(-len(self) // size)):
            if wanted(number):
                end = min((number + 1) * size, len(self))
                yield number, rows_of(self.rows[number * size : end])

    def batches(self, size: int) -> Iterator[list[dict[str, Any]]]:
        for batch in self.rows.iter(batch_size=size):
            yield rows_of(batch)

    def select(self, indices: Sequence[int]) -> "RowTable":
        chosen = [int(index) for index in indices]
        fingerprint = digest(self.fingerprint, chosen)
        return replace(self, rows=self.rows.select(chosen), fingerprint=fingerprint, file=None)


def table_schema(columns: Sequence[Column], texts: Sequence[str] = ()) -> "Features":
    """The types of a table's columns; ``texts`` names more columns."""
    from datasets import Features, List, Value

    types: dict[str, Any] = dict.fromkeys(("text", "id", "label"), Value("string")) | {"number": Value("float64")}
    types |= dict.fromkeys(("labels", "words", "tags"), List(Value("string")))
    types["answers"] = {"text": List(Value("string")), "answer_start": List(Value("int64"))}
    more = {"line": Value("int64")} | dict.fromkeys(texts, Value("string"))
    return Features({column.name: types[column.kind] for column in columns} | more)


def without_absent(rows: "Dataset", columns: Sequence[Column]) -> "Dataset":
    """The rows without the columns that need not be there and hold no value at all."""
    table = rows.data
    names = [column.name for column in columns if not column.required]
    return rows.remove_columns([name for name in names if table.column(name).null_count == table.num_rows])


def _checked(
    rows: Sequence[dict[str, Any]], columns: Sequence[Column], source: str, targets: str
) -> list[dict[str, Any]]:
    problems = Problems(source=source)
    needed = {column.name for column in columns if column.is_target and targets == "required"}
    checked = [_checked_row(row, columns, problems, needed) for row in rows]
    raise_problems([problems])
    return checked


def _checked_row(
    row: dict[str, Any], columns: Sequence[Column], problems: Problems, needed: set[str]
) -> dict[str, Any]:
    values: dict[str, Any] = {"line": row["line"]}
    for column in columns:
        value = row.get(column.name)
        values[column.name] = None
        if value is None and column.name in needed:
            others = ", ".join(name for name in row if name != "line")
            problems.add(row["line"], f"no value; the row has {others}", column=column.name)
            continue
        if value is None and not column.required:
            continue
        try:
            values[column.name] = canonical(value, column.kind)
        except BadValueError as error:
            problems.add(row["line"], str(error), column=column.name, value=value)
    values, faults = checked_together(values, columns)
    for fault in faults:
        problems.add(row["line"], fault.what, column=fault.column, value=fault.value)
    return values
