"""What ``init`` found in the columns that a task reads, in words, with the labels and lengths of the rows."""

from collections.abc import Iterator, Sequence

from bert_tasks.data.columns import Row
from bert_tasks.data.conll import to_iob2
from bert_tasks.data.issues import counted
from bert_tasks.data.kinds import Answers, Label, Labels, Spans, Tags
from bert_tasks.data.profile import ColumnProfile, listed, percentile, pieces
from bert_tasks.init.readings import Reading

_PURPOSES = {
    "label": "one label for each row",
    "labels": "any number of labels for each row",
    "number": "a number to predict (regression)",
    "tags": "a tag for each word",
    "spans": "entities by characters of the text",
    "answers": "copied from the context",
    "choice": "names the right choice",
    "choice from 1": "names the right choice, counted from 1",
}


def usual_words(reading: Reading, rows: Sequence[Row]) -> int:
    """Returns the number of words that 95 of 100 rows have at most, over all texts that are read together."""
    return percentile([_row_pieces(row, reading) for row in rows])


def labels_found(reading: Reading, rows: Sequence[Row]) -> tuple[str, ...]:
    """Returns the different labels in a sample of rows, sorted. Numbers, answers and choices have none."""
    label = reading.label
    if label is None:
        return ()
    if isinstance(reading.kind, Labels):
        return label.names
    if isinstance(reading.kind, Label):
        return tuple(reading.settings.get("labels", sorted(value for value, _ in label.common)))
    if isinstance(reading.kind, Tags | Spans):
        # Files write IOB1, BIOES and others, but a run learns IOB2, so these are its labels.
        tags: set[str] = set()
        for row_tags in reading.label_values(reading.convert(rows)):
            tags.update(to_iob2(row_tags))
        return tuple(sorted(tags))
    return ()


def findings(reading: Reading, rows: Sequence[Row]) -> Iterator[str]:
    """Yields a sentence for each column that is read, and for what is unusual in it.

    Args:
        reading: The reading.
        rows: A sample of the rows, with the columns of the reading.
    """
    for column in reading.columns.values():
        if column == reading.label:
            continue
        described = column.described()
        if column.is_text and column.name in reading.texts:
            described = column.described_as_text()
        yield f"{column.name}: {described}"
    label = reading.label
    if label is not None:
        yield from _label_findings(reading, label, rows)
    elif len(rows[0]) > 1:
        yield "no other column says something about the rows, so there are no labels"
    if reading.unread:
        yield f"not read: {listed(reading.unread)}"


def _label_findings(reading: Reading, label: ColumnProfile, rows: Sequence[Row]) -> Iterator[str]:
    """Yields sentences on the column of the labels, and on the rows whose label is missing or cannot be used."""
    yield f"{label.name}: {_purpose(label, reading)}, {label.described()}"
    if label.empty and not isinstance(reading.kind, Labels):
        what = "a label"
        if isinstance(reading.kind, Answers):
            what = "an answer"
        elif isinstance(reading.kind, Spans):
            what = "a span"  # which an empty list says, too, as a label to learn from
        yield f"{label.name}: {counted(label.empty, 'row')} without {what}"
    hidden = label.hidden_value
    if isinstance(reading.kind, Label) and hidden is not None:
        rows_with_it = counted(dict(label.common)[hidden], "row")
        yield f"{label.name}: {hidden!r} says that a row has no label. {rows_with_it} with it are left out"
    if reading.is_related:
        problems = reading.convert(rows).problems
        if problems:
            example = next(iter(problems.values()))[0].text
            yield f"{label.name}: {len(problems)} of {counted(len(rows), 'row')} cannot be used, for example {example}"


def _purpose(label: ColumnProfile, reading: Reading) -> str:
    """Returns what the cells of the label column mean to the task."""
    purpose = ""
    if reading.kind is not None:
        purpose = _PURPOSES[reading.kind.name]
    if reading.joined:
        return f"{purpose}, each with a column of 0 and 1"
    if isinstance(reading.kind, Labels) and label.lists == 0:
        return f"{purpose}, with {label.separator!r} between them"
    return purpose


def _row_pieces(row: Row, reading: Reading) -> int:
    """Returns the number of words and marks of a row. Of a list of choices the longest counts."""
    total = 0
    for name in reading.texts:
        cell = row.get(name)
        if isinstance(cell, str):
            total += pieces(cell)
        elif isinstance(cell, list):
            parts = [pieces(part) for part in cell if isinstance(part, str)]
            if "choices" in reading.columns:
                total += max(parts, default=0)  # each choice is read in a window of its own
            else:
                total += sum(parts)
    return total
