"""How far a student's logits are from a teacher's: the divergences of which tasks make their distillation term.

Each is a sum, so that a step divides it by a count over all processes and micro-batches; the gradient goes to the
student. The divergences are multiplied by the square of the temperature, which keeps the size of the gradient (Hinton,
Vinyals and Dean, arXiv:1503.02531).

Shape legend: R rows of logits, L labels.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

# The term's name in the loss, the counts and the log.
DISTILLATION = "distillation"
# The logit of a place that neither model may choose. An infinite one would make the divergence 0 times infinity.
NO_LOGIT = -1e30


def softmax_divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Kullback-Leibler divergence of the student's distribution from the teacher's, summed over all rows.

    Args:
        student, teacher: ``[R, L]`` logits; ``NO_LOGIT`` in the same places of both has no share.
        temperature: the logits are divided by it before the softmax.

    Returns:
        0-dimensional: the sum over rows of KL(teacher || student), times ``temperature`` squared.
    """
    log_student = F.log_softmax(student / temperature, dim=-1)
    log_teacher = F.log_softmax(teacher / temperature, dim=-1)
    divergence: Tensor = F.kl_div(log_student, log_teacher, reduction="sum", log_target=True)
    return divergence * temperature**2


def sigmoid_divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """The same for labels of which each is there or not, whatever the others are: ``[R, L]`` logits, summed over both.

    Returns:
        0-dimensional: the sum over rows and labels of KL(teacher || student) of two outcomes, times ``temperature``
        squared.
    """
    given, found = teacher / temperature, student / temperature
    share = given.sigmoid()
    there = share * (F.logsigmoid(given) - F.logsigmoid(found))
    absent = (1 - share) * (F.logsigmoid(-given) - F.logsigmoid(-found))
    return (there + absent).sum() * temperature**2


def mean_softmax(logits: Iterable[Tensor]) -> Tensor:
    """``[..., L]`` the logarithms of the mean probabilities of classes that exclude each other."""
    found = torch.stack([one.log_softmax(dim=-1) for one in logits])
    return found.logsumexp(dim=0) - math.log(len(found))


def mean_sigmoid(logits: Iterable[Tensor]) -> Tensor:
    """The log-odds of the mean probabilities of labels of which each is there or not, whatever the others are."""
    found = torch.stack(list(logits))
    there, absent = (F.logsigmoid(sign * found).logsumexp(dim=0) for sign in (1, -1))
    return there - absent


def mean_values(logits: Iterable[Tensor]) -> Tensor:
    """The mean of numbers, of which two tensors are in memory at a time: the sum and those of one model."""
    remaining = iter(logits)
    total, count = next(remaining).clone(), 1
    for one in remaining:
        total += one
        count += 1
        del one  # before the next model computes
    return total.div_(count)
