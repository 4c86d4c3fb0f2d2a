"""Several tasks on one encoder: gradients, counts, shared sequences, resuming, and pairs of tasks of every kind."""

import copy
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerBase,
)

from bert_tasks import TaskModel, evaluate, fit
from bert_tasks.data.reading import read
from bert_tasks.errors import CheckpointError, DataError, UsageError
from bert_tasks.export import export
from bert_tasks.model import windows
from bert_tasks.model.multitask import MultiTaskModel
from bert_tasks.model.windows import batch_tokens, features_of, pack_features
from bert_tasks.training.objectives import Supervised
from support.sampling import slow_except
from support.several_tasks import ROWS, SLOTS, TASKS, TOPIC, renamed, together
from support.small_checkpoints import copied, edit_config, save_checkpoint
from support.task_examples import CHOICES, CLASSES, PAIRS, QUESTIONS, SENTENCES
from support.training_runs import make_steps, walk, weights_of

QUESTION = {"task": "span-extraction", "max_length": 32, "doc_stride": 6, "max_query_length": 8, "max_answer_length": 5}
ENTAILS = {
    "task": "pair-classification",
    "labels": ["no", "yes"],
    "max_length": 32,
    "columns": {"label": "entails"},
}
# Pairs of tasks -> their settings, and rows for both.
PAIRED: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "sequence and token": (TASKS, ROWS),
    "pair and sequence": (
        {
            "entails": ENTAILS,
            "topic": TASKS["topic"],
        },
        together(renamed(PAIRS, label="entails"), renamed(CLASSES, label="topic")),
    ),
    "token and token with other labels": (
        {
            "slots": TASKS["slots"],
            "parts": {**SLOTS, "labels": ["a", "b"], "columns": {"tags": "parts"}},
        },
        [{**row, "parts": ["ab"[len(word) > 4] for word in row["words"]]} for row in ROWS],
    ),
    "span and sequence": (
        {"answer": QUESTION, "topic": TASKS["topic"]},
        together(QUESTIONS, renamed(CLASSES, label="topic")),
    ),
    "choice and pair": (
        {
            "answer": {"task": "multiple-choice", "max_length": 32, "columns": {"label": "right"}},
            "entails": ENTAILS,
        },
        together(renamed(CHOICES, label="right"), renamed(PAIRS, label="entails")),
    ),
}
SETTINGS: dict[str, Any] = {"epochs": 2, "batch_size": 4, "learning_rate": 1e-3, "progress": False}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, unigram_tokenizer: PreTrainedTokenizerBase) -> Path:
    """Large weights, so that a wrong gradient shows; no dropout."""
    folder = tmp_path_factory.mktemp("base")
    save_checkpoint(folder, "bert", unigram_tokenizer, wide=True)
    edit_config(folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, unigram_tokenizer: PreTrainedTokenizerBase) -> Path:
    """With dropout."""
    folder = tmp_path_factory.mktemp("plain")
    save_checkpoint(folder, "bert", unigram_tokenizer)
    return folder


@pytest.fixture(scope="module")
def quick(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Learns quickly; no dropout."""
    folder = copied(plain, tmp_path_factory.mktemp("quick") / "model")
    edit_config(folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return folder


def load(base: Path, tasks: Mapping[str, Mapping[str, Any]] = TASKS) -> MultiTaskModel:
    torch.manual_seed(0)
    return MultiTaskModel.from_pretrained(base, tasks=tasks)


def windows_of(model: TaskModel, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    table = read(rows, model.row_columns, require_labels=False)
    return features_of(model, list(table), model.require_tokenizer())


def gradients_of(model: TaskModel, rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The mean of each loss term of one batch, and the gradients of the weighted sum of these means."""
    objective = Supervised(model)
    objective.zero_grad(set_to_none=True)
    terms = objective(pack_features(model, windows_of(model, rows)))
    means = {term.name: term.total / term.count.clamp(min=1) for term in terms}
    torch.stack([term.weight * means[term.name] for term in terms]).sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: mean.item() for name, mean in means.items()}, {name: grad.clone() for name, grad in grads.items()}


def test_gradients_of_seven_heads_are_the_sum_of_single_ones_where_rows_lack_labels(base: Path) -> None:
    tasks: dict[str, dict[str, Any]] = {}
    for number in range(7):
        kind, label = (TOPIC, "label") if number % 2 else (SLOTS, "tags")
        tasks[f"head{number}"] = {**kind, "columns": {label: f"label{number}"}, "weight": 0.5 + number}
    rows = []
    for place, row in enumerate(ROWS):
        cells = {"text": row["text"], "words": row["words"]}
        for number in range(7):
            if (place + number) % 3:
                cells[f"label{number}"] = row["topic"] if number % 2 else row["slots"]
        rows.append(cells)
    model = load(base, tasks).double()
    losses, gradients = gradients_of(model, rows)
    sums: dict[str, Tensor] = {}
    for name, single in model.models.items():
        ((column, label),) = single.columns.items()
        labelled = [{**row, column: row[label]} for row in rows if label in row]
        own_losses, own_gradients = gradients_of(single, labelled)
        assert list(own_losses.values()) == pytest.approx([losses[f"{name}/loss"]], rel=1e-12)
        for key, gradient in own_gradients.items():
            shared = key.replace("head.", f"head.heads.{name}.") if key.startswith("head.") else key
            sums[shared] = sums.get(shared, torch.zeros_like(gradient)) + gradient * tasks[name]["weight"]
    assert sums.keys() == gradients.keys()
    largest = max(gradient.abs().max() for gradient in sums.values())
    assert all((sums[key] - gradients[key]).abs().max() <= 1e-12 * largest for key in sums)


def test_the_encoder_reads_a_shared_row_once(base: Path) -> None:
    model, tokens = load(base), list[int]()
    model.encoder.register_forward_hook(lambda module, inputs, output: tokens.append(len(inputs[0])))
    features = windows_of(model, ROWS)
    once = sum(len(feature["input_ids"]) for feature in features if feature["head"] == "topic")
    model.predict(renamed(ROWS, topic="unread"))
    assert tokens == [once]
    gradients_of(model, ROWS)
    assert tokens == [once, once]


def with_gaps(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows, some without a label, so that the counts of batches and tasks differ."""
    without = {0: "topic", 1: "slots", 2: ""}
    gaps = [{name: row[name] for name in row if name != without[i % 3]} for i, row in enumerate(rows)]
    return [*gaps, *rows[:3]]


def weighted(tasks: Mapping[str, Mapping[str, Any]], gamma: float) -> dict[str, dict[str, Any]]:
    """The tasks with class weights and the focal loss."""
    return {
        name: {**task, "focal_gamma": gamma, "class_weights": [0.5 + i for i in range(len(task["labels"]))]}
        for name, task in tasks.items()
    }


def step_gradients(base: Path, tasks: Mapping[str, Mapping[str, Any]] = TASKS, **optim: Any) -> dict[str, Tensor]:
    model = load(base, tasks).double()
    steps = make_steps(model, with_gaps(ROWS), batch_size=8, epochs=1, **optim)
    _, batch = next(steps.batches())
    terms = steps.backward(0, batch)
    steps.optimizer.step = lambda *arguments: None  # type: ignore[method-assign]  # the gradients are compared
    steps.update(0, batch, terms)
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("gamma", [None, 2.0])
def test_micro_batches_change_nothing(base: Path, gamma: float | None) -> None:
    tasks = TASKS if gamma is None else weighted(TASKS, gamma)
    whole, cut = (step_gradients(base, tasks, micro_batch_tokens=tokens, max_grad_norm=None) for tokens in (10_000, 40))
    assert whole.keys() == cut.keys()
    largest = max(gradient.abs().max() for gradient in whole.values())
    assert largest > 0
    assert all((whole[name] - cut[name]).abs().max() <= 1e-12 * largest for name in whole)


def test_a_batch_without_a_label_of_a_task_trains_the_others(base: Path) -> None:
    model = load(base).double()
    rows = [{name: value for name, value in row.items() if name != "slots"} for row in ROWS]
    losses, gradients = gradients_of(model, rows)
    assert losses["slots/loss"] == 0.0
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert all(not gradient.any() for name, gradient in gradients.items() if "heads.slots" in name)
    assert any(gradient.any() for name, gradient in gradients.items() if "heads.topic" in name)
    only_text = [{"text": row["text"], "topic": row["topic"]} for row in ROWS]
    (topic,) = (name for name in gradients if name.endswith("heads.topic.output.weight"))
    assert torch.allclose(gradients_of(model, only_text)[1][topic], gradients[topic], rtol=1e-12)


def test_one_task_is_the_same_as_a_model_of_it(plain: Path) -> None:
    rows = renamed(ROWS, topic="label")
    torch.manual_seed(0)
    single = TaskModel.from_pretrained(plain, task="sequence-classification", labels=TOPIC["labels"], max_length=32)
    logs = walk(make_steps(single, [{"text": row["text"], "label": row["label"]} for row in rows], batch_size=4))
    model = load(plain, {"topic": TOPIC})
    ours = walk(make_steps(model, rows, batch_size=4))
    assert [log.loss for log in ours] == [log.loss for log in logs]
    trained = weights_of(model.models["topic"])
    assert all(torch.equal(trained[name], weight) for name, weight in weights_of(single).items())


@pytest.mark.parametrize("pair", slow_except(PAIRED, "sequence and token"))
def test_pairs_of_tasks_learn_and_are_saved(pair: str, quick: Path, tmp_path: Path) -> None:
    tasks, rows = PAIRED[pair]
    model = load(quick, tasks)
    settings = {**SETTINGS, "epochs": 30, "learning_rate": 5e-3, "eval_steps": 60}
    result = fit(model, rows, rows, output_dir=tmp_path / "run", **settings)
    assert result.metrics["loss"] < 0.5
    names = list(tasks)
    assert all(any(key.startswith(f"{name}.") for key in result.metrics) for name in names)
    opened = MultiTaskModel.from_pretrained(tmp_path / "run" / "model")
    predictions = opened.predict(rows)
    assert predictions == model.predict(rows)
    for name, single in opened.models.items():
        alone = single.predict(renamed(rows, **{other: column for column, other in single.columns.items()}))
        for prediction, expected in zip(predictions, alone, strict=True):
            assert prediction[name].to_json().keys() == expected.to_json().keys()
            assert getattr(prediction[name], "label", None) == getattr(expected, "label", None)
    assert evaluate(opened, rows) == pytest.approx(evaluate(model, rows))
    assert json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))["task"] == "multi-task"
    for name, single in opened.models.items():
        export(tmp_path / "run" / "model", task=name, to="transformers", output=tmp_path / name)
        assert_stock_logits(tmp_path / name, single)


def assert_stock_logits(folder: Path, ours: TaskModel) -> None:
    """transformers opens the folder without a missing or unexpected weight, and its logits are the model's."""
    ids = torch.randint(5, ours.config.vocab_size, (6, 12), generator=torch.Generator().manual_seed(0))
    segments = torch.arange(12).expand(6, 12) // 7
    mask = (torch.arange(12) < torch.tensor([[12], [9], [7], [10], [12], [8]])).long()
    stock = {
        "sequence-classification": AutoModelForSequenceClassification,
        "pair-classification": AutoModelForSequenceClassification,
        "token-classification": AutoModelForTokenClassification,
        "span-extraction": AutoModelForQuestionAnswering,
        "multiple-choice": AutoModelForMultipleChoice,
    }[ours.task.name]
    model, info = stock.from_pretrained(folder, output_loading_info=True)
    assert info["missing_keys"] == info["unexpected_keys"] == set()
    choices = ours.task.name == "multiple-choice"
    inputs = [tensor.reshape(3, 2, 12) if choices else tensor for tensor in (ids, mask, segments)]
    with torch.no_grad():
        outputs = model.eval()(*inputs)
        logits = ours.eval()(ids, mask, segments)
    if ours.task.name == "span-extraction":
        expected = torch.stack([outputs.start_logits, outputs.end_logits], dim=-1)
    else:
        expected = outputs.logits.reshape(logits.shape)
    real = mask.bool() if expected.dim() == 3 else slice(None)
    assert expected[real].abs().max() > 0.1
    torch.testing.assert_close(logits[real], expected[real], atol=1e-5, rtol=0)


def test_labels_come_from_the_training_rows(base: Path, tmp_path: Path) -> None:
    tasks = {name: {key: value for key, value in entry.items() if key != "labels"} for name, entry in TASKS.items()}
    tasks["slots"] |= {"class_weights": "balanced", "focal_gamma": 2.0}
    model = load(base, tasks)
    with pytest.raises(UsageError, match="needs labels"):
        model.predict("a text")
    fit(model, with_gaps(ROWS), ROWS, output_dir=tmp_path, **SETTINGS)
    assert model.models["topic"].task.output.labels == ("high", "low", "mid")
    slots = model.models["slots"].task
    assert set(slots.output.labels) == {tag for row in SENTENCES for tag in row["tags"]}
    counts = Counter(tag for row in with_gaps(ROWS) if "slots" in row for tag in row["slots"])
    expected = [counts.total() / len(counts) / counts[label] for label in slots.output.labels]
    assert slots.output.balanced_weights == pytest.approx(expected)
    assert MultiTaskModel.from_pretrained(tmp_path / "model").models["slots"].task == slots


def test_a_stopped_run_ends_with_the_same_bits(plain: Path, tmp_path: Path) -> None:
    def run(folder: Path, stop_after: int | None = None) -> dict[str, Tensor]:
        def stop(record: dict[str, Any]) -> None:
            if record["event"] == "step" and record["step"] == stop_after:
                raise KeyboardInterrupt

        model = load(plain)
        options = {**SETTINGS, "save_steps": 2, "logging_steps": 1, "callback": stop}
        try:
            fit(model, with_gaps(ROWS), ROWS, output_dir=folder, **options)
        except KeyboardInterrupt:
            return {}
        return weights_of(model)

    whole = run(tmp_path / "whole")
    run(tmp_path / "run", stop_after=5)
    again = run(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))["resumed_at"]
    assert all(torch.equal(again[name], weight) for name, weight in whole.items())


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({}, "tasks is {}, expected the name of each task and its settings"),
        ({"topic": "ner"}, "tasks.topic is 'ner', expected a mapping with its task and settings"),
        ({"topic": {}}, "tasks.topic: task is None, expected the name of a task"),
        ({"topic": {"task": "sequence-clasification"}}, "did you mean 'sequence-classification'"),
        ({"type": TOPIC}, "torch has a use of its own for the name 'type'"),
        ({"my topic": TOPIC}, "the name 'my topic' is no word of letters, digits and _"),
        ({"topic": {**TOPIC, "weight": -1}}, "tasks.topic: weight is -1, expected a number from 0"),
        ({"topic": {**TOPIC, "columns": {"lable": "x"}}}, "the task reads text, label, not 'lable'"),
        ({"topic": {**TOPIC, "depth": 3}}, "sequence-classification has no setting 'depth'"),
        ({"words": {"task": "fill-mask"}}, "tasks.words: masked-language-modeling cannot be one of several tasks"),
    ],
)
def test_wrong_tasks_are_named(tasks: dict[str, Any], message: str, base: Path) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        load(base, tasks)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"topic": "low"}, r"train:9: no input of any task. The .* 'words' or 'text' \(slots\), 'text' \(topic\)."),
        ({"text": "a", "topic": "lwo"}, "unknown label"),
        ({"words": ["a", "b"], "slots": ["O"]}, "2 words"),
    ],
)
def test_wrong_rows_are_named(row: dict[str, Any], message: str, base: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        fit(load(base), [*ROWS, row], ROWS, output_dir=tmp_path, **SETTINGS)


def test_a_folder_of_one_task_is_none_of_several(base: Path) -> None:
    with pytest.raises(CheckpointError):
        MultiTaskModel.from_pretrained(base)


def test_a_task_without_labels_in_the_data_is_named(base: Path, tmp_path: Path) -> None:
    rows = [{name: value for name, value in row.items() if name != "slots"} for row in ROWS]
    with pytest.raises(DataError, match="no row has a label of the task slots in 'slots' or 'entities'"):
        fit(load(base), rows, rows, output_dir=tmp_path, **SETTINGS)


def test_settings_of_a_task_are_not_those_of_all(quick: Path, tmp_path: Path) -> None:
    """They would be ignored."""
    load(quick).save_pretrained(tmp_path / "model")
    with pytest.raises(UsageError, match=r"choose one of the tasks slots, topic with task='NAME'"):
        evaluate(tmp_path / "model", ROWS, settings={"max_length": 9})
    with pytest.raises(UsageError, match=r"choose one of the tasks slots, topic with task='NAME'"):
        evaluate(tmp_path / "model", ROWS, columns={"text": "review"})
    assert evaluate(
        tmp_path / "model", ROWS, task="slots", settings={"max_length": 9, "doc_stride": 2}, columns={"tags": "slots"}
    )


def test_the_names_of_the_tasks_columns_may_stand_for_those_of_the_training_data(quick: Path, tmp_path: Path) -> None:
    model = load(quick, {**TASKS, "topic": {**TASKS["topic"], "columns": {"text": "words", "label": "topic"}}})
    assert model.predict({"text": "the ferry"}) == model.predict({"words": ["the", "ferry"], "text": "the ferry"})


def test_the_models_of_the_tasks_follow_the_model(quick: Path, unigram_tokenizer: PreTrainedTokenizerBase) -> None:
    """They have its encoder, its tokenizer and its mode, also after one of them has predicted."""
    model = load(quick)
    model.models["topic"].predict("the ferry")
    assert {module.training for module in model.modules()} == {False}
    model.train()
    model.models["topic"].predict("the ferry")
    assert {module.training for module in model.modules()} == {True}
    model.tokenizer = copy.deepcopy(unigram_tokenizer)
    assert model.models["slots"].tokenizer is model.tokenizer


def test_a_smaller_model_of_several_tasks_predicts_and_is_saved(quick: Path, tmp_path: Path) -> None:
    model = load(quick).with_layers([0])
    (alone,), together = model.models["slots"].predict("the ferry"), model.predict("the ferry")[0]["slots"]
    assert alone.tags == together.tags
    assert alone.scores == pytest.approx(together.scores, abs=1e-6)  # products of other shapes may round otherwise
    model.save_pretrained(tmp_path)
    assert MultiTaskModel.from_pretrained(tmp_path).predict("the ferry") == model.predict("the ferry")


def test_labels_that_one_of_the_models_learns_are_those_of_the_model(quick: Path, tmp_path: Path) -> None:
    tasks = {name: {key: value for key, value in entry.items() if key != "labels"} for name, entry in TASKS.items()}
    model = load(quick, tasks)
    fit(model.models["topic"], ROWS, ROWS, columns={"label": "topic"}, output_dir=tmp_path / "topic", **SETTINGS)
    fit(model, ROWS, ROWS, output_dir=tmp_path / "both", **SETTINGS)
    assert model.models["topic"].task.output.labels == ("high", "low", "mid")
    assert model.predict("the ferry")[0]["topic"].label in model.models["topic"].task.output.labels


def test_batches_are_small_enough_for_a_head_whose_labels_become_known(
    quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrix of a CRF grows with the square of the number of labels."""
    monkeypatch.setattr(windows, "CPU_BATCH_TOKENS", 2**25)
    slots = {"task": "token-classification", "crf": True, "columns": {"tags": "slots"}}
    model = load(quick, {"topic": TASKS["topic"], "slots": slots})
    before = batch_tokens(model)
    fit(model, ROWS, ROWS, output_dir=tmp_path, **SETTINGS)
    known = len(model.models["slots"].task.output.labels)
    assert batch_tokens(model) == 2**25 // ((known + 2) * known) < before


@pytest.mark.parametrize(
    ("models", "weights", "message"),
    [
        ([], {}, "expected the name of each task and its model"),
        (["topic"], {"slots": 2.0}, "unknown task 'slots'"),
        (["not a word"], {}, "is no word of letters"),
    ],
)
def test_models_that_cannot_be_joined(quick: Path, models: list[str], weights: dict[str, float], message: str) -> None:
    of_task = load(quick).models["topic"]
    with pytest.raises(UsageError, match=message):
        MultiTaskModel(dict.fromkeys(models, of_task), weights)


def test_one_task_is_not_taught_by_several(quick: Path, tmp_path: Path) -> None:
    student = TaskModel.from_pretrained(quick, task="text-classification", labels=["high", "low", "mid"])
    topics = renamed(ROWS, topic="label")
    with pytest.raises(UsageError, match="the teacher has the tasks slots, topic"):
        fit(student, topics, topics, output_dir=tmp_path, teacher=load(quick), **SETTINGS)
