"""Evaluation and prediction over files and tables, on one or many processes.

Owns how work is shared between processes: batches are formed from the data alone, each process takes whole batches, and
results come back by sample, so that the digits do not depend on the number of processes. Must not know training.

Shape legend: S samples (rows or windows).
"""

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, gather_object
from torch import Tensor

from bert_tasks.data.batching import Samples, longest_first
from bert_tasks.data.columns import Row
from bert_tasks.data.readers import Reading
from bert_tasks.data.table import RowTable
from bert_tasks.data.writers import checked_output, whole_file, write_rows
from bert_tasks.errors import BertTasksError, CheckpointError, DataError, GivenUpError, UsageError
from bert_tasks.model.inputs import Data, load_table, tokenized
from bert_tasks.model.onnx import DType, Logits, logits_of
from bert_tasks.model.predicting import batch_logits, batch_tokens, predict_rows, summaries
from bert_tasks.model.task_model import TaskModel
from bert_tasks.model.trained import load_trained
from bert_tasks.tasks import TASKS
from bert_tasks.tasks.base import Feature, Prediction, Task

DECODED_ROWS = 1000  # rows per call of ``Task.decode``

Result = TypeVar("Result")

# What accelerate may be configured to do that this package neither wants nor tests.
_PLAIN = ("NO", "MULTI_CPU", "MULTI_GPU")


def make_accelerator(mixed_precision: str = "no", *, timeout: float | None = None) -> Accelerator:
    """The one place that decides about devices and processes.

    Without a GPU ``cpu=True`` is needed: a plain ``Accelerator()`` started by torchrun would run every process alone.
    ``timeout``: seconds that processes wait for each other; the first call decides. None: torch's 30 minutes (10 on
    GPUs).

    Raises:
        UsageError: the launcher started more processes than take part, fp16 without a GPU, or an accelerate
            configuration that would change the training (accumulation, FSDP, DeepSpeed, ...).
    """
    cuda = torch.cuda.is_available()
    if mixed_precision == "fp16" and not cuda:
        raise UsageError("mixed_precision = 'fp16' needs a GPU; on a CPU use 'bf16' or 'no'")
    _forget_precision(mixed_precision)
    group = [] if timeout is None else [InitProcessGroupKwargs(timeout=timedelta(seconds=timeout))]
    accelerator = Accelerator(cpu=not cuda, mixed_precision=mixed_precision, kwargs_handlers=group)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise UsageError(
            f"the launcher started {launched} processes, but {accelerator.num_processes} take part; "
            "start with: torchrun --nproc_per_node N -m bert_tasks ..."
        )
    if launched > 1:
        atexit.unregister(leave_process_group)
        atexit.register(leave_process_group)
    kind = accelerator.distributed_type.name
    if accelerator.gradient_accumulation_steps != 1 or kind not in _PLAIN:
        raise UsageError(
            f"accelerate is configured for {kind} with {accelerator.gradient_accumulation_steps} accumulation steps; "
            "change the configuration: here optim.micro_batch_tokens decides about accumulation, on plain processes"
        )
    return accelerator


def leave_process_group() -> None:
    """Ends the communication threads while Python still runs: one that asks for the interpreter later aborts it."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def is_first_process() -> bool:
    """Whether this is the first of the processes that work together, or the only one."""
    return bool(PartialState(cpu=not torch.cuda.is_available()).is_main_process)


def from_first_process(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """What the first process makes, on every process.

    Raises:
        BertTasksError: what the first process raised, on every process: none is left waiting.
    """
    outcome: list[tuple[Result | None, tuple[int, str] | None]] = [(None, None)]
    if accelerator.is_main_process:
        try:
            outcome = [(work(), None)]
        except BertTasksError as error:
            if accelerator.num_processes == 1:
                raise
            outcome = [(None, (error.exit_code, str(error)))]
    broadcast_object_list(outcome)
    result, failure = outcome[0]
    if failure is not None:
        code, text = failure
        kinds = (UsageError, DataError, CheckpointError)
        told = next((kind for kind in kinds if kind.exit_code == code), BertTasksError)(text)
        told.collective = True
        raise told
    return cast("Result", result)


def first_process_first(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """Runs work on the first process, then on the others, which find its results in the cache.

    Raises:
        BertTasksError: see ``from_first_process``.
    """
    own: list[Result] = []
    from_first_process(accelerator, lambda: own.append(work()))
    return own[0] if own else work()


def _forget_precision(wanted: str) -> None:
    """Lets a process train in one precision and go on in another: accelerate keeps its first choice for good.

    Clears the state that all accelerators of the process share; it has no public way. The process group, which
    accelerate holds elsewhere, stays.
    """
    stored = AcceleratorState._shared_state
    if stored.get("_mixed_precision", wanted) != wanted:
        stored.clear()


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Metrics of one data set (with ``loss`` where rows have targets), and the prediction of every row."""

    metrics: dict[str, float]
    predictions: list[Prediction]
    task: Task


@dataclass(frozen=True, kw_only=True)
class _BatchResult:
    """One batch's contribution, small enough to send between processes."""

    samples: list[int]
    summaries: tuple[Tensor, ...]
    loss: float
    count: float


def evaluate_samples(
    model: TaskModel,
    samples: Samples,
    table: RowTable,
    accelerator: Accelerator,
    *,
    tune: bool = False,
    run: Logits | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Evaluates an unwrapped model; every process returns the same numbers.

    Args:
        tune: choose the task's thresholds on these predictions and report the metrics they give.
        run: what runs a batch in place of the model.
        stop: asked before each batch whether to give up.

    Raises:
        BertTasksError: not every sample came back exactly once (a defect, never hidden).
        GivenUpError: on every process, if ``stop`` said so on one.
    """
    batches = longest_first(samples.lengths, max_tokens=batch_tokens(model))
    mine = batches[accelerator.process_index :: accelerator.num_processes]
    results = [_run_batch(model, samples, batch, run) for batch in takewhile(lambda _: not stop(), mine)]
    if any(gather_object([len(results) < len(mine)])):
        raise GivenUpError
    results = gather_object(results)
    return from_first_process(accelerator, lambda: _evaluation(model, samples, table, results, tune=tune))


def _run_batch(model: TaskModel, samples: Samples, chosen: list[int], run: Logits | None) -> _BatchResult:
    features = cast("list[Feature]", samples.whole_features_of(chosen))
    batch, logits = batch_logits(model, features, run=run)
    with torch.inference_mode():
        loss = model.task.loss(logits.double(), batch)
    return _BatchResult(
        samples=chosen,
        summaries=summaries(model, batch, logits, features),
        loss=loss.total.item(),
        count=loss.count.item(),
    )


def _evaluation(
    model: TaskModel, samples: Samples, table: RowTable, results: Sequence[_BatchResult], *, tune: bool
) -> Evaluation:
    """Decodes and scores in row order, whatever the order in which batches came back."""
    ordered = sorted(results, key=lambda result: result.samples[0])
    found = _by_feature(samples, ordered)
    rows = list(table)
    task, predictions = model.task, _decoded(model.task, samples, found, rows)
    extra: dict[str, float] = {}
    if tune:
        task = task.tuned_on(predictions, rows)
        if task != model.task:
            extra = {f"untuned_{task.primary_metric}": model.task.metrics(predictions, rows)[task.primary_metric]}
            predictions = _decoded(task, samples, found, rows)
    count = sum(result.count for result in ordered)
    loss = {"loss": sum(result.loss for result in ordered) / count} if count else {}
    metrics = {**loss, **task.metrics(predictions, rows), **extra}
    return Evaluation(metrics=metrics, predictions=predictions, task=task)


def _by_feature(samples: Samples, results: Sequence[_BatchResult]) -> list[Tensor]:
    """All summaries in feature order."""
    seen = sorted(sample for result in results for sample in result.samples)
    if seen != list(range(len(samples))):
        raise BertTasksError(f"evaluation saw {len(seen)} samples of {len(samples)}: please report this")
    found: dict[int, Tensor] = {}
    for result in results:
        found |= zip(samples.indices(result.samples), result.summaries, strict=True)
    return [found[i] for i in range(len(found))]


def _decoded(task: Task, samples: Samples, found: Sequence[Tensor], rows: Sequence[Row]) -> list[Prediction]:
    """All predictions, decoded in blocks of rows, because what decoding reads may be large."""
    predictions: list[Prediction] = []
    for first in range(0, len(rows), DECODED_ROWS):
        end = min(first + DECODED_ROWS, len(rows))
        features = cast("list[Feature]", samples.decoded_rows(first, end))
        block = found[samples.row_starts[first] : samples.row_starts[end]]
        predictions += task.decode(block, features, rows[first:end])
    return predictions


def evaluate(
    model: TaskModel | str | Path,
    data: Data,
    *,
    task: str | type[Task] | None = None,
    settings: Mapping[str, Any] | None = None,
    revision: str | None = None,
    dtype: DType = "float32",
    **reading: Any,
) -> dict[str, float]:
    """Metrics of a model on rows with targets, the same digits on any number of processes.

    Args:
        model: a model, or a folder or name that says what its task is (``revision`` of a hub id).
        task: a task's name, or its class, for a folder that does not say what its task is.
        settings: fields of the task to change, of a model that is loaded here.
        data: a file (csv, tsv, jsonl, parquet, or ``format="glue/sst2"``), or rows.
        dtype: ``int8`` runs a quantised copy of the model on the CPU, which takes seconds to make (extra ``export``).
        reading: fields of ``Reading``: columns, format, delimiter, encoding.

    Raises:
        DataError: naming every bad row.
        CheckpointError: the model cannot be loaded.
    """
    accelerator = make_accelerator()
    how = Reading(**reading)
    loaded = load_trained(model, task=task, settings=settings, reading=how, revision=revision).to(accelerator.device)

    def load() -> tuple[RowTable, Samples]:
        table = load_table(data, loaded.task, reading=how)
        if len(table) == 0:
            raise DataError(f"{table.source}: no rows to evaluate")
        return table, tokenized(table, loaded.task, loaded)

    table, samples = first_process_first(accelerator, load)
    return evaluate_samples(loaded, samples, table, accelerator, run=logits_of(loaded, dtype)).metrics


@overload
def predict(model: TaskModel | str | Path, data: Data, *, output: None = None, **options: Any) -> list[Prediction]: ...


@overload
def predict(model: TaskModel | str | Path, data: Data, *, output: str | Path, **options: Any) -> int: ...


def predict(
    model: TaskModel | str | Path,
    data: Data,
    *,
    output: str | Path | None = None,
    task: str | type[Task] | None = None,
    settings: Mapping[str, Any] | None = None,
    revision: str | None = None,
    dtype: DType = "float32",
    **reading: Any,
) -> list[Prediction] | int:
    """One prediction per row, in row order; with ``output`` they go there as they are made, and only their number back.

    The output is .jsonl, .csv or .tsv, which a file of any size fits through; or a format of the task, which holds all
    predictions in memory: .conll (words, gold tags where there are any, tags), or .json for span extraction
    (predictions in SQuAD's form, beside it nbest.json and null_odds.json). A file appears whole or not at all. Targets
    in the data are not needed. See ``evaluate`` for the other arguments.

    Raises:
        DataError: naming every bad row.
        UsageError: an output whose extension is not known.
        CheckpointError: the model cannot be loaded.
    """
    own = type(model.task) if isinstance(model, TaskModel) else task
    kinds = [*TASKS.values(), *([own] if isinstance(own, type) else [])]
    known = {extension for kind in kinds for extension in kind.file_formats}
    target = None if output is None else checked_output(Path(output), others=sorted(known))
    how = Reading(**reading)
    loaded = load_trained(model, task=task, settings=settings, reading=how, revision=revision)
    rendered = target is not None and target.suffix in known
    if target is not None and rendered and target.suffix not in loaded.task.file_formats:
        raise UsageError(
            f"{target}: {loaded.task.name} has no output format {target.suffix!r}; use .jsonl, .csv or .tsv"
        )
    if torch.cuda.is_available():
        loaded.to("cuda")
    shows_targets = rendered and loaded.task.renders_targets
    table = load_table(data, loaded.task, reading=how, targets="optional" if shows_targets else "unread")
    predictions = predict_rows(loaded, table, run=logits_of(loaded, dtype))
    if target is None:
        return list(predictions)
    if not rendered:
        return write_rows((prediction.to_json() for prediction in predictions), target)
    return _write_rendered(loaded.task, list(predictions), table, target)


def _write_rendered(task: Task, predictions: list[Prediction], table: RowTable, target: Path) -> int:
    for name, text in task.render(target.suffix, predictions, list(table)).items():
        with whole_file(target.with_name(name) if name else target) as file:
            file.write(text)
    return len(predictions)
