"""The JSON files of runs and experiments that later commands read.

Each class lists the fields of a file that commands read, with their types. Any other field may hold anything.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bert_tasks.checkpoints.files import read_json
from bert_tasks.data.problems import shortened
from bert_tasks.errors import CheckpointError, UsageError

_MOST_BYTES = 64 * 2**20
_MOST_THREADS = 2**15

Count = Annotated[int, Field(ge=0, lt=2**53)]
Number = Annotated[float, Field(allow_inf_nan=False)] | None  # null is a number that is not finite
Metrics = dict[str, Number]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True)


class _Metric(_Record):
    sets: Annotated[list[str], Field(min_length=1)]
    best: str
    primary: str
    lower_is_better: list[str]
    neutral: list[str]


class _Split(_Record):
    source: str
    fingerprint: str
    rows: Count
    rows_left_out: Count = 0
    hub: dict[str, str | None] | None = None


class _Change(_Record):
    step: Count
    change: str


class RunRecord(_Record):
    """``run.json``."""

    task: str
    labels: list[str]
    metrics: _Metric
    data: dict[str, _Split]
    rows: Count
    steps: Count
    seed: Count
    settings: dict[str, Any]
    versions: dict[str, str | None] = {}
    model: dict[str, str | None] = {}
    threads: Annotated[int, Field(ge=1, le=_MOST_THREADS)] = 1
    processes: Annotated[int, Field(ge=1)] = 1
    python: str = ""
    platform: str = ""
    device: str = ""
    resumed_at: list[Count] = []
    changes: list[_Change] = []


class SummaryRecord(_Record):
    """``metrics.json``."""

    model_config = ConfigDict(extra="forbid")
    metrics: Metrics
    last_metrics: Metrics
    best_step: Count
    steps: Count
    stopped_early: bool
    train_seconds: float
    collapse: str | None = None
    notes: list[str]


class EventRecord(_Record):
    """A line of ``metrics.jsonl``."""

    event: Literal["step", "evaluation", "agreement", "diverged"]
    step: Count
    epoch: Count = 0
    loss: Number = None
    learning_rate: Number = None
    grad_norm: Number = None
    tokens_per_second: Number = None
    terms: Metrics = {}
    metrics: Metrics = {}
    agreement: dict[str, float] = {}


class _Seed(_Record):
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    failure: str | None


class SeedsRecord(_Record):
    """``seeds.json``."""

    runs: list[_Seed]
    failed: dict[str, str]


class _FoldMetric(_Record):
    pooled: Number
    mean: Number
    std: Number


class _Fold(_Record):
    fold: Annotated[int, Field(ge=1, lt=2**31)]
    rows: Count
    metrics: Metrics


class FoldsRecord(_Record):
    """``folds.json``."""

    metric: str
    summary: str
    rows: Count
    metrics: dict[str, _FoldMetric]
    runs: Annotated[list[_Fold], Field(min_length=1)]
    notes: list[str]


class StateRecord(_Record):
    """The progress of a run in a checkpoint. See ``TrainerState``."""

    model_config = ConfigDict(extra="forbid")
    step: Count
    evaluated_step: Count
    best: Metrics
    best_value: Number
    best_loss: Number
    best_step: Count
    best_collapse: str | None
    last: Metrics
    since_best: Count
    seconds: float
    overflows: Count
    stopped: bool
    tuned: dict[str, Any]


def read_record(path: Path, record: type[BaseModel], *, remedy: str) -> dict[str, Any]:
    """Reads a file. Raises UsageError with ``remedy`` if a field is damaged."""
    try:
        content = read_json(path, max_bytes=_MOST_BYTES)
        check_record(content, record)
    except (CheckpointError, ValueError) as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise UsageError(f"{path} is damaged ({reason}). {remedy[:1].upper()}{remedy[1:]}") from None
    return content


def check_record(content: object, record: type[BaseModel]) -> None:
    """Raises ValueError with the name of a field that is missing or has another type."""
    try:
        record.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(map(str, first["loc"]))
        raise ValueError(f"{location} = {shortened(first['input'])}, {first['msg']}") from None
