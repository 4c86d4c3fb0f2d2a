"""Where predictions are written, and under which names of columns.

The module owns the options of writing, the checks of an output before a model is loaded, and the result of a written
prediction. The sinks in sinks.py write.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import combinations
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from bert_tasks.data.arrow import read_batches
from bert_tasks.data.cells import is_encodable
from bert_tasks.data.columns import REJECT, PassthroughColumns
from bert_tasks.data.issues import counted, first_few
from bert_tasks.data.rows import Rows
from bert_tasks.data.unknown_tokens import UnknownTokens
from bert_tasks.data.writers import DELIMITERS, FORMS, check_place, is_special, whole_file
from bert_tasks.errors import DataError, UsageError, argument
from bert_tasks.metrics.tables import on_one_line
from bert_tasks.model.inputs import Data
from bert_tasks.model.multitask import AnyModel
from bert_tasks.outputs.prediction import Prediction, float_list
from bert_tasks.storage import check_path
from bert_tasks.tasks import TASKS
from bert_tasks.tasks.base import Task

LINE = "line"
Progress = Callable[[int, int | None], None]  # called with the number of completed rows and, if known, of all rows
_MOST_LABELS = 10  # in the line of the counts of labels
INPUT = "input."  # before the name of a column that a prediction's field has too


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """The content and the form of the rows that ``predict_file`` and ``embed_file`` write.

    Attributes:
        keep_columns: Columns of the input to write before the prediction: "all" (default), "none", or a sequence of
            names. A column with the name of a field of the prediction is called ``input.NAME``. A column that the
            prediction repeats is skipped.
        on_error: "fail" (default) raises DataError for rows that cannot be used. "skip" leaves them out, and writes the
            ``line`` of every other row, so that rows and predictions can be joined.
        rejects: The file for skipped rows, with a line of JSON and the reason for each of them. Default: the output's
            name followed by ``.rejects.jsonl``.
        csv_raw: True to write texts that a spreadsheet would read as a formula unchanged. Default: False, which puts an
            apostrophe in front of them, because a formula in a file from elsewhere can run commands ("CSV injection",
            https://owasp.org/www-community/attacks/CSV_Injection).
        format: jsonl, csv, tsv or parquet, if the output's name does not say it. Default: by the extension, and jsonl
            for a stream.

    Examples:
        >>> writing = WriteOptions(keep_columns=("text",), on_error="skip")
        >>> predict_file("runs/first", "test.csv", "answers.jsonl", writing=writing).rejected
        0
    """

    keep_columns: PassthroughColumns = "all"
    on_error: Literal["fail", "skip"] = "fail"
    rejects: str | Path | None = None
    csv_raw: bool = False
    format: str | None = None


STANDARD = "-"  # standard input, or standard output


def passthrough_name(name: str, taken: Container[str]) -> str:
    """Returns the name of an input's column that differs from all ``taken`` names.

    A table has a column for each key of an object, such as ``scores.good``, so names in front of a dot count, too.
    """
    parts = name.split(".")
    holders = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    is_taken = any(holder in taken for holder in holders)
    if is_taken or name.startswith(INPUT):
        return f"{INPUT}{name}"
    return name


@dataclass(frozen=True, kw_only=True)
class Written:
    """The result of a prediction that was written, which ``predict_file`` and ``embed_file`` return.

    Attributes:
        rows: Number of predicted rows, those of an earlier attempt included.
        resumed: Number of rows that an earlier attempt had completed.
        truncated: Number of rows of this attempt of which the model has not read all tokens.
        unknown: Number of tokens that the tokenizer does not know.
        labels: Number of rows of this attempt for each predicted label, if the model predicts one label for a row. The
            label is None if its score was too low.
        rejected: Number of skipped rows.
        rejects: The file with the skipped rows and the reasons. None if no rows are skipped.
        notes: Sentences about the input, and about values that the output's format cannot hold.
        warnings: Sentences about truncated rows and unknown tokens.
    """

    rows: int = 0
    resumed: int = 0
    truncated: int = 0
    unknown: UnknownTokens = field(default_factory=UnknownTokens)
    labels: Counter[str | None] = field(default_factory=Counter)
    rejected: int = 0
    rejects: Path | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Returns the messages in addition to the number of rows."""
        lines = list(self.notes)
        if self.resumed:
            lines.append(f"{self.resumed} of {counted(self.rows, 'row')} had been completed by an earlier attempt")
        if self.rejects is not None:
            lines.append(f"{self.rejected} of {counted(self.rows + self.rejected, 'row')} skipped, see {self.rejects}")
        return [*lines, *self.warnings]

    def label_counts(self) -> str:
        """Returns a line with the most frequent predicted labels, their counts and their percentages."""
        total = self.labels.total()
        counts = []
        for label, count in self.labels.most_common():
            name = "null" if label is None else on_one_line(label)
            counts.append(f"{name} {count} ({count / total:.0%})")
        rows = f" of {counted(total, 'new row')}" if self.resumed else ""
        return f"labels{rows}: {first_few(counts, _MOST_LABELS)}"


class OutputDestination:
    """The file or the open stream of an output, from names alone.

    Args:
        output: A path, "-" for standard output, or an open binary file.
        data: The input.
        writing: Options of the output.
        task: A task that is not in ``TASKS``, for its file formats.

    Attributes:
        form: jsonl, csv, tsv, parquet, npy, or a task's own extension (``rendered``).
        rejects: The file for skipped rows. None if no rows are skipped.

    Raises:
        UsageError: An option has an invalid value, or options exclude each other.
    """

    def __init__(
        self, output: str | Path | IO[bytes], data: Data, writing: WriteOptions, task: type[Task] | None
    ) -> None:
        check_row_options(writing.keep_columns, writing.on_error)
        forms = FORMS if task is None else task.outputs[0].row_formats  # those of embeddings are fewer, and npy
        if writing.format is not None and writing.format not in forms:
            raise UsageError(f"there is no output format {writing.format!r}. Choose one of {', '.join(forms)}")
        for path, error in ((output, UsageError), (writing.rejects, UsageError), (data, DataError)):
            if isinstance(path, str | Path):
                check_path(path, error)
        self._data = data
        self.path: Path | None = None
        self.stream: IO[bytes] | None = None
        self.rendered = False
        self.form = "jsonl" if writing.format is None else writing.format
        if not isinstance(output, str | Path):
            self._set_stream(output, forms)
        elif output == STANDARD:
            self._set_stream(sys.stdout.buffer, forms)
        else:
            self._set_file(output, writing, forms, task)
        self.rejects = self._rejects(writing, output)

    def _set_stream(self, stream: IO[bytes], forms: Sequence[str]) -> None:
        """Sets a stream, for which the form must be one that is written row by row."""
        self.stream = stream
        streamed = [name for name in forms if name in ("jsonl", *DELIMITERS)]
        if self.form not in streamed:
            formats = ", ".join(streamed)
            raise UsageError(f"{self.form} cannot be written to a stream. Name a file, or choose one of {formats}")

    def _set_file(
        self, output: str | Path, writing: WriteOptions, forms: Sequence[str], task: type[Task] | None
    ) -> None:
        """Sets the file, and its form by its extension unless the options name one."""
        self.path = _linked_file(Path(output))
        if writing.format is not None:
            return
        tasks: list[type[Task]] = []
        if forms == FORMS:
            tasks += TASKS.values()
        if task is not None:
            tasks.append(task)
        of_tasks = sorted(set().union(*map(file_extensions, tasks)))
        extensions = [f".{form}" for form in forms]
        extensions += of_tasks
        suffix = Path(output).suffix
        if suffix not in extensions:
            choice = f"{', '.join(extensions[:-1])} or {extensions[-1]}"
            raise UsageError(f"{output}: the output's extension must be {choice}")
        self.rendered = suffix in of_tasks
        self.form = suffix
        if not self.rendered:
            self.form = suffix.removeprefix(".")

    def _rejects(self, writing: WriteOptions, output: str | Path | IO[bytes]) -> Path | None:
        """Returns the file for skipped rows, by default next to the output."""
        if writing.on_error == "fail":
            if writing.rejects is not None:
                raise UsageError(f"a file of rejects is only written with {argument('on_error', 'skip')}")
            return None
        if not isinstance(self._data, str | Path):
            raise UsageError("on_error = 'skip' is for files. Remove bad rows from rows in memory")
        if writing.rejects is not None:
            return _linked_file(Path(writing.rejects))
        if self.path is None or not isinstance(output, str | Path):
            raise UsageError(f"name a file for the skipped rows with {argument('rejects', 'FILE')}")
        return _linked_file(Path(output).with_name(f"{Path(output).name}.rejects.jsonl"))

    def check_places(self) -> None:
        """Checks the disk. Call it only on the process that writes.

        Raises:
            UsageError: A file cannot be written, or would overwrite the input or another one.
        """
        for path in (self.path, self.rejects):
            if path is not None and (path == self.path or not is_special(path)):
                check_place(path)
        self._check_apart("output", self.path)

    def check_model(self, model: AnyModel, *, logits: bool, explain: bool) -> None:
        """Raises UsageError if the task lacks the file format, or the format has no place for what was asked for."""
        if self.path is None or not self.rendered:
            return
        task = model.one_task().task
        forms = ", ".join(f".{form}" for form in task.output.row_formats)
        if self.form not in task.output.files:
            raise UsageError(f"{self.path}: {task.name} has no output format {self.form!r}. Use {forms}")
        for content, asked in (("logits", logits), ("explanations", explain)):
            if asked:
                raise UsageError(f"{self.path}: {self.form} has no place for {content}. Use {forms}")
        # What a format writes for no rows has the names of all its files. That of the output itself is empty.
        files = task.output.files[self.form].render(task.output, self.form, [], [])
        for name in files:
            if name:
                self._check_apart(f"{name} of the output", sibling_output(self.path, name))

    def _check_apart(self, label: str, path: Path | None) -> None:
        """Raises UsageError if output, input and rejects are not three files."""
        source: Path | None = None
        if isinstance(self._data, str | Path) and self._data != STANDARD:
            source = Path(self._data)
        files = [(label, path), ("input", source), ("rejects", self.rejects)]
        for (other, second), (name, first) in combinations(files, 2):
            if first is None or second is None:
                continue
            if first.exists() and second.exists():  # the same file may have two names (hard links)
                is_same = os.path.samefile(first, second)
            else:
                is_same = os.path.realpath(first) == os.path.realpath(second)
            if is_same:
                raise UsageError(f"{first} is both {other} and {name}. Choose another name for the output")


def file_extensions(task: type[Task]) -> set[str]:
    """Returns the extensions of the files that the outputs of a task have beside the usual formats."""
    return set().union(*(output.files for output in task.outputs))


def _linked_file(path: Path) -> Path:
    """Returns the file itself if the path is a link, so that the link stays.

    A file that is complete is moved to its place, which would replace a link by the file.
    """
    if path.is_symlink():
        return Path(os.path.realpath(path))
    return path


def sibling_output(path: Path, name: str) -> Path:
    """Returns the path of a further file of a task's format, next to the output."""
    return path.with_name(f"{path.stem}.{name}")


def check_row_options(keep_columns: PassthroughColumns, on_error: str) -> None:
    """Raises UsageError for a value that is none of the option's."""
    is_list = not isinstance(keep_columns, str) and isinstance(keep_columns, Sequence)
    if not is_list and keep_columns not in ("all", "none"):
        raise UsageError(f"keep_columns is {keep_columns!r}, expected 'all', 'none' or a list of names")
    if on_error not in ("fail", "skip"):
        raise UsageError(f"on_error is {on_error!r}, expected 'fail' or 'skip'")


def write_rejects(table: Rows, target: Path) -> int:
    """Writes a line for each row that cannot be used. Returns the number of rows.

    Raises:
        UsageError: The file cannot be written.
    """
    rejected = 0
    # A device or a pipe cannot be replaced by a complete file.
    with target.open("w", encoding="utf-8") if is_special(target) else whole_file(target) as file:
        if table.file is not None and REJECT in table.rows.column_names:
            for batch in read_batches(table.file, [REJECT]):
                faults = [row[REJECT] for row in batch if row[REJECT] is not None]
                file.writelines(map(reject_line, faults))
                rejected += len(faults)
    return rejected


def reject_line(fault: str) -> str:
    """Returns an error as a line of a reject file, with escaped lone surrogates."""
    line = json.dumps(json.loads(fault), ensure_ascii=False)
    if not is_encodable(line):  # a lone surrogate has no bytes in UTF-8, and is escaped in ``fault``
        line = fault
    return f"{line}\n"


def written_columns(
    predictions: Mapping[str, Prediction],
    encode_vector: Callable[[NDArray[np.float32]], Any] = float_list,
) -> dict[str, Any]:
    """Returns the predictions of the heads for a row as the columns of files and batches."""
    columns: dict[str, Any] = {}
    for name, prediction in predictions.items():
        content = prediction.to_json(encode_vector=encode_vector)
        columns |= {written_name(name, key): value for key, value in content.items()}
    return columns


def reserved_columns(tasks: Mapping[str, Task]) -> frozenset[str]:
    """Returns all columns that the predictions of the heads can have, including columns on request."""
    columns: set[str] = set()
    for name, task in tasks.items():
        columns |= {written_name(name, field.name) for field in fields(task.output.prediction)}
    return frozenset(columns)


def written_name(name: str, key: str) -> str:
    """Returns the column of a field of a head's predictions, the head's name if they are equal."""
    if name and name != key:
        return f"{name}.{key}"
    return key
