"""Examples, the name on the hub and limits of a task for server and model cards."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from bert_tasks.data.columns import Row, text_columns
from bert_tasks.tasks.base import Part, Task

TEXTS = (
    "The room was clean and the staff were kind.",
    "We waited an hour and the soup was cold.",
    "The train leaves at nine from platform two.",
)


class Card(Part):
    """Description of a task for readers of a model card and visitors of the server.

    Attributes:
        pipeline_tag: The name of the task on the hub. None if the hub has none.
        rejected_columns: Columns that a request to the server must not hold -> the reason.

    Example:
        >>> Card.of(task).pipeline_tag
        'text-classification'
    """

    pipeline_tag: ClassVar[str | None] = None
    rejected_columns: ClassVar[Mapping[str, str]] = MappingProxyType({})

    @property
    def example_rows(self) -> Sequence[Row]:
        """Three rows without labels, in plain English."""
        columns = [column for column in self.task.columns if column.required]
        return [{column.name: column.type.parse(text) for column in columns} for text in TEXTS]

    def pipeline_inputs(self, row: Row) -> Sequence[Any]:
        """Returns the arguments of a tokenizer of transformers for a row, which are texts or lists of texts."""
        return [row[column.name] for column in self.task.columns if column.required]

    @property
    def limits(self) -> tuple[str, ...]:
        """Sentences about what these settings do not read, in addition to ``max_length``."""
        return ()


def example_rows_of(tasks: Mapping[str, Task], columns: Mapping[str, Mapping[str, str]]) -> Sequence[Row]:
    """Returns three rows with the inputs of all heads. Tasks of a single text read the same text.

    Args:
        tasks: The task of each head by its name.
        columns: Name of a head -> the columns of its task -> their names in the rows, if they differ. An only task has
            its own names.
    """
    if "" in tasks:
        return Card.of(tasks[""]).example_rows
    rows: list[Row] = []
    for number, text in enumerate(TEXTS):
        row: dict[str, Any] = {}
        for name, task in tasks.items():
            example, texts = Card.of(task).example_rows[number], text_columns(task.columns)
            if len(texts) == 1:
                example = {texts[0]: text}
            for column, value in example.items():
                row[columns[name].get(column, column)] = value
        rows.append(row)
    return rows
