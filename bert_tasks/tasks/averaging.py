"""The mean of several models' predictions, as logits: of these tasks make their ``mean_logits``.

Probabilities of classes are averaged, not their logits: a score is then the mean of the scores that the models give,
and a model whose logits are far apart counts no more than another. As logits the means go through the loss, decoding
and thresholds of one model.

Shape legend: L labels. Each function takes one tensor per model, all of one shape, and returns one of that shape. As an
iterator may compute them, it asks for each only once.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F


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
