"""What every task promises, on every family. A task's test file subclasses ``TaskContract`` and gives its examples."""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    pipeline,
)

from bert_tasks.data.arrow import ArrowRows
from bert_tasks.data.columns import Row
from bert_tasks.data.options import ReadOptions
from bert_tasks.encoder.heads import VocabularyOutput
from bert_tasks.errors import UsageError
from bert_tasks.families import FAMILIES as DATA
from bert_tasks.inference import evaluate
from bert_tasks.inference.evaluation import EVALUATION_SEED, content_hash
from bert_tasks.model.inputs import load_trained
from bert_tasks.model.pretrained import CheckpointFolder, stated_task
from bert_tasks.model.task_model import TaskModel
from bert_tasks.outputs.features import Feature
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.tasks import TASKS, Task, task_names
from bert_tasks.tasks.base import FeatureKeys
from bert_tasks.tasks.features import collate
from bert_tasks.training.distillation import Distillation
from support.hf_models import FAMILIES, WITHOUT_TYPES, with_families
from support.meta_device import META, on_meta_device
from support.training_runs import batches, make_steps

ENOUGH_STEPS = 200
DEFAULT_LABEL = re.compile(r"LABEL_\d+")  # what transformers calls a class that nobody named
STOCK = {
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
    "span": AutoModelForQuestionAnswering,
    "masked-lm": AutoModelForMaskedLM,
    "replaced-token": AutoModelForPreTraining,
    "choice": AutoModelForMultipleChoice,
}


@dataclass(frozen=True, kw_only=True)
class Example:
    """A task, eight labelled rows that a small model can learn, and the column whose text or words tests may change.

    A short first row is read as ``sequences`` windows.
    """

    task: Task
    rows: tuple[Row, ...]
    column: str
    windows: bool = False
    sequences: int = 1


def changed(example: Example, text: str) -> Row:
    words = isinstance(example.rows[0][example.column], list)
    return {**unlabelled(example)[0], example.column: text.split() if words else text}


def unlabelled(example: Example) -> list[Row]:
    targets = {column.name for column in example.task.columns if column.is_label}
    return [{name: value for name, value in row.items() if name not in targets} for row in example.rows]


def make_features(model: TaskModel, rows: Sequence[Row]) -> list[Feature]:
    assert model.tokenizer is not None
    return model.task.features(rows, model.tokenizer)


def trained(model: TaskModel, rows: Sequence[Row]) -> list[Feature]:
    """The features as training and evaluation see them."""
    features = make_features(model, rows)
    hashes = [content_hash(feature["input_ids"]) for feature in features]
    keys = FeatureKeys(seed=EVALUATION_SEED, epoch=0, numbers=hashes, is_evaluation=True)
    return list(model.task.prepare(features, keys, features, model.require_tokenizer()))


def skip_without_loss(model: TaskModel) -> None:
    """Skips tests of the loss where a generator makes the inputs: its objective has tests of its own."""
    if model.task.generator() is not None:
        pytest.skip("the loss needs a generator")


def numbers(predictions: Sequence[Prediction]) -> list[float]:
    """Every number in the predictions, in one order."""

    def walk(value: Any) -> list[float]:
        if isinstance(value, dict):
            return [number for item in value.values() for number in walk(item)]
        if isinstance(value, list):
            return [number for item in value for number in walk(item)]
        return [value] if isinstance(value, float) else []

    return [number for prediction in predictions for number in walk(prediction.to_json())]


def same(left: Sequence[Prediction], right: Sequence[Prediction]) -> bool:
    return len(left) == len(right) and numbers(left) == pytest.approx(numbers(right), abs=2e-6)


def padded_logits(model: TaskModel, features: Sequence[Feature]) -> list[Tensor]:
    """What the HF-shaped call gives for each feature alone."""
    ids = [torch.tensor([feature["input_ids"]]) for feature in features]
    segments = [torch.tensor([feature["token_type_ids"]]) for feature in features]
    with torch.no_grad():
        return [model(i, token_type_ids=s)[0] for i, s in zip(ids, segments, strict=True)]


def families_with_head(example: Example) -> list[str]:
    """The families whose models have the head of the example's task."""
    head = example.task.head_kind
    return [family for family in FAMILIES if head is None or head in DATA[family].heads]


class TaskContract:
    """The suite; ``examples`` are a task's own, by the name that a test bears.

    `make test` runs each on one family, and the first on all if ``every_family`` is set. With `make test-slow` each
    test runs on every one of the ``families``, with one of the examples, so that a family meets them all.
    """

    examples: ClassVar[Mapping[str, Example]]
    families: ClassVar[Sequence[str]] = FAMILIES
    every_family: ClassVar[bool] = False

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        def with_head(example: Example) -> list[str]:
            return [family for family in families_with_head(example) if family in self.families]

        cases = with_families(self.examples, families=with_head, every=self.every_family)
        tests = sorted(name for name in dir(self) if name.startswith("test_"))
        turn = tests.index(metafunc.function.__name__)

        def is_next(family: str, name: str) -> bool:
            names = [name for name, example in self.examples.items() if family in families_with_head(example)]
            return names.index(name) == (turn + FAMILIES.index(family)) % len(names)

        names = {id(example): name for name, example in self.examples.items()}
        kept = [case for case in cases if not case.marks or is_next(case.values[0], names[id(case.values[1])])]
        metafunc.parametrize(("family_folder", "example"), kept, indirect=["family_folder"], scope="module")

    @pytest.fixture(scope="module")
    @classmethod
    def model(cls, family_folder: Path, example: Example) -> TaskModel:
        """A fresh head on a small encoder; tests must not change it."""
        torch.manual_seed(0)
        return TaskModel.from_pretrained(family_folder, task=example.task)

    def test_every_row_has_one_prediction_in_order(self, model: TaskModel, example: Example) -> None:
        rows = [*example.rows, changed(example, ""), changed(example, "word " * 300), *example.rows[:3]]
        together = model.predict(rows)
        assert len(together) == len(rows)
        alone = [prediction for row in rows for prediction in model.predict([row])]
        assert same(together, alone)
        assert same(list(reversed(model.predict(rows[::-1]))), together)
        assert len({tuple(numbers([prediction])) for prediction in together}) >= len(example.rows)

    def test_predictions_and_features_are_plain_values(self, model: TaskModel, example: Example) -> None:
        for prediction in model.predict(example.rows):
            content = prediction.to_json()
            assert json.loads(json.dumps(content, allow_nan=False)) == content
        features = make_features(model, example.rows)
        stored = ArrowRows.from_columns({name: [feature.get(name) for feature in features] for name in features[0]})
        assert [dict(feature) for feature in features] == list(stored)

    def test_empty_text_is_a_window_like_any_other(self, model: TaskModel, example: Example) -> None:
        features = make_features(model, [changed(example, ""), *example.rows])
        assert sum(feature["row"] == 0 for feature in features) == example.sequences
        assert 2 <= len(features[0]["input_ids"]) < model.task.max_length
        assert features[0]["lost_tokens"] == 0
        assert [feature["row"] for feature in features] == sorted(feature["row"] for feature in features)

    def test_long_text_is_cut_and_counted_or_read_in_windows(self, model: TaskModel, example: Example) -> None:
        features = make_features(model, [changed(example, "word " * 100), *example.rows])
        longest = max(len(feature["input_ids"]) for feature in features)
        of_long = [feature for feature in features if feature["row"] == 0]
        assert longest == model.task.max_length
        assert (len(of_long) > example.sequences) == example.windows
        lost = sum(feature["lost_tokens"] for feature in of_long)
        assert (lost == 0) if example.windows else (lost >= 100 - model.task.max_length)
        assert {feature["row"] for feature in features} == set(range(len(example.rows) + 1))

    def test_explanations_add_up(self, model: TaskModel, example: Example) -> None:
        if example.task.output.no_explanations_reason is not None:
            with pytest.raises(UsageError, match=r"Predict without (explanations|them)"):
                model.predict(example.rows[:2], explain=True)
            return
        predictions = model.predict(example.rows[:2], explain=True)
        names = {field.name for field in fields(example.task.output.prediction)}
        if "explanation" not in names:  # which are those of its entities
            predictions = [entity for prediction in predictions for entity in prediction.entities]
        for explained_row in predictions:
            explanation = explained_row.explanation
            assert explanation.is_complete
            total = sum(word.contribution for word in explanation.words)
            assert total == pytest.approx(explanation.logit - explanation.baseline_logit, rel=0.0101, abs=2e-6)

    def test_eight_examples_are_learnt(self, model: TaskModel, example: Example) -> None:
        skip_without_loss(model)
        torch.manual_seed(0)  # of dropout, whatever tests ran before
        learner = copy.deepcopy(model)
        task = learner.task
        batch = collate(trained(learner, example.rows), position_offset=learner.config.position_offset)
        optimizer = torch.optim.AdamW(learner.parameters(), lr=5e-3, weight_decay=0.0, foreach=True)
        for _ in range(ENOUGH_STEPS):
            (loss,) = task.output.loss(learner(batch), batch)
            mean = loss.total / loss.count
            optimizer.zero_grad()
            mean.backward()
            optimizer.step()
            if mean < 0.02:
                break
        assert mean < 0.02
        metrics = evaluate(learner, list(example.rows))
        assert set(task.output.curves) <= metrics.keys()  # what a report draws
        metric = metrics[task.output.primary_metric]
        assert metric < 1.05 if task.output.primary_metric in task.output.lower_is_better else metric > 0.95

    def test_saved_and_loaded_predictions_are_equal(self, model: TaskModel, example: Example, tmp_path: Path) -> None:
        model.save_pretrained(tmp_path / "model")
        loaded = TaskModel.from_pretrained(tmp_path / "model", task=type(example.task))
        assert loaded.task == model.task
        for name, value in loaded.state_dict().items():
            assert torch.equal(value, model.state_dict()[name]), name
        assert loaded.predict(example.rows) == model.predict(example.rows)

    def test_naming_the_own_task_or_one_field_changes_nothing_else(
        self, model: TaskModel, example: Example, tmp_path: Path
    ) -> None:
        fitted = model.task.fit_rows(example.rows)
        fitted = replace(fitted, output=fitted.output.tune(model.predict(example.rows), example.rows))
        assert type(fitted).of(**fitted.settings(), labels=fitted.output.labels) == model.task
        assert fitted.without_fitted_values() == model.task
        kept, task_class = copy.copy(model), type(fitted)
        kept.task = fitted
        kept.save_pretrained(tmp_path)
        for task_or_name in (task_class, *(task_names(task_class) if task_class in TASKS.values() else ())):
            loaded = TaskModel.from_pretrained(tmp_path, task=task_or_name)
            assert loaded.task == fitted
            assert loaded.load_report is not None
            assert not loaded.load_report.new
        for name in task_class.settings_by_name():
            settings = {name: fitted.values()[name]}
            assert stated_task(CheckpointFolder.open(tmp_path), task_class, settings) == fitted, name
        changes = {"max_length": fitted.max_length + 1}
        longer = TaskModel.from_pretrained(tmp_path, task=task_class, **changes)
        assert longer.task == fitted.with_settings(**changes)
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in longer.state_dict().items())
        reread = load_trained(tmp_path, task=task_class, settings=changes, reading=ReadOptions(), revision=None)
        assert reread.task == longer.task

    def test_loss_of_rows_without_targets_counts_nothing(self, model: TaskModel, example: Example) -> None:
        skip_without_loss(model)
        without = unlabelled(example)
        offset = model.config.position_offset
        with torch.no_grad():
            batch = collate(make_features(model, without), position_offset=offset)
            assert [term.count for term in model.task.output.loss(model(batch), batch)] == [0]
            labelled = trained(model, example.rows[:2])
            mixed = collate([*labelled, *make_features(model, without)], position_offset=offset)
            subset = collate(labelled, position_offset=offset)
            (with_others,), (alone,) = (
                model.task.output.loss(model(mixed), mixed),
                model.task.output.loss(model(subset), subset),
            )
        assert with_others.count == alone.count > 0
        assert with_others.total.item() == pytest.approx(alone.total.item(), rel=1e-5)

    def test_counts_of_features_are_those_of_the_loss(self, model: TaskModel, example: Example) -> None:
        skip_without_loss(model)
        rows = [*example.rows, changed(example, "word " * 60), *example.rows[:3]]
        for features in (trained(model, rows), trained(model, rows[2:5]), make_features(model, unlabelled(example))):
            batch = collate(features, position_offset=model.config.position_offset)
            with torch.no_grad():
                terms = model.task.output.loss(model(batch), batch)
            counts = {term.name: term.count.item() for term in terms}
            assert len(counts) == len(terms)
            assert model.task.output.counts(features) == pytest.approx(counts, rel=1e-6)

    def test_distillation_counts_what_it_sums_and_is_zero_between_equals(
        self, model: TaskModel, example: Example
    ) -> None:
        output = model.task.output
        if output.no_teacher_reason is not None:
            pytest.skip("the task cannot learn from a teacher")
        rows = [*example.rows, changed(example, "word " * 60), *unlabelled(example)]
        for features in (make_features(model, rows), make_features(model, unlabelled(example)[2:5])):
            batch = collate(features, position_offset=model.config.position_offset)
            with torch.no_grad():
                of_head = model(batch)
            logits = of_head.logits() if isinstance(of_head, VocabularyOutput) else of_head
            student = (logits + 0.1 * torch.rand_like(logits)).requires_grad_()
            total, count = output.divergence(student, logits, batch, 2.0)
            assert count == output.divergence_count(features) > 0
            assert total > 0
            teacher = logits.detach()
            nothing, _ = output.divergence(logits.requires_grad_(), teacher, batch, 2.0)
            (gradient,) = torch.autograd.grad(nothing, logits)
            assert nothing.item() == pytest.approx(0, abs=1e-4)
            assert gradient.abs().max() < 1e-5

    @pytest.mark.parametrize("distils", [False, True], ids=["labels", "teacher"])
    def test_a_step_on_a_device_never_waits_and_leaves_no_tensor_on_the_host(
        self, model: TaskModel, example: Example, monkeypatch: pytest.MonkeyPatch, distils: bool
    ) -> None:
        if distils and example.task.output.no_teacher_reason is not None:
            pytest.skip("the task cannot learn from a teacher")
        skip_without_loss(model)
        student = copy.deepcopy(model)
        objective = Distillation(student, copy.deepcopy(model)) if distils else None
        sizes = {"batch_size": 8, "micro_batch_tokens": 60}
        steps = make_steps(student, list(example.rows), objective=objective, **sizes)
        batch = next(batches(steps))
        with on_meta_device(steps, monkeypatch):
            result = steps.update(0, batch, steps.backward(0, batch))
        assert result.values.device.type == "cpu"
        assert {parameter.device for parameter in steps.objective.parameters()} == {META}

    def test_stock_transformers_gives_equal_logits(self, model: TaskModel, example: Example, tmp_path: Path) -> None:
        head = model.task.head_kind
        if head is None or not model.task.has_hf_head:
            pytest.skip("transformers has no such head")
        model.save_pretrained(tmp_path)
        stock = STOCK[head].from_pretrained(tmp_path).eval()
        takes_segments = stock.config.model_type not in WITHOUT_TYPES
        features = make_features(model, example.rows[:3])
        for feature, ours in zip(features, padded_logits(model, features), strict=True):
            inputs = {"input_ids": torch.tensor([feature["input_ids"]])}
            inputs |= {"token_type_ids": torch.tensor([feature["token_type_ids"]])} if takes_segments else {}
            if head == "choice":  # of which each is a choice of a row
                inputs = {name: tensor.unsqueeze(0) for name, tensor in inputs.items()}
            with torch.no_grad():
                output = stock(**inputs)
            is_span = head == "span"
            theirs = torch.stack([output.start_logits, output.end_logits], dim=-1) if is_span else output.logits
            if head == "replaced-token":
                theirs = theirs.unsqueeze(-1)  # one logit for each token
            torch.testing.assert_close(ours, theirs[0], atol=5e-6, rtol=0)

    @pytest.mark.slow
    def test_stock_pipelines_answer_as_we_do_or_without_our_labels(
        self, model: TaskModel, example: Example, tmp_path: Path
    ) -> None:
        """A head that stock code draws at random must not look trained."""
        model.save_pretrained(tmp_path)
        assert model.task.has_hf_head == (not (tmp_path / "task_head.safetensors").exists())
        config = AutoConfig.from_pretrained(tmp_path)
        ours, theirs = set(model.task.output.labels), set(config.id2label.values())
        assert theirs == ours if model.task.has_hf_head and ours else all(map(DEFAULT_LABEL.fullmatch, theirs))
        if model.task.has_hf_head:
            return  # equal logits are compared above
        text = " ".join(str(value) for value in example.rows[0].values())
        for name in ("text-classification", "token-classification"):
            try:
                answers = pipeline(name, str(tmp_path), device="cpu")(text)
            except (ValueError, RuntimeError, OSError, IndexError):  # what stock code ends in is its own
                continue
            said = {answer.get("label", answer.get("entity")) for answer in answers}
            assert said
            assert all(map(DEFAULT_LABEL.fullmatch, said))
