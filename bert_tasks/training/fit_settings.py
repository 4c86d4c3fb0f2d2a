"""The settings of ``fit``: the keys of a recipe's ``[optim]`` and ``[run]`` as keywords.

Owns their types for editors and type checkers, and what is said of a keyword that is none of them. Must not know what
the settings do.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal, TypedDict

from bert_tasks.errors import UsageError
from bert_tasks.recipe import TrackerName
from bert_tasks.recipe_errors import nearest_or_all


class FitSettings(TypedDict, total=False):
    """Keyword -> its type; docs/reference/recipe.md says what each means, its limits and its default."""

    learning_rate: float
    epochs: int
    batch_size: int
    warmup_ratio: float
    weight_decay: float
    max_grad_norm: float | None
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    mixed_precision: Literal["no", "fp16", "bf16"]
    head_learning_rate: float | None
    layerwise_lr_decay: float | None
    freeze_embeddings: bool
    freeze_layers: int
    micro_batch_tokens: int
    seed: int
    eval_steps: int | None
    early_stopping_patience: int | None
    metric_for_best_model: str | None
    logging_steps: int
    save_steps: int | None
    keep_last: int
    trackers: tuple[TrackerName, ...]
    project: str


# What users of transformers' TrainingArguments and Trainer write -> what does the same here.
HF_ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {
        "num_train_epochs": "epochs",
        "max_steps": "epochs",
        "per_device_train_batch_size": "batch_size, which counts samples over all devices",
        "per_gpu_train_batch_size": "batch_size, which counts samples over all devices",
        "train_batch_size": "batch_size, which counts samples over all devices",
        "per_device_eval_batch_size": "nothing: evaluation forms its batches by length",
        "gradient_accumulation_steps": "micro_batch_tokens, which limits what a device holds at once",
        "auto_find_batch_size": "micro_batch_tokens, which limits what a device holds at once",
        "lr": "learning_rate",
        "warmup_steps": "warmup_ratio, a share of the steps",
        "lr_scheduler_type": "nothing: the learning rate falls to 0 in a straight line",
        "fp16": 'mixed_precision="fp16"',
        "bf16": 'mixed_precision="bf16"',
        "save_total_limit": "keep_last",
        "eval_strategy": "eval_steps; without it after each epoch",
        "evaluation_strategy": "eval_steps; without it after each epoch",
        "save_strategy": "save_steps; with every evaluation in any case",
        "logging_strategy": "logging_steps",
        "logging_dir": "trackers, whose files go to output_dir",
        "report_to": "trackers",
        "run_name": "project",
        "data_seed": "seed",
        "load_best_model_at_end": "nothing: the model ends with the best weights",
        "greater_is_better": "nothing: each metric knows whether more of it is better",
        "overwrite_output_dir": "overwrite",
        "resume_from_checkpoint": "nothing: the same call resumes the run in output_dir",
        "train_dataset": "train",
        "eval_dataset": "validation",
        "callbacks": "callback",
        "compute_metrics": "nothing: the task computes its metrics",
        "disable_tqdm": "progress=False",
        "max_seq_length": "the setting max_length of the model's task",
        "max_length": "the setting max_length of the model's task",
        "label_smoothing_factor": "the setting label_smoothing of the model's task",
        "optim": "nothing: the optimizer is AdamW",
    }
)


def check_keywords(given: Iterable[str], known: Iterable[str]) -> None:
    """Refuses keywords that ``fit`` does not have.

    Raises:
        UsageError: naming all of them, each with the argument that was probably meant.
    """
    arguments = [*known, *FitSettings.__annotations__]
    wrong = [name for name in given if name not in arguments]
    if wrong:
        raise UsageError("fit: " + "; ".join(f"unknown argument '{name}'{_hint(name, arguments)}" for name in wrong))


def _hint(name: str, arguments: Iterable[str]) -> str:
    ours = HF_ARGUMENTS.get(name)
    if ours is not None:
        return f"; transformers' {name} is {ours}" if not ours.startswith("nothing") else f"; {ours[9:]}"
    return nearest_or_all(name, arguments)
