"""What a caller may ask for, and how requests share the model: plain numbers with their defaults.

Must not know HTTP or models.
"""

from dataclasses import dataclass, fields

from bert_tasks.errors import UsageError

_LARGEST = 2**53  # what JSON can state exactly: GET /model shows the limits


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one caller may ask for, and all of them together.

    Attributes:
        max_body_bytes: of a request; more is refused (413). What follows is read and thrown away, up to 64 MiB, so that
            its sender reads the answer.
        max_rows: of a request (422).
        max_characters: of one text, or of a row's words with a space between them (422).
        max_queue: requests that wait for the model; one more is refused (429).
        timeout: seconds for a body to arrive (408), then for its answer (503), and then for its reader to take it.
        max_connections: that are open at once; one more gets a 503. Fewer, where fewer files may be open.
        max_total_body_bytes: of all requests that are not answered yet; one that does not fit gets a 503.
        header_timeout: seconds for the first byte on a connection, and for the whole header of a request.
    """

    max_body_bytes: int = 2**20
    max_rows: int = 64
    max_characters: int = 20_000
    max_queue: int = 128
    timeout: float = 30.0
    max_connections: int = 512
    max_total_body_bytes: int = 2**25
    header_timeout: float = 10.0

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if not given > 0:
                raise UsageError(f"{field.name} is {given}, expected more than 0")
            if isinstance(given, int) and given > _LARGEST:
                raise UsageError(f"{field.name} is larger than {_LARGEST}; choose a smaller number")


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How requests are run together.

    Attributes:
        tokens: requests are added to a batch until it holds so many tokens; 1 runs one request at a time. None: what
            the model runs at once, 4,096 on a CPU and 16,384 on another device, fewer with a CRF. A request that holds
            more than this and ``tokens`` is run in several packed batches.
        max_wait: seconds that a request waits for others while the model has nothing to do.
    """

    tokens: int | None = None
    max_wait: float = 0.005

    def __post_init__(self) -> None:
        if self.tokens is not None and not 1 <= self.tokens <= _LARGEST:
            raise UsageError(f"the number of tokens in a batch is outside 1 to {_LARGEST}")
        if not 0 <= self.max_wait <= 60:
            raise UsageError(f"max_wait is {self.max_wait} s, expected 0 to 60")
