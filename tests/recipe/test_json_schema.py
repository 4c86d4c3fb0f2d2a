"""The JSON schema of recipes: the file is the code's, it takes every recipe, and it refuses what the code refuses."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pydantic
import pytest
from jsonschema import Draft202012Validator

from bert_tasks.errors import RecipeError
from bert_tasks.recipe.json_schema import recipe_schema, schema_text
from bert_tasks.recipe.schema import load_recipe, resolved_toml
from bert_tasks.tasks import TASKS

BASE = """
task = "sequence-classification"
[model]
name = "google-bert/bert-base-uncased"
[settings]
max_length = 64
[data]
train = "train.csv"
[optim]
epochs = 2
[run]
output_dir = "run"
"""


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = recipe_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def recipes(repository: Path) -> list[Path]:
    paths = sorted((repository / "recipes").rglob("*.toml"))
    assert len(paths) > 10
    return paths


@pytest.mark.skipif(pydantic.VERSION < "2.14", reason="older versions of pydantic describe some types otherwise")
def test_the_file_is_what_the_code_says(repository: Path) -> None:
    written = (repository / "recipes" / "recipe.schema.json").read_text("utf-8")
    assert written == schema_text(recipe_schema()), "bert-tasks init --schema > recipes/recipe.schema.json"


def test_every_recipe_fits(repository: Path, validator: Draft202012Validator) -> None:
    by_task: dict[str, Draft202012Validator] = {}
    for path in recipes(repository):
        document = tomllib.loads(path.read_text("utf-8"))
        assert [error.message for error in validator.iter_errors(document)] == [], path
        resolved = tomllib.loads(resolved_toml(load_recipe(path)))
        assert [error.message for error in validator.iter_errors(resolved)] == [], path
        if "tasks" in document:
            continue  # the schema of a single task does not describe several tasks
        task = document["task"]
        if task not in by_task:
            by_task[task] = Draft202012Validator(recipe_schema(task))
        assert [error.message for error in by_task[task].iter_errors(document)] == [], path


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("epochs = 2", "epcohs = 2"),
        ("epochs = 2", "epochs = 0"),
        ("epochs = 2", "epochs = 2.5"),
        ("epochs = 2", 'mixed_precision = "fp8"'),
        ("epochs = 2", "max_grad_norm = -1"),
        ("max_length = 64", "max_lenght = 64"),
        ("max_length = 64", 'max_length = "64"'),
        ("max_length = 64", 'long_texts = "cut"'),
        ("max_length = 64", "version_2_with_negative = true"),
        ("max_length = 64", "thresholds = [0.5]"),
        ('train = "train.csv"', ""),
        ('train = "train.csv"', 'train = "train.csv"\ndir = "."'),
        ('output_dir = "run"', 'trackers = ["tensorbord"]'),
        ('output_dir = "run"', "seeds = []"),
        ('"sequence-classification"', '"sentence-classification"'),
        ("[optim]", "[optimizer]"),
    ],
)
def test_it_refuses_what_the_code_refuses(old: str, new: str, validator: Draft202012Validator, tmp_path: Path) -> None:
    text = BASE.replace(old, new)
    (tmp_path / "recipe.toml").write_text(text, "utf-8")
    with pytest.raises(RecipeError):
        load_recipe(tmp_path / "recipe.toml")
    assert list(validator.iter_errors(tomllib.loads(text)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("epochs = 2", 'max_grad_norm = "none"'),
        ("epochs = 2", "max_grad_norm = 0"),
        ("epochs = 2", "learning_rate = 1"),
        ("max_length = 64", 'class_weights = "balanced"'),
        ("max_length = 64", "class_weights = [1, 2.5]\nlabels = ['a', 'b']"),
        ('train = "train.csv"', 'train = "t.csv"\n[data.validation]\na = "a.csv"'),
        ('output_dir = "run"', 'trackers = ["tensorboard", "wandb"]\nproject = "p"'),
    ],
)
def test_it_takes_what_the_code_takes(old: str, new: str, validator: Draft202012Validator, tmp_path: Path) -> None:
    text = BASE.replace(old, new)
    (tmp_path / "recipe.toml").write_text(text, "utf-8")
    load_recipe(tmp_path / "recipe.toml")
    assert [error.message for error in validator.iter_errors(tomllib.loads(text))] == []


def test_an_own_task(validator: Draft202012Validator) -> None:
    document = tomllib.loads(BASE.replace("sequence-classification", "my_package.tasks:Mine"))
    document["settings"] = {"anything": 1}
    assert list(validator.iter_errors(document)) == []
    faulty = recipe_schema("support.faulty_task:FaultyTask")["properties"]["settings"]
    assert "max_length" in faulty["properties"]
    with pytest.raises(RecipeError, match="did you mean 'pair-classification'"):
        recipe_schema("pair-clasification")


def test_settings_are_described() -> None:
    definitions: dict[str, Any] = recipe_schema()["$defs"]
    for name in TASKS:
        assert definitions[f"settings of {name}"]["additionalProperties"] is False
    of_spans = definitions["settings of span-extraction"]["properties"]
    assert "OVERLAP" in of_spans["doc_stride"]["description"]
    assert "null" not in json.dumps(definitions)
