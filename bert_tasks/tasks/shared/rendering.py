"""The written form of predictions, with vectors and file formats of a task."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_type_hints

from bert_tasks.data.columns import Row
from bert_tasks.data.writers import FORMS
from bert_tasks.encoder.config import EncoderConfig
from bert_tasks.errors import UsageError
from bert_tasks.tasks.base import ON_REQUEST, Part, Prediction

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_CHARACTERS = 10_000_000  # of the repeated texts of a row or a request, see ``check_rows``


class Rendering(Part):
    """The formats of a task's predictions.

    Attributes:
        file_formats: Extensions that ``render`` knows.
        row_formats: Formats in which predictions can be written row by row.
        renders_labels: True if ``render`` writes the labels of the rows beside the predictions.
        formats_with_columns: Extensions for which ``render`` reads further columns of a row, in ``PASSTHROUGH``.

    Example:
        >>> Rendering.of(task).prediction_fields
        ('label', 'score', 'scores')
    """

    file_formats: ClassVar[tuple[str, ...]] = ()
    row_formats: ClassVar[tuple[str, ...]] = FORMS
    renders_labels: ClassVar[bool] = False
    formats_with_columns: ClassVar[tuple[str, ...]] = ()

    @property
    def prediction_type(self) -> type[Prediction]:
        """The dataclass of the task's predictions. Default: the type argument of ``Task``."""
        for base in type(self.task).__mro__:
            for argument in (arg for generic in getattr(base, "__orig_bases__", ()) for arg in get_args(generic)):
                if isinstance(argument, type) and issubclass(argument, Prediction):
                    return argument
        return Prediction

    @property
    def prediction_fields(self) -> tuple[str, ...]:
        """The fields that predictions with these settings have, without those that are computed on request only."""
        names = [field.name for field in fields(self.prediction_type) if not field.metadata.get("exclude")]
        return tuple(name for name in names if name not in ON_REQUEST)

    def vector_columns(self, config: EncoderConfig) -> Mapping[str, int]:
        """Returns the fields of ``to_json`` that are vectors, as base64 of float32 numbers, and their sizes."""
        return {}

    def columns_of(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the fields of ``to_json`` as the columns of files and batches. Default: unchanged."""
        return content

    @property
    def column_types(self) -> Mapping[str, tuple[Any, Sequence[str]]]:
        """The type of each column of ``columns_of``, and the labels that are keys in it.

        Raises:
            TypeError: The task does not say what its predictions hold.
        """
        if not self.prediction_fields:
            raise TypeError(f"{self.task.name} does not say what its predictions hold")
        hints = get_type_hints(self.prediction_type)
        return {name: (hints[name], self.task.labels) for name in self.prediction_fields}

    @property
    def reserved_names(self) -> frozenset[str]:
        """All columns that predictions can have, including columns on request."""
        return frozenset(field.name for field in fields(self.prediction_type))

    def with_texts(self, predictions: Sequence[Any], tokenizer: "PreTrainedTokenizerBase") -> Sequence[Any]:
        """Returns the predictions with the texts of tokens that they name by id. Default: unchanged."""
        return predictions

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Checks a row, or the rows of a request, before they are predicted. Default: all rows are accepted.

        A task that repeats a text for each part of its row overrides this method, because the length of the repeated
        texts grows with the square of the row.

        Raises:
            DataError: The repeated texts have more than ``MOST_CHARACTERS``.
        """

    def check(self, extension: str, rows: Iterable[Row]) -> tuple[str, ...]:
        """Checks rows that ``render`` will get, before they are predicted.

        Args:
            extension: One of ``file_formats``.
            rows: The rows in the order of their predictions.

        Returns:
            Sentences about what the format cannot hold, so that ``render`` changes it.

        Raises:
            DataError: The format cannot hold these rows.
        """
        return ()

    def render(self, extension: str, predictions: Sequence[Any], rows: Sequence[Row]) -> Mapping[str, str]:
        """Returns the predictions in one of ``file_formats``.

        Returns:
            Mapping from the suffix of a file name to the text of the file. The suffix "" is the requested file.

        Raises:
            UsageError: The task does not have this format.
        """
        raise UsageError(f"{self.task.name} has no output format {extension!r}")
