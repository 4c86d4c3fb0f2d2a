"""Outputs of predictions, and the lines of an unfinished output.

These lines are in a folder next to the output, with a manifest of the model, data and options they belong to.
"""

import io
import json
import logging
import os
import sys
from collections.abc import Callable, Container, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields, replace
from itertools import combinations, islice
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Literal, Self, cast

import numpy as np
from numpy.typing import NDArray

from bert_tasks.checkpoints.load import tensors_digest
from bert_tasks.data.arrow import read_batches
from bert_tasks.data.columns import ROW_ERROR, PassthroughColumns
from bert_tasks.data.problems import counted
from bert_tasks.data.records import is_encodable
from bert_tasks.data.table import RowTable, tokenizer_content
from bert_tasks.data.unknown_tokens import UnknownTokens
from bert_tasks.data.writers import (
    DELIMITERS,
    FORMS,
    TableWriter,
    check_place,
    flat,
    is_special,
    whole_file,
    write_failure,
    write_npy,
    write_parquet,
    write_table,
)
from bert_tasks.errors import ClosedPipeError, DataError, UsageError, argument
from bert_tasks.model.inputs import Data
from bert_tasks.model.multitask import AnyModel
from bert_tasks.outputs.prediction import Prediction, float_list
from bert_tasks.storage import (
    atomic_path,
    check_path,
    explained_disk_full,
    locked,
    move,
    remove_temporaries,
    sha256_json,
)
from bert_tasks.tasks import TASKS
from bert_tasks.tasks.base import Task

LINE = "line"
Progress = Callable[[int, int | None], None]  # called with the number of completed rows and, if known, of all rows
INPUT = "input."  # before the name of a column that a prediction's field has too


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """The content and the form of the written rows.

    Attributes:
        keep_columns: Columns of the input to write before the prediction. A column with the name of a field of the
            prediction is called ``input.NAME``. A column that the prediction repeats is skipped.
        on_error: ``skip`` skips rows that cannot be used, and writes the ``line`` of every other row.
        rejects: The file for skipped rows. Default: the output's name followed by ``.rejects.jsonl``.
        csv_raw: Write texts that a spreadsheet would read as a formula unchanged.
        format: jsonl, csv, tsv or parquet, if the output's name does not say it.
        logits: Also write the logits of every row.
        explain: Also write how much each word contributed to the prediction.
        abstain_below: See ``predict``.
    """

    keep_columns: PassthroughColumns = "all"
    on_error: Literal["fail", "skip"] = "fail"
    rejects: Path | None = None
    csv_raw: bool = False
    format: str | None = None
    logits: bool = False
    explain: bool = False
    abstain_below: float = 0.0


class StreamWriter:
    """Writes rows to a stream as JSON lines, or as a table of the first rows' columns."""

    def __init__(self, stream: IO[bytes], *, form: str, raw: bool) -> None:
        self._stream, self._form, self._raw = stream, form, raw
        self._text = io.StringIO()
        self._table: TableWriter | None = None

    def write(self, lines: bytes) -> None:
        """Writes rows that are JSON lines.

        Raises:
            ClosedPipeError: the output's reader has closed it.
            UsageError: the rows cannot be written.
        """
        if self._form != "jsonl":
            rows = [flat(json.loads(line)) for line in lines.splitlines()]
            if self._table is None:
                names = list(dict.fromkeys(name for row in rows for name in row))
                self._table = TableWriter(self._text, names, DELIMITERS[self._form], raw=self._raw)
            for row in rows:
                new = [name for name in row if name not in self._table.names]
                if new:
                    raise UsageError(
                        f"a row has the column {new[0]!r}, which the header lacks. Write jsonl, or write to a file"
                    )
                self._table.write(row)
            lines = self._text.getvalue().encode()
            self._text.seek(0)
            self._text.truncate()
        try:
            self._stream.write(lines)
            self._stream.flush()
        except BrokenPipeError:
            raise ClosedPipeError("the output's reader has closed it") from None
        except OSError as error:
            raise UsageError(f"cannot write the output ({error.strerror})") from None


STANDARD = "-"  # standard input, or standard output


def passthrough_name(name: str, taken: Container[str]) -> str:
    """Returns the name of an input's column that differs from all ``taken`` names.

    A table has a column for each key of an object, such as ``scores.good``, so names in front of a dot count, too.
    """
    parts = name.split(".")
    holders = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    is_taken = any(holder in taken for holder in holders)
    return f"{INPUT}{name}" if is_taken or name.startswith(INPUT) else name


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The result of a prediction.

    Attributes:
        rows: Number of predicted rows. ``truncated`` of them were truncated, and ``cuts`` are the messages on this.
        unknown: Number of unknown tokens. ``warnings`` are the messages on this.
        rejected: Number of skipped rows. ``rejects`` is the file with the reasons.
        resumed: Number of rows that an earlier attempt had completed. ``truncated`` and ``unknown`` do not count them.
        notes: Other skipped items of the input, and values that the output's format cannot hold.
    """

    rows: int = 0
    truncated: int = 0
    rejected: int = 0
    rejects: Path | None = None
    resumed: int = 0
    cuts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unknown: UnknownTokens = field(default_factory=UnknownTokens)
    warnings: tuple[str, ...] = ()

    def plus(self, chunk: "Predicted") -> "Predicted":
        """Returns the sums of the counts."""
        rows, truncated = self.rows + chunk.rows, self.truncated + chunk.truncated
        unknown = UnknownTokens.total([self.unknown, chunk.unknown])
        return replace(self, rows=rows, truncated=truncated, unknown=unknown)

    def lines(self) -> list[str]:
        """Returns the messages in addition to the number of rows."""
        lines = list(self.notes)
        if self.resumed:
            lines.append(f"{self.resumed} of {counted(self.rows, 'row')} had been completed by an earlier attempt")
        if self.rejects is not None:
            lines.append(f"{self.rejected} of {counted(self.rows + self.rejected, 'row')} skipped, see {self.rejects}")
        return [*lines, *self.cuts, *self.warnings]


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
        forms = FORMS if task is None else task.outputs[0].row_formats
        if writing.format is not None and writing.format not in forms:
            raise UsageError(f"there is no output format {writing.format!r}. Choose one of {', '.join(forms)}")
        for path, error in ((output, UsageError), (writing.rejects, UsageError), (data, DataError)):
            if isinstance(path, str | Path):
                check_path(path, error)
        self._data, self._writing = data, writing
        self.path: Path | None = None
        self.stream: IO[bytes] | None = None
        self.rendered = False
        self.form = "jsonl" if writing.format is None else writing.format
        if output != STANDARD and isinstance(output, str | Path):
            self.path = _linked_file(Path(output))
            if writing.format is None:
                tasks = [*(TASKS.values() if forms == FORMS else ()), *([] if task is None else [task])]
                of_tasks = sorted(set().union(*map(file_extensions, tasks)))
                extensions, suffix = [*(f".{form}" for form in forms), *of_tasks], Path(output).suffix
                if suffix not in extensions:
                    choice = f"{', '.join(extensions[:-1])} or {extensions[-1]}"
                    raise UsageError(f"{output}: the output's extension must be {choice}")
                self.rendered = suffix in of_tasks
                self.form = suffix if self.rendered else suffix[1:]
        else:
            self.stream = sys.stdout.buffer if isinstance(output, str | Path) else output
            streamed = [name for name in forms if name in ("jsonl", *DELIMITERS)]
            if self.form not in streamed:
                formats = ", ".join(streamed)
                raise UsageError(f"{self.form} cannot be written to a stream. Name a file, or choose one of {formats}")
        self.rejects = None if writing.rejects is None else _linked_file(writing.rejects)
        if writing.on_error == "fail":
            if self.rejects is not None:
                raise UsageError(f"a file of rejects is only written with {argument('on_error', 'skip')}")
            return
        if not isinstance(data, str | Path):
            raise UsageError("on_error = 'skip' is for files. Remove bad rows from rows in memory")
        if self.rejects is None and isinstance(output, str | Path) and self.path is not None:
            self.rejects = _linked_file(Path(output).with_name(f"{Path(output).name}.rejects.jsonl"))
        if self.rejects is None:
            raise UsageError(f"name a file for the skipped rows with {argument('rejects', 'FILE')}")

    def check_places(self) -> None:
        """Checks the disk. Call it only on the process that writes.

        Raises:
            UsageError: A file cannot be written, or would overwrite the input or another one.
        """
        for path in (self.path, self.rejects):
            if path is not None and (path == self.path or not is_special(path)):
                check_place(path)
        self._check_apart("output", self.path)

    def check_model(self, model: AnyModel) -> None:
        """Raises UsageError if the task lacks the file format or a requested value."""
        if self.path is None or not self.rendered:
            return
        task = model.one_task().task
        forms = ", ".join(f".{form}" for form in task.output.row_formats)
        if self.form not in task.output.files:
            raise UsageError(f"{self.path}: {task.name} has no output format {self.form!r}. Use {forms}")
        for content, asked in (("logits", self._writing.logits), ("explanations", self._writing.explain)):
            if asked:
                raise UsageError(f"{self.path}: {self.form} has no place for {content}. Use {forms}")
        for name in filter(None, task.output.files[self.form].render(task.output, self.form, [], [])):
            self._check_apart(f"{name} of the output", sibling_output(self.path, name))

    def _check_apart(self, label: str, path: Path | None) -> None:
        """Raises UsageError if output, input and rejects are not three files."""
        is_file = isinstance(self._data, str | Path) and self._data != STANDARD
        source = Path(cast("str | Path", self._data)) if is_file else None
        files = [(label, path), ("input", source), ("rejects", self.rejects)]
        for (other, second), (name, first) in combinations(files, 2):
            if first is None or second is None:
                continue
            both_exist = first.exists() and second.exists()
            if os.path.samefile(first, second) if both_exist else os.path.realpath(first) == os.path.realpath(second):
                raise UsageError(f"{first} is both {other} and {name}. Choose another name for the output")


def file_extensions(task: type[Task]) -> set[str]:
    """Returns the extensions of the files that the outputs of a task have beside the usual formats."""
    return set().union(*(output.files for output in task.outputs))


def _linked_file(path: Path) -> Path:
    """Returns the file itself if the path is a link, so that the link stays."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def sibling_output(path: Path, name: str) -> Path:
    """Returns the path of a further file of a task's format, next to the output."""
    return path.with_name(f"{path.stem}.{name}")


def check_row_options(keep_columns: PassthroughColumns, on_error: str) -> None:
    """Raises UsageError for a value that is none of the option's."""
    if isinstance(keep_columns, str) and keep_columns not in ("all", "none"):
        raise UsageError(f"keep_columns is {keep_columns!r}, expected 'all', 'none' or a list of names")
    if on_error not in ("fail", "skip"):
        raise UsageError(f"on_error is {on_error!r}, expected 'fail' or 'skip'")


def finalize_output(
    lines: Path, target: Path, *, form: str, raw: bool, vectors: Mapping[str, int] = MappingProxyType({})
) -> None:
    """Makes the output from its JSON lines, with columns of vectors.

    Raises:
        UsageError: It cannot be written. The lines and an earlier output stay.
    """
    if form == "parquet":
        write_parquet(lines, target, vectors=vectors)
    elif form == "npy":
        column, width = next(iter(vectors.items()))
        write_npy(lines, target, column, width)
    elif form in DELIMITERS:
        write_table(lines, target, DELIMITERS[form], raw=raw)
    else:
        move(lines, target)


def write_rejects(table: RowTable, target: Path) -> int:
    """Writes a line for each row that cannot be used. Returns the number of rows.

    Raises:
        UsageError: The file cannot be written.
    """
    rejected = 0
    with target.open("w", encoding="utf-8") if is_special(target) else whole_file(target) as file:
        if table.file is not None and ROW_ERROR in table.rows.column_names:
            for batch in read_batches(table.file, [ROW_ERROR]):
                faults = [row[ROW_ERROR] for row in batch if row[ROW_ERROR] is not None]
                file.writelines(map(reject_line, faults))
                rejected += len(faults)
    return rejected


def reject_line(fault: str) -> str:
    """Returns an error as a line of a reject file, with escaped lone surrogates."""
    line = json.dumps(json.loads(fault), ensure_ascii=False)
    return f"{line if is_encodable(line) else fault}\n"


def written_columns(
    tasks: Mapping[str, Task],
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
    return frozenset(
        written_name(name, field.name) for name, task in tasks.items() for field in fields(task.output.prediction)
    )


def written_name(name: str, key: str) -> str:
    """Returns the column of a field of a head's predictions, the head's name if they are equal."""
    return f"{name}.{key}" if name and name != key else key


def model_fingerprint(model: AnyModel) -> str:
    """Returns a sha256 over weights or graph, task, configuration and tokenizer."""
    weights = [tensors_digest(model.state_dict()), getattr(model, "graph_sha256", None)]
    about = []
    for name, task in model.tasks.items():
        task_class = f"{type(task).__module__}:{type(task).__qualname__}"
        about.append([name, task_class, task.output.labels, task.settings(), task.fitted_values()])
    return sha256_json(weights, about, model.hf_config, tokenizer_content(model.require_tokenizer()))


ROWS, MANIFEST = "rows.jsonl", "manifest.json"  # of the folder of an unfinished output

_log = logging.getLogger("bert_tasks")


def unfinished_folder(output: Path) -> Path:
    """Returns the folder next to an unfinished output for its completed chunks."""
    return output.with_name(f"{output.name}.parts")


class PartialOutput:
    """The JSON lines of an unfinished output.

    A context manager that locks their folder. It removes the files if the work is finished, or if nothing was
    completed.

    Args:
        output: The output.
        metadata: Model, data and options, which must be equal to resume.
        chunk: Number of rows of a chunk. Only whole chunks of an earlier attempt are kept.
        total: Number of lines of the finished output.

    Attributes:
        path: The file of the lines.
        rows: Number of complete lines.

    Raises:
        UsageError: Another process works in the folder.
    """

    def __init__(self, output: Path, metadata: Mapping[str, Any], *, chunk: int, total: int) -> None:
        self.folder = unfinished_folder(output)
        self.path = self.folder / ROWS
        self._output, self._metadata, self._chunk, self._total = output, metadata, chunk, total

    def __enter__(self) -> Self:
        manifest = self.folder / MANIFEST
        with ExitStack() as stack:
            stack.enter_context(locked(self.folder))
            if not self._is_resumable(manifest):
                self.path.unlink(missing_ok=True)  # before there is a new manifest
            with atomic_path(manifest) as temporary:
                temporary.write_text(json.dumps(self._metadata, indent=2) + "\n", "utf-8")
            self._file = stack.enter_context(self.path.open("ab+"))
            self._file.seek(0)
            self.rows = sum(line.endswith(b"\n") for line in self._file)
            if self.rows != self._total:
                self.rows -= self.rows % self._chunk
            self._file.seek(0)
            self._file.truncate(sum(len(line) for line in islice(self._file, self.rows)))
            self._opened = stack.pop_all()
        if self.rows:
            _log.warning("%s: resuming after %s", self.folder, counted(self.rows, "row"))
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: Any) -> None:
        with self._opened, suppress(OSError):
            self._file.close()  # a full disk may still lack a part of a line that does not count
            if error_type is None or not self.rows:
                remove_temporaries(self.folder)
                for name in (ROWS, MANIFEST):  # the manifest last, because it marks the lines as ours
                    (self.folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # it is not empty, or another process has just come
            self.folder.rmdir()

    def append(self, lines: bytes) -> None:
        """Appends complete lines.

        Raises:
            UsageError: The lines cannot be written. The earlier lines stay.
        """
        try:
            self._file.write(lines)
            self._file.flush()
        except OSError as error:
            reason = write_failure(explained_disk_full(error, self.path), self._output)
            raise UsageError(f"{reason}. The same command resumes from {self.folder}") from None
        self.rows += lines.count(b"\n")

    def _is_resumable(self, path: Path) -> bool:
        """Returns True if the lines have the same metadata. Otherwise logs what changed."""
        try:
            manifest = json.loads(path.read_text("utf-8"))
            changed = [name for name in self._metadata if manifest.get(name) != self._metadata[name]]
        except (OSError, ValueError, RecursionError, AttributeError):  # there is none, or it is damaged
            return False
        if changed:
            _log.warning("%s: starting again, because %s changed", self.folder, " and ".join(changed))
        return not changed
