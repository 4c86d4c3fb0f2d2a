"""The JSON files of a run, each as one model that is written and read.

A class states the fields of a file in their order. A file holds the fields that were set. Numbers that are not finite
are null in a file, because JSON has no others, and NaN in Python.
"""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError
from pydantic_core import PydanticKnownError

from bert_tasks.checkpoints.files import read_json
from bert_tasks.data.issues import shortened
from bert_tasks.errors import CheckpointError, UsageError

_MOST_BYTES = 64 * 2**20
_MOST_THREADS = 2**15
_UNKNOWN = "unknown"


def _number(value: Any) -> float:
    """Returns NaN for null, and another number as it is, because a whole number stays one when a file is rewritten."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PydanticKnownError("float_type")
    return value


def _json_number(value: float) -> object:
    return value if math.isfinite(value) else None


Count = Annotated[int, Field(ge=0, lt=2**53)]
Number = Annotated[float, PlainValidator(_number), PlainSerializer(_json_number, when_used="json")]
Metrics = dict[str, Number]


class Record(BaseModel):
    """A JSON file, or a part of one."""

    model_config = ConfigDict(strict=True)

    @classmethod
    def checked(cls, content: object) -> Self:
        """Returns the record. Raises ValueError with the name of a field that is missing or has another type."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            location = ".".join(map(str, first["loc"]))
            raise ValueError(f"{location} = {shortened(first['input'])}, {first['msg']}") from None

    def to_json(self) -> dict[str, Any]:
        """Returns the content of the file."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)


class MetricRecord(Record):
    """What readers of the metrics must know, such as the metric that selects the best model."""

    sets: Annotated[list[str], Field(min_length=1)]
    best: str
    primary: str
    lower_is_better: list[str]
    neutral: list[str]


class SplitRecord(Record):
    """The source (with the hub's commit), row count and fingerprint of the rows of a split."""

    source: str
    fingerprint: str
    rows: Count
    rows_left_out: Count = 0
    hub: dict[str, str | None] | None = None


class ChangeRecord(Record):
    """A setting, or a part of the environment, that differs since a run was resumed after ``step``."""

    step: Count
    change: str


class RunRecord(Record):
    """``run.json``, with all that bit-equal results and readers of metrics need.

    Attributes:
        vocabulary_rows: Number of trained and of all rows of the word embeddings. None if all that are not frozen are
            trained.
        encoder_weights: Digest of the encoder, which the checkpoints of adapters do not hold.
        resumed_at: The steps after which the run was resumed.
        settings: All settings of the run, flat, ``section.name`` -> value.
    """

    python: str = _UNKNOWN
    platform: str = _UNKNOWN
    cpu: str = _UNKNOWN
    threads: Annotated[int, Field(ge=1, le=_MOST_THREADS)] = 1
    matmul_library: str | None = None
    versions: dict[str, str | None] = {}
    processes: Annotated[int, Field(ge=1)] = 1
    device: str = _UNKNOWN
    device_name: str | None = None
    seed: Count
    attention: str = _UNKNOWN
    model: dict[str, str | None] = {}
    task: str
    labels: list[str]
    metrics: MetricRecord
    data: dict[str, SplitRecord]
    rows: Count
    steps: Count
    vocabulary_rows: dict[str, Count] | None = None
    trained_parameters: Count = 0
    initial_weights: str | None = None
    encoder_weights: str | None = None
    resumed_at: list[Count] = []
    changes: list[ChangeRecord] = []
    settings: dict[str, Any]

    @property
    def validation_fingerprints(self) -> dict[str, str]:
        """The fingerprints of the validation rows by their splits, in the order of evaluation."""
        return {name: split.fingerprint for name, split in self.data.items() if name != "train"}


class SummaryRecord(Record):
    """``metrics.json`` of a finished run. See ``FitResult``."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    metrics: Metrics
    last_metrics: Metrics
    best_step: Count
    steps: Count
    stopped_early: bool
    train_seconds: float
    collapse: str | None = None
    notes: list[str]


class EventRecord(Record):
    """A line of ``metrics.jsonl``. Other fields are kept when a resumed run cuts the file."""

    model_config = ConfigDict(extra="allow")
    event: Literal["step", "evaluation", "agreement", "diverged"]
    step: Count
    epoch: Count = 0
    loss: Number = math.nan
    learning_rate: Number = math.nan
    grad_norm: Number = math.nan
    terms: Metrics = {}
    tokens_per_second: Number = math.nan
    metrics: Metrics = {}
    agreement: Metrics = {}


class ManifestRecord(Record):
    """``manifest.json`` of a checkpoint.

    Attributes:
        epoch, samples: What the run has seen.
        best_step: The step of the best model so far. 0 if there is none yet.
        files: The ``sha256`` and the ``size`` of each file of the checkpoint.
    """

    step: Count
    epoch: float = 0.0
    samples: Count = 0
    processes: Count = 1
    seed: Count = 0
    data: dict[str, SplitRecord] = {}
    versions: dict[str, str | None] = {}
    best_step: Count = 0
    files: dict[str, dict[str, str | int]]


RecordT = TypeVar("RecordT", bound=Record)


def read_record(path: Path, record: type[RecordT], *, remedy: str) -> RecordT:
    """Reads a file. Raises UsageError with ``remedy`` if a field is damaged."""
    try:
        return record.checked(read_json(path, max_bytes=_MOST_BYTES))
    except (CheckpointError, ValueError) as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise UsageError(f"{path} is damaged ({reason}). {remedy[:1].upper()}{remedy[1:]}") from None
