"""Folders of text files, whose names are the labels of the texts.

The reviews of IMDB (https://ai.stanford.edu/~amaas/data/sentiment/) have this form.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from bert_tasks.data import limits
from bert_tasks.data.batch import Batches, Record, Records
from bert_tasks.data.formats.base import Format
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.parsers import RowLines, open_text

_SPLITS = ("train", "dev", "valid", "validation", "test", "unsup")  # folders of the parts of a data set


class TextFolderFormat(Format):
    """A folder with a folder of .txt files for each label. A file is a text, ``pos/1.txt`` has the label ``pos``."""

    is_text: ClassVar[bool] = True
    can_stream: ClassVar[bool] = False

    def files(self, path: Path) -> tuple[Path, ...]:
        files: list[Path] = []
        for folder in self._folders(path):
            files += sorted(folder.glob("*.txt"))
        return tuple(files)

    def reads_folder(self, path: Path) -> bool:
        return len(self._folders(path)) > 1

    def _folders(self, path: Path) -> list[Path]:
        """Returns the folders of the labels. A folder of a split, or of brat's files, is none of them."""
        inside = [folder for folder in sorted(path.iterdir()) if folder.is_dir() and folder.name not in _SPLITS]
        return [folder for folder in inside if any(folder.glob("*.txt")) and not any(folder.glob("*.ann"))]

    @contextmanager
    def parse(
        self, path: Path, options: ReadOptions, *, columns_to_read: Sequence[str] | None = None
    ) -> Iterator[Batches]:
        yield Records(("text", "label"), self._text_rows(path, options)).in_batches()

    def _text_rows(self, path: Path, options: ReadOptions) -> Iterator[Record]:
        """Yields a row with the text and the label of each file."""
        for file in self.files(path):
            with open_text(file, encoding=options.encoding, newline="") as opened:
                text = RowLines(opened, file, limits.LARGEST_ROW).rest()
            cells = {"text": text.strip(), "label": file.parent.name}
            # A file is one row, so its line is always 1, and messages name the file instead.
            yield Record(1, cells, file=str(file.relative_to(path.parent)))


ALL: tuple[Format, ...] = (TextFolderFormat(name="text-folder", extensions=()),)
