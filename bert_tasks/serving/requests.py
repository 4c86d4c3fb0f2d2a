"""The body of a request, read as rows: JSON, then a schema made of the task's columns, then the form the task reads.

Owns the limits on a body and the error that a caller gets: a status, and where the first fault is. Reading stops there,
so that the work depends on the size of the body and not on the number of its faults. Errors never repeat what a caller
sent.
"""

import gc
import json
from collections.abc import Mapping, Sequence
from types import GenericAlias, MappingProxyType
from typing import Annotated, Any, ClassVar

from fastapi import HTTPException
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    PydanticUserError,
    Tag,
    TypeAdapter,
    ValidationError,
    create_model,
)
from pydantic_core import PydanticCustomError

from bert_tasks.data.columns import Column, Row, complete_row, rename_row
from bert_tasks.data.validator import RowValidator, make_column_mapping
from bert_tasks.serving.limits import Limits
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.shared.card import Card
from bert_tasks.tasks.shared.rendering import Rendering

INPUTS = "inputs"  # the key of several rows
ONE, MANY = "(one row)", "(several rows)"  # tags of the two forms of a request; errors do not show them
_LONGEST_KEY = 100
_UNREADABLE = "the body is not JSON that can be read: nested too deeply, a number too long, or not UTF-8"
_MESSAGES = {  # in place of pydantic's own, where those say too little to a caller
    "json_invalid": "not JSON; the number is the place of the first character that does not fit",
    "model_type": "expected an object with the task's columns, sent as application/json",
    "missing_body": "Field required",
    "extra_forbidden": "Extra inputs are not permitted",
}


class _Envelope(BaseModel):
    """Several rows."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


class BodyReader:
    """Reads bodies for one task.

    Args:
        columns: the task's columns -> the names of the training data, which rows may have instead.
    """

    def __init__(self, task: Task, limits: Limits, columns: Mapping[str, str]) -> None:
        self._schema: TypeAdapter[Any] = TypeAdapter(request_schema(task, limits, columns))
        self._columns = [column for column in task.columns if not column.is_label]
        self._validator = RowValidator(make_column_mapping(self._columns))
        self._names = columns

    def rows(self, body: bytes, content_type: str) -> tuple[list[Row], bool]:
        """The rows as the task reads them, and whether they were sent as a list.

        Raises:
            HTTPException: 400 where the body cannot be read as JSON at all, else 422 with the first fault; with several
                only where they are in the same row.
        """
        if not body:
            raise _fault((), "missing_body", "missing")
        kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
        if kind != "application" or not (subtype == "json" or subtype.endswith("+json")):
            raise _fault((), "model_type")
        content = _parsed(body)
        if isinstance(content, dict) and INPUTS in content and len(content) > 1:
            # pydantic would list every one of them
            raise _fault((next(key for key in content if key != INPUTS),), "extra_forbidden")
        try:
            checked = self._schema.validate_python(content)
            rows, several = checked.model_dump(exclude_none=True), isinstance(checked, _Envelope)
        except ValidationError as error:
            faults = error.errors(include_url=False, include_context=False, include_input=False)
            detail = [_described(one["loc"], one["type"], self._message(content, one)) for one in faults]
            raise HTTPException(422, detail) from None
        if several:
            return [self._valid(row, (INPUTS, number)) for number, row in enumerate(rows[INPUTS])], True
        return [self._valid(rows, ())], False

    def _valid(self, row: Row, place: tuple[str | int, ...]) -> Row:
        """The row in canonical form; ``place``: where it is in the body, for its faults."""
        valid, faults = self._validator.validate(row)
        if faults:
            places = [place if fault.column is None else (*place, fault.column) for fault in faults]
            pairs = zip(places, faults, strict=True)
            raise HTTPException(422, [_described(where, "value_error", fault.message) for where, fault in pairs])
        return valid

    def _message(self, content: Any, fault: Mapping[str, Any]) -> str:
        """The row validator's message for a value that it refuses, else the schema's: its limits, a missing key."""
        place, row = _path(fault["loc"]), content
        if place[:1] == [INPUTS] and len(place) > 2:
            row, place = content[INPUTS][place[1]], place[2:]
        if fault["type"] != "missing" and place and isinstance(row, Mapping):
            for found in self._validator.validate(rename_row(row, self._names, self._columns))[1]:
                if found.column == place[0]:
                    return found.message
        return str(fault["msg"])


def _parsed(body: bytes) -> Any:
    collects = gc.isenabled()
    gc.disable()  # JSON has no cycles; for its many lists the whole memory would be searched for some, again and again
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise _fault((error.pos,), "json_invalid") from None
    except (ValueError, RecursionError):  # UnicodeDecodeError; an integer of more digits than Python reads
        raise HTTPException(400, _UNREADABLE) from None
    finally:
        if collects:
            gc.enable()


def _fault(place: Sequence[str | int], message: str, kind: str | None = None) -> HTTPException:
    return HTTPException(422, [_described(place, message if kind is None else kind, _MESSAGES[message])])


def _described(place: Sequence[str | int], kind: str, message: str) -> dict[str, Any]:
    return {"loc": ["body", *_path(place)], "msg": _MESSAGES.get(kind, message), "type": kind}


def _path(place: Sequence[str | int]) -> list[str | int]:
    """The keys and positions that lead to a fault. Keys are the caller's own: cut, and never half a character."""
    steps = place[1:] if place and place[0] in (ONE, MANY) else place
    return [step if isinstance(step, int) else step[:_LONGEST_KEY].encode(errors="replace").decode() for step in steps]


def answers_schema(task: Task) -> Any:
    """The type of the answers to one row and to a list of rows, for the OpenAPI document."""
    kind: Any = Rendering.of(task).prediction_type
    try:
        TypeAdapter(kind)
    except PydanticUserError:  # a field of an own task that pydantic does not know
        kind = dict[str, Any]
    predictions: Any = (GenericAlias(list, (kind,)), ...)
    return kind | create_model("Predictions", predictions=predictions)


def request_schema(task: Task, limits: Limits, names: Mapping[str, str] = MappingProxyType({})) -> Any:
    """The type of a request: one row, or ``{"inputs": [rows]}``.

    Which of the two it is decides which errors a caller gets.

    Args:
        task: whose columns a row has.
        limits: on rows and characters.
        names: the task's columns -> the names of the training data, which a row may have instead.
    """
    columns = [column for column in task.columns if not column.is_label]
    fields: dict[str, Any] = {column.name: _field(column, limits) for column in columns}
    rejected = {name: reason for name, reason in Card.of(task).rejected_columns.items() if name not in fields}
    others = [f"{name} may be called {names[name]}" for name in fields if name in names]
    description = "; ".join([f"What {task.name} reads; other keys are not read", *others]) + "."
    made = create_model("Row", __doc__=description, **fields)
    for column in columns:
        if column.type.replacement(columns) is not None:  # a row may have the other column instead
            fields[column.name] = (fields[column.name][0], None)
    documented = create_model("Row", __doc__=description, **fields)

    def with_task_names(row: Any) -> Any:
        """The row with the task's names, and with the values that other columns say, such as the words of its text."""
        if not isinstance(row, Mapping):
            return row
        named = complete_row(rename_row(complete_row(row, columns, names), names, columns), columns)
        for name, reason in rejected.items():
            if named.get(name) is not None:
                raise PydanticCustomError("rejected_column", "{reason}", {"reason": reason})
        return named

    def form(body: Any) -> str:
        return MANY if isinstance(body, dict) and INPUTS in body else ONE

    row: Any = Annotated[made, BeforeValidator(with_task_names, json_schema_input_type=documented)]
    inputs = Annotated[list[row], Field(min_length=1, max_length=limits.rows), FailFast()]
    rows = create_model("Rows", __base__=_Envelope, __doc__="Several rows.", inputs=(inputs, ...))
    return Annotated[Annotated[row, Tag(ONE)] | Annotated[rows, Tag(MANY)], Discriminator(form)]


def _field(column: Column, limits: Limits) -> tuple[Any, Any]:
    """The type and the default of a column's value, with the limit on its characters."""
    kind = column.type.request_type(limits.characters)
    return (kind, ...) if column.required else (kind | None, None)
