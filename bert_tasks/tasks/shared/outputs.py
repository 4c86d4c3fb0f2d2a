"""Distillation, means of models and shown logits for each kind of output.

The output kind is the meaning of the logits (``Task.output_kind``). Divergences are sums, multiplied by the square of
the temperature, which keeps the size of the gradient (Hinton, Vinyals and Dean, arXiv:1503.02531). The mean of several
models averages probabilities, and is returned as logits.

Shape legend: N tokens, B sequences (windows), S samples, R rows of logits, C choices, L labels, T tokens of the longest
window.
"""

from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.utils import checkpoint as activations

from bert_tasks.encoder import heads, packing
from bert_tasks.encoder.heads import Head, VocabularyOutput
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import UsageError
from bert_tasks.tasks.base import Feature, LossTerm, Task
from bert_tasks.tasks.shared.fitting import Fitting
from bert_tasks.tasks.shared.windows import word_starts

# The term's name in the loss, the counts and the log.
DISTILLATION = "distillation"
# The logit of a place that neither model may choose. An infinite one would make the divergence 0 times infinity.
NO_LOGIT = -1e30


def windows_by_row(features: Sequence[Feature]) -> list[list[int]]:
    """Returns the indices of the features of each row."""
    return [list(group) for _, group in groupby(range(len(features)), key=lambda index: features[index]["row"])]


def sample_logits(logits: Tensor, windows: Collection[int]) -> Tensor:
    """Returns the mean over the windows of each sample, ``[B, L] -> [S, L]``."""
    if len(windows) == logits.shape[0]:
        return logits
    return torch.segment_reduce(logits, "mean", lengths=packing.device_tensor([*windows], logits.device), unsafe=True)


def choice_logits(logits: Tensor, windows: Collection[int], *, absent: float) -> Tensor:
    """Returns each row's logits, padded with ``absent``, ``[B, 1] -> [S, C]``."""
    return rnn.pad_sequence(
        list(torch.split(logits.squeeze(-1), list(windows))), batch_first=True, padding_value=absent
    )


def position_logits(parts: Sequence[Tensor], *, absent: float) -> Tensor:
    """Returns start and end logits, padded, ``B x [tokens, 2] -> [2 B, T]``."""
    padded = rnn.pad_sequence(list(parts), batch_first=True, padding_value=absent)  # [B, T, 2]
    return padded.transpose(1, 2).flatten(0, 1)


def vocabulary_output(logits: Any) -> VocabularyOutput:
    """Returns logits over the vocabulary from any head or exported graph."""
    if isinstance(logits, heads.PretrainingOutput):
        return logits.vocabulary
    return heads.VocabularyOutput.of_logits(logits) if isinstance(logits, torch.Tensor) else logits


def joins_windows(task: Task, head: Head) -> bool:
    """Returns True if a prediction is made of the logits of all windows of a row."""
    return not head.per_token and Fitting.of(task).sample == "row"


# Distillation.


def check_teachable(task: Task) -> None:
    """Raises UsageError if a model of this task cannot learn from a teacher."""
    if Fitting.of(task).generator() is not None:
        raise UsageError(f"{task.name} cannot learn from a teacher")
    if task.output_kind == "chain":
        raise UsageError(
            "crf = true scores sequences of tags, but distillation compares the scores of single words. Set "
            "crf = false for the model and for its teacher"
        )


def distillation_count(task: Task, head: Head, features: Sequence[Feature]) -> float:
    """Returns the count of ``distillation_loss`` for a batch, with or without labels."""
    if task.output_kind == "position":
        return float(head.num_logits * len(features))
    if head.per_token:
        reads = (feature.get("gather_positions") for feature in features)
        count = sum(len(f["input_ids"] if read is None else read) for f, read in zip(features, reads, strict=True))
    else:
        rows = task.output_kind == "choice" or joins_windows(task, head)
        count = len(windows_by_row(features)) if rows else len(features)
    return float(count * (head.num_logits if task.output_kind == "sigmoid" else 1))


def distillation_loss(
    task: Task, head: Head, student: Any, teacher: Any, batch: PackedBatch, temperature: float
) -> LossTerm:
    """Returns the distance of a student's logits from its teacher's logits.

    Args:
        task: The task of both.
        head: The head of the student.
        student: Logits as ``Task.loss`` gets them, with a gradient.
        teacher: Logits of the teacher.
        batch: The batch, with or without labels.
        temperature: Logits of classes are divided by it.
    """
    if task.output_kind == "vocabulary":
        total, count = _vocabulary_divergence(vocabulary_output(student), vocabulary_output(teacher), temperature)
        return LossTerm(name=DISTILLATION, total=total, count=total.new_full((), count).detach())
    student_terms, other = (_distributions(task, head, logits, batch) for logits in (student, teacher))
    count = len(student_terms)
    match task.output_kind:
        case "value":
            total = F.mse_loss(student_terms, other, reduction="sum")
        case "sigmoid":
            total, count = sigmoid_divergence(student_terms, other, temperature), student_terms.numel()
        case _:
            total = softmax_divergence(student_terms, other, temperature)
    return LossTerm(name=DISTILLATION, total=total, count=student.new_full((), count))


def _distributions(task: Task, head: Head, logits: Tensor, batch: PackedBatch) -> Tensor:
    """Returns a row of logits for each distribution or number to compare."""
    if task.output_kind == "choice":
        return choice_logits(logits, batch.windows, absent=NO_LOGIT)
    if task.output_kind == "position":
        return position_logits(torch.split(logits, list(batch.layout.gather_counts)), absent=NO_LOGIT)
    return sample_logits(logits, batch.windows) if joins_windows(task, head) else logits


def softmax_divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Returns the Kullback-Leibler divergence of the student, summed over all rows.

    ``[R, L], [R, L] -> []`` KL(teacher || student) times ``temperature`` squared. ``NO_LOGIT`` in the same positions of
    both has no share.
    """
    log_student = F.log_softmax(student / temperature, dim=-1)
    log_teacher = F.log_softmax(teacher / temperature, dim=-1)
    divergence: Tensor = F.kl_div(log_student, log_teacher, reduction="sum", log_target=True)
    return divergence * temperature**2


def sigmoid_divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Returns the divergence of labels that are present or absent, summed.

    ``[R, L], [R, L] -> []`` KL(teacher || student) of two outcomes, times ``temperature`` squared.
    """
    target, scaled = teacher / temperature, student / temperature
    probability = target.sigmoid()
    present = probability * (F.logsigmoid(target) - F.logsigmoid(scaled))
    absent = (1 - probability) * (F.logsigmoid(-target) - F.logsigmoid(-scaled))
    return (present + absent).sum() * temperature**2


def _vocabulary_divergence(
    student: VocabularyOutput, teacher: VocabularyOutput, temperature: float
) -> tuple[Tensor, int]:
    """Returns the divergence over the vocabulary and the number of tokens.

    The logits of some tokens exist at a time. The backward pass computes them again.
    """

    def divergence(student: VocabularyOutput, other: VocabularyOutput) -> Tensor:
        return softmax_divergence(student.logits(), other.logits(), temperature)

    rows = len(student)
    sizes = [min(student.chunk_rows, rows - start) for start in range(0, max(1, rows), student.chunk_rows)]
    totals = [
        activations.checkpoint(divergence, *pair, use_reentrant=False, preserve_rng_state=False)
        for pair in zip(student.split(sizes), teacher.split(sizes), strict=True)
    ]
    return torch.stack(totals).sum(), rows


# Logits in predictions.


def with_logits(
    task: Task, predictions: Sequence[Any], compact: Sequence[Tensor], features: Sequence[Feature]
) -> Sequence[Any]:
    """Returns predictions with the logits of each label, choice, or word and label.

    Raises:
        UsageError: A prediction of the task has no such logits.
    """
    if task.output_kind == "chain":
        raise UsageError("a tagger with crf = true scores sequences of tags, not words. Predict without logits")
    if not predictions or task.output_kind == "position":  # n_best has the start and end logit of every span
        return predictions
    if "logits" not in {field.name for field in fields(predictions[0])}:
        raise UsageError(f"{task.name} has no logits. Predict without them")
    rows = []
    for numbers in windows_by_row(features):
        windows = [compact[index] for index in numbers]
        if windows[0].dim() == 2:  # logits of each word's first token
            starts = [start for index in numbers for start in word_starts(features[index].get("word_ids"))]
            first = torch.tensor(starts, dtype=torch.bool).nonzero().squeeze(1)
            words = torch.cat(windows).index_select(0, first).tolist()
            rows.append(tuple(map(tuple, words)))
        elif task.output_kind == "choice":
            rows.append(tuple(torch.cat(windows).tolist()))
        else:
            rows.append(tuple(sample_logits(torch.stack(windows), [len(windows)])[0].tolist()))
    return [replace(prediction, logits=logits) for prediction, logits in zip(predictions, rows, strict=True)]
