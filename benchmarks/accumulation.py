"""What gradient accumulation and several processes do to loss and gradient: bert_tasks beside transformers' Trainer.

    BERT_TASKS_DATA=DIR python benchmarks/accumulation.py --json FILE

One optimizer step of masked language modelling on the same 16 masked texts of ``DIR/wikitext-2/valid.txt``, with the
same weights and without dropout: as one batch of 16, as four micro-batches of 4, and on two processes with 8 each. The
texts have unequal numbers of masked tokens. All three should log the same loss and the same norm of the gradient.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from pretrain_throughput import WEIGHTS, texts
from result_files import write_results

from bert_tasks import TaskModel, fit
from bert_tasks.model.encoder_with_heads import draw_new_head
from bert_tasks.outputs.features import Feature
from bert_tasks.tasks.base import FeatureKeys
from bert_tasks.training.files import environment

ROWS, LENGTH, SEED = 16, 64, 0
# Micro-batches and processes of each way to make the step.
WAYS = {"1 x 16": (1, 1), "4 x 4": (4, 1), "2 processes x 8": (1, 2)}
SIDES = ("bert_tasks", "transformers")


def rows() -> list[dict[str, str]]:
    """Returns the beginnings of sections, which are short enough for each text to be one window."""
    return [{"text": " ".join(text.split()[: 8 + 2 * i])} for i, text in enumerate(texts(1.0)[:ROWS])]


def save_model(folder: Path) -> None:
    """Saves the embedded weights without dropout and with a new head, so that both sides start equal."""
    model = TaskModel.from_pretrained(WEIGHTS, task="masked-language-modeling", max_length=LENGTH)
    draw_new_head(model, SEED)
    model.hf_config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model.save_pretrained(folder)


def masked(model: TaskModel) -> list[Feature]:
    """Returns the features of the texts, masked as the first step of ``fit`` masks them."""
    features, tokenizer = model.task.features(rows(), model.require_tokenizer()), model.require_tokenizer()
    keys = FeatureKeys(seed=SEED, epoch=0, numbers=range(len(features)))
    return list(model.task.prepare(features, keys, features, tokenizer))


def step_of_ours(folder: Path, parts: int) -> dict[str, float]:
    model = TaskModel.from_pretrained(folder)
    tokens = sum(len(feature["input_ids"]) for feature in model.task.features(rows(), model.require_tokenizer()))
    micro_batch_tokens = tokens // parts
    if parts == 1:
        micro_batch_tokens = 10**6  # more than all rows have
    with tempfile.TemporaryDirectory() as run:
        output = Path(os.environ.get("SHARED_FOLDER", run)) / "run"
        fit(
            model,
            rows(),
            rows()[:1],
            output_dir=output,
            progress=False,
            max_steps=1,
            batch_size=ROWS,
            micro_batch_tokens=micro_batch_tokens,
            logging_steps=1,
            seed=SEED,
        )
        events = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return next(event for event in events if event["event"] == "step")


def step_of_theirs(folder: Path, parts: int) -> dict[str, float]:
    from datasets import Dataset
    from transformers import (
        AutoTokenizer,
        BertForMaskedLM,
        DataCollatorForTokenClassification,
        Trainer,
        TrainingArguments,
    )

    inputs = []
    for feature in masked(TaskModel.from_pretrained(folder)):
        labels = [-100] * len(feature["input_ids"])  # what torch's cross entropy ignores
        for position, label in zip(feature["gather_positions"] or (), feature["labels"] or (), strict=True):
            labels[position] = int(label)
        inputs.append({"input_ids": feature["input_ids"], "labels": labels})
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as run:
        trainer = Trainer(
            model=BertForMaskedLM.from_pretrained(folder),
            args=TrainingArguments(
                output_dir=run,
                max_steps=1,
                per_device_train_batch_size=ROWS // parts // processes,
                gradient_accumulation_steps=parts,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                seed=SEED,
            ),
            train_dataset=Dataset.from_list(inputs),
            data_collator=DataCollatorForTokenClassification(AutoTokenizer.from_pretrained(folder)),
        )
        trainer.train()
    return next(entry for entry in trainer.state.log_history if "grad_norm" in entry)


def measured(side: str, way: str, folder: Path, scratch: Path) -> dict[str, float]:
    """Returns the loss and the norm of the gradient of one step, which runs in processes of its own."""
    parts, processes = WAYS[way]
    output = scratch / f"{side}-{way}.json".replace(" ", "-")
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)] if processes > 1 else []
    command = [sys.executable, *launcher, __file__, "--one", side, str(parts), str(folder), str(output)]
    shared = tempfile.mkdtemp(dir=scratch)
    subprocess.run(command, check=True, env={**os.environ, "SHARED_FOLDER": shared, "OMP_NUM_THREADS": "1"})
    step: dict[str, float] = json.loads(output.read_text(encoding="utf-8"))
    return step


def run_side(side: str, parts: int, folder: Path, output: Path) -> None:
    torch.set_num_threads(1)
    step: dict[str, Any] = (step_of_ours if side == "bert_tasks" else step_of_theirs)(folder, parts)
    if os.environ.get("RANK", "0") == "0":
        output.write_text(json.dumps({name: float(step[name]) for name in ("loss", "grad_norm")}), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=4, metavar=("SIDE", "PARTS", "MODEL", "OUTPUT"), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.one is not None:
        side, parts, folder, output = options.one
        run_side(side, int(parts), Path(folder), Path(output))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        save_model(folder)
        counts = [len(feature["labels"] or ()) for feature in masked(TaskModel.from_pretrained(folder))]
        steps = {side: {way: measured(side, way, folder, Path(scratch)) for way in WAYS} for side in SIDES}
    print(f"masked tokens of the {ROWS} texts: {', '.join(map(str, counts))}")
    for side, ways in steps.items():
        for way, step in ways.items():
            print(f"{side:14}{way:18}loss {step['loss']:8.4f}   gradient norm {step['grad_norm']:8.4f}")
    if options.json is not None:
        content = {"environment": environment(), "masked_tokens": counts, "steps": steps}
        write_results(options.json, content)


if __name__ == "__main__":
    main()
