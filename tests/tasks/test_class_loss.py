"""Class weights and the focal loss of every task that has them: torch's cross entropy, the paper's formula, counts.

Shape legend: R examples (rows or words), L labels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor
from torch.nn import functional as F

from bert_tasks.encoder.packing import PackedBatch, pack
from bert_tasks.outputs.class_weights import label_weights
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.losses import binary_cross_entropy, cross_entropy
from bert_tasks.tasks import MultipleChoice, PairClassification, SequenceClassification, TokenClassification
from bert_tasks.tasks.features import collate

LABELS = ("O", "B-PER", "I-PER")
WEIGHTS = (0.5, 2.0, 1.25)
CLASSES = [2, 0, 1, 2, 0, 2]
SETS = [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0]]
SEVERAL = SequenceClassification.of(labels=LABELS, problem_type="multi_label_classification")
GAMMAS = (0.0, 0.5, 2.0)


def normal(rows: int, columns: int) -> Tensor:
    return 2 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)


def row_features(labels: list[list[float]], windows: int = 1) -> list[Feature]:
    return [
        Feature(row=row, input_ids=[2, 3], token_type_ids=[0, 0], labels=None if window else row_labels)
        for row, row_labels in enumerate(labels)
        for window in range(windows)
    ]


def word_features() -> list[Feature]:
    words = [CLASSES[:1], CLASSES[1:]]
    return [
        Feature(
            row=row,
            input_ids=[5] * (len(labels) + 2),
            token_type_ids=[0] * (len(labels) + 2),
            labels=list(map(float, labels)),
            gather_positions=list(range(1, len(labels) + 1)),
            word_ids=list(range(len(labels))),
        )
        for row, labels in enumerate(words)
    ]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A task, features with its labels, logits of its head, and the logits ``[R, L]`` of single examples."""

    task: Any
    features: list[Feature]
    logits: Tensor
    examples: Callable[[Tensor], Tensor] = lambda logits: logits
    labels: Any = None
    weighted: bool = True

    def batch(self) -> PackedBatch:
        return collate(self.features, position_offset=0)


ROWS = row_features([[float(label)] for label in CLASSES])
CASES = {
    "sequence": Case(task=SequenceClassification.of(labels=LABELS), features=ROWS, logits=normal(6, 3), labels=CLASSES),
    "windows": Case(
        task=SequenceClassification.of(labels=LABELS, long_texts="windows"),
        features=row_features([[float(label)] for label in CLASSES], windows=2),
        logits=normal(12, 3),
        examples=lambda logits: logits.view(6, 2, 3).mean(1),
        labels=CLASSES,
    ),
    "pair": Case(task=PairClassification.of(labels=LABELS), features=ROWS, logits=normal(6, 3), labels=CLASSES),
    "token": Case(
        task=TokenClassification.of(labels=LABELS), features=word_features(), logits=normal(6, 3), labels=CLASSES
    ),
    "choice": Case(
        task=MultipleChoice.of(),
        features=row_features([[2.0], [0.0]], windows=3),
        logits=normal(6, 1),
        examples=lambda logits: logits.view(2, 3),
        labels=[2, 0],
        weighted=False,
    ),
}
PAIRS = [(name, weights) for name, case in CASES.items() for weights in ((None, WEIGHTS) if case.weighted else (None,))]


def task_of(case: Case, weights: tuple[float, ...] | None, gamma: float) -> Any:
    changes = {"focal_gamma": gamma} | ({} if weights is None else {"class_weights": weights})
    return case.task.with_settings(**changes)


def paper(probabilities: Tensor, weights: Tensor, gamma: float) -> Tensor:
    """Equations 4 and 5: FL(p_t) = -alpha_t (1 - p_t)^gamma log(p_t)."""
    return -weights * (1 - probabilities) ** gamma * probabilities.log()


@pytest.mark.parametrize(("name", "weights"), PAIRS)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_the_loss_is_the_formula_of_the_paper(name: str, weights: tuple[float, ...] | None, gamma: float) -> None:
    case = CASES[name]
    logits = case.logits.clone().requires_grad_()
    labels = torch.tensor(case.labels)
    examples = case.examples(logits)
    each = torch.ones(len(labels), dtype=torch.float64) if weights is None else torch.tensor(weights)[labels].double()
    probabilities = examples.softmax(1).gather(1, labels[:, None]).squeeze(1)
    expected = paper(probabilities, each, gamma).sum() / each.sum()
    (term,) = task_of(case, weights, gamma).output.loss(logits, case.batch())
    mean = term.total / term.count
    assert term.count == each.sum()
    assert mean.item() == pytest.approx(expected.item(), rel=1e-12)
    ours, theirs = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (mean, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)
    # Without the focal term, or without the weights, the loss is far away.
    for other in {(None, gamma), (weights, 0.0)} - {(weights, gamma)}:
        (wrong,) = task_of(case, *other).output.loss(logits, case.batch())
        assert abs((wrong.total / wrong.count - mean).item()) > 1e-3


@pytest.mark.parametrize(("name", "weights"), PAIRS)
def test_without_gamma_the_bits_are_those_of_torch(name: str, weights: tuple[float, ...] | None) -> None:
    case = CASES[name]
    weight = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    (term,) = task_of(case, weights, 0.0).output.loss(case.logits, case.batch())
    logits, labels = case.examples(case.logits), torch.tensor(case.labels)
    assert torch.equal(term.total, F.cross_entropy(logits, labels, weight=weight, reduction="sum"))
    mean = F.cross_entropy(logits, labels, weight=weight, reduction="mean")
    assert (term.total / term.count).item() == pytest.approx(mean.item(), rel=1e-15)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("gamma", GAMMAS)
def test_several_labels_have_the_sigmoid_of_the_paper(weights: tuple[float, ...] | None, gamma: float) -> None:
    """Its alpha is the weight of a label that is present; a label that is absent has weight 1."""
    task = task_of(Case(task=SEVERAL, features=[], logits=normal(1, 1)), weights, gamma)
    logits, labels = normal(4, 3).requires_grad_(), torch.tensor(SETS, dtype=torch.float64)
    (term,) = task.output.loss(logits, collate(row_features(SETS), position_offset=0))
    each = torch.ones(3) if weights is None else torch.tensor(weights)
    present = logits.sigmoid()
    expected = paper(
        torch.where(labels == 1, present, 1 - present), torch.where(labels == 1, each.double(), 1.0), gamma
    ).mean()
    mean = term.total / term.count
    assert term.count == 12
    assert mean.item() == pytest.approx(expected.item(), rel=1e-12)
    ours, theirs = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (mean, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)
    if gamma == 0:
        pos_weight = None if weights is None else each.double()
        plain = F.binary_cross_entropy_with_logits(logits, labels, pos_weight=pos_weight, reduction="sum")
        assert torch.equal(term.total, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gamma", [0.01, 0.5, 2.0])
def test_gradients_of_certain_predictions_are_finite(gamma: float, dtype: torch.dtype) -> None:
    """The derivative of (1 - p)^gamma is infinite at p = 1 if gamma is below 1."""
    for value in (1e-3, 20.0, 200.0, 1e4):
        for sign in (1, -1):
            logits = torch.tensor([[sign * value, 0.0]], dtype=dtype, requires_grad=True)
            losses = [cross_entropy(logits, torch.tensor([0]), gamma=gamma)]
            losses += [binary_cross_entropy(logits, torch.tensor([[1.0, 0.0]], dtype=dtype), gamma=gamma)]
            for loss in losses:
                (gradient,) = torch.autograd.grad(loss, logits)
                assert loss.isfinite()
                assert gradient.isfinite().all()


def test_choices_that_a_row_lacks_have_no_gradient() -> None:
    logits = torch.tensor([[1.0, 0.5, -torch.inf], [0.2, 0.1, 0.3]], requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([1, 2]), gamma=2.0)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert gradient[0, 2] == 0


class TestTokens:
    TASK = TokenClassification.of(labels=LABELS, class_weights="balanced")

    @pytest.mark.parametrize("labelling", ["first", "continuation", "all"])
    def test_balanced_weights_are_those_of_sklearn(self, labelling: Any) -> None:
        """They count words in the scheme of the labels; a row with a tag that no label has is not trained."""
        task = self.TASK.with_settings(labelling=labelling)
        rows: list[dict[str, Any]] = [
            {"words": ["Ada", "Byron", "met", "no", "one"], "tags": ["I-PER", "I-PER", "O", "O", "O"]},
            {"words": ["Rome"], "tags": ["I-LOC"]},
            {"words": ["x"], "tags": None},
            {"words": ["he", "Bo"], "tags": ["O", "I-PER"]},
        ]
        tags = ["B-PER", "I-PER", "O", "O", "O", "O", "B-PER"]
        fitted = task.fit_rows(rows)
        expected = compute_class_weight("balanced", classes=np.array(LABELS), y=np.array(tags))
        weights = fitted.output.balanced_weights
        assert weights == pytest.approx(tuple(expected))
        assert label_weights(fitted.output.class_weights, weights) == weights
        assert fitted.fitted_values()["balanced_weights"] == weights
        assert fitted.output.scheme == "IOB1"

    @pytest.mark.parametrize(
        ("options", "weights"),
        [
            ({"labels": ("I-PER", "O", "B-PER")}, (3.0, 1.0, 2.0)),
            ({"labels": ("O", "B-LOC", "I-LOC")}, ()),
            ({"class_weights": (1.0, 1.0, 1.0)}, None),
            ({"max_length": 64}, (1.0, 2.0, 3.0)),
        ],
    )
    def test_weights_follow_their_labels(self, options: dict[str, Any], weights: tuple[float, ...] | None) -> None:
        stored = {"labels": LABELS, "class_weights": "balanced", "balanced_weights": (1.0, 2.0, 3.0), "max_length": 48}
        compatible = TokenClassification.compatible_settings(stored, options)
        assert compatible.get("balanced_weights") == weights

    def test_words_without_a_label_have_no_weight(self) -> None:
        task = self.TASK.with_settings(class_weights=WEIGHTS, focal_gamma=2.0)
        ids = [[5] * 4, [5] * 5]
        batch = pack(ids, ids, position_offset=0, labels=[[], [1, 2, 0]], gather_positions=[range(1, 3), range(1, 4)])
        logits = normal(5, 3)
        (term,) = task.output.loss(logits, batch)
        alone = cross_entropy(logits[2:], torch.tensor([1, 2, 0]), weights=torch.tensor(WEIGHTS).double(), gamma=2.0)
        assert (term.total, term.count) == (alone, sum(WEIGHTS))
