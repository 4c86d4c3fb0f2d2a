"""Three rows with the inputs of all heads of a model, for the server and for model cards."""

from collections.abc import Mapping, Sequence
from typing import Any

from bert_tasks.data.columns import Row, text_columns
from bert_tasks.tasks.base import TEXTS, Task


def example_rows_of(tasks: Mapping[str, Task], columns: Mapping[str, Mapping[str, str]]) -> Sequence[Row]:
    """Returns three rows with the inputs of all heads. Tasks of a single text read the same text.

    Args:
        tasks: The task of each head by its name.
        columns: Name of a head -> the columns of its task -> their names in the rows, if they differ. An only task has
            its own names.
    """
    if "" in tasks:
        return tasks[""].example_rows
    rows: list[Row] = []
    for number, text in enumerate(TEXTS):
        row: dict[str, Any] = {}
        for name, task in tasks.items():
            example, texts = task.example_rows[number], text_columns(task.columns)
            if len(texts) == 1:  # so that the tasks of a model can share the column
                example = {texts[0]: text}
            for column, value in example.items():
                row[columns[name].get(column, column)] = value  # under the name that the rows of the model have
        rows.append(row)
    return rows
