"""The limits of the server, which protect it from requests that would take its memory or its time."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from bert_tasks.errors import UsageError

# GET /model returns the limits, and larger integers are not exact in JSON.
Limit = Annotated[int, Field(gt=0, le=2**53)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Limits:
    """Limits of a request, and of all requests together.

    Attributes:
        body_bytes: The maximum size of a body in bytes. Larger bodies get status 413.
        rows: The maximum number of rows in a request. More rows get status 422.
        characters: The maximum length of a text, or of all words of a row, in characters. Longer ones get status 422.
        queue: The maximum number of requests that wait for the model. Further requests get status 429.
        connections: The maximum number of open connections. Requests on further connections get status 503.
        timeout: The seconds for a body to arrive (status 408), and then for its response (status 503).
    """

    body_bytes: Limit = 2**20
    rows: Limit = 64
    characters: Limit = 20_000
    queue: Limit = 128
    connections: Limit = 512
    timeout: Annotated[float, Field(gt=0, le=2**53)] = 30.0

    @classmethod
    def parse(cls, settings: Sequence[str]) -> Self:
        """Returns the default limits changed by settings such as ``rows=8``.

        Raises:
            UsageError: A setting has another form, an unknown name, or a number that is no limit.
        """
        numbers = {}
        for setting in settings:
            name, _, number = setting.partition("=")
            numbers[name] = number
        try:
            return TypeAdapter(cls).validate_python(numbers)
        except ValidationError as error:
            first = error.errors()[0]
            names = ", ".join(field.name for field in fields(cls))
            raise UsageError(f"--limit {first['loc'][0]}: {first['msg']}. The limits are {names}") from None
