"""Recipes with several tasks on one encoder."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from bert_tasks import MultiTaskModel, load_recipe, train
from bert_tasks.errors import RecipeError, UsageError
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
    assert model.models["topic"].task.labels == ("high", "low", "mid")
    assert model.task.weights == [0.5, 1.0]  # the tasks are in the order of their names


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tasks.slots.weight=-1", "recipe.toml:10: tasks.slots: weight is -1, expected a number from 0"),
        ("tasks.slots.max_lenth=9", "--set tasks.slots.max_lenth=9: unknown key 'max_lenth' in [tasks.slots]"),
        ("tasks.slots.task=nerr", "[tasks.slots]: unknown task 'nerr', did you mean 'ner'?"),
        ("tasks.topic.columns={lable='x'}", "tasks.topic: columns: the task reads text, label, not 'lable'"),
        ("tasks.topic.max_length='a'", "--set tasks.topic.max_length='a': max_length = 'a': expected an integer"),
        ("tasks.words.task=fill-mask", "tasks.words: masked-language-modeling cannot be one of several tasks"),
        ("tasks.words=3", "[tasks.words]: unknown task 'None'"),
        ("task=ner", "--set task=ner: task and [tasks.NAME] exclude each other: remove one of them"),
        ("settings.max_length=9", "settings and [tasks.NAME] exclude each other: remove one of them"),
    ],
)
def test_wrong_keys_are_named(override: str, message: str, recipe: Path) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe, overrides=[override])
    assert message.removeprefix("--set ") in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_several_tasks_have_no_teacher(recipe: Path) -> None:
    recipe.write_text(RECIPE + '\n[teacher]\nname = "base"\n', "utf-8")
    with pytest.raises(UsageError, match=r"\[teacher\]: a model of several tasks has no teacher"):
        train(load_recipe(recipe), progress=False)


def test_several_tasks_have_no_folds(recipe: Path) -> None:
    with pytest.raises(RecipeError, match=r"\[folds\]: multi-task has no labels"):
        check(load_recipe(recipe, overrides=["folds.count=2"]))
