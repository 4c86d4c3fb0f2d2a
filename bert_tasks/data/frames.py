"""Rows that lie in memory as something else than a list of dicts: pandas DataFrames and data sets of `datasets`.

Owns what of these is understood, and what is said of all else. Must not know tasks or files; pandas need not be there.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from bert_tasks.data.columns import Row
from bert_tasks.data.records import dataset_records
from bert_tasks.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset


Given = TypeVar("Given")  # a row as the caller wrote it: a dict, a text, a tuple of texts


class Frame(Protocol):
    """A table with named columns: a pandas DataFrame or a `datasets.Dataset`."""

    @property
    def shape(self) -> Any: ...

    def __len__(self) -> int: ...


def rows_in_memory(data: Iterable[Given] | Frame, source: str = "rows") -> Iterable[Given | Row]:
    """The rows of a list of dicts or texts, which are not looked at, of a DataFrame, or of a Dataset (classes by name).

    Raises:
        DataError: it is something else, or a column of a DataFrame holds values of several types.
    """
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

    if isinstance(data, DatasetDict | IterableDatasetDict):
        raise DataError(f"{source}: a {type(data).__name__} holds several splits: give one of {', '.join(data)}")
    if isinstance(data, IterableDataset):
        raise DataError(f"{source}: an IterableDataset has no length: give list(data), or a Dataset")
    if hasattr(data, "iloc") and hasattr(data, "columns"):
        data = _of_pandas(data, source)
    if isinstance(data, Dataset):
        return [record.cells for record in dataset_records(data).rows]
    if isinstance(data, Iterable):
        return data
    raise DataError(
        f"{source}: expected a file, a list of dicts such as {{'text': '...'}}, a pandas DataFrame or a "
        f"datasets.Dataset, not {type(data).__name__}"
    )


def _of_pandas(frame: Any, source: str) -> "Dataset":
    """Missing values become None; the index, which is no column, is left out."""
    import pyarrow
    from datasets import Dataset

    try:
        return Dataset.from_pandas(frame.rename(columns=str), preserve_index=False)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError) as error:
        raise DataError(f"{source}: the DataFrame has a column of mixed types ({error}); give it one type") from error
