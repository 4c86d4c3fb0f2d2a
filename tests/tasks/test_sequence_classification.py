"""Sequence classification: loss, decoding, thresholds and settings, against independent sources.

Shape legend: S samples, L labels.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor, nn
from transformers import BertConfig
from transformers.loss.loss_utils import ForSequenceClassificationLoss

from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import DataError, UsageError
from bert_tasks.outputs.classes import Classes, ClassPrediction
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.label_set import LabelSet, LabelSetPrediction
from bert_tasks.outputs.number import Number, NumberPrediction
from bert_tasks.tasks.features import collate
from bert_tasks.tasks.sequence_classification import SequenceClassification

LABELS = ("negative", "neutral", "positive")
NO_TOKENIZER: Any = None  # these outputs do not read it
SINGLE = SequenceClassification.of(labels=LABELS)
SEVERAL = SequenceClassification.of(labels=LABELS, problem_type="multi_label_classification")
NUMBER = SequenceClassification.of(problem_type="regression")


def batch_of(targets: Sequence[Sequence[float] | None], windows: Sequence[int] | None = None) -> PackedBatch:
    """A batch whose samples have these targets (None: unlabelled) and numbers of windows."""
    counts = [1] * len(targets) if windows is None else windows
    features = [
        Feature(
            row=row,
            input_ids=[2, 3],
            token_type_ids=[0, 0],
            labels=None if window or target is None else list(target),
        )
        for row, (target, count) in enumerate(zip(targets, counts, strict=True))
        for window in range(count)
    ]
    return collate(features, position_offset=0)


def logits_of(samples: int, outputs: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(samples, outputs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mean_loss(task: SequenceClassification, logits: Tensor, targets: Sequence[Sequence[float] | None]) -> float:
    (loss,) = task.output.loss(logits, batch_of(targets))
    return float(loss.total / loss.count)


class TestLoss:
    CLASSES = ([2.0], [0.0], [1.0], [2.0], [2.0])
    SETS = ([1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0])

    @pytest.mark.parametrize(
        ("task", "targets", "outputs"),
        [(SINGLE, CLASSES, 3), (SEVERAL, SETS, 3), (NUMBER, ([0.5], [-2.0], [3.25]), 1)],
        ids=["single", "several", "regression"],
    )
    def test_is_that_of_transformers(
        self, task: SequenceClassification, targets: Sequence[Sequence[float]], outputs: int
    ) -> None:
        logits = logits_of(len(targets), outputs)
        config = BertConfig(num_labels=outputs, problem_type=task.output.problem_type)
        labels = torch.tensor(targets, dtype=torch.float64)
        if task is SINGLE:
            labels = labels.squeeze(-1).long()
        theirs = ForSequenceClassificationLoss(labels, logits, config)
        assert mean_loss(task, logits, targets) == pytest.approx(float(theirs), rel=1e-12)

    @pytest.mark.parametrize("weights", [None, (0.5, 2.0, 1.25)])
    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    def test_weights_and_smoothing_are_those_of_torch(
        self, weights: tuple[float, ...] | None, smoothing: float
    ) -> None:
        task = SequenceClassification.of(labels=LABELS, class_weights=weights, label_smoothing=smoothing)
        logits = logits_of(5, 3)
        weight = None if weights is None else torch.tensor(weights, dtype=torch.float64)
        theirs = nn.CrossEntropyLoss(weight, label_smoothing=smoothing)(logits, torch.tensor([2, 0, 1, 2, 2]))
        assert mean_loss(task, logits, self.CLASSES) == pytest.approx(float(theirs), rel=1e-12)
        expected = 5 if weights is None else 3 * 1.25 + 0.5 + 2.0
        assert float(task.output.loss(logits, batch_of(self.CLASSES))[0].count) == pytest.approx(expected)

    @pytest.mark.parametrize("task", [SINGLE, SEVERAL, NUMBER], ids=["single", "several", "regression"])
    def test_an_own_loss_gets_the_labels_as_torch_wants_them(self, task: SequenceClassification) -> None:
        seen = []

        def record(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
            seen.append((logits.shape, labels.shape, labels.dtype, weights))
            return logits.sum()

        class OwnClasses(Classes):
            def summed_loss(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
                return record(logits, labels, weights)

        class OwnSet(LabelSet):
            def summed_loss(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
                return record(logits, labels, weights)

        class OwnNumber(Number):
            def summed_loss(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
                return record(logits, labels, weights)

        class Own(SequenceClassification):
            outputs = (OwnClasses, OwnSet, OwnNumber)

        custom = Own.of(labels=task.output.labels, problem_type=task.output.problem_type)
        targets = self.SETS[:3] if task is SEVERAL else [[1.0], None, [2.0]]
        logits = logits_of(3, 1 if task is NUMBER else 3)
        (term,) = custom.output.loss(logits, batch_of(targets))
        size = {SINGLE: ((2, 3), (2,), torch.int64), SEVERAL: ((3, 3), (3, 3), torch.float64)}
        assert seen == [(*size.get(task, ((2,), (2,), torch.float64)), None)]
        kept = logits if task is SEVERAL else logits[[0, 2]]
        assert float(term.total) == pytest.approx(float(kept.sum()))
        assert float(term.count) == (9 if task is SEVERAL else 2)

    def test_balanced_weights_need_the_training_rows(self) -> None:
        task = SequenceClassification.of(labels=LABELS, class_weights="balanced")
        with pytest.raises(UsageError, match=r"Call task\.fit_rows\(rows\)"):
            task.output.loss(logits_of(1, 3), batch_of([[1.0]]))


class TestDecode:
    def test_probabilities_of_one_label(self) -> None:
        logits = logits_of(2, 3).float()
        features = [Feature(row=row, input_ids=[], token_type_ids=[]) for row in range(2)]
        predictions = SINGLE.output.decode(list(logits), features, [{}, {}], NO_TOKENIZER)
        for prediction, row in zip(predictions, torch.softmax(logits, -1).tolist(), strict=True):
            assert list(prediction.scores.items()) == list(zip(LABELS, row, strict=True))
            assert prediction.score == max(row)
            assert prediction.label == LABELS[row.index(max(row))]
            assert prediction.to_json() == {
                "label": prediction.label,
                "score": prediction.score,
                "scores": dict(prediction.scores),
            }

    def test_windows_are_averaged(self) -> None:
        logits = logits_of(4, 3).float()
        features = [Feature(row=row, input_ids=[], token_type_ids=[]) for row in (0, 0, 0, 1)]
        first, second = SINGLE.output.decode(list(logits), features, [{}, {}], NO_TOKENIZER)
        assert list(first.scores.values()) == pytest.approx(torch.softmax(logits[:3].mean(0), -1).tolist(), rel=1e-6)
        assert list(second.scores.values()) == pytest.approx(torch.softmax(logits[3], -1).tolist(), rel=1e-6)

    def test_several_labels_have_thresholds(self) -> None:
        logits = torch.logit(torch.tensor([[0.2, 0.6, 0.45], [0.1, 0.2, 0.3]]))
        features = [Feature(row=row, input_ids=[], token_type_ids=[]) for row in range(2)]

        def labels_at(thresholds: tuple[float, ...]) -> list[tuple[str, ...] | None]:
            task = SequenceClassification.of(
                labels=LABELS, problem_type="multi_label_classification", thresholds=thresholds
            )
            return [
                prediction.labels for prediction in task.output.decode(list(logits), features, [{}, {}], NO_TOKENIZER)
            ]

        assert labels_at(()) == [("neutral",), ()]
        assert labels_at((0.15, 0.7, 0.4)) == [("negative", "positive"), ()]
        assert labels_at((0.05, 0.9, 0.25)) == [("negative", "positive"), ("negative", "positive")]
        (first, _) = SEVERAL.output.decode(list(logits), features, [{}, {}], NO_TOKENIZER)
        assert first.label == "neutral"
        assert first.score == pytest.approx(0.6)
        assert first.to_json()["labels"] == ["neutral"]


def answered(label: str) -> ClassPrediction:
    return ClassPrediction(label=label, score=1.0, scores={name: float(name == label) for name in LABELS})


def several(*scores: float) -> LabelSetPrediction:
    named = dict(zip(LABELS, scores, strict=True))
    labels = tuple(name for name, score in named.items() if score >= 0.5)
    return LabelSetPrediction(label=max(named, key=named.__getitem__), score=max(scores), scores=named, labels=labels)


class TestFitting:
    @pytest.mark.parametrize("counts", [(5, 2, 1), (1, 1, 1), (40, 3, 9)])
    def test_balanced_weights_are_those_of_sklearn(self, counts: tuple[int, ...]) -> None:
        values = [label for label, count in zip(LABELS, counts, strict=True) for _ in range(count)]
        task = SequenceClassification.of(labels=LABELS[::-1], class_weights="balanced")
        fitted = task.fit_rows([{"text": "", "label": value} for value in values] + [{"text": ""}])
        expected = compute_class_weight("balanced", classes=np.array(LABELS[::-1]), y=np.array(values))
        assert fitted.output.balanced_weights == pytest.approx(tuple(expected))
        assert fitted.output.class_weights == "balanced"
        others = [{"label": label} for label in (*LABELS, LABELS[0])]
        assert fitted.fit_rows(others) == task.fit_rows(others) != fitted

    def test_balanced_weights_of_several_labels(self) -> None:
        rows: list[dict[str, Any]] = [
            {"labels": ["negative", "neutral"]},
            {"labels": ["negative"]},
            {"labels": []},
            {"labels": ["positive"]},
        ]
        task = SequenceClassification.of(
            labels=LABELS, problem_type="multi_label_classification", class_weights="balanced"
        )
        assert task.fit_rows(rows).output.balanced_weights == (1.0, 3.0, 3.0)

    @pytest.mark.parametrize(
        ("problem_type", "values", "message"),
        [
            (
                None,
                ["negative", "neutral"],
                "no training row has the label 'positive', so its weight would be infinite",
            ),
            (None, [], "no training row has the label 'negative', so its weight would be infinite"),
            (
                SEVERAL.output.problem_type,
                [["negative"], ["negative", "neutral"], None],
                "every training row has the label 'negative', so its weight would be 0. Add rows without it, remove "
                "the label, or set class_weights to one number per label",
            ),
            (
                SEVERAL.output.problem_type,
                [["neutral"], ["neutral", "positive"], []],
                "no training row has the label 'negative', so its weight would be infinite. Add rows with it, remove ",
            ),
        ],
    )
    def test_a_label_without_a_balanced_weight_is_named(
        self, problem_type: Any, values: list[Any], message: str
    ) -> None:
        """Of one label in each row the weight cannot be 0."""
        column, settings = ("label", {}) if problem_type is None else ("labels", {"problem_type": problem_type})
        task = SequenceClassification.of(labels=LABELS, class_weights="balanced", **settings)
        with pytest.raises(DataError, match=re.escape(message)):
            task.fit_rows([{column: value} for value in values])
        assert SINGLE.output.fit_rows([{"label": "negative"}]) is SINGLE.output

    def test_thresholds_raise_f1_on_the_rows_they_are_chosen_on(self) -> None:
        predictions = [several(0.4, 0.9, 0.1), several(0.35, 0.8, 0.2), several(0.2, 0.7, 0.1), several(0.1, 0.2, 0.3)]
        rows: list[dict[str, Any]] = [{"labels": ["negative"]}, {"labels": ["negative", "neutral"]}]
        rows += [{"labels": []}, {"labels": ["positive"]}]
        fitted = SEVERAL.output.tune(predictions, rows)
        low, middle, high = fitted.thresholds
        assert 0.2 < low <= 0.35
        assert 0.1 < high <= 0.3
        assert 0 < middle < 0.9
        assert SEVERAL.output.tune(predictions, [{}, {}, {}, {}]) == SEVERAL.output
        assert SINGLE.output.tune([answered("neutral")], [{"label": "neutral"}]) == SINGLE.output

    def test_metrics_map_labels_by_name_and_skip_unlabelled_rows(self) -> None:
        predictions = [answered("positive"), answered("neutral"), answered("negative"), answered("positive")]
        rows: list[dict[str, Any]] = [{"label": "positive"}, {"label": "negative"}, {}, {"label": None}]
        for task in (SINGLE, SequenceClassification.of(labels=LABELS[::-1])):
            metrics = task.output.metrics(predictions, rows)
            assert metrics["accuracy"] == 0.5
            assert metrics["f1_positive"] == 1.0
            assert metrics["f1_negative"] == 0.0


def test_predictions_that_stay_the_same() -> None:
    def number(score: float) -> NumberPrediction:
        return NumberPrediction(score=score)

    def label(name: str) -> ClassPrediction:
        return ClassPrediction(label=name, score=1.0, scores={})

    def label_set(name: str, *labels: str) -> LabelSetPrediction:
        return LabelSetPrediction(label=name, score=1.0, scores={}, labels=labels)

    numbers = SequenceClassification.of(problem_type="regression")
    exact = [number(score) for score in (0.0, 1.0, 2.0)]
    assert numbers.output.agreements(exact, [number(score) for score in (0.05, 1.2, 2.0)]) == [True, False, True]
    with pytest.raises(DataError, match="the same number for all 2 rows, 1"):
        numbers.output.agreements(exact[1:2] * 2, exact[:2])
    single = SequenceClassification.of(labels=("a", "b"))
    assert single.output.agreements([label("a"), label("a")], [label("a"), label("b")]) == [True, False]
    several = SequenceClassification.of(labels=("a", "b"), problem_type="multi_label_classification")
    assert several.output.agreements([label_set("a", "a", "b")], [label_set("a", "a")]) == [False]
