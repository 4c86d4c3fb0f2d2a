"""Pre-train, fine-tune, distil, evaluate, serve and export BERT-family encoders.

Models are weight-compatible with Hugging Face checkpoints.

Owns the public names. They are imported on first use, so that the command line starts without torch.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from bert_tasks.api import fit as fit
    from bert_tasks.api import train as train
    from bert_tasks.data.options import ReadOptions as ReadOptions
    from bert_tasks.inference import WriteOptions as WriteOptions
    from bert_tasks.inference import batch_predictor as batch_predictor
    from bert_tasks.inference import evaluate as evaluate
    from bert_tasks.inference import predict as predict
    from bert_tasks.inference import predict_file as predict_file
    from bert_tasks.model.encoder import Encoder as Encoder
    from bert_tasks.model.multitask import MultiTaskModel as MultiTaskModel
    from bert_tasks.model.task_model import TaskModel as TaskModel
    from bert_tasks.recipe.schema import load_recipe as load_recipe
    from bert_tasks.training.loop import Trainer as Trainer
    from bert_tasks.training.loop import TrainerCallback as TrainerCallback

_HOMES = {
    "Encoder": "bert_tasks.model.encoder",
    "MultiTaskModel": "bert_tasks.model.multitask",
    "ReadOptions": "bert_tasks.data.options",
    "TaskModel": "bert_tasks.model.task_model",
    "Trainer": "bert_tasks.training.loop",
    "TrainerCallback": "bert_tasks.training.loop",
    "WriteOptions": "bert_tasks.inference",
    "batch_predictor": "bert_tasks.inference",
    "evaluate": "bert_tasks.inference",
    "fit": "bert_tasks.api",
    "load_recipe": "bert_tasks.recipe.schema",
    "predict": "bert_tasks.inference",
    "predict_file": "bert_tasks.inference",
    "train": "bert_tasks.api",
}

__all__ = [
    "Encoder",
    "MultiTaskModel",
    "ReadOptions",
    "TaskModel",
    "Trainer",
    "TrainerCallback",
    "WriteOptions",
    "batch_predictor",
    "evaluate",
    "fit",
    "load_recipe",
    "predict",
    "predict_file",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("bert-tasks")
    if name not in _HOMES:
        raise AttributeError(f"module 'bert_tasks' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, "__version__"])
