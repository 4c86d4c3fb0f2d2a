"""Detection of texts, or pairs, with a label, several labels or a number.

Pair classification uses the same rules, but with two columns of texts.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from bert_tasks.data.cells import LABEL_SEPARATOR, column_parts, label_name, label_value
from bert_tasks.data.checks import imbalance_hint
from bert_tasks.data.columns import Row
from bert_tasks.data.problems import counted
from bert_tasks.data.profile import ColumnProfile, listed, percentile
from bert_tasks.tasks.shared.detection import (
    LABEL_NAMES,
    QUESTION_NAMES,
    Detection,
    Suggestion,
    TaskGuess,
    UserHints,
    count_pieces,
    is_flag,
    name_words,
    needed_tokens,
    several_tasks,
)

_REGRESSION, _MULTI_LABEL = "regression", "multi_label_classification"
_SINGLE_LABEL = "single_label_classification"
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


class TextDetection(Detection):
    """Detects rows of texts, or of pairs, with a label, several labels or a number."""

    row_needs: ClassVar[str] = "a text and a label or number"
    problems: ClassVar[Mapping[str, str]] = {
        "regression": _REGRESSION,
        "multi-label-classification": _MULTI_LABEL,
        "multi-label": _MULTI_LABEL,
    }

    def guess(self, profiles: Sequence[ColumnProfile], rows: Sequence[Row], hints: UserHints) -> TaskGuess | None:
        count, by_name = len(self.task.texts), {column.name: column for column in profiles}
        labels = _label_columns([column for column in profiles if column.name not in hints.texts])
        if hints.label is not None:
            labels = [by_name[hints.label]]
        for label in labels:
            texts = [by_name[name] for name in hints.texts]
            if not texts:
                texts = _text_columns([column for column in profiles if column is not label])
            if not texts or (hints.task is not None and len(texts) < count):
                continue
            longest = sorted(texts, key=lambda column: -column.words)[: 2 if hints.task is None else count]
            columns = [column for column in texts if column in longest]  # in the order of the file, or of usual names
            if len(columns) != count:
                return None
            problem, reason = _problem_type(label, hints)
            several, names = problem == _MULTI_LABEL, [column.name for column in columns]
            values = label.names if several else tuple(sorted(value for value, _ in label.common))
            hidden = _hidden_value(label)
            stated = dict[str, list[str]]()
            if problem == _SINGLE_LABEL and hidden is not None:
                values = tuple(label_name(value) for value in values if value != hidden)
                stated = {"labels": list(values)}  # which makes rows with another value rows without a label
            spare: tuple[tuple[str, str, str], ...] = ()
            if count == 2 and columns[0].distinct <= columns[0].rows / 2 and label.distinct == 2:  # it repeats
                spare = (
                    (
                        "group",
                        names[0],
                        "ranks the rows of each, by the second label, and reports map, mrr and ndcg@10",
                    ),
                )
            others = [column for column in labels if column is not label]
            return TaskGuess(
                task=self.task.name,
                columns=dict(zip(self.task.texts, names, strict=True)) | {"labels" if several else "label": label.name},
                words=percentile([count_pieces(row, names) for row in rows]),
                settings={"problem_type": problem, **stated},
                labels=() if problem == _REGRESSION else values,
                reasons=tuple(_reasons(columns, label, problem, reason, hints.name)),
                alternatives=tuple(_alternatives(texts, columns, label, others, hints)),
                spare=spare,
                separator=label.separator if several and label.lists < 1 else LABEL_SEPARATOR,
            )
        return None

    def settings(self, words: int, longest: int) -> list[Suggestion]:
        suggestions = super().settings(words, longest)
        if len(self.task.texts) == 1 and needed_tokens(words) > longest:
            comment = "reads all of a long text, whose end is otherwise cut off"
            suggestions.append(Suggestion("long_texts", "windows", comment, is_active=False))
        return suggestions


class PairDetection(TextDetection):
    """Detects pairs of texts for ``init``."""

    row_needs: ClassVar[str] = "two texts and a label or number"


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
    hint = imbalance_hint(dict(label.common), name) if problem == "single_label_classification" else None
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
    classes = [column for column in alike if _problem_type(column, hints)[0] == "single_label_classification"]
    if hints.task is None and not all(map(is_flag, [label, *classes])):
        yield from several_tasks(label.name, [column.name for column in classes])
