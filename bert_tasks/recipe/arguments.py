"""The arguments of `fit` that are keys of a recipe, so that editors complete them.

Written by `make docs` from the sections in schema.py, which describe them. Change the sections, not this file.
"""

from typing import Literal

from bert_tasks.data.options import ReadingArguments


class FitArguments(ReadingArguments, total=False):
    """The keyword arguments of `fit` that are keys of a recipe."""

    learning_rate: float
    lr_scheduler_type: Literal["linear", "cosine", "constant", "wsd"]
    epochs: int
    max_steps: int | None
    batch_size: int | None
    batch_tokens: int | None
    sampling: Literal["proportional", "equal"] | float
    warmup_ratio: float
    decay_ratio: float
    weight_decay: float
    max_grad_norm: float | None
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    bias_correction: bool
    mixed_precision: Literal["no", "fp16", "bf16"]
    vocabulary_rows: Literal["in_data", "all"]
    head_learning_rate: float | None
    layerwise_lr_decay: float | None
    freeze_embeddings: bool
    freeze_layers: int
    linear_probe: bool
    lora_rank: int | None
    lora_alpha: float | None
    lora_dropout: float
    lora_targets: tuple[Literal["query", "key", "value", "attention_output", "intermediate", "output"], ...]
    micro_batch_tokens: int
    seed: int
    eval_steps: int | None
    early_stopping_patience: int | None
    metric_for_best_model: str | None
    lower_is_better: tuple[str, ...]
    logging_steps: int
    save_steps: int | None
    keep_last: int
    keep_checkpoints: bool
    save_adapter: bool
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...]
    project: str
    gradient_checkpointing: bool
    document: Literal["blank-line", "line", "file"]
    validation_share: float
    max_rows: int | None
    on_error: Literal["fail", "skip"]
    teacher_revision: str | None
    teacher_temperature: float
    teacher_weight: float
    teacher_hidden: Literal["none", "cosine", "mse"]
    teacher_hidden_weight: float
    teacher_relations: bool | int
    teacher_relations_weight: float
    teacher_cache_logits: bool
