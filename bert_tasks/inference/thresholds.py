"""Thresholds of labels that keep a promise, chosen on held-out rows and stored with the model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack

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
    later ones, and used neither for training nor for validation. ``promised_threshold`` has the method and its sources.

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
    promises = {"precision": precision, "recall": recall, "error_rate": error_rate}
    stated = {name: value for name, value in promises.items() if value is not None}
    if len(stated) != 1:
        raise UsageError(f"pass one of {', '.join(argument(name, None) for name in promises)}, to keep on new rows")
    for name, value in {**stated, "confidence": confidence}.items():
        if not 0 < value < 1:
            raise UsageError(f"{argument(name, None)} is {value}, expected a number between 0 and 1")
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
    ((name, share),) = stated.items()
    metric: Literal["precision", "recall"] = "recall" if name == "recall" else "precision"
    names = {label: output.threshold_name(label) for label in output.labels}
    promise = f"{name} of each label at least {share:g} with confidence {confidence:g}"
    if error_rate is not None:
        names, share = dict.fromkeys(names, ALL), 1 - error_rate
        promise = f"error rate of all labels at most {error_rate:g} with confidence {confidence:g}"
    outcomes: dict[str, Outcomes] = {name: [] for name in names.values() if name}
    for label, candidate, is_right in output.candidates(score.predictions, score.rows):
        group = label if error_rate is None else ALL
        if group in outcomes:  # and no type of entities that the model does not have
            outcomes[group].append((candidate, is_right))
    thresholds, problems = _thresholds(outcomes, metric, share, confidence)
    if problems:
        raise DataError(f"{promise} cannot be shown: {'; '.join(problems)}. Pass more rows, or promise less")
    results = {"coverage": 1.0}
    total = np.zeros(2)  # predictions with the thresholds, and with default ones
    for label, threshold in thresholds.items():
        counts, _ = accepted_and_right(outcomes[label], [threshold, output.default_threshold])
        total += counts
        results |= {f"threshold_{label}": threshold, f"coverage_{label}": float(counts[0] / max(counts[1], 1))}
    results["coverage"] = float(total[0] / max(total[1], 1))
    if entry.get("task") == SEVERAL:
        entry = entry["fitted"][task]
    entry["thresholds"] = [thresholds.get(names[label], output.default_threshold) for label in output.labels]
    entry["promise"] = f"{promise}, coverage {results['coverage']:.4f} of {counted(len(score.rows), 'row')}"
    if is_main_process():
        write_config(folder, config)
    return results


def _thresholds(
    outcomes: Mapping[str, Outcomes], metric: Literal["precision", "recall"], share: float, confidence: float
) -> tuple[dict[str, float], list[str]]:
    """Returns the threshold of each label, and a clause for each label that has none."""
    needed = fewest_right(metric, share, confidence)
    thresholds: dict[str, float] = {}
    problems: list[str] = []
    for label, of_label in outcomes.items():
        threshold = promised_threshold(of_label, metric, share, confidence)
        hits = sum(is_right and score > MISSED for score, is_right in of_label)
        if threshold is not None:
            thresholds[label] = threshold
        elif hits < needed:
            problems.append(f"{label} has {counted(hits, 'right prediction')}, and {needed} are the fewest possible")
        else:
            problems.append(f"{label} has too many mistakes")
    return thresholds, problems
