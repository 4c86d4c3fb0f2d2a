"""Detects rows of texts without labels."""

from collections.abc import Sequence

from bert_tasks.data.columns import Row
from bert_tasks.data.profile import ColumnProfile, percentile
from bert_tasks.tasks.detection.base import TaskGuess, UserHints, count_pieces

_FEWEST_WORDS = 2  # in a text on average, because shorter texts are names


def guess_corpus(
    task: str, profiles: Sequence[ColumnProfile], rows: Sequence[Row], hints: UserHints
) -> TaskGuess | None:
    """Returns the column of the texts, or None if there is no such column, or several. See ``Task.guess``.

    Args:
        task: The name of the task.
        profiles: Content of each column.
        rows: A sample of the rows.
        hints: The user's options for the columns.
    """
    if hints.label is not None or (hints.texts and hints.task is None):
        return None
    columns = [column for column in profiles if column.name in hints.texts]
    if not hints.texts:  # ids and constants say nothing about a text
        columns = [column for column in profiles if not column.is_id and column.distinct > 1]
    if len(columns) != 1:
        return None
    (column,) = columns
    if column.is_number or column.nested or column.distinct < 2 or column.words < _FEWEST_WORDS:
        return None
    return TaskGuess(
        task=task,
        columns={"text": column.name},
        words=percentile([count_pieces(row, [column.name]) for row in rows]),
        reasons=(f"{column.name}: texts of {column.words:.0f} words on average, and nothing to learn beside them",),
    )
