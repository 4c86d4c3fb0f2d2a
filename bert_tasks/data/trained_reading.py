"""How the file of a model's training rows was read, for files that are read later."""

import codecs
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

from bert_tasks.data.cells import LABEL_SEPARATOR
from bert_tasks.data.formats import file_format, uncompressed
from bert_tasks.data.readers import ReadOptions
from bert_tasks.data.records import Document
from bert_tasks.errors import DataError

_DEFAULTS = {"encoding": "utf-8", "header": True, "label_separator": LABEL_SEPARATOR, "document": "blank-line"}


@dataclass(frozen=True, kw_only=True)
class TrainedReading:
    """The options with which the file of a model's training rows was read.

    The model stores them, and a file with the same extension is read in the same way. None stands for the default.

    Attributes:
        extension: The extension of the first file, without ``.gz``. None for rows of the hub or in memory.
        format, delimiter, encoding, header, label_separator, document: See `ReadOptions`.
        on_error: "skip" if training skipped rows that cannot be used.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    extension: str | None = None
    format: str | None = None
    delimiter: str | None = None
    encoding: str | None = None
    header: bool | None = None
    label_separator: str | None = None
    document: Document | None = None
    on_error: Literal["fail", "skip"] = "fail"

    def __post_init__(self) -> None:
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise ValueError(f"delimiter {self.delimiter!r} is not one character")
        if self.label_separator == "":
            raise ValueError("label_separator is empty")
        if self.on_error not in ("fail", "skip"):
            raise ValueError(f"on_error is {self.on_error!r}, expected 'fail' or 'skip'")
        if self.document is not None and self.document not in get_args(Document):
            raise ValueError(f"document is {self.document!r}")
        if self.encoding is not None:
            try:
                codecs.lookup(self.encoding)
            except (LookupError, ValueError):  # also a name with a null character
                raise ValueError(f"there is no encoding {self.encoding!r}") from None

    @classmethod
    def of(cls, options: ReadOptions, train: str | Path | None, on_error: Literal["fail", "skip"]) -> Self:
        """Returns the options of a training file that differ from the defaults.

        Args:
            options: The options that read the file.
            train: The first file of training rows. None for rows of the hub or in memory.
            on_error: What training did with rows that cannot be used.
        """
        if train is None:
            return cls(on_error=on_error)
        stated = {name: getattr(options, name) for name in _NAMES if name != "format"}
        changed = {name: value for name, value in stated.items() if value != _DEFAULTS.get(name)}
        path, format = Path(train), options.format
        if format == _usual_format(path):
            format = None
        return cls(extension=extension_of(path), format=format, on_error=on_error, **changed)

    def stored(self) -> dict[str, Any]:
        """Returns the content of config.json, without defaults."""
        default = TrainedReading()
        return {name: value for name, value in asdict(self).items() if value != getattr(default, name)}

    def missing_options(self, options: ReadOptions, path: Path) -> dict[str, Any]:
        """Returns the stored options that apply to a file and that ``options`` leave open.

        None apply to a file with another extension, or with another format that ``options`` set.
        """
        is_other_format = options.format not in (None, self.format)
        if self.extension is None or extension_of(path) != self.extension or is_other_format:
            return {}
        stored = {name: getattr(self, name) for name in _NAMES}
        return {name: value for name, value in stored.items() if value is not None and getattr(options, name) is None}

    def without_document(self) -> Self:
        """Returns the options for a file whose lines are texts to predict, each of them alone."""
        return replace(self, document=None)


_NAMES = tuple(field.name for field in fields(TrainedReading) if field.name not in ("extension", "on_error"))


def extension_of(path: Path) -> str:
    """Returns the extension of a file in lower case, without ``.gz``."""
    return uncompressed(path).suffix.lower()


def _usual_format(path: Path) -> str | None:
    """Returns the format that a file is read in by default. None if there is none."""
    try:
        return file_format(None, path).name
    except DataError:
        return None
