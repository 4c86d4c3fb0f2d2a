"""Owns recipe files for tests of what is read from them, and the lines that a mistake in one is answered with."""

import os
from pathlib import Path

import pytest

from bert_tasks.errors import RecipeError
from bert_tasks.recipe.schema import load_recipe

MINIMAL = """\
task = "sequence-classification"
[model]
name = "google-bert/bert-base-uncased"
[data]
train = "train.csv"
"""


def write(folder: Path, text: str) -> Path:
    """The file of a recipe in a folder."""
    file = folder / "recipe.toml"
    file.write_text(text, encoding="utf-8")
    return file


def refusal(folder: Path, text: str, *overrides: str) -> list[str]:
    """The lines of the error that a recipe in a folder ends with, without the folder in front."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(folder, text), overrides=overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{folder}{os.sep}", "").splitlines()
