"""Reads the body of a request as rows.

The body is JSON. Its rows pass through the validator of files and of rows in memory. Reading stops at the first invalid
row, and its error never repeats a value.
"""

import gc
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from types import GenericAlias, MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from fastapi import HTTPException
from pydantic import BaseModel, Field, PydanticUserError, TypeAdapter, ValidationError, create_model

from bert_tasks.data.columns import (
    Row,
    as_row,
    complete_row,
    rename_row,
    source_columns,
    stored_names,
    text_columns,
)
from bert_tasks.data.problems import RowError
from bert_tasks.data.validator import row_validator
from bert_tasks.errors import BertTasksError, CheckpointError, DataError, UsageError
from bert_tasks.model.task_model import TaskModel
from bert_tasks.serving.limits import Limits
from bert_tasks.tasks.base import Feature, Task
from bert_tasks.tasks.shared.card import Card
from bert_tasks.tasks.shared.rendering import Rendering
from bert_tasks.tasks.zero_shot import HYPOTHESIS, ZeroShotClassification, zero_shot_task

INPUTS = "inputs"  # the key of several rows
LABELS = "labels"  # the key of labels that a model of entailment was not trained for
ADAPTER = "adapter"  # the key that chooses a model, if there are several
_LONGEST_KEY = 100
RequestT = TypeVar("RequestT", bound=BaseModel)
_NO_OBJECT = "expected an object with the task's columns, sent as application/json"
_UNREADABLE = "the body is not JSON that can be read. It is nested too deeply, has too long a number, or is not UTF-8"


@dataclass(kw_only=True)
class Call:
    """The rows of a request, and the content of its response.

    Attributes:
        rows, task: See ``Batcher.answer``.
        respond: Returns the content of the response from the predictions and the number of tokens of the request.
        truncate: True if a text that is too long is cut. Otherwise it is rejected.
        tokens: The number of tokens that the model reads, which ``count`` sets.
    """

    rows: Sequence[Row]
    respond: Callable[[Sequence[Any], int], Any]
    task: Task | None = None
    truncate: bool = True
    tokens: int = 0

    def count(self, features: Sequence[Feature]) -> None:
        """Counts the tokens of the features.

        Raises:
            DataError: A text is too long, and may not be cut.
        """
        self.tokens = sum(len(feature["input_ids"]) for feature in features)
        longest = max((feature.get("lost_tokens", 0) for feature in features), default=0)
        if longest and not self.truncate:
            raise DataError(f"a text is {longest} tokens too long. Shorten it, or set truncate to true")


@dataclass(frozen=True, kw_only=True)
class Source:
    """The model that a request is for.

    Attributes:
        name: The name of the model in responses.
        has_adapters: True if requests choose a model.
    """

    name: str
    model: TaskModel
    limits: Limits
    has_adapters: bool

    def reader(self, task: Task | None = None) -> "BodyReader":
        task = self.model.task if task is None else task
        return BodyReader(task, self.limits, self.model.columns, has_adapters=self.has_adapters)


class BodyReader:
    """Reads bodies for one task.

    Args:
        task: The task.
        limits: Limits of requests.
        names: Names of columns in the training data, which rows may have instead.
        has_adapters: True if a request chooses an adapter, once for all of its rows.
    """

    def __init__(self, task: Task, limits: Limits, names: Mapping[str, str], *, has_adapters: bool = False) -> None:
        self._limits, self._names = limits, names
        self._columns = task.input_columns
        self._validator = row_validator(self._columns)
        names_read = stored_names(self._columns)
        self._rejected: dict[str, str] = {}
        for name, reason in Card.of(task).rejected_columns.items():
            if name not in names_read:
                self._rejected[name] = reason
        if has_adapters:
            self._rejected[ADAPTER] = f"{ADAPTER} is for all rows. Write it beside {INPUTS}"

    def rows(self, content: Any) -> tuple[list[Row], bool]:
        """Returns the rows as the task reads them, and whether they were sent as a list.

        A text among the rows stands for a row of a task that reads one text.
        """
        if not isinstance(content, dict) or INPUTS not in content:
            return [self._row(content, ())], False
        for key in content:
            if key != INPUTS:
                raise body_error((shown_key(key),), f"no other key may be beside {INPUTS}")
        if isinstance(content[INPUTS], str):
            return [self._row(content[INPUTS], (INPUTS,))], False
        return self.several(content[INPUTS], INPUTS), True

    def several(self, rows: Any, key: str) -> list[Row]:
        """Returns the rows of a list, which the body has under a key."""
        most = self._limits.rows
        if not isinstance(rows, list) or not 0 < len(rows) <= most:
            raise body_error((key,), f"expected a list of 1 to {most} rows")
        return [self._row(row, (key, number)) for number, row in enumerate(rows)]

    def _row(self, content: Any, path: tuple[str | int, ...]) -> Row:
        if isinstance(content, str) and path:
            try:
                content = as_row(content, self._columns, 0)
            except DataError as error:
                raise body_error(path, str(error).partition(": ")[2]) from None
        if not isinstance(content, dict):
            raise body_error(path, _NO_OBJECT)
        try:
            cells: Row = content
            if not isinstance(self._columns, Mapping):  # several tasks know their names
                cells = rename_row(complete_row(content, self._columns, self._names), self._names, self._columns)
        except RowError as error:
            raise body_error(path, error.message) from None
        for name, reason in self._rejected.items():
            if cells.get(name) is not None:
                raise body_error(path, reason)
        row, errors = self._validator.validate(cells)
        if errors:
            first = errors[0]
            if first.column is not None:
                path = (*path, first.column)
            raise body_error(path, first.message)
        for name, value in row.items():
            length = _length(value)
            if length > self._limits.characters:
                raise body_error((*path, name), f"{length} characters, at most {self._limits.characters} are read")
        return row


def requested_labels(content: Any, model: TaskModel, limits: Limits) -> ZeroShotClassification | None:
    """Removes the labels of a request and their options, and returns their task.

    Returns None for a request without labels, or with labels in a column that the model's task has.
    """
    columns = {column.name for column in model.task.columns}.union(model.columns.values())
    if not isinstance(content, dict) or LABELS not in content or LABELS in columns:
        return None
    labels = content.pop(LABELS)
    multi_label = content.pop("multi_label", False)
    if not isinstance(labels, list) or not 0 < len(labels) <= limits.rows:
        raise body_error((LABELS,), f"expected a list of 1 to {limits.rows} texts")
    if not isinstance(multi_label, bool):
        raise body_error(("multi_label",), "expected true or false")
    options = {"hypothesis": content.pop("hypothesis", HYPOTHESIS), "multi_label": multi_label}
    try:
        task = zero_shot_task(model.task, model.hf_config, labels, **options)
    except (CheckpointError, UsageError) as error:
        raise option_error(error) from None
    length = len(task.hypothesis) + max(map(len, labels))
    if length > limits.characters:
        raise body_error(("hypothesis",), f"{length} characters, at most {limits.characters} are read")
    return task


def check_pairs(rows: Sequence[Row], task: Task, limits: Limits) -> None:
    """Raises the response to a request whose rows and labels are too many pairs."""
    if isinstance(task, ZeroShotClassification) and len(rows) * len(task.labels) > limits.rows:
        raise body_error((), f"{len(rows)} rows x {len(task.labels)} labels, at most {limits.rows} pairs are read")


def option_error(error: BertTasksError) -> HTTPException:
    """Returns the response to a wrong option, whose name begins the message."""
    name, _, message = str(error).removeprefix("--").partition(": ")
    return body_error((name,), message)


def _length(value: Any) -> int:
    """Returns the number of characters or items of a value, the largest in a row."""
    if isinstance(value, Mapping):
        return max(map(_length, value.values()), default=0)
    if isinstance(value, str):
        return len(value)
    return max(len(value), sum(map(len, value)))


def parsed_body(body: bytes, content_type: str) -> Any:
    """Returns the content of a body, or raises the response to invalid JSON."""
    if not re.fullmatch(r"application/(.+\+)?json", content_type.partition(";")[0].strip().lower()):
        raise body_error((), _NO_OBJECT)
    gc.disable()  # JSON has no cycles, so a search of the whole memory would be in vain
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise body_error((error.pos,), "not JSON from this character on") from None
    except (ValueError, RecursionError):  # UnicodeDecodeError, or an integer of more digits than Python reads
        raise HTTPException(400, _UNREADABLE) from None
    finally:
        gc.enable()


def body_error(path: Sequence[str | int], message: str) -> HTTPException:
    """Returns the response to a body that cannot be used, in FastAPI's form."""
    return HTTPException(422, [{"loc": ["body", *path], "msg": message, "type": "value_error"}])


def validated(model: type[RequestT], content: Any) -> RequestT:
    """Returns a body as a request, or raises the response with its first error, not its value."""
    if not isinstance(content, dict):
        raise body_error((), "expected an object, sent as application/json")
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path: list[str | int] = []
    for key in first["loc"]:
        if isinstance(key, str):
            key = shown_key(key)
        path.append(key)
    raise body_error(path, first["msg"])


def shown_key(key: str) -> str:
    """Returns a key of a body for a message, cut, and without halves of characters."""
    return key[:_LONGEST_KEY].encode(errors="replace").decode()


def answers_schema(*tasks: Task) -> Any:
    """Returns the type of the answers to a row and to rows, for OpenAPI."""
    prediction_types: list[Any] = [Rendering.of(task).prediction_type for task in tasks]
    for number, each in enumerate(prediction_types):
        try:
            TypeAdapter(each)
        except PydanticUserError:  # a field of an own task that pydantic does not know
            prediction_types[number] = dict[str, Any]
    prediction_type = reduce(or_, prediction_types)
    predictions: Any = (GenericAlias(list, (prediction_type,)), ...)
    return prediction_type | create_model("Predictions", predictions=predictions)


def request_schema(
    task: Task, limits: Limits, names: Mapping[str, str] = MappingProxyType({}), adapters: Sequence[str] = ()
) -> Any:
    """Returns the OpenAPI type of a request, one row or ``{"inputs": [rows]}``."""
    columns = source_columns(task.input_columns)
    fields: dict[str, Any] = {}
    for column in columns:
        value_type = column.type.request_type(limits.characters)
        if not column.required:
            value_type = value_type | None
        is_needed = column.required and column.type.replacement(columns) is None
        default = ... if is_needed else None
        fields[column.name] = (value_type, default)
    others = [f"The column {name} may be called {names[name]}" for name in fields if name in names]
    description = ". ".join([f"A row of {task.name}. Other keys are not read", *others]) + "."
    row: Any = create_model("Row", __doc__=description, **fields)
    one: Any = row | str if len(text_columns(columns)) == 1 else row
    inputs: Any = (Annotated[list[one], Field(min_length=1, max_length=limits.rows)], ...)
    adapter: Any = {ADAPTER: (Literal[tuple(adapters)] | None, None)} if adapters else {}
    more: Any = {}
    if isinstance(task, ZeroShotClassification):
        labels = Annotated[list[str], Field(min_length=1, max_length=limits.rows)]
        more = {LABELS: (labels, ...), "hypothesis": (str, HYPOTHESIS), "multi_label": (bool, False)}
    single = row
    if adapters or more:
        single = create_model("AdaptedRow", __base__=row, **adapter, **more)
    return single | create_model("Rows", __doc__="Several rows.", inputs=inputs, **adapter, **more)
