"""What a mistake in a recipe is answered with: all of them at once, each with its line or its override."""

from pathlib import Path

import pytest

from bert_tasks.errors import RecipeError
from bert_tasks.recipe.schema import load_recipe
from support.recipes import MINIMAL, refusal, write


def test_all_mistakes_are_named_at_once_with_their_lines(tmp_path: Path) -> None:
    text = """\
taks = "sequence-classification"
task = "sequence-classification"
[model]
nmae = "m"
batch_size = 8
[settings]
max_lenght = 128
long_texts = "cut"
\t[data]
train = "train.csv"
[optim]
epcohs = 3
learning_rate = "2e-5"
warmup_ratio = 1.5
freeze_embeddings = 1
mixed_precision = "fp8"
adam_epsilon = nan
[runs]
seed = 1
"""
    assert refusal(tmp_path, text) == [
        "recipe.toml:1: unknown key 'taks', did you mean 'task'?",
        "recipe.toml:4: unknown key 'nmae' in [model], did you mean 'name'?",
        "recipe.toml:5: 'batch_size' belongs in [optim]",
        "recipe.toml:7: unknown key 'max_lenght' in [settings], did you mean 'max_length'?",
        "recipe.toml:8: long_texts is 'cut', expected 'truncate' or 'windows'",
        "recipe.toml:12: unknown key 'epcohs' in [optim], did you mean 'epochs'?",
        "recipe.toml:13: learning_rate is '2e-5', expected a number without quotes",
        "recipe.toml:14: warmup_ratio is 1.5, expected at most 1.0",
        "recipe.toml:15: freeze_embeddings is 1, expected true or false",
        "recipe.toml:16: mixed_precision is 'fp8', expected 'no', 'fp16' or 'bf16'",
        "recipe.toml:17: adam_epsilon is nan, expected a finite number",
        "recipe.toml:18: unknown section [runs], did you mean 'run'?",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[model]\nname = 'm'\ntask = 't'\n[data]\ntrain = 'x'\n",
            "'task' belongs at the top, before the first section",
        ),
        ("task = 'sequence-classification'\n[data]\ntrain = 'x'\n", "recipe.toml: missing section [model]"),
        (
            MINIMAL + "[optim]\nzzz = 1\n",
            "unknown key 'zzz' in [optim]. Known names are optimizer, learning_rate, lr_scheduler_type, epochs,",
        ),
        (MINIMAL + "[optim]\nepochs = 0\n", "recipe.toml:7: epochs is 0, expected at least 1"),
        (MINIMAL + "[optim]\nepochs = 2.5\n", "epochs is 2.5, expected an integer"),
        (MINIMAL + "[optim]\nlearning_rate = true\n", "learning_rate is true, expected a number"),
        (MINIMAL + "[optim]\nmax_grad_norm = false\n", "max_grad_norm is false, expected a number"),
        (MINIMAL + "validation_share = true\n", "recipe.toml:6: validation_share is true, expected a number"),
        (MINIMAL + "validation = 5\n", "recipe.toml:6: validation is 5, expected a string or a table"),
        (MINIMAL + "validation = {a = 'x', b = 5}\n", "recipe.toml:6: validation.b is 5, expected a string"),
        (MINIMAL + "dir = 'folder'\n", "recipe.toml:4: [data] "),
        (MINIMAL + "encoding = 8\n[data.columns]\ntext = 1\n", "8: columns.text is 1, expected a string or a list"),
        (MINIMAL + "[run]\ntrackers = ['wandb', 3]\n", "recipe.toml:7: trackers[1] is 3, expected"),
        (
            MINIMAL.replace("sequence-", "sequense-"),
            "recipe.toml:1: unknown task 'sequense-classification', did you mean",
        ),
        ("optim = 3\n" + MINIMAL, "recipe.toml:1: optim is 3, expected a table"),
        (MINIMAL + "[settings]\nthresholds = [0.5]\n", "unknown key 'thresholds' in [settings]"),
    ],
)
def test_schema_mistakes(tmp_path: Path, text: str, message: str) -> None:
    assert message in "\n".join(refusal(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "task = 'x'\n[model]\nname = bert\n",
            "recipe.toml:3: no valid TOML (Invalid value). Strings need quotes",
        ),
        (
            "task = 'x'\ntask = 'y'\n",
            "recipe.toml:2: no valid TOML (Cannot overwrite a value). The key appears twice",
        ),
        ("task = 'x'\n[model]\n[model]\n", "recipe.toml:3: no valid TOML"),
        ("task = 'x'\nmodel = {", "recipe.toml: no valid TOML (Invalid initial character"),
    ],
)
def test_the_first_syntax_mistake_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (line,) = refusal(tmp_path, text)
    assert line.startswith(message)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL)
    with pytest.raises(RecipeError, match=r"recipee.toml: no such file, did you mean 'recipe.toml'\?"):
        load_recipe(tmp_path / "recipee.toml")
    with pytest.raises(RecipeError, match="There is no folder"):
        load_recipe(tmp_path / "nowhere" / "recipe.toml")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path)
    with pytest.raises(RecipeError, match=r"/dev/zero: more than 4,194,304 bytes\. Expected a recipe"):
        load_recipe("/dev/zero")
    (tmp_path / "latin.toml").write_bytes("# für\n".encode("latin-1"))
    with pytest.raises(RecipeError, match=r"latin.toml cannot be read \(.* position 3"):
        load_recipe(tmp_path / "latin.toml")
    (tmp_path / "bom.toml").write_text(MINIMAL.replace("\n", "\r\n"), encoding="utf-8-sig", newline="")
    assert load_recipe(tmp_path / "bom.toml") == load_recipe(tmp_path / "recipe.toml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.epcohs=3", "--set optim.epcohs=3: unknown key 'epcohs' in [optim], did you mean 'epochs'?"),
        ("epochs=3", "--set epochs=3: 'epochs' belongs in [optim]"),
        ("optim.epochs=many", "--set optim.epochs=many: epochs is 'many', expected an integer"),
        ("optim=3", "--set optim=3: optim is 3, expected a table"),
        ("optim.epochs", "--set optim.epochs: expected section.key=value, such as optim.epochs=3"),
        ("a b=3", "--set a b=3: expected section.key=value, such as optim.epochs=3"),
    ],
)
def test_mistakes_in_overrides_name_the_override(tmp_path: Path, override: str, message: str) -> None:
    assert refusal(tmp_path, MINIMAL + "[optim]\nepochs = 2\n", override) == [message]


def test_mistakes_in_overrides_come_after_those_of_the_file(tmp_path: Path) -> None:
    lines = refusal(tmp_path, MINIMAL + "[run]\nsede = 2\n", "optim.epochs=0")
    assert [line.partition(" ")[0] for line in lines] == ["recipe.toml:7:", "--set"]


def test_two_sources_in_overrides_are_refused(tmp_path: Path) -> None:
    (line,) = refusal(tmp_path, MINIMAL, "data.dir=a", "data.dataset=b")
    assert line.startswith("recipe.toml:4: [data] ")


MANY = 5000


@pytest.mark.parametrize(
    "text",
    [
        "max_length = " + "9" * MANY,
        "max_length = 0x" + "f" * MANY,
        f"max_length = {2**63}",
        f"max_length = {-(2**63) - 1}",
        "x = [1, 0x" + "f" * 20 + "]",
        "x = " + "[" * MANY + "]" * MANY,
        "x = " + "[" * 100 + "]" * 100,
        "x = " + "{a=" * MANY + "1" + "}" * MANY,
        ".".join("a" * 1500) + " = 1",
    ],
    ids=lambda text: text[:20],
)
def test_toml_beyond_what_is_read_is_refused(text: str, tmp_path: Path) -> None:
    """Python raises a ValueError or a RecursionError for some, and pydantic loses its way in others."""
    (line,) = refusal(tmp_path, f"{MINIMAL}[settings]\n{text}\n")
    assert line.startswith("recipe.toml: ")
    assert "64 bits, or tables and lists are nested" in line
    key, _, value = text.partition(" = ")
    (line,) = refusal(tmp_path, MINIMAL, f"{key}=1" if "." in key else f"run.seed={value}")
    assert "64 bits" in line or "section.key=value" in line
    assert len(line) < 3 * MANY


@pytest.mark.parametrize(
    ("key", "value"),
    [("epochs", 2**31), ("batch_size", 2**31), ("micro_batch_tokens", 10**12), ("freeze_layers", 2**63 - 1)],
)
def test_no_machine_does_so_much(key: str, value: int, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=rf"{key} is {value}, expected (at most|less than) \d+"):
        load_recipe(write(tmp_path, MINIMAL), overrides=[f"optim.{key}={value}"])
