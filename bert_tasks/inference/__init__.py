"""Evaluation and prediction over files, tables and streams, on many processes.

Owns the names that the layers above use. Must not know training.
"""

from bert_tasks.inference.batches import BatchPredictor, batch_predictor
from bert_tasks.inference.embedding import embed_file
from bert_tasks.inference.evaluation import (
    Evaluation,
    evaluate,
    evaluate_data,
    evaluate_samples,
    evaluated_predictions,
)
from bert_tasks.inference.prediction import predict, predict_file
from bert_tasks.inference.quantization import Quantization, quantize
from bert_tasks.inference.thresholds import calibrate
from bert_tasks.inference.writing import WriteOptions, Written

__all__ = [
    "BatchPredictor",
    "Evaluation",
    "Quantization",
    "WriteOptions",
    "Written",
    "batch_predictor",
    "calibrate",
    "embed_file",
    "evaluate",
    "evaluate_data",
    "evaluate_samples",
    "evaluated_predictions",
    "predict",
    "predict_file",
    "quantize",
]
