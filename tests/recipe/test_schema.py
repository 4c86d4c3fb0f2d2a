"""Recipes: what is read, how overrides and paths combine, and what a mistake is answered with."""

import dataclasses
import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import tomli_w
from jsonschema import Draft202012Validator

from bert_tasks.data.kinds import ClassKind
from bert_tasks.data.splits import DataSpec
from bert_tasks.errors import RecipeError
from bert_tasks.recipe.json_schema import recipe_schema
from bert_tasks.recipe.schema import (
    OptimSection,
    Recipe,
    RunSection,
    TeacherSection,
    build_heads,
    build_task,
    load_recipe,
    load_task_class,
    recipe_of_arguments,
    resolved_toml,
)
from bert_tasks.tasks import TASK_NAMES, TASKS, SequenceClassification, Task
from support.recipes import MINIMAL, refusal, write

REPOSITORY = Path(os.environ.get("BERT_TASKS_REPOSITORY", Path(__file__).parents[2]))
RECIPES = sorted((REPOSITORY / "recipes").rglob("*.toml"))


@dataclass(frozen=True, kw_only=True)
class TinyTask(SequenceClassification):
    """Adds settings of many types; it is built but never run."""

    depth: int
    shape: Literal["round", "square"] = "round"
    weights: Literal["balanced"] | tuple[float, ...] | None = None
    rate: float = 0.5
    windows: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth < 0:
            raise ValueError(f"depth is {self.depth}, expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class UnfinishedTask(Task):
    """Leaves the contract open."""

    name = "unfinished"


TINY = f"""\
task = "{__name__}:TinyTask"
[model]
name = "m"
[settings]
depth = 2
SETTINGS
[data]
train = "train.csv"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe's folder; the current folder is another one, ``here``, beside it."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "recipes").mkdir()
    return tmp_path / "recipes"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_published_recipes_parse_and_survive_the_round_trip(recipe: Path, tmp_path: Path) -> None:
    loaded = load_recipe(recipe)
    assert load_recipe(write(tmp_path, resolved_toml(loaded))) == loaded
    heads = build_heads(loaded)
    if "" in heads:
        takes_labels = any(isinstance(column.type, ClassKind) for column in heads[""].task.columns)
        build_task(loaded, ("a", "b") if takes_labels else ())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_files_named_by_published_recipes_exist(recipe: Path) -> None:
    data = load_recipe(recipe).data
    files = [] if data.train is None else [data.train, data.validation]
    assert [file for file in files if isinstance(file, str) and not Path(file).is_file()] == []


def test_overrides_are_toml_literals_or_strings(folder: Path) -> None:
    overrides = [
        "optim.learning_rate=1e-3",
        "optim.epochs = 7",
        "run.seed=1",
        "run.seed=2",
        "model.revision=2024-01-01",
        "optim.freeze_embeddings=true",
        "model.name=roberta-base",
        'data.columns."my text"=a=b',
        "settings.max_length=64",
    ]
    recipe = load_recipe(write(folder, MINIMAL), overrides=overrides)
    assert (recipe.optim.learning_rate, recipe.optim.epochs, recipe.run.seed) == (1e-3, 7, 2)
    assert (recipe.model.name, recipe.model.revision) == ("roberta-base", "2024-01-01")
    assert recipe.optim.freeze_embeddings is True
    assert recipe.data.columns == {"my text": "a=b"}
    assert recipe.settings == {"max_length": 64}


HUB = MINIMAL.replace(
    'train = "train.csv"',
    'dataset = "a/b"\nconfig = "c"\nrevision = "r"\nvalidation = "v"\nformat = "glue/sst2"',
)


def test_setting_the_source_of_data_unsets_the_other_sources_but_not_the_format(folder: Path) -> None:
    here = Path.cwd()
    file = write(folder, HUB)
    unchanged = DataSpec(dataset="a/b", config="c", revision="r", validation="v", format="glue/sst2")
    assert load_recipe(file).data == unchanged
    for changes, spec in {
        ("data.dir=x",): DataSpec(dir=str(here / "x"), format="glue/sst2"),
        ("data.dir=x", "data.validation=y"): DataSpec(dir=str(here / "x"), validation="y", format="glue/sst2"),
        ("data.validation=d.csv", "data.train=x"): DataSpec(
            train=str(here / "x"), validation=str(here / "d.csv"), format="glue/sst2"
        ),
        ("data.config=d",): dataclasses.replace(unchanged, config="d"),
    }.items():
        assert load_recipe(file, overrides=changes).data == spec


def test_another_file_of_the_same_kind_keeps_its_validation(folder: Path) -> None:
    file = write(folder, MINIMAL + 'validation = "dev.csv"\n')
    data = load_recipe(file, overrides=["data.train=shuffled.csv"]).data
    assert (data.train, data.validation) == (str(Path.cwd() / "shuffled.csv"), str(folder / "dev.csv"))
    data = load_recipe(file, overrides=["data.dataset=a/b", "data.config=c"]).data
    assert data == DataSpec(dataset="a/b", config="c")


def test_relative_paths_start_where_they_were_written(folder: Path) -> None:
    (folder / "weights").mkdir()
    text = MINIMAL.replace("google-bert/bert-base-uncased", "weights")
    text += '[data.validation]\na = "../a.csv"\n[run]\noutput_dir = "runs"\n'
    recipe = load_recipe(write(folder, text), overrides=["data.validation.b=b.csv"])
    assert recipe.data.train == str(folder / "train.csv")
    assert recipe.data.validation == {"a": str(folder.parent / "a.csv"), "b": str(Path.cwd() / "b.csv")}
    assert recipe.run.output_dir == str(folder / "runs")
    assert recipe.model.name == str(folder / "weights")
    assert load_recipe(folder / "recipe.toml", overrides=["model.name=weights"]).model.name == "weights"
    (Path.cwd() / "mine").mkdir()
    changed = load_recipe(folder / "recipe.toml", overrides=["model.name=mine"], output_dir="out")
    assert changed.model.name == str(Path.cwd() / "mine")
    assert changed.run.output_dir == str(Path.cwd() / "out")


@pytest.mark.parametrize(
    "override",
    [
        'settings.labels=["\udc80", "b"]',
        "data.train=\udc80.csv",
        'data.columns={"\udc80" = "text"}',
        "run.project=\ud800",
    ],
)
def test_texts_that_are_not_utf_8_are_refused(folder: Path, override: str) -> None:
    with pytest.raises(
        RecipeError, match=r"ud[c8][80]0': a text or path that is not UTF-8, which a recipe cannot hold"
    ):
        load_recipe(write(folder, MINIMAL), overrides=[override])


def test_a_folder_whose_name_is_not_utf_8_is_refused(folder: Path) -> None:
    path = write(folder, MINIMAL)
    with pytest.raises(RecipeError, match=r"udc80': a text or path that is not UTF-8"):
        load_recipe(path, output_dir=folder / "\udc80")
    home = folder / "\udc80"
    home.mkdir()
    with pytest.raises(RecipeError, match=r"udc80': a text or path that is not UTF-8"):
        load_recipe(path.rename(home / path.name))


@pytest.mark.parametrize("off", ["0", "0.0", '"none"'])
def test_clipping_can_be_switched_off_and_stays_off(folder: Path, off: str) -> None:
    recipe = load_recipe(write(folder, MINIMAL + f"[optim]\nmax_grad_norm = {off}\n"))
    assert recipe.optim.max_grad_norm is None
    assert load_recipe(write(folder, resolved_toml(recipe))) == recipe


def test_settings_are_checked_against_the_task(folder: Path) -> None:
    lines = 'shape = "square"\nweights = [1, 2.5]\nrate = 1\nwindows = true\nlabels = ["a", "b"]'
    recipe = load_recipe(write(folder, TINY.replace("SETTINGS", lines)))
    assert build_task(recipe) == TinyTask.of(
        depth=2, shape="square", weights=(1.0, 2.5), rate=1.0, windows=True, labels=("a", "b")
    )
    assert build_task(recipe, ("x", "y")).output.labels == ("x", "y")
    assert load_recipe(write(folder, resolved_toml(recipe))) == recipe


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("shpae = 1", "recipe.toml:6: unknown key 'shpae' in [settings], did you mean 'shape'?"),
        ("epochs = 1", "recipe.toml:6: 'epochs' belongs in [optim]"),
        (
            "thresholds = [0.5]",
            "recipe.toml:6: unknown key 'thresholds' in [settings]. Known names are labels, ",
        ),
        ('shape = "oval"', "recipe.toml:6: shape is 'oval', expected 'round' or 'square'"),
        ("weights = 3", "recipe.toml:6: weights is 3, expected 'balanced' or a list"),
        ('weights = [1, "x"]', "recipe.toml:6: weights[1] is 'x', expected a number without quotes"),
        ("rate = inf", "recipe.toml:6: rate is inf, expected a finite number"),
        ('labels = "a"', "recipe.toml:6: labels is 'a', expected a list"),
        ("windows = 1", "recipe.toml:6: windows is 1, expected true or false"),
    ],
)
def test_settings_that_do_not_fit_the_task(folder: Path, line: str, message: str) -> None:
    (error,) = refusal(folder, TINY.replace("SETTINGS", line))
    assert error.startswith(message)


def test_a_setting_without_a_default_is_required(folder: Path) -> None:
    assert refusal(folder, TINY.replace("depth = 2\nSETTINGS", "")) == [
        "recipe.toml:4: missing key 'depth' in [settings]"
    ]


def test_what_the_task_itself_refuses_is_a_recipe_error(folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"^--set settings.depth=-1: \[settings\] depth is -1, expected 0 or more$"):
        load_recipe(write(folder, TINY.replace("SETTINGS", "")), overrides=["settings.depth=-1"])


@pytest.mark.parametrize(
    ("task", "settings", "line"),
    [
        ("sequence-classification", 'max_length = 64\nlabels = ["a"]', 5),
        ("sequence-classification", 'long_texts = "windows"\nmax_length = 64\ndoc_stride = 64', 6),
        ("sequence-classification", "class_weights = [1.0, 2.0]", 4),
        ("sequence-classification", "\nmax_length = 1", 5),
        ("pair-classification", "\n\nmax_length = 4", 6),
        ("token-classification", 'labelling = "all"\ncrf = true', 5),
        ("token-classification", "\nfocal_gamma = -1", 5),
        ("multiple-choice", "\n\nfocal_gamma = -0.5", 6),
        ("span-extraction", "max_length = 64\nmax_query_length = 64", 4),
        ("span-extraction", "doc_stride = 1\nn_best_size = 0", 5),
    ],
)
def test_settings_that_a_task_refuses_have_their_line(folder: Path, task: str, settings: str, line: int) -> None:
    text = f'task = "{task}"\nmodel = {{name = "m"}}\n[settings]\n{settings}\n[data]\ntrain = "train.csv"\n'
    assert refusal(folder, text)[0].startswith(f"recipe.toml:{line}: [settings] ")


def test_every_setting_of_the_registered_tasks_can_be_stated(folder: Path) -> None:
    for name, task_class in TASKS.items():
        assert load_task_class(name) is task_class
        text = MINIMAL.replace("sequence-classification", name) + "[settings]\n"
        defaults = {name: setting.default for name, setting in task_class.stated_settings().items()}
        settings = {name: value for name, value in defaults.items() if value is not None}
        recipe = load_recipe(write(folder, text + tomli_w.dumps(settings)))
        assert recipe.settings == settings
        assert load_recipe(write(folder, resolved_toml(recipe))) == recipe


def test_the_names_of_the_hub_are_accepted(folder: Path) -> None:
    """One name is kept, so that a run may be resumed under the other."""
    validator = Draft202012Validator(recipe_schema())
    for name, task_class in TASK_NAMES.items():
        recipe = load_recipe(write(folder, MINIMAL.replace("sequence-classification", name)))
        assert recipe.task == task_class.name
        assert load_task_class(name) is task_class
        assert validator.is_valid({**tomllib.loads(MINIMAL), "task": name})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text-clasification", "did you mean 'text-classification'"),
        ("Question_Answering", "did you mean 'question-answering'"),
        ("sequence-clasification", "did you mean 'sequence-classification'?"),
        ("zzz", "unknown task 'zzz'. Known names are "),
        (
            "nowhere_at_all:Task",
            "cannot import task 'nowhere_at_all:Task' (No module named 'nowhere_at_all'). Is 'nowhere_at_all' on",
        ),
        (":Task", "expected 'module:Class'"),
        ("./task.py:Task", "expected 'module:Class'"),
        (f"{__name__}:TinyTsak", "has no 'TinyTsak', did you mean 'TinyTask'?"),
        (f"{__name__}:REPOSITORY", "is no subclass of Task"),
        (f"{__name__}:UnfinishedTask", "UnfinishedTask' does not define "),
    ],
)
def test_tasks_that_cannot_be_loaded(name: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_task_class(name)
    assert message in str(caught.value)


def test_a_task_module_with_a_syntax_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_task_module.py").write_text("class X(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RecipeError, match="cannot import task 'broken_task_module:X'"):
        load_task_class("broken_task_module:X")


def arguments(**settings: object) -> Recipe:
    return recipe_of_arguments(settings, teacher="t", output_dir="o")


def test_arguments_of_fit_become_sections() -> None:
    recipe = arguments(epochs=2, max_grad_norm=None, seed=7, teacher_weight=0.2, on_error="skip")
    assert recipe.optim == OptimSection(epochs=2, max_grad_norm=None)
    assert recipe.run == RunSection(seed=7, output_dir="o")
    assert recipe.teacher == TeacherSection(name="t", weight=0.2)
    assert recipe.data.on_error == "skip"
    with pytest.raises(RecipeError) as caught:
        arguments(batch_size=0, learning_rate=None, eval_steps=0, teacher_temperature=0)
    assert str(caught.value).splitlines() == [
        "learning_rate is None, expected a number",
        "batch_size is 0, expected at least 1",
        "eval_steps is 0, expected at least 1",
        "temperature is 0, expected more than 0.0",
    ]


def test_a_batch_has_a_number_of_samples_or_of_tokens(folder: Path) -> None:
    recipe = load_recipe(write(folder, MINIMAL + "[optim]\nbatch_tokens = 4096\nmax_steps = 100\n"))
    assert (recipe.optim.batch_size, recipe.optim.batch_tokens) == (None, 4096)
    assert load_recipe(write(folder, resolved_toml(recipe))) == recipe
    with pytest.raises(RecipeError, match=r"\[optim\] batch_tokens needs max_steps, because"):
        load_recipe(write(folder, MINIMAL + "[optim]\nbatch_tokens = 4096\n"))
    with pytest.raises(RecipeError, match=r"\[optim\] batch_tokens replaces batch_size\. Remove one"):
        load_recipe(write(folder, MINIMAL + "[optim]\nbatch_tokens = 4096\nmax_steps = 9\nbatch_size = 32\n"))
    with pytest.raises(RecipeError, match=r"^\[optim\] batch_size has no value\. Set it to a whole number"):
        arguments(batch_size=None)


@pytest.mark.slow
def test_importing_recipes_is_cheap() -> None:
    code = "import sys, bert_tasks.recipe.schema; print({'transformers', 'datasets', 'scipy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_adapters_are_stated_whole(folder: Path) -> None:
    text = '[optim]\nlora_rank = 8\nlora_alpha = 16\nlora_dropout = 0.05\nlora_targets = ["query", "value"]\n'
    recipe = load_recipe(write(folder, MINIMAL + text))
    assert (recipe.optim.lora_alpha, recipe.optim.lora_targets) == (16.0, ("query", "value"))
    assert load_recipe(write(folder, resolved_toml(recipe))) == recipe
    for option in ("lora_alpha = 16", "lora_dropout = 0.1", 'lora_targets = ["key"]'):
        with pytest.raises(RecipeError, match=rf"\[optim\] {option.split()[0]} needs lora_rank, such as lora_rank = 8"):
            load_recipe(write(folder, MINIMAL + f"[optim]\n{option}\n"))
    for option, said in {
        "freeze_layers = 2": r"the whole encoder already\. Remove freeze_layers",
        "freeze_embeddings = true": r"the whole encoder already\. Remove freeze_embeddings",
        'lora_targets = ["querry"]': r"lora_targets\[0\] is 'querry', expected 'query', 'key'",
        'lora_targets = ["key", "key"]': "key appears more than once",
        "lora_targets = []": "lora_targets",
        "lora_dropout = 1.0": "expected less than 1",
    }.items():
        with pytest.raises(RecipeError, match=said):
            load_recipe(write(folder, MINIMAL + f"[optim]\nlora_rank = 8\n{option}\n"))
    with pytest.raises(RecipeError, match="expected at least 1"):
        load_recipe(write(folder, MINIMAL + "[optim]\nlora_rank = 0\n"))
    new = MINIMAL.replace("[model]\n", '[model]\nconfig = { family = "bert" }\ntokenizer = "t"\n')
    lines = [line for line in new.splitlines() if not line.startswith("name")]
    with pytest.raises(RecipeError, match=r"optim\.lora_rank needs a trained encoder"):
        load_recipe(write(folder, "\n".join(lines) + "\n[optim]\nlora_rank = 8\n"))
