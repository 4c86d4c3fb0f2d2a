"""Rows out as parquet: columns and their types are found in the rows themselves.

Owns the types. Must not know what the rows mean.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_tasks.data.writers import write_failure
from bert_tasks.paths import beside

if TYPE_CHECKING:
    import pyarrow

_BLOCK_ROWS, _BLOCK_BYTES = 4096, 2**24

Row = dict[str, Any]


def write_parquet(lines: Path, target: Path) -> None:
    """Makes a parquet file of JSON lines, in two passes: for the types, then for the rows. Memory stays flat.

    Numbers, texts, lists and objects keep their kind. A column that mixes kinds (a number here, a text there) becomes
    a text column, what is no text in it JSON.

    Raises:
        UsageError: the file cannot be written.
    """
    import pyarrow
    from pyarrow import parquet

    schema = _schema(lines)
    temporary = beside(lines.with_name(target.name), before=".", after=f".tmp-{os.getpid()}")
    try:
        with parquet.ParquetWriter(temporary, schema) as writer:
            for block in _blocks(lines):
                columns = [_column(block, field.name, field.type) for field in schema]
                writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        raise write_failure(error, target, temporary) from None
    finally:
        temporary.unlink(missing_ok=True)


def _schema(lines: Path) -> "pyarrow.Schema":
    import pyarrow

    types: dict[str, pyarrow.DataType | None] = {}
    unified: set[str] = set()
    for block in _blocks(lines):
        for name in dict.fromkeys(name for row in block for name in row):
            found = _type(row.get(name) for row in block)
            if name in types and found != types[name]:
                found = _common(types[name], found)
                unified.add(name)
            types[name] = found
    if unified:
        types |= dict.fromkeys(_refused(lines, {name: types[name] for name in unified}))
    return pyarrow.schema([(name, _stored(kind)) for name, kind in types.items()])


def _type(values: Iterable[Any]) -> "pyarrow.DataType | None":
    """The values' type; None if they have none in common."""
    import pyarrow

    try:
        return pyarrow.array(list(values)).type
    except (pyarrow.ArrowException, OverflowError):
        return None


def _common(left: "pyarrow.DataType | None", right: "pyarrow.DataType | None") -> "pyarrow.DataType | None":
    import pyarrow

    if left is None or right is None:
        return None
    schemas = [pyarrow.schema([("", kind)]) for kind in (left, right)]
    try:
        return pyarrow.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pyarrow.ArrowException:
        return None


def _refused(lines: Path, types: Mapping[str, "pyarrow.DataType | None"]) -> set[str]:
    """The columns with a value that the common type cannot hold: a whole number above 2^53 beside fractions."""
    import pyarrow

    found = set()
    for block in _blocks(lines):
        for name, kind in types.items():
            try:
                _column(block, name, _stored(kind))
            except pyarrow.ArrowException:
                found.add(name)
    return found


def _stored(kind: "pyarrow.DataType | None") -> "pyarrow.DataType":
    """Text where there is no common type, no value at all, or an object without fields, which parquet lacks."""
    import pyarrow

    return pyarrow.string() if kind is None or pyarrow.types.is_null(kind) or _has_empty_object(kind) else kind


def _has_empty_object(kind: "pyarrow.DataType") -> bool:
    import pyarrow

    if pyarrow.types.is_struct(kind) and kind.num_fields == 0:
        return True
    return any(_has_empty_object(kind.field(number).type) for number in range(kind.num_fields))


def _column(block: list[Row], name: str, kind: "pyarrow.DataType") -> "pyarrow.Array":
    import pyarrow

    values = [row.get(name) for row in block]
    if pyarrow.types.is_string(kind):
        values = [v if v is None or isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values]
    return pyarrow.array(values, kind)


def _blocks(lines: Path) -> Iterator[list[Row]]:
    block: list[Row] = []
    size = 0
    with lines.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            block.append(json.loads(line))
            size += len(line)
            if len(block) == _BLOCK_ROWS or size >= _BLOCK_BYTES:
                yield block
                block, size = [], 0
    if block:
        yield block
