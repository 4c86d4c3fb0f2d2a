"""Linear probes: the written layer is scikit-learn's, all else of the model and of the run is as in other runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import LeaveOneOut, StratifiedKFold, cross_val_score
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from bert_tasks import TaskModel, evaluate, fit
from bert_tasks.data.reading import read
from bert_tasks.errors import DataError, RecipeError, UsageError
from bert_tasks.model.features import training_samples
from bert_tasks.recipe.schema import load_recipe
from bert_tasks.training.objectives import Supervised
from bert_tasks.training.probe import freeze_below_output, head_inputs
from support.recipes import MINIMAL, write
from support.small_checkpoints import save_checkpoint
from support.task_examples import EXAMPLES
from support.training_runs import distance, load_model, make_rows, weights_of

STRENGTHS = (0.01, 0.1, 1.0, 10.0, 100.0)
SEED = 5
ROWS = make_rows(30)
TEXTS = [row["text"] for row in ROWS]
NAMES = ("high", "low", "mid")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory, wordpiece_tokenizer: PreTrainedTokenizerBase) -> Path:
    """A BERT whose pooler is in the file, as published ones have it."""
    folder = tmp_path_factory.mktemp("probe") / "bert"
    save_checkpoint(folder, "bert", wordpiece_tokenizer, head="sequence", labels=NAMES, wide=True)
    return folder


def probed(checkpoint: Path, folder: Path, rows: Sequence[dict[str, Any]], **settings: Any) -> TaskModel:
    model: TaskModel = TaskModel.from_pretrained(checkpoint, task="sequence-classification", max_length=40, **settings)
    fit(model, rows, rows, output_dir=folder, seed=SEED, progress=False, linear_probe=True)
    return model


def pooled(model: TaskModel, folder: Path, texts: Sequence[str]) -> np.ndarray:
    """What transformers' pooler returns for each text."""
    model.save_pretrained(folder)
    theirs, vectors = AutoModelForSequenceClassification.from_pretrained(folder).eval().double().bert, []
    for text in texts:
        with torch.no_grad():
            vectors.append(theirs(**model.require_tokenizer()([text], return_tensors="pt")).pooler_output[0].numpy())
    return np.stack(vectors)


def logistic(vectors: np.ndarray, classes: Sequence[int], weights: Any = None) -> np.ndarray:
    """The decision function of scikit-learn with the best C, by its definition."""
    folds = StratifiedKFold(min(5, np.bincount(classes).min()), shuffle=True, random_state=SEED)
    losses = {}
    for strength in STRENGTHS:
        model = LogisticRegression(C=strength, class_weight=weights, max_iter=10_000)
        losses[strength] = -cross_val_score(model, vectors, classes, scoring="neg_log_loss", cv=folds).mean()
    best = LogisticRegression(C=min(losses, key=losses.__getitem__), class_weight=weights, max_iter=10_000)
    return best.fit(vectors, classes).decision_function(vectors)


def logits_of(model: TaskModel, texts: Sequence[str]) -> np.ndarray:
    return np.array([prediction.logits for prediction in model.predict(list(texts), logits=True)])


def labelled(values: Sequence[Any], column: str = "label") -> list[dict[str, Any]]:
    return [{"text": text, column: value} for text, value in zip(TEXTS, values, strict=True)]


@pytest.mark.parametrize("class_weights", [None, "balanced"])
def test_two_classes_have_the_decision_function_of_scikit_learn(
    bert: Path, tmp_path: Path, class_weights: str | None
) -> None:
    model = probed(bert, tmp_path / "run", ROWS, labels=["negative", "positive"], class_weights=class_weights)
    classes = [int(row["label"] == "positive") for row in ROWS]
    logits, expected = logits_of(model, TEXTS), logistic(pooled(model, tmp_path / "m", TEXTS), classes, class_weights)
    assert logits[:, 1] - logits[:, 0] == pytest.approx(expected, abs=1e-3)
    assert logits.sum(axis=1) == pytest.approx(0, abs=1e-5)  # the softmax is that of scikit-learn, too
    assert np.ptp(expected) > 1


def test_three_classes_have_the_decision_functions_of_scikit_learn(bert: Path, tmp_path: Path) -> None:
    classes = [len(text) % 3 for text in TEXTS]
    model = probed(bert, tmp_path / "run", labelled([NAMES[number] for number in classes]), labels=NAMES)
    expected = logistic(pooled(model, tmp_path / "m", TEXTS), classes)
    assert logits_of(model, TEXTS) == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
def test_each_label_of_a_set_has_its_own_decision_function(bert: Path, tmp_path: Path) -> None:
    flags = np.array([["a" in text.split() or "the" in text, "ferry" in text, "old" in text] for text in TEXTS], int)
    rows = labelled([[NAMES[i] for i in np.flatnonzero(row)] for row in flags], "labels")
    settings = {"problem_type": "multi_label_classification", "class_weights": [1.0, 3.0, 0.5]}
    model = probed(bert, tmp_path / "run", rows, labels=NAMES, **settings)
    vectors, logits = pooled(model, tmp_path / "m", TEXTS), logits_of(model, TEXTS)
    for index, weight in enumerate(settings["class_weights"]):
        expected = logistic(vectors, flags[:, index], {0: 1.0, 1: weight})
        assert logits[:, index] == pytest.approx(expected, abs=1e-3)
    assert len(model.task.output.thresholds) == 3  # tuned on the validation rows, as in other runs


@pytest.mark.slow
def test_numbers_have_the_ridge_regression_of_scikit_learn(bert: Path, tmp_path: Path) -> None:
    numbers = [float(len(text)) for text in TEXTS]
    model = probed(bert, tmp_path / "run", labelled(numbers), problem_type="regression")
    vectors, errors = pooled(model, tmp_path / "m", TEXTS), {}
    for strength in STRENGTHS:
        ridge = Ridge(alpha=1 / strength)
        scores = cross_val_score(ridge, vectors, numbers, scoring="neg_mean_squared_error", cv=LeaveOneOut())
        errors[strength] = -scores.mean()
    best = Ridge(alpha=1 / min(errors, key=errors.__getitem__)).fit(vectors, numbers)
    assert logits_of(model, TEXTS)[:, 0] == pytest.approx(best.predict(vectors), abs=1e-2)


def test_the_run_and_its_model_are_ordinary_ones_of_one_step(bert: Path, tmp_path: Path) -> None:
    before = weights_of(TaskModel.from_pretrained(bert))
    model: TaskModel = TaskModel.from_pretrained(bert, task="sequence-classification", labels=["negative", "positive"])
    settings: dict[str, Any] = {"linear_probe": True, "batch_size": 4, "epochs": 7, "progress": False}
    result = fit(model, ROWS, ROWS, output_dir=tmp_path / "run", **settings)
    saved = TaskModel.from_pretrained(tmp_path / "run")
    assert distance(weights_of(saved), weights_of(model)) == 0
    changed = {name for name, value in weights_of(saved).items() if not torch.equal(value, before.get(name, value[:0]))}
    assert changed == {"head.output.weight", "head.output.bias"}
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    metrics = evaluate(saved, ROWS)
    assert {name: metrics[name] for name in result.metrics} == result.metrics
    record = json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))
    assert (record["steps"], result.steps, result.best_step) == (1, 1, 1)
    assert record["trained_parameters"] == 2 * model.config.hidden_size + 2
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model").eval()
    with torch.no_grad():
        logits = theirs(**model.require_tokenizer()(TEXTS, padding=True, return_tensors="pt")).logits.numpy()
    assert logits_of(saved, TEXTS) == pytest.approx(logits, abs=1e-5)
    again: TaskModel = TaskModel.from_pretrained(bert, task="sequence-classification", labels=["negative", "positive"])
    assert fit(again, ROWS, ROWS, output_dir=tmp_path / "run", **settings).reused
    fit(again, ROWS, ROWS, output_dir=tmp_path / "again", **settings)
    assert distance(weights_of(again), weights_of(model)) == 0


@pytest.mark.parametrize("settings", [{}, {"pooling": "mean"}, {"pooling": "max", "long_texts": "windows"}], ids=str)
def test_the_last_layer_reads_the_head_inputs(bert: Path, settings: dict[str, Any]) -> None:
    options = {"max_length": 12, "doc_stride": 2, **settings}
    model: TaskModel = TaskModel.from_pretrained(bert, task="sequence-classification", labels=NAMES, **options)
    expected = _applied(model, TEXTS)
    assert logits_of(model, TEXTS) == pytest.approx(expected, abs=1e-4)


def test_a_head_that_pools_logits_reads_a_mean_over_tokens(
    tmp_path: Path, by_kind: dict[str, PreTrainedTokenizerBase]
) -> None:
    save_checkpoint(tmp_path, "eurobert", by_kind["llama"], head="sequence", wide=True)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "classifier_pooling": "late"}), "utf-8")
    model: TaskModel = TaskModel.from_pretrained(tmp_path, task="sequence-classification", labels=NAMES)
    assert model.head.pools_logits
    assert logits_of(model, TEXTS) == pytest.approx(_applied(model, TEXTS), abs=1e-4)


def _applied(model: TaskModel, texts: Sequence[str]) -> np.ndarray:
    """The last layer on its inputs."""
    table = read(labelled([NAMES[0]] * len(texts)), model.task.columns)
    inputs = head_inputs(model, training_samples(table, model))
    layer = model.head.output
    return inputs @ layer.weight.detach().double().numpy().T + layer.bias.detach().double().numpy()


def test_a_label_with_one_row_leaves_no_folds_and_one_without_rows_is_an_error(bert: Path, tmp_path: Path) -> None:
    rows = [{"text": text, "label": NAMES[min(number, 2)]} for number, text in enumerate(TEXTS)]
    model = probed(bert, tmp_path / "run", rows, labels=NAMES)
    vectors = pooled(model, tmp_path / "m", TEXTS)
    best = LogisticRegression(max_iter=10_000).fit(vectors, [min(number, 2) for number in range(len(TEXTS))])
    assert logits_of(model, TEXTS) == pytest.approx(best.decision_function(vectors), abs=1e-3)
    with pytest.raises(DataError, match="no training row has the label 'none'"):
        probed(bert, tmp_path / "other", rows, labels=[*NAMES, "none"])
    sets = [{"text": text, "labels": ["high"]} for text in TEXTS]
    with pytest.raises(DataError, match="no training row is without the label 'high'"):
        probed(bert, tmp_path / "sets", sets, labels=["high"], problem_type="multi_label_classification")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"focal_gamma": 2.0}, r"Remove settings\.focal_gamma"),
        ({"label_smoothing": 0.1}, r"Remove settings\.label_smoothing"),
        ({}, r'head\.dense\.\w+ is new.*Set settings\.pooling = "mean"'),
        ({"pooling": "attention"}, r"head\.score\.\w+ is new"),
    ],
    ids=str,
)
def test_what_a_probe_cannot_fit_is_refused(
    checkpoint: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        probed(checkpoint, tmp_path, ROWS, labels=["negative", "positive"], **settings)
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize("case", ["token", "span", "choice", "masked"])
def test_other_tasks_are_refused(checkpoint: Path, case: str) -> None:
    with pytest.raises(UsageError, match="Fine-tune this task"):
        freeze_below_output(Supervised(load_model(checkpoint, EXAMPLES[case].task)), SimpleNamespace(num_processes=1))


def test_several_processes_and_adapters_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs one process and one task"):
        freeze_below_output(Supervised(load_model(checkpoint)), SimpleNamespace(num_processes=2))
    with pytest.raises(RecipeError, match=r"lora_rank freezes the whole encoder already\. Remove linear_probe"):
        load_recipe(write(tmp_path, MINIMAL + "[optim]\nlinear_probe = true\nlora_rank = 4\n"))
