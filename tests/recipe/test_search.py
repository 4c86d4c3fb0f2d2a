"""The section [search]: what it accepts, what it refuses and how, and the recipe of a trial."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from bert_tasks.errors import RecipeError
from bert_tasks.recipe.json_schema import recipe_schema
from bert_tasks.recipe.schema import Recipe, load_recipe, resolved_toml, with_values
from bert_tasks.recipe.search import Space

BASE = """task = "sequence-classification"
[model]
name = "google-bert/bert-base-uncased"
[settings]
max_length = 64
[data]
train = "train.csv"
[search]
learning_rate = {low = 1e-5, high = 1e-4, log = true}
"""


def loaded(folder: Path, text: str = "") -> Recipe:
    (folder / "recipe.toml").write_text(BASE + text, "utf-8")
    return load_recipe(folder / "recipe.toml")


def space_of(recipe: Recipe) -> dict[str, Space]:
    assert recipe.search is not None
    return recipe.search.space


def test_keys_of_all_sections(tmp_path: Path) -> None:
    recipe = loaded(
        tmp_path,
        "optim.weight_decay = {low = 0, high = 1}\nepochs = {low = 1, high = 3}\n"
        'settings.max_length = {choices = [32, 64]}\nmodel.layers = {choices = ["every-other", [0, 1]]}\n',
    )
    space = space_of(recipe)
    assert list(space) == [
        *("optim.learning_rate", "optim.epochs", "optim.weight_decay", "settings.max_length", "model.layers")
    ]
    assert isinstance(space["optim.weight_decay"].low, float)  # a key that takes fractions takes those between, too
    assert isinstance(space["optim.epochs"].low, int)
    trial = with_values(recipe, {"optim.weight_decay": 0.25, "settings.max_length": 32, "model.layers": [0, 1]})
    assert (trial.optim.weight_decay, trial.settings["max_length"], trial.model.layers) == (0.25, 32, (0, 1))
    assert (trial.optim.epochs, trial.search) == (3, None)


def test_a_grid_takes_whole_numbers_one_by_one(tmp_path: Path) -> None:
    ranges = 'sampler = "grid"\nepochs = {low = 1, high = 2}\nweight_decay = {low = 0, high = 3}\n'
    text = BASE.replace("learning_rate = {low = 1e-5, high = 1e-4, log = true}\n", ranges)
    (tmp_path / "recipe.toml").write_text(text, "utf-8")
    recipe = load_recipe(tmp_path / "recipe.toml")
    assert recipe.search is not None
    assert recipe.search.grid_size() == 8
    (tmp_path / "resolved.toml").write_text(resolved_toml(recipe), "utf-8")
    assert load_recipe(tmp_path / "resolved.toml") == recipe
    assert list(recipe.search.space["optim.weight_decay"].values) == [0, 1, 2, 3]
    assert with_values(recipe, {"optim.weight_decay": 2}).optim.weight_decay == 2.0


def test_choices_have_the_type_of_their_key(tmp_path: Path) -> None:
    """Otherwise the recipe as it is would not be one of them."""
    recipe = loaded(tmp_path, "weight_decay = {choices = [0, 0.1]}\nepochs.choices = [1, 2]\n")
    choices = {key: space.choices for key, space in space_of(recipe).items()}
    assert repr(choices["optim.weight_decay"]) == "(0.0, 0.1)"
    assert repr(choices["optim.epochs"]) == "(1, 2)"


def test_folders_of_models_start_at_the_recipe(tmp_path: Path) -> None:
    for folder in ("small", "large"):
        (tmp_path / folder).mkdir()
    recipe = loaded(tmp_path, 'model.name.choices = ["small", "large", "google-bert/bert-base-uncased"]\n')
    places = (str(tmp_path / "small"), str(tmp_path / "large"), "google-bert/bert-base-uncased")
    assert space_of(recipe)["model.name"].choices == places


def test_the_resolved_recipe_holds_it(tmp_path: Path) -> None:
    recipe = loaded(
        tmp_path, 'weight_decay = {low = 0, high = 1}\noptim.lr_scheduler_type = {choices = ["linear", "wsd"]}\n'
    )
    (tmp_path / "resolved.toml").write_text(resolved_toml(recipe), "utf-8")
    assert load_recipe(tmp_path / "resolved.toml") == recipe
    validator = Draft202012Validator(recipe_schema())
    for text in ((tmp_path / "recipe.toml").read_text("utf-8"), resolved_toml(recipe)):
        assert [error.message for error in validator.iter_errors(tomllib.loads(text))] == []


def test_a_trial_of_batches_by_tokens(tmp_path: Path) -> None:
    """What the recipe does not state has its default in a trial, too: here there is none beside batch_tokens."""
    recipe = loaded(tmp_path, "[optim]\nmax_steps = 10\n[search.batch_tokens]\nchoices = [512, 1024]\n")
    assert with_values(recipe, {"optim.batch_tokens": 512}).optim.batch_size is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trails = 3", "unknown key 'trails' in [search], did you mean 'trials'?"),
        ("seed = {low = 1, high = 40}", "'seed' cannot be searched, because all trials have the same seed"),
        ("run.seed = {low = 1, high = 3}", "'run' cannot be searched"),
        ("max_length = {choices = [1, 2]}", "'max_length' is a key of [settings]. Write settings.max_length"),
        ("data.train = {choices = ['a', 'b']}", "'data' cannot be searched. Choose keys of [optim], [settings]"),
        ("optim.learnin_rate = {low = 1, high = 2}", "[search] unknown key 'learnin_rate' in [optim], did you mean"),
        ("settings.max_lenght = {low = 1, high = 2}", "[search] unknown key 'max_lenght' in [settings], did you mean"),
        ("optim.learning_rate = {low = 1, high = 2}", "learning_rate and optim.learning_rate are the same key"),
        ("batch_size = {low = 0, high = 4}", "[search] batch_size is 0, expected at least 1"),
        ("batch_size = {low = 1.5, high = 4}", "[search] batch_size is 1.5, expected an integer"),
        ("batch_size = {high = 4}", "[search.batch_size] needs {low = ..., high = ...}"),
        ("batch_size = 4", "batch_size is 4, expected a table"),
        ("batch_size = {low = 4, high = 4}", "low = 4 must be less than high = 4"),
        ("batch_size = {low = 'a', high = 4}", "batch_size.low is 'a', expected"),
        ("batch_size = {low = 1, high = 4, lgo = true}", "unknown key 'lgo' in [search.batch_size]"),
        ("batch_size = {low = 1, high = 2, choices = [4, 5]}", "choices is set, so remove low, high and log"),
        ("batch_size = {choices = [4]}", "choices needs at least two values"),
        ("batch_size = {choices = [4, 8, 4]}", "choices has 4 twice"),
        ("weight_decay = {choices = [0, 0.0]}", "[search.weight_decay] choices has 0.0 twice"),
        ("batch_size = {choices = [4, 'x']}", "[search] batch_size is 'x', expected an integer"),
        ("weight_decay = {low = 0.0, high = 1.0, log = true}", "low is 0.0, but log = true needs a number above 0"),
        ("trials = 0", "trials is 0, expected at least 1"),
        ("hours = 0", "hours is 0, expected more than 0"),
        ("seeds = 2", "unknown key 'seeds' in [search]"),
        ("sampler = 'bayes'", "sampler is 'bayes', expected 'tpe', 'random' or 'grid'"),
        ("sampler = 'grid'", "needs choices or whole numbers, but optim.learning_rate has neither"),
        ("pruner = true", "pruner is true, expected 'none', 'median' or 'halving'"),
    ],
)
def test_wrong_lines(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        loaded(tmp_path, line)
    location, _, text = str(error.value).partition(": ")
    assert message in text
    assert location in {f"{tmp_path / 'recipe.toml'}:{number}" for number in (8, 9, 10)}
    assert len(text.splitlines()) == 1


def test_an_unknown_key_is_one_problem_where_no_other_varies(tmp_path: Path) -> None:
    text = BASE.replace("learning_rate = {low = 1e-5, high = 1e-4, log = true}", "epoch = {low = 1, high = 2}")
    (tmp_path / "recipe.toml").write_text(text, "utf-8")
    with pytest.raises(RecipeError, match=r"unknown key 'epoch' in \[search\], did you mean 'epochs'\?$") as error:
        load_recipe(tmp_path / "recipe.toml")
    assert len(str(error.value).splitlines()) == 1


def test_a_search_needs_a_key_and_an_end_of_its_grid(tmp_path: Path) -> None:
    recipe = BASE.replace("learning_rate = {low = 1e-5, high = 1e-4, log = true}", "{}")
    for text, message in (
        ("trials = 3", "no key to vary"),
        ("sampler = 'grid'\nepochs = {low = 1, high = 9000}\nbatch_size.choices = [1, 2]", "18,000 combinations"),
        (f"sampler = 'grid'\nepochs = {{low = {-(2**63)}, high = {2**63 - 1}}}", "combinations, expected at most"),
    ):
        (tmp_path / "recipe.toml").write_text(recipe.format(text), "utf-8")
        with pytest.raises(RecipeError, match=message):
            load_recipe(tmp_path / "recipe.toml")


def test_values_that_do_not_go_together(tmp_path: Path) -> None:
    recipe = loaded(tmp_path)
    with pytest.raises(RecipeError, match=r"the recipe with optim.batch_tokens = 8: .*needs max_steps"):
        with_values(recipe, {"optim.batch_tokens": 8})


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["low", "high", "log", "choices", "step"]),
        st.sampled_from([None, True, 0, 1, 5, -3, 0.5, float("nan"), float("inf"), "a", [], [1, 2], [2, 2], [1, "x"]]),
    )
)
def test_a_space_is_refused_or_holds_its_own_values(section: dict[str, Any]) -> None:
    try:
        space = Space.model_validate(section)
    except ValidationError:
        return
    assert all(value in space for value in space.probes)
    assert space.size is None or space.size >= 2
    assert None not in space
