"""Detection of texts, or pairs, with a label, several labels or a number.

Pair classification uses the same rules, but with two columns of texts.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from bert_tasks.data.cells import LABEL_SEPARATOR, column_parts, label_name, label_value
from bert_tasks.data.checks import imbalance_hint
from bert_tasks.data.columns import Row
from bert_tasks.data.problems import counted
from bert_tasks.data.profile import ColumnProfile, listed, percentile
from bert_tasks.outputs.classes import Classes
from bert_tasks.outputs.label_set import LabelSet
from bert_tasks.outputs.number import Number
from bert_tasks.tasks.detection.base import (
    LABEL_NAMES,
    QUESTION_NAMES,
    TaskGuess,
    UserHints,
    count_pieces,
    is_flag,
    name_words,
    several_tasks,
)

_SINGLE_LABEL, _MULTI_LABEL, _REGRESSION = Classes.problem_type, LabelSet.problem_type, Number.problem_type
# The problems that users of ``init`` may name instead of a task -> the problem type.
PROBLEMS: Mapping[str, str] = MappingProxyType(
    {"regression": _REGRESSION, "multi-label-classification": _MULTI_LABEL, "multi-label": _MULTI_LABEL}
)
_AMOUNT_NAMES = ("score", "stars", "similarity", "rating", "quality", "relevant")  # numbers called so may be amounts
_PAIR_NAMES = (
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("first", "second"),
    ("text_a", "text_b"),
    ("text1", "text2"),
    ("#1 string", "#2 string"),
    *((name, other) for name in QUESTION_NAMES for other in ("candidate", "passage", "sentence", "document", "answer")),
)


def text_guess(
    task: str, texts: Sequence[str], profiles: Sequence[ColumnProfile], rows: Sequence[Row], hints: UserHints
) -> TaskGuess | None:
    """Returns the columns and settings with which rows fit a task of texts, or None if they do not fit.

    Args:
        task: The name of the task.
        texts: Its columns of texts, one or two.
        profiles: Content of each column.
        rows: A sample of the rows, as the file has them.
        hints: The user's options for the columns.
    """
    by_name = {column.name: column for column in profiles}
    labels = _label_columns([column for column in profiles if column.name not in hints.texts])
    if hints.label is not None:
        labels = [by_name[hints.label]]
    for label in labels:
        candidates = [by_name[name] for name in hints.texts]
        if not candidates:
            candidates = _text_columns([column for column in profiles if column is not label])
        if candidates and (hints.task is None or len(candidates) >= len(texts)):
            others = [column for column in labels if column is not label]
            return _guess_with(task, texts, candidates, label, others, rows, hints)
    return None


def _guess_with(
    task: str,
    texts: Sequence[str],
    candidates: Sequence[ColumnProfile],
    label: ColumnProfile,
    others: Sequence[ColumnProfile],
    rows: Sequence[Row],
    hints: UserHints,
) -> TaskGuess | None:
    """Returns the guess with this column of labels. None if the rows have another number of texts than the task reads.

    Args:
        task: The name of the task.
        texts: Its columns of texts.
        candidates: The columns of the rows that may be its texts.
        label: The column of the labels.
        others: Further columns that may be the labels.
        rows: The rows.
        hints: The user's options.
    """
    count = len(texts)
    most = 2 if hints.task is None else count
    longest = sorted(candidates, key=lambda column: -column.words)[:most]
    columns = [column for column in candidates if column in longest]  # in the order of the file, or of usual names
    if len(columns) != count:
        return None
    names = [column.name for column in columns]
    of_task = dict(zip(texts, names, strict=True))
    problem, reason = _problem_type(label, hints)
    settings: dict[str, object] = {"problem_type": problem}
    separator = LABEL_SEPARATOR
    values: tuple[str, ...] = ()
    if problem == _MULTI_LABEL:
        of_task["labels"] = label.name
        values = label.names
        if label.lists < 1:
            separator = label.separator
    else:
        of_task["label"] = label.name
    if problem == _SINGLE_LABEL:
        values = tuple(sorted(value for value, _ in label.common))
        hidden = _hidden_value(label)
        if hidden is not None:
            values = tuple(label_name(value) for value in values if value != hidden)
            settings["labels"] = list(values)  # which makes rows with another value rows without a label
    return TaskGuess(
        task=task,
        columns=of_task,
        words=percentile([count_pieces(row, names) for row in rows]),
        settings=settings,
        labels=values,
        reasons=tuple(_reasons(columns, label, problem, reason, hints.name)),
        alternatives=tuple(_alternatives(candidates, columns, label, others, hints)),
        spare=_spare_columns(columns, label),
        separator=separator,
    )


def _spare_columns(texts: Sequence[ColumnProfile], label: ColumnProfile) -> tuple[tuple[str, str, str], ...]:
    """Returns the first of two texts as the group of its rows, if it repeats and there are two labels."""
    repeats = texts[0].distinct <= texts[0].rows / 2
    if len(texts) != 2 or not repeats or label.distinct != 2:
        return ()
    return (("group", texts[0].name, "ranks the rows of each, by the second label, and reports map, mrr and ndcg@10"),)


def _label_columns(profiles: Sequence[ColumnProfile]) -> list[ColumnProfile]:
    """Returns columns of labels, by name, then values and position, likeliest first."""
    filled = [column for column in profiles if column.filled > column.rows / 2 or _is_named(column)]
    fitting = [c for c in filled if c.is_sets or c.is_classes or c.is_amount or (c.is_repeated and _is_named(c))]
    order = {column.name: position for position, column in enumerate(profiles)}
    plain = {column.name: column.is_sets or column.is_classes or column.decimals for column in fitting}
    return sorted(fitting, key=lambda c: (_name_rank(c), plain[c.name], c.filled, order[c.name]), reverse=True)


def _is_named(column: ColumnProfile) -> bool:
    return column.known in LABEL_NAMES


def _text_columns(profiles: Sequence[ColumnProfile]) -> list[ColumnProfile]:
    """Returns two columns called a pair, else all longer texts, else one column."""
    by_name = {column.known: column for column in profiles if column.nested == 0 and not column.is_number}
    pair = next((pair for pair in _PAIR_NAMES if by_name.keys() >= set(pair)), None)
    if pair is not None:
        return [by_name[name] for name in pair]
    texts = [column for column in profiles if column.is_text]
    if texts:
        return texts
    short = [column for column in by_name.values() if column.distinct > column.rows / 2]
    return sorted(short, key=lambda column: (column.is_id, -column.words))[:1]


def _name_rank(column: ColumnProfile) -> int:
    """Rates a name as that of labels: 2 for a usual name, 1 if it ends with one, as in product_category."""
    if _is_named(column):
        return 2
    words = name_words(column)
    return 1 if words and words[-1] in (*LABEL_NAMES, *_AMOUNT_NAMES) else 0


def _counts_classes(label: ColumnProfile) -> bool:
    """Returns True for class numbers 0, 1, 2, ... without a gap, in a column that is called so."""
    return _is_named(label) and label.low == 0 and label.high == label.distinct - 1


def _hidden_value(label: ColumnProfile) -> str | None:
    """Returns the value that rows without a label have, or None.

    It is "-" among several words, and -1 among the class numbers 0, 1, 2, ... -1 to 1 are classes of their own, such as
    negative, neutral and positive.
    """
    values = {value for value, _ in label.common}
    if "-" in values and "+" not in values and len(values) > 2 and label.numbers == 0:
        return "-"
    counts_from_hidden = label.low == -1 and label.high == label.distinct - 2
    if label.is_number and counts_from_hidden and label.high > 1:
        return next((value for value in values if label_value(value) == -1), None)
    return None


def _problem_type(label: ColumnProfile, hints: UserHints) -> tuple[str, str]:
    """Returns the problem type, and why. With a separator cells hold several labels."""
    if hints.problem == _MULTI_LABEL and label.name == hints.label and "," in label.name:
        parts = column_parts(label.name)
        number = "one label in each row" if label.lists == 0 else "any number of labels per row"
        only = f"--label {shlex.quote(parts[0])} selects one of them"
        return _MULTI_LABEL, f"{', '.join(parts)}: columns of 0 and 1, so {number} ({only})"
    if label.is_sets or hints.separator is not None or hints.problem == _MULTI_LABEL:
        joint = "in a list" if label.lists > 0 else f"in a cell, with {label.separator!r} between them"
        summary = f"{counted(len(label.names), 'name')}, several {joint} ({listed(label.names)})"
        return _MULTI_LABEL, f"{label.name}: {summary}, so any number of labels per row"
    if hints.problem == _REGRESSION or (label.is_amount and not (label.is_repeated and _counts_classes(label))):
        range_type = "with decimals" if label.decimals else f"{label.distinct} different"
        return _REGRESSION, f"{label.name}: numbers from {label.low:g} to {label.high:g}, {range_type}, for regression"
    summary = f"{counted(label.distinct, 'distinct value')} in {counted(label.rows, 'row')} ({label.counts()})"
    return _SINGLE_LABEL, f"{label.name}: {summary}, so one label per row"


def _reasons(
    texts: Sequence[ColumnProfile], label: ColumnProfile, problem: str, reason: str, name: str
) -> Iterator[str]:
    for column in texts:
        yield f"{column.name}: texts of {column.words:.0f} words on average"
    if len(texts) == 2:
        yield f"{texts[0].name}, {texts[1].name}: two texts in a row, so each row is a pair"
    yield reason
    empty, train = label.rows - label.filled, "train other tasks only" if name else "cannot be trained on"
    if empty and problem == _MULTI_LABEL:
        yield f"{label.name}: {counted(empty, 'empty cell')}. A row with an empty cell has no label"
    elif empty:
        yield f"{label.name}: {counted(empty, 'empty cell')}. Rows without a label {train}"
    hidden = _hidden_value(label)
    if problem == _SINGLE_LABEL and hidden is not None:
        rows = counted(dict(label.common)[hidden], "row")
        yield f"{label.name}: {hidden!r} says that a row has no label. {rows} with it are left out"
    hint = imbalance_hint(dict(label.common), name) if problem == _SINGLE_LABEL else None
    if hint is not None:
        yield f"{label.name}: {hint}"


def _alternatives(
    texts: Sequence[ColumnProfile],
    pair: Sequence[ColumnProfile],
    label: ColumnProfile,
    others: Sequence[ColumnProfile],
    hints: UserHints,
) -> Iterator[str]:
    names = tuple(column.known for column in pair)
    if label.is_sets and label.separator == "," and label.lists == 0 and hints.separator is None:
        yield 'settings.problem_type = "single_label_classification", if a cell with a comma is one label'
    if len(pair) == 2 and names not in _PAIR_NAMES and not hints.texts and hints.task is None:
        for column in texts:
            yield f'task = "sequence-classification" with text = "{column.name}"'
    if hints.task is not None and not hints.texts:
        for column in texts:
            if column not in pair:
                name = "text" if len(pair) == 1 else "text_pair"
                yield f'{name} = "{column.name}" ({column.described()})'
    are_amounts = label.is_number and label.is_classes and label.distinct > 2
    are_ids = label.known not in _AMOUNT_NAMES and (_counts_classes(label) or _hidden_value(label) is not None)
    if are_amounts and not are_ids and hints.problem is None:
        yield 'settings.problem_type = "regression", if the numbers are amounts'
    if label.is_amount and not label.decimals and label.is_repeated:
        yield 'settings.problem_type = "single_label_classification", if the numbers are classes'
    alike = [column for column in others if _name_rank(column) >= _name_rank(label)]
    alike = [column for column in alike if column.lists == 0 or column.sets > 0]  # no lists of the one label
    for column in alike:
        yield f'label = "{column.name}" ({column.described()})'
    classes = [column for column in alike if _problem_type(column, hints)[0] == _SINGLE_LABEL]
    if hints.task is None and not all(map(is_flag, [label, *classes])):
        yield from several_tasks(label.name, [column.name for column in classes])
