"""The row validator: which of a source's columns a task reads, whether each value can be used, and which labels occur.

Every row passes through ``RowValidator``: rows of files and of hub data sets, tables in memory, the rows that
``TaskModel.predict`` is given, and the rows of the server's requests. So a fault has the same message everywhere, apart
from the place that it names.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, NamedTuple

from bert_tasks.data.choices import (
    choice_index,
    choice_names,
    has_columns_from_one,
    label_start,
    numbered_columns,
    with_choices,
)
from bert_tasks.data.columns import (
    FAULT,
    FOLD_GROUP,
    LABEL_SEPARATOR,
    PASSTHROUGH,
    UNKNOWN_START,
    Answers,
    BadValueError,
    Column,
    Kind,
    PassthroughColumns,
    Row,
    as_row,
    canonical,
    column_of,
    label_value,
    labels_by_value,
    read_for_others,
    renamed_row,
    text_of_words,
    with_text,
    with_words,
)
from bert_tasks.data.conll import is_chunk_tag, label_scheme, to_iob2
from bert_tasks.data.formats import Format
from bert_tasks.data.problems import (
    SHOWN,
    BadRowsError,
    Problems,
    counted,
    did_you_mean,
    first_few,
    shortened,
    suggestion,
)
from bert_tasks.data.records import Record
from bert_tasks.errors import DataError

CONTEXT = "context"
CLASS_KINDS: tuple[Kind, ...] = ("label", "labels", "tags")  # columns whose values are names of classes
_MOST_COUNTED = 100_000  # different labels of a census
_MOST_AHEAD = 10_000  # rows that are read before the first one is validated, while their labels may mean two choices
_FEW = 10  # one odd tag in so many is taken for a mistake
_WORDS_SHOWN = 5
_COLUMNS_SHOWN = 10


class Fault(NamedTuple):
    """What is wrong with one value of a row; without a column, with the row as a whole."""

    what: str
    column: str | None = None
    value: object = None

    def __str__(self) -> str:
        return self.what if self.column is None else f"column {self.column!r}: {self.what}"


@dataclass(frozen=True, kw_only=True)
class Field:
    """A column of the task, its name in the source, and whether every row needs a value there."""

    column: Column
    name: str
    needed: bool


@dataclass(frozen=True, kw_only=True)
class ColumnMapping:
    """What to read from a source, and what its values must be.

    Attributes:
        label_names: the label ids of the source -> their names.
        labels: see ``make_column_mapping``.
        source: the source's name in messages.
        passthrough: which of the source's columns each row carries along in a column ``PASSTHROUGH``, as asked for.
        passthrough_columns: the same, where "all" may stand for the columns that the format names.
        skip_faulty: rows that cannot be used become rows without values that say what is wrong in a column ``FAULT``.
        label_separator: what separates several labels in one cell.
    """

    fields: tuple[Field, ...]
    label_names: Mapping[str, str]
    labels: Sequence[str] | None
    source: str
    passthrough: PassthroughColumns
    passthrough_columns: PassthroughColumns
    skip_faulty: bool
    label_separator: str


def make_column_mapping(
    columns: Sequence[Column],
    names: Mapping[str, str] | None = None,
    *,
    usual_names: Mapping[str, str] | None = None,
    layout: Format | None = None,
    require_labels: bool = False,
    labels: Sequence[str] | None = None,
    source: str = "rows",
    passthrough: PassthroughColumns = "none",
    skip_faulty: bool = False,
    label_separator: str = LABEL_SEPARATOR,
) -> ColumnMapping:
    """Decides under which name each column of a task is read; see ``read_for_others`` for those that are not.

    Args:
        columns: the columns that the task reads.
        names: the task's columns -> the source's, as the caller states them.
        usual_names: the same, as the format has them.
        layout: the format of the source.
        require_labels: every row needs its label; else labels may be missing, as in files for prediction.
        labels: the known label names, which every label must be; an empty sequence: they will be inferred from the
            rows; None: labels are not checked.

    Raises:
        DataError: ``names`` has a column that the task does not read, or the separator is blank.
    """
    if label_separator.strip() == "":
        raise DataError(f"label_separator = {label_separator!r}: expected one or more visible characters, such as '|'")
    stated = {} if names is None else names
    usual = {} if usual_names is None else usual_names
    known = [column.name for column in columns]
    unknown = next((name for name in stated if name not in known), None)
    if unknown is not None:
        raise DataError(unknown_column(unknown, known))
    unread = read_for_others(columns, stated, usual)
    usual_columns = () if layout is None else layout.default_passthrough
    return ColumnMapping(
        fields=tuple(
            Field(
                column=column,
                name=stated.get(column.name, usual.get(column.name, column.name)),
                needed=column.required or (column.is_label and require_labels),
            )
            for column in columns
            if column.name not in unread or (column.is_label and require_labels)
        ),
        label_names={} if layout is None else layout.label_names,
        labels=labels,
        source=source,
        passthrough=passthrough,
        passthrough_columns=usual_columns if passthrough == "all" and usual_columns else passthrough,
        skip_faulty=skip_faulty,
        label_separator=label_separator,
    )


def unknown_column(name: str, known: Sequence[str]) -> str:
    """The message for a stated column that the task does not have."""
    return f"columns: the task reads {', '.join(known)}, not {name!r}{did_you_mean(name, known)}"


def is_integer(value: str) -> bool:
    """Whether a label is a whole number; one of more digits than Python converts is a name."""
    return re.fullmatch(r"[+-]?\d{1,4300}", value) is not None


@dataclass(kw_only=True)
class LabelCensus:
    """How often each label of a column occurs, and where.

    Tags are counted for each word twice: in IOB2, whatever chunk scheme they are written in, and as they are written,
    which is what counts where any of them is not a chunk tag.

    Attributes:
        column: a column of one of ``CLASS_KINDS``.
        rows: how many rows have a value there.
        written: how often each label occurs as it is written.
        chunks: how often each tag occurs in IOB2.
        lines: (whether it is in IOB2, label) -> the first lines that have it.
    """

    column: Column
    rows: int = 0
    written: Counter[str] = field(default_factory=Counter)
    chunks: Counter[str] = field(default_factory=Counter)
    lines: dict[tuple[bool, str], list[int]] = field(default_factory=dict)

    @property
    def counts(self) -> Counter[str]:
        """How often each label occurs."""
        are_chunks = len(self.chunks) > 0 and all(map(is_chunk_tag, self.written))
        return self.chunks if are_chunks else self.written

    def add(self, value: Any, line: int) -> None:
        """Counts the value of the row at a line; None is no label. Memory is bounded."""
        if value is None:
            return
        self.rows += 1
        tallies = [(False, self.written, [value] if self.column.kind == "label" else value)]
        if self.column.kind == "tags":
            tallies.append((True, self.chunks, to_iob2(value)))
        for is_iob2, counts, names in tallies:
            for name in names:
                if name not in counts and len(counts) >= _MOST_COUNTED:
                    continue
                counts[name] += 1
                lines = self.lines.setdefault((is_iob2, name), [])
                if len(lines) < SHOWN and line not in lines[-1:]:
                    lines.append(line)

    def report(self, problems: Problems, name: str, labels: Sequence[str], *, new_types: bool = True) -> None:
        """Adds the rows whose label cannot be used.

        Args:
            problems: where they are added.
            name: the column's name in the source.
            labels: the known labels. Without any, what is reported is what does not belong among the other labels.
            new_types: chunk tags of types that are not among the labels pass: test files may have types that no
                training file has, which a model then misses.
        """
        counts = self.written
        if len(labels) == 0:
            odd = self._mixed()
        elif self.column.kind == "tags" and new_types:
            is_raw = label_scheme(labels) == "raw"
            unclear = [] if is_raw else [tag for tag in counts if not is_chunk_tag(tag)]
            odd = dict.fromkeys(unclear, "expected O or a tag such as B-TYPE")
        else:
            if self.chunks and label_scheme(labels) != "raw":
                counts = self.chunks
            odd = {}
            for value in counts:
                if value not in labels:
                    meant = suggestion(value, labels)
                    expected = f"expected one of {first_few(labels, 10)}"
                    odd[value] = expected if meant is None else f"{value!r} -> {meant!r}?"
        for value, what in odd.items():
            lines = self.lines[counts is self.chunks, value]
            problems.add(lines[0], what, column=name, value=value, times=counts[value] - len(lines) + 1)
            for line in lines[1:]:
                problems.add(line, what, column=name, value=value)

    def _mixed(self) -> dict[str, str]:
        """The labels that do not belong among the others -> what is wrong with them."""
        counts = self.written
        numbers = {value for value in counts if is_integer(value)}
        names = set(counts) - numbers
        if numbers and names:
            few = min(numbers, names, key=lambda group: sum(counts[value] for value in group))
            what = "a number among names" if few is numbers else "a name among numbers"
            return dict.fromkeys(sorted(few), f"{what}; fix it, or state the labels in settings.labels")
        if not self.chunks:
            return {}
        plain = {value for value in counts if not is_chunk_tag(value)}
        prefixed = sum(count for value, count in counts.items() if value != "O" and value not in plain)
        if sum(counts[value] for value in plain) * _FEW > prefixed:
            return {}  # they are not chunk tags but classes of words
        return dict.fromkeys(
            sorted(plain), "expected O or a tag such as B-TYPE, as almost all are; or state them in settings.labels"
        )


class RowValidator:
    """Turns rows as a source has them into rows with the task's names and canonical values.

    ``validate`` looks at one row. ``rows`` looks at all rows of a source, and collects what is wrong with them, which
    rows were skipped, and how often each label occurs.

    Args:
        mapping: what to read.
        columns: the source's columns, where it names them before its first row.

    Raises:
        DataError: a needed column is not among ``columns``.
    """

    def __init__(self, mapping: ColumnMapping, columns: Sequence[str] | None = None) -> None:
        self.mapping = mapping
        if columns is not None:
            check_columns(columns, mapping)
        self._seen: dict[str, None] = dict.fromkeys([] if columns is None else columns)
        self._count = self._faulty = 0
        self.notes: tuple[str, ...] = ()
        self._problems = Problems(source=mapping.source)
        self._columns = [field.column for field in mapping.fields]
        self._names = {field.column.name: field.name for field in mapping.fields}
        self._words = column_of(self._columns, "words")
        self._texts = column_of(self._columns, "texts")
        self._tags = column_of(self._columns, "tags")
        self._answers = column_of(self._columns, "answers")
        self._choices = column_of(self._columns, "choices")
        self._choice = column_of(self._columns, "choice")
        self._first_choice: int | None = None
        known = () if mapping.labels is None else mapping.labels
        self._labels, self._labels_by_value = frozenset(known), labels_by_value(known)
        label = column_of(self._columns, *CLASS_KINDS)
        self._census = None if label is None or mapping.labels is None else LabelCensus(column=label)

    def validate(self, cells: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
        """One row in canonical form, and what is wrong with it.

        Args:
            cells: the row under the source's names. A row that has a text instead of words gets the text's words; one
                that has sentences instead of a text, the text that they form.

        Returns:
            The values by the task's names, without those that are missing or refused, and the faults.
        """
        mapping = self.mapping
        row: dict[str, Any] = {}
        faults: list[Fault] = []
        label_names = mapping.label_names.values()
        if self._words is not None:
            cells = with_words(cells, self._columns, self._names)
        if self._texts is not None:
            cells = with_text(cells, self._columns, self._names)
        given = cells
        if self._choices is not None:
            try:
                cells = with_choices(cells, self._columns, self._names)
            except BadValueError as error:
                return row, [Fault(str(error), self._names[self._choices.name])]
        for wanted in mapping.fields:
            raw = cells.get(wanted.name)
            if raw is None and (not wanted.needed or wanted.column.name == FOLD_GROUP):
                continue  # the source needs the column of groups, but a row without a value there is a group of its own
            try:
                if raw is None and wanted.name not in cells:
                    there = first_few((shortened(str(name)) for name in cells), _COLUMNS_SHOWN)
                    raise BadValueError(f"missing {wanted.column.kind}; the row has {there if cells else 'no columns'}")
                value = canonical(raw, wanted.column.kind, mapping.label_separator)
                if mapping.label_names and wanted.column.kind == "label" and value not in label_names:
                    if value is not None and value != "-1" and value not in mapping.label_names:
                        expected = f"{', '.join(mapping.label_names)}, or {', '.join(label_names)}"
                        raise BadValueError(f"expected one of {expected}")
                    value = mapping.label_names.get(value)  # -1 says that the label is hidden
                if value is not None and wanted.column.kind == "label":
                    value = self._known_label(value)
                elif value is not None and wanted.column.kind == "labels":
                    value = list(map(self._known_label, value))
                if value is None and wanted.needed:
                    raise BadValueError(f"missing {wanted.column.kind}")
            except BadValueError as error:
                faults.append(Fault(str(error), wanted.name, raw))
                continue
            if value is not None:
                row[wanted.column.name] = value
        if self._words is not None and self._tags is not None:
            words, tags = row.get(self._words.name), row.get(self._tags.name)
            if words is not None and tags is not None and len(words) != len(tags):
                start = " ".join(words[:_WORDS_SHOWN]) + (" ..." if len(words) > _WORDS_SHOWN else "")
                counts = f"{counted(len(words), 'word')} and {counted(len(tags), 'tag')}"
                what = f"{counts} in the sentence {start!r}; give each word one tag"
                faults.append(Fault(what, self._names[self._tags.name], " ".join(tags)))
        if self._answers is not None and self._answers.name in row:
            column, answers = self._names[self._answers.name], row[self._answers.name]
            row[self._answers.name] = self._placed_answers(column, answers, row.get(CONTEXT), faults)
        if self._choices is not None and self._choice is not None and self._choice.name in row:
            value, choices = row.pop(self._choice.name), row.get(self._choices.name)
            try:
                if choices is not None:
                    named = choice_names(given, self._names[self._choices.name])
                    row[self._choice.name] = choice_index(value, choices, named, self._first_choice)
            except BadValueError as error:
                faults.append(Fault(str(error), self._names[self._choice.name], value))
        return row, faults

    def _known_label(self, name: str) -> str:
        """The known label that spells the same number: pandas and JSON do not keep how a file spells 1 or true."""
        value = None if name in self._labels else label_value(name)
        return name if value is None else self._labels_by_value.get(value, name)

    def _after_label_start(self, records: Iterator[Record]) -> Iterator[Record]:
        """The same records, once it is known from what number their labels count choices in columns of their own."""
        if self._choices is None or self._choice is None:
            return records
        choices, label = self._names[self._choices.name], self._names[self._choice.name]
        ahead: list[Record] = []
        for record in islice(records, _MOST_AHEAD):
            ahead.append(record)
            if record.fault is not None or record.skip:
                continue
            self._first_choice = label_start(record.cells, choices, label)
            if self._first_choice is not None or not has_columns_from_one(record.cells, choices):
                break
        return chain(ahead, records)

    def rows(self, records: Iterator[Record]) -> Iterator[dict[str, Any]]:
        """The rows of a source with their ``line``; at their end ``notes`` names those that were skipped.

        Raises:
            BadRowsError: at the end: rows that cannot be used, all of them; rows that became a ``FAULT`` only if no row
                is left.
            DataError: at the end: there are no rows, or a column is missing.
        """
        mapping, carried = self.mapping, self.mapping.passthrough_columns
        skipped: list[int] = []
        for record in self._after_label_start(records):
            self._count += 1
            if record.skip:
                skipped.append(record.line)
                continue
            row: dict[str, Any] = {}
            faults = [] if record.fault is None else [Fault(record.fault)]
            if record.fault is None:
                if not record.cells.keys() <= self._seen.keys():
                    self._seen.update(dict.fromkeys(record.cells))
                row, faults = self.validate(record.cells)
                if self._census is not None:
                    self._census.add(row.get(self._census.column.name), record.line)
                if carried != "none":
                    kept = {k: value for k, value in record.cells.items() if carried == "all" or k in carried}
                    try:
                        row[PASSTHROUGH] = json.dumps(kept, ensure_ascii=False, allow_nan=False)
                        row[PASSTHROUGH].encode()
                    except (ValueError, TypeError):  # UnicodeError is a ValueError
                        row[PASSTHROUGH] = json.dumps(plain(kept), ensure_ascii=False)
            for fault in faults:
                what = fault.what if record.name is None else f"{fault.what} (question {record.name!r})"
                self._problems.add(record.line, what, column=fault.column, value=fault.value)
            if faults and mapping.skip_faulty:
                self._faulty += 1
                # A line of a reject file, in ASCII: where the record is, what is wrong with it, and all of it as it is.
                named = {} if record.name is None else {"id": record.name}
                fault_line = {"line": record.line, **named, "reason": "; ".join(map(str, faults))}
                fault_line["raw"] = dict(record.cells) if record.raw is None else record.raw
                yield {"line": record.line, FAULT: json.dumps(fault_line, default=str)}
            elif record.fault is None:
                row["line"] = record.line
                yield row
        source = mapping.source
        if skipped:
            has, were = ("has", "was") if len(skipped) == 1 else ("have", "were")
            lines = first_few(map(str, skipped), 5)
            share = f"{len(skipped)} of {counted(self._count, 'row')}"
            self.notes = (f"{share} {has} too few cells and {were} skipped (line {lines})",)
        if self._count == len(skipped):
            below = "; it has a header or blank lines only" if self._seen and not skipped else ""
            raise DataError(f"{source}: no rows{below}{''.join(f'; {note}' for note in self.notes)}")
        if self._seen:
            check_columns(tuple(self._seen), self.mapping)
        if 0 < self._faulty < self._count:  # what is wrong with them is in the rows
            self._problems = Problems(source=source)
        if self._census is not None and self.mapping.labels is not None:
            self._census.report(self._problems, self._names[self._census.column.name], self.mapping.labels)
        if self._problems.count > 0:
            raise BadRowsError([self._problems])

    def _placed_answers(self, column: str, answers: Answers, context: str | None, faults: list[Fault]) -> Answers:
        """The answers, those without a start at the first place where the context has them; adds to ``faults``."""
        if CONTEXT not in self._names:
            faults.append(Fault(f"answers need the text that contains them: a column {CONTEXT!r}", column, answers))
        if context is None:
            return answers
        starts: list[int] = []
        for text, start in zip(answers["text"], answers["answer_start"], strict=True):
            place = context.find(text) if start == UNKNOWN_START else start
            starts.append(place)
            if place < 0 or not context.startswith(text, place):
                faults.append(Fault(_misplaced(text, start, context), column, text))
        return Answers(text=list(answers["text"]), answer_start=starts)


def _misplaced(text: str, start: int, context: str) -> str:
    """Why an answer is not where it should be, and where it is."""
    prefix = ""
    if start != UNKNOWN_START:
        found = shortened(context[start : start + len(text)])
        found = found if start < len(context) else f"its end ({counted(len(context), 'character')})"
        prefix = f"at answer_start {start} the context has {found}; "
    places: list[int] = []
    place = context.find(text)
    while place >= 0:
        places.append(place)
        place = context.find(text, place + 1)
    if places:
        nearest = min(places, key=lambda place: abs(place - start))
        off = start - nearest
        return f"{prefix}the text is at {nearest}, answer_start is {abs(off)} too {'large' if off > 0 else 'small'}"
    lower = text.lower()
    if start != UNKNOWN_START and context[start : start + len(text)].lower() == lower:
        return f"{prefix}the letter case differs"
    folded = context.lower().find(lower)
    if folded >= 0 and len(context.lower()) == len(context):
        there = shortened(context[folded : folded + len(text)])
        return f"{prefix}{there} is at {folded}, the letter case differs"
    return f"{prefix}the context does not contain this text; copy it from the context exactly"


def check_columns(present: Sequence[str], mapping: ColumnMapping) -> None:
    """Raises DataError if a column that is needed, or asked for by name, is missing, with what is there."""
    there = ", ".join(map(repr, sorted(present)))
    for name in [] if isinstance(mapping.passthrough, str) else mapping.passthrough:
        if name not in present:
            message = f"{mapping.source}: no column {name!r} to keep{did_you_mean(name, present)}"
            raise DataError(f"{message}; the columns are: {there}")
    missing = [
        field
        for field in mapping.fields
        if field.needed
        and field.name not in present
        and not (field.column.kind == "choices" and numbered_columns(field.name, present))
    ]
    if not missing:
        return
    columns = [field.column for field in mapping.fields]
    replaced, other = text_of_words(columns)
    if replaced is None and column_of(columns, "texts") is not None:
        replaced, other = column_of(columns, "text"), column_of(columns, "texts")
    if any(field.column == other and field.name in present for field in mapping.fields):
        missing = [field for field in missing if field.column != replaced]
    if not missing:
        return
    if len(present) == 1:
        (only,) = present
        mark = next((mark for mark in (";", "\t", ",", "|") if mark in only), None)
        if mark is not None:
            raise DataError(
                f"{mapping.source}: there is only one column, {only!r}; if {mark!r} separates columns, set "
                f"delimiter = {mark!r} (--delimiter)"
            )
    lines = [f"{mapping.source}: no column {field.name!r}{did_you_mean(field.name, present)}" for field in missing]
    for place, absent in enumerate(missing):
        if absent.column.kind == "choices":
            stem = absent.name.removesuffix("s")
            lines[place] += f", nor columns of single choices such as '{stem}0' and '{stem}1'"
    wanted = [missing[0].column.name]
    if other is not None and missing[0].column == replaced:  # either of them is enough
        wanted.append(other.name)
        lines[0] = f"{lines[0]}, nor {other.name!r}"
    keys = " or ".join(f'{name} = "NAME"' for name in wanted)
    options = " or ".join(f"--column {name}=NAME" for name in wanted)
    hint = 'folds.group = "NAME"' if wanted[0] == FOLD_GROUP else f"[data.columns] {keys}, or {options}"
    lines += [f"  the columns are: {there}", f"  say which one to read: {hint}"]
    raise DataError("\n".join(lines))


def plain(value: Any) -> Any:
    """The value in types that JSON has: a number that is not finite becomes None, half a character U+FFFD."""
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


def valid_rows(
    rows: Iterable[Row | str | tuple[str, ...]],
    columns: Sequence[Column],
    *,
    first: int = 0,
    names: Mapping[str, str] = MappingProxyType({}),
) -> list[Row]:
    """The rows' values of some columns, validated and in the form that tasks read.

    Args:
        rows: the rows, as ``as_row`` takes them.
        columns: the columns that are read.
        first: the number of the first row, for messages.
        names: columns -> the names under which rows may have them instead.

    Raises:
        DataError: naming the first row that cannot be used, its first fault, and the column.
    """
    validator = RowValidator(make_column_mapping(columns))
    valid: list[Row] = []
    for number, given in enumerate(rows, start=first):
        try:
            cells = with_choices(as_row(given, columns, number), columns, names, keep_names=True)
        except BadValueError as error:
            raise DataError(f"row {number}: {error}") from None
        row, faults = validator.validate(renamed_row(cells, names, columns))
        if faults:
            raise DataError(f"row {number}: {faults[0]}")
        valid.append(row)
    return valid
