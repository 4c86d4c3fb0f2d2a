"""What only the values of a row together can show: one tag for each word, and answers that stand in their context.

Owns these checks and the filling in of answer starts that the source does not give. Must not know files or tasks.

Judging records: which of a source's columns a task reads, and whether each value is what it must be.

Owns the column mapping, canonical values and labels of every row, and the report of all bad rows. Must not know how
files are parsed or stored.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from bert_tasks.data.checks import LABEL_KINDS, LabelCensus
from bert_tasks.data.columns import (
    FAULT,
    KEPT,
    LABEL_SEPARATOR,
    UNKNOWN_START,
    Answers,
    BadValueError,
    Column,
    PassthroughColumns,
    canonical,
    column_of,
    text_of_words,
    with_words,
)
from bert_tasks.data.conll import label_scheme
from bert_tasks.data.formats import Format
from bert_tasks.data.problems import Problems, did_you_mean, raise_problems, shortened
from bert_tasks.data.records import Record
from bert_tasks.errors import DataError

CONTEXT = "context"
_WORDS_SHOWN = 5


class RowFault(NamedTuple):
    column: str
    value: str
    what: str


def checked_together(row: Mapping[str, Any], columns: Sequence[Column]) -> tuple[dict[str, Any], list[RowFault]]:
    """The row of canonical values with answer starts filled in, and what is wrong with it.

    An answer without a start gets the first place where the context holds it. A value that is None, because it is
    not there or was refused before, is not checked.
    """
    checked = dict(row)
    words, tags, answers = (column_of(columns, kind) for kind in ("words", "tags", "answers"))
    faults: list[RowFault] = []
    if words is not None and tags is not None:
        faults += _tag_faults(tags.name, row.get(words.name), row.get(tags.name))
    if answers is not None and row.get(answers.name) is not None:
        checked[answers.name], found = _placed(answers.name, row[answers.name], row.get(CONTEXT), CONTEXT in row)
        faults += found
    return checked, faults


def _tag_faults(column: str, words: list[str] | None, tags: list[str] | None) -> list[RowFault]:
    if words is None or tags is None or len(words) == len(tags):
        return []
    start = " ".join(words[:_WORDS_SHOWN]) + (" ..." if len(words) > _WORDS_SHOWN else "")
    counts = f"{_counted(len(words), 'word')} and {_counted(len(tags), 'tag')}"
    return [RowFault(column, " ".join(tags), f"{counts} in the sentence {start!r}; give each word one tag")]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _placed(column: str, answers: Answers, context: str | None, has_context: bool) -> tuple[Answers, list[RowFault]]:
    if not has_context:
        return answers, [RowFault(column, str(answers), f"answers need the text they stand in: a column {CONTEXT!r}")]
    if context is None:
        return answers, []
    faults: list[RowFault] = []
    starts: list[int] = []
    for text, start in zip(answers["text"], answers["answer_start"], strict=True):
        place = context.find(text) if start == UNKNOWN_START else start
        starts.append(place)
        if place < 0 or not context.startswith(text, place):
            faults.append(RowFault(column, text, _misplaced(text, start, context)))
    return Answers(text=list(answers["text"]), answer_start=starts), faults


def _misplaced(text: str, start: int, context: str) -> str:
    """Why an answer does not stand where it should, and where it does."""
    known = start != UNKNOWN_START
    at = f"at answer_start {start} the context has {_there(context, start, len(text))}; " if known else ""
    places = _places(text, context)
    if places:
        nearest = min(places, key=lambda place: abs(place - start))
        off = start - nearest
        return f"{at}the text stands at {nearest}, answer_start is {abs(off)} too {'large' if off > 0 else 'small'}"
    lower = text.lower()
    if known and context[start : start + len(text)].lower() == lower:
        return f"{at}the letter case differs"
    folded = context.lower().find(lower)
    if folded >= 0 and len(context.lower()) == len(context):
        there = shortened(context[folded : folded + len(text)])
        return f"{at}{there} stands at {folded}, the letter case differs"
    return f"{at}the context does not hold this text; copy it from the context, letter for letter"


def _there(context: str, start: int, length: int) -> str:
    if start >= len(context):
        return f"its end ({len(context)} characters)"
    return shortened(context[start : start + length])


def _places(text: str, context: str) -> list[int]:
    places: list[int] = []
    place = context.find(text)
    while place >= 0:
        places.append(place)
        place = context.find(text, place + 1)
    return places


Targets = Literal["required", "optional"]
_SKIPPED_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Field:
    """A column of the task and what it is called in the source."""

    column: Column
    name: str
    mapped: bool
    needed: bool


@dataclass(frozen=True, kw_only=True)
class ColumnMapping:
    """What to take out of a source and how to judge it.

    ``keep``: the columns that rows carry along, as asked for, and ``carried`` as the format has it. ``skips``: bad rows
    are rows too, without values, and say what is wrong.
    """

    fields: tuple[Field, ...]
    label_names: Mapping[str, str]
    labels: Sequence[str] | None
    source: str
    keep: PassthroughColumns = "none"
    carried: PassthroughColumns = "none"
    skips: bool = False
    label_separator: str = LABEL_SEPARATOR


def make_column_mapping(
    columns: Sequence[Column],
    names: Mapping[str, str] | None,
    usual_names: Mapping[str, str],
    layout: Format | None,
    targets: Targets,
    labels: Sequence[str] | None,
    source: str,
    *,
    keep: PassthroughColumns = "none",
    skips: bool = False,
    label_separator: str = LABEL_SEPARATOR,
) -> ColumnMapping:
    if label_separator.strip() == "":
        raise DataError(f"label_separator = {label_separator!r}: expected a visible character or several, such as '|'")
    names = {} if names is None else names
    known = [column.name for column in columns]
    for name in names:
        if name not in known:
            raise DataError(f"columns: the task reads {', '.join(known)}, no {name!r}{did_you_mean(name, known)}")
    fields = tuple(
        Field(
            column=column,
            name=names.get(column.name, usual_names.get(column.name, column.name)),
            mapped=column.name in names,
            needed=column.required or (column.is_target and targets == "required"),
        )
        for column in columns
    )
    label_names: Mapping[str, str] = {} if layout is None else layout.label_names
    carried = layout.kept if keep == "all" and layout is not None and layout.kept else keep
    return ColumnMapping(
        fields=fields,
        label_names=label_names,
        labels=labels,
        source=source,
        keep=keep,
        carried=carried,
        skips=skips,
        label_separator=label_separator,
    )


class RowValidator:
    """Turns records into rows, keeping what is wrong with them, what was skipped and how often each label stands."""

    def __init__(self, plan: ColumnMapping, seen: set[str]) -> None:
        self.plan = plan
        self.seen = seen
        self.count = 0
        self.skipped: list[int] = []
        self.rejected = 0
        self.reasons: list[str] = []  # of the row at hand
        self.problems = Problems(source=plan.source)
        self.census = LabelCensus()
        self.columns = [field.column for field in plan.fields]
        self.names = {field.column.name: field.name for field in plan.fields}

    def rows(self, records: Iterator[Record]) -> Iterator[dict[str, Any]]:
        for record in records:
            self.count += 1
            if record.skip:
                self.skipped.append(record.line)
                continue
            self.reasons = []
            row = self._row(record)
            if self.reasons and self.plan.skips:
                self.rejected += 1
                yield {"line": record.line, FAULT: fault_of(record, self.reasons)}
            elif record.fault is None:
                yield row | {"line": record.line}

    def _row(self, record: Record) -> dict[str, Any]:
        if record.fault is not None:
            self._add(record, record.fault)
            return {}
        self.seen.update(record.cells)
        cells = with_words(record.cells, self.columns, self.names)
        values = {field.column.name: self._value(record, cells.get(field.name), field) for field in self.plan.fields}
        row, faults = checked_together(values, self.columns)
        for fault in faults:
            self._add(record, fault.what, column=self.names[fault.column], value=fault.value)
        return row if self.plan.keep == "none" else row | {KEPT: kept_cells(record.cells, self.plan.carried)}

    def finish(self) -> tuple[str, ...]:
        """Notes on rows that were left out.

        Raises:
            BadRowsError: all the problems.
            DataError: no rows, or a column is not there.
        """
        if self.count == len(self.skipped):
            below = "; there is nothing below the header" if self.seen and not self.skipped else ""
            raise DataError(f"{self.plan.source}: no rows{below}{''.join(f'; {note}' for note in self._notes())}")
        if self.seen:
            check_columns(tuple(self.seen), self.plan)
        if 0 < self.rejected < self.count:  # what is wrong with them stands in the rows
            self.problems = Problems(source=self.plan.source)
        self._check_labels()
        raise_problems([self.problems])
        return self._notes()

    def _check_labels(self) -> None:
        column, labels = column_of(self.columns, *LABEL_KINDS), self.plan.labels
        if column is None or labels is None:
            return
        if column.kind != "tags" or len(labels) == 0:
            self.census.report(self.problems, self.names[column.name], labels)
        elif label_scheme(labels) != "raw":  # of chunk tags any type will do, see check_labels
            self.census.report_no_chunks(self.problems, self.names[column.name])

    def _notes(self) -> tuple[str, ...]:
        if not self.skipped:
            return ()
        shown = ", ".join(map(str, self.skipped[:_SKIPPED_SHOWN]))
        more = ", ..." if len(self.skipped) > _SKIPPED_SHOWN else ""
        return (f"{len(self.skipped)} of {self.count} rows have too few cells and were skipped (line {shown}{more})",)

    def _add(self, record: Record, what: str, *, column: str | None = None, value: object = None) -> None:
        named = what if record.name is None else f"{what} (question {record.name!r})"
        self.reasons.append(what if column is None else f"column {column!r}: {what}")
        self.problems.add(record.line, named, column=column, value=value)

    def _value(self, record: Record, raw: Any, field: Field) -> Any:
        if raw is None and not field.column.required and not field.needed:
            return None
        try:
            value = self._named(canonical(raw, field.column.kind, self.plan.label_separator), field.column)
            if value is None and field.needed:
                raise BadValueError(f"missing {field.column.kind}")
        except BadValueError as error:
            self._add(record, str(error), column=field.name, value=raw)
            return None
        self.census.add(value, record.line, field.column)
        return value

    def _named(self, value: Any, column: Column) -> Any:
        names = self.plan.label_names
        if column.kind != "label" or not names or value is None or value in names.values():
            return value
        if value == "-1":
            return None
        if value not in names:
            raise BadValueError(f"expected one of {', '.join(names)}, or {', '.join(names.values())}")
        return names[value]


def check_columns(present: tuple[str, ...], plan: ColumnMapping) -> None:
    """Raises DataError if a column that is needed or to be kept is not there, with what is there."""
    unkept = [] if isinstance(plan.keep, str) else [name for name in plan.keep if name not in present]
    if unkept:
        there = ", ".join(repr(name) for name in sorted(present))
        told = f"{plan.source}: no column {unkept[0]!r} to keep{did_you_mean(unkept[0], present)}"
        raise DataError(f"{told}; the columns there are: {there}")
    missing = [field for field in plan.fields if field.needed and field.name not in present]
    words, text = text_of_words([field.column for field in plan.fields])
    if any(field.column == text and field.name in present for field in plan.fields):
        missing = [field for field in missing if field.column != words]
    if not missing:
        return
    if len(present) == 1:
        other = next((mark for mark in (";", "\t", ",", "|") if mark in present[0]), None)
        if other is not None:
            raise DataError(
                f"{plan.source}: one column only, {present[0]!r}; if {other!r} separates columns, set "
                f"delimiter = {other!r} (--delimiter)"
            )
    there = ", ".join(repr(name) for name in sorted(present))
    lines = [f"{plan.source}: no column {field.name!r}{did_you_mean(field.name, present)}" for field in missing]
    wanted = [field.column.name for field in missing[:1]]
    if text is not None and missing[0].column == words:  # either will do
        wanted.append(text.name)
        lines[0] = f"{lines[0]}, nor {text.name!r}"
    keys = " or ".join(f'{name} = "NAME"' for name in wanted)
    options = " or ".join(f"--column {name}=NAME" for name in wanted)
    raise DataError(
        "\n".join(
            [
                *lines,
                f"  the columns there are: {there}",
                f"  say which one to read: [data.columns] {keys}, or {options}",
            ]
        )
    )


def is_kept(column: str, keep: PassthroughColumns) -> bool:
    return keep == "all" or (keep != "none" and column in keep)


def kept_cells(cells: Mapping[str, Any], keep: PassthroughColumns) -> str:
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
