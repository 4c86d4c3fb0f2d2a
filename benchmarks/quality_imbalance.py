"""Entity F1 and recall of each type on CoNLL-2003 with class weights and with the focal loss.

    BERT_TASKS_DATA=DIR python benchmarks/quality_imbalance.py --json FILE

The embedded model is trained for two epochs on the first ``--rows`` sentences and evaluated on all validation sentences
after each. The scores are those of the epoch with the higher F1.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from quality_several_tasks import EMBEDDED, conll_rows
from result_files import write_results

from bert_tasks import TaskModel, fit
from bert_tasks.environment import cpu_name

SIDES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "balanced": {"class_weights": "balanced"},
    "focal": {"focal_gamma": 2.0},
    "balanced and focal": {"class_weights": "balanced", "focal_gamma": 2.0},
}
OPTIONS: Mapping[str, Any] = {"epochs": 2, "batch_size": 16, "learning_rate": 1e-4, "warmup_ratio": 0.1}
SCORES = ("overall_f1", "overall_precision", "overall_recall", *(f"{t}_recall" for t in ("LOC", "MISC", "ORG", "PER")))


def scores(side: str, train: list[dict[str, Any]], validation: list[dict[str, Any]], seed: int) -> dict[str, float]:
    """Returns the scores of one run in percent."""
    model: TaskModel = TaskModel.from_pretrained(EMBEDDED, task="token-classification", **SIDES[side])
    with tempfile.TemporaryDirectory() as folder:
        options = {**OPTIONS, "seed": seed, "columns": {"tags": "names"}, "progress": False}
        result = fit(model, train, validation, output_dir=folder, **options)
    return {name: 100 * result.metrics[name] for name in SCORES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    train, validation = conll_rows("train.txt", options.rows), conll_rows("valid.txt", None)
    runs = []
    for seed in options.seeds:
        for side in SIDES:
            runs.append({"seed": seed, "side": side, **scores(side, train, validation, seed)})
            print(json.dumps(runs[-1]), flush=True)
    for side in SIDES:
        means = [statistics.fmean(run[name] for run in runs if run["side"] == side) for name in SCORES]
        print(side, *(f"{name} {mean:.1f}" for name, mean in zip(SCORES, means, strict=True)), sep="  ")
    if options.json is not None:
        content = {"processor": cpu_name(), "threads": 1, "rows": len(train), "options": OPTIONS, "runs": runs}
        write_results(options.json, content)


if __name__ == "__main__":
    main()
