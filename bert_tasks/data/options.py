"""The options with which rows are read, which the command line, recipes and public functions share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar, Literal, TypedDict, get_args

from bert_tasks.data.cells import joined_names
from bert_tasks.data.issues import did_you_mean
from bert_tasks.errors import DataError, UsageError

Document = Literal["blank-line", "line", "file"]  # a document in a file of text
SplitName = Literal["train", "validation", "test"]


class ReadingArguments(TypedDict, total=False):
    """Keyword arguments of public functions to read data, as in `ReadOptions`."""

    columns: Mapping[str, Any] | None
    format: str | None
    delimiter: str | None
    encoding: str | None
    header: bool | None
    label_separator: str | None
    split_column: str | None


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options to read a file.

    Attributes:
        columns: The task's columns -> the file's columns, if the names differ. The columns of CoNLL files are numbers,
            "0" for the words. ``document.text`` is a text inside an object. Several names, in a list or with commas
            between them, are labels of 0 and 1 or choices in columns of their own.
        format: Name of a format, such as ``glue/sst2``. Default: by the file's extension.
        delimiter: Delimiter of a csv file, ``\\t`` for a tab. Default: as the extension says.
        encoding: Encoding of a text file, unless its byte order mark says another. Default: UTF-8.
        header: True if the first line of a csv file names the columns. Default: true. Otherwise they are "0", "1", ...
        label_separator: Separator of several labels in one cell. Default: ``;``.
        document: A document in a file of text, which is the lines between blank lines ("blank-line"), a "line", or the
            "file". Default: "blank-line" for training and evaluation, "line" for prediction.
        split_column: Column with the split of each row, such as ``split`` with train, dev (or validation) and test.
            Training uses the train rows and validates on the dev rows. Evaluation and prediction read the test rows.
            Default: all rows.
        split: The split that is read if ``split_column`` is set. Default: the test rows.

    Raises:
        DataError: ``document`` has another value.

    Examples:
        >>> evaluate("runs/first", "reviews.csv", columns={"text": "review"}, delimiter=";")
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    columns: Mapping[str, Any] | None = None
    format: str | None = None
    delimiter: str | None = None
    encoding: str | None = None
    header: bool | None = None
    label_separator: str | None = None
    document: Document | None = None
    split_column: str | None = None
    split: SplitName | None = None

    def __post_init__(self) -> None:
        if self.columns is not None:
            object.__setattr__(self, "columns", joined_names(self.columns))
        if self.delimiter == "\\t":  # neither a shell nor a literal string of TOML makes a tab of it
            object.__setattr__(self, "delimiter", "\t")
        if self.document is not None and self.document not in get_args(Document):
            raise DataError(f"document = {self.document!r} is not one of {', '.join(map(repr, get_args(Document)))}")

    @classmethod
    def from_arguments(
        cls, function: Callable[..., object], arguments: ReadingArguments, *, document: Document | None = None
    ) -> "ReadOptions":
        """Returns the options from keyword arguments of a public function.

        Raises:
            UsageError: An argument is unknown. The message suggests a similar one.
        """
        # Python checks the names of its own parameters, but not the keys of a TypedDict in ``**arguments``.
        options = ReadingArguments.__annotations__
        for name in arguments:
            if name not in options:
                hint = did_you_mean(name, {**signature(function).parameters, **options})
                raise UsageError(f"{function.__name__}: unknown argument '{name}'{hint}")
        return cls(**arguments, document=document)
