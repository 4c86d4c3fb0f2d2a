"""How far a student's logits are from a teacher's: the divergences of which tasks make their distillation term.

Each is a sum, so that a step divides it by a count over all processes and micro-batches; the gradient goes to the
student. The divergences are multiplied by the square of the temperature, which keeps the size of the gradient (Hinton,
Vinyals and Dean, arXiv:1503.02531).

Shape legend: R rows of logits, L labels.
"""

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
