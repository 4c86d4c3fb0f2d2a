"""Readings of a file, which are tasks whose columns and labels fit the columns of the file.

This module owns the rule by which ``init`` chooses one of them:

1. A reading has the columns of one of the task's row shapes. Optional columns do not count.
2. A column that is like an id is neither text nor label.
3. Two or more columns of 0 and 1 are one set of labels.
4. A reading is dropped if what must hold between its columns fails in more than 10 % of the rows.
5. Readings whose label must fit another column come first (tags and words, answers and context), then those with more
   columns, then those with usual names, then those whose label stands for more columns.
6. A corpus has exactly one column that says something about a row.
7. The profile of the label decides between a class, several labels and a number.
8. Readings whose columns have names as usual as those of the first are a tie, which the user decides. So are a dropped
   reading with more usual names, and a column called label that has nothing to learn.

The rule knows no task by name. Tasks say which shapes their rows have (``Task.row_shapes``) and what their columns are
usually called.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from bert_tasks.data.batch import Batch, Record
from bert_tasks.data.cells import LABEL_SEPARATOR
from bert_tasks.data.columns import Column, Row
from bert_tasks.data.conversion import Conversion, Converted
from bert_tasks.data.issues import counted
from bert_tasks.data.kinds import (
    Answers,
    Choice,
    Choices,
    ColumnKind,
    Label,
    LabelKind,
    Labels,
    Number,
    Tags,
    Text,
    TextKind,
)
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.profile import ColumnProfile, is_empty
from bert_tasks.errors import DataError
from bert_tasks.init.columns import (
    LABEL_NAMES,
    FileColumns,
    UserHints,
    has_few_tags,
    is_flag,
    is_passage,
    name_rank,
    without_objects,
)
from bert_tasks.tasks import TASKS
from bert_tasks.tasks.base import Task

_COMPARED_ROWS = 300  # the first rows, in which columns must fit together. Converting all rows would take long
_MOST_FAILING = 0.1  # share of the rows
_MOST_FAILING_IF_NAMED = 0.5  # above which a reading with better names than the best is no alternative
_CANDIDATES = 8  # columns of the file for each column of a task
_SHOWN = 8  # alternatives
_CHOICE_NAMES = 2  # rating of the names of single choices, such as A, B and C
_WORD_NAMES = ("word", "words", "token", "tokens")
_PLAIN_LABELS = (Label, Labels, Number)  # kinds of labels that need not fit another column

# A reading whose columns do not fit together: the share of the rows in which they do not, the rating of its names, and
# a sentence with an example.
Dropped = tuple[float, int, str]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A task and the columns of a file that it reads.

    Attributes:
        task: The class of the task.
        columns: For each column of the task, the profile of the column of the file. The label is the last.
        kind: The kind of the label, or None for a corpus.
        settings: The task's settings that follow from the columns.
        names: The sum of the ratings of the columns' names (``name_rank``).
        joined: The number of columns of the file that the label stands for, beyond one.
        alternatives: Other readings that are as good, in words. It is empty if there is no doubt.
        unread: The columns of the file that the task does not read.
    """

    task: type[Task]
    columns: Mapping[str, ColumnProfile]
    kind: ColumnKind | None
    settings: Mapping[str, Any]
    names: int
    joined: int
    alternatives: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def is_related(self) -> bool:
        """True if the label must fit another column."""
        return self.kind is not None and not isinstance(self.kind, _PLAIN_LABELS)

    @property
    def order(self) -> tuple[Any, ...]:
        """The rating of the reading. The highest is the best."""
        return self.is_related, len(self.columns), self.names, self.joined

    @property
    def label(self) -> ColumnProfile | None:
        """The column of the labels, or None for a corpus."""
        if self.kind is None:
            return None
        return list(self.columns.values())[-1]

    @cached_property
    def column_names(self) -> dict[str, str]:
        """The name of the column of the file for each column of the task."""
        return {name: column.name for name, column in self.columns.items()}

    @property
    def separator(self) -> str:
        """The separator of several labels in a cell."""
        if not isinstance(self.kind, Labels) or self.label is None or self.label.lists == 1:
            return LABEL_SEPARATOR
        return self.label.separator

    @cached_property
    def task_columns(self) -> tuple[Column, ...]:
        """The columns of the task with these settings."""
        return self.task.of(**self.settings).columns

    @property
    def texts(self) -> list[str]:
        """The columns of the file whose texts the model reads."""
        kinds = {column.name: column.type for column in self.task_columns}
        return [column.name for name, column in self.columns.items() if isinstance(kinds[name], TextKind)]

    def convert(self, rows: Sequence[Row]) -> Converted:
        """Converts the cells of rows as a run does."""
        sources = [column.name for column in self.columns.values()]
        records = [Record(number, {name: row.get(name) for name in sources}) for number, row in enumerate(rows, 1)]
        options = ReadOptions(columns=self.column_names, label_separator=self.separator)
        conversion = Conversion(self.task_columns, options, require_labels=self.is_related)
        return conversion.convert(Batch.of(records))

    def label_values(self, converted: Converted) -> list[Any]:
        """Returns the labels of the rows that have one, as a run reads them."""
        learned = self.task.of(**self.settings).output.column
        if learned is None:
            return []
        return [value for value in converted.values[learned.name] if value is not None]

    def described(self) -> str:
        """Returns the task and its columns as a recipe names them."""
        columns = ", ".join(f'{column} = "{name}"' for column, name in self.column_names.items())
        return f'task = "{self.task.name}" with {columns}'


def best_reading(rows: Sequence[Row], hints: UserHints) -> tuple[Reading, Sequence[Row]]:
    """Returns the reading that fits a sample of rows best, with the rows as it reads them.

    Raises:
        DataError: There is nothing to read or nothing to learn from, or the best reading cannot be learned.
        UsageError: A column of the hints does not exist.
    """
    columns = FileColumns.of(rows, hints)
    dropped: list[Dropped] = []
    readings = sorted(_readings(columns, dropped), key=lambda reading: reading.order, reverse=True)
    flat = without_objects(rows)
    if not readings and flat != rows:
        # The texts or labels may be values of objects, as in exports of annotation tools.
        return best_reading(flat, hints)
    if not readings:
        raise DataError(_refusal(columns, dropped))
    best, *others = readings
    if hints.label is None:
        _refuse_numbered_tags(best)
    # The order also counts relations and columns, but a user who named columns as usual meant them. So a reading is a
    # tie by its names alone.
    ties = [other for other in others if other.names >= best.names]
    alternatives = [_difference(other, best) for other in ties]
    for failing, names, reason in dropped:
        if failing < _MOST_FAILING_IF_NAMED and names > best.names:
            alternatives.append(f"{reason}. To leave these rows out, name the task with --task")
    if hints.label is None:
        alternatives += _several_tasks(best, ties)
    if hints.label is None and hints.task is None:
        alternatives += _unread_labels(best, columns)
    different = list(dict.fromkeys(alternatives))
    if len(different) > _SHOWN:
        different[_SHOWN:] = [f"{len(different) - _SHOWN} more"]
    return replace(best, alternatives=tuple(different), unread=_unread(best, columns)), columns.rows


def _sources(reading: Reading, columns: FileColumns) -> set[str]:
    """Returns the columns of the file that a reading reads."""
    found: set[str] = set()
    for column in reading.columns.values():
        found |= columns.sources(column)
        found.add(column.name.split(".")[0])
    return found


def _unread(best: Reading, columns: FileColumns) -> tuple[str, ...]:
    """Returns the columns of the file that are not read, without copies of the others and optional columns."""
    read = _sources(best, columns) | {column.name for column in best.task_columns}
    # Without their names, the profiles of a column and of its copy are equal.
    contents = [replace(column, name="") for column in best.columns.values()]
    several = {*columns.label_sets, *columns.choices}
    unread = []
    for column in columns.profiles:
        is_copy = replace(column, name="") in contents
        if column.name not in read and column.name not in several and not is_copy:
            unread.append(column.name)
    return tuple(unread)


def _unread_labels(best: Reading, columns: FileColumns) -> list[str]:
    """Returns the columns that are called labels, but have nothing to learn, such as one value in all rows."""
    read = _sources(best, columns)
    own_names = [column for column in columns.profiles if name_rank(column, LABEL_NAMES) == 3]
    if any(column.name in read for column in own_names):
        return []
    return [f'label = "{column.name}" ({column.described()}), which is not learned' for column in own_names]


def _several_tasks(best: Reading, ties: Sequence[Reading]) -> list[str]:
    """Returns the alternative of a task for each of several columns of classes, if they are a tie."""
    labels: list[str] = []
    for reading in (best, *ties):
        if isinstance(reading.kind, Label) and reading.label is not None and not is_flag(reading.label):
            labels.append(reading.label.name)
    different = list(dict.fromkeys(labels))
    if len(different) < 2:
        return []
    options = " ".join(f"--label {shlex.quote(name)}" for name in different)
    return [f"{len(different)} tasks on one encoder ({options})"]


def _readings(columns: FileColumns, dropped: list[Dropped]) -> Iterator[Reading]:
    """Yields the readings of all tasks, and adds to ``dropped`` the others, each with its share of failing rows."""
    hints = columns.hints
    tasks = [task for task in TASKS.values() if task.row_shapes]
    if hints.task is not None:
        tasks = [TASKS[hints.task]]
    if hints.kind is not None:
        tasks = [task for task in tasks if hints.kind in task.problems.values()]
    for task in tasks:
        for shape in task.row_shapes:
            for reading in _readings_of_shape(task, shape, columns):
                failure = _failure(reading, columns)
                if failure is None:
                    yield reading
                else:
                    dropped.append(failure)


def _readings_of_shape(task: type[Task], shape: Sequence[str], columns: FileColumns) -> Iterator[Reading]:
    """Yields the readings in which each column of a shape is another column of the file that fits it."""
    kinds = {column.name: column.type for column in task.of().columns}
    candidates = _candidates(task, shape, kinds, columns)
    if candidates is None:
        return
    for combination in product(*candidates):
        chosen = dict(zip(shape, combination, strict=True))
        sources: list[str] = []
        for column in combination:
            sources += columns.sources(column)
        is_disjoint = len(set(sources)) == len(sources)
        if not is_disjoint or not _fit_together(task, chosen, kinds) or not _are_in_order(task, chosen, columns):
            continue
        for kind in _kinds_of_label(kinds[shape[-1]], combination[-1], columns):
            yield _reading(task, chosen, kind, columns)


def _candidates(
    task: type[Task], shape: Sequence[str], kinds: Mapping[str, ColumnKind], columns: FileColumns
) -> list[list[ColumnProfile]] | None:
    """Returns the columns of the file that each column of a shape may be, or None if the user named others."""
    hints = columns.hints
    label = None
    if isinstance(kinds[shape[-1]], LabelKind):
        label = shape[-1]
    if label is None and (hints.label is not None or (hints.texts and hints.task is None)):
        return None
    fixed = _stated_columns([name for name in shape if name != label], kinds, columns)
    if fixed is None:
        return None
    if label is not None and hints.label is not None:
        fixed[label] = hints.label
    candidates = []
    for name in shape:
        fitting = columns.fitting(kinds[name], _usual_names(task, name))
        if label is None:
            fitting = columns.corpus
        if name in fixed:
            fitting = [column for column in columns.profiles if column.name == fixed[name]]
        candidates.append(fitting[:_CANDIDATES])
    return candidates


def _stated_columns(
    inputs: Sequence[str], kinds: Mapping[str, ColumnKind], columns: FileColumns
) -> dict[str, str] | None:
    """Returns the columns that the user named for the inputs of a shape, or None if it has another number of them."""
    stated = columns.hints.texts
    names = [name for name in inputs if not isinstance(kinds[name], Choices)]
    if not stated:
        return {}
    if any(isinstance(kind, Answers) for kind in kinds.values()) and len(stated) == 1:
        names = names[-1:]  # the context
    if any(isinstance(kind, Choices) for kind in kinds.values()) and len(stated) == 2:
        names.append("question")
    if len(names) != len(stated):
        return None
    return dict(zip(names, stated, strict=True))


def _usual_names(task: type[Task], name: str) -> Sequence[str]:
    """Returns what a column of a task is usually called, its own name first."""
    if name in task.usual_names:
        return task.usual_names[name]
    if name == "label":
        return LABEL_NAMES
    return ()


def _fit_together(task: type[Task], chosen: Mapping[str, ColumnProfile], kinds: Mapping[str, ColumnKind]) -> bool:
    """Returns True if the profile of the label fits that of the other columns, or if all have usual names."""
    label = list(chosen)[-1]
    # Three columns with a plain label are a pair of texts.
    if isinstance(kinds[label], _PLAIN_LABELS) and len(chosen) == 3:
        first, second, _ = chosen.values()
        varied = first.distinct > 1 and second.distinct > 1
        # Short values that repeat are no second text, but the first may be the query of several.
        return varied and (second.is_text or not second.is_classes)
    if all(column.known in _usual_names(task, name) for name, column in chosen.items()):
        return True
    if isinstance(kinds[label], Tags):
        return has_few_tags(chosen[label], chosen["words"])
    if isinstance(kinds[label], Answers) and chosen[label].known not in _usual_names(task, label):
        return is_passage(chosen["context"], chosen[label])
    return True


def _are_in_order(task: type[Task], chosen: Mapping[str, ColumnProfile], columns: FileColumns) -> bool:
    """Returns True unless two texts of equal rank are better exchanged, by their names or their order in the file."""
    texts = [name for name in chosen if name in ("text", "text_pair")]
    if len(texts) < 2 or columns.hints.texts:
        return True
    first, second = texts
    exchanged = {**chosen, first: chosen[second], second: chosen[first]}
    names = _names_of(task, chosen)
    other_names = _names_of(task, exchanged)
    places = [column.name for column in columns.profiles]
    is_first = places.index(chosen[first].name) < places.index(chosen[second].name)
    return names > other_names or (names == other_names and is_first)


def _names_of(task: type[Task], chosen: Mapping[str, ColumnProfile]) -> int:
    """Rates the names of all columns of a reading."""
    return sum(name_rank(column, _usual_names(task, name)) for name, column in chosen.items())


def _kinds_of_label(kind: ColumnKind, column: ColumnProfile, columns: FileColumns) -> Sequence[ColumnKind | None]:
    """Returns the kinds that a label column may have, of which the only one of a shape without a label is None."""
    if not isinstance(kind, LabelKind):
        return [None]
    if not isinstance(kind, Label):
        return [kind]
    # The shape of a classification stands for its other problems, too. The profile of the column tells them apart.
    return columns.label_kinds(column)


def _reading(
    task: type[Task], chosen: Mapping[str, ColumnProfile], kind: ColumnKind | None, columns: FileColumns
) -> Reading:
    """Returns a reading with its settings, and with optional texts between the first column and the others."""
    settings: Mapping[str, Any] = {}
    if kind is not None:
        settings = task.implied_settings(chosen, kind.name)
    read = dict(chosen)
    taken = [column.name for column in chosen.values()]
    for name, column in _optional_texts(task, columns, taken).items():
        first, *rest = read
        read = {first: read[first], name: column, **{other: read[other] for other in rest}}
    joined = 0
    if kind is not None:
        label, column = read.popitem()
        learned = task.of(**settings).output.column
        if isinstance(kind, _PLAIN_LABELS) and learned is not None:
            label = learned.name  # which depends on the kind
        if isinstance(kind, Choice) and learned is not None:
            kind = learned.type  # which depends on the number of the first choice
        joined = len(columns.sources(column)) - 1
        read[label] = column
    names = _names_of(task, chosen)
    # Columns such as option1 and option2 are a usual name, although none of them is the task's own.
    if any(column.name in columns.choices for column in chosen.values()):
        names += _CHOICE_NAMES
    return Reading(task=task, columns=read, kind=kind, settings=settings, names=names, joined=joined)


def _optional_texts(task: type[Task], columns: FileColumns, taken: Sequence[str]) -> dict[str, ColumnProfile]:
    """Returns the optional texts of a task that no shape has, if the user named them or they are called so."""
    in_shapes: set[str] = set()
    for shape in task.row_shapes:
        in_shapes.update(shape)
    found: dict[str, ColumnProfile] = {}
    for column in task.of().columns:
        if not isinstance(column.type, Text) or column.name in in_shapes:
            continue
        usual = _usual_names(task, column.name)
        for candidate in columns.usable:
            is_meant = candidate.name in columns.hints.texts or candidate.known in usual
            if is_meant and candidate.name not in taken and column.name not in found:
                found[column.name] = candidate
    return found


def _failure(reading: Reading, columns: FileColumns) -> Dropped | None:
    """Returns why a reading is dropped, or None if its columns fit together in almost all rows."""
    label = reading.label
    if not reading.is_related or label is None:
        return None
    rows = [row for row in columns.rows[:_COMPARED_ROWS] if not is_empty(row.get(label.name))]
    converted = reading.convert(rows)
    failing = len(converted.problems)
    most = _MOST_FAILING * len(rows)
    if columns.hints.task is not None:
        most = len(rows) - 1  # for a task that the user named, one row that fits is enough
    if failing <= most and rows:
        return None
    if not rows:
        return 1.0, reading.names, f"{reading.described()} has no row with a label"
    example = next(iter(converted.problems.values()))[0].text
    reason = f"{reading.described()} fails in {failing} of {counted(len(rows), 'row')}: {example.rstrip('.')}"
    return failing / len(rows), reading.names, reason


def _difference(other: Reading, best: Reading) -> str:
    """Returns what a recipe for another reading says instead, such as ``label = "mood"``."""
    if other.task is not best.task:
        return other.described()
    changes = []
    for name, value in other.settings.items():
        if name == "problem_type" and best.settings.get(name) != value:
            changes.append(f'settings.{name} = "{value}"')
    for name, column in other.columns.items():
        if best.columns.get(name) != column:
            changes.append(f'{name} = "{column.name}" ({column.described()})')
    return " with ".join(changes)


def _refuse_numbered_tags(best: Reading) -> None:
    """Raises DataError for tags that are numbers.

    Entities have no types then, and predictions say nothing to a reader.
    """
    label = best.label
    if not isinstance(best.kind, Tags) or label is None or not label.names:
        return
    if not all(name.isdecimal() for name in label.names):
        return
    numbers = sorted(int(name) for name in label.names)
    words = best.columns["words"].name
    raise DataError(
        f"the tags in {label.name!r} are numbers from {numbers[0]} to {numbers[-1]}, and the file does not have their "
        "names, such as 'B-PER'. Write the names into the file, or save a data set with save_to_disk or to_parquet, "
        f"which keep the names. To train on the numbers, add --text {shlex.quote(words)} --label "
        f"{shlex.quote(label.name)}"
    )


def _refusal(columns: FileColumns, dropped: Sequence[Dropped]) -> str:
    """Returns the message for a file that no task fits."""
    hints = columns.hints
    has_text = any(column.is_text for column in columns.usable)
    missing = "no column to learn (labels, numbers, tags or answers)" if has_text else "no column of texts"
    if hints.task is not None:
        missing = f"the columns do not fit {hints.task}, which needs {TASKS[hints.task].row_needs}"
    elif hints.texts or hints.label is not None:
        missing = f"the columns do not fit any task that init knows, as there is {missing}"
    if len(columns.rows) == 1:
        missing = f"the only row does not say what is learned, as there is {missing}"
    lines = [f"{missing}. The columns are:"]
    for column in columns.profiles:
        lines.append(f"  {column.name!r}: {column.described()}")
    if any(column.known in _WORD_NAMES and column.words <= 1 for column in columns.profiles):
        lines.append("  If each row has one word, write a row for each sentence, with a list of words and one of tags.")
    if dropped:
        # The reading that was nearest to fitting helps most.
        failing, _, reason = min(dropped, key=lambda reading: (reading[0], -reading[1]))
        lines.append(f"  {reason}")
        if failing < 1 and hints.task is None:
            lines.append("  To leave these rows out, name the task with --task.")
    lines.append("  Name the columns with --text and --label, or write a recipe by hand")
    return "\n".join(lines)
