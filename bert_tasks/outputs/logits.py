"""Logits of windows as logits of rows, and the distances of a student's logits from its teacher's.

Divergences are sums, multiplied by the square of the temperature, which keeps the size of the gradient (Hinton, Vinyals
and Dean, arXiv:1503.02531).

Shape legend: N tokens, B sequences (windows), S samples, R rows of logits, C choices, L labels, T tokens of the longest
window.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.utils import checkpoint as activations

from bert_tasks.encoder import heads, packing
from bert_tasks.encoder.heads import VocabularyOutput

# The term's name in the loss, the counts and the log.
DISTILLATION = "distillation"
# The logit of a place that neither model may choose. An infinite one would make the divergence 0 times infinity.
NO_LOGIT = -1e30


def sample_logits(logits: Tensor, windows: Collection[int]) -> Tensor:
    """Returns the mean over the windows of each sample, ``[B, L] -> [S, L]``."""
    if len(windows) == logits.shape[0]:  # one window for each row, as for most texts
        return logits
    # ``unsafe`` skips a check of the lengths that would wait for the device.
    lengths = packing.device_tensor([*windows], logits.device)
    return torch.segment_reduce(logits, "mean", lengths=lengths, unsafe=True)


def choice_logits(logits: Tensor, windows: Collection[int], *, absent: float) -> Tensor:
    """Returns each row's logits, padded with ``absent``, ``[B, 1] -> [S, C]``."""
    of_rows = torch.split(logits.squeeze(-1), list(windows))
    return rnn.pad_sequence(list(of_rows), batch_first=True, padding_value=absent)


def position_logits(parts: Sequence[Tensor], *, absent: float) -> Tensor:
    """Returns start and end logits, padded, ``B x [tokens, 2] -> [2 B, T]``."""
    padded = rnn.pad_sequence(list(parts), batch_first=True, padding_value=absent)  # [B, T, 2]
    return padded.transpose(1, 2).flatten(0, 1)


def vocabulary_output(logits: Any) -> VocabularyOutput:
    """Returns logits over the vocabulary from any head or exported graph."""
    if isinstance(logits, heads.PretrainingOutput):
        return logits.vocabulary
    if isinstance(logits, torch.Tensor):  # of an exported graph, which has computed all of them
        return heads.VocabularyOutput.of_logits(logits)
    output: VocabularyOutput = logits
    return output


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
    # log(1 - sigmoid(x)) is logsigmoid(-x), which keeps its digits if the sigmoid rounds to 1.
    probability = target.sigmoid()
    present = probability * (F.logsigmoid(target) - F.logsigmoid(scaled))
    absent = (1 - probability) * (F.logsigmoid(-target) - F.logsigmoid(-scaled))
    return (present + absent).sum() * temperature**2


def vocabulary_divergence(
    student: VocabularyOutput, teacher: VocabularyOutput, temperature: float
) -> tuple[Tensor, int]:
    """Returns the divergence over the vocabulary and the number of tokens.

    The logits of some tokens exist at a time. The backward pass computes them again.
    """

    def divergence(student: VocabularyOutput, other: VocabularyOutput) -> Tensor:
        return softmax_divergence(student.logits(), other.logits(), temperature)

    rows = len(student)
    starts = range(0, max(1, rows), student.chunk_rows)  # without rows one empty chunk, so that there is a gradient
    sizes = [min(student.chunk_rows, rows - start) for start in starts]
    totals = []
    for pair in zip(student.split(sizes), teacher.split(sizes), strict=True):
        total = activations.checkpoint(divergence, *pair, use_reentrant=False, preserve_rng_state=False)
        totals.append(total)
    return torch.stack(totals).sum(), rows
