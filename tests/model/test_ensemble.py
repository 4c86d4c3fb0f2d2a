"""The mean of several models: equal to a computation by hand over their predictions, and which models it refuses."""

import copy
import math
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bert_tasks import TaskModel, evaluate, fit
from bert_tasks.encoder import crf
from bert_tasks.encoder.packing import PackedBatch
from bert_tasks.errors import CheckpointError, UsageError
from bert_tasks.export import export
from bert_tasks.inference.output import model_fingerprint
from bert_tasks.model import precision
from bert_tasks.model.ensemble import EnsembleModel
from bert_tasks.model.precision import logits_of
from bert_tasks.model.task_model import ForwardFn
from bert_tasks.tasks import MaskedLanguageModeling, SequenceClassification, SpanExtraction, Task
from bert_tasks.tasks.base import Feature, Part
from bert_tasks.tasks.sequence_classification.task import TextFitting
from bert_tasks.tasks.shared.features import collate
from bert_tasks.tasks.shared.outputs import mean_logits
from bert_tasks.training.distillation import check_teacher
from support.task_examples import CLASSES, EXAMPLES, LABELS, QUESTIONS

MODELS = 3


@pytest.fixture(scope="module")
def make(wide_checkpoint: Path) -> Callable[..., list[TaskModel]]:
    """Models of a task that differ in all weights; ``tasks``: one for each model, or one for all."""

    def build(*tasks: Task) -> list[TaskModel]:
        models: list[TaskModel] = []
        for number in range(MODELS):
            task = tasks[number % len(tasks)]
            model = TaskModel.from_pretrained(wide_checkpoint, task=task) if not models else copy.deepcopy(models[0])
            model.task = task
            generator = torch.Generator().manual_seed(number)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.add_(noise, alpha=0.5 if name.startswith("head.") else 0.1)
            models.append(model)
        return models

    return build


def ensemble(models: Sequence[TaskModel]) -> EnsembleModel:
    return EnsembleModel({f"model {number}": model for number, model in enumerate(models, start=1)})


def inputs(name: str) -> list[dict[str, Any]]:
    """The rows of an example without labels, and a long one, where the task reads windows."""
    example = EXAMPLES[name]
    hidden = {column.name for column in example.task.columns if column.is_label}
    rows = [{key: value for key, value in row.items() if key not in hidden} for row in example.rows]
    if name == "windows":
        rows.insert(1, {"text": " ".join(row["text"] for row in rows[:6])})
    return rows


def means(models: Sequence[TaskModel], rows: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """For each row the mean of the scores of every class, label or choice, or of the numbers."""
    averages = []
    for each in zip(*(model.predict(rows) for model in models), strict=True):
        values = [
            list(prediction.scores.values()) if isinstance(prediction.scores, Mapping) else list(prediction.scores)
            for prediction in each
        ]
        values = [numbers if numbers else [prediction.score] for numbers, prediction in zip(values, each, strict=True)]
        averages.append([sum(places) / len(each) for places in zip(*values, strict=True)])
    return averages


@pytest.mark.parametrize("name", ["single", "windows", "pair", "several", "regression", "pair regression", "choice"])
def test_scores_are_the_means_of_those_of_the_models(name: str, make: Callable[..., list[TaskModel]]) -> None:
    models, rows = make(EXAMPLES[name].task), inputs(name)
    expected = means(models, rows)
    for prediction, scores, logits in zip(
        ensemble(models).predict(rows), expected, ensemble(models).predict(rows, logits=True), strict=True
    ):
        shown = list(prediction.scores.values()) if isinstance(prediction.scores, Mapping) else list(prediction.scores)
        assert (shown if shown else [prediction.score]) == pytest.approx(scores, abs=1e-6)
        if shown:
            best = max(range(len(scores)), key=scores.__getitem__)
            assert prediction.score == pytest.approx(scores[best], abs=1e-6)
            assert prediction.label == (best if name == "choice" else EXAMPLES[name].task.labels[best])
            odds = [math.log(score / (1 - score if name == "several" else 1)) for score in scores]
            assert list(logits.logits) == pytest.approx(odds, abs=1e-4)


def test_the_models_differ(make: Callable[..., list[TaskModel]]) -> None:
    """So that a model that is left out, or a mean of logits, would be noticed."""
    models, rows = make(EXAMPLES["single"].task), inputs("single")
    expected = torch.tensor(means(models, rows))
    assert (torch.tensor(means(models[:2], rows)) - expected).abs().max() > 0.05
    logits = [torch.tensor([prediction.logits for prediction in model.predict(rows, logits=True)]) for model in models]
    assert (torch.stack(logits).mean(0).softmax(-1) - expected).abs().max() > 0.02


def test_thresholds_are_means(make: Callable[..., list[TaskModel]]) -> None:
    task, rows = EXAMPLES["several"].task, inputs("several")
    limits = [(0.2, 0.9, 0.1), (0.8, 0.5, 0.1), (0.5, 0.1, 0.1)]
    models = make(*(replace(task, thresholds=thresholds) for thresholds in limits))
    whole = ensemble(models)
    assert whole.task.thresholds == pytest.approx((0.5, 0.5, 0.1))
    label_sets = [prediction.labels for prediction in whole.predict(rows)]
    expected = means(models, rows)
    assert label_sets == [
        tuple(label for label, score, limit in zip("xyz", scores, (0.5, 0.5, 0.1), strict=True) if score >= limit)
        for scores in expected
    ]
    assert len(set(label_sets)) > 1
    with pytest.raises(CheckpointError, match=r"model 2 and model 1 .*, because thresholds is \(\) and \(0\.2, 0\.9"):
        ensemble(make(models[0].task, task))


class FittedFields(TextFitting):
    fields = ("fitted",)


@dataclass(frozen=True, kw_only=True)
class Fitted(SequenceClassification):
    parts: ClassVar[tuple[type[Part], ...]] = (FittedFields, *SequenceClassification.parts)

    fitted: Any = None


def fitted_ensemble(make: Callable[..., list[TaskModel]], values: Sequence[object]) -> EnsembleModel:
    return ensemble(make(*(Fitted(labels=("low", "high"), max_length=24, fitted=value) for value in values)))


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ((1.0, 2.0, 6.0), 3.0),
        (((0.25, 1.0), (0.25, 2.0), (1.0, 0.0)), (0.5, 1.0)),
        (("IOB1", "IOB2", "IOB2"), "IOB1"),
        *((3 * [value], value) for value in (3, True, None, "IOB1", (1, "a"))),
    ],
)
def test_fitted_values_are_means_or_equal(
    make: Callable[..., list[TaskModel]], values: Sequence[object], mean: object
) -> None:
    task = fitted_ensemble(make, values).task
    assert (task.fitted, type(task.fitted)) == (mean, type(mean))


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (1, 2),
        (True, False),
        (None, (0.5,)),
        ((0.5,), None),
        ((0.5,), (0.5, 0.5)),
        ((1,), (2,)),
        (0.5, "a"),
    ],
)
def test_other_fitted_values_that_differ_are_refused(
    make: Callable[..., list[TaskModel]], value: object, other: object
) -> None:
    message = f"model 3 and model 1 do not predict the same, because fitted is {other!r} and {value!r}"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        fitted_ensemble(make, (value, value, other))


def test_tags_have_the_largest_mean_probability(make: Callable[..., list[TaskModel]]) -> None:
    models, rows = make(EXAMPLES["token"].task), inputs("token")
    rows.append({"words": [word for row in rows for word in row["words"]]})  # several windows
    alone = [model.predict(rows, logits=True) for model in models]
    for number, prediction in enumerate(ensemble(models).predict(rows)):
        mean = torch.stack([torch.tensor(predictions[number].logits).softmax(-1) for predictions in alone]).mean(0)
        assert prediction.tags == tuple(LABELS[index] for index in mean.argmax(-1).tolist())
        assert prediction.scores == pytest.approx(mean.amax(-1).tolist(), abs=1e-6)


def member_logits(model: TaskModel, row: Mapping[str, Any]) -> Tensor:
    """The logits of a row that is one window."""
    (feature,) = model.task.features([row], model.require_tokenizer())
    return window_logits(model, feature)


def window_logits(model: TaskModel, feature: Feature) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(collate([feature], position_offset=model.config.position_offset))
    return logits


def test_sequences_of_tags_have_the_best_mean_score(make: Callable[..., list[TaskModel]]) -> None:
    models, rows = make(EXAMPLES["token crf"].task), inputs("token crf")
    for row, prediction in zip(rows, ensemble(models).predict(rows), strict=True):
        scores = torch.stack([member_logits(model, row) for model in models]).double().mean(0)
        ends = [LABELS.index(f"I-{entity_type}") for entity_type in ("THING", "WHO")]
        for end in ends:  # I-X only after B-X and I-X
            others = [number + 1 for number in range(len(LABELS)) if number not in (end, end - 1)]
            scores[:, [0, *others], end] += crf.FORBIDDEN
        best = crf.best_labels(scores, [len(row["words"])])
        assert prediction.tags == tuple(LABELS[index] for index in best.tolist())
        sure = crf.marginals(scores, [len(row["words"])]).gather(1, best[:, None]).squeeze(1)
        assert prediction.scores == pytest.approx(sure.tolist(), abs=1e-5)


def best_span(task: SpanExtraction, feature: Feature, logits: Tensor) -> tuple[float, int, int]:
    """The score of the best span of a window, and its place in the context."""
    offsets = list(zip(*[iter(feature["offsets"] or [])] * 3, strict=True))
    return max(
        ((logits[first, 0] + logits[last, 1]).item(), offsets[first][0], offsets[last][1])
        for first in range(len(logits))
        for last in range(first, min(len(logits), first + task.max_answer_length))
        if offsets[first][2] == 2 and offsets[last][2] > 0
    )


def test_answers_have_the_largest_mean_logits(make: Callable[..., list[TaskModel]]) -> None:
    task = EXAMPLES["span v2"].task
    models = make(*(replace(task, null_threshold=limit) for limit in (-3.0, 1.0, 5.0)))
    whole, rows = ensemble(models), inputs("span v2")
    assert whole.task.null_threshold == pytest.approx(1.0)
    for row, prediction in zip(rows, whole.predict(rows), strict=True):
        (feature,) = task.features([row], whole.require_tokenizer())
        logits = torch.stack([member_logits(model, row) for model in models]).mean(0)  # [T, 2]
        best = best_span(task, feature, logits)
        null = (logits[0, 0] + logits[0, 1]).item()
        assert prediction.best.text == row["context"][best[1] : best[2]]
        assert prediction.best.start_logit + prediction.best.end_logit == pytest.approx(best[0], abs=1e-4)
        assert prediction.null_odds == pytest.approx(null - best[0], abs=1e-4)
        assert (prediction.answer == "") == (null - best[0] > 1.0)


def test_long_contexts_have_several_windows(make: Callable[..., list[TaskModel]]) -> None:
    """The answer is the best span of all windows by the mean logits of each window."""
    task = EXAMPLES["span"].task
    models = make(task)
    whole, context = ensemble(models), " ".join(row["context"] for row in QUESTIONS)
    for question in ("what", "who", "where is the ferry"):
        row = {"question": question, "context": context}
        features = task.features([row], whole.require_tokenizer())
        assert len(features) > 1
        means = [torch.stack([window_logits(model, feature) for model in models]).mean(0) for feature in features]
        score, start, end = max(best_span(task, *window) for window in zip(features, means, strict=True))
        (prediction,) = whole.predict([row])
        assert prediction.answer == context[start:end]
        assert prediction.best.start_logit + prediction.best.end_logit == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize("name", ["single", "windows", "token crf", "choice"])
def test_evaluation_is_that_of_the_predictions(name: str, make: Callable[..., list[TaskModel]]) -> None:
    example = EXAMPLES[name]
    whole = ensemble(make(example.task))
    metrics = evaluate(whole, list(example.rows))
    loss = metrics.pop("loss")
    assert metrics == pytest.approx(whole.task.metrics(whole.predict(example.rows), example.rows), abs=1e-6)
    if name == "single":
        probabilities = [
            prediction.scores[row["label"]] for prediction, row in zip(whole.predict(CLASSES), CLASSES, strict=True)
        ]
        assert loss == pytest.approx(-sum(map(math.log, probabilities)) / len(CLASSES), abs=1e-5)


def test_the_batches_do_not_matter(make: Callable[..., list[TaskModel]]) -> None:
    """Choices and windows of one row are run together or not, so that memory does not depend on their number."""
    for name in ("choice", "windows", "token crf"):
        whole, rows = ensemble(make(EXAMPLES[name].task)), inputs(name)
        features = whole.task.features(rows, whole.require_tokenizer())
        sizes: list[int] = []

        def run(batch: PackedBatch, whole: EnsembleModel = whole, sizes: list[int] = sizes) -> Any:
            sizes.append(len(batch.input_ids))
            return whole.packed_logits(batch)

        outputs = {most: whole.forward_windows(features, max_tokens=most, forward_fn=run) for most in (10**6, 50, 1)}
        tokens = [len(feature["input_ids"]) for feature in features]
        assert max(tokens) < 50 < sum(tokens)
        assert sizes[0] == sum(tokens)
        assert max(sizes[1 : -len(features)]) <= 50
        assert sorted(sizes[-len(features) :]) == sorted(tokens)
        for output, other in pairwise(map(torch.cat, outputs.values())):
            assert torch.allclose(output, other, atol=1e-5)


def test_no_features_have_no_logits(make: Callable[..., list[TaskModel]]) -> None:
    assert ensemble(make(EXAMPLES["windows"].task)).forward_windows([]) == []


def test_the_matrices_of_one_crf_are_in_memory_at_a_time(make: Callable[..., list[TaskModel]]) -> None:
    """They are large: the tokens of a batch are chosen by their size."""
    models = make(EXAMPLES["token crf"].task)
    whole = ensemble(models)
    features = whole.task.features(inputs("token crf"), whole.require_tokenizer())
    batch = collate(features, position_offset=whole.config.position_offset)
    others: list[weakref.ref[Tensor]] = []

    def run_of(model: TaskModel) -> ForwardFn:
        def run(batch: PackedBatch) -> Tensor:
            assert [other() for other in others] == [None] * len(others)
            logits = model.packed_logits(batch)
            others.append(weakref.ref(logits))
            return logits

        return run

    with torch.no_grad():
        mean = whole.joined([run_of(model) for model in models])(batch)
        expected = torch.stack([model.packed_logits(batch) for model in models]).mean(0)
    assert len(others) == MODELS
    torch.testing.assert_close(mean, expected)


def test_other_precisions_are_those_of_the_models(make: Callable[..., list[TaskModel]]) -> None:
    models, rows = make(EXAMPLES["single"].task), inputs("single")
    predictions = list(ensemble(models).predict_rows(rows, forward_fn=logits_of(ensemble(models), "bf16")))
    alone = [list(model.predict_rows(rows, forward_fn=logits_of(model, "bf16"))) for model in models]
    for prediction, *each in zip(predictions, *alone, strict=True):
        mean = [sum(other.scores[label] for other in each) / MODELS for label in prediction.scores]
        assert list(prediction.scores.values()) == pytest.approx(mean, abs=1e-5)


def test_a_slow_precision_is_reported_once(
    make: Callable[..., list[TaskModel]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(precision, "slow_bfloat16", lambda: "bf16 is slower")
    logits_of(ensemble(make(EXAMPLES["single"].task)), "bf16")
    assert [record.message for record in caplog.records] == ["bf16 is slower"]


def test_every_weight_counts_for_an_output_that_is_resumed(make: Callable[..., list[TaskModel]]) -> None:
    models = make(EXAMPLES["single"].task)
    before = model_fingerprint(ensemble(models))
    with torch.no_grad():
        models[-1].head.output.bias[0] += 1e-3
    assert model_fingerprint(ensemble(models)) != before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": ("mid", "low", "high")}, "their labels are mid, low, high and low, mid, high"),
        ({"max_length": 20}, "max_length is 20 and 24"),
    ],
)
def test_other_settings_are_refused(
    make: Callable[..., list[TaskModel]], changes: dict[str, Any], message: str
) -> None:
    task = EXAMPLES["single"].task
    with pytest.raises(CheckpointError, match=f"^model 2 and model 1 do not predict the same, because {message}$"):
        ensemble(make(task, replace(task, **changes)))


def test_other_models_are_refused(
    make: Callable[..., list[TaskModel]], wordpiece_tokenizer: PreTrainedTokenizerBase
) -> None:
    task = EXAMPLES["single"].task
    first, other, third = make(task)
    tagger = make(EXAMPLES["token"].task)[0]
    with pytest.raises(CheckpointError, match="their tasks are token-classification and sequence-classification"):
        ensemble([first, tagger])
    other.tokenizer = wordpiece_tokenizer
    with pytest.raises(CheckpointError, match=r"model 3 and model 1 .*because their tokenizers give different tokens"):
        ensemble([first, third, other])
    small = first.with_layers([0])
    with pytest.raises(CheckpointError, match="the configurations of their encoders differ"):
        ensemble([first, small])


def test_a_task_without_a_mean_says_so(make: Callable[..., list[TaskModel]]) -> None:
    model = make(EXAMPLES["single"].task)[0]
    features = model.task.features([{"text": "a cold day"}], model.require_tokenizer())
    batch = collate(features, position_offset=model.config.position_offset)
    with pytest.raises(UsageError, match="masked-language-modeling has no mean of the predictions of several models"):
        mean_logits(MaskedLanguageModeling(max_length=24), model.head, [], batch.windows)


def test_what_needs_weights_is_refused(make: Callable[..., list[TaskModel]], tmp_path: Path) -> None:
    models = make(EXAMPLES["single"].task)
    whole = ensemble(models)
    refused: list[Callable[[], object]] = [
        lambda: whole.save_pretrained(tmp_path / "x"),
        lambda: whole.restore(tmp_path),
        lambda: whole.train(),
        lambda: whole.with_layers([0]),
        lambda: whole(torch.zeros(1, 3, dtype=torch.long)),
        lambda: whole.predict(CLASSES[:1], explain=True),
        lambda: fit(whole, train=list(CLASSES), validation=list(CLASSES), output_dir=tmp_path / "run"),
        lambda: export(whole, to="onnx", output=tmp_path / "exported"),
        lambda: check_teacher(whole, models[0]),
    ]
    for call in refused:
        with pytest.raises(UsageError, match=r"an ensemble of folds has no weights of its own\. Use the model of one"):
            call()
