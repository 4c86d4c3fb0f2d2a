"""Checks of training and validation rows, and the data report.

This module counts the labels of rows, infers the labels of a task from its training rows, checks that training and
validation rows fit together, and describes a data set before training. The figures are counted over the memory-mapped
rows, so that a data set need not fit into the memory.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
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
_UNEVEN = 3  # times as many rows as the rarest label, from which on class weights may help a degenerate model
_DOMINANT = 0.9  # a label with a larger share hides the others
_LINES_SHOWN = 5  # of rows with an empty or repeated text
_FEW = 10  # a plain tag among ten chunk tags counts as a mistake
_SIMILAR = 0.8  # difflib's ratio of two labels of which one may be a misspelling
_MUCH_RARER = 10  # times as many rows as a label that may be a misspelling
_MOST_COMPARED = 200  # labels, because each is compared with each
_QUANTILES = {"min": 0, "median": 50, "p95": 95, "max": 100}  # names of token lengths -> their percentiles


class LabelCensus(NamedTuple):
    """The counts of each label of a column.

    Attributes:
        rows: Number of rows that have a label.
        written: The labels as the rows have them -> how many there are.
        normalized: The same in the spelling of inferred labels, which is IOB2 for tags.
    """

    rows: int
    written: Counter[str]
    normalized: Counter[str]

    def counts(self, labels: Iterable[str] | None = None) -> Counter[str]:
        """Returns the counts in the spelling of labels, which is IOB2 for chunk tags.

        Args:
            labels: The labels. Default: the counted labels.
        """
        names = self.written if labels is None else labels
        # One raw tag, such as a part of speech, means that the file has no chunks, so "I" is a name and no prefix.
        if all(map(is_chunk_tag, names)):
            return self.normalized
        return self.written


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
    if len(with_classes) != 1:
        return None
    counts = count_labels(table, with_classes[0]).written
    if not counts:
        return None
    ((label, count),) = counts.most_common(1)
    whole = counts.total()
    if isinstance(with_classes[0].type, Labels):
        whole = len(table)  # a row has several labels or none, so their total says nothing about rows
    return label, count / whole


def named_splits(splits: Splits) -> list[tuple[str, Rows]]:
    """Returns the tables under the names train, validation and validation_NAME."""
    named = [("train", splits.train)]
    for name, table in splits.validation.items():
        split = "validation"
        if name != "":
            split = f"validation_{name}"
        named.append((split, table))
    return named


def infer_labels(table: Rows, columns: Sequence[Column], census: LabelCensus | None = None) -> tuple[str, ...]:
    """Returns the distinct labels of a table, sorted by value if all are numbers, and by text otherwise.

    Tags are in IOB2. Integers of equal value ("1", "01", "+1") are different labels, in the order of their text. The
    order matters, because it numbers the logits of the model, and two runs on the same rows must agree on it.

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
    if census is None:
        census = count_labels(table, column)
    are_tags = isinstance(column.type, Tags)
    _rows_with(table, column, _odd_labels(census.written, are_tags=are_tags)).raise_if_any()
    counts = census.counts()
    total, unit = census.rows, "row"
    if are_tags:
        total, unit = counts.total(), "word"
    # A column of amounts or ids named by mistake would become a classifier with a class for nearly every row. Few rows
    # prove nothing, because ten examples of ten classes are a valid start.
    is_half_of_rows = total >= 100 and len(counts) > total / 2
    is_huge = len(counts) > MOST_LABELS and len(counts) > total / 20
    if is_half_of_rows or is_huge:
        among = counted(total, unit)
        raise DataError(
            f"{table.source}: {len(counts)} different values of {column.name!r} in {among} look like numbers or ids. "
            "Name the column of the labels in [data.columns], set settings.labels, or for regression set "
            "problem_type = 'regression'."
        )
    # Two spellings of one label halve its rows, and the model would learn to tell them apart.
    names = sorted(counts)  # sorting by value alone would keep the order of equals, which depends on the process
    folded: dict[str, str] = {}
    for name in names:
        other = folded.setdefault(name.casefold(), name)
        if other != name:
            raise DataError(
                f"{table.source}: the labels {other!r} and {name!r} differ in letter case only. Write one of them, or "
                "set settings.labels to both."
            )
    if all(map(is_integer, names)):
        names = sorted(names, key=int)  # a stable sort, so 01 stays before 1
    return tuple(names)


def _odd_labels(counts: Mapping[str, int], *, are_tags: bool) -> Iterator[RowIssue]:
    """Yields labels that do not fit, as numbers among names or words among chunk tags.

    The rarer group is the odd one. Whole groups are reported, because a single mistake does not explain them.
    """
    numbers = [name for name in counts if is_integer(name)]
    names = [name for name in counts if not is_integer(name)]
    if numbers and names:
        few, contrast = numbers, "number among names"
        if sum(counts[name] for name in names) < sum(counts[name] for name in numbers):
            few, contrast = names, "name among numbers"
        for name in few:
            yield RowIssue(what=contrast, hint="Correct the label, or set settings.labels.", value=name)
        return
    plain = [name for name in counts if not is_chunk_tag(name)]
    prefixed = sum(count for name, count in counts.items() if name != "O" and is_chunk_tag(name))
    if are_tags and sum(counts[name] for name in plain) * _FEW <= prefixed:  # more of them are classes of words
        hint = "Write O or a tag such as B-TYPE, as almost all tags are, or set settings.labels."
        for name in plain:
            yield RowIssue(what="not a chunk tag", hint=hint, value=name)


def imbalance_hint(counts: Mapping[str, int], task: str = "", *, are_tags: bool = False) -> str | None:
    """Returns the settings and the metric that help rare labels, or None.

    Words without an entity are always frequent, so tags have a note only if one tag has more than 90 % of the words.

    Args:
        counts: Number of rows of each label, or of words of each tag.
        task: Name of the task if it is one of several.
        are_tags: True for tags of words.
    """
    rows = {label: count for label, count in counts.items() if count > 0}
    if len(rows) < 2:
        return None
    most, least = max(rows, key=rows.__getitem__), min(rows, key=rows.__getitem__)
    if rows[most] < _IMBALANCED * rows[least]:
        return None
    section, prefix = "settings", ""
    if task:
        section, prefix = f"tasks.{task}", f"{task}."
    total, settings = sum(rows.values()), f'{section}.class_weights = "balanced"'
    is_dominant = rows[most] > _DOMINANT * total
    if is_dominant:
        # Class weights repair moderate imbalance. Where one class is nearly everything, the focal loss also reduces
        # the weight of its many easy rows (Lin et al. 2017, https://arxiv.org/abs/1708.02002).
        settings += f" or {section}.focal_gamma = 2.0"
    if are_tags:
        if not is_dominant:
            return None
        hint = f"imbalanced: {most!r} has {rows[most]} of {total} words. Consider {settings}"
        return f"{hint} (without crf = true)"
    return (
        f"imbalanced: {most!r} has {counted(rows[most], 'row')}, {least!r} {rows[least]}. Consider {settings} and "
        f'run.metric_for_best_model = "{prefix}macro_f1", which counts every label alike'
    )


def has_rare_labels(table: Rows, columns: Sequence[Column]) -> bool:
    """Returns True if class weights may help, because a label has at least three times as many rows as the rarest."""
    column = first_column(columns, ClassKind)
    if column is None:
        return False
    counts = count_labels(table, column).counts()
    if not counts:
        return False
    most, least = max(counts.values()), min(counts.values())
    if isinstance(column.type, Labels):
        most = len(table) - least  # each label is decided alone, so the rows without it outnumber it
    return most >= _UNEVEN * least


def _rows_with(table: Rows, column: Column, issues: Iterable[RowIssue]) -> RowIssues:
    """Returns the issues of all rows that have the label of an issue, which is its ``value``.

    The census does not know lines, because it would need memory for each row. So the rows are read a second time, but
    only if there is something to report.
    """
    collected, by_label = RowIssues(), {issue.value: issue for issue in issues}
    if not by_label:
        return collected
    for rows in table.rows.tables([column.name, "line"]):
        column_values, lines = rows.columns
        for value, line in zip(column_values.to_pylist(), lines.to_pylist(), strict=True):
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
    known_labels: tuple[str, ...] = ()
    if column is not None:
        known_labels = tuple(labels)
        censuses = [count_labels(table, column) for table in tables]
        if len(known_labels) == 0:
            known_labels = infer_labels(train, columns, censuses[0])
        if not isinstance(column.type, Tags) and not unlabelled:
            _check_validation_labels(tables, censuses, known_labels)
        # All unknown labels of all tables are collected before they are reported.
        known, issues = KnownLabels(known_labels), RowIssues()
        for table, census in zip(tables, censuses, strict=True):
            unknown = known.unknown(column.type, census.counts(known_labels), is_training=table is train)
            issues.extend(_rows_with(table, column, unknown))
        issues.raise_if_any()
    if not unlabelled:
        # A model that is shown impossible questions only would learn to answer none.
        answers = first_column(columns, Answers)
        if answers is not None and count_labels(train, answers).written["answerable"] == 0:
            raise DataError(f"{train.source}: no answerable row in {counted(len(train), 'row')}. Training needs some.")
    if column is not None:
        # One label of several is a decision of its own, present or absent. A softmax over one class is always 1.
        least, classes = 2, "2 classes"
        if isinstance(column.type, Labels):
            least, classes = 1, "1 class"
        trained = censuses[0].counts()
        if not unlabelled and len(trained) < least:
            noun = "tag" if isinstance(column.type, Tags) else "label"
            only = f"no {noun}"
            if trained:
                only = f"only the {noun} {next(iter(trained))!r}"
            needs = f"Training needs at least {classes}."
            raise DataError(f"{train.source}: {only} in {counted(len(train), 'row')}. {needs}")
        if len(known_labels) < least:
            raise DataError(
                f"settings.labels names {counted(len(known_labels), 'label')}. Training needs at least {least}"
            )
    words = first_column(columns, Words)
    # The usual slip is a csv file with a word on each line, which would train a tagger that never sees a context.
    if words is not None and len(train) > 1 and all(len(sentence) == 1 for sentence in _values(train, words)):
        raise DataError(
            f"{train.source}: every row has one word. Write all words of a sentence in one row as a list, or one word "
            "on each line of a .conll file."
        )
    return known_labels


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
        new = []
        for name in sorted(census.written):
            # The comparison of spellings takes long, so it is made for the few names that no training row has.
            if name in censuses[0].written:
                continue
            # A name that is close to a known one is a slip of spelling, which is reported with its line later.
            if name in known_labels or not suggestion(name, known_labels):
                new.append(name)
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
    """The figures of one split. The figures of tokens are None if there are no features.

    Attributes:
        name: Name of the split, as in ``named_splits``.
        rows: Number of rows.
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
            whole = self.rows
            if self.words is not None:
                whole = max(sum(self.label_counts.values()), 1)  # tags belong to words
            shares = [f"{label} {count} ({count / whole:.0%})" for label, count in self.label_counts.items()]
            lines.append(f"labels: {', '.join(shares)}")
        if self.token_lengths:
            figures = [f"{name} {value:g}" for name, value in self.token_lengths.items()]
            lines.append(f"tokens: {', '.join(figures)}")
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
            heading = f"{split.name}: {counted(split.rows, 'row')}"
            if split.words is not None:
                heading += f", {counted(split.words, 'word')}"
            lines.append(heading)
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

    Texts (of the columns that every row must have, words with a space between them) count as the same if they are equal
    apart from letter case and outer spaces. A row conflicts if an earlier row of its split has the same text and
    another label. The keys of all rows are in memory, 17 bytes for each (see ``row_keys``).

    Args:
        splits: Training and validation rows.
        tokens: The names of ``named_splits`` -> the lengths of their features. None leaves out the figures of tokens.
        columns: The columns of the task, or those of each of several tasks, which have a report each.
        labels: Labels that are listed even if no row has them.
        task: Name of the task if it is one of several.
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
    keys = {name: row_keys(table, columns) for name, table in named_splits(splits)}
    trained = _label_counts(splits.train, own_columns)
    reports = []
    for index, (name, table) in enumerate(named_splits(splits)):
        counts = _label_counts(table, own_columns)
        notes = [*table.notes]
        lengths: dict[str, float] | None = None
        truncated_share = None
        new_tags = _note_on_new_tags(counts, trained, columns)
        if new_tags:
            notes.append(new_tags)
        if tokens is not None and name in tokens:
            notes += tokens[name].notes
            truncated_share = tokens[name].cuts.cut_rows / max(len(table), 1)
            lengths = {}
            if len(tokens[name].lengths) > 0:
                figures = np.percentile(tokens[name].lengths, list(_QUANTILES.values()))
                lengths = dict(zip(_QUANTILES, figures.tolist(), strict=True))
        train_keys = None
        if name == "train":
            notes += _notes_on_imbalance(counts, task, columns)  # the other rows are never weighed
            notes += _notes_on_similar_labels(counts, columns)
        else:
            train_keys = keys["train"]
        word_count = None
        if words is not None and words.name in table.rows.column_names:
            word_count = sum(len(cell) for cell in _values(table, words))
        tasks = {}
        for key, report in by_task.items():
            split = report.splits[index]
            tasks[key] = replace(split, unlabelled=len(table) - split.rows)
        reports.append(
            SplitReport(
                name=name,
                rows=len(table),
                words=word_count,
                label_counts={label: counts[label] for label in dict.fromkeys([*labels, *sorted(counts)])},
                token_lengths=lengths,
                truncated_share=truncated_share,
                **_text_figures(table, keys[name], train_keys),
                notes=tuple(notes),
                tasks=tasks,
            )
        )
    return DataReport(splits=tuple(reports))


def _note_on_new_tags(counts: Counter[str], trained: Counter[str], columns: Columns) -> str:
    """Returns the note on tags that no training row has, or an empty text.

    They are no error. A test set may have types that the training rows lack, and each such entity counts as missed.
    """
    label = first_column(columns, LabelKind)
    if label is None or not isinstance(label.type, Tags):
        return ""
    new = [f"{tag!r} ({counted(counts[tag], 'word')})" for tag in sorted(counts) if tag not in trained]
    if not new:
        return ""
    return f"tags that no training row has: {first_few(new, SHOWN)}"


def _notes_on_imbalance(counts: Counter[str], task: str, columns: Columns) -> list[str]:
    """Returns the hint of ``imbalance_hint``, or none. Sets of labels and numbers have no weights of classes."""
    label = first_column(columns, LabelKind)
    if label is None or not isinstance(label.type, Label | Tags):
        return []
    hint = imbalance_hint(counts, task, are_tags=isinstance(label.type, Tags))
    if hint is None:
        return []
    return [hint]


def _notes_on_similar_labels(counts: Counter[str], columns: Columns) -> list[str]:
    """Returns a note for each rare label that is spelled almost as a frequent one, because it may be misspelt.

    Without a list of labels in the recipe, a misspelt label in the training rows is a label of its own. Labels with
    digits are left out, because ``grade_1`` and ``grade_2`` are meant to be similar, and so are tags, because ``B-PER``
    and ``I-PER`` are.
    """
    label = first_column(columns, LabelKind)
    if label is None or not isinstance(label.type, Label | Labels) or len(counts) > _MOST_COMPARED:
        return []
    names = [name for name in counts if not any(map(str.isdigit, name))]
    notes = []
    for name in names:
        frequent = [other for other in names if counts[other] >= _MUCH_RARER * counts[name] > 0]
        close = get_close_matches(name, frequent, n=1, cutoff=_SIMILAR)
        if close:
            notes.append(
                f"the label {name!r} ({counted(counts[name], 'row')}) is spelled almost like {close[0]!r}. If it is "
                "misspelt, correct it, because it is a label of its own"
            )
    return notes


def _text_figures(table: Rows, keys: NDArray[Any], train: NDArray[Any] | None) -> dict[str, Any]:
    """Returns the figures of empty and repeated texts. ``train`` holds training keys."""
    # first[text] is, for each row, the number of the first row with the same text, which may be the row itself.
    _, first, text = np.unique(keys["text"], return_index=True, return_inverse=True)
    also_in_train = np.zeros(len(table), bool)
    if train is not None:
        also_in_train = np.isin(keys["text"], train["text"])
    masks = {
        "empty_texts": keys["empty"].astype(bool),
        "duplicates": np.isin(np.arange(len(table)), first, invert=True),
        "conflicts": keys["label"] != keys["label"][first[text]],
        "also_in_train": also_in_train,
    }
    figures: dict[str, Any] = {name: int(mask.sum()) for name, mask in masks.items()}
    figures["first_lines"] = {}
    for name, mask in masks.items():
        if mask.any():
            numbers = np.flatnonzero(mask)[:_LINES_SHOWN].tolist()
            figures["first_lines"][name] = tuple(table.rows.select(numbers).values("line"))
    return figures


def _label_counts(table: Rows, columns: Sequence[Column]) -> Counter[str]:
    """Counts labels, tags, answered questions, or the index of the right choice."""
    for column in columns:
        counts = count_labels(table, column).counts()
        if counts:
            return counts
    return Counter()


def _values(table: Rows, column: Column) -> Iterator[Any]:
    """Yields the values of a column that are not missing."""
    if column.name in table.rows.column_names:
        for rows in table.rows.tables([column.name]):
            for value in rows.column(0).to_pylist():
                if value is not None:
                    yield value
