"""``check``: the model of a recipe without its weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_tasks.errors import CheckpointError
from bert_tasks.recipe.check import check, model_without_weights, prepare
from bert_tasks.recipe.schema import Recipe, load_recipe
from bert_tasks.training.run import build_trainer

ROWS = [{"text": f"the {number}. text", "label": "ab"[number % 2]} for number in range(20)]
NEW = '{family = "bert", hidden_size = 16, num_attention_heads = 2, num_hidden_layers = 1, intermediate_size = 16}'


def recipe_for(folder: Path, model: str, task: str = "sequence-classification") -> Recipe:
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, ROWS)), "utf-8")
    path = folder / "recipe.toml"
    path.write_text(f'task = "{task}"\ndata.train = "{rows}"\n[model]\n{model}\n', "utf-8")
    return load_recipe(path)


def changed_model(model: Path, folder: Path, **fields: Any) -> Path:
    """Copies the configuration and the tokenizer of a model, with other fields and without its weights."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | fields), "utf-8")
    return folder


def test_weights_are_neither_read_nor_drawn(embedded_model: Path, tmp_path: Path) -> None:
    named = recipe_for(tmp_path, f'name = "{changed_model(embedded_model, tmp_path / "model")}"')
    report = check(named)
    assert [split.rows for split in report.splits] == [18, 2]
    new = recipe_for(tmp_path, f'config = {NEW}\ntokenizer = "{embedded_model}"')
    assert check(new) == report
    state = torch.get_rng_state()
    for recipe in (named, new):
        model = model_without_weights(recipe.model, prepare(recipe).heads)
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_cannot_be_built_is_reported_as_in_training(embedded_model: Path, tmp_path: Path) -> None:
    model = changed_model(embedded_model, tmp_path / "model", tie_word_embeddings=False)
    shutil.copy(embedded_model / "model.safetensors", model)
    recipe = recipe_for(tmp_path, f'name = "{model}"', task="masked-language-modeling")
    with pytest.raises(CheckpointError, match="tie_word_embeddings = false is not supported") as checked:
        check(recipe)
    with pytest.raises(CheckpointError) as trained:
        build_trainer(prepare(recipe))
    assert str(checked.value) == str(trained.value)
