"""Checks of training and validation rows, and the data report.

Owns the census of labels, the labels that are inferred from rows, the checks that training and validation rows fit
together, and the report on a data set.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bert_tasks.data.cells import is_integer
from bert_tasks.data.columns import Column, Columns, HeadColumns, first_column
from bert_tasks.data.conll import is_chunk_tag, to_iob2
from bert_tasks.data.features import Numbers, Truncation
from bert_tasks.data.issues import SHOWN, RowIssue, RowIssues, counted, first_few, suggestion
from bert_tasks.data.kinds import Answers, ClassKind, Label, LabelKind, Labels, Tags, Words
from bert_tasks.data.known_labels import KnownLabels
from bert_tasks.data.rows import Rows
from bert_tasks.data.shared_conversion import no_input
from bert_tasks.data.splits import Splits, row_keys
from bert_tasks.errors import DataError
from bert_tasks.tables import Result

MOST_LABELS = 1000
_IMBALANCED = 5  # times as many rows as the rarest label
_DOMINANT = 0.9  # a label with a larger share hides the others
_LINES_SHOWN = 5  # of rows with an empty or repeated text
_FEW = 10  # a plain tag among ten chunk tags counts as a mistake


class LabelCensus(NamedTuple):
    """The counts of each label of a column, as written and in the inferred spelling."""

    rows: int
    written: Counter[str]
    normalized: Counter[str]

    def counts(self, labels: Iterable[str] | None = None) -> Counter[str]:
        """Returns the counts in the spelling of labels, which is IOB2 for chunk tags.

        Args:
            labels: The labels. Default: the counted labels.
        """
        return self.normalized if all(map(is_chunk_tag, self.written if labels is None else labels)) else self.written


def count_labels(table: Rows, column: Column) -> LabelCensus:
    """Returns the census of a column, which is empty if the table lacks it."""
    rows, written, normalized = 0, Counter[str](), Counter[str]()
    for value in _values(table, column):
        rows += 1
        names = classes_of(column, value)
        written.update(names)
        normalized.update(_in_iob2(column, names))
    return LabelCensus(rows, written, normalized)


def classes_of(column: Column, value: Any) -> Sequence[str]:
    """Returns the names under which a value is counted, or none if its column is no label."""
    if not isinstance(column.type, LabelKind):
        return ()
    return column.type.classes(value)


def _in_iob2(column: Column, names: Sequence[str]) -> Sequence[str]:
    """Returns the names in the spelling of inferred labels."""
    if isinstance(column.type, Tags):
        return to_iob2(names)
    return names


def most_frequent_label(table: Rows, columns: Columns) -> tuple[str, float] | None:
    """Returns the most frequent label and its share of rows or words, if exactly one column holds classes."""
    if isinstance(columns, Mapping):
        return None
    with_classes = [column for column in columns if isinstance(column.type, ClassKind)]
    counts = count_labels(table, with_classes[0]).written if len(with_classes) == 1 else Counter[str]()
    whole = len(table) if with_classes and isinstance(with_classes[0].type, Labels) else counts.total()
    return next(((label, count / whole) for label, count in counts.most_common(1)), None)


def named_splits(splits: Splits) -> list[tuple[str, Rows]]:
    """Returns the tables under the names train, validation and validation_NAME."""
    named = [(f"validation_{name}" if name != "" else "validation", table) for name, table in splits.validation.items()]
    return [("train", splits.train), *named]


def infer_labels(table: Rows, columns: Sequence[Column], census: LabelCensus | None = None) -> tuple[str, ...]:
    """Returns the distinct labels of a table, numbers by value, others by text.

    Tags are in IOB2. Integers of equal value ("1", "01", "+1") are different labels, in the order of their text.

    Args:
        table: The rows.
        columns: The task's columns. Without a column of labels there are no labels.
        census: The table's labels. Default: they are counted.

    Raises:
        DataError: The labels look like numbers or ids, differ in letter case only, or some do not fit the others.
    """
    column = first_column(columns, ClassKind)
    if column is None:
        return ()
    census = count_labels(table, column) if census is None else census
    are_tags = isinstance(column.type, Tags)
    _rows_with(table, column, _odd_labels(census.written, are_tags=are_tags)).raise_if_any()
    counts = census.counts()
    total = counts.total() if are_tags else census.rows
    if (total >= 100 and len(counts) > total / 2) or (len(counts) > MOST_LABELS and len(counts) > total / 20):
        among = counted(total, "word") if are_tags else counted(total, "row")
        raise DataError(
            f"{table.source}: {len(counts)} different values of {column.name!r} in {among} look like numbers or ids. "
            "Name the column of the labels in [data.columns], set settings.labels, or for regression set "
            "problem_type = 'regression'."
        )
    names = sorted(counts)  # sorting by value alone would keep the order of equals, which depends on the process
    folded: dict[str, str] = {}
    for name in names:
        other = folded.setdefault(name.casefold(), name)
        if other != name:
            raise DataError(
                f"{table.source}: the labels {other!r} and {name!r} differ in letter case only. Write one of them, or "
                "set settings.labels to both."
            )
    return tuple(sorted(names, key=int) if all(map(is_integer, names)) else names)


def _odd_labels(counts: Mapping[str, int], *, are_tags: bool) -> Iterator[RowIssue]:
    """Yields labels that do not fit, as numbers among names or words among chunk tags."""
    numbers = [name for name in counts if is_integer(name)]
    names = [name for name in counts if not is_integer(name)]
    if numbers and names:
        few = min(numbers, names, key=lambda group: sum(counts[name] for name in group))
        contrast = "number among names" if few is numbers else "name among numbers"
        hint = "Correct the label, or set settings.labels."
        yield from (RowIssue(what=contrast, hint=hint, value=name) for name in few)
        return
    plain = [name for name in counts if not is_chunk_tag(name)]
    prefixed = sum(count for name, count in counts.items() if name != "O" and is_chunk_tag(name))
    if are_tags and sum(counts[name] for name in plain) * _FEW <= prefixed:  # more of them are classes of words
        hint = "Write O or a tag such as B-TYPE, as almost all tags are, or set settings.labels."
        yield from (RowIssue(what="not a chunk tag", hint=hint, value=name) for name in plain)


def imbalance_hint(counts: Mapping[str, int], task: str = "", *, are_tags: bool = False) -> str | None:
    """Returns the settings and the metric that help rare labels, or None.

    Words without an entity are always frequent, so tags have a note only if one tag has more than 90 % of the words.

    Args:
        counts: Number of rows of each label, or of words of each tag.
        task: Name of the task if it is one of several.
        are_tags: True for tags of words.
    """
    rows = {label: count for label, count in counts.items() if count > 0}
    most, least = max(rows, key=rows.__getitem__, default=""), min(rows, key=rows.__getitem__, default="")
    if len(rows) < 2 or rows[most] < _IMBALANCED * rows[least]:
        return None
    section, prefix = (f"tasks.{task}", f"{task}.") if task else ("settings", "")
    total, settings = sum(rows.values()), f'{section}.class_weights = "balanced"'
    is_dominant = rows[most] > _DOMINANT * total
    if is_dominant:
        settings += f" or {section}.focal_gamma = 2.0"
    if are_tags:
        hint = f"imbalanced: {most!r} has {rows[most]} of {total} words. Consider {settings}"
        return f"{hint} (without crf = true)" if is_dominant else None
    return (
        f"imbalanced: {most!r} has {counted(rows[most], 'row')}, {least!r} {rows[least]}. Consider {settings} and "
        f'run.metric_for_best_model = "{prefix}macro_f1", which counts every label alike'
    )


def _rows_with(table: Rows, column: Column, issues: Iterable[RowIssue]) -> RowIssues:
    """Returns the issues of all rows that have the label of an issue, which is its ``value``."""
    collected, by_label = RowIssues(), {issue.value: issue for issue in issues}
    if not by_label:
        return collected
    for rows in table.rows.tables([column.name, "line"]):
        for value, line in zip(*(values.to_pylist() for values in rows.columns), strict=True):
            if value is None:
                continue
            names = classes_of(column, value)
            for name in dict.fromkeys([*names, *_in_iob2(column, names)]):
                if name in by_label:
                    collected.add(table.source, replace(by_label[name], column=column.name, line=line))
    return collected


def check_splits(
    splits: Splits, *, columns: Sequence[Column], labels: Sequence[str] = (), unlabelled: bool = False
) -> tuple[str, ...]:
    """Checks the splits for training and evaluation, and returns the labels.

    Args:
        splits: Training and validation rows.
        columns: The task's columns.
        labels: The known labels. Default: the labels of the training rows. Chunk tags of validation rows may have other
            types, which the data report names.
        unlabelled: A teacher knows the classes that no training row has.

    Returns:
        The labels. Empty for columns without labels.

    Raises:
        DataError: There are no training or validation rows, unknown labels, a single class, a class that only
            validation rows have, or no training question that has an answer.
    """
    train, tables = splits.train, [splits.train, *splits.validation.values()]
    for table in tables:
        if len(table) == 0:
            raise DataError(f"{table.source}: no rows")
    column = first_column(columns, ClassKind)
    censuses = [] if column is None else [count_labels(table, column) for table in tables]
    known_labels = tuple(labels)
    if column is not None:
        trained = censuses[0].counts()
        known_labels = known_labels if len(known_labels) > 0 else infer_labels(train, columns, censuses[0])
        if not isinstance(column.type, Tags) and not unlabelled:
            _check_validation_labels(tables, censuses, known_labels)
        known, issues = KnownLabels(known_labels), RowIssues()
        for table, census in zip(tables, censuses, strict=True):
            unknown = known.unknown(column.type, census.counts(known_labels), is_training=table is train)
            issues.extend(_rows_with(table, column, unknown))
        issues.raise_if_any()
    answers = None if unlabelled else first_column(columns, Answers)
    if answers is not None and count_labels(train, answers).written["answerable"] == 0:
        raise DataError(f"{train.source}: no answerable row in {counted(len(train), 'row')}. Training needs some.")
    if column is not None:
        least = 1 if isinstance(column.type, Labels) else 2
        noun = "tag" if isinstance(column.type, Tags) else "label"
        if not unlabelled and len(trained) < least:
            only = f"only the {noun} {next(iter(trained))!r}" if trained else f"no {noun}"
            needs = "Training needs at least " + ("1 class." if least == 1 else "2 classes.")
            raise DataError(f"{train.source}: {only} in {counted(len(train), 'row')}. {needs}")
        if len(known_labels) < least:
            raise DataError(
                f"settings.labels names {counted(len(known_labels), 'label')}. Training needs at least {least}"
            )
    words = first_column(columns, Words)
    if words is not None and len(train) > 1 and all(len(sentence) == 1 for sentence in _values(train, words)):
        raise DataError(
            f"{train.source}: every row has one word. Write all words of a sentence in one row as a list, or one word "
            "on each line of a .conll file."
        )
    return () if column is None else known_labels


def check_heads(table: Rows, heads: Mapping[str, HeadColumns]) -> None:
    """Checks that the predictions of at least one of several tasks can be compared with labels.

    Raises:
        DataError: No row has a label of any task. The message says for each task what the rows lack.
    """
    for name, head in heads.items():
        if len(table.of_head(name).labelled(head.columns)) > 0:
            return
    problems = [lack_of_rows(table, name, head) for name, head in heads.items()]
    raise DataError(f"{table.source}: {', and '.join(problems)}")


def labelled_splits(splits: Splits, name: str, columns: Sequence[Column], names: Mapping[str, str]) -> Splits:
    """Returns the rows that have a label of one of several tasks.

    Args:
        splits: Training and validation rows.
        name: The name of the task.
        columns: Its columns.
        names: Its columns -> their names in the rows, if they differ.

    Raises:
        DataError: A split has no row with a text and a label of the task.
    """
    head = HeadColumns(columns=tuple(columns), names=names)
    labelled = splits.labelled(name, head)
    for (_, table), (_, rows) in zip(named_splits(splits), named_splits(labelled), strict=True):
        if len(rows) == 0:
            raise DataError(f"{table.source}: {lack_of_rows(table, name, head)}")
    return labelled


def lack_of_rows(table: Rows, name: str, head: HeadColumns) -> str:
    """Returns what all rows lack for one of several tasks, which is its label or what it reads."""
    if len(table.of_head(name)) > 0:
        labels = [repr(head.names.get(column.name, column.name)) for column in head.columns if column.is_label]
        return f"no row has a label of the task {name} in {' or '.join(labels)}"
    problem = no_input(name, head)
    for note in table.notes:
        if note.startswith(problem):  # the reader's note, which names the columns, too
            return note
    return problem


def _check_validation_labels(
    tables: Sequence[Rows], censuses: Sequence[LabelCensus], known_labels: Sequence[str]
) -> None:
    """Raises DataError for correctly spelt labels that only validation rows have."""
    train, *others = tables
    for table, census in zip(others, censuses[1:], strict=True):
        new = [name for name in sorted(census.written) if name not in censuses[0].written]
        new = [name for name in new if name in known_labels or not suggestion(name, known_labels)]
        if new:
            listed = ", ".join(f"{name!r} ({counted(census.written[name], 'row')})" for name in new)
            raise DataError(
                f"{table.source}: only validation rows have {listed}, which a model cannot learn. Add some to "
                f"{train.source} or remove these."
            )


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """The length of each feature of a split, its truncation, and the task's notes."""

    lengths: Numbers
    cuts: Truncation
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SplitReport:
    """Figures of one split. The figures of tokens are None without features.

    Attributes:
        words: Number of words of all sentences. None for other rows.
        label_counts: Number of rows with each label, of words with each tag in IOB2, or of answerable and unanswerable
            questions.
        token_lengths: Minimum, median, 95th percentile and maximum, in tokens.
        truncated_share: Share of rows with tokens that are in no window.
        duplicates: Number of rows whose text an earlier row has. ``conflicts`` counts duplicates with another label.
        also_in_train: Number of rows whose text a training row has.
        first_lines: Lines of the first rows that these figures count, by the name of the figure.
        notes: Notes on skipped rows, tags that no training row has, truncation, and rare labels.
        tasks: For several tasks, the name of each -> the figures of the rows that have its label, and ``unlabelled``,
            the number of the other rows.
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
    first_lines: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unlabelled: int = 0
    tasks: dict[str, "SplitReport"] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Returns the figures as text, without the name and the number of rows."""
        lines = []
        if self.label_counts:
            whole = self.rows if self.words is None else max(sum(self.label_counts.values()), 1)
            shares = [f"{label} {count} ({count / whole:.0%})" for label, count in self.label_counts.items()]
            lines.append(f"labels: {', '.join(shares)}")
        if self.token_lengths:
            figures = ", ".join(f"{name} {value:g}" for name, value in self.token_lengths.items())
            lines.append(f"tokens: {figures}")
        conflict = "has a conflicting label" if self.conflicts == 1 else "have conflicting labels"
        facts = {
            "empty_texts": ("empty text", ""),
            "duplicates": ("duplicate text", ""),
            "conflicts": ("duplicate", f" {conflict}"),
            "also_in_train": ("text", " also in train"),
        }
        for name, (noun, rest) in facts.items():
            if count := getattr(self, name):
                numbers = self.first_lines[name]
                more = ", ..." if len(numbers) < count else ""
                word = "line" if count == 1 else "lines"
                lines.append(f"{counted(count, noun)}{rest} ({word} {', '.join(map(str, numbers))}{more})")
        lines += self.notes
        for name, task in self.tasks.items():
            lines.append(f"{name}: {counted(task.rows, 'row')} with a label, {task.unlabelled} without")
            lines += [f"  {line}" for line in task.lines()]
        return lines


@dataclass(frozen=True, kw_only=True)
class DataReport(Result):
    """The figures of all splits before training."""

    splits: tuple[SplitReport, ...]

    def lines(self) -> list[str]:
        """Returns the figures of each split as text."""
        lines = []
        for split in self.splits:
            words = "" if split.words is None else f", {counted(split.words, 'word')}"
            lines.append(f"{split.name}: {counted(split.rows, 'row')}{words}")
            lines += [f"  {line}" for line in split.lines()]
        return lines


def data_report(
    splits: Splits,
    tokens: Mapping[str, TokenCounts] | None = None,
    *,
    columns: Columns,
    labels: Sequence[str] = (),
    task: str = "",
) -> DataReport:
    """Returns the figures and notes of the data before training.

    ``tokens`` has the names of ``named_splits``. Texts (of the columns that every row must have, words with a space
    between them) count as the same if they are equal apart from letter case and outer spaces. A row conflicts if an
    earlier row of its split has the same text and another label. Several tasks have a report each, in which ``task`` is
    their name.
    """
    by_task: dict[str, DataReport] = {}
    own_columns: Sequence[Column] = ()
    if isinstance(columns, Mapping):
        for head_name, head in columns.items():
            labelled = splits.labelled(head_name, head)
            by_task[head_name] = data_report(labelled, columns=head.columns, labels=head.labels, task=head_name)
    else:
        own_columns = columns
    words = first_column(columns, Words)
    label = first_column(columns, LabelKind)
    keys = {name: row_keys(table, columns) for name, table in named_splits(splits)}
    trained = _label_counts(splits.train, own_columns)
    reports = []
    for index, (name, table) in enumerate(named_splits(splits)):
        tasks = {key: report.splits[index] for key, report in by_task.items()}
        is_train, split_tokens = name == "train", None if tokens is None else tokens.get(name)
        counts = _label_counts(table, own_columns)
        notes = list(table.notes)
        if label is not None and isinstance(label.type, Tags):
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
        figures_of_texts = _text_figures(table, keys[name], None if is_train else keys["train"])
        advice = None
        if is_train and label is not None:  # the other rows are never weighed
            are_tags = isinstance(label.type, Tags)
            if are_tags or isinstance(label.type, Label):
                advice = imbalance_hint(counts, task, are_tags=are_tags)
        has_words = words is not None and words.name in table.rows.column_names
        reports.append(
            SplitReport(
                name=name,
                rows=len(table),
                words=sum(len(cell) for cell in _values(table, words)) if words is not None and has_words else None,
                label_counts={label: counts[label] for label in dict.fromkeys([*labels, *sorted(counts)])},
                token_lengths=lengths,
                truncated_share=truncated_share,
                **figures_of_texts,
                notes=(*notes, *([] if advice is None else [advice])),
                tasks={key: replace(split, unlabelled=len(table) - split.rows) for key, split in tasks.items()},
            )
        )
    return DataReport(splits=tuple(reports))


def _text_figures(table: Rows, keys: NDArray[Any], train: NDArray[Any] | None) -> dict[str, Any]:
    """Returns the figures of empty and repeated texts. ``train`` holds training keys."""
    _, first, text = np.unique(keys["text"], return_index=True, return_inverse=True)
    masks = {
        "empty_texts": keys["empty"].astype(bool),
        "duplicates": np.isin(np.arange(len(table)), first, invert=True),
        "conflicts": keys["label"] != keys["label"][first[text]],
        "also_in_train": np.zeros(len(table), bool) if train is None else np.isin(keys["text"], train["text"]),
    }
    rows = {name: np.flatnonzero(mask)[:_LINES_SHOWN].tolist() for name, mask in masks.items() if mask.any()}
    lines = {name: tuple(table.rows.select(numbers).values("line")) for name, numbers in rows.items()}
    return {**{name: int(mask.sum()) for name, mask in masks.items()}, "first_lines": lines}


def _label_counts(table: Rows, columns: Sequence[Column]) -> Counter[str]:
    """Counts labels, tags, answered questions, or the index of the right choice."""
    counts = [count_labels(table, column).counts() for column in columns]
    return next((count for count in counts if count), Counter())


def _values(table: Rows, column: Column) -> Iterator[Any]:
    """Yields the values of a column that are not missing."""
    if column.name in table.rows.column_names:
        for rows in table.rows.tables([column.name]):
            yield from (value for value in rows.column(0).to_pylist() if value is not None)
