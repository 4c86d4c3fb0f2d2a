"""What a prediction depends on, in short: the rows, the model, the settings and the versions.

Owns the fingerprints by which parts of an earlier attempt are known again. Must not know files.
"""

import hashlib
import platform
from typing import Any

import torch

from bert_tasks.data.arrow_cache import digest
from bert_tasks.data.features_cache import tokenizer_content
from bert_tasks.environment import installed_version
from bert_tasks.model.exported import ExportedModel
from bert_tasks.model.onnx import DType
from bert_tasks.model.predicting import tokenizer_of
from bert_tasks.model.task_model import TaskModel

_VERSIONED = ("bert-tasks", "torch", "transformers", "tokenizers", "onnxruntime")


def model_fingerprint(model: TaskModel) -> str:
    """A sha256 over weights or graph, task, configuration and tokenizer."""
    weights = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        weights.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    if isinstance(model, ExportedModel):
        weights.update(model.graph_sha256.encode())
    task = model.task
    tuned = {name: getattr(task, name) for name in task.tuned}
    about = [f"{type(task).__module__}:{type(task).__qualname__}", task.labels, task.settings(), tuned]
    return digest(weights.hexdigest(), about, model.hf_config, tokenizer_content(tokenizer_of(model)))


def prediction_facts(model: TaskModel, rows: str, dtype: DType, **settings: Any) -> dict[str, Any]:
    """What must be equal for two attempts to write the same; the number of processes is not among it."""
    settings |= {"dtype": dtype, "device": model.device.type}
    versions = {name: installed_version(name) for name in _VERSIONED} | {"python": platform.python_version()}
    return {"input": rows, "model": model_fingerprint(model), "settings": settings, "versions": versions}
