"""Owns what the tests of several processes run: the same scenarios under any launcher, with their results in a file.

Run by torchrun as a script (``-m support.process_scenarios CHECKPOINT FOLDER``) and called by the tests in one process.
"""

import atexit
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bert_tasks import MultiTaskModel, TaskModel, evaluate, fit
from bert_tasks.data.reading import read
from bert_tasks.distributed import make_accelerator
from bert_tasks.errors import BertTasksError
from bert_tasks.inference import evaluate_samples
from bert_tasks.inference import evaluation as evaluation_module
from bert_tasks.model.features import tokenized
from bert_tasks.recipe.schema import OptimSection, TeacherSection
from bert_tasks.tasks import MaskedLanguageModeling, PairClassification, ReplacedTokens, SequenceClassification
from bert_tasks.tasks.base import Task
from bert_tasks.training.distillation import Distillation
from bert_tasks.training.objectives import Objective, Supervised
from bert_tasks.training.optim import freeze_encoder
from bert_tasks.training.replaced_tokens import ReplacedTokenDetection, make_generator
from support.hf_models import widen
from support.training_runs import (
    LABELS,
    TASK,
    WEIGHTED_TASK,
    LengthAndLabel,
    Row,
    load_model,
    make_rows,
    make_steps,
    walk,
    weights_of,
)

EVALUATED = (9, 1)
MASKED = MaskedLanguageModeling.of(max_length=40, mlm_probability=0.3, whole_word_mask=True)
SEVERAL_TERMS = ("nsp", "sop", "replaced tokens", "distillation", "two tasks", "ranking")
_SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
SMALL: dict[type[Task], dict[str, Any]] = {
    MaskedLanguageModeling: {"family": "bert", **_SIZES},
    ReplacedTokens: {"family": "electra", "embedding_size": 16, **_SIZES},
}
# Documents of three sentences, and two of one word, which have no pair of sentences.
DOCUMENTS: list[Row] = [
    *({"text": "\n".join(row["text"] for row in make_rows(3, seed=seed))} for seed in range(9)),
    {"text": "rain"},
    {"text": "the"},
]
TWO_TASKS: dict[str, dict[str, Any]] = {
    "sentiment": {
        "task": "sequence-classification",
        "labels": LABELS,
        "max_length": 40,
        "class_weights": (0.3, 1.7),
        "focal_gamma": 1.5,
    },
    "initials": {
        "task": "token-classification",
        "labels": ["O", *(f"B-{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")],
        "max_length": 40,
        "class_weights": (0.2, *(1 + 0.1 * number for number in range(26))),
        "focal_gamma": 2.0,
        "weight": 0.3,
    },
}
DIFFERENT = ("labels", "rows", "settings")
DTYPES = (torch.float64, torch.float32)


def trajectory(
    checkpoint: Path,
    *,
    rows: int,
    build: Callable[[TaskModel], Objective] = Supervised,
    task: Task = WEIGHTED_TASK,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> dict[str, Any]:
    """``walked`` over rows of unequal lengths, weights and labels."""
    objective = build(load_model(checkpoint, task)).to(dtype)
    return walked(objective, make_rows(rows, unlabelled=range(1, rows, 7)), **options)


def walked(objective: Objective, rows: list[Row], *, max_steps: int = 5, **options: Any) -> dict[str, Any]:
    """Some steps without dropout; ``options``: of the optimizer."""
    steps = make_steps(
        objective.model,
        rows,
        objective=objective,
        max_steps=max_steps,
        **options,
        learning_rate=1e-3,
        weight_decay=0.01,
        adam_epsilon=1e-4,
    )
    logs = [{name: value for name, value in asdict(log).items() if name != "terms"} | log.terms for log in walk(steps)]
    return {"weights": weights_of(objective), "logs": logs, "seen": steps.samples.seen}


def with_own_table(model: TaskModel) -> Objective:
    """On the second process the word embeddings are others, as if it had loaded another checkpoint."""
    if os.environ.get("RANK", "0") != "0":
        model.encoder.embeddings.word.weight.data.add_(1.0)
    return Supervised(model)


def with_frozen_encoder(model: TaskModel) -> Objective:
    """As a run with adapters begins."""
    objective = Supervised(model)
    freeze_encoder(objective, OptimSection(lora_rank=4))
    return objective


def with_words(row: Row) -> Row:
    return {**row, "words": row["text"].split()}


def several_terms(name: str, checkpoint: Path, *, micro_batch_tokens: int = 20) -> dict[str, Any]:
    """``walked`` with an objective whose terms have counts that differ between micro-batches and processes."""
    if name == "distillation":
        teacher = TeacherSection(name="teacher", hidden="mse", relations=True, relations_weight=0.5)
        objective: Objective = Distillation(
            load_model(checkpoint, WEIGHTED_TASK), load_model(checkpoint, WEIGHTED_TASK, seed=3), teacher
        ).double()
        rows = make_rows(10, unlabelled=(1, 8))
        return walked(objective, rows, batch_size=4, micro_batch_tokens=micro_batch_tokens)
    if name == "two tasks":
        torch.manual_seed(0)
        several = MultiTaskModel.from_pretrained(checkpoint, tasks=TWO_TASKS)
        rows = tagged(make_rows(10))
        rows = [
            {key: row[key] for key in row if (i % 3, key) not in ((0, "label"), (1, "tags"))}
            for i, row in enumerate(rows)
        ]
        return walked(Supervised(several).double(), rows, batch_size=4, micro_batch_tokens=micro_batch_tokens)
    if name == "ranking":  # groups of 1 to 4 rows, some without different grades
        ranked = PairClassification.of(problem_type="regression", ranking_loss="ranknet", max_length=40)
        student, ranker = (load_model(checkpoint, ranked, seed=seed) for seed in (0, 3))
        return walked(
            Distillation(student, ranker).double(), graded(17), batch_size=4, micro_batch_tokens=micro_batch_tokens
        )
    task: Task = ReplacedTokens.of(max_length=40)
    if name != "replaced tokens":
        task = MaskedLanguageModeling.of(max_length=40, mlm_probability=0.3, sentence_objective=name)  # type: ignore[arg-type]  # a str
    model = TaskModel.from_config(SMALL[type(task)], task=task, tokenizer=checkpoint)
    with torch.no_grad():
        widen(model, seed=1)
    objective = Supervised(model)
    if isinstance(task, ReplacedTokens):
        objective = ReplacedTokenDetection(model, make_generator(model, seed=1))
    return walked(objective.double(), DOCUMENTS, batch_size=4, micro_batch_tokens=micro_batch_tokens)


def graded(count: int) -> list[Row]:
    """Pairs in groups of unequal sizes, which are not neighbours. No two are equal, so that none have equal ranks."""
    groups = "aabcdedfbcagbdddg"
    return [
        {"text": group, "text_pair": f"{chr(ord('a') + i)} {row['text']}", "label": float(i * i % 5), "group": group}
        for i, (row, group) in enumerate(zip(make_rows(count), groups, strict=True))
    ]


def evaluation(checkpoint: Path, count: int, task: Task = TASK) -> dict[str, Any]:
    """Metrics of the public function and the predictions behind them, in batches so small that all have some."""
    model, rows = load_model(checkpoint, task), make_rows(count, seed=count)
    table = read(rows, task.columns, require_labels=False)
    with mock.patch.object(evaluation_module, "batch_tokens", return_value=40):
        result = evaluate_samples(model, tokenized(table, model), table, make_accelerator())
        return {"metrics": evaluate(model, rows), "predictions": [p.to_json() for p in result.scores[""].predictions]}


def trained(checkpoint: Path, folder: Path) -> dict[str, Any]:
    model = load_model(checkpoint)
    result = fit(
        model,
        make_rows(28),
        make_rows(9, seed=1),
        output_dir=folder,
        epochs=3,
        batch_size=8,
        learning_rate=1e-3,
        warmup_ratio=0.2,
        adam_epsilon=1e-4,
        logging_steps=1,
    )
    return {"weights": weights_of(model), "metrics": result.metrics, "best_step": result.best_step}


def tagged(rows: list[Row]) -> list[Row]:
    return [{**row, "tags": [f"B-{word[0]}" for word in row["words"]]} for row in map(with_words, rows)]


def trained_tasks(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Trains two tasks that have their own rows. One task has more rows than the other."""
    torch.manual_seed(0)
    model = MultiTaskModel.from_pretrained(checkpoint, tasks=TWO_TASKS)
    sets = {"sentiment": make_rows(9, seed=1), "initials": tagged(make_rows(5, seed=3))}
    rows = {"sentiment": make_rows(28), "initials": tagged(make_rows(8, seed=2))}
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 8, "learning_rate": 1e-3, "adam_epsilon": 1e-4}
    result = fit(model, rows, sets, output_dir=folder, sampling="equal", logging_steps=1, **settings)
    return {"weights": weights_of(model), "metrics": result.metrics}


def disagreement(checkpoint: Path, folder: Path, topic: str) -> str:
    """The error of a run whose second process was given other labels, rows or settings."""
    differs = os.environ.get("RANK", "0") == "1"
    labels = LABELS[::-1] if differs and topic == "labels" else LABELS
    rows = make_rows(12)[::-1] if differs and topic == "rows" else make_rows(12)
    rate = 1e-4 if differs and topic == "settings" else 1e-3
    model = load_model(checkpoint, SequenceClassification.of(labels=labels, max_length=40))
    try:
        fit(model, rows, make_rows(3), output_dir=folder, epochs=1, learning_rate=rate, progress=False)
    except BertTasksError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def scenarios(checkpoint: Path, wide_checkpoint: Path, folder: Path) -> dict[str, Any]:
    accelerator = make_accelerator()
    return {
        "world": accelerator.num_processes,
        "steps": {
            str(dtype): trajectory(
                wide_checkpoint, dtype=dtype, max_steps=12, rows=21, batch_size=8, micro_batch_tokens=60
            )
            for dtype in DTYPES
        },
        # ten rows in batches of three: each epoch has a batch of one row, so a process has none
        "few": trajectory(wide_checkpoint, rows=10, batch_size=3, micro_batch_tokens=60, max_grad_norm=0.1),
        # the same with all rows of the word embeddings
        "all rows": trajectory(
            wide_checkpoint, rows=10, batch_size=3, micro_batch_tokens=60, max_grad_norm=0.1, vocabulary_rows="all"
        ),
        "own table": trajectory(wide_checkpoint, rows=10, batch_size=3, build=with_own_table),
        "adapters": trajectory(
            wide_checkpoint, rows=10, batch_size=3, micro_batch_tokens=20, build=with_frozen_encoder, lora_rank=4
        ),
        # two loss terms, whose counts differ between the processes
        "terms": trajectory(wide_checkpoint, rows=10, batch_size=3, micro_batch_tokens=20, build=LengthAndLabel),
        # rows without a label have a distance from the teacher all the same
        "teacher": trajectory(
            wide_checkpoint,
            rows=10,
            batch_size=3,
            micro_batch_tokens=20,
            build=lambda model: Distillation(model, load_model(wide_checkpoint, WEIGHTED_TASK, seed=3)),
        ),
        # both processes see the same masks, and mask different numbers of tokens
        "masks": trajectory(wide_checkpoint, rows=15, batch_size=4, micro_batch_tokens=30, task=MASKED),
        # epochs of different numbers of steps
        "tokens": trajectory(wide_checkpoint, rows=15, batch_tokens=60, micro_batch_tokens=30),
        # rank 0 has long rows, one micro-batch each; rank 1 may have fewer of them
        "uneven": trajectory(wide_checkpoint, rows=15, batch_size=3, micro_batch_tokens=1),
        "several terms": {name: several_terms(name, wide_checkpoint) for name in SEVERAL_TERMS},
        "evaluations": {count: evaluation(wide_checkpoint, count) for count in EVALUATED},
        "evaluated masks": evaluation(wide_checkpoint, 9, MASKED),
        "trained": trained(checkpoint, folder / "run"),
        "trained tasks": trained_tasks(checkpoint, folder / "tasks"),
        "disagreements": {topic: disagreement(checkpoint, folder / topic, topic) for topic in DIFFERENT},
    }


def note_process_group(folder: Path) -> None:
    """Writes whether the process group is still there."""
    rank = os.environ.get("RANK", "0")
    (folder / f"group{rank}.txt").write_text("joined" if torch.distributed.is_initialized() else "left")


def main(checkpoint: str, wide_checkpoint: str, folder: str) -> None:
    torch.set_num_threads(1)
    atexit.register(note_process_group, Path(folder))  # called after what the package registers
    results = scenarios(Path(checkpoint), Path(wide_checkpoint), Path(folder))
    torch.save(results, Path(folder) / f"rank{make_accelerator().process_index}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
