"""Outputs of predictions: what is written for a row, where it goes, and the folder of an output that is not finished.

Owns the names of columns in the output, the checks on a destination before any work is done for it, and the order in
which files appear. The output of an unfinished prediction is in a folder beside it: its JSON lines so far, and a
manifest that says which model, data and options they belong to.
"""

import io
import json
import logging
import os
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from itertools import combinations, islice
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Literal

from bert_tasks.checkpoints.load import tensors_digest
from bert_tasks.data.columns import ROW_ERROR, PassthroughColumns
from bert_tasks.data.problems import counted
from bert_tasks.data.records import is_encodable
from bert_tasks.data.table import RowTable, read_batches, tokenizer_content
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
from bert_tasks.errors import ClosedPipeError, DataError, UsageError
from bert_tasks.export.exported import ExportedModel
from bert_tasks.model.inputs import Data
from bert_tasks.model.task_model import TaskModel
from bert_tasks.storage import atomic_path, explained_disk_full, locked, move, remove_temporaries, sha256_json
from bert_tasks.tasks import TASKS
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.shared.fitting import Fitting
from bert_tasks.tasks.shared.rendering import Rendering

LINE = "line"
Progress = Callable[[int, int | None], None]  # gets the number of completed rows, and of all rows where it is known
INPUT = "input."  # before the name of a column that a prediction's field has too


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """What is written for each row, and how.

    Attributes:
        keep_columns: which of the input's columns are written before the prediction. One with the name of a field of
            the prediction is called ``input.NAME`` there; one that the prediction repeats is left out.
        on_error: ``skip`` leaves out rows that cannot be used, and gives every other row its ``line``.
        rejects: the file for rows that were left out; default: the output's name followed by ``.rejects.jsonl``.
        csv_raw: write texts that a spreadsheet would take for a formula unchanged.
        format: jsonl, csv, tsv or parquet, where the output's name does not say it.
        logits: write the logits of every row, too.
        explain: write how much each word contributed to the prediction, too.
    """

    keep_columns: PassthroughColumns = "all"
    on_error: Literal["fail", "skip"] = "fail"
    rejects: Path | None = None
    csv_raw: bool = False
    format: str | None = None
    logits: bool = False
    explain: bool = False


class StreamWriter:
    """Writes rows to an open stream as they come: JSON lines, or a table with the columns of the first rows."""

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
                        f"a row has the column {new[0]!r}, which the header lacks: write jsonl, or write to a file"
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
    """What a column of the input is called beside the fields of a prediction, and whatever else is taken."""
    is_taken = name in taken or name.partition(".")[0] in taken
    return f"{INPUT}{name}" if is_taken or name.startswith(INPUT) else name


def reserved_names(task: Task) -> set[str]:
    """The fields of a task's predictions, which no column of the input is called; also those made on request only."""
    return {field.name for field in fields(Rendering.of(task).prediction_type)}


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What became of a prediction.

    Attributes:
        rows: the number of rows that were predicted. ``truncated`` of them were not read as a whole; ``cuts`` are the
            messages on this.
        unknown: the number of unknown tokens; ``warnings`` are the messages on this.
        rejected: the number of rows that were left out; ``rejects`` is the file that says why.
        resumed: the number of rows that an earlier attempt had completed; ``truncated`` and ``unknown`` do not count
            these.
        notes: what else was skipped when the rows were read, and what the output's format cannot hold.
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
        return replace(
            self,
            rows=self.rows + chunk.rows,
            truncated=self.truncated + chunk.truncated,
            rejected=self.rejected + chunk.rejected,
            unknown=UnknownTokens.total([self.unknown, chunk.unknown]),
        )

    def lines(self) -> list[str]:
        """The messages beside the number of rows."""
        lines = list(self.notes)
        if self.resumed:
            lines.append(f"{self.resumed} of {counted(self.rows, 'row')} had been completed by an earlier attempt")
        if self.rejects is not None:
            lines.append(f"{self.rejected} of {counted(self.rows + self.rejected, 'row')} left out: {self.rejects}")
        return [*lines, *self.cuts, *self.warnings]


@dataclass(frozen=True, kw_only=True)
class OutputDestination:
    """Where an output goes: a file or an open stream.

    Attributes:
        form: jsonl, csv, tsv, parquet, or a task's own extension (``rendered``).
        rejects: the file for rows that are left out; None: none are.
    """

    path: Path | None
    stream: IO[bytes] | None
    form: str
    rendered: bool
    rejects: Path | None

    def check_places(self, data: Data) -> None:
        """Checks the disk; only for the process that writes.

        Raises:
            UsageError: a file cannot be written, or would overwrite the input or another one.
        """
        if self.path is not None:
            check_place(self.path)
        if self.rejects is not None and not is_special(self.rejects):
            check_place(self.rejects)
        self._check_apart("output", self.path, data)

    def check_task(self, task: Task, data: Data, writing: WriteOptions) -> None:
        """Raises UsageError if the extension is another task's or has no place for what is asked for, or a file beside
        the output would overwrite one."""
        if self.path is None or not self.rendered:
            return
        forms = ", ".join(f".{form}" for form in Rendering.of(task).row_formats)
        if self.form not in Rendering.of(task).file_formats:
            raise UsageError(f"{self.path}: {task.name} has no output format {self.form!r}; use {forms}")
        for content, asked in (("logits", writing.logits), ("explanations", writing.explain)):
            if asked:
                raise UsageError(f"{self.path}: {self.form} has no place for {content}; use {forms}")
        for name in filter(None, Rendering.of(task).render(self.form, [], [])):
            self._check_apart(f"{name} of the output", sibling_output(self.path, name), data)

    def _check_apart(self, label: str, path: Path | None, data: Data) -> None:
        """Raises UsageError if a file of the output, the input and the rejects are not three files."""
        source = Path(data) if isinstance(data, str | Path) and data != STANDARD else None
        places = [(label, path), ("input", source), ("rejects", self.rejects)]
        named = [(name, file) for name, file in places if file is not None]
        for (other, second), (name, file) in combinations(named, 2):
            both_exist = file.exists() and second.exists()
            if os.path.samefile(file, second) if both_exist else os.path.realpath(file) == os.path.realpath(second):
                raise UsageError(f"{file} is both {other} and {name}: choose another name for the output")


def sibling_output(path: Path, name: str) -> Path:
    """The path of a further file that a task's format has beside the one asked for."""
    return path.with_name(f"{path.stem}.{name}")


def check_row_options(keep_columns: PassthroughColumns, on_error: str) -> None:
    """Raises UsageError for a value that is none of the option's."""
    if isinstance(keep_columns, str) and keep_columns not in ("all", "none"):
        raise UsageError(f"keep_columns is {keep_columns!r}, expected 'all', 'none' or a list of names")
    if on_error not in ("fail", "skip"):
        raise UsageError(f"on_error = {on_error!r}: expected 'fail' or 'skip'")


def output_destination(
    output: str | Path | IO[bytes], data: Data, writing: WriteOptions, task: type[Task] | None
) -> OutputDestination:
    """The destination of an output, from names alone.

    Args:
        task: one that is not in ``TASKS``, for its file formats.

    Raises:
        UsageError: an option has an invalid value, or options exclude each other.
    """
    check_row_options(writing.keep_columns, writing.on_error)
    forms = FORMS if task is None else Rendering.of(task).row_formats
    if writing.format is not None and writing.format not in forms:
        raise UsageError(f"there is no output format {writing.format!r}; choose {', '.join(forms)}")
    stream: IO[bytes] | None = None
    path: Path | None = None
    rendered = False
    if output == STANDARD or not isinstance(output, str | Path):
        stream = sys.stdout.buffer if isinstance(output, str | Path) else output
        form = "jsonl" if writing.format is None else writing.format
        streamed = [name for name in forms if name in ("jsonl", *DELIMITERS)]
        if form not in streamed:
            formats = ", ".join(streamed)
            raise UsageError(f"{form} cannot be written to a stream: give a file, or the format {formats}")
    else:
        path = Path(output)
        kinds = [*(TASKS.values() if forms == FORMS else ()), *([] if task is None else [task])]
        of_tasks = sorted({extension for kind in kinds for extension in Rendering.of(kind).file_formats})
        extensions = [*(f".{form}" for form in forms), *of_tasks]
        if writing.format is None and path.suffix not in extensions:
            raise UsageError(f"{path}: the output's extension must be {', '.join(extensions[:-1])} or {extensions[-1]}")
        rendered = writing.format is None and path.suffix in of_tasks
        form = path.suffix if rendered else path.suffix[1:] if writing.format is None else writing.format
    rejects = writing.rejects
    if writing.on_error == "fail" and rejects is not None:
        raise UsageError("a file of rejects is only written with on_error = 'skip' (--on-error skip)")
    if writing.on_error == "skip":
        if not isinstance(data, str | Path):
            raise UsageError("on_error = 'skip' is for files; remove bad rows from rows in memory")
        if rejects is None and path is not None:
            rejects = path.with_name(f"{path.name}.rejects.jsonl")
        if rejects is None:
            raise UsageError("name a file for the rows that are left out: --rejects FILE")
    # The file itself, where the path is a link to it: the link is to stay.
    path, rejects = (
        Path(os.path.realpath(place)) if place is not None and place.is_symlink() else place
        for place in (path, rejects)
    )
    return OutputDestination(path=path, stream=stream, form=form, rendered=rendered, rejects=rejects)


def finalize_output(
    lines: Path, target: Path, *, form: str, raw: bool, vectors: Mapping[str, int] = MappingProxyType({})
) -> None:
    """Makes the output from its JSON lines; an earlier output stays until then.

    Args:
        vectors: see ``Rendering.vector_columns``; of an output that is no JSON.

    Raises:
        UsageError: it cannot be written; the lines stay.
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


def write_rejects(table: RowTable, target: Path) -> None:
    """Writes a line for each row that cannot be used; a device, such as the null device, is written directly.

    Raises:
        UsageError: the file cannot be written.
    """
    with target.open("w", encoding="utf-8") if is_special(target) else whole_file(target) as file:
        if table.file is not None and ROW_ERROR in table.rows.column_names:
            for batch in read_batches(table.file, [ROW_ERROR]):
                file.writelines(reject_line(row[ROW_ERROR]) for row in batch if row[ROW_ERROR] is not None)


def reject_line(fault: str) -> str:
    """A fault as a line of a reject file; half a character stays an escape, as it has no other form in JSON."""
    line = json.dumps(json.loads(fault), ensure_ascii=False)
    return f"{line if is_encodable(line) else fault}\n"


def model_fingerprint(model: TaskModel) -> str:
    """A sha256 over weights or graph, task, configuration and tokenizer."""
    weights = [tensors_digest(model.state_dict()), model.graph_sha256 if isinstance(model, ExportedModel) else None]
    task = model.task
    fitting = Fitting.of(task)
    about = [f"{type(task).__module__}:{type(task).__qualname__}", task.labels, fitting.settings(), fitting.values()]
    return sha256_json(weights, about, model.hf_config, tokenizer_content(model.require_tokenizer()))


ROWS, MANIFEST = "rows.jsonl", "manifest.json"  # of the folder of an unfinished output

_log = logging.getLogger("bert_tasks")


def unfinished_folder(output: Path) -> Path:
    """The folder beside an output where its completed chunks are kept until it is finished."""
    return output.with_name(f"{output.name}.parts")


class PartialOutput:
    """The JSON lines of an output that is not finished.

    Args:
        output: The output.
        path: The file of the lines.

    Attributes:
        rows: Number of complete lines.
    """

    def __init__(self, output: Path, path: Path) -> None:
        self.path, self._output = path, output
        self._file = path.open("ab+")
        self._file.seek(0)
        self.rows = sum(line.endswith(b"\n") for line in self._file)

    def keep(self, rows: int) -> None:
        """Removes all lines but the first ones, among them a line that is not complete."""
        self._file.seek(0)
        self._file.truncate(sum(len(line) for line in islice(self._file, rows)))
        self.rows = rows

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
            raise UsageError(f"{reason}; the same command resumes from {self.path.parent}") from None
        self.rows += lines.count(b"\n")

    def close(self) -> None:
        """Closes the file; a full disk may still lack a part of a line that does not count."""
        with suppress(OSError):
            self._file.close()


@contextmanager
def partial_output(output: Path, metadata: Mapping[str, Any]) -> Iterator[PartialOutput]:
    """Opens the lines of an earlier attempt with the same metadata, or none; the folder is locked meanwhile.

    Its files are removed if the work is finished, if nothing was completed, and if the rows cannot be used.

    Raises:
        UsageError: Another process works in the folder.
    """
    folder = unfinished_folder(output)
    try:
        with locked(folder):
            if not _is_resumable(folder, metadata):
                (folder / ROWS).unlink(missing_ok=True)  # before there is a new manifest
            with atomic_path(folder / MANIFEST) as temporary:
                temporary.write_text(json.dumps(metadata, indent=2) + "\n", "utf-8")
            partial = PartialOutput(output, folder / ROWS)
            try:
                yield partial
                partial.rows = 0
            except DataError:  # the rows will be changed: there is nothing to resume
                partial.rows = 0
                raise
            finally:
                partial.close()
                if not partial.rows:
                    remove_temporaries(folder)
                    for name in (ROWS, MANIFEST):  # the manifest last: it says that the lines are ours
                        (folder / name).unlink(missing_ok=True)
    finally:
        with suppress(OSError):  # it is not empty, or another process has just come
            folder.rmdir()


def _is_resumable(folder: Path, metadata: Mapping[str, Any]) -> bool:
    """Returns True if the folder has lines of an attempt with the same metadata; says what changed if not."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        changed = [name for name in metadata if manifest.get(name) != metadata[name]]
    except (OSError, ValueError, RecursionError, AttributeError):  # there is none, or it is damaged
        return False
    if changed:
        _log.warning("%s: starting again, because %s changed", folder, " and ".join(changed))
    return not changed
