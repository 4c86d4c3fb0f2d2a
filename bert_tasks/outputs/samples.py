"""What outputs share that answer once for each row, by the mean of the logits of its windows.

Shape legend: B sequences (windows), S samples (rows), R samples with labels, L labels.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bert_tasks.data.columns import Row
from bert_tasks.encoder import packing
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import DataError
from bert_tasks.outputs.explanation import ExplainedLogit
from bert_tasks.outputs.features import Feature, windows_by_row
from bert_tasks.outputs.logits import sample_logits


def labelled_samples(logits: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor] | None:
    """Returns the logits and the labels of the rows that have labels. None if no row has labels.

    The loss of an output for whole rows begins with it. It averages the logits of the windows of a row, and leaves out
    the rows without labels, so that neither has to be thought of again.

    Args:
        logits: ``[B, L]`` logits of the windows.
        batch: The batch. The first window of a row has its labels.

    Returns:
        ``[R, L]`` mean logits, and ``[R, number of labels of a row]`` labels as ``Output.encode`` made them.
    """
    samples = sample_logits(logits, batch.windows)  # [S, L]
    numbers = batch.labelled_rows
    if not numbers:
        return None
    if len(numbers) < len(samples):
        samples = samples.index_select(0, packing.device_tensor(numbers, samples.device, torch.long))
    return samples, batch.labels.view(len(numbers), -1)


def row_logits(compact: Sequence[Tensor], features: Sequence[Feature]) -> Tensor:
    """Returns ``[S, L]`` the mean logits of the windows of each row. There must be a row.

    ``Output.decode`` of an output for whole rows begins with it. For the logits that ``with_logits`` shows to people,
    use ``shown_logits``.

    Args:
        compact: ``[L]`` logits of each feature, on the CPU.
        features: The features of the rows, in row order.
    """
    windows = Counter(feature["row"] for feature in features)
    return sample_logits(torch.stack(list(compact)), windows.values())


def shown_logits(compact: Sequence[Tensor], features: Sequence[Feature]) -> list[tuple[float, ...]]:
    """Returns the mean logits of each row as numbers, for people who asked for them.

    ``Output.with_logits`` of an output for whole rows returns them. ``decode`` needs the tensor of ``row_logits``.

    Args:
        compact: ``[L]`` logits of each feature, on the CPU.
        features: The features of the rows, in row order.

    Returns:
        One tuple of L numbers for each row.
    """
    shown = []
    for indices in windows_by_row(features):
        windows = torch.stack([compact[index] for index in indices])
        mean = sample_logits(windows, [len(indices)])[0]
        shown.append(tuple(mean.tolist()))
    return shown


def with_mean_logits(predictions: Sequence[Any], compact: Sequence[Tensor], features: Sequence[Feature]) -> list[Any]:
    """Returns the predictions with the mean logits of the windows of their rows as ``logits``."""
    pairs = zip(predictions, shown_logits(compact, features), strict=True)
    return [replace(prediction, logits=logits) for prediction, logits in pairs]


def joined_logits(compact: Sequence[Tensor], features: Sequence[Feature]) -> list[Tensor]:
    """Returns ``S x [C]`` the logits of each row, whose windows have one logit each."""
    rows = []
    for windows in windows_by_row(features):
        of_windows = [compact[window] for window in windows]  # C x [1]
        rows.append(torch.cat(of_windows))
    return rows


def with_joined_logits(predictions: Sequence[Any], compact: Sequence[Tensor], features: Sequence[Feature]) -> list[Any]:
    """Returns the predictions with the logits of ``joined_logits`` as ``logits``."""
    pairs = zip(predictions, joined_logits(compact, features), strict=True)
    return [replace(prediction, logits=tuple(logits.tolist())) for prediction, logits in pairs]


def label_logits_to_explain(
    predictions: Sequence[Any],
    labels: Sequence[str],
    features: Sequence[Feature],
    rows: Sequence[Row],
    texts: Sequence[str],
) -> list[ExplainedLogit]:
    """Returns the logit of each row's most probable label. See ``mean_logits_to_explain``."""
    predicted = [most_probable(prediction) for prediction in predictions]
    places = [labels.index(label) for label in predicted]
    return mean_logits_to_explain(predicted, places, features, rows, texts)


def most_probable(prediction: Any) -> str:
    """Returns the most probable label, also of a prediction whose label is None because its score is too low."""
    if prediction.label is not None:
        return str(prediction.label)
    scores: Mapping[str, float] = prediction.scores
    return max(scores, key=scores.__getitem__)


def mean_logits_to_explain(
    labels: Sequence[str | None],
    places: Sequence[int],
    features: Sequence[Feature],
    rows: Sequence[Row],
    texts: Sequence[str],
) -> list[ExplainedLogit]:
    """Returns one logit of each row, a mean over its windows, for explanations.

    Args:
        labels: The label of each row's logit. None for a number.
        places: The position of each row's logit among the logits of a window.
        features: The features of the rows.
        rows: The rows.
        texts: The columns of the texts that the model reads.
    """
    explained = []
    for label, place, windows, row in zip(labels, places, windows_by_row(features), rows, strict=True):
        read = {name: row[name] for name in texts}
        weight = 1 / len(windows)  # of each window in the mean
        terms = tuple((window, place, weight) for window in windows)
        explained.append(ExplainedLogit(label=label, texts=read, terms=terms))
    return explained


def check_known(row_labels: set[str], labels: Sequence[str]) -> None:
    """Raises DataError if a row has a label that the model does not know."""
    unknown = sorted(row_labels.difference(labels))
    if unknown:
        known = ", ".join(repr(label) for label in labels)
        raise DataError(f"unknown label {unknown[0]!r}. The labels are {known}")
