"""The body of a request, read as rows: JSON, then the task's schema, then the form that the task reads.

Owns what a fault in a body is for a caller: a status, and where the first fault is. Reading stops there, so that the
work is bounded by the size of the body and not by the number of its faults. What a caller sent is never sent back. Must
not know HTTP or the event loop.
"""

import gc
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bert_tasks.data.columns import Row
from bert_tasks.errors import DataError
from bert_tasks.model.predicting import canonical_row
from bert_tasks.serving.limits import Limits
from bert_tasks.serving.schemas import INPUTS, MANY, ONE, request_schema, rows_of
from bert_tasks.tasks.base import Task

_LONGEST_KEY = 100
_UNREADABLE = "the body is not JSON that can be read: nested too deeply, a number too long, or not UTF-8"
_MESSAGES = {  # in place of pydantic's own, where those say too little to a caller
    "json_invalid": "not JSON; the number is the place of the first character that does not fit",
    "model_type": "expected an object with the task's columns, sent as application/json",
    "string_unicode": "half a character (a lone surrogate such as \\ud800); replace it",
    "missing_body": "Field required",
    "extra_forbidden": "Extra inputs are not permitted",
}


class BodyError(Exception):
    """A body that cannot be answered.

    Args:
        status: 400 where the body cannot be read as JSON at all, else 422.
        detail: what the caller is told.
    """

    def __init__(self, status: int, detail: str | list[dict[str, Any]]) -> None:
        super().__init__(status)
        self.status, self.detail = status, detail


class BodyReader:
    """Reads bodies for one task.

    Args:
        columns: the task's columns -> the names of the training data, which rows may have instead.
    """

    def __init__(self, task: Task, limits: Limits, columns: Mapping[str, str]) -> None:
        self._schema: TypeAdapter[Any] = TypeAdapter(request_schema(task, limits, columns))
        self._columns = [column for column in task.columns if not column.is_target]

    def rows(self, body: bytes, content_type: str) -> tuple[list[Row], bool]:
        """The rows as the task reads them, and whether they were sent as a list.

        Raises:
            BodyError: with the first fault; several only where they are in the same row.
        """
        if not body:
            raise _fault((), "missing_body", "missing")
        if not _is_json(content_type):
            raise _fault((), "model_type")
        content = _parsed(body)
        if isinstance(content, dict) and INPUTS in content and len(content) > 1:
            # pydantic would list every one of them
            raise _fault((next(key for key in content if key != INPUTS),), "extra_forbidden")
        try:
            rows, several = rows_of(self._schema.validate_python(content))
            return [canonical_row(row, self._columns, number) for number, row in enumerate(rows)], several
        except ValidationError as error:
            faults = error.errors(include_url=False, include_context=False, include_input=False)
            raise BodyError(422, [_described(fault["loc"], fault["type"], fault["msg"]) for fault in faults]) from None
        except DataError as error:
            raise BodyError(422, [_described((), "value_error", str(error))]) from None


def _parsed(body: bytes) -> Any:
    collects = gc.isenabled()
    gc.disable()  # JSON has no cycles; for its many lists the whole memory would be searched for some, again and again
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise _fault((error.pos,), "json_invalid") from None
    except (ValueError, RecursionError):  # UnicodeDecodeError; an integer of more digits than Python reads
        raise BodyError(400, _UNREADABLE) from None
    finally:
        if collects:
            gc.enable()


def _is_json(content_type: str) -> bool:
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


def _fault(place: Sequence[str | int], message: str, kind: str | None = None) -> BodyError:
    return BodyError(422, [_described(place, message if kind is None else kind, _MESSAGES[message])])


def _described(place: Sequence[str | int], kind: str, message: str) -> dict[str, Any]:
    return {"loc": ["body", *_path(place)], "msg": _MESSAGES.get(kind, message), "type": kind}


def _path(place: Sequence[str | int]) -> list[str | int]:
    """The keys and positions that lead to a fault. Keys are the caller's own: cut, and never half a character."""
    steps = place[1:] if place and place[0] in (ONE, MANY) else place
    return [step if isinstance(step, int) else step[:_LONGEST_KEY].encode(errors="replace").decode() for step in steps]
