"""Examples, the name on the hub and limits of a task for server and model cards."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from pydantic import Field

from bert_tasks.data.columns import Row
from bert_tasks.tasks.base import Part

TopK = Annotated[int, Field(ge=1)]  # the hub's parameter for the number of predictions
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
        hub_nests: True if the hub returns a list of answers for a single input, too.

    Example:
        >>> Card.of(task).pipeline_tag
        'text-classification'
    """

    pipeline_tag: ClassVar[str | None] = None
    rejected_columns: ClassVar[Mapping[str, str]] = MappingProxyType({})
    hub_nests: ClassVar[bool] = False

    @property
    def example_rows(self) -> Sequence[Row]:
        """Three rows without labels, in plain English."""
        columns = [column for column in self.task.columns if column.required]
        return [{column.name: column.type.parse(text) for column in columns} for text in TEXTS]

    def pipeline_inputs(self, row: Row) -> Sequence[Any]:
        """Returns the arguments of a tokenizer of transformers for a row, which are texts or lists of texts."""
        return [row[column.name] for column in self.task.columns if column.required]

    @property
    def hub_parameters(self) -> Mapping[str, Any] | None:
        """Parameters that ``hub_answer`` reads -> their types. None if the hub has no form for these predictions."""
        return None

    def hub_answer(self, prediction: Any, parameters: Mapping[str, Any]) -> Any:
        """Returns a prediction as the hub's inference API writes it.

        Source: https://huggingface.co/docs/inference-providers/tasks/index.

        Args:
            prediction: A prediction of the task.
            parameters: Values of ``hub_parameters``.
        """
        raise NotImplementedError

    @property
    def limits(self) -> tuple[str, ...]:
        """Sentences about what these settings do not read, in addition to ``max_length``."""
        return ()
