"""Thresholds of labels that keep a promise, chosen on held-out rows and stored with the model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack

import numpy as np

from bert_tasks.checkpoints.files import read_config
from bert_tasks.checkpoints.hub import resolve
from bert_tasks.checkpoints.save import write_config
from bert_tasks.data.issues import counted
from bert_tasks.data.options import ReadingArguments, ReadOptions
from bert_tasks.distributed import is_main_process
from bert_tasks.errors import CheckpointError, DataError, UsageError, argument
from bert_tasks.families import CONFIG_KEY
from bert_tasks.inference.evaluation import evaluate_data
from bert_tasks.metrics.classification import MISSED, accepted_and_right, fewest_right, promised_threshold
from bert_tasks.model.inputs import Data, load_trained
from bert_tasks.outputs.thresholds import ThresholdOutput
from bert_tasks.storage import check_path
from bert_tasks.tasks.several import SEVERAL

ALL = "all"  # in place of a label, for a threshold that all labels have
Outcomes = list[tuple[float, bool]]  # see ``promised_threshold``


def calibrate(
    model: str | Path,
    data: Data,
    *,
    precision: float | None = None,
    recall: float | None = None,
    error_rate: float | None = None,
    confidence: float = 0.95,
    task: str | None = None,
    **reading: Unpack[ReadingArguments],
) -> dict[str, float]:
    """Chooses thresholds of labels that keep a promise on new rows, and stores them in the model's folder.

    Use it if nobody looks at the predictions, and for example 95 % of them must be right. It takes the lowest
    thresholds that keep the promise, or for a recall the highest. A row below the threshold is then predicted as None,
    a label is left out of a set, and an entity is not predicted. The rows must be independent, from the same source as
    later ones, and used neither for training nor for validation. Entities of one row, and with an error rate labels of
    one row, count as independent, too. ``promised_threshold`` has the method and its sources.

    Args:
        model: A folder of a model (also an exported one) or of a run.
        data: Held-out rows with labels.
        precision: Lowest share of right ones among the predictions of each label.
        recall: Lowest share of each label in the rows that is predicted.
        error_rate: Highest share of wrong ones among all predictions, by one threshold for all labels.
        confidence: The probability that the promise is kept, for each label alone. For all of L labels at once, pass
            1 - (1 - confidence) / L (Bonferroni).
        task: The name of one of several tasks.
        reading: Fields of `ReadOptions` for ``data``.

    Returns:
        ``threshold_LABEL`` and ``coverage_LABEL`` of each label, or type of entities, and ``coverage`` of all. This is
        the number of predictions divided by that with default thresholds (0.5 for several labels of a row, else 0).

    Raises:
        UsageError: There is not exactly one promise, or the model has no such thresholds.
        DataError: Rows cannot be used, or they are too few or too often wrong for the promise.
        CheckpointError: The model cannot be loaded, or its folder cannot be written.

    Examples:
        >>> calibrate("runs/first", "held_out.csv", error_rate=0.2)["coverage"] > 0.5
        True
    """
    check_path(model, CheckpointError)
    options = ReadOptions.from_arguments(calibrate, reading)
    promise = _promise(precision, recall, error_rate, confidence)
    folder = resolve(model)  # a run's folder holds the folder of its model
    config = read_config(folder)
    entry = config.get(CONFIG_KEY)
    if not Path(model).expanduser().is_dir() or not isinstance(entry, dict):
        raise UsageError(f"{model} is no folder of bert_tasks. Open it with TaskModel.from_pretrained, and save it")
    opened = load_trained(folder, task=task, settings=None, reading=options, revision=None, data=data).one_task()
    output: Any = opened.task.output
    if not isinstance(output, ThresholdOutput):
        raise UsageError("thresholds are for predictions of classes, labels and entities, unlike this model's")
    opened.task = replace(opened.task, output=replace(output, thresholds=()))
    score = evaluate_data(opened, data, reading=options).scores[""]
    groups = {label: output.threshold_name(label) for label in output.labels}
    if promise.is_of_all:
        groups = dict.fromkeys(output.labels, ALL)
    outcomes: dict[str, Outcomes] = {group: [] for group in groups.values() if group}
    for label, candidate, is_right in output.candidates(score.predictions, score.rows):
        group = ALL if promise.is_of_all else label
        if group in outcomes:  # and no type of entities that the model does not have
            outcomes[group].append((candidate, is_right))
    thresholds = _thresholds(outcomes, promise, confidence)
    by_group: dict[str, float] = {}
    total = np.zeros(2)  # predictions with the thresholds, and with default ones
    for group, threshold in thresholds.items():
        counts, _ = accepted_and_right(outcomes[group], [threshold, output.default_threshold])
        total += counts
        by_group[f"threshold_{group}"] = threshold
        by_group[f"coverage_{group}"] = float(counts[0] / max(counts[1], 1))
    coverage = float(total[0] / max(total[1], 1))
    if entry.get("task") == SEVERAL:
        entry = entry["fitted"][task]
    entry["thresholds"] = [thresholds.get(group, output.default_threshold) for group in groups.values()]
    entry["promise"] = f"{promise.text}, coverage {coverage:.4f} of {counted(len(score.rows), 'row')}"
    if is_main_process():
        write_config(folder, config)
    return {"coverage": coverage, **by_group}


class _Promise(NamedTuple):
    """The lowest share of a metric on new rows, of each label or of all labels together, and the same in words."""

    metric: Literal["precision", "recall"]
    share: float
    is_of_all: bool
    text: str


def _promise(precision: float | None, recall: float | None, error_rate: float | None, confidence: float) -> _Promise:
    """Returns the one promise that is asked for, or raises UsageError."""
    promises = {"precision": precision, "recall": recall, "error_rate": error_rate}
    stated = {name: value for name, value in promises.items() if value is not None}
    if len(stated) != 1:
        raise UsageError(f"pass one of {', '.join(argument(name, None) for name in promises)}, to keep on new rows")
    for name, value in {**stated, "confidence": confidence}.items():
        if not 0 < value < 1:
            raise UsageError(f"{argument(name, None)} is {value}, expected a number between 0 and 1")
    certainty = f"with confidence {confidence:g}"
    if precision is not None:
        return _Promise("precision", precision, False, f"precision of each label at least {precision:g} {certainty}")
    if recall is not None:
        return _Promise("recall", recall, False, f"recall of each label at least {recall:g} {certainty}")
    rate = stated["error_rate"]
    return _Promise("precision", 1 - rate, True, f"error rate of all labels at most {rate:g} {certainty}")


def _thresholds(outcomes: Mapping[str, Outcomes], promise: _Promise, confidence: float) -> dict[str, float]:
    """Returns the threshold of each label, or raises DataError with a clause for each label that has none."""
    needed = fewest_right(promise.metric, promise.share, confidence)
    thresholds: dict[str, float] = {}
    problems: list[str] = []
    for label, of_label in outcomes.items():
        threshold = promised_threshold(of_label, promise.metric, promise.share, confidence)
        hits = sum(is_right and score > MISSED for score, is_right in of_label)
        if threshold is not None:
            thresholds[label] = threshold
        elif hits < needed:
            problems.append(f"{label} has {counted(hits, 'right prediction')}, and {needed} are the fewest possible")
        else:
            problems.append(f"{label} has too many mistakes")
    if problems:
        raise DataError(f"{promise.text} cannot be shown: {'; '.join(problems)}. Pass more rows, or promise less")
    return thresholds
