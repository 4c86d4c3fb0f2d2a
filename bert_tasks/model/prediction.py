"""From rows to predictions: batches of rows, features, logits, predictions.

The functions loop over the tasks of a model. ``TaskModel.predict`` and ``MultiTaskModel.predict``, and everything that
writes, serves or checks predictions, go through ``predict_batch``. Its steps are those of every encoder: the task
makes windows of token ids from the rows (features), the model computes logits, and the output decodes them.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from bert_tasks.data.batch import MOST_ROWS
from bert_tasks.data.columns import Row, as_rows, input_rows
from bert_tasks.data.reading import given_rows, is_frame, valid_rows
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.model.encoder_with_heads import EncoderWithHeads, ForwardFn, Inputs, require_labels
from bert_tasks.model.explanation import check_explainable, explained
from bert_tasks.model.shared_heads import features_of_head
from bert_tasks.model.windows import features_of, finite, forward_windows
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.tasks.base import Task
from bert_tasks.tasks.several import choose_one

BATCH_ROWS = 1024
REQUIRED_AGREEMENT = 0.95  # share of decisions that a model in int8 must have in common with the model
EXPLAINED_ROWS = 32  # in a batch, because an explanation takes as long as 100 predictions

HeadPredictions = dict[str, Prediction]  # name of each head that has an input in a row -> its prediction of the row


def batch_rows(model: EncoderWithHeads, *, explain: bool) -> int | None:
    """Returns the number of rows to predict together. None if the features of a row depend on the rows around it."""
    tasks = model.tasks.values()
    if any(task.needs_document for task in tasks):
        return None
    most = EXPLAINED_ROWS if explain else BATCH_ROWS
    # Some tasks make several windows of a row, for example a zero-shot classifier one for each label.
    return max(1, most // max(task.windows_per_row for task in tasks))


def predict_rows(
    model: EncoderWithHeads,
    rows: Inputs,
    *,
    forward_fn: ForwardFn | None = None,
    logits: bool = False,
    explain: bool = False,
) -> Iterator[Any]:
    """Yields the prediction of each row as a stream, of several tasks as a mapping by the names of the tasks.

    Rows are read in batches as the predictions are taken, so memory does not depend on their number.

    Args:
        model: The model.
        rows: One or several rows, as ``TaskModel.predict`` takes them. Names of the training data are read, too.
        forward_fn, logits, explain: See ``predict_batch``.

    Raises:
        DataError: A row lacks a column or a value is of the wrong kind.
        CheckpointError, UsageError: See ``predict_batch``.
    """
    columns = model.input_columns
    given: Any = rows
    if is_frame(rows):
        given = given_rows(rows)
    size = batch_rows(model, explain=explain)
    most = MOST_ROWS if size is None else size
    valid = valid_rows(as_rows(given, columns), columns, names=model.columns, most=most)
    while batch := list(islice(valid, size)):
        predictions, _ = predict_batch(model, batch, forward_fn=forward_fn, logits=logits, explain=explain)
        yield from map(prediction_of_row, predictions)


def prediction_of_row(predictions: HeadPredictions) -> Any:
    """Returns what ``predict`` returns for a row, the prediction of an only head or those of several by their names."""
    return predictions.get("", predictions)


def predict_batch(
    model: EncoderWithHeads,
    rows: Sequence[Row],
    *,
    forward_fn: ForwardFn | None = None,
    logits: bool = False,
    explain: bool = False,
) -> tuple[list[HeadPredictions], Sequence[Feature]]:
    """Returns the predictions of the heads for each of some valid rows, and the features of these rows.

    Args:
        model: The model.
        rows: Rows with the columns of the tasks.
        forward_fn: Computes a batch's logits instead of the model (``inference.precision.logits_of``).
        logits, explain: See ``TaskModel.predict``. The model then has one task.

    Raises:
        DataError: The prediction of a row would be too long.
        UsageError: The model has no tokenizer, no logits or no explanations, or an id has no embedding.
        CheckpointError: The logits are not finite.
    """
    require_labels(model)
    tokenizer, tasks = model.require_tokenizer(), model.tasks
    # All that can be wrong with the call is checked before the model runs.
    only = tasks.get("")
    if only is None and (logits or explain):
        raise choose_one(tasks)
    if only is not None and explain:
        check_explainable(model, only)
    for name, task in tasks.items():
        for cells in input_rows(rows, name).values():
            task.check_rows([cells])
    features = features_of(model, rows, tokenizer)
    run = model if forward_fn is None else forward_fn

    def finite_logits(batch: PackedBatch) -> Any:
        return finite(run(batch))

    compact = forward_windows(model, features, forward_fn=finite_logits)
    predictions = decode(model, compact, features, rows, tasks)
    # Logits and explanations are added to predictions that were decoded, because an explanation is one of the label or
    # span that was predicted.
    if only is not None and (logits or explain):
        of_task: Sequence[Any] = [of_row[""] for of_row in predictions]
        if logits and of_task:
            of_task = only.output.with_logits(of_task, compact, features)
        if explain:
            explained_logits = only.output.explained_logits(of_task, compact, features, rows, only.texts)
            spans = only.token_spans(rows, tokenizer)
            explanations = explained(model, model.head, explained_logits, features, spans)
            of_task = only.output.with_explanations(of_task, explanations)
        predictions = [{"": prediction} for prediction in of_task]
    return predictions, features


def decode(
    model: EncoderWithHeads,
    compact: Sequence[Tensor],
    features: Sequence[Feature],
    rows: Sequence[Row],
    tasks: Mapping[str, Task],
) -> list[HeadPredictions]:
    """Returns the predictions of the heads for each row. A head without an input in a row has no prediction of it.

    Args:
        model: The model.
        compact: The result of ``forward_windows``.
        features: The features of the rows.
        rows: The rows.
        tasks: The task of each head that decodes.
    """
    tokenizer = model.require_tokenizer()
    of_rows: list[HeadPredictions] = [{} for _ in rows]
    for name, task in tasks.items():
        cells = input_rows(rows, name)
        of_head, windows = features_of_head(name, list(cells), features, compact)
        decoded = task.output.decode(windows, of_head, list(cells.values()), tokenizer)
        for number, prediction in zip(cells, decoded, strict=True):
            of_rows[number][name] = prediction
    return of_rows


def predictions_by_head(
    model: EncoderWithHeads, rows: Sequence[Row], *, forward_fn: ForwardFn | None = None
) -> dict[str, list[Prediction]]:
    """Returns the predictions of each head for the rows that have an input for it."""
    of_rows, _ = predict_batch(model, rows, forward_fn=forward_fn)
    of_heads: dict[str, list[Prediction]] = {}
    for name in model.tasks:
        of_heads[name] = [predictions[name] for predictions in of_rows if name in predictions]
    return of_heads


def agreements(
    model: EncoderWithHeads, expected: Mapping[str, Sequence[Prediction]], actual: Mapping[str, Sequence[Prediction]]
) -> list[bool]:
    """Returns whether the decisions of all heads are the same. See ``Output.agreements``."""
    same: list[bool] = []
    for name, task in model.tasks.items():
        same += task.output.agreements(expected[name], actual[name])
    return same
