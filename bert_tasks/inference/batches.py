"""Prediction inside other engines: a function of batches that Ray Data, Spark or ``datasets.map`` send to processes.

Owns the columns that a prediction becomes, whose Arrow types are known before any row is predicted, and the models that
a process has loaded for such functions. The function itself holds the name of a model, not the model, so that it is
small when it is sent.
"""

import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch

from bert_tasks.checkpoints.hub import origin, resolve
from bert_tasks.data.columns import Column, PassthroughColumns, Row
from bert_tasks.data.problems import counted
from bert_tasks.data.readers import ReadOptions
from bert_tasks.data.validator import ColumnMapping, RowValidator, make_column_mapping
from bert_tasks.errors import DataError, UsageError
from bert_tasks.inference.output import passthrough_name, reserved_names
from bert_tasks.model.inputs import load_trained, trained_task
from bert_tasks.model.precision import DType, logits_of
from bert_tasks.model.task_model import ForwardFn, TaskModel
from bert_tasks.storage import sha256_json
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.shared.rendering import Rendering
from bert_tasks.tasks.shared.windows import Windows

if TYPE_CHECKING:
    import pyarrow

ERROR = "error"  # the column that says why a row could not be predicted
UNTYPED = "prediction"  # the column of JSON of a task that does not say what its predictions hold

_MOST_LOADED = 4  # models of one process, of which the oldest is dropped
_FAULTS_SHOWN = 5
_SIMPLE = {str: "string", float: "float64", int: "int64", bool: "bool_"}  # Python's types -> Arrow's
# (id of the process, key of the predictor) -> the model. A process that was forked loads its own.
_loaded: dict[tuple[int, str], tuple[TaskModel, ForwardFn]] = {}
_loading = threading.Lock()


def batch_predictor(
    model: str | Path,
    *,
    task: str | type[Task] | None = None,
    settings: Mapping[str, Any] | None = None,
    revision: str | None = None,
    dtype: DType = "float32",
    columns: Mapping[str, str] | None = None,
    keep_columns: PassthroughColumns = "all",
    on_error: Literal["fail", "skip"] = "fail",
    threads: int = 1,
) -> "BatchPredictor":
    """A function that predicts batches of columns, for Ray Data, Spark, ``datasets.map`` and the like.

    Only the name of the model is sent to other processes: each of them loads the model at its first batch, once, and on
    a GPU if it sees one. Predictions are those of ``predict``, row by row.

    Args:
        model: a folder, a hub id, ``package:NAME/PATH`` or an exported folder, which every process can read under this
            name. Its configuration is read at once; a hub id stands for the commit that it has now.
        task, settings, revision, dtype: see ``evaluate``.
        columns: the task's columns -> those of the batches, where the names differ.
        keep_columns: the columns of a batch that are returned before the prediction: "all", "none", or names. One with
            the name of a field that predictions of the task can have is called ``input.NAME``, as by ``predict``; one
            that the prediction repeats is left out.
        on_error: "skip" keeps the place of rows that cannot be used: the columns of their prediction are null, and
            ``error`` says why. It is null for all other rows.
        threads: torch's threads during a batch. An engine starts several processes; together they should not have more
            threads than the machine has cores.

    Returns:
        The function; its ``schema`` has the columns of a prediction.

    Raises:
        CheckpointError: there is no such model, or it cannot be used.
        UsageError: an unknown option or setting, a model in memory, or one whose rows need the rows around them.
    """
    if isinstance(model, TaskModel):
        raise UsageError(
            "batch_predictor: processes load the model from files: call model.save_pretrained(folder), and give folder"
        )
    if on_error not in ("fail", "skip"):
        raise UsageError(f"on_error = {on_error!r}: expected 'fail' or 'skip'")
    if isinstance(keep_columns, str) and keep_columns not in ("all", "none"):
        raise UsageError(f"keep_columns is {keep_columns!r}, expected 'all', 'none' or a list of names")
    if dtype not in get_args(DType):
        raise UsageError(f"dtype is {dtype!r}, expected one of {', '.join(map(repr, get_args(DType)))}")
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise UsageError(f"threads = {threads!r}: expected a whole number from 1")
    reading = ReadOptions(columns=None if columns is None else dict(columns))
    source = ModelSource.of(model, task=task, settings=settings, revision=revision, dtype=dtype)
    built, trained = trained_task(model, task=task, settings=settings, revision=revision, reading=reading)
    if Windows.of(built).needs_document_context:
        raise UsageError(
            f"{model}: {built.name} with these settings reads the rows around each row, which may be in another batch: "
            "use `bert-tasks predict`, or other settings"
        )
    make_column_mapping(built.columns, reading.columns)  # raises for a column that the task lacks
    return BatchPredictor(
        source=source,
        schema=prediction_schema(built, with_error=on_error == "skip"),
        reserved=frozenset(reserved_names(built)),
        columns=tuple(column for column in built.columns if not column.is_label),
        reading=reading,
        trained_names=trained,
        keep_columns=keep_columns if isinstance(keep_columns, str) else tuple(keep_columns),
        on_error=on_error,
        threads=threads,
    )


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """What a process loads.

    Attributes:
        name: what the model is loaded by in any process; a folder by its absolute path.
        task, settings, revision, dtype: see ``batch_predictor``.
        fingerprint: of the names, sizes and times of the folder's files. A process that keeps a model loads it again
            after a change, and ``datasets.map`` does not take an earlier model's predictions from its cache.
    """

    name: str
    task: str | type[Task] | None
    settings: Mapping[str, Any]
    revision: str | None
    dtype: DType
    fingerprint: str

    @classmethod
    def of(
        cls,
        model: str | Path,
        *,
        task: str | type[Task] | None,
        settings: Mapping[str, Any] | None,
        revision: str | None,
        dtype: DType,
    ) -> "ModelSource":
        """The source with a name that means the same model in every process.

        Raises:
            CheckpointError, UsageError: see ``resolve``.
        """
        folder = resolve(model, revision=revision, weights=False)
        commit = origin(model, folder, revision=revision).commit
        files = sorted((path.name, path.stat()) for path in folder.iterdir() if path.is_file())
        return cls(
            name=str(Path(os.path.expanduser(model)).absolute())
            if Path(os.path.expanduser(model)).is_dir()
            else str(model),
            task=task,
            settings={} if settings is None else dict(settings),
            revision=revision if commit is None else commit,
            dtype=dtype,
            fingerprint=sha256_json([[name, stat.st_size, stat.st_mtime_ns] for name, stat in files]),
        )

    def loaded(self, reading: ReadOptions) -> tuple[TaskModel, ForwardFn]:
        """The model and what runs its batches, loaded once in each process.

        Raises:
            CheckpointError, UsageError: see ``load_trained`` and ``logits_of``.
        """
        task = f"{self.task.__module__}:{self.task.__qualname__}" if isinstance(self.task, type) else self.task
        columns = None if reading.columns is None else dict(reading.columns)
        key = sha256_json(self.name, task, repr(self.settings), self.revision, self.dtype, self.fingerprint, columns)
        with _loading:
            found = _loaded.get((os.getpid(), key))
            if found is None:
                model = load_trained(
                    self.name, task=self.task, settings=self.settings, revision=self.revision, reading=reading
                )
                if torch.cuda.is_available():
                    _move_to_gpu(model)
                found = model, logits_of(model, self.dtype)
                own = [known for known in _loaded if known[0] == os.getpid()]
                for known in _loaded.keys() - set(own[1 - _MOST_LOADED :]):  # also those of a process that was forked
                    del _loaded[known]
                _loaded[os.getpid(), key] = found
            return found


@dataclass(frozen=True, kw_only=True)
class BatchPredictor:
    """A function of batches, made by ``batch_predictor``; engines send it to processes as a few kilobytes.

    Attributes:
        source: the model.
        schema: the columns of a prediction with their Arrow types, the same for every batch, empty ones too.
        reserved: further names that no kept column has: fields of predictions on request.
        columns: those that the task reads.
        reading: the task's columns -> those of the batches, as the caller states them.
        trained_names: the same as in the training data.
        keep_columns, on_error, threads: see ``batch_predictor``.
    """

    source: ModelSource
    schema: "pyarrow.Schema"
    reserved: frozenset[str]
    columns: tuple[Column, ...]
    reading: ReadOptions
    trained_names: Mapping[str, str]
    keep_columns: PassthroughColumns
    on_error: Literal["fail", "skip"]
    threads: int

    def output_schema(self, given: "pyarrow.Schema") -> "pyarrow.Schema":
        """The columns of what is returned for batches with these columns."""
        import pyarrow

        kept = [given.field(name).with_name(new) for name, new in self._kept(given.names).items()]
        return pyarrow.schema([*kept, *self.schema])

    def __call__(self, batch: Any) -> Any:
        """Predicts a batch.

        Args:
            batch: a dict of lists or of arrays, a pandas DataFrame, or a pyarrow Table or RecordBatch.

        Returns:
            The columns that are kept, then those of the predictions, of the same kind as the batch and with as many
            rows in the same order.

        Raises:
            DataError: the batch lacks a column, or, with ``on_error="fail"``, rows cannot be used; it names them.
            CheckpointError, UsageError: the model cannot be loaded.
        """
        import pyarrow

        columns = _Columns.of(batch)
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            predicted = self._predicted(columns)
        finally:
            torch.set_num_threads(before)
        arrays = [pyarrow.array([row.get(field.name) for row in predicted], field.type) for field in self.schema]
        return columns.with_predictions(
            self._kept(columns.names), pyarrow.Table.from_arrays(arrays, schema=self.schema)
        )

    def _kept(self, present: Sequence[str]) -> dict[str, str]:
        """The columns of a batch that are returned -> their names then."""
        keep = [name for name in present if self.keep_columns == "all" or name in self.keep_columns]
        taken, names = set(self.schema.names), self._names(present)
        repeated = {one.name for one in self.columns if one.name in taken and names.get(one.name, one.name) == one.name}
        taken |= self.reserved
        return {name: passthrough_name(name, taken) for name in keep if name not in repeated}

    def _names(self, present: Sequence[str]) -> dict[str, str]:
        """The task's columns -> those of a batch, where they differ: as stated, else as in the training data."""
        found = self.reading.with_names(self.trained_names, self.columns, present).columns
        known = {column.name for column in self.columns}
        return {} if found is None else {task: name for task, name in found.items() if task in known}

    def _predicted(self, batch: "_Columns") -> list[dict[str, Any]]:
        """For each row the columns of its prediction, as far as it has them."""
        model, run = self.source.loaded(self.reading)
        names = self._names(batch.names)
        mapping = make_column_mapping(self.columns, names, source="the batch", passthrough=self.keep_columns)
        validator = RowValidator(mapping, batch.names)
        rows: list[Row] = []
        faults: dict[int, str] = {}
        for number, cells in enumerate(batch.rows(mapping)):
            row, found = validator.validate(cells)
            rows.append(row)
            if found:
                faults[number] = " ".join(map(str, found))
        if faults and self.on_error == "fail":
            listed = [f"  row {number}: {fault}" for number, fault in list(faults.items())[:_FAULTS_SHOWN]]
            more = [f"  ... and {len(faults) - len(listed)} more"] if len(faults) > len(listed) else []
            heading = f"{len(faults)} of the {counted(len(rows), 'row')} of a batch cannot be used (counted from 0):"
            remedy = f"Fix them, or pass on_error='skip', which says in the column '{ERROR}' what is wrong."
            raise DataError("\n".join([heading, *listed, *more, remedy]))
        usable = (row for number, row in enumerate(rows) if number not in faults)
        predictions = model.predict_rows(usable, forward_fn=run)
        is_typed = self.schema.names[0] != UNTYPED
        found_rows = []
        for number in range(len(rows)):
            if number in faults:
                found_rows.append({ERROR: faults[number]})
            else:
                one = next(predictions).to_json()
                found_rows.append(one if is_typed else {UNTYPED: json.dumps(one, ensure_ascii=False)})
        return found_rows


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """A batch of any kind, as columns with different names.

    Attributes:
        batch: as it was given.
        names: of its columns, as texts.
    """

    batch: Any
    names: tuple[str, ...]

    @classmethod
    def of(cls, batch: Any) -> "_Columns":
        """Raises DataError for what is no batch of columns of one length."""
        import pyarrow

        if isinstance(batch, pyarrow.Table | pyarrow.RecordBatch):
            given = list(batch.schema.names)
        elif _is_frame(batch):
            given = list(batch.columns)
        elif isinstance(batch, Mapping):
            given = list(batch)
            lengths = {str(name): _length(str(name), batch[name]) for name in given}
            if len(set(lengths.values())) > 1:
                listed = ", ".join(f"{name!r} {length}" for name, length in lengths.items())
                raise DataError(f"the columns of a batch have different numbers of values: {listed}")
        else:
            raise DataError(
                "a batch is a dict of columns, a pandas DataFrame or a pyarrow Table, not "
                f"{type(batch).__name__}; for rows use `predict`"
            )
        names = tuple(map(str, given))
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise DataError(f"a batch has several columns {repeated[0]!r}: give each column a name of its own")
        return cls(batch=batch, names=names)

    def rows(self, mapping: ColumnMapping) -> list[Row]:
        """The rows, with the columns that are read, under the batch's names."""
        wanted = {name for field in mapping.fields for name in field.column.type.columns_in(field.name, self.names)}
        read = [name for name in self.names if name in wanted]
        return [dict(zip(read, values, strict=True)) for values in zip(*map(self._values, read), strict=True)]

    def _values(self, name: str) -> list[Any]:
        column = self._column(name)
        if _is_frame(self.batch):
            column = column.astype(object).where(column.notna(), None)
        values = column.to_pylist() if hasattr(column, "to_pylist") else list(column)
        return list(map(_cell, values))

    def _column(self, name: str) -> Any:
        if _is_frame(self.batch):
            return self.batch.iloc[:, self.names.index(name)]
        if isinstance(self.batch, Mapping):
            return self.batch[next(given for given in self.batch if str(given) == name)]
        return self.batch.column(name)

    def with_predictions(self, kept: Mapping[str, str], predicted: "pyarrow.Table") -> Any:
        """The kept columns under their new names, and the predictions, as a batch of the same kind."""
        import pyarrow

        if isinstance(self.batch, Mapping):
            columns = {new: self._column(name) for name, new in kept.items()}
            is_numpy = any(isinstance(self.batch[name], np.ndarray) for name in self.batch)
            convert = _as_array if is_numpy else pyarrow.ChunkedArray.to_pylist
            return columns | {name: convert(predicted.column(name)) for name in predicted.column_names}
        if _is_frame(self.batch):
            frame = self.batch.iloc[:, [self.names.index(name) for name in kept]]
            made = predicted.to_pandas()
            columns = {name: made[name].array for name in made}  # without an index: that of the batch may have repeats
            return frame.set_axis(list(kept.values()), axis="columns").assign(**columns)
        arrays = [self.batch.column(name) for name in kept]
        fields = [self.batch.schema.field(name).with_name(new) for name, new in kept.items()]
        schema = pyarrow.schema([*fields, *predicted.schema])
        table = pyarrow.Table.from_arrays([*arrays, *predicted.columns], schema=schema)
        if isinstance(self.batch, pyarrow.Table):
            return table
        whole = [column.combine_chunks() for column in table.columns]
        return pyarrow.RecordBatch.from_arrays(whole, schema=schema)


def _length(name: str, column: Any) -> int:
    """How many values a column has; raises DataError for what is no list of values."""
    try:
        if not isinstance(column, str | bytes | Mapping):
            return len(column)
    except TypeError:  # it has no length
        pass
    raise DataError(
        f"the column {name!r} of a batch is a {type(column).__name__}, expected a list of values; for one row use "
        "`predict`"
    )


def _is_frame(batch: Any) -> bool:
    return hasattr(batch, "iloc") and hasattr(batch, "columns")


def _cell(value: Any) -> Any:
    """A cell as a Python value: arrays as lists; what numpy and pandas write for a missing value as None."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_cell(part) for part in value]
    if isinstance(value, Mapping):
        return {name: _cell(part) for name, part in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def _as_array(column: "pyarrow.ChunkedArray") -> Any:
    """A column as NumPy has it: numbers, or an array of objects."""
    import pyarrow

    if pyarrow.types.is_floating(column.type) or pyarrow.types.is_integer(column.type):
        return column.to_numpy()
    found = np.empty(len(column), dtype=object)
    found[:] = column.to_pylist()
    return found


def _move_to_gpu(model: TaskModel) -> None:
    """Raises UsageError in a process that was forked from one which had used the GPU."""
    try:
        model.to("cuda")
    except RuntimeError as error:
        if "forked" not in str(error):
            raise
        raise UsageError(
            "a process that was forked from one which has used the GPU cannot use it: predict in one process, or do "
            "not use the GPU before"
        ) from None


def prediction_schema(task: Task, *, with_error: bool = False) -> "pyarrow.Schema":
    """The columns of a task's predictions.

    They are the fields of its predictions: an object is a struct, and so are numbers by label, with a field for each
    label. A task with fields of other types has one column of JSON.

    Args:
        with_error: adds the column that says why a row could not be predicted.
    """
    import pyarrow

    try:
        rendering = Rendering.of(task)
        if not rendering.prediction_fields:
            raise TypeError(f"{task.name} does not say what its predictions hold")
        hints = get_type_hints(rendering.prediction_type)
        fields = [pyarrow.field(name, _arrow_type(hints[name], task.labels)) for name in rendering.prediction_fields]
    except TypeError:
        fields = [pyarrow.field(UNTYPED, pyarrow.string())]
    return pyarrow.schema([*fields, *([pyarrow.field(ERROR, pyarrow.string())] if with_error else [])])


def _arrow_type(kind: Any, labels: Sequence[str]) -> "pyarrow.DataType":
    """The Arrow type of a Python type; raises TypeError for one that does not say what it holds."""
    import pyarrow

    outer, parts = get_origin(kind), [part for part in get_args(kind) if part is not NoneType]
    if outer in (Union, UnionType) and len(parts) == 1:
        return _arrow_type(parts[0], labels)
    if outer in (list, tuple, Sequence):
        return pyarrow.list_(_arrow_type(parts[0], labels))
    if outer is Mapping and labels and parts[0] is str:
        return pyarrow.struct([(label, _arrow_type(parts[1], labels)) for label in labels])
    if is_dataclass(kind) and isinstance(kind, type):
        return pyarrow.struct([(name, _arrow_type(hint, labels)) for name, hint in get_type_hints(kind).items()])
    if kind not in _SIMPLE:
        raise TypeError(f"{kind} does not say what it holds")
    return getattr(pyarrow, _SIMPLE[kind])()
