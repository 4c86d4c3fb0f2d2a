"""Batch inference with other engines such as Ray Data, Spark or ``datasets.map``.

Engines send a function of batches to processes. The function holds the name of a model, not the model, so that it is
small. The Arrow types of its columns are known before any row is predicted, because Spark asks for a schema when the
work is planned.
"""

import json
import math
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import islice
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow
import torch

from bert_tasks.checkpoints.hub import origin, resolve
from bert_tasks.data.batch import Batch
from bert_tasks.data.columns import Columns, PassthroughColumns, stored_names, without_labels
from bert_tasks.data.issues import counted
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.reading import conversion_of
from bert_tasks.errors import DataError, UsageError
from bert_tasks.inference.precision import DType, check_dtype, default_device
from bert_tasks.inference.predictor import Predictor
from bert_tasks.inference.writing import (
    check_row_options,
    passthrough_name,
    reserved_columns,
    written_columns,
    written_name,
)
from bert_tasks.model.inputs import input_names, load_trained, trained_tasks
from bert_tasks.model.multitask import AnyModel
from bert_tasks.storage import sha256_json
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.several import choose_one, row_columns

ERROR = "error"  # the column that says why a row could not be predicted
UNTYPED = "prediction"  # the column of JSON of a task that does not say what its predictions hold

_MOST_LOADED = 4  # models in one process, the oldest is dropped
_FAULTS_SHOWN = 5  # of the rows of a batch, in a message
_SIMPLE = {str: "string", float: "float64", int: "int64", bool: "bool_"}  # Python's types -> Arrow's
# (id of the process, key of the batch predictor) -> its model. A process that was forked loads its own.
_loaded: dict[tuple[int, str], Predictor] = {}
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
    """Returns a function that predicts batches of columns, for other engines.

    Use it for batch inference on many machines: pass it to Ray Data's ``map_batches``, to Spark's ``mapInPandas`` or
    ``mapInArrow`` through a generator, or to ``datasets.map(batched=True)``. On one machine ``predict_file`` is
    simpler, and it resumes. Making the function reads the configuration and no weights. Each process loads the model at
    its first batch, and runs it on a GPU if it sees one. Pickled, the function has a few kilobytes.

    Args:
        model: A folder, a hub id, ``package:NAME/PATH`` or an exported folder, which every process can read under this
            name. A hub id stands for the commit that it has now.
        task: Name or class of the task. See ``evaluate``.
        settings: Fields of the task to change. See ``evaluate``.
        revision: See ``TaskModel.from_pretrained``.
        dtype: Precision of the encoder. See ``evaluate``.
        columns: The task's columns -> the columns of the batches, if the names differ.
        keep_columns: Columns of a batch to return, too: "all" (default), "none", or names. A column with the name of a
            field of predictions is called ``input.NAME``.
        on_error: "fail" (default) raises DataError for rows that cannot be used. "skip" returns null for them, and the
            reason in the column ``error``.
        threads: Number of torch's threads during a batch. Default: 1, because an engine starts several processes, whose
            threads would wait for one another.

    Returns:
        The function. Its ``schema`` (pyarrow) has the columns of a prediction.

    Raises:
        CheckpointError: There is no such model, or it cannot be used.
        UsageError: An option or setting is unknown, the model is in memory, or its rows need the rows around them.

    Examples:
        >>> function = batch_predictor("runs/first")
        >>> list(function({"text": ["Cold soup."]}))
        ['text', 'label', 'score', 'scores']
    """
    if isinstance(model, AnyModel):
        raise UsageError(
            "batch_predictor: processes load the model from files. Call model.save_pretrained(folder), and pass folder"
        )
    check_row_options(keep_columns, on_error)
    check_dtype(dtype)
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise UsageError(f"threads is {threads!r}, expected a whole number from 1")
    # Mappings and sequences are copied, because the caller may change them before a process gets the function.
    renames = None if columns is None else dict(columns)
    reading = ReadOptions(columns=renames)
    heads = trained_tasks(model, task=task, settings=settings, revision=revision, reading=reading)
    tasks, columns_read = {name: head.task for name, head in heads.items()}, row_columns(heads)
    in_context = [each.name for each in tasks.values() if each.needs_document]
    if in_context:
        raise UsageError(
            f"{model}: {in_context[0]} with these settings reads the rows around each row, which may be in another "
            "batch. Use `bert-tasks predict`, or other settings"
        )
    if reading.columns and "" not in heads:
        raise choose_one(heads)  # the names of columns belong to a task
    conversion_of(columns_read, reading)  # raises for a column that the task lacks
    folder, local = resolve(model, revision=revision, weights=False), Path(os.path.expanduser(model))
    name_for_processes = str(model)
    if local.is_dir():  # processes may have another working directory
        name_for_processes = str(local.absolute())
    commit = origin(model, folder, revision=revision).commit
    files = sorted((path.name, path.stat()) for path in folder.iterdir() if path.is_file())
    fields = {} if settings is None else dict(settings)
    fixed_revision = revision if commit is None else commit  # a branch may move before the last process loads it
    trained_names = heads[""].columns if "" in heads else {}
    kept = keep_columns if isinstance(keep_columns, str) else tuple(keep_columns)
    return BatchPredictor(
        model=name_for_processes,
        task=task,
        settings=fields,
        revision=fixed_revision,
        dtype=dtype,
        fingerprint=sha256_json([[name, stat.st_size, stat.st_mtime_ns] for name, stat in files]),
        schema=prediction_schema(tasks, with_error=on_error == "skip"),
        reserved=reserved_columns(tasks),
        columns=without_labels(columns_read),
        reading=reading,
        trained_names=trained_names,
        keep_columns=kept,
        on_error=on_error,
        threads=threads,
    )


@dataclass(frozen=True, kw_only=True)
class BatchPredictor:
    """A function of batches that engines send to processes as a few kilobytes.

    ``batch_predictor`` makes it, and a call predicts a batch.

    Attributes:
        schema (pyarrow.Schema): The columns of a prediction with their Arrow types, the same for every batch.

    Examples:
        >>> function = batch_predictor("runs/first", keep_columns="none")
        >>> function.schema.names
        ['label', 'score', 'scores']
    """

    model: str
    task: str | type[Task] | None
    settings: Mapping[str, Any]
    revision: str | None
    dtype: DType
    fingerprint: str  # of the folder's files, so that processes load changed files again
    schema: pyarrow.Schema
    reserved: frozenset[str]  # names of fields that predictions can have
    columns: Columns
    reading: ReadOptions
    trained_names: Mapping[str, str]
    keep_columns: PassthroughColumns
    on_error: Literal["fail", "skip"]
    threads: int

    def output_schema(self, batch: pyarrow.Schema) -> pyarrow.Schema:
        """Returns the columns of the result for batches with these columns.

        Args:
            batch: The columns of the batches with their Arrow types.

        Examples:
            >>> import pyarrow
            >>> batch = pyarrow.schema([("id", pyarrow.int64()), ("text", pyarrow.string())])
            >>> batch_predictor("runs/first").output_schema(batch).names
            ['id', 'text', 'label', 'score', 'scores']
        """
        kept = [batch.field(name).with_name(new) for name, new in self._kept(batch.names).items()]
        return pyarrow.schema([*kept, *self.schema])

    def __call__(self, batch: Any) -> Any:
        """Predicts a batch.

        Args:
            batch: A dict of lists or of arrays, a pandas DataFrame, or a pyarrow Table or RecordBatch.

        Returns:
            The kept columns, then the predictions' columns, of the same type as the batch, with as many rows in the
            same order.

        Raises:
            DataError: The batch lacks a column, or, with ``on_error="fail"``, rows cannot be used. The message lists
                them.
            CheckpointError, UsageError: The model cannot be loaded.
        """
        columns = _batch_columns(batch)
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)  # of the whole process, in which other code may run torch, too
        try:
            rows = self._predict(columns)
        finally:
            torch.set_num_threads(threads)
        kept = {new: columns[name] for name, new in self._kept(list(columns)).items()}
        arrays = [pyarrow.array([row.get(field.name) for row in rows], field.type) for field in self.schema]
        if isinstance(batch, pyarrow.Table | pyarrow.RecordBatch):
            return type(batch).from_arrays([*kept.values(), *arrays], schema=self.output_schema(batch.schema))
        if isinstance(batch, Mapping):
            result = dict(kept)
            is_numpy = any(isinstance(column, np.ndarray) for column in batch.values())  # as Ray Data passes them
            for name, array in zip(self.schema.names, arrays, strict=True):
                if is_numpy:
                    result[name] = _as_array(array)
                else:
                    result[name] = array.to_pylist()
            return result
        frame = pyarrow.table(arrays, schema=self.schema).to_pandas().set_axis(batch.index)
        return type(batch)(kept, index=batch.index).assign(**{name: frame[name].array for name in frame})

    def _kept(self, present: Sequence[str]) -> dict[str, str]:
        """Maps the columns of a batch that are returned to their names in the result."""
        taken, names = set(self.schema.names), self._renames(present)
        # What a prediction says again under the same name, such as the words of a tagged sentence, is not kept twice.
        repeated = {name for name in stored_names(self.columns) if name in taken and names.get(name, name) == name}
        kept: dict[str, str] = {}
        for name in present:
            is_asked = self.keep_columns == "all" or name in self.keep_columns
            if is_asked and name not in repeated:
                kept[name] = passthrough_name(name, taken | self.reserved)
        return kept

    def _renames(self, present: Sequence[str]) -> Mapping[str, str]:
        """Returns the task's columns -> their names in batches with the columns ``present``, if they differ."""
        return input_names(self.reading, self.trained_names, self.columns, present)

    def _predict(self, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns for each row the columns of its prediction, as far as it has them."""
        names, predictor = list(columns), self._load()
        conversion = conversion_of(
            self.columns, ReadOptions(columns=self._renames(names)), passthrough=self.keep_columns
        )
        conversion.check_columns(names, "the batch")
        needed = conversion.source_columns(names)
        cells = {name: list(_cells(columns[name])) for name in names if name in needed}
        count = len(next(iter(cells.values())))
        # A row has no line in a file here, so messages count the rows of the batch.
        converted = conversion.convert(Batch(lines=range(count), cells=cells))
        faults: dict[int, str] = {}
        for number, issues in converted.problems.items():
            faults[number] = " ".join(issue.text for issue in issues)
        rows = [converted.row(number) for number in range(count)]
        if faults and self.on_error == "fail":
            lines = [f"{len(faults)} of the {counted(len(rows), 'row')} of a batch cannot be used (counted from 0):"]
            for number, fault in islice(faults.items(), _FAULTS_SHOWN):
                lines.append(f"  row {number}: {fault}")
            if len(faults) > _FAULTS_SHOWN:
                lines.append(f"  ... and {len(faults) - _FAULTS_SHOWN} more")
            lines.append(f"Fix them, or pass on_error='skip', which says in the column '{ERROR}' what is wrong.")
            raise DataError("\n".join(lines))
        usable = [row for number, row in enumerate(rows) if number not in faults]
        contents: list[dict[str, Any]] = []
        for part in predictor.batches(usable):
            contents += map(written_columns, predictor.predict_batch(part).predictions)
        if self.schema.names[0] == UNTYPED:
            contents = [{UNTYPED: json.dumps(content, ensure_ascii=False)} for content in contents]
        results: list[dict[str, Any]] = []
        remaining = iter(contents)
        for number in range(count):
            if number in faults:
                results.append({ERROR: faults[number]})
            else:
                results.append(next(remaining))
        return results

    def _load(self) -> Predictor:
        """Returns the model with its precision. Each process loads a model once."""
        task = self.task
        if isinstance(task, type):
            task = f"{task.__module__}:{task.__qualname__}"
        source = [self.model, task, repr(self.settings), self.revision, self.dtype, self.fingerprint]
        key = os.getpid(), sha256_json(source, self.reading.columns)
        with _loading:  # several threads of an engine would load the model several times
            if key not in _loaded:
                options: dict[str, Any] = {"task": self.task, "settings": self.settings, "revision": self.revision}
                model = load_trained(self.model, reading=self.reading, **options).to(default_device())
                # Dicts keep the order of insertion, so the first ones are the oldest.
                for old in list(_loaded)[: 1 - _MOST_LOADED]:
                    del _loaded[old]
                _loaded[key] = Predictor(model, dtype=self.dtype)
            return _loaded[key]


def _batch_columns(batch: Any) -> dict[str, Any]:
    """Returns the columns of a batch by their names as texts, all of one length."""
    if isinstance(batch, pyarrow.Table | pyarrow.RecordBatch):
        pairs = list(zip(batch.schema.names, batch.columns, strict=True))
    elif isinstance(batch, Mapping):
        pairs = [(str(name), column) for name, column in batch.items()]
    elif hasattr(batch, "iloc") and hasattr(batch, "columns"):
        pairs = [(str(name), batch.iloc[:, index]) for index, name in enumerate(batch.columns)]
    else:
        raise DataError(
            "a batch is a dict of columns, a pandas DataFrame or a pyarrow Table, not "
            f"{type(batch).__name__}. For rows, use `predict`"
        )
    for name, column in pairs:
        is_list = hasattr(column, "__len__") and not isinstance(column, str | bytes | Mapping)
        if not is_list or getattr(column, "ndim", 1) == 0:
            raise DataError(
                f"the column {name!r} of a batch is a {type(column).__name__}, expected a list of values. For one row, "
                "use `predict`"
            )
    if len({len(column) for _, column in pairs}) > 1:
        listed = ", ".join(f"{name!r} {len(column)}" for name, column in pairs)
        raise DataError(f"the columns of a batch have different numbers of values ({listed})")
    repeated = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if repeated:
        raise DataError(f"a batch has several columns {repeated[0]!r}. Use different names")
    return dict(pairs)


def _cells(column: Any) -> list[Any]:
    """Returns the values of a column in Python's types, with None for missing values."""
    if hasattr(column, "notna"):  # of pandas, where a missing value may be nan, NaT or pandas.NA
        column = column.astype(object).where(column.notna(), None)
    if hasattr(column, "to_pylist"):  # of pyarrow
        column = column.to_pylist()
    return [_cell(value) for value in column]


def _cell(value: Any) -> Any:
    """Returns a value, and what it contains, in Python's types. nan is a missing value."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_cell(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _cell(item) for name, item in value.items()}
    if isinstance(value, float) and math.isnan(value):
        return None
    return value


def _as_array(array: pyarrow.Array) -> Any:
    """Returns a column as an array of numbers or of objects."""
    if pyarrow.types.is_floating(array.type) or pyarrow.types.is_integer(array.type):
        return array.to_numpy(zero_copy_only=False)
    # ``np.array`` of lists of equal lengths would become an array of two dimensions.
    result = np.empty(len(array), dtype=object)
    result[:] = array.to_pylist()
    return result


def prediction_schema(tasks: Mapping[str, Task], *, with_error: bool = False) -> pyarrow.Schema:
    """Returns the fields of the predictions of all heads as columns, or one column of JSON.

    An object is a struct, and so are numbers by label. ``with_error`` adds the reason of a row without a prediction.
    """
    try:
        fields = []
        for name, task in tasks.items():
            for field, hint in task.output.column_types().items():
                fields.append(pyarrow.field(written_name(name, field), _arrow_type(hint, task.output.labels)))
    except TypeError:  # a task of a user may return anything
        fields = [pyarrow.field(UNTYPED, pyarrow.string())]
    if with_error:
        fields.append(pyarrow.field(ERROR, pyarrow.string()))
    return pyarrow.schema(fields)


def _arrow_type(hint: Any, labels: Sequence[str]) -> pyarrow.DataType:
    """Returns the Arrow type of a Python type. Raises TypeError for an unknown type."""
    # Every column of Arrow may hold null, so "X or None" has the type of X.
    outer, parts = get_origin(hint), [member for member in get_args(hint) if member is not NoneType]
    if outer in (Union, UnionType) and len(parts) == 1:
        return _arrow_type(parts[0], labels)
    if outer in (list, tuple, Sequence):
        return pyarrow.list_(_arrow_type(parts[0], labels))
    if outer is Mapping and labels and parts[0] is str:
        return pyarrow.struct([(label, _arrow_type(parts[1], labels)) for label in labels])
    if is_dataclass(hint) and isinstance(hint, type):
        return pyarrow.struct([(name, _arrow_type(hint, labels)) for name, hint in get_type_hints(hint).items()])
    if hint not in _SIMPLE:
        raise TypeError(f"{hint} does not say what it holds")
    return getattr(pyarrow, _SIMPLE[hint])()
