"""Formats of files that hold the predictions of all rows in a form of their own, such as the files of SQuAD."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bert_tasks.data.columns import Row


def _accept(output: Any, extension: str, rows: Iterable[Row]) -> tuple[str, ...]:
    """Accepts all rows, and says that the format can hold everything."""
    return ()


@dataclass(frozen=True, kw_only=True)
class FileFormat:
    """A format of files of predictions.

    Most predictions are written row by row (``Output.row_formats``), which needs no memory for all of them. A format of
    this class gets all predictions at once, for a file that cannot be written otherwise, such as one JSON object with
    the answers to all questions. ``Output.files`` lists the formats of an output.

    Attributes:
        render: Called with the output, the extension, the predictions and their rows. Returns the text of each file by
            the suffix of its name. The suffix "" is the file that the user has named.
        check: Called with the output, the extension and the rows, before they are predicted. Returns sentences about
            what the format cannot hold, so that ``render`` changes it, or raises DataError. Default: accepts all rows.
        with_labels: True if the labels of the rows are written beside the predictions.
        with_other_columns: True if ``render`` reads further columns of a row, in ``RECORD``.

    Examples:
        >>> Tags.files[".conll"].with_labels
        True
    """

    # Functions of any output, because a format does not know the class whose predictions it holds.
    render: Callable[[Any, str, Sequence[Any], Sequence[Row]], Mapping[str, str]]
    check: Callable[[Any, str, Iterable[Row]], tuple[str, ...]] = _accept
    with_labels: bool = False
    with_other_columns: bool = False
