"""Evaluation and prediction over files, tables and streams, on one or many processes.

Owns the names that the layers above use. Must not know training.
"""

from bert_tasks.inference.evaluation import Evaluation as Evaluation
from bert_tasks.inference.evaluation import evaluate as evaluate
from bert_tasks.inference.evaluation import evaluate_data as evaluate_data
from bert_tasks.inference.evaluation import evaluate_samples as evaluate_samples
from bert_tasks.inference.prediction import predict as predict
from bert_tasks.inference.prediction import predict_file as predict_file
from bert_tasks.inference.processes import first_process_first as first_process_first
from bert_tasks.inference.processes import from_first_process as from_first_process
from bert_tasks.inference.processes import is_first_process as is_first_process
from bert_tasks.inference.processes import leave_process_group as leave_process_group
from bert_tasks.inference.processes import make_accelerator as make_accelerator
from bert_tasks.inference.rows_out import Writing as Writing
from bert_tasks.inference.targets import Predicted as Predicted

__all__ = [
    "Evaluation",
    "Predicted",
    "Writing",
    "evaluate",
    "evaluate_data",
    "evaluate_samples",
    "first_process_first",
    "from_first_process",
    "is_first_process",
    "leave_process_group",
    "make_accelerator",
    "predict",
    "predict_file",
]
