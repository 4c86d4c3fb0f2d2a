"""Evaluation and prediction over files, tables and streams, on one or many processes.

Owns the names that the layers above use. Must not know training.
"""

from bert_tasks.distributed import broadcast_from_main as broadcast_from_main
from bert_tasks.distributed import is_first_process as is_first_process
from bert_tasks.distributed import leave_process_group as leave_process_group
from bert_tasks.distributed import main_process_first as main_process_first
from bert_tasks.distributed import make_accelerator as make_accelerator
from bert_tasks.inference.evaluation import Evaluation as Evaluation
from bert_tasks.inference.evaluation import evaluate as evaluate
from bert_tasks.inference.evaluation import evaluate_data as evaluate_data
from bert_tasks.inference.evaluation import evaluate_samples as evaluate_samples
from bert_tasks.inference.output import Predicted as Predicted
from bert_tasks.inference.output import WriteOptions as WriteOptions
from bert_tasks.inference.prediction import predict as predict
from bert_tasks.inference.prediction import predict_file as predict_file

__all__ = [
    "Evaluation",
    "Predicted",
    "WriteOptions",
    "broadcast_from_main",
    "evaluate",
    "evaluate_data",
    "evaluate_samples",
    "is_first_process",
    "leave_process_group",
    "main_process_first",
    "make_accelerator",
    "predict",
    "predict_file",
]
