"""Recipes with several tasks on one encoder."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from bert_tasks import MultiTaskModel, load_recipe, train
from bert_tasks.errors import RecipeError
from bert_tasks.recipe.check import check
from bert_tasks.recipe.schema import resolved_toml
from bert_tasks.training.run import dry_run
from support.small_checkpoints import save_checkpoint
from support.task_examples import CLASSES, SENTENCES

RECIPE = """
[model]
name = "base"

[tasks.topic]
task = "text-classification"
columns = {label = "topic"}
max_length = 32

[tasks.slots]
task = "ner"
max_length = 32
doc_stride = 6
weight = 0.5

[data]
train = "rows.jsonl"
validation = "rows.jsonl"

[optim]
epochs = 1
batch_size = 4

[run]
output_dir = "out"
"""


@pytest.fixture
def recipe(tmp_path: Path, wordpiece_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_checkpoint(tmp_path / "base", "bert", wordpiece_tokenizer)
    pairs = zip(CLASSES, SENTENCES, strict=True)
    rows = [{**tagged, "text": row["text"], "topic": row["label"]} for row, tagged in pairs]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (tmp_path / "recipe.toml").write_text(RECIPE, "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "recipe.toml"


@pytest.mark.slow
def test_a_recipe_of_several_tasks_is_checked_trained_and_repeated(recipe: Path) -> None:
    loaded = load_recipe(recipe)
    assert [split.rows for split in check(loaded).splits] == [8, 8]
    assert dry_run(loaded).steps == 2
    result = train(loaded, progress=False)
    assert {"topic.accuracy", "slots.overall_f1", "mean_primary_metric"} <= result.metrics.keys()
    assert train(loaded, progress=False).reused
    assert load_recipe(recipe.parent / "out" / "recipe.toml") == loaded
    assert "[tasks.slots]" in resolved_toml(loaded)
    model = MultiTaskModel.from_pretrained("out/model")
    assert model.models["topic"].task.output.labels == ("high", "low", "mid")
    assert list(model.weights.values()) == [0.5, 1.0]  # the tasks are in the order of their names


def test_the_labels_of_each_task_are_counted(recipe: Path) -> None:
    rows = [
        {"words": ["good", "film"], "text": "good film", "tags": ["O", "B-X"], "topic": "high"},
        {"words": ["Good", "film"], "text": "Good film", "tags": ["O", "O"], "topic": "low"},
        {"words": ["bad", "film"], "text": "bad film", "tags": ["O", "B-X"]},
        *({"words": ["film", str(i)], "text": f"film {i}", "topic": "low"} for i in range(4)),
    ]
    new = [{**rows[0], "tags": ["O", "B-Y"]}, {"words": ["worse"], "text": "worse", "topic": "high"}]
    for name, content in (("rows.jsonl", rows), ("new.jsonl", new)):
        (recipe.parent / name).write_text("".join(json.dumps(row) + "\n" for row in content), "utf-8")
    loaded = load_recipe(recipe, overrides=["data.validation=new.jsonl"])
    report = check(loaded)
    lines = report.lines()
    del lines[1], lines[lines.index("validation: 2 rows") + 1]  # the lengths in tokens
    lines = [line.partition(" (line")[0] for line in lines]
    assert lines == [
        "train: 7 rows",
        "  1 duplicate text",
        "  slots: 3 rows with a label, 4 without",
        "    labels: B-X 2 (33%), O 4 (67%)",
        "    1 duplicate text",
        "    1 duplicate has a conflicting label",
        "  topic: 6 rows with a label, 1 without",
        "    labels: high 1 (17%), low 5 (83%)",
        "    1 duplicate text",
        "    1 duplicate has a conflicting label",
        "    imbalanced: 'low' has 5 rows, 'high' 1. Consider tasks.topic.class_weights = \"balanced\" and "
        'run.metric_for_best_model = "topic.macro_f1", which counts every label alike',
        "validation: 2 rows",
        "  1 text also in train",
        "  slots: 1 row with a label, 1 without",
        "    labels: B-X 0 (0%), O 1 (50%), B-Y 1 (50%)",
        "    1 text also in train",
        "    tags that no training row has: 'B-Y' (1 word)",
        "  topic: 2 rows with a label, 0 without",
        "    labels: high 2 (100%), low 0 (0%)",
        "    1 text also in train",
    ]
    train_json = report.to_json()["splits"][0]["tasks"]
    assert [(task["rows"], task["unlabelled"]) for task in train_json.values()] == [(3, 4), (6, 1)]
    assert dry_run(loaded).to_json()["data"] == report.to_json()


def test_the_figures_of_each_task_name_the_lines_of_the_file(recipe: Path) -> None:
    rows: list[dict[str, object]] = [
        {"words": ["good", "film"], "text": "good film", "tags": ["O", "B-X"], "topic": "high"},
        {"words": ["bad", "film"], "text": "bad film", "tags": ["O"], "topic": "high"},  # skipped: a tag is missing
        {"words": ["long", "film"], "text": "long film", "topic": "low"},  # no row of the slots
        {"words": ["Good", "film"], "text": "Good film", "tags": ["O", "O"], "topic": "low"},
        {"words": ["new", "film"], "text": "new film", "tags": ["O", "B-X"], "topic": "low"},
    ]
    (recipe.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    loaded = load_recipe(recipe, overrides=["data.on_error=skip"])
    train = check(loaded).splits[0]
    assert train.first_lines["duplicates"] == (4,)
    assert {name: task.first_lines["duplicates"] for name, task in train.tasks.items()} == {
        "slots": (4,),
        "topic": (4,),
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tasks.slots.weight=-1", "recipe.toml:10: tasks.slots: weight is -1, expected a number from 0"),
        ("tasks.slots.max_lenth=9", "--set tasks.slots.max_lenth=9: unknown key 'max_lenth' in [tasks.slots]"),
        ("tasks.slots.task=nerr", "[tasks.slots] unknown task 'nerr', did you mean 'ner'?"),
        ("tasks.topic.columns={lable='x'}", "tasks.topic.columns: the task reads text, label, not 'lable'"),
        ("tasks.topic.max_length='a'", "--set tasks.topic.max_length='a': max_length is 'a', expected an integer"),
        ("tasks.words.task=fill-mask", "tasks.words: masked-language-modeling cannot be one of several tasks"),
        ("tasks.words=3", "[tasks.words] unknown task 'None'"),
        ("task=ner", "--set task=ner: task and [tasks.NAME] exclude each other. Remove one of them"),
        ("settings.max_length=9", "settings and [tasks.NAME] exclude each other. Remove one of them"),
    ],
)
def test_wrong_keys_are_named(override: str, message: str, recipe: Path) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe, overrides=[override])
    assert message.removeprefix("--set ") in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_several_tasks_have_no_folds(recipe: Path) -> None:
    with pytest.raises(RecipeError, match=r"\[folds\] needs labels .*, but multi-task has none"):
        check(load_recipe(recipe, overrides=["folds.count=2"]))
