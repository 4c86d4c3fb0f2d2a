"""Owns recipe files for tests of what is read from them, and the lines that a mistake in one is answered with."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from bert_tasks.errors import RecipeError
from bert_tasks.recipe.schema import Recipe, load_recipe
from support.training_runs import make_rows

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


def write_csv(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    """A table of texts and labels."""
    path.write_text("\n".join(["text,label", *(f"{row['text']},{row['label']}" for row in rows)]) + "\n", "utf-8")


def write_with_data(
    folder: Path, checkpoint: object, *, optim: str, run: str, rows: int = 20, dev: int = 8, sections: str = ""
) -> Path:
    """A recipe whose run goes to ``folder/out``, and small tables for it."""
    write_csv(folder / "train.csv", make_rows(rows))
    write_csv(folder / "dev.csv", make_rows(dev, seed=1))
    return write(
        folder,
        f'task = "sequence-classification"\n[model]\nname = "{checkpoint}"\n[settings]\nmax_length = 40\n'
        '[data]\ntrain = "train.csv"\nvalidation = "dev.csv"\n'
        f'[optim]\n{optim}\nlearning_rate = 1e-3\n[run]\noutput_dir = "out"\n{run}\n{sections}\n',
    )


def recipe(folder: Path, *overrides: str) -> Recipe:
    return load_recipe(folder / "recipe.toml", overrides=overrides)


def refusal(folder: Path, text: str, *overrides: str) -> list[str]:
    """The lines of the error that a recipe in a folder ends with, without the folder in front."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(folder, text), overrides=overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{folder}{os.sep}", "").splitlines()
