"""The configuration of low-rank adapters in a folder of the library peft.

The format is documented at https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_tasks.checkpoints.files import MAX_CONFIG_BYTES, checked_file, read_json, refuse
from bert_tasks.checkpoints.hub import ADAPTER_CONFIG

TASK_TYPES = {"sequence": "SEQ_CLS", "token": "TOKEN_CLS", "span": "QUESTION_ANS"}
# Fields of peft's configuration that change what adapters compute, with the values that this package computes.
_SUPPORTED: Mapping[str, Any] = {"peft_type": "LORA", "use_dora": False, "bias": "none", "lora_bias": False}


def is_adapter(folder: Path) -> bool:
    """Returns True for a folder of peft with adapters and no weights of a model."""
    return os.path.lexists(folder / ADAPTER_CONFIG)


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Returns the configuration of a folder of peft.

    Raises:
        CheckpointError: It is damaged, or it has adapters of another type.
    """
    path = checked_file(folder, ADAPTER_CONFIG)
    config = read_json(path, max_bytes=MAX_CONFIG_BYTES)
    for name, value in _SUPPORTED.items():
        if config.get(name, value) != value:
            refuse(path, f"{name} = {config[name]!r} is not supported, expected {value!r}")
    if not isinstance(config.get("base_model_name_or_path"), str):
        refuse(path, "base_model_name_or_path does not name the model that the adapters belong to")
    factors = config.get("alpha_pattern", {})
    alphas = [config.get("lora_alpha"), *(factors.values() if isinstance(factors, dict) else [None])]
    if not all(isinstance(alpha, int | float) for alpha in alphas):
        refuse(path, "lora_alpha or alpha_pattern are no numbers")
    return {**config, "alpha_pattern": factors}


def head_of(config: Mapping[str, Any]) -> str | None:
    """Returns the type of head that adapters were trained with, or None if unknown."""
    return next((head for head, name in TASK_TYPES.items() if name == config.get("task_type")), None)
