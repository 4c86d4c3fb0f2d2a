"""The rows in the body of a request, and what OpenAPI says of them.

The body is JSON. Its rows pass through the validator of files and of rows in memory. Reading stops at the first invalid
row, and its error never repeats a value, because it may end in a log of others.
"""

import gc
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from functools import reduce
from operator import or_
from types import GenericAlias, MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from fastapi import HTTPException
from pydantic import BaseModel, Field, PydanticUserError, StringConstraints, TypeAdapter, ValidationError, create_model

from bert_tasks.data.batch import Batch, Record
from bert_tasks.data.columns import Columns, Row, as_row, source_columns, stored_names, text_columns, without_labels
from bert_tasks.data.kinds import LEAST_CHOICES, Choices, ColumnKind, Id
from bert_tasks.data.kinds.texts import TextList
from bert_tasks.data.layouts import derived_from
from bert_tasks.data.reading import conversion_of
from bert_tasks.errors import BertTasksError, CheckpointError, DataError, UsageError
from bert_tasks.model.multitask import AnyModel
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.serving.limits import Limits
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.examples import example_rows_of
from bert_tasks.tasks.several import task_name
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
        rows, task: As for ``Batcher.answer``.
        respond: A function that returns the content of the response from the predictions and the number of tokens.
        truncate: True if a text that is too long is truncated. Otherwise it is rejected.
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
            DataError: A text is too long, and may not be truncated.
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
    model: AnyModel
    limits: Limits
    has_adapters: bool

    @property
    def task(self) -> Task | None:
        """The only task of the model, or None."""
        return self.model.tasks.get("")

    def reader(self, labels: Task | None = None) -> "BodyReader":
        """Returns the reader of rows for the model, or for the task of labels in the request."""
        task = self.task
        columns: Columns = self.model.input_columns
        if labels is not None:
            task = labels
            columns = without_labels(labels.columns)
        rejected: Mapping[str, str] = {}
        if task is not None:
            rejected = task.rejected_columns
        return BodyReader(
            columns,
            self.limits,
            self.model.columns,
            rejected=rejected,
            has_adapters=self.has_adapters,
        )


class BodyReader:
    """Reads the rows of bodies.

    Args:
        columns: The columns that are read of a row, without labels.
        limits: Limits of requests.
        names: Names of columns in the training data, which rows may have instead.
        rejected: The reason for each column that a row must not have, unless it is read.
        has_adapters: True if a request chooses an adapter, once for all of its rows.
    """

    def __init__(
        self,
        columns: Columns,
        limits: Limits,
        names: Mapping[str, str],
        *,
        rejected: Mapping[str, str] = MappingProxyType({}),
        has_adapters: bool = False,
    ) -> None:
        self._limits = limits
        self._names = names
        self._columns = columns
        self._conversion = conversion_of(self._columns, others=names)
        # A column that another head of the model reads is not rejected.
        names_read = stored_names(self._columns)
        self._rejected: dict[str, str] = {}
        for name, reason in rejected.items():
            if name not in names_read:
                self._rejected[name] = reason
        if has_adapters:
            self._rejected[ADAPTER] = f"{ADAPTER} is for all rows. Write it beside {INPUTS}"

    def rows(self, content: Any) -> tuple[list[Row], bool]:
        """Returns the rows as the model reads them, and whether they were sent as a list.

        A text among the rows stands for a row of tasks that read one text.
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
        """Returns a row as the model reads it. ``path`` is its place in the body, for the message of an error."""
        if isinstance(content, str) and path:
            try:
                content = as_row(content, self._columns, 0)
            except DataError as error:
                raise body_error(path, str(error).partition(": ")[2]) from None
        if not isinstance(content, dict):
            raise body_error(path, _NO_OBJECT)
        for name, reason in self._rejected.items():
            if content.get(name) is not None or content.get(self._names.get(name, name)) is not None:
                raise body_error(path, reason)
        converted = self._conversion.convert(Batch.of([Record(0, content)]))
        if converted.problems:
            first = converted.problems[0][0]
            if first.column is not None:
                path = (*path, first.column)
            raise body_error(path, first.message)
        row = converted.row(0)
        for name, value in row.items():
            length = _length(value)
            if length > self._limits.characters:
                raise body_error((*path, name), f"{length} characters, at most {self._limits.characters} are read")
        return row


def requested_labels(content: Any, model: AnyModel, limits: Limits) -> ZeroShotClassification | None:
    """Removes the labels of a request and their options, and returns their task.

    It returns None for a request without labels, or with labels in a column of the model's rows.
    """
    columns = {column.name for column in source_columns(model.row_columns)}.union(model.columns.values())
    if not isinstance(content, dict) or LABELS not in content or LABELS in columns:
        return None
    # What is left of the request is read as rows.
    labels = content.pop(LABELS)
    multi_label = content.pop("multi_label", False)
    if not isinstance(labels, list) or not 0 < len(labels) <= limits.rows:
        raise body_error((LABELS,), f"expected a list of 1 to {limits.rows} texts")
    if not isinstance(multi_label, bool):
        raise body_error(("multi_label",), "expected true or false")
    options = {"hypothesis": content.pop("hypothesis", HYPOTHESIS), "multi_label": multi_label}
    model_task = model.tasks.get("")
    if model_task is None:
        raise body_error((LABELS,), f"a model of several tasks ({', '.join(model.tasks)}) has labels of its own")
    try:
        task = zero_shot_task(model_task, model.hf_config, labels, **options)
    except (CheckpointError, UsageError) as error:
        raise option_error(error) from None
    length = len(task.hypothesis) + max(map(len, labels))
    if length > limits.characters:
        raise body_error(("hypothesis",), f"{length} characters, at most {limits.characters} are read")
    return task


def check_pairs(rows: Sequence[Row], task: Task | None, limits: Limits) -> None:
    """Raises the response to a request whose rows and labels are too many pairs."""
    if isinstance(task, ZeroShotClassification) and len(rows) * task.windows_per_row > limits.rows:
        labels = task.windows_per_row
        raise body_error((), f"{len(rows)} rows x {labels} labels, at most {limits.rows} pairs are read")


def option_error(error: BertTasksError) -> HTTPException:
    """Returns the response to a wrong option, whose name begins the message."""
    name, _, message = str(error).removeprefix("--").partition(": ")
    return body_error((name,), message)


def _length(value: Any) -> int:
    """Returns the number of characters or items of a value, the largest in a row."""
    if isinstance(value, Mapping):
        return max((_length(item) for item in value.values()), default=0)
    if isinstance(value, str):
        return len(value)
    # A list of empty words has no characters, but each word is read.
    return max(len(value), sum(len(item) for item in value))


def parsed_body(body: bytes, content_type: str) -> Any:
    """Returns the content of a body, or raises the response to invalid JSON."""
    if not re.fullmatch(r"application/(.+\+)?json", content_type.partition(";")[0].strip().lower()):
        raise body_error((), _NO_OBJECT)
    # JSON has no cycles, so a search of the whole memory for them would be in vain.
    gc.disable()
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
    # A key that is not expected is the client's own text, so it is cut.
    path: list[str | int] = []
    for key in first["loc"]:
        if isinstance(key, str):
            key = shown_key(key)
        path.append(key)
    raise body_error(path, first["msg"])


def shown_key(key: str) -> str:
    """Returns a key of a body for a message, cut, and without halves of characters."""
    return key[:_LONGEST_KEY].encode(errors="replace").decode()


def example_rows(model: AnyModel) -> Sequence[Row]:
    """Returns rows that a request may have."""
    return example_rows_of(model.tasks, {name: of_head.columns for name, of_head in model.heads.items()})


def written_prediction(prediction: Prediction | Mapping[str, Prediction]) -> dict[str, Any]:
    """Returns a prediction as JSON, of several tasks by their names."""
    if isinstance(prediction, Prediction):
        return prediction.to_json()
    return {name: task_prediction.to_json() for name, task_prediction in prediction.items()}


def answers_schema(*tasks_of_models: Mapping[str, Task]) -> Any:
    """Returns the type of the answers to a row and to rows, for OpenAPI.

    Args:
        tasks_of_models: For each model the task of each head.
    """
    # ``|`` of types is their union. pydantic writes "anyOf" for it.
    prediction_type = reduce(or_, [_answer_type(tasks) for tasks in tasks_of_models])
    predictions: Any = (GenericAlias(list, (prediction_type,)), ...)
    return prediction_type | create_model("Predictions", predictions=predictions)


def _answer_type(tasks: Mapping[str, Task]) -> Any:
    """Returns the type of a prediction, of several tasks an object with a property for each."""
    types = {name: _prediction_type(task) for name, task in tasks.items()}
    if "" in types:
        return types[""]
    # A row may lack the columns of a task, whose prediction is then null.
    properties = [(name, task_type | None, field(default=None)) for name, task_type in types.items()]
    return make_dataclass("Predictions", properties, frozen=True)


def _prediction_type(task: Task) -> Any:
    """Returns the type of a task's prediction, as far as it can be described."""
    prediction_type: Any = task.output.prediction
    try:
        TypeAdapter(prediction_type)
    except PydanticUserError:  # a field of an own task that pydantic does not know
        return dict[str, Any]
    return prediction_type


def _value_type(kind: ColumnKind, most: int) -> Any:
    """Returns the type of a column's values of ``most`` characters in a request."""
    text: Any = Annotated[str, StringConstraints(max_length=most)]
    if isinstance(kind, Id):
        return text | int
    if isinstance(kind, TextList):
        least = LEAST_CHOICES if isinstance(kind, Choices) else 0
        return Annotated[list[text], Field(min_length=least, max_length=most)]
    return text


def request_schema(model: AnyModel, limits: Limits, adapters: Sequence[str] = (), *, labels: Task | None = None) -> Any:
    """Returns the OpenAPI type of a request, one row or ``{"inputs": [rows]}``.

    Args:
        model: The model that reads the rows.
        limits: Limits of requests.
        adapters: The names of adapters.
        labels: The task of labels in a request, if the request has labels.
    """
    names = model.columns
    task = model.tasks.get("")
    shown_task = task_name(model.tasks)
    columns = source_columns(model.input_columns)
    if labels is not None:
        task = labels
        shown_task = labels.name
        columns = source_columns(without_labels(labels.columns))
    fields: dict[str, Any] = {}
    for column in columns:
        value_type = _value_type(column.type, limits.characters)
        if not column.required:
            value_type = value_type | None
        is_needed = column.required and derived_from(column, columns) is None
        default = ... if is_needed else None  # pydantic's "..." is a field without a default
        fields[column.name] = (value_type, default)
    others = [f"The column {name} may be called {names[name]}" for name in fields if name in names]
    description = ". ".join([f"A row of {shown_task}. Other keys are not read", *others]) + "."
    row: Any = create_model("Row", __doc__=description, **fields)
    one: Any = row
    if len(text_columns(columns)) == 1:
        one = row | str
    inputs: Any = (Annotated[list[one], Field(min_length=1, max_length=limits.rows)], ...)
    adapter: Any = {}
    if adapters:
        adapter = {ADAPTER: (Literal[tuple(adapters)] | None, None)}
    more: Any = {}
    if isinstance(task, ZeroShotClassification):
        candidates = Annotated[list[str], Field(min_length=1, max_length=limits.rows)]
        more = {LABELS: (candidates, ...), "hypothesis": (str, HYPOTHESIS), "multi_label": (bool, False)}
    single = row
    if adapters or more:
        single = create_model("AdaptedRow", __base__=row, **adapter, **more)
    return single | create_model("Rows", __doc__="Several rows.", inputs=inputs, **adapter, **more)
