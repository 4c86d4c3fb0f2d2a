"""The JSON files of a run, each as one pydantic model that is written and read.

A class states the fields of a file in their order. A file holds the fields that were set. Numbers that are not finite
are null in a file, because JSON has no such numbers, and become NaN when the file is read. Fields that an older version
did not write have defaults, so that its runs can still be read.
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
    """Returns NaN for null, and another number as it is.

    A whole number is not turned into a float, so that it is still a whole number when the file is written again.
    """
    if value is None:
        return math.nan
    # In Python a bool is an int, but true in a file is no number.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PydanticKnownError("float_type")
    return value


def _json_number(value: float) -> object:
    """Returns a number as JSON has it."""
    return value if math.isfinite(value) else None


# Up to 2^53 every whole number is a float64, too, which other readers of JSON may use.
Count = Annotated[int, Field(ge=0, lt=2**53)]
Number = Annotated[float, PlainValidator(_number), PlainSerializer(_json_number, when_used="json")]
Metrics = dict[str, Number]


class Record(BaseModel):
    """A JSON file, or a part of one. Types are strict, so that a string is never read as a number."""

    model_config = ConfigDict(strict=True)

    @classmethod
    def checked(cls, content: object) -> Self:
        """Returns the record. Raises ValueError that names the first field that is missing or has another type."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]  # one is enough, because a file of another version has many
            location = ".".join(map(str, first["loc"]))
            raise ValueError(f"{location} = {shortened(first['input'])}, {first['msg']}") from None

    def to_json(self) -> dict[str, Any]:
        """Returns the content of the file, with the fields that were set."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)


class MetricRecord(Record):
    """What readers of the metrics must know.

    Attributes:
        sets: The names of the validation sets, in the order of evaluation.
        best: The metric that selects the best model, with the name of its set.
        primary: The metric that the task is usually judged by.
        lower_is_better: The metrics for which a lower value is better.
        neutral: The metrics for which neither a lower nor a higher value is better.
    """

    sets: Annotated[list[str], Field(min_length=1)]
    best: str
    primary: str
    lower_is_better: list[str]
    neutral: list[str]


class SplitRecord(Record):
    """The rows of a split: where they are from, how many they are, and the fingerprint of their content.

    Attributes:
        rows_left_out: Number of rows that were skipped because they are invalid (``data.on_error = "skip"``).
        hub: The data set on the Hugging Face Hub with its commit, if the rows are from there.
    """

    source: str
    fingerprint: str
    rows: Count
    rows_left_out: Count = 0
    hub: dict[str, str | None] | None = None


class ChangeRecord(Record):
    """A setting, or a part of the environment, that changed when a run was resumed after ``step``."""

    step: Count
    change: str


class RunRecord(Record):
    """``run.json``, with all that bit-equal results and readers of metrics need.

    Attributes:
        vocabulary_rows: The number of rows of the word embeddings that are trained, and of all rows. None if the run
            trains all of them or none.
        initial_weights: The digest of the weights at the start of the run.
        encoder_weights: The digest of the encoder, which the checkpoints of adapters do not hold. None without
            adapters.
        resumed_at: The steps after which the run was resumed.
        settings: All settings of the run by ``section.name``.
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
    """A line of ``metrics.jsonl``. Fields that it does not know are kept when a resumed run cuts the file."""

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
        epoch, samples: The number of epochs and of samples that the run has seen.
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
    """Reads a file. Raises UsageError, which ends with ``remedy``, if the file or a field is damaged."""
    try:
        return record.checked(read_json(path, max_bytes=_MOST_BYTES))
    except (CheckpointError, ValueError) as error:
        reason = str(error).removeprefix(f"{path}: ")
        sentence = remedy[:1].upper() + remedy[1:]
        raise UsageError(f"{path} is damaged ({reason}). {sentence}") from None
