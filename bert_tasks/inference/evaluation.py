"""Evaluation over files and tables, on one or many processes.

Batches are formed from the data alone, each process takes whole batches, and results come back by sample, so that the
digits do not depend on the number of processes. A sum of floating-point numbers depends on the order of its terms, and
a matrix product on the shape of the batch, so anything else would make metrics differ in the last digits.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise, takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, Unpack, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from bert_tasks.checkpoints.hub import RUN_GENERATOR, resolve
from bert_tasks.data.checks import check_heads
from bert_tasks.data.columns import PassthroughColumns, Row, head_rows
from bert_tasks.data.features import Samples, longest_first
from bert_tasks.data.issues import RowIssues
from bert_tasks.data.options import Document, ReadingArguments, ReadOptions
from bert_tasks.data.rows import Rows
from bert_tasks.distributed import broadcast_from_main, is_main_process, main_process_first, make_accelerator
from bert_tasks.encoder.cpu import map_batches
from bert_tasks.errors import BertTasksError, DataError, GivenUpError, UsageError, argument
from bert_tasks.inference.own_metrics import OwnMetric, metrics_of_head, own_metrics
from bert_tasks.inference.precision import DType, logits_of
from bert_tasks.inference.replaced_tokens import replaced_token_output
from bert_tasks.inference.writing import check_row_options
from bert_tasks.metrics.tables import LOSS, merged, untuned
from bert_tasks.model.encoder_with_heads import ForwardFn, require_labels
from bert_tasks.model.features import cut_notes, tokenized, unknown_tokens, vocabulary_name
from bert_tasks.model.heads import joined_metrics
from bert_tasks.model.inputs import Data, load_table, load_trained, reading_for_labels
from bert_tasks.model.multitask import AnyModel
from bert_tasks.model.shared_heads import features_of_head
from bert_tasks.model.task_model import TaskModel
from bert_tasks.model.windows import (
    batch_tokens,
    compact_logits,
    in_evaluation,
    loss_terms,
    pack_features,
    prepared_features,
)
from bert_tasks.outputs.calibration import ECE
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.recipe.schema import MetricSources
from bert_tasks.storage import sha256
from bert_tasks.tasks.base import FeatureKeys, Task, is_dynamic
from bert_tasks.tasks.several import task_name

_log = logging.getLogger("bert_tasks")

DECODED_ROWS = 1000  # rows per call of ``Output.decode``
_HASHED_FEATURES = 1000  # features that are read at a time to be hashed
# Used instead of the run's seed, so that two evaluations and two models see the same masks.
EVALUATION_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Score:
    """The evaluation of one head, on the rows that have a label for it (``head_rows``)."""

    metrics: dict[str, float]
    rows: Sequence[Row]
    predictions: list[Prediction]  # one for each row
    task: Task  # with the thresholds and the temperature that were fitted, if any were
    collapse: str | None = None  # see ``Output.degeneracy``


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The evaluation of one data set.

    Attributes:
        metrics: With ``loss`` if rows have labels, and with the mean of the primary metrics of several heads.
        scores: The score of each head that has labelled rows, by its name.
    """

    metrics: dict[str, float]
    scores: Mapping[str, Score]

    @property
    def collapse(self) -> str | None:
        """The first note on a head that predicts the same everywhere."""
        for name, score in self.scores.items():
            if score.collapse is not None and name:
                return f"{score.collapse} ({name})"
            if score.collapse is not None:
                return score.collapse
        return None


class EvaluationCorpus(Sequence[Feature]):
    """The features of a table for ``Task.prepare``, in an order set by their content.

    Documents (rows) are in the order of the hashes of their content, and ``row`` is the rank of a document in this
    order. Equal documents have the same rank. Masks are drawn from content instead of row numbers, so that a row has
    the same masks in every file, wherever it stands.
    """

    def __init__(self, samples: Samples) -> None:
        self._features, self._hashes = samples.features, list[int]()
        for table in samples.features.tables(["input_ids"], size=_HASHED_FEATURES):
            self._hashes += map(content_hash, table.column(0).to_pylist())
        windows = [range(*ends) for ends in pairwise(samples.row_starts.tolist())]  # of each document
        documents = [content_hash([self._hashes[feature] for feature in numbers]) for numbers in windows]
        ranks = {document: rank for rank, document in enumerate(sorted(set(documents)))}
        self._ranks: list[int] = []  # of each feature
        for document, numbers in zip(documents, windows, strict=True):
            self._ranks += [ranks[document]] * len(numbers)
        self._order = sorted(range(len(self._ranks)), key=self._ranks.__getitem__)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):  # ``range`` resolves negative ends and steps
            return [self[i] for i in range(len(self))[index]]
        feature = self._order[index]
        return {**self._features[feature], "row": self._ranks[feature]}

    def prepare(self, model: AnyModel, features: Sequence[Feature], numbers: Sequence[int]) -> list[Feature]:
        """Returns the prepared features of these numbers, equal for equal windows."""
        ranked: list[Feature] = [
            {**feature, "row": self._ranks[number]} for feature, number in zip(features, numbers, strict=True)
        ]
        hashes = [self._hashes[number] for number in numbers]
        keys = FeatureKeys(seed=EVALUATION_SEED, epoch=0, numbers=hashes, is_evaluation=True)
        changed = prepared_features(model, ranked, keys, self)
        return [{**new, "row": old["row"]} for new, old in zip(changed, features, strict=True)]


def content_hash(values: Sequence[int]) -> int:
    """Returns a 64-bit hash of non-negative numbers, the same on every machine.

    Python's own ``hash`` may differ between versions, and the order of bytes between processors.
    """
    return int(sha256(np.asarray(values, dtype="<u8").tobytes())[:16], 16)


class _BatchResult(NamedTuple):
    """The results of one batch, small enough to send between processes."""

    samples: list[int]
    summaries: tuple[Tensor, ...]
    loss: list[tuple[float, float]]  # weighted sum and count of each term


def evaluate_samples(
    model: AnyModel,
    samples: Samples,
    table: Rows,
    accelerator: Accelerator,
    *,
    tune: bool = False,
    forward_fn: ForwardFn | None = None,
    stop: Callable[[], bool] = lambda: False,
    metrics: Sequence[OwnMetric] = (),
) -> Evaluation:
    """Evaluates an unwrapped model. Every process returns the same numbers.

    Args:
        model: The model, without wrappers such as DistributedDataParallel, because no gradients are shared.
        samples: The features of ``table``.
        table: The rows.
        accelerator: The processes.
        tune: Fit the temperature and the thresholds of each task to these predictions, and report the metrics with
            them.
        forward_fn: Computes a batch's logits instead of the model.
        stop: Asked before each batch. If it is true on one process, all raise GivenUpError.
        metrics: Further metrics, which the main process computes.

    Raises:
        GivenUpError: ``stop`` was true on a process.
        DataError: No row has a label.
    """
    batches = longest_first(samples.lengths, max_tokens=batch_tokens(model))
    mine = batches[accelerator.process_index :: accelerator.num_processes]
    results = _run_batches(model, samples, takewhile(lambda _: not stop(), mine), forward_fn)
    # All processes must come to this line, else those that did would wait for the others forever.
    if any(gather_object([len(results) < len(mine)])):
        raise GivenUpError
    results = gather_object(results)  # of all processes, in an order that depends on them
    return broadcast_from_main(accelerator, lambda: _evaluation(model, samples, table, results, metrics, tune=tune))


def evaluated_predictions(model: AnyModel, table: Rows) -> dict[str, list[Prediction]]:
    """Returns the predictions of each head for labelled rows, from which metrics are computed.

    Only this process computes them. They differ from ``predict`` if a task prepares rows for evaluation, for example by
    masking tokens.
    """
    samples = tokenized(table, model)
    batches = longest_first(samples.lengths, max_tokens=batch_tokens(model))
    outputs = _Outputs.of(samples, _run_batches(model, samples, batches, _forward_fn(model, "float32")))
    rows = list(table)
    return {name: outputs.decoded(name, of_head.task, of_head, rows) for name, of_head in model.heads.items()}


def _forward_fn(model: AnyModel, dtype: DType) -> ForwardFn:
    """Returns what runs the model on a prepared batch, with the run's generator if there is one.

    A discriminator (ELECTRA) finds the tokens that a generator has replaced, so it cannot be evaluated without the
    generator that it was trained against.
    """
    forward_fn = logits_of(model, dtype)
    if all(task.generator() is None for task in model.tasks.values()):
        return forward_fn
    if model.origin is None or model.origin.commit is not None:
        where = "which is not known for this model"
    elif not (folder := resolve(model.origin.name).parent / RUN_GENERATOR).is_dir():
        where = f"but {folder} does not exist"
    else:
        generator = TaskModel.from_pretrained(folder).to(model.device, model.encoder.embeddings.word.weight.dtype)
        tables = [module.encoder.embeddings.word.weight for module in (model, generator)]
        if tables[0].shape == tables[1].shape and torch.equal(*tables):  # training ties them
            generator_dtype: DType = dtype
            if dtype == "int8":
                generator_dtype = "float32"  # ``quantize`` writes ranges for the discriminator alone
            generate = logits_of(generator, generator_dtype)
            return partial(replaced_token_output, generator=generate, discriminator=forward_fn)
        where = f"but the generator in {folder} belongs to other weights"
    raise UsageError(
        f"{task_name(model.tasks)}: a model is evaluated with its generator, {where}. Evaluate the output "
        "folder of the run (or its model/, beside which the run has saved generator/). The metrics of the run are in "
        "its metrics.json"
    )


def _run_batches(
    model: AnyModel, samples: Samples, batches: Iterable[list[int]], forward_fn: ForwardFn | None
) -> list[_BatchResult]:
    """Runs batches of samples, which are given by their numbers, without gradients and dropout."""
    run_batch = model if forward_fn is None else forward_fn
    corpus: EvaluationCorpus | None = None
    if any(is_dynamic(task) for task in model.tasks.values()):  # tasks that mask or draw tokens
        corpus = EvaluationCorpus(samples)

    def prepared(batch: list[int]) -> tuple[list[int], Sequence[Feature]]:
        features = cast("list[Feature]", samples.whole_features_of(batch))
        if corpus is None:
            return batch, features
        return batch, corpus.prepare(model, features, samples.indices(batch))

    def run(inputs: tuple[list[int], Sequence[Feature]]) -> _BatchResult:
        numbers, features = inputs
        with torch.inference_mode():
            batch = pack_features(model, features)
            logits = run_batch(batch).to(torch.float32)
            # Losses are summed over all rows, where float32 would lose digits that two checkpoints differ in.
            terms = loss_terms(model, logits.to(torch.float64), batch)
            summaries = compact_logits(model, batch, logits, features)
        loss = [(term.weight * term.total.item(), term.count.item()) for term in terms]
        return _BatchResult(samples=numbers, summaries=summaries, loss=loss)

    with in_evaluation(model):
        return list(map_batches(run, map(prepared, batches), device=model.device))


def _evaluation(
    model: AnyModel,
    samples: Samples,
    table: Rows,
    results: Sequence[_BatchResult],
    own: Sequence[OwnMetric],
    *,
    tune: bool,
) -> Evaluation:
    """Decodes and scores in row order, whatever the order in which batches came back."""
    ordered = sorted(results, key=lambda result: result.samples[0])
    seen = sorted(chain.from_iterable(result.samples for result in ordered))
    if seen != list(range(len(samples))):
        raise BertTasksError(f"evaluation saw {len(seen)} of {len(samples)} samples. Please report this")
    outputs, rows = _Outputs.of(samples, ordered), list(table)
    scores = {}
    for name, of_head in model.heads.items():
        score = _score(name, of_head, outputs, rows, own, tune=tune)
        if score is not None:
            scores[name] = score
    if not scores:
        raise DataError(f"no row has a label of the tasks {', '.join(model.heads)}")
    means: list[float] = []
    for parts in zip(*(batch.loss for batch in ordered), strict=True):  # each term, with its part of each batch
        total = sum(part_total for part_total, _ in parts)
        count = sum(part_count for _, part_count in parts)
        if count:  # the mean over all rows is the sum of totals by that of counts, and not a mean of means
            means.append(total / count)
    loss: dict[str, float] = {}
    if means:
        loss[LOSS] = sum(means)  # which since Python 3.12 has other last digits than one addition after the other
    metrics = joined_metrics({name: score.metrics for name, score in scores.items()}, model.tasks)
    return Evaluation(metrics=merged(loss, metrics), scores=scores)


def _score(
    name: str, model: TaskModel, outputs: "_Outputs", rows: Sequence[Row], own: Sequence[OwnMetric], *, tune: bool
) -> Score | None:
    """Returns the score of a head, or None if no row has a label for it."""
    task, untuned_metrics = model.task, dict[str, float]()
    _, rows_of_head = head_rows(rows, name, task.columns)  # one task has all rows, several those with a label of it
    if not rows_of_head:
        return None
    predictions = outputs.decoded(name, task, model, rows)
    if tune:
        output = task.output
        # The temperature first, because thresholds are for the probabilities that it changes.
        if output.calibrates:
            output = output.calibrate(*outputs.of_head(name, task, rows))
        calibrated = replace(task, output=output)
        task = replace(task, output=output.tune(predictions, rows_of_head))
        if task != model.task:
            # Metrics of fitted values are optimistic on the rows that they were fitted to, so those that changed are
            # reported without them, too.
            for key, value in model.task.output.metrics(predictions, rows_of_head).items():
                is_calibration_error = key.rpartition(".")[2] == ECE
                is_tuned = key == task.output.primary_metric and task != calibrated
                if is_calibration_error or is_tuned:
                    untuned_metrics[untuned(key)] = value
            predictions = outputs.decoded(name, task, model, rows)
    metrics = merged(task.output.metrics(predictions, rows_of_head), untuned_metrics)
    if own:
        taken = {*metrics, LOSS}
        metrics |= metrics_of_head(own, name, task.output, predictions, rows_of_head, taken)
    collapse = task.output.degeneracy(predictions, rows_of_head)
    return Score(metrics=metrics, rows=rows_of_head, predictions=predictions, task=task, collapse=collapse)


@dataclass(frozen=True, kw_only=True)
class _Outputs:
    """The compact logits of all features of a table, in order."""

    samples: Samples
    compact: Sequence[Tensor]

    @classmethod
    def of(cls, samples: Samples, results: Sequence[_BatchResult]) -> Self:
        by_index: dict[int, Tensor] = {}
        for result in results:
            by_index |= zip(samples.indices(result.samples), result.summaries, strict=True)
        return cls(samples=samples, compact=[by_index[index] for index in sorted(by_index)])

    def of_head(
        self, name: str, task: Task, rows: Sequence[Row], first: int = 0, end: int | None = None
    ) -> tuple[list[Tensor], list[Feature], list[Row]]:
        """Returns the arguments of ``Output.decode`` for a head's labelled rows from first to end - 1."""
        if end is None:
            end = len(rows)
        numbers, rows_of_head = head_rows(rows[first:end], name, task.columns)
        all_features = cast("list[Feature]", self.samples.decoded_rows(first, end))
        starts = self.samples.row_starts
        all_compact = self.compact[starts[first] : starts[end]]
        features, compact = features_of_head(name, numbers, all_features, all_compact)
        return compact, features, rows_of_head

    def decoded(self, name: str, task: Task, model: TaskModel, rows: Sequence[Row]) -> list[Prediction]:
        """Returns the predictions of a head's labelled rows, decoded in chunks of rows to save memory."""
        predictions: list[Prediction] = []
        for first in range(0, len(rows), DECODED_ROWS):
            end = min(first + DECODED_ROWS, len(rows))
            compact, features, rows_of_head = self.of_head(name, task, rows, first, end)
            if rows_of_head:
                predictions += task.output.decode(compact, features, rows_of_head, model.require_tokenizer())
        return predictions


def evaluate(
    model: AnyModel | str | Path,
    data: Data,
    *,
    task: str | type[Task] | None = None,
    settings: Mapping[str, Any] | None = None,
    revision: str | None = None,
    adapter: str | Path | None = None,
    dtype: DType = "float32",
    metrics: MetricSources = (),
    document: Document | None = None,
    on_error: Literal["fail", "skip"] | None = None,
    **reading: Unpack[ReadingArguments],
) -> dict[str, float]:
    """Returns the metrics of a model on rows with labels.

    Use it for a test set that was not part of training. The metrics are those that ``fit`` reports. All rows are
    tokenized first and run in batches of similar lengths. Under ``accelerate launch`` or ``torchrun`` the processes
    divide the batches, and all of them return the same numbers, which do not depend on how many processes there are.

    Args:
        model: A model or its name. The folder of a run stands for its best model.
        data: A file (csv, tsv, jsonl, parquet, or ``format="glue/sst2"``), or rows.
        task: Name or class of the task, for a folder that does not say what its task is, or the name of one of several
            tasks. Default: the tasks of the folder.
        settings: Fields of the task to change, if the model is loaded here.
        revision: See ``TaskModel.from_pretrained``.
        adapter: See ``TaskModel.from_pretrained``.
        dtype: ``float32`` (default), ``int8`` for a quantised copy of the encoder on the CPU, for which `quantize`
            prepares the folder, or ``bf16`` for the encoder, which a CPU computes faster only with avx512_bf16 or AMX.
            The generator of ReplacedTokens stays in float32 with ``int8``.
        metrics: Metrics of your own, see ``fit``.
        document: A document in a file of text: "blank-line", "line" or "file". Default: as in training.
        on_error: "fail" to stop at rows that cannot be used, or "skip" to leave them out of the metrics, which a
            warning counts. Default: as in training.
        reading: Fields of `ReadOptions`. Default: as the training file was read, if the file has its extension, and
            columns with the names of the training data. A warning names the options that are not the usual ones.

    Returns:
        The metrics by their names, in the order of the reports. ``loss`` is the mean loss of the task. With several
        tasks names begin with that of the task, such as ``intent.accuracy``, and ``mean_primary_metric`` is the mean of
        the primary metrics.

    Raises:
        DataError: Rows cannot be used. The message names all of them.
        CheckpointError: The model cannot be loaded.
        RecipeError, UsageError: One of ``metrics`` cannot be loaded, fails or returns anything but numbers.

    Examples:
        >>> metrics = evaluate("runs/first", "test.csv")
        >>> "accuracy" in metrics, "macro_f1" in metrics
        (True, True)
    """
    options = ReadOptions.from_arguments(evaluate, reading, document=document)
    loading: dict[str, Any] = {"task": task, "settings": settings, "revision": revision, "adapter": adapter}
    model = load_trained(model, data=data, reading=options, **loading)
    return evaluate_data(model, data, dtype=dtype, reading=options, on_error=on_error, metrics=metrics).metrics


def labelled_table(
    model: AnyModel,
    data: Data,
    *,
    reading: ReadOptions,
    on_error: Literal["fail", "skip"] | None = None,
    passthrough: PassthroughColumns = "none",
) -> Rows:
    """Returns the rows with labels that a model is evaluated on.

    Args:
        model: The model, whose training file says how a file is read and what is done with rows that cannot be used.
        data, reading, on_error: See ``evaluate``. A warning counts the rows that are left out.
        passthrough: See ``read``.

    Raises:
        DataError: Rows are bad. The message lists them.
        UsageError: ``on_error`` has another value.
    """
    if isinstance(data, Rows):
        return data
    action = model.reading.on_error if on_error is None else on_error
    check_row_options("none", action)
    try:
        table = load_table(
            data,
            model.row_columns,
            known_labels=model.labels,
            names=model.columns,
            reading=reading_for_labels(model, data, reading),
            passthrough=passthrough,
            skip_errors=action == "skip",
        ).without_errors()
    except RowIssues as error:
        if action == "fail":
            error.advice = f"pass {argument('on_error', 'skip')} to leave such rows out"
        raise
    columns = model.row_columns
    if isinstance(columns, Mapping) and len(table) > 0:
        check_heads(table, columns)
    if is_main_process():
        for note in table.notes:
            _log.warning("%s: %s", table.source, note)
    return table


def evaluate_data(
    model: AnyModel,
    data: Data,
    *,
    reading: ReadOptions,
    dtype: DType = "float32",
    on_error: Literal["fail", "skip"] | None = None,
    metrics: MetricSources = (),
) -> Evaluation:
    """Evaluates a model in memory, and returns the predictions with the metrics. See ``evaluate``."""
    require_labels(model)
    accelerator = make_accelerator()
    forward_fn = _forward_fn(model.to(accelerator.device), dtype)
    with main_process_first(accelerator):  # the other processes read what the first one has put into the cache
        own = own_metrics(metrics, model.tasks)
        table = labelled_table(model, data, reading=reading, on_error=on_error)
        if len(table) == 0:
            raise DataError(f"{table.source}: no rows to evaluate")
        samples = tokenized(table, model)
    if accelerator.is_main_process:
        unknown = unknown_tokens(samples, model).warnings(vocabulary_name(model))
        for note in (*cut_notes(samples, model, rows=len(table)), *unknown):
            _log.warning("%s: %s", table.source, note)
    evaluation = evaluate_samples(model, samples, table, accelerator, forward_fn=forward_fn, metrics=own)
    if accelerator.is_main_process and evaluation.collapse is not None and not isinstance(data, Rows):
        _log.warning("%s: the model %s, although the labels of the rows differ", table.source, evaluation.collapse)
    return evaluation
