"""Detection of tasks for ``init``, in rows of unknown columns.

Owns the types and the small readers of cells that the rules of several tasks share. Each task has its rules in a module
beside this one.
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bert_tasks.data.cells import LABEL_SEPARATOR, label_value
from bert_tasks.data.kinds import KINDS
from bert_tasks.data.problems import RowError
from bert_tasks.data.profile import ColumnProfile, pieces
from bert_tasks.data.split_column import SPLIT_COLUMNS

COMPARED_ROWS = 1000  # in which two columns must fit together

# Names that people give to the column of the labels, in lower case.
LABEL_NAMES = (
    *("label", "labels", "class", "category", "target", "gold_label", "y", "score", "similarity", "rating"),
    *("sentiment", "polarity", "intent", "topic", "relation", "relevant", "is_duplicate"),
    *("quality", "emotion", "stance", "topics", "tags", "categories", "classes", "intents", "emotions"),
)
QUESTION_NAMES = ("question", "query")
_REFERENCE_NAMES = ("id", "ids", "uid", "uuid", "guid", "idx", "index", "url", "uri", "link", "date", "timestamp", "at")
_WORD_OF_NAME = re.compile(r"[^\W\d_]+")
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

_LENGTHS = (32, 48, 64, 96, 128, 192, 256, 384, 512)
_TOKENS_PER_WORD = 1.3
_SPECIAL_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class TaskGuess:
    """A task that fits.

    Attributes:
        columns: The task's columns -> columns of the rows.
        settings: The task's fields that follow from the rows.
        words: Maximum number of words of 95 of 100 rows, over all texts that are read together.
        labels: The different labels, sorted.
        reasons: Observations and conclusions.
        alternatives: Other readings. Empty if there is no doubt.
        spare: (task's column, column, remark) of columns that could be read instead or as well.
        separator: Separator of several labels in a cell.
        precedence: Among guesses of several tasks the highest wins. Rows with a tag for each word are also rows with
            two columns of text, so the more demanding task has the higher precedence.
    """

    task: str
    columns: Mapping[str, str]
    words: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    alternatives: tuple[str, ...] = ()
    spare: tuple[tuple[str, str, str], ...] = ()
    separator: str = LABEL_SEPARATOR
    precedence: int = 0


@dataclass(frozen=True, kw_only=True)
class UserHints:
    """The user's hints about the rows. Unset hints are detected.

    Attributes:
        task: A name of the task.
        name: The name of the task in the recipe, if it is one of several tasks.
        texts: Columns with one text or two, the words, or the question and its context.
        problem: The predicted value, for tasks with ``Task.problems``.
        label: The column of the labels, numbers, tags or answers.
        separator: Separator of several labels in a cell of that column.
    """

    task: str | None = None
    name: str = ""
    problem: str | None = None
    texts: tuple[str, ...] = ()
    label: str | None = None
    separator: str | None = None


NO_HINTS = UserHints()


class Suggestion(NamedTuple):
    """A setting that ``init`` writes into a recipe.

    Attributes:
        comment: why, in a few words.
        is_active: False for a line that the user may uncomment.
    """

    name: str
    value: object
    comment: str
    is_active: bool = True


def name_words(column: ColumnProfile) -> list[str]:
    """Returns the words in a column's name, in lower case.

    Example:
        "user_id" and "userId" have the words user and id.
    """
    return [word.lower() for word in _WORD_OF_NAME.findall(_CAPITAL.sub("_", column.name))]


def is_reference(column: ColumnProfile) -> bool:
    """Returns True for ids, dates, web addresses and numbers of folds, which are neither texts nor labels.

    Example:
        "userId" and "created_at" are references, "label_id" is not.
    """
    if column.is_reference:
        return True
    words = name_words(column)
    if column.is_text or not words:
        return False
    if column.known in SPLIT_COLUMNS and column.is_number:
        return True
    return words[-1] in _REFERENCE_NAMES and not set(words).intersection(LABEL_NAMES)


def is_flag(column: ColumnProfile) -> bool:
    """Returns True if each cell of a column is 0 or 1, as those of one label among several are."""
    return column.filled == column.rows and {label_value(value) for value, _ in column.common} == {0.0, 1.0}


def needed_tokens(words: int) -> float:
    """Returns the number of tokens for words, in a language of the tokenizer."""
    return words * _TOKENS_PER_WORD + _SPECIAL_TOKENS


def suggested_length(words: int, longest: int) -> int:
    """Returns a ``max_length`` for texts of this number of words, at most ``longest``."""
    return min(next((length for length in _LENGTHS if length >= needed_tokens(words)), _LENGTHS[-1]), longest)


def cell_value(row: Mapping[str, Any], column: str, kind_name: str) -> Any:
    """Returns the cell in canonical form, or None if it is missing or of another type."""
    try:
        return KINDS[kind_name].parse(row.get(column))
    except RowError:
        return None


def other_columns(
    columns: Mapping[str, str], others: Iterable[Mapping[str, str]], profiles: Sequence[ColumnProfile]
) -> tuple[str, ...]:
    """Returns alternatives of ``TaskGuess`` for columns that match equally well.

    Args:
        columns: The task's columns -> the chosen ones.
        others: Other choices. Those that differ from the chosen one in a single column are reported.
        profiles: The profiles of all columns.
    """
    described = {column.name: column.described() for column in profiles}
    changes = [other.items() - columns.items() for other in others if other.keys() == columns.keys()]
    single = dict.fromkeys(item for change in changes if len(change) == 1 for item in change)
    return tuple(f'{task} = "{name}"' + (f" ({described[name]})" if name in described else "") for task, name in single)


def several_tasks(label: str, others: Sequence[str]) -> tuple[str, ...]:
    """Returns the alternative of a task for each of several columns of labels."""
    options = " ".join(f"--label {shlex.quote(name)}" for name in (label, *others))
    return (f"{len(others) + 1} tasks on one encoder ({options})",) if others else ()


def count_pieces(row: Mapping[str, Any], columns: Sequence[str]) -> int:
    """Returns the number of words and punctuation marks in these columns together."""
    return sum(pieces(row[name]) for name in columns if isinstance(row.get(name), str))
