"""Continued masked language modelling: bert_tasks against transformers' Trainer, equal steps, the same held-out masks.

    BERT_TASKS_DATA=DIR python benchmarks/quality_pretraining.py --steps 60 --seeds 1 2 3 --json FILE

Both sides start from the embedded weights with a new head, and train on ``DIR/wikitext-2/valid.txt`` in windows of 128
tokens that go on across texts, with the same batch size, learning rate, schedule and rule of masking; the Trainer's
model computes its head for masked tokens only, which changes its speed and not its loss. Both models are then evaluated
by ``bert_tasks.evaluate`` on the first sections of ``DIR/wikitext-2/test.txt``, so that the masked tokens are the same.
Verdict: our mean loss <= theirs + 0.02.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path

import torch
from pretrain_throughput import BATCH_SIZE, LENGTH, WEIGHTS, blocks, texts, trainer_parts
from result_files import write_results

from bert_tasks import TaskModel, evaluate, fit
from bert_tasks.training.files import environment

SIDES = ("bert_tasks", "transformers")
MARGIN = 0.02
LEARNING_RATE = 5e-4
TASK = "masked-language-modeling"


def train_ours(folder: Path, steps: int, seed: int) -> None:
    model = TaskModel.from_pretrained(WEIGHTS, task=TASK, max_length=LENGTH, fill="across")
    rows = [{"text": text} for text in texts(1.0)]
    fit(
        model,
        rows,
        rows[:4],
        output_dir=folder / "run",
        progress=False,
        max_steps=steps,
        batch_size=BATCH_SIZE,
        learning_rate=LEARNING_RATE,
        warmup_ratio=0.1,
        weight_decay=0.01,
        eval_steps=steps,
        seed=seed,
    )
    model.save_pretrained(folder / "model")


def train_theirs(folder: Path, steps: int, seed: int) -> None:
    from transformers import BertForMaskedLM, Trainer, TrainingArguments, set_seed

    set_seed(seed)
    model, collator = trainer_parts(sparse=True)
    arguments = TrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=steps,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=LEARNING_RATE,
        warmup_steps=0.1,  # below 1: a ratio
        weight_decay=0.01,
        optim="adamw_torch_fused",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=seed,
    )
    Trainer(model=model, args=arguments, train_dataset=blocks(1.0), data_collator=collator).train()
    model.__class__ = BertForMaskedLM  # whose name is written into config.json
    model.save_pretrained(folder / "model")
    TaskModel.from_pretrained(WEIGHTS, task=TASK).require_tokenizer().save_pretrained(folder / "model")


def held_out(sections: int) -> list[dict[str, str]]:
    path = Path(os.environ["BERT_TASKS_DATA"]) / "wikitext-2" / "test.txt"
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return [{"text": line} for line in lines if line and not line.startswith("=")][:sections]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--sections", type=int, default=300, help="of the held-out text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    metrics: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    rows = held_out(arguments.sections)
    for seed in arguments.seeds:
        for side, train in zip(SIDES, (train_ours, train_theirs), strict=True):
            with tempfile.TemporaryDirectory() as folder:
                train(Path(folder), arguments.steps, seed)
                settings = {"max_length": LENGTH, "fill": "document"}
                metrics[side].append(evaluate(Path(folder) / "model", rows, task=TASK, settings=settings))
            print(f"seed {seed}  {side:14}{metrics[side][-1]}", flush=True)
    ours, theirs = (statistics.mean(result["loss"] for result in metrics[side]) for side in SIDES)
    print(f"mean loss {ours:.4f} and {theirs:.4f}: {'holds' if ours <= theirs + MARGIN else 'does not hold'}")
    if arguments.json is not None:
        options = {name: value for name, value in vars(arguments).items() if name != "json"}
        content = {"options": options, "environment": environment(), "metrics": metrics}
        write_results(arguments.json, content)


if __name__ == "__main__":
    main()
