"""The JSON files of a run, each as one pydantic model, with which the file is both written and read.

A class declares the fields of its file in the order in which they are written. Fields that an older version did not
write have defaults, so that its runs can still be read, and a default that merely stands in for such a field is never
written (see ``Record.to_json``). A number that is not finite is written as null, because JSON has no such numbers, and
is NaN when the file is read again.

Experiments and checkpoints declare further files on the same base: ``TrainerState``, ``SeedsRecord``, ``FoldsRecord``.
"""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError
from pydantic_core import PydanticKnownError

from bert_tasks.checkpoints.files import read_json
from bert_tasks.data.issues import shortened
from bert_tasks.errors import CheckpointError, UsageError

_MOST_JSON_BYTES = 64 * 2**20  # far more than any run writes, so a larger file is not read into memory
_MOST_THREADS = 2**15  # far more than any run uses, so a larger number shows that the file is damaged
_UNKNOWN = "unknown"  # stands for a text that an older version did not write


def _validate_number(value: Any) -> float:
    """Returns NaN for null, and a number as it is.

    An int stays an int, which pydantic's own float would convert, so that a file that is read and written again still
    has 2 and not 2.0.
    """
    if value is None:
        return math.nan
    # In Python a bool is an int, but true in a file is no number.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PydanticKnownError("float_type")  # with the message that pydantic's own float has
    return value


# Pydantic serializes by the return type that is declared here. With ``float | None`` it would write the int 2 as 2.0.
def _serialize_number(value: float) -> object:
    """Returns null for a number that is not finite, and another number as it is."""
    if math.isfinite(value):
        return value
    return None


# Below 2^53 every whole number is also an exact float64, the only kind of number that some readers of JSON have.
Count = Annotated[int, Field(ge=0, lt=2**53)]
# Only JSON lacks NaN. A dump to Python objects, such as that for the trackers, keeps it.
Number = Annotated[float, PlainValidator(_validate_number), PlainSerializer(_serialize_number, when_used="json")]
Metrics = dict[str, Number]


class Record(BaseModel):
    """A JSON file, a line of one, or a part of one.

    Types are strict, so that a string is never read as a number. A class that sets ``model_config`` stays strict,
    because pydantic merges it with that of its base. A default such as ``{}`` or ``[]`` is never shared, because
    pydantic copies it for each record.
    """

    model_config = ConfigDict(strict=True)

    @classmethod
    def checked(cls, content: object) -> Self:
        """Returns the record with this content, which is that of a file as JSON was parsed.

        Raises:
            ValueError: A field is missing or has a wrong type or value. Only the first such field is named, by its path
                such as ``data.train.rows``, because a file of another version may have many.
        """
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            field_path = ".".join(map(str, first["loc"]))
            raise ValueError(f"{field_path} = {shortened(first['input'])}, {first['msg']}") from None

    def to_json(self) -> dict[str, Any]:
        """Returns the content of the file, which has only the fields that were set.

        A field is set if the constructor, the file or an assignment gave it a value, even None or its default. The
        others are left out, so that a file of an older version does not get values that it never had.
        """
        # An alias is the name that a field has in its file if the attribute has a better one (``FoldMetric``).
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)


class MetricRecord(Record):
    """What readers of the metrics must know.

    Attributes:
        sets: The names of the validation sets, in the order of evaluation. The name of a single set may be empty.
        best: The key of the metric that selects the best model, with the name of its set, such as ``dev/accuracy``.
        primary: The metric that the task is usually judged by. This and the next names are without a set.
        lower_is_better: The metrics for which a lower value is better.
        neutral: The metrics for which neither a lower nor a higher value is better, such as a number of questions.
    """

    sets: Annotated[list[str], Field(min_length=1)]
    best: str
    primary: str
    lower_is_better: list[str]
    neutral: list[str]


class SplitRecord(Record):
    """The rows of a split: where they are from, how many they are, and the fingerprint of their content.

    Attributes:
        source: The name of the source in messages.
        fingerprint: A sha256 of the contents and of the options with which they were read.
        rows: Number of rows, without those that were skipped.
        rows_left_out: Number of rows that were skipped because they are invalid (``data.on_error = "skip"``).
        hub: The data set on the Hugging Face Hub with its commit. None if the rows are not from there.
    """

    source: str
    fingerprint: str
    rows: Count
    rows_left_out: Count = 0
    hub: dict[str, str | None] | None = None


class ChangeRecord(Record):
    """A setting, or a part of the environment, that changed when a run was resumed after ``step``.

    ``change`` is a text for people, such as ``optim.epochs = 4 (was 3)``.
    """

    step: Count
    change: str


class RunRecord(Record):
    """``run.json``, with all that bit-equal results and readers of metrics need.

    When a run is resumed, the file is written again with the present settings and environment. It keeps
    ``started`` and ``initial_weights``, and ``resumed_at`` and ``changes`` grow.

    Attributes:
        started: The time when the run began, in UTC, such as ``2026-11-30 14:05``. None if an older version wrote the
            file.
        threads: Number of threads of PyTorch on the CPU, in each process.
        matmul_library: The library that multiplies float32 matrices on the CPU.
        versions: The version of each library. None if it is not installed.
        device, device_name: The type of the device, such as ``cuda``, and the name of the GPU. None on other devices.
        attention: The kernel that computes attention.
        model: The ``name``, ``revision`` and ``commit`` of the model's files. Empty if they are not known.
        labels: The labels of the only task. Empty if there are several tasks.
        data: The rows of each split, training rows (``train``) first, then validation rows in the order of evaluation.
        rows: Number of training rows.
        steps: Number of optimizer steps of the whole run, as planned.
        vocabulary_rows: The number of rows of the word embeddings that are trained (``trained``), and of all rows
            (``all``). None if the run trains all of them or none.
        trained_parameters: Number of parameters that are trained, to which all rows of the word embeddings count
            unless they are frozen.
        initial_weights: The digest of the weights at the start of the run.
        encoder_weights: The digest of the encoder, which the checkpoints of adapters do not hold, so that a resumed
            run can tell whether it has the same one. None without adapters.
        resumed_at: The steps after which the run was resumed.
        changes: What differed from the earlier run each time that it was resumed.
        settings: All settings of the run by ``section.name``.
    """

    started: str | None = None
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
        """The fingerprint of the rows of each validation split by its name, in the order of evaluation."""
        return {name: split.fingerprint for name, split in self.data.items() if name != "train"}


class SummaryRecord(Record):
    """``metrics.json`` of a finished run, whose other fields are explained in ``FitResult``, the class that adds to it.

    Attributes:
        stopped_early: True if the patience of early stopping was used up, or if the callback ended the run.
    """

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
    """A line of ``metrics.jsonl``.

    Fields that are not declared are kept when a resumed run cuts the file, for example the ``rows`` of the event
    "diverged". Each event has a few of the fields:

    - "step": all but ``metrics`` and ``agreement``
    - "evaluation": ``metrics``
    - "agreement", at the end of a distillation: ``agreement``, but no ``epoch``
    - "diverged": ``loss``, ``learning_rate`` and ``grad_norm`` of the step that was not finite

    Attributes:
        step: Number of optimizer steps including the one that the event is about.
        epoch: Number of the present epoch, from 1. The default 0 stands for none.
        terms: The mean of each term of the loss, if there are several.
        agreement: For each validation set, the fraction of predictions that equal those of the teacher.
    """

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
        epoch, samples: The number of epochs, with the fraction of the present one, and of samples that the run has
            seen.
        data, versions: As in ``RunRecord``.
        best_step: The step of the best model so far. 0 if there is none yet.
        files: The ``sha256`` and the ``size`` (in bytes) of each file of the checkpoint.
    """

    step: Count
    epoch: float = 0.0
    samples: Count = 0
    processes: Annotated[int, Field(ge=1)] = 1
    seed: Count = 0
    data: dict[str, SplitRecord] = {}
    versions: dict[str, str | None] = {}
    best_step: Count = 0
    files: dict[str, dict[str, str | int]]


RecordT = TypeVar("RecordT", bound=Record)


def read_record(path: Path, record_class: type[RecordT], *, remedy: str) -> RecordT:
    """Reads the file of a record.

    Args:
        path: The file, which has to exist.
        record_class: The class that declares the fields of the file.
        remedy: What the user can do if the file is damaged, as a sentence without its full stop.

    Raises:
        UsageError: The file cannot be read, is too large or no JSON object, or a field is damaged.
    """
    try:
        content = read_json(path, max_bytes=_MOST_JSON_BYTES)
        return record_class.checked(content)
    except (CheckpointError, ValueError) as error:
        # The messages of read_json begin with the path, which would be there twice.
        reason = str(error).removeprefix(f"{path}: ")
        # Not by ``capitalize``, which would change the rest to lower case, and with it the paths.
        sentence = remedy[:1].upper() + remedy[1:]
        raise UsageError(f"{path} is damaged ({reason}). {sentence}") from None
