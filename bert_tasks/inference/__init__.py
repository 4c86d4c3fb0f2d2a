"""Evaluation and prediction over files, tables and streams, on one or many processes.

Owns the names that the layers above use. Must not know training.
"""

from bert_tasks.inference.batches import BatchPredictor as BatchPredictor
from bert_tasks.inference.batches import batch_predictor as batch_predictor
from bert_tasks.inference.embedding import embed_file as embed_file
from bert_tasks.inference.evaluation import Evaluation as Evaluation
from bert_tasks.inference.evaluation import evaluate as evaluate
from bert_tasks.inference.evaluation import evaluate_data as evaluate_data
from bert_tasks.inference.evaluation import evaluate_samples as evaluate_samples
from bert_tasks.inference.evaluation import evaluated_predictions as evaluated_predictions
from bert_tasks.inference.output import Predicted as Predicted
from bert_tasks.inference.output import WriteOptions as WriteOptions
from bert_tasks.inference.prediction import predict as predict
from bert_tasks.inference.prediction import predict_file as predict_file

__all__ = [
    "BatchPredictor",
    "Evaluation",
    "Predicted",
    "WriteOptions",
    "batch_predictor",
    "embed_file",
    "evaluate",
    "evaluate_data",
    "evaluate_samples",
    "evaluated_predictions",
    "predict",
    "predict_file",
]
