"""Labels and the data report.

Owns the census of the labels in a column, from which unknown, misspelt and mixed labels are reported, the checks that
training and validation rows fit together, and the report on a data set.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_tasks.data.columns import Column, Kind, column_of
from bert_tasks.data.conll import is_chunk_tag, label_scheme, to_iob2
from bert_tasks.data.problems import SHOWN, Problems, counted, first_few, raise_problems, suggestion
from bert_tasks.errors import DataError
from bert_tasks.storage import sha256

if TYPE_CHECKING:
    from bert_tasks.data.features import Cuts, Numbers
    from bert_tasks.data.splits import Splits
    from bert_tasks.data.table import RowTable

CLASS_KINDS: tuple[Kind, ...] = ("label", "labels", "tags")  # columns whose values are names of classes
MOST_LABELS = 1000
_MOST_COUNTED = 100_000
_IMBALANCED = 5  # times as many rows as the rarest label
_FEW = 10  # one odd tag in so many is taken for a mistake


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


def is_integer(value: str) -> bool:
    """Whether a label is a whole number; one of more digits than Python converts is a name."""
    return re.fullmatch(r"[+-]?\d{1,4300}", value) is not None


@dataclass
class LabelCensus:
    """How often each label of a column occurs, and where.

    Tags are counted for each word twice: in IOB2, whatever chunk scheme they are written in, and as they are written,
    which is what counts where any of them is not a chunk tag.

    Args:
        column: a column of one of ``CLASS_KINDS``.
    """

    column: Column
    rows: int = 0
    _written: Counter[str] = field(default_factory=Counter)
    _chunks: Counter[str] = field(default_factory=Counter)  # tags in IOB2
    _lines: dict[tuple[bool, str], list[int]] = field(default_factory=dict)  # (is it in IOB2, name) -> first lines

    @property
    def counts(self) -> Counter[str]:
        """How often each label occurs."""
        are_chunks = len(self._chunks) > 0 and all(map(is_chunk_tag, self._written))
        return self._chunks if are_chunks else self._written

    def add(self, value: Any, line: int) -> None:
        """Counts the value of the row at a line; None is no label. Memory is bounded."""
        if value is None:
            return
        self.rows += 1
        tallies = [(False, self._written, [value] if self.column.kind == "label" else value)]
        if self.column.kind == "tags":
            tallies.append((True, self._chunks, to_iob2(value)))
        for is_iob2, counts, names in tallies:
            for name in names:
                if name not in counts and len(counts) >= _MOST_COUNTED:
                    continue
                counts[name] += 1
                lines = self._lines.setdefault((is_iob2, name), [])
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
        counts = self._written
        if len(labels) == 0:
            odd = self._mixed()
        elif self.column.kind == "tags" and new_types:
            is_raw = label_scheme(labels) == "raw"
            unclear = [] if is_raw else [tag for tag in counts if not is_chunk_tag(tag)]
            odd = dict.fromkeys(unclear, "expected O or a tag such as B-TYPE")
        else:
            if self._chunks and label_scheme(labels) != "raw":
                counts = self._chunks
            odd = {}
            for value in counts:
                if value not in labels:
                    meant = suggestion(value, labels)
                    expected = f"expected one of {first_few(labels, 10)}"
                    odd[value] = expected if meant is None else f"{value!r} -> {meant!r}?"
        for value, what in odd.items():
            lines = self._lines[counts is self._chunks, value]
            problems.add(lines[0], what, column=name, value=value, times=counts[value] - len(lines) + 1)
            for line in lines[1:]:
                problems.add(line, what, column=name, value=value)

    def _mixed(self) -> dict[str, str]:
        """The labels that do not belong among the others -> what is wrong with them."""
        counts = self._written
        numbers = {value for value in counts if is_integer(value)}
        names = set(counts) - numbers
        if numbers and names:
            few = min(numbers, names, key=lambda group: sum(counts[value] for value in group))
            what = "a number among names" if few is numbers else "a name among numbers"
            return dict.fromkeys(sorted(few), f"{what}; fix it, or state the labels in settings.labels")
        if not self._chunks:
            return {}
        plain = {value for value in counts if not is_chunk_tag(value)}
        prefixed = sum(count for value, count in counts.items() if value != "O" and value not in plain)
        if sum(counts[value] for value in plain) * _FEW > prefixed:
            return {}  # they are not chunk tags but classes of words
        return dict.fromkeys(
            sorted(plain), "expected O or a tag such as B-TYPE, as almost all are; or state them in settings.labels"
        )


def known_tags(labels: Sequence[str]) -> tuple[str, ...]:
    """The tags that a set of labels can express: itself, and its types in IOB2, whatever the scheme of the set."""
    if label_scheme(labels) == "raw":
        return tuple(labels)
    types = dict.fromkeys(label.partition("-")[2] for label in labels if "-" in label)
    return tuple(dict.fromkeys([*labels, *(f"{prefix}-{kind}" for kind in types for prefix in "BI")]))


Keys = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """Of one split: each feature's length in tokens, what is in no feature, and the task's notes on that."""

    lengths: "Numbers"
    cuts: "Cuts"
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
        return [line for split in self.splits for line in _split_lines(split)]


def infer_labels(table: "RowTable", columns: Sequence[Column]) -> tuple[str, ...]:
    """The distinct labels of a table: in numeric order if all are integers, else sorted as text; tags in IOB2.

    Integers of equal value ("1", "01", "+1") are different labels, in the order of their text.

    Raises:
        DataError: they look like numbers or ids, or differ in letter case only.
    """
    census = _census(table, columns)
    return () if census is None else _inferred(table, census)


def _inferred(table: "RowTable", census: LabelCensus) -> tuple[str, ...]:
    names = sorted(census.counts)  # sorting by value alone would keep the order of equals, which depends on the process
    words = census.counts.total()
    if census.column.kind == "tags":
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


def check_splits(splits: "Splits", *, columns: Sequence[Column], labels: Sequence[str] = ()) -> tuple[str, ...]:
    """Checks that the splits can be trained and evaluated with, and returns the labels to train on.

    Args:
        splits: training and validation rows.
        columns: the task's columns.
        labels: the known labels; without any those of the training rows are taken. Of chunk tags only those of training
            rows must be among them, in any scheme; the data report notes those of validation rows that are not.

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
    if column_of(columns, "answers") is not None and _label_counts(train, columns)["answerable"] == 0:
        raise DataError(
            f"{train.source}: none of {counted(len(train), 'question')} has an answer; training needs some that do"
        )
    column = column_of(columns, *CLASS_KINDS)
    if column is None:
        return ()
    censuses = [_census(table, columns) or LabelCensus(column) for table in tables]
    known = tuple(labels) if len(labels) > 0 else _inferred(train, censuses[0])
    if column.kind == "tags":
        problems = Problems(source=train.source)
        censuses[0].report(problems, column.name, known_tags(known), new_types=False)
        raise_problems([problems])
    else:
        trained = censuses[0].counts
        for table, census in zip(tables[1:], censuses[1:], strict=True):
            new = [name for name in sorted(census.counts) if name not in trained]
            new = [name for name in new if name in known or not suggestion(name, known)]  # others are misspelt
            if new:
                named = ", ".join(f"{name!r} ({counted(census.counts[name], 'row')})" for name in new)
                raise DataError(
                    f"{table.source}: only validation rows have {named}, which a model cannot learn; "
                    f"add some to {train.source} or remove these"
                )
    found = []
    for table, census in zip(tables, censuses, strict=True):
        problems = Problems(source=table.source)
        census.report(problems, column.name, known)
        found.append(problems)
    raise_problems(found)
    least, counts = 1 if column.kind == "labels" else 2, censuses[0].counts
    if len(counts) < least:
        what = "tag" if column.kind == "tags" else "label"
        only = f"only the {what} {next(iter(counts))!r}" if counts else f"no {what}"
        classes = counted(least, "class") if least == 1 else f"{least} classes"
        raise DataError(f"{train.source}: {only} in {counted(len(train), 'row')}; training needs at least {classes}")
    if len(known) < least:
        raise DataError(f"settings.labels names {counted(len(known), 'label')}; training needs at least {least}")
    return known


def data_report(
    splits: "Splits",
    tokens: Mapping[str, TokenCounts] | None = None,
    *,
    columns: Sequence[Column],
    labels: Sequence[str] = (),
) -> DataReport:
    """What to know of the data before training; ``tokens`` is keyed by the names that `named_splits` gives.

    Texts (of the columns that every row must have, words with a space between them) count as the same if they are
    equal apart from letter case and outer spaces. A row conflicts if an earlier row of its split has the same text
    and another label.
    """
    tokens = {} if tokens is None else tokens
    train_keys = np.array([], dtype=np.uint64)
    trained = _label_counts(splits.train, columns)
    reports = []
    for name, table in named_splits(splits):
        keys = _row_keys(table, columns)
        reports.append(_split_report(name, table, tokens.get(name), columns, labels, keys, train_keys, trained))
        if name == "train":
            train_keys = keys["text"]
    return DataReport(splits=tuple(reports))


def named_splits(splits: "Splits") -> list[tuple[str, "RowTable"]]:
    """The tables with names for people: train, validation (or validation_NAME for named sets)."""
    named = [(f"validation_{name}" if name != "" else "validation", table) for name, table in splits.validation.items()]
    return [("train", splits.train), *named]


def _split_report(
    name: str,
    table: "RowTable",
    tokens: TokenCounts | None,
    columns: Sequence[Column],
    labels: Sequence[str],
    keys: Keys,
    train_keys: Keys,
    trained: Counter[str],
) -> SplitReport:
    counts = _label_counts(table, columns)
    _, first, text = np.unique(keys["text"], return_index=True, return_inverse=True)
    return SplitReport(
        name=name,
        rows=len(table),
        words=_word_count(table, columns),
        label_counts={label: counts[label] for label in dict.fromkeys([*labels, *sorted(counts)])},
        token_lengths=None if tokens is None else _length_figures(tokens.lengths),
        truncated_share=None if tokens is None else tokens.cuts.cut_rows / max(len(table), 1),
        duplicates=len(table) - len(first),
        conflicts=int(np.sum(keys["label"] != keys["label"][first[text]])),
        empty_texts=int(keys["empty"].sum()),
        also_in_train=int(np.isin(keys["text"], train_keys).sum()),
        notes=(
            *table.notes,
            *_new_tags(counts, trained, columns),
            *(() if tokens is None else tokens.notes),
            *_imbalance(name, counts, columns),
        ),
    )


def text_keys(table: "RowTable", columns: Sequence[Column]) -> Keys:
    """For each row 64 bits that rows with the same texts share, in the sense of ``data_report``."""
    keys: Keys = _row_keys(table, columns)["text"]
    return keys


def _row_keys(table: "RowTable", columns: Sequence[Column]) -> Keys:
    """For each row digests of its texts and of its label, and whether a required text is empty: 17 bytes per row."""
    kinds = [("text", np.uint64), ("label", np.uint64), ("empty", np.bool_)]
    return np.fromiter(_keyed_rows(table, columns), dtype=kinds, count=len(table))


def _keyed_rows(table: "RowTable", columns: Sequence[Column]) -> Iterator[tuple[int, int, bool]]:
    texts = [column.name for column in columns if column.kind in ("text", "words") and column.required]
    labels = [column.name for column in columns if column.is_label]
    for row in table:
        values = [_folded(row.get(name)) for name in texts]
        yield _short_digest("\0".join(values)), _short_digest(repr([row.get(name) for name in labels])), "" in values


def _short_digest(text: str) -> int:
    """64 bits: two of 100 million different texts are the same by chance once in 3,700 such data sets."""
    return int(sha256(text)[:16], 16)


def _folded(text: str | list[str] | None) -> str:
    if text is None:
        return ""
    return (text if isinstance(text, str) else " ".join(text)).strip().casefold()


def _label_counts(table: "RowTable", columns: Sequence[Column]) -> Counter[str]:
    """Labels or tags; questions by whether they have an answer."""
    answers = column_of(columns, "answers")
    if answers is None or answers.name not in table.rows.column_names:
        census = _census(table, columns)
        return Counter() if census is None else census.counts
    return Counter(
        "answerable" if value["text"] else "unanswerable" for value in _values(table, answers) if value is not None
    )


def _word_count(table: "RowTable", columns: Sequence[Column]) -> int | None:
    column = column_of(columns, "words")
    if column is None or column.name not in table.rows.column_names:
        return None
    return sum(len(words) for words in _values(table, column) if words is not None)


def _new_tags(counts: Counter[str], trained: Counter[str], columns: Sequence[Column]) -> tuple[str, ...]:
    if column_of(columns, "tags") is None:
        return ()
    new = [f"{tag!r} ({counted(counts[tag], 'word')})" for tag in sorted(counts) if tag not in trained]
    return (f"tags that no training row has: {first_few(new, SHOWN)}",) if new else ()


def _imbalance(split: str, counts: Counter[str], columns: Sequence[Column]) -> tuple[str, ...]:
    """Of the training rows only: nothing is changed in the others."""
    hint = imbalance_hint(counts) if split == "train" and column_of(columns, "label") is not None else None
    return () if hint is None else (hint,)


def _values(table: "RowTable", column: Column) -> Iterator[Any]:
    for batch in table.rows.select_columns([column.name]).iter(batch_size=1000):
        yield from batch[column.name]


def _length_figures(lengths: "Numbers") -> dict[str, float]:
    if len(lengths) == 0:
        return {}
    low, median, high, top = np.percentile(lengths, [0, 50, 95, 100])
    return {"min": float(low), "median": float(median), "p95": float(high), "max": float(top)}


def _split_lines(split: SplitReport) -> list[str]:
    words = "" if split.words is None else f", {counted(split.words, 'word')}"
    lines = [f"{split.name}: {counted(split.rows, 'row')}{words}"]
    if split.label_counts:
        whole = split.rows if split.words is None else max(sum(split.label_counts.values()), 1)
        shares = [f"{label} {count} ({count / whole:.0%})" for label, count in split.label_counts.items()]
        lines.append(f"  labels: {', '.join(shares)}")
    if split.token_lengths:
        figures = ", ".join(f"{name} {value:g}" for name, value in split.token_lengths.items())
        lines.append(f"  tokens: {figures}")
    lines += [f"  {counted(split.empty_texts, 'empty text')}"] if split.empty_texts else []
    lines += [f"  {counted(split.duplicates, 'duplicate text')}"] if split.duplicates else []
    if split.conflicts:
        labels = "has a conflicting label" if split.conflicts == 1 else "have conflicting labels"
        lines.append(f"  {counted(split.conflicts, 'duplicate')} {labels}")
    if split.also_in_train:
        lines.append(f"  {counted(split.also_in_train, 'text')} also in train")
    return lines + [f"  {note}" for note in split.notes]


def _census(table: "RowTable", columns: Sequence[Column]) -> LabelCensus | None:
    """The labels of a table; None where it has none."""
    column = column_of(columns, *CLASS_KINDS)
    if column is None or column.name not in table.rows.column_names:
        return None
    census = LabelCensus(column)
    for batch in table.rows.select_columns([column.name, "line"]).iter(batch_size=1000):
        for value, line in zip(batch[column.name], batch["line"], strict=True):
            census.add(value, line)
    return census
