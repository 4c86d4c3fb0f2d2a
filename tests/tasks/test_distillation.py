"""The distillation term of each task against its formula, computed row by row without padding, in float64."""

import math

import pytest
import torch
from torch.nn import functional as F

from bert_tasks.outputs.logits import NO_LOGIT, sigmoid_divergence, softmax_divergence
from bert_tasks.tasks import PairClassification, SequenceClassification, SpanExtraction, TokenClassification
from bert_tasks.tasks.features import collate
from bert_tasks.training.distillation import divergence_term

LENGTHS = (7, 3, 12, 5, 9)
TEMPERATURES = (1.0, 2.0, 5.0)


def batch_of(*, rows=range(5), reads=None):
    """Windows of ragged lengths without labels, which a teacher does not need."""
    return collate(
        [
            {
                "row": row,
                "input_ids": [5] * length,
                "token_type_ids": [0] * length,
                **({} if reads is None else {"gather_positions": reads[number]}),
            }
            for number, (row, length) in enumerate(zip(rows, LENGTHS, strict=True))
        ],
        position_offset=0,
    )


def logits(*shape, seed):
    return 3 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def kl(teacher, student, temperature):
    """Of one row, in plain Python: sum of p (log p - log q) times the square of the temperature."""

    def distribution(row):
        powers = [math.exp(value / temperature) for value in row.tolist()]
        return [power / sum(powers) for power in powers]

    p, q = distribution(teacher), distribution(student)
    return temperature**2 * sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))


def agrees(term, expected, count):
    assert term.name == "distillation"
    assert term.count.item() == count
    assert term.total.item() == pytest.approx(sum(expected), rel=1e-12)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("task_class", [SequenceClassification, PairClassification])
def test_classes_of_rows(task_class, temperature):
    student, teacher = logits(5, 3, seed=0), logits(5, 3, seed=1)
    term = divergence_term(task_class.of(labels=("a", "b", "c")), student, teacher, batch_of(), temperature)
    agrees(term, [kl(t, s, temperature) for s, t in zip(student, teacher, strict=True)], 5)


def test_windows_of_a_row_have_one_mean():
    student, teacher = logits(5, 3, seed=0), logits(5, 3, seed=1)
    task = SequenceClassification.of(labels=("a", "b", "c"), long_texts="windows", pooling="mean", doc_stride=2)
    term = divergence_term(task, student, teacher, batch_of(rows=(0, 0, 1, 2, 2)), 2.0)
    groups = [slice(0, 2), slice(2, 3), slice(3, 5)]
    agrees(term, [kl(teacher[group].mean(0), student[group].mean(0), 2.0) for group in groups], 3)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_several_labels_of_a_row(temperature):
    student, teacher = logits(5, 4, seed=0), logits(5, 4, seed=1)
    task = SequenceClassification.of(labels=("a", "b", "c", "d"), problem_type="multi_label_classification")
    term = divergence_term(task, student, teacher, batch_of(), temperature)
    # A label that is there or not is a softmax over its logit and 0.
    zero = torch.zeros((), dtype=torch.float64)
    pairs = zip(student.flatten(), teacher.flatten(), strict=True)
    agrees(term, [kl(torch.stack([t, zero]), torch.stack([s, zero]), temperature) for s, t in pairs], 20)


def test_numbers_have_a_squared_distance_at_any_temperature():
    student, teacher = logits(5, 1, seed=0), logits(5, 1, seed=1)
    task = SequenceClassification.of(problem_type="regression")
    for temperature in TEMPERATURES:
        term = divergence_term(task, student, teacher, batch_of(), temperature)
        agrees(term, ((student - teacher) ** 2).flatten().tolist(), 5)


def test_words_that_the_head_reads():
    reads = [[1, 2, 4], [1], [1, 3, 4, 8, 10], [], [2]]
    student, teacher = logits(10, 3, seed=0), logits(10, 3, seed=1)
    task = TokenClassification.of(labels=("O", "B-X", "I-X"))
    term = divergence_term(task, student, teacher, batch_of(reads=reads), 2.0)
    agrees(term, [kl(t, s, 2.0) for s, t in zip(student, teacher, strict=True)], 10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_starts_and_ends_over_the_real_tokens_of_a_window(dtype):
    student, teacher = logits(sum(LENGTHS), 2, seed=0).to(dtype), logits(sum(LENGTHS), 2, seed=1).to(dtype)
    term = divergence_term(SpanExtraction.of(), student.requires_grad_(), teacher, batch_of(), 2.0)
    expected = [
        kl(t[:, end].double(), s[:, end].double().detach(), 2.0)
        for s, t in zip(student.split(LENGTHS), teacher.split(LENGTHS), strict=True)
        for end in (0, 1)
    ]
    assert term.count.item() == 10
    assert term.total.item() == pytest.approx(sum(expected), rel=1e-12 if dtype == torch.float64 else 1e-5)
    (gradient,) = torch.autograd.grad(term.total, student)
    assert torch.isfinite(gradient).all()


def test_places_that_neither_may_choose_have_no_share():
    student, teacher = logits(4, 3, seed=0), logits(4, 3, seed=1)
    wider = [F.pad(rows, (0, 5), value=NO_LOGIT) for rows in (student, teacher)]
    assert softmax_divergence(*wider, 2.0).item() == pytest.approx(softmax_divergence(student, teacher, 2.0).item())


def test_confident_models_have_a_finite_divergence():
    far = torch.tensor([[80.0, -80.0]]).requires_grad_()
    for divergence in (softmax_divergence, sigmoid_divergence):
        total = divergence(far, -far.detach(), 1.0)
        (gradient,) = torch.autograd.grad(total, far)
        assert torch.isfinite(total)
        assert torch.isfinite(gradient).all()
