"""Which task a table of rows seems to be for, and why: every built-in task is asked, and the best answer is taken."""

from collections.abc import Sequence
from dataclasses import replace

from bert_tasks.data.columns import Row
from bert_tasks.data.problems import did_you_mean
from bert_tasks.data.profile import ColumnProfile, profile
from bert_tasks.errors import DataError
from bert_tasks.tasks import TASKS
from bert_tasks.tasks.detection import LABEL_NAMES, NO_HINTS, Guess, Hints

DETECTABLE = tuple(name for name, task in TASKS.items() if task.row_needs)


def guess_task(rows: Sequence[Row], hints: Hints = NO_HINTS) -> Guess:
    """The task that fits the rows best.

    Args:
        rows: A sample of the rows of a file.
        hints: What the user says about them.

    Returns:
        The task, with other tasks that fit among the alternatives.

    Raises:
        DataError: There is nothing to read or nothing to learn from; it says what there is.
    """
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name.strip()]
    for name in (*hints.texts, *([] if hints.label is None else [hints.label])):
        if name not in names:
            raise DataError(f"no column {name!r}{did_you_mean(name, names)}; there are {', '.join(map(repr, names))}")
    profiles = [
        profile(name, [row.get(name) for row in rows], hints.separator if name == hints.label else None)
        for name in names
    ]
    tasks = TASKS.values() if hints.task is None else [TASKS[hints.task]]
    guesses = [guess for task in tasks for guess in [task.detect(profiles, rows, hints)] if guess is not None]
    if not guesses:
        raise _nothing_fits(profiles, hints)
    best, *others = sorted(guesses, key=lambda guess: -guess.precedence)
    alternatives = list(best.alternatives)
    if hints.task is None and (hints.label is None or not hints.texts):
        for other in others:
            # Another task may be meant if it learns a column of its own that has a usual name for labels.
            label = list(other.columns.values())[-1]
            if label not in best.columns.values() and label.strip().lower() in LABEL_NAMES:
                columns = ", ".join(f'{column} = "{name}"' for column, name in other.columns.items())
                alternatives.append(f'task = "{other.task}" with {columns}')
    return replace(best, alternatives=tuple(alternatives))


def _nothing_fits(profiles: Sequence[ColumnProfile], hints: Hints) -> DataError:
    has_text = any(column.is_text for column in profiles)
    missing = "no column to learn (labels, numbers, tags or answers)" if has_text else "no column of texts"
    if hints.task is not None or hints.texts or hints.label is not None:
        task = "no task that init knows" if hints.task is None else hints.task
        needs = missing if hints.task is None else TASKS[hints.task].row_needs
        missing = f"the columns do not fit {task}: {needs}"
    seen = "".join(f"\n  {column.name!r}: {column.described()}" for column in profiles)
    return DataError(
        f"{missing}; there are{seen}\n  name the columns with --text and --label, or write a recipe by hand"
    )
