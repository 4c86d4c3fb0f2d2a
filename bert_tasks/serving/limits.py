"""Limits of the server."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

from bert_tasks.errors import UsageError

_LARGEST = 2**53  # the largest integer that is exact in JSON, which GET /model returns


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a request, and of all requests together.

    Attributes:
        body_bytes: Maximum size of a body in bytes. Larger bodies get status 413.
        rows: Maximum number of rows in a request. More rows get status 422.
        characters: Maximum length of a text, or of all words of a row, in characters. Longer ones get status 422.
        queue: Maximum number of requests that wait for the model. Further requests get status 429.
        connections: Maximum number of open connections. Requests on further connections get status 503.
        timeout: Seconds for a body to arrive (status 408), and then for its response (status 503).
    """

    body_bytes: int = 2**20
    rows: int = 64
    characters: int = 20_000
    queue: int = 128
    connections: int = 512
    timeout: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            number = getattr(self, field.name)
            if not 0 < number <= _LARGEST:
                raise UsageError(f"the limit {field.name} is outside the range from more than 0 to {_LARGEST}")

    @classmethod
    def parse(cls, settings: Sequence[str]) -> Self:
        """Returns the default limits changed by settings such as ``rows=8``.

        Raises:
            UsageError: A setting has another form, an unknown name, or a number that is no limit.
        """
        types = {field.name: float if field.name == "timeout" else int for field in fields(cls)}
        numbers: dict[str, float] = {}
        for setting in settings:
            name, _, text = setting.partition("=")
            if name not in types:
                raise UsageError(f"--limit {setting}: unknown limit {name!r}. Set one of {', '.join(types)}")
            try:
                numbers[name] = types[name](text)
            except ValueError:
                noun = "a number" if name == "timeout" else "a whole number"
                raise UsageError(f"--limit {setting}: expected {noun}, for example {name}=10") from None
        return cls(**numbers)  # type: ignore[arg-type]  # each number has the type of its field
