"""The quickstart: fine-tunes published weights on a small data set, three seeds, and shows what the model does.

Run by ``make quickstart``. Trains recipes/quickstart.toml with seeds 1 to 3, and as a control the same recipe on
training labels that carry no information: half of each class's rows get each label. Ends with a table, and with
answers that transformers' pipeline gives too; exits with 1 if the model did not learn, or the control did. Finished
runs are reused.
"""

import csv
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import pipeline

from bert_tasks import TaskModel, load_recipe, train

RECIPES = Path(__file__).resolve().parent
RUNS = RECIPES.parent / "runs" / "quickstart"
SEEDS = (1, 2, 3)
TEXTS = (
    "The technician rang ahead, arrived early and had the boiler running within the hour.",
    "Third parcel in a row left in the rain, and nobody answers the phone.",
    "I expected nothing from a station café, yet the soup was the best I have had all year.",
)


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def shuffled_labels(source: Path, target: Path, seed: int) -> Path:
    """Writes the rows with labels that say nothing: each class's rows get all labels in equal numbers."""
    rows = read_rows(source)
    labels = sorted({row["label"] for row in rows})
    chance = random.Random(seed)
    for label in labels:
        members = [row for row in rows if row["label"] == label]
        chance.shuffle(members)
        for position, row in enumerate(members):
            row["new"] = labels[position % len(labels)]
    with target.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["text", "label"])
        writer.writerows([row["text"], row["new"]] for row in rows)
    return target


def accuracies(console: Console, name: str, train_files: dict[int, Path]) -> list[float]:
    """Validation accuracy after the last epoch, one run per seed."""
    results = []
    for seed, path in train_files.items():
        overrides = [f"run.seed={seed}", f"data.train={path}"]
        folder = RUNS / f"{name}-{seed}"
        recipe = load_recipe(RECIPES / "quickstart.toml", overrides=overrides, output_dir=folder)
        interrupted = folder.exists() and not (folder / "metrics.json").exists()
        accuracy = train(recipe, overwrite=interrupted, progress=False).last_metrics["accuracy"]
        console.print(f"{name} {seed}: validation accuracy {accuracy:.3f}", highlight=False)
        results.append(accuracy)
    return results


def main() -> int:
    console = Console()
    RUNS.mkdir(parents=True, exist_ok=True)
    data = RECIPES / "data" / "feedback"
    real = accuracies(console, "seed", dict.fromkeys(SEEDS, data / "train.csv"))
    shuffled = {seed: RUNS / f"shuffled-{seed}.csv" for seed in SEEDS}
    for seed, path in shuffled.items():
        shuffled_labels(data / "train.csv", path, seed)
    control = accuracies(console, "control", shuffled)
    labels = [row["label"] for row in read_rows(data / "validation.csv")]
    majority = max(labels.count(label) for label in set(labels)) / len(labels)
    folder = RUNS / "seed-1" / "model"
    console.print(accuracy_table(real, control, majority))
    answers, theirs = answers_of(folder)
    console.print(prediction_table(answers, theirs))
    relative, rows = folder.relative_to(RECIPES.parent), "recipes/data/feedback/validation.csv"
    console.print(f"model: {relative} (this package and transformers open it)", highlight=False)
    console.print(
        "next:\n"
        f"  .venv/bin/bert-tasks evaluate {relative} {rows}\n"
        f"  .venv/bin/bert-tasks predict {relative} {rows} --output answers.jsonl\n"
        "  .venv/bin/bert-tasks check recipes/custom_csv.toml",
        highlight=False,
        soft_wrap=True,
    )
    learned = statistics.mean(real) >= majority + 0.25
    if any(our["label"] != other["label"] for our, other in zip(answers, theirs, strict=True)):
        console.print("quickstart FAILED: transformers gives other answers from the same folder", style="red")
        return 1
    if not learned or abs(statistics.mean(control) - majority) > 0.10:
        console.print("quickstart FAILED: the model must learn, and the control must not", style="red")
        return 1
    return 0


def accuracy_table(real: list[float], control: list[float], majority: float) -> Table:
    table = Table("", "validation accuracy", "seeds 1 to 3", title="Quickstart: all-MiniLM-L6-v2 on 270 texts")
    for name, values in (("fine-tuned", real), ("control: labels without information", control)):
        table.add_row(name, f"{statistics.mean(values):.3f}", "  ".join(f"{value:.3f}" for value in values))
    table.add_row("always the most frequent label", f"{majority:.3f}", "")
    return table


def answers_of(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What this package and the pipeline of transformers say of the texts."""
    predictions = TaskModel.from_pretrained(folder).predict([{"text": text} for text in TEXTS])
    classify = pipeline("text-classification", str(folder), device="cpu")
    return [prediction.to_json() for prediction in predictions], classify(list(TEXTS))


def prediction_table(answers: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> Table:
    table = Table("text", "label", "probability", "transformers' pipeline", title="Three predictions")
    for text, ours, other in zip(TEXTS, answers, theirs, strict=True):
        table.add_row(text, ours["label"], f"{ours['score']:.3f}", f"{other['label']} {other['score']:.3f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
