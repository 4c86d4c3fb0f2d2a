"""The checks on training and validation rows, and the data report.

Owns the labels that are inferred from rows, the checks that training and validation rows fit together, and the report
on a data set.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bert_tasks.data.columns import Column, column_of
from bert_tasks.data.conll import label_scheme
from bert_tasks.data.problems import SHOWN, BadRowsError, Problems, counted, first_few, suggestion
from bert_tasks.data.splits import Splits, row_keys
from bert_tasks.data.table import Numbers, RowTable, Truncation
from bert_tasks.data.validator import CLASS_KINDS, LabelCensus, is_integer
from bert_tasks.errors import DataError

MOST_LABELS = 1000
_IMBALANCED = 5  # times as many rows as the rarest label


def imbalance_hint(counts: Mapping[str, int]) -> str | None:
    """What to do about one label per row of which some are rare; None where none is.

    Args:
        counts: The rows of each label.

    Returns:
        The most frequent label and the rarest, the setting that weighs them, and the metric that counts them alike.
    """
    seen = {label: count for label, count in counts.items() if count > 0}
    if len(seen) < 2:
        return None
    most, least = max(seen, key=lambda label: seen[label]), min(seen, key=lambda label: seen[label])
    if seen[most] < _IMBALANCED * seen[least]:
        return None
    return (
        f"imbalanced: {most!r} has {counted(seen[most], 'row')}, {least!r} {seen[least]}; consider "
        'settings.class_weights = "balanced" and run.metric_for_best_model = "macro_f1", which counts every label alike'
    )


def known_tags(labels: Sequence[str]) -> tuple[str, ...]:
    """The tags that a set of labels can express: itself, and its types in IOB2, whatever the scheme of the set."""
    if label_scheme(labels) == "raw":
        return tuple(labels)
    types = dict.fromkeys(label.partition("-")[2] for label in labels if "-" in label)
    return tuple(dict.fromkeys([*labels, *(f"{prefix}-{kind}" for kind in types for prefix in "BI")]))


def named_splits(splits: Splits) -> list[tuple[str, RowTable]]:
    """The tables with names for people: train, validation (or validation_NAME for named sets)."""
    named = [(f"validation_{name}" if name != "" else "validation", table) for name, table in splits.validation.items()]
    return [("train", splits.train), *named]


def label_census(table: RowTable, column: Column) -> LabelCensus:
    """The labels of a table; none where it lacks the column."""
    census = LabelCensus(column=column)
    if column.name in table.rows.column_names:
        for batch in table.rows.select_columns([column.name, "line"]).iter(batch_size=1000):
            for value, line in zip(batch[column.name], batch["line"], strict=True):
                census.add(value, line)
    return census


def infer_labels(table: RowTable, columns: Sequence[Column], census: LabelCensus | None = None) -> tuple[str, ...]:
    """The distinct labels of a table: in numeric order if all are integers, else sorted as text; tags in IOB2.

    Integers of equal value ("1", "01", "+1") are different labels, in the order of their text.

    Args:
        table: the rows.
        columns: the task's columns; without one of labels there are no labels.
        census: the table's labels, where they have been counted.

    Raises:
        DataError: they look like numbers or ids, or differ in letter case only.
    """
    column = column_of(columns, *CLASS_KINDS)
    if column is None:
        return ()
    census = label_census(table, column) if census is None else census
    names = sorted(census.counts)  # sorting by value alone would keep the order of equals, which depends on the process
    words = census.counts.total()
    if column.kind == "tags":
        if (words >= 100 and len(names) > words / 2) or (len(names) > MOST_LABELS and len(names) > words / 20):
            raise DataError(
                f"{table.source}: {len(names)} different tags on {words} words look like words or ids; say which "
                'column has the tags, e.g. [data.columns] tags = "1", or state the labels in settings.labels'
            )
    elif len(names) > MOST_LABELS or (census.rows >= 100 and len(names) > census.rows / 2):
        raise DataError(
            f"{table.source}: {len(names)} different labels in {counted(census.rows, 'row')} look like numbers or ids; "
            "for regression set problem_type = 'regression'"
        )
    folded: dict[str, str] = {}
    for name in names:
        other = folded.setdefault(name.casefold(), name)
        if other != name:
            raise DataError(
                f"{table.source}: the labels {other!r} and {name!r} differ in letter case only; "
                "write one of them, or state both in settings.labels"
            )
    return tuple(sorted(names, key=int) if all(map(is_integer, names)) else names)


def check_splits(
    splits: Splits, *, columns: Sequence[Column], labels: Sequence[str] = (), unlabelled: bool = False
) -> tuple[str, ...]:
    """Checks that the splits can be trained and evaluated with, and returns the labels to train on.

    Args:
        splits: training and validation rows.
        columns: the task's columns.
        labels: the known labels; without any those of the training rows are taken. Of chunk tags only those of training
            rows must be among them, in any scheme; the data report notes those of validation rows that are not.
        unlabelled: a teacher knows the classes that no training row has.

    Returns:
        The labels; none for columns without labels.

    Raises:
        DataError: there are no training or validation rows, unknown labels, a single class, a class that only
            validation rows have, or no training question that has an answer.
    """
    train, tables = splits.train, [splits.train, *splits.validation.values()]
    for table in tables:
        if len(table) == 0:
            raise DataError(f"{table.source}: no rows")
    if (
        not unlabelled
        and column_of(columns, "answers") is not None
        and _label_counts(train, columns)["answerable"] == 0
    ):
        raise DataError(
            f"{train.source}: none of {counted(len(train), 'question')} has an answer; training needs some that do"
        )
    column = column_of(columns, *CLASS_KINDS)
    if column is None:
        return ()
    censuses = [label_census(table, column) for table in tables]
    trained = censuses[0].counts
    known = tuple(labels) if len(labels) > 0 else infer_labels(train, columns, censuses[0])
    if column.kind == "tags":
        problems = Problems(source=train.source)
        censuses[0].report(problems, column.name, known_tags(known), new_types=False)
        if problems.count > 0:
            raise BadRowsError([problems])
    elif not unlabelled:
        for table, census in zip(tables[1:], censuses[1:], strict=True):
            new = [name for name in sorted(census.counts) if name not in trained]
            new = [name for name in new if name in known or not suggestion(name, known)]  # others are misspelt
            if new:
                named = ", ".join(f"{name!r} ({counted(census.counts[name], 'row')})" for name in new)
                raise DataError(
                    f"{table.source}: only validation rows have {named}, which a model cannot learn; "
                    f"add some to {train.source} or remove these"
                )
    found = [Problems(source=table.source) for table in tables]
    for problems, census in zip(found, censuses, strict=True):
        census.report(problems, column.name, known)
    if any(problems.count > 0 for problems in found):
        raise BadRowsError(found)
    least = 1 if column.kind == "labels" else 2
    if not unlabelled and len(trained) < least:
        what = "tag" if column.kind == "tags" else "label"
        only = f"only the {what} {next(iter(trained))!r}" if trained else f"no {what}"
        classes = counted(least, "class") if least == 1 else f"{least} classes"
        raise DataError(f"{train.source}: {only} in {counted(len(train), 'row')}; training needs at least {classes}")
    if len(known) < least:
        raise DataError(f"settings.labels names {counted(len(known), 'label')}; training needs at least {least}")
    return known


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """Of one split: each feature's length in tokens, what is in no feature, and the task's notes on that."""

    lengths: Numbers
    cuts: Truncation
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SplitReport:
    """Figures of one split; those of tokens are None when no features were given.

    Attributes:
        words: the number of words of all sentences; None for other rows.
        label_counts: rows with each label; words with each tag, in IOB2; answerable and unanswerable questions.
        token_lengths: minimum, median, 95th percentile and maximum, in tokens.
        truncated_share: the share of rows with tokens that are in no window.
        duplicates: rows whose text an earlier row has; ``conflicts``: those of them with another label.
        also_in_train: rows whose text a training row has.
        notes: rows that were skipped, tags that no training row has, what was truncated, and rare labels.
    """

    name: str
    rows: int
    words: int | None
    label_counts: dict[str, int]
    token_lengths: dict[str, float] | None
    truncated_share: float | None
    duplicates: int
    conflicts: int
    empty_texts: int
    also_in_train: int
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DataReport:
    splits: tuple[SplitReport, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """The report as text, a few lines for each split."""
        lines = []
        for split in self.splits:
            words = "" if split.words is None else f", {counted(split.words, 'word')}"
            lines.append(f"{split.name}: {counted(split.rows, 'row')}{words}")
            if split.label_counts:
                whole = split.rows if split.words is None else max(sum(split.label_counts.values()), 1)
                shares = [f"{label} {count} ({count / whole:.0%})" for label, count in split.label_counts.items()]
                lines.append(f"  labels: {', '.join(shares)}")
            if split.token_lengths:
                figures = ", ".join(f"{name} {value:g}" for name, value in split.token_lengths.items())
                lines.append(f"  tokens: {figures}")
            if split.empty_texts:
                lines.append(f"  {counted(split.empty_texts, 'empty text')}")
            if split.duplicates:
                lines.append(f"  {counted(split.duplicates, 'duplicate text')}")
            if split.conflicts:
                labels = "has a conflicting label" if split.conflicts == 1 else "have conflicting labels"
                lines.append(f"  {counted(split.conflicts, 'duplicate')} {labels}")
            if split.also_in_train:
                lines.append(f"  {counted(split.also_in_train, 'text')} also in train")
            lines += [f"  {note}" for note in split.notes]
        return lines


def data_report(
    splits: Splits,
    tokens: Mapping[str, TokenCounts] | None = None,
    *,
    columns: Sequence[Column],
    labels: Sequence[str] = (),
) -> DataReport:
    """What to know of the data before training; ``tokens`` is keyed by the names that ``named_splits`` gives.

    Texts (of the columns that every row must have, words with a space between them) count as the same if they are
    equal apart from letter case and outer spaces. A row conflicts if an earlier row of its split has the same text
    and another label.
    """
    words = column_of(columns, "words")
    keys = {name: row_keys(table, columns) for name, table in named_splits(splits)}
    trained = _label_counts(splits.train, columns)
    reports = []
    for name, table in named_splits(splits):
        is_train, split_tokens = name == "train", None if tokens is None else tokens.get(name)
        counts = _label_counts(table, columns)
        _, first, text = np.unique(keys[name]["text"], return_index=True, return_inverse=True)
        notes = list(table.notes)
        if column_of(columns, "tags") is not None:
            new = [f"{tag!r} ({counted(counts[tag], 'word')})" for tag in sorted(counts) if tag not in trained]
            notes += [f"tags that no training row has: {first_few(new, SHOWN)}"] if new else []
        lengths, truncated_share = None, None
        if split_tokens is not None:
            notes += split_tokens.notes
            truncated_share = split_tokens.cuts.cut_rows / max(len(table), 1)
            lengths = {}
            if len(split_tokens.lengths) > 0:
                figures = np.percentile(split_tokens.lengths, [0, 50, 95, 100])
                lengths = dict(zip(("min", "median", "p95", "max"), map(float, figures), strict=True))
        # Of the training rows only: the others are never weighed.
        hint = imbalance_hint(counts) if is_train and column_of(columns, "label") is not None else None
        has_words = words is not None and words.name in table.rows.column_names
        reports.append(
            SplitReport(
                name=name,
                rows=len(table),
                words=sum(len(cell) for cell in _values(table, words)) if words is not None and has_words else None,
                label_counts={label: counts[label] for label in dict.fromkeys([*labels, *sorted(counts)])},
                token_lengths=lengths,
                truncated_share=truncated_share,
                duplicates=len(table) - len(first),
                conflicts=int(np.sum(keys[name]["label"] != keys[name]["label"][first[text]])),
                empty_texts=int(keys[name]["empty"].sum()),
                also_in_train=0 if is_train else int(np.isin(keys[name]["text"], keys["train"]["text"]).sum()),
                notes=(*notes, *([] if hint is None else [hint])),
            )
        )
    return DataReport(splits=tuple(reports))


def _label_counts(table: RowTable, columns: Sequence[Column]) -> Counter[str]:
    """Labels or tags; questions by whether they have an answer, or by the place of the right choice."""
    answers, column = column_of(columns, "answers"), column_of(columns, *CLASS_KINDS)
    if answers is not None and answers.name in table.rows.column_names:
        return Counter("answerable" if value["text"] else "unanswerable" for value in _values(table, answers))
    choice = column_of(columns, "choice")
    if choice is not None and choice.name in table.rows.column_names:
        return Counter(f"choice {value}" for value in _values(table, choice))
    return Counter() if column is None else label_census(table, column).counts


def _values(table: RowTable, column: Column) -> Iterator[Any]:
    """The values of a column that are there."""
    for batch in table.rows.select_columns([column.name]).iter(batch_size=1000):
        yield from (value for value in batch[column.name] if value is not None)
