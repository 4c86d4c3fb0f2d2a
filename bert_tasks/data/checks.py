"""A census of the labels in a column, from which unknown, misspelt and mixed labels are reported.

Owns the counting and the wording. Must not know how files are read.

Checks on labels and the data report.

Owns which label values are acceptable, how unknown ones are reported, and what is counted about a data set
before training. Must not know how files are read or how a model is trained.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_tasks.data.columns import Column, Kind, column_of
from bert_tasks.data.conll import is_chunk_tag, label_scheme, to_iob2
from bert_tasks.data.problems import SHOWN, Problems, raise_problems, suggestion
from bert_tasks.errors import DataError
from bert_tasks.storage import sha256

if TYPE_CHECKING:
    from bert_tasks.data.features import Cuts, Numbers
    from bert_tasks.data.splits import Splits
    from bert_tasks.data.table import RowTable

LABEL_KINDS: tuple[Kind, ...] = ("label", "labels", "tags")
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
        f"imbalanced: {most!r} has {seen[most]} rows, {least!r} {seen[least]}; consider settings.class_weights = "
        '"balanced" and run.metric_for_best_model = "macro_f1", which counts every label alike'
    )


def is_integer(value: str) -> bool:
    """Whether a label is a whole number; one of more digits than Python converts is a name."""
    return re.fullmatch(r"[+-]?\d{1,4300}", value) is not None


@dataclass
class _Tally:
    """How often each name stands, and the first lines where it does; bounded in memory."""

    counts: Counter[str] = field(default_factory=Counter)
    lines: dict[str, list[int]] = field(default_factory=dict)

    def add(self, names: Sequence[str], line: int) -> None:
        for name in names:
            if name not in self.counts and len(self.counts) >= _MOST_COUNTED:
                continue
            self.counts[name] += 1
            lines = self.lines.setdefault(name, [])
            if len(lines) < SHOWN and line not in lines[-1:]:
                lines.append(line)

    def report(self, odd: Mapping[str, str], problems: Problems, column: str) -> None:
        """Adds the rows of names that are ``odd``: name -> what is wrong with it."""
        for value, what in odd.items():
            lines = self.lines[value]
            problems.add(lines[0], what, column=column, value=value, times=self.counts[value] - len(lines) + 1)
            for line in lines[1:]:
                problems.add(line, what, column=column, value=value)


@dataclass
class LabelCensus:
    """How often each label stands, and where.

    Tags count for each word: in IOB2 whatever chunk scheme they are written in, and as they are written, which is what
    counts where any of them is no chunk tag.
    """

    written: _Tally = field(default_factory=_Tally)
    chunks: _Tally = field(default_factory=_Tally)  # of tags only
    rows: int = 0

    @property
    def counts(self) -> Counter[str]:
        are_chunks = len(self.chunks.counts) > 0 and all(map(is_chunk_tag, self.written.counts))
        return self.chunks.counts if are_chunks else self.written.counts

    def add(self, value: Any, line: int, column: Column) -> None:
        if column.kind not in LABEL_KINDS or value is None:
            return
        self.rows += 1
        self.written.add([value] if column.kind == "label" else value, line)
        if column.kind == "tags":
            self.chunks.add(to_iob2(value), line)

    def report(self, problems: Problems, column: str, labels: Sequence[str]) -> None:
        """Adds rows whose label is none of ``labels``; without labels, what does not belong among the others.

        For tags, ``labels`` are `known_tags`.
        """
        if len(labels) == 0:
            self.written.report(self._mixed(), problems, column)
            return
        tally = self.chunks if self.chunks.counts and label_scheme(labels) != "raw" else self.written
        tally.report(_unknown(tally.counts, labels), problems, column)

    def report_no_chunks(self, problems: Problems, column: str) -> None:
        """Adds rows with a tag of which no chunk scheme knows whether it begins, continues or ends an entity."""
        odd = [tag for tag in self.written.counts if not is_chunk_tag(tag)]
        self.written.report(dict.fromkeys(odd, "expected O or a tag such as B-TYPE"), problems, column)

    def _mixed(self) -> dict[str, str]:
        counts = self.written.counts
        numbers = {value for value in counts if is_integer(value)}
        names = set(counts) - numbers
        if numbers and names:
            few = min(numbers, names, key=lambda group: sum(counts[value] for value in group))
            what = "a number among names" if few is numbers else "a name among numbers"
            return dict.fromkeys(sorted(few), f"{what}; mend it, or state the labels in settings.labels")
        if not self.chunks.counts:
            return {}
        plain = {value for value in counts if not is_chunk_tag(value)}
        prefixed = sum(count for value, count in counts.items() if value != "O" and value not in plain)
        if sum(counts[value] for value in plain) * _FEW > prefixed:
            return {}  # they are not chunk tags but classes of words
        return dict.fromkeys(
            sorted(plain), "expected O or a tag such as B-TYPE, as almost all are; or state them in settings.labels"
        )


def _unknown(counts: Mapping[str, int], labels: Sequence[str]) -> dict[str, str]:
    odd = {}
    for value in counts:
        if value not in labels:
            meant = suggestion(value, labels)
            others = ", ".join(labels[:10]) + (", ..." if len(labels) > 10 else "")
            odd[value] = f"expected one of {others}" if meant is None else f"{value!r} -> {meant!r}?"
    return odd


def known_tags(labels: Sequence[str]) -> tuple[str, ...]:
    """The tags that a set of labels can express: itself, and its types in IOB2 whatever scheme the set speaks."""
    if label_scheme(labels) == "raw":
        return tuple(labels)
    types = dict.fromkeys(label.partition("-")[2] for label in labels if "-" in label)
    return tuple(dict.fromkeys([*labels, *(f"{prefix}-{kind}" for kind in types for prefix in "BI")]))


Keys = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """Of one split: the length of each feature in tokens, what no feature holds, and what the task says of that."""

    lengths: "Numbers"
    cuts: "Cuts"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SplitReport:
    """What is known of one split; token figures are None when no features were given.

    Attributes:
        words: of sentences; None for other rows.
        label_counts: rows with each label; words with each tag, in IOB2; answerable and unanswerable questions.
        truncated_share: of the rows that have tokens which no window holds.
        notes: what was left out when the rows were read, tags that no training row has, what was cut, and rare labels.
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
        DataError: if they look like numbers or ids, or differ in letter case only.
    """
    census = _census(table, columns)
    found = set(census.counts)
    column = column_of(columns, *LABEL_KINDS)
    if column is not None and column.kind == "tags":
        _check_are_tags(table, census)
    elif len(found) > MOST_LABELS or (census.rows >= 100 and len(found) > census.rows / 2):
        raise DataError(
            f"{table.source}: {len(found)} different labels in {census.rows} rows look like numbers or ids; "
            "for regression set problem_type = 'regression'"
        )
    folded: dict[str, str] = {}
    for name in sorted(found):
        other = folded.setdefault(name.casefold(), name)
        if other != name:
            raise DataError(
                f"{table.source}: the labels {other!r} and {name!r} differ in letter case only; "
                "write one of them, or state both in settings.labels"
            )
    names = sorted(found)  # a set has another order in each process, and sorting by value alone keeps it for equals
    return tuple(sorted(names, key=int) if all(map(is_integer, names)) else names)


def check_labels(tables: Sequence["RowTable"], columns: Sequence[Column], labels: Sequence[str]) -> None:
    """Raises one report of all rows, over all tables, whose label is none of ``labels``.

    Chunk tags pass: test files may well hold types that no training file has, which a model then misses.
    """
    column = column_of(columns, *LABEL_KINDS)
    if column is None:
        return
    if column.kind != "tags":
        _report_unknown(tables, columns, column, labels)
    elif label_scheme(labels) != "raw":
        _report_unknown(tables, columns, column, None)


def _report_unknown(
    tables: Sequence["RowTable"], columns: Sequence[Column], column: Column, labels: Sequence[str] | None
) -> None:
    """Raises for labels that are none of ``labels``; for None, for tags that are no chunk tags."""
    found = []
    for table in tables:
        problems, census = Problems(source=table.source), _census(table, columns)
        if labels is None:
            census.report_no_chunks(problems, column.name)
        else:
            census.report(problems, column.name, labels)
        found.append(problems)
    raise_problems(found)


def check_splits(splits: "Splits", *, columns: Sequence[Column], labels: Sequence[str] = ()) -> tuple[str, ...]:
    """The labels to train on, after checking that the splits can be trained and evaluated with them.

    Without ``labels`` those of the training rows are taken. Columns without labels give an empty tuple. Of chunk tags
    only those of training rows must be among ``labels``, in any scheme; the data report notes those of validation
    rows that are not.

    Raises:
        DataError: for no training or validation rows, unknown labels, a single class, or a class that only
            validation rows have; for no training question that has an answer.
    """
    tables = [splits.train, *splits.validation.values()]
    for table in tables:
        if len(table) == 0:
            raise DataError(f"{table.source}: no rows")
    _check_some_answered(splits.train, columns)
    column = column_of(columns, *LABEL_KINDS)
    if column is None:
        return ()
    known = tuple(labels) if len(labels) > 0 else infer_labels(splits.train, columns)
    if column.kind == "tags":
        _report_unknown([splits.train], columns, column, known_tags(known))
    else:
        _check_only_in_validation(splits, columns, known)
    check_labels(tables, columns, known)
    _check_enough_classes(splits.train, column, columns, known)
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
    and another target.
    """
    tokens = {} if tokens is None else tokens
    train_keys = np.array([], dtype=np.uint64)
    trained = _target_counts(splits.train, columns)
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
    counts = _target_counts(table, columns)
    _, first, text = np.unique(keys["text"], return_index=True, return_inverse=True)
    return SplitReport(
        name=name,
        rows=len(table),
        words=_word_count(table, columns),
        label_counts={label: counts[label] for label in dict.fromkeys([*labels, *sorted(counts)])},
        token_lengths=None if tokens is None else _length_figures(tokens.lengths),
        truncated_share=None if tokens is None else tokens.cuts.cut_rows / max(len(table), 1),
        duplicates=len(table) - len(first),
        conflicts=int(np.sum(keys["target"] != keys["target"][first[text]])),
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
    """For each row digests of its texts and of its target, and whether a required text is empty: 17 bytes a row."""
    kinds = [("text", np.uint64), ("target", np.uint64), ("empty", np.bool_)]
    return np.fromiter(_keyed_rows(table, columns), dtype=kinds, count=len(table))


def _keyed_rows(table: "RowTable", columns: Sequence[Column]) -> Iterator[tuple[int, int, bool]]:
    texts = [column.name for column in columns if column.kind in ("text", "words") and column.required]
    targets = [column.name for column in columns if column.is_target]
    for row in table:
        values = [_folded(row.get(name)) for name in texts]
        yield _short_digest("\0".join(values)), _short_digest(repr([row.get(name) for name in targets])), "" in values


def _short_digest(text: str) -> int:
    """64 bits: two of 100 million different texts are the same by chance once in 3,700 such data sets."""
    return int(sha256(text)[:16], 16)


def _folded(text: str | list[str] | None) -> str:
    if text is None:
        return ""
    return (text if isinstance(text, str) else " ".join(text)).strip().casefold()


def _target_counts(table: "RowTable", columns: Sequence[Column]) -> Counter[str]:
    """Labels or tags; questions by whether they have an answer."""
    answers = column_of(columns, "answers")
    if answers is None or answers.name not in table.rows.column_names:
        return _census(table, columns).counts
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
    new = [f"{tag!r} ({counts[tag]} words)" for tag in sorted(counts) if tag not in trained]
    shown = ", ".join(new[:SHOWN]) + (", ..." if len(new) > SHOWN else "")
    return (f"tags that no training row has: {shown}",) if new else ()


def _imbalance(split: str, counts: Counter[str], columns: Sequence[Column]) -> tuple[str, ...]:
    """Of the training rows: others are judged as they are."""
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
    words = "" if split.words is None else f", {split.words} words"
    lines = [f"{split.name}: {split.rows} rows{words}"]
    if split.label_counts:
        whole = split.rows if split.words is None else max(sum(split.label_counts.values()), 1)
        shares = [f"{label} {count} ({count / whole:.0%})" for label, count in split.label_counts.items()]
        lines.append(f"  labels: {', '.join(shares)}")
    if split.token_lengths:
        figures = ", ".join(f"{name} {value:g}" for name, value in split.token_lengths.items())
        lines.append(f"  tokens: {figures}")
    found = {
        "with an empty text": split.empty_texts,
        "with a text that an earlier row has": split.duplicates,
        "with a text that an earlier row has with another target": split.conflicts,
        "with a text that also stands in train": split.also_in_train,
    }
    lines += [f"  {count} rows {what}" for what, count in found.items() if count > 0]
    return lines + [f"  {note}" for note in split.notes]


def _census(table: "RowTable", columns: Sequence[Column]) -> LabelCensus:
    census = LabelCensus()
    column = column_of(columns, *LABEL_KINDS)
    if column is None or column.name not in table.rows.column_names:
        return census
    for batch in table.rows.select_columns([column.name, "line"]).iter(batch_size=1000):
        for value, line in zip(batch[column.name], batch["line"], strict=True):
            census.add(value, line, column)
    return census


def _check_are_tags(table: "RowTable", census: LabelCensus) -> None:
    words, found = census.counts.total(), len(census.counts)
    if (words >= 100 and found > words / 2) or (found > MOST_LABELS and found > words / 20):
        raise DataError(
            f"{table.source}: {found} different tags on {words} words look like words or ids; say which column holds "
            'the tags, e.g. [data.columns] tags = "1", or state the labels in settings.labels'
        )


def _check_some_answered(train: "RowTable", columns: Sequence[Column]) -> None:
    if column_of(columns, "answers") is not None and _target_counts(train, columns)["answerable"] == 0:
        raise DataError(f"{train.source}: none of {len(train)} questions has an answer; training needs some that do")


def _check_only_in_validation(splits: "Splits", columns: Sequence[Column], labels: Sequence[str]) -> None:
    trained = _census(splits.train, columns).counts
    for table in splits.validation.values():
        counts = _census(table, columns).counts
        new = [name for name in counts if name not in trained and (name in labels or not suggestion(name, labels))]
        if new:
            named = ", ".join(f"{name!r} ({counts[name]} rows)" for name in sorted(new))
            raise DataError(
                f"{table.source}: {named} stand only in validation, where no model can know them; "
                f"add some to {splits.train.source} or take these out"
            )


def _check_enough_classes(train: "RowTable", column: Column, columns: Sequence[Column], labels: Sequence[str]) -> None:
    counts = _census(train, columns).counts
    least = 1 if column.kind == "labels" else 2
    what = "tag" if column.kind == "tags" else "label"
    if len(counts) < least:
        only = f"only the {what} {next(iter(counts))!r}" if counts else f"no {what}"
        raise DataError(f"{train.source}: {only} in {len(train)} rows; training needs at least {least} classes")
    if len(labels) < least:
        raise DataError(f"settings.labels names {len(labels)} label; training needs at least {least}")
