"""Saved data sets of ``datasets``."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from bert_tasks.data.batch import Batches
from bert_tasks.data.formats.base import Format
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.parsers import dataset_batches


class DatasetFormat(Format):
    """The folder of a ``datasets.Dataset`` on disk. Class ids become names."""

    is_text: ClassVar[bool] = False
    can_stream: ClassVar[bool] = False

    def reads_folder(self, path: Path) -> bool:
        """Returns True for a folder that ``save_to_disk`` of a ``datasets.Dataset`` wrote."""
        return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()

    def files(self, path: Path) -> tuple[Path, ...]:
        return tuple(sorted(file for file in path.iterdir() if file.is_file()))

    @contextmanager
    def parse(
        self, path: Path, options: ReadOptions, *, columns_to_read: Sequence[str] | None = None
    ) -> Iterator[Batches]:
        import datasets  # here, because the import takes more than a second

        yield dataset_batches(datasets.load_from_disk(path))


ALL: tuple[Format, ...] = (DatasetFormat(name="datasets", extensions=()),)
