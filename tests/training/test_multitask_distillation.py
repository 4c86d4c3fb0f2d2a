"""Several tasks that learn from teachers: the loss, its gradients, micro-batches, kept logits, and wrong teachers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bert_tasks import MultiTaskModel, TaskModel, fit, load_recipe, train
from bert_tasks.data.reading import read
from bert_tasks.errors import CheckpointError, RecipeError, UsageError
from bert_tasks.model.windows import features_of, pack_features
from bert_tasks.recipe.schema import TeacherSection
from bert_tasks.training.distillation import Distillation
from bert_tasks.training.distillation_of_several import DistillationOfSeveral
from support import several_tasks
from support.hf_models import widen
from support.meta_device import on_meta_device
from support.sampling import slow_except
from support.several_tasks import SLOTS, TOPIC, renamed, together
from support.small_checkpoints import edit_config, save_checkpoint
from support.task_examples import PAIRS
from support.training_runs import make_steps, walk

ENTAILS = {"task": "pair-classification", "labels": ["no", "yes"], "max_length": 32}
TASKS: dict[str, dict[str, Any]] = {
    "entails": {**ENTAILS, "columns": {"text": "first", "text_pair": "second", "label": "entails"}, "weight": 2.0},
    "slots": {**several_tasks.TASKS["slots"], "weight": 0.3},
    "topic": several_tasks.TASKS["topic"],
}
ROWS = together(several_tasks.ROWS, renamed(PAIRS, text="first", text_pair="second", label="entails"))
OWN_COLUMNS = {"topic": {"topic": "label"}, "slots": {"slots": "tags"}, "entails": {"entails": "label"}}
OPTIONS: dict[str, Any] = {"temperature": 1.5, "weight": 0.7}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, unigram_tokenizer: PreTrainedTokenizerBase) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_checkpoint(folder, "bert", unigram_tokenizer, wide=True)
    edit_config(folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return folder


def load(base: Path, seed: int = 0, tasks: Mapping[str, Mapping[str, Any]] = TASKS) -> MultiTaskModel:
    """A model with large weights that depend on the seed."""
    torch.manual_seed(seed)
    model = MultiTaskModel.from_pretrained(base, tasks=tasks)
    widen(model, seed=seed)
    return model


def objective_of(
    base: Path, teachers: Sequence[str] | None = None, tasks: Mapping[str, Mapping[str, Any]] = TASKS, **options: Any
) -> DistillationOfSeveral:
    """A student with a teacher of all tasks, or with separate teachers for some."""
    teacher: Any = load(base, 5, tasks)
    if teachers is not None:
        teacher = {name: load(base, seed, tasks).models[name] for seed, name in enumerate(teachers, 5)}
    section = TeacherSection(name="teacher", **OPTIONS | options)
    objective = DistillationOfSeveral(load(base, 0, tasks), teacher, section)
    objective.double()
    return objective


def with_gaps(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows, some without a label or without all that a task reads."""
    without = {0: {"topic"}, 1: {"slots", "entails"}, 2: set[str](), 3: {"first", "second"}}
    return [{name: row[name] for name in row if name not in without[i % 4]} for i, row in enumerate(rows)]


def mean_loss(objective: torch.nn.Module, model: TaskModel, rows: Sequence[Mapping[str, Any]]) -> Tensor:
    table = read(rows, model.row_columns, require_labels=False)
    batch = pack_features(model, features_of(model, list(table), model.require_tokenizer()))
    means = [term.weight * term.total / term.count.clamp(min=1) for term in objective(batch)]
    return torch.stack(means).sum()


@pytest.mark.parametrize("teachers", [None, ["slots", "topic"]], ids=str)
def test_the_loss_is_the_weighted_sum_of_single_distillations(base: Path, teachers: list[str] | None) -> None:
    objective = objective_of(base, teachers)
    model, weights = objective.model, {"entails": 2.0, "slots": 0.3, "topic": 1.0}
    parameters = dict(model.named_parameters())
    loss = mean_loss(objective, model, ROWS)
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    singles = model.models  # type: ignore[attr-defined]  # of several tasks
    total = torch.zeros((), dtype=torch.float64)
    for name, single in singles.items():
        teacher = objective.teachers.get(name)
        alone = None if teacher is None else Distillation(single, teacher, objective.section)
        rows = [{OWN_COLUMNS[name].get(key, key): row[key] for key in row} for row in ROWS]
        if name == "entails":
            rows = [{"text": row["first"], "text_pair": row["second"], "label": row["label"]} for row in rows]
        kept = {column.name for column in single.task.columns}
        rows = [{key: row[key] for key in row if key in kept} for row in rows]
        if alone is None:
            table = read(rows, single.task.columns, require_labels=False)
            batch = pack_features(single, single.task.features(list(table), single.require_tokenizer()))
            (term,) = single.task.output.loss(single(batch), batch)
            total = total + weights[name] * term.total / term.count
        else:
            total = total + weights[name] * mean_loss(alone, single, rows)
    assert loss.item() == pytest.approx(total.item(), rel=1e-12)
    expected = torch.autograd.grad(total, list(parameters.values()))
    largest = max(gradient.abs().max() for gradient in expected)
    pairs = zip(gradients, expected, strict=True)
    assert largest > 0
    assert all((gradient - other).abs().max() <= 1e-12 * largest for gradient, other in pairs)


def test_a_teacher_of_all_tasks_reads_a_row_once(base: Path) -> None:
    objective, tokens = objective_of(base), list[list[int]]([[], []])
    encoders = objective.model.encoder, objective.teachers["topic"].encoder
    for numbers, encoder in zip(tokens, encoders, strict=True):
        encoder.register_forward_hook(lambda module, inputs, output, numbers=numbers: numbers.append(len(inputs[0])))
    mean_loss(objective, objective.model, ROWS)
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 1


def step_gradients(
    base: Path, teachers: list[str] | None, options: Mapping[str, Any], **optim: Any
) -> dict[str, Tensor]:
    objective = objective_of(base, teachers, **options)
    steps = make_steps(objective.model, with_gaps(ROWS), objective=objective, batch_size=8, epochs=1, **optim)
    objective.begin(steps.samples.features, torch.device("cpu"))
    _, batch = next(steps.batches())
    terms = steps.backward(0, batch)
    steps.optimizer.step = lambda *arguments: None  # type: ignore[method-assign]  # the gradients are compared
    steps.update(0, batch, terms)
    named = objective.model.named_parameters()
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


@pytest.mark.parametrize(("teachers", "options"), [(None, {"cache_logits": True}), (["entails", "topic"], {})], ids=str)
def test_micro_batches_change_nothing(base: Path, teachers: list[str] | None, options: dict[str, Any]) -> None:
    whole, cut = (
        step_gradients(base, teachers, options, micro_batch_tokens=tokens, max_grad_norm=None)
        for tokens in (10_000, 40)
    )
    assert whole.keys() == cut.keys()
    largest = max(gradient.abs().max() for gradient in whole.values())
    assert largest > 0
    assert all((whole[name] - cut[name]).abs().max() <= 1e-12 * largest for name in whole)


@pytest.mark.parametrize("teachers", [None, ["slots"]], ids=str)
def test_kept_logits_are_the_logits_of_the_teachers(
    base: Path, teachers: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = []
    for kept in (False, True):
        objective = objective_of(base, teachers, cache_logits=kept)
        options = {"batch_size": 4, "epochs": 2, "learning_rate": 1e-3}
        steps = make_steps(objective.model, with_gaps(ROWS), objective=objective, **options)
        objective.begin(steps.samples.features, torch.device("cpu"))
        if kept:
            for teacher in objective.teachers.values():
                monkeypatch.setattr(teacher.encoder, "forward", None)  # it is not run again
        losses.append([log.loss for log in walk(steps)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_rows_without_labels_learn_from_their_teacher(base: Path) -> None:
    objective = objective_of(base, ["slots"])
    rows = [{key: row[key] for key in row if key in ("text", "words")} for row in ROWS]
    table = read(rows, objective.model.row_columns, require_labels=False)
    features = features_of(objective.model, list(table), objective.model.require_tokenizer())
    terms = {term.name: term for term in objective(pack_features(objective.model, features))}
    counts = {name: term.count.item() for name, term in terms.items()}
    assert list(terms) == ["entails/loss", "slots/loss", "topic/loss", "slots/distillation"]
    assert counts == objective.counts(features)
    assert [name for name, count in counts.items() if count] == ["slots/distillation"]
    assert terms["slots/distillation"].total > 0.1
    assert [term.weight for term in terms.values()] == pytest.approx([2.0, 0.3 * 0.3, 1.0, 0.3 * 0.7])


def test_a_batch_without_rows_of_a_task_counts_nothing(base: Path) -> None:
    objective = objective_of(base)
    rows = [{"first": row["first"], "second": row["second"], "entails": row["entails"]} for row in ROWS]
    table = read(rows, objective.model.row_columns, require_labels=False)
    features = features_of(objective.model, list(table), objective.model.require_tokenizer())
    terms = objective(pack_features(objective.model, features))
    assert {term.name: term.count.item() for term in terms} == objective.counts(features)
    assert {term.name for term in terms if term.total.item()} == {"entails/loss", "entails/distillation"}


def test_a_step_on_a_device_never_waits(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = objective_of(base).float()
    steps = make_steps(objective.model, with_gaps(ROWS), objective=objective, batch_size=8, micro_batch_tokens=60)
    _, batch = next(steps.batches())
    with on_meta_device(steps, monkeypatch):
        result = steps.update(0, batch, steps.backward(0, batch))
    assert len(result.values) == 4 + 6


SETTINGS: dict[str, Any] = {"epochs": 1, "batch_size": 4, "learning_rate": 1e-3, "progress": False}


@pytest.fixture(scope="module")
def wrong(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models that cannot teach."""
    folder = tmp_path_factory.mktemp("wrong")
    load(base).models["topic"].save_pretrained(folder / "topic")
    load(base, tasks={"topic": {**TOPIC, "labels": ["no", "yes"]}}).models["topic"].save_pretrained(folder / "other")
    load(base, tasks={"topic": TOPIC, "slots": SLOTS}).save_pretrained(folder / "few")
    load(base, tasks={**TASKS, "slots": {**SLOTS, "labels": ["O", "X"]}}).save_pretrained(folder / "labels")
    load(base, tasks={**TASKS, "topic": SLOTS}).save_pretrained(folder / "kinds")
    return folder


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ({"topics": "topic"}, r"\[teacher\] names the unknown task 'topics'\. Name teachers of entails, slots, topic"),
        ({"slots": "topic"}, "topic has no trained head for token-classification with this run's labels"),
        ({"topic": "other"}, "other has no trained head for sequence-classification with this run's labels"),
        ("topic", r"topic has no task entails, slots, topic \(it has only sequence-classification\)\. Name a teacher"),
        ("few", r"few has no task entails \(it has slots, topic\)\. Name a teacher for each task"),
        ("labels", r"\[teacher\] of task slots: the teacher's labels are O, X, but the model's are"),
        ("kinds", r"\[teacher\] of task topic: the teacher's task is token-classification"),
        ("missing", r"\[teacher\] .*missing"),
    ],
)
def test_wrong_teachers_are_named(
    base: Path, wrong: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, teacher: Any, message: str
) -> None:
    monkeypatch.chdir(wrong)
    with pytest.raises((UsageError, CheckpointError), match=message):
        fit(load(base), ROWS, ROWS, output_dir=tmp_path, teacher=teacher, **SETTINGS)


def test_impossible_teachers_are_named(base: Path, tmp_path: Path) -> None:
    model = load(base)
    for teacher, settings, error, message in (
        (model, {}, UsageError, r"\[teacher\] of task entails: the teacher is the model itself"),
        ({"topic": model.models["topic"]}, {}, UsageError, "task topic: the teacher is the model itself"),
        (load(base), {"teacher_hidden": "mse"}, UsageError, "Set teacher.hidden to 'none' and teacher.relations to fa"),
        ({}, {}, RecipeError, "name"),
    ):
        with pytest.raises(error, match=message):
            fit(model, ROWS, ROWS, output_dir=tmp_path, teacher=teacher, **SETTINGS, **settings)  # type: ignore[arg-type]
    rows = [{"text": row["text"], "label": row["topic"]} for row in ROWS]
    with pytest.raises(UsageError, match=r"\[teacher\] has tasks \(topic\), but the model has one\. Name one teacher"):
        fit(model.models["topic"], rows, rows, output_dir=tmp_path, teacher={"topic": model}, **SETTINGS)


RECIPE = """
[model]
name = "base"

[tasks.topic]
task = "text-classification"
columns = {label = "topic"}
max_length = 32

[tasks.slots]
task = "ner"
columns = {tags = "slots"}
max_length = 32
doc_stride = 6

[data]
train = "rows.jsonl"
validation = "rows.jsonl"

[optim]
epochs = 2
batch_size = 4

[run]
output_dir = "out"
logging_steps = 1

[teacher]
name = NAME
"""
SOME = '{topic = "several"}'


@pytest.mark.parametrize("name", slow_except(['"several"', '{topic = "topic"}', SOME], SOME))
def test_a_recipe_learns_from_folders(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").symlink_to(base)
    tags = sorted({tag for row in ROWS for tag in row["slots"]})  # as the training rows have them
    tasks = {"topic": {**TOPIC, "labels": sorted(TOPIC["labels"])}, "slots": {**SLOTS, "labels": tags}}
    teacher = load(base, 5, tasks)
    teacher.save_pretrained("several")
    teacher.models["topic"].save_pretrained("topic")
    rows = [{key: row[key] for key in ("text", "topic", "words", "slots")} for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("NAME", name), "utf-8")
    recipe = load_recipe(tmp_path / "recipe.toml")
    train(recipe, progress=False)
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    taught = {"slots", "topic"} if name == '"several"' else {"topic"}
    terms = {"slots/loss", "topic/loss", *(f"{task}/distillation" for task in taught)}
    assert {frozenset(record["terms"]) for record in records if record["event"] == "step"} == {frozenset(terms)}
    settings = json.loads((tmp_path / "out" / "run.json").read_text())["settings"]
    assert settings["teacher.name"] == ", ".join(
        f"{task}: {tmp_path / ('several' if 'several' in name else 'topic')}" for task in sorted(taught)
    )
    student = MultiTaskModel.from_pretrained("out")
    texts = [row["text"] for row in ROWS]
    labels = [[each["topic"].label for each in model.predict(texts)] for model in (student, teacher)]
    same = sum(label == other for label, other in zip(*labels, strict=True)) / len(texts)
    assert records[-1]["event"] == "agreement"
    assert records[-1]["agreement"].keys() == taught
    assert records[-1]["agreement"]["topic"] == pytest.approx(same)
    assert load_recipe(tmp_path / "out" / "recipe.toml") == recipe
    assert train(recipe, progress=False).reused
    with torch.no_grad():
        teacher.models["topic"].head.output.bias += 1
    teacher.save_pretrained("several")
    teacher.models["topic"].save_pretrained("topic")
    with pytest.raises(UsageError, match=r"teacher\.digest"):
        train(recipe, progress=False)
