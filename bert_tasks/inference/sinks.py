"""Sinks, which take the predictions of rows in order.

A sink encodes a batch on the process that has predicted it, and appends it on the first process. ``LineFile`` is a file
that resumes, ``LineStream`` a stream, and ``TaskFiles`` the files of a task's own format.
"""

import io
import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

from bert_tasks.data.columns import RECORD, Row, stored_names
from bert_tasks.data.conversion import plain
from bert_tasks.data.issues import counted
from bert_tasks.data.writers import (
    DELIMITERS,
    TableWriter,
    flat,
    json_line,
    vector_text,
    whole_file,
    write_failure,
    write_npy,
    write_parquet,
    write_table,
)
from bert_tasks.errors import ClosedPipeError, UsageError
from bert_tasks.inference.predictor import PredictedBatch
from bert_tasks.inference.writing import (
    INPUT,
    LINE,
    WriteOptions,
    passthrough_name,
    reserved_columns,
    sibling_output,
    written_columns,
)
from bert_tasks.model.multitask import AnyModel
from bert_tasks.model.prediction import HeadPredictions
from bert_tasks.outputs.prediction import float_list
from bert_tasks.storage import atomic_path, explained_disk_full, locked, move, remove_temporaries

ROWS, MANIFEST = "rows.jsonl", "manifest.json"  # of the folder of an unfinished output

_log = logging.getLogger("bert_tasks")


class Sink(AbstractContextManager["Sink"]):
    """Takes the predictions of rows, batch by batch.

    Attributes:
        completed: Number of rows that are written already, so that they are not predicted again.
    """

    completed: int = 0

    @abstractmethod
    def encode(self, batch: PredictedBatch) -> Any:
        """Returns what ``append`` takes, on the process that has predicted the batch."""

    @abstractmethod
    def append(self, encoded: Any) -> None:
        """Writes an encoded batch after those before it. Only the first process calls it.

        Raises:
            UsageError: The output cannot be written.
        """

    def finish(self) -> None:
        """Completes the output after the last batch, if it needs that. Only the first process calls it."""

    def __exit__(self, *error: Any) -> None:
        """Releases what the sink holds, if it holds anything."""


class LineEncoder:
    """Turns rows and their predictions into JSON lines, the kept columns of the input first.

    Args:
        model: The model.
        writing: Which columns are kept.
        form: The format that is made of the lines. Vectors are base64 if they become a column of numbers there.
        renames: The task's columns -> their names in the data, if they differ.

    Attributes:
        vectors: Columns of vectors -> their width.
    """

    def __init__(self, model: AnyModel, writing: WriteOptions, *, form: str, renames: Mapping[str, str]) -> None:
        self.form, self.writing = form, writing
        self.vectors: dict[str, int] = {}
        for task in model.tasks.values():
            self.vectors |= task.output.vector_columns(model.config)
        self._encode_vector: Callable[[NDArray[np.float32]], Any] = float_list
        if form in ("parquet", "npy"):
            self._encode_vector = vector_text
        self._reserved = reserved_columns(model.tasks)
        inputs = stored_names(model.input_columns)
        # What a prediction says again under the same name, such as the words of a tagged sentence, is not kept twice.
        self._repeatable = {name for name in inputs if renames.get(name, name) == name}

    def encode(self, batch: PredictedBatch) -> bytes:
        """Returns a line for each row of a batch, in UTF-8."""
        pairs = zip(batch.rows, batch.predictions, strict=True)
        return "".join(self._line(row, predictions) for row, predictions in pairs).encode()

    def _line(self, row: Row, predictions: HeadPredictions) -> str:
        """Returns a row and its prediction as a line of JSON."""
        content = written_columns(predictions, self._encode_vector)
        taken = self._reserved.union(content)
        line: dict[str, Any] = {}
        if self.writing.on_error == "skip":
            line[LINE] = row[LINE]
        for name, value in self._kept(row).items():
            if name in content and name in self._repeatable:
                continue
            if name in line:  # the number of the line, as a column of the input may also be called
                line[f"{INPUT}{name}"] = value
            else:
                line[passthrough_name(name, taken)] = value
        return json_line(line | content)

    def _kept(self, row: Row) -> dict[str, Any]:
        """Returns the columns of the input that are written."""
        keep = self.writing.keep_columns
        if keep == "none":
            return {}
        record = row.get(RECORD, row)
        if isinstance(record, str):  # of a file, which was read with the kept columns only
            kept: dict[str, Any] = json.loads(record)
            return kept
        return {name: plain(value) for name, value in record.items() if keep == "all" or name in keep}


class LineStream(Sink):
    """Writes rows to an open stream as they come, as JSON lines or as a table of the first rows' columns."""

    def __init__(self, stream: IO[bytes], encoder: LineEncoder) -> None:
        self._stream, self._encoder = stream, encoder
        self._text = io.StringIO()
        self._table: TableWriter | None = None

    def encode(self, batch: PredictedBatch) -> bytes:
        return self._encoder.encode(batch)

    def append(self, encoded: bytes) -> None:
        """Writes JSON lines in the form of the stream, and flushes it.

        Raises:
            ClosedPipeError: The output's reader has closed it.
            UsageError: The rows cannot be written.
        """
        content = encoded
        if self._encoder.form != "jsonl":
            content = self._table_lines(encoded)
        try:
            self._stream.write(content)
            self._stream.flush()
        except BrokenPipeError:
            raise ClosedPipeError("the output's reader has closed it") from None
        except OSError as error:
            raise UsageError(f"cannot write the output ({error.strerror})") from None

    def _table_lines(self, lines: bytes) -> bytes:
        """Returns JSON lines as lines of csv or tsv, the first ones with the header."""
        rows = [flat(json.loads(line)) for line in lines.splitlines()]
        if self._table is None:
            names = list(dict.fromkeys(chain.from_iterable(rows)))  # of all rows so far, each once and in order
            delimiter = DELIMITERS[self._encoder.form]
            self._table = TableWriter(self._text, names, delimiter, raw=self._encoder.writing.csv_raw)
        for row in rows:
            new = [name for name in row if name not in self._table.names]
            if new:
                raise UsageError(
                    f"a row has the column {new[0]!r}, which the header lacks. Write jsonl, or write to a file"
                )
            self._table.write(row)
        content = self._text.getvalue().encode()
        self._text.seek(0)  # the buffer is used again for the next rows
        self._text.truncate()
        return content


def unfinished_folder(output: Path) -> Path:
    """Returns the folder next to an unfinished output for its completed batches."""
    return output.with_name(f"{output.name}.parts")


class LineFile(Sink):
    """A file of any size that appears when it is complete, and that a later attempt resumes.

    Until then its JSON lines are in a folder next to it, with a manifest of the model, data and options that they
    belong to. As a context manager it locks the folder. It removes the files if the work is finished, or if nothing was
    completed.

    Args:
        path: The output.
        encoder: Makes the lines.
        metadata: Model, data and options, which must be equal to resume.
        batch_rows: Number of rows of a batch. Only whole batches of an earlier attempt are kept.
        total: Number of rows of the finished output.

    Attributes:
        lines: The file of the lines.

    Raises:
        UsageError: Another process works in the folder.
    """

    def __init__(
        self, path: Path, encoder: LineEncoder, *, metadata: Mapping[str, Any], batch_rows: int, total: int
    ) -> None:
        self.folder = unfinished_folder(path)
        self.lines = self.folder / ROWS
        self._path, self._encoder = path, encoder
        self._metadata, self._batch_rows, self._total = metadata, batch_rows, total

    def __enter__(self) -> Self:
        manifest = self.folder / MANIFEST
        with ExitStack() as stack:
            stack.enter_context(locked(self.folder))
            if not self._is_resumable(manifest):
                self.lines.unlink(missing_ok=True)  # before there is a new manifest
            with atomic_path(manifest) as temporary:
                temporary.write_text(json.dumps(self._metadata, indent=2) + "\n", "utf-8")
            self._file = stack.enter_context(self.lines.open("ab+"))
            self._file.seek(0)
            # A process that was killed may have written a part of a line or of a batch. Both are written again, because
            # the last digits of a prediction depend on the batch that it is computed in.
            self.completed = sum(line.endswith(b"\n") for line in self._file)
            if self.completed != self._total:
                self.completed -= self.completed % self._batch_rows
            self._file.seek(0)
            self._file.truncate(sum(len(line) for line in islice(self._file, self.completed)))
            self._opened = stack.pop_all()
        if self.completed:
            _log.warning("%s: resuming after %s", self.folder, counted(self.completed, "row"))
        return self

    def __exit__(self, error_type: type[BaseException] | None = None, *error: Any) -> None:
        with self._opened, suppress(OSError):
            self._file.close()  # a full disk may still lack a part of a line that does not count
            if error_type is None or not self.completed:
                remove_temporaries(self.folder)
                for name in (ROWS, MANIFEST):  # the manifest last, because it marks the lines as ours
                    (self.folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # it is not empty, or another process has just come
            self.folder.rmdir()

    def encode(self, batch: PredictedBatch) -> bytes:
        return self._encoder.encode(batch)

    def append(self, encoded: bytes) -> None:
        """Appends complete lines.

        Raises:
            UsageError: The lines cannot be written. The earlier lines stay.
        """
        try:
            self._file.write(encoded)
            self._file.flush()
        except OSError as error:  # usually a full disk
            reason = write_failure(explained_disk_full(error, self.lines), self._path)
            raise UsageError(f"{reason}. The same command resumes from {self.folder}") from None
        self.completed += encoded.count(b"\n")

    def finish(self) -> None:
        """Makes the output from its JSON lines.

        Raises:
            UsageError: It cannot be written. The lines and an earlier output stay.
        """
        form, vectors = self._encoder.form, self._encoder.vectors
        if form == "parquet":
            write_parquet(self.lines, self._path, vectors=vectors)
        elif form == "npy":
            column, width = next(iter(vectors.items()))
            write_npy(self.lines, self._path, column, width)
        elif form in DELIMITERS:
            write_table(self.lines, self._path, DELIMITERS[form], raw=self._encoder.writing.csv_raw)
        else:
            move(self.lines, self._path)

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


class TaskFiles(Sink):
    """The files of a task's own format, such as CoNLL's or SQuAD's, which hold all predictions in memory.

    Args:
        path: The requested file. Further files of the format are next to it.
        form: The extension of the format.
        model: A model of one task.
    """

    def __init__(self, path: Path, form: str, model: AnyModel) -> None:
        self._path, self._form = path, form
        self._output = model.one_task().task.output
        self._format = self._output.files[form]
        self._rows: list[Row] = []
        self._predictions: list[Any] = []

    def check(self, rows: Sequence[Row]) -> tuple[str, ...]:
        """Returns what the format cannot hold of the rows, before they are predicted.

        Raises:
            DataError: The format cannot hold the rows at all, for example because ids repeat.
        """
        return self._format.check(self._output, self._form, rows)

    def encode(self, batch: PredictedBatch) -> PredictedBatch:
        return batch

    def append(self, encoded: PredictedBatch) -> None:
        self._rows += encoded.rows
        self._predictions += [predictions[""] for predictions in encoded.predictions]

    def finish(self) -> None:
        """Writes the files, the requested file last."""
        files = self._format.render(self._output, self._form, self._predictions, self._rows)
        for name in sorted(files, reverse=True):
            path = self._path
            if name:
                path = sibling_output(self._path, name)
            with whole_file(path) as file:
                file.write(files[name])
