"""The command line: what each command prints and writes, and that every failure is one short message and a code."""

import csv
import io
import json
import re
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

import bert_tasks
from bert_tasks import inference
from bert_tasks.cli import main
from bert_tasks.cli.models import rows_progress
from bert_tasks.cli.options import write_options
from bert_tasks.inference import evaluation, predictor
from bert_tasks.init import recipe as init_recipe
from bert_tasks.model.task_model import TaskModel
from bert_tasks.outputs.base import LossTerm
from bert_tasks.outputs.classes import Classes
from bert_tasks.tasks import PairClassification, SequenceClassification
from support.small_checkpoints import save_checkpoint
from support.small_tokenizers import LINES

COMMANDS = ("train", "evaluate", "predict", "check", "init", "inspect", "export")
LABELS = ("calm", "glad")
RECIPE = """\
task = "sequence-classification"

[model]
name = "{model}"

[settings]
max_length = 32
labels = ["calm", "glad"]

[data]
train = "train.csv"
validation = "dev.csv"

[optim]
learning_rate = 1e-3
epochs = 1
batch_size = 8

[run]
seed = 7
output_dir = "run"
"""


@dataclass(frozen=True, kw_only=True)
class Result:
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Calls the command line in this process, as the console script does."""

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["bert-tasks", *map(str, arguments)])
        monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        captured = capsys.readouterr()
        return Result(code=code, out=captured.out, err=captured.err)

    return call


def failure(result: Result, code: int) -> str:
    """The message of a failed command, which must be short and without traceback."""
    assert result.code == code, result
    assert result.out == ""
    assert 1 <= len(result.err.splitlines()) <= 10
    assert "Traceback" not in result.err
    return result.err


def last_line(text: str) -> str:
    return text.splitlines()[-1]


def write_csv(path: Path, rows: list[tuple[str, str]], names: tuple[str, str] = ("text", "label")) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([names, *rows])
    return path


@pytest.fixture(scope="module")
def base(unigram_tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("albert")
    save_checkpoint(folder, "albert", unigram_tokenizer)
    return folder


@pytest.fixture(scope="module")
def model(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    TaskModel.from_pretrained(base, task=SequenceClassification.of(labels=LABELS, max_length=32)).save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def pairs(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, labels = tmp_path_factory.mktemp("pairs"), ("contradiction", "entailment", "neutral")
    TaskModel.from_pretrained(base, task=PairClassification.of(labels=labels, max_length=32)).save_pretrained(folder)
    return folder


def write_recipe(folder: Path, base: Path) -> Path:
    """A recipe whose model learns to tell two kinds of lines apart, with its rows."""
    rows = [(line, LABELS[number % 2]) for number, line in enumerate(LINES)]
    write_csv(folder / "train.csv", rows[:14])
    write_csv(folder / "dev.csv", rows[14:])
    (folder / "recipe.toml").write_text(RECIPE.format(model=base))
    return folder / "recipe.toml"


@pytest.fixture
def recipe(base: Path, tmp_path: Path) -> Path:
    return write_recipe(tmp_path, base)


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, its rows and its finished run, which no test may change."""
    recipe = write_recipe(tmp_path_factory.mktemp("trained"), base)
    bert_tasks.train(recipe, progress=False)
    return recipe.parent


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_csv(tmp_path / "data.csv", [(line, LABELS[number % 2]) for number, line in enumerate(LINES)])


WRONG_DATA = {
    "init": ("init", "dve.csv", "--output", "made.toml"),
    "init-validation": ("init", "train.csv", "--output", "made.toml", "--validation", "dve.csv"),
    "check": ("check", "recipe.toml", "--set", "data.train=dve.csv"),
    "check-validation": ("check", "recipe.toml", "--set", "data.validation=dve.csv"),
    "train": ("train", "recipe.toml", "--set", "data.train=dve.csv", "--output-dir", "other"),
    "evaluate": ("evaluate", "run", "dve.csv"),
    "predict": ("predict", "run", "dve.csv", "--output", "out.jsonl"),
    "report": ("report", "run", "--data", "dve.csv"),
    "export": ("export", "run", "--to", "onnx", "--output", "graph", "--data", "dve.csv"),
}
WRONG_FOLDER = {
    "train": ("train", "recipe.toml", "--set", "model.name=./rnu", "--output-dir", "other"),
    "data.dir": ("check", "recipe.toml", "--set", "data.dir=rnu"),
    "evaluate": ("evaluate", "rnu", "dev.csv"),
    "evaluate-path": ("evaluate", "./rnu", "dev.csv"),
    "evaluate-inside": ("evaluate", "./rnu/model", "dev.csv"),
    "predict": ("predict", "rnu", "dev.csv", "--output", "out.jsonl"),
    "inspect": ("inspect", "rnu"),
    "export": ("export", "rnu", "--to", "onnx", "--output", "graph"),
    "serve": ("serve", "rnu"),
    "report": ("report", "rnu"),
    "push": ("push", "rnu", "org/name", "--dry-run"),
}


class TestNamesThatAreNotThere:
    """Wherever a file or a folder is named, a name that is not there brings up the one that was meant."""

    @pytest.fixture
    def folder(self, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A folder with a recipe, its rows and its run, in which nothing may change."""
        monkeypatch.chdir(trained)
        return trained

    @pytest.mark.parametrize("command", WRONG_DATA)
    def test_data(self, command: str, folder: Path, run: Run) -> None:
        message = failure(run(*WRONG_DATA[command]), 3)
        assert "dve.csv: no such file, did you mean 'dev.csv'?" in message
        assert not (folder / "made.toml").exists()

    @pytest.mark.parametrize("command", WRONG_FOLDER)
    def test_folders(self, command: str, folder: Path, run: Run) -> None:
        result = run(*WRONG_FOLDER[command])
        assert "did you mean 'run'?" in failure(result, result.code)
        assert result.code in (2, 3, 4)

    @pytest.mark.parametrize("command", ["check", "train"])
    def test_recipes(self, command: str, folder: Path, run: Run) -> None:
        message = failure(run(command, folder / "recpie.toml"), 2)
        assert "recpie.toml: no such file, did you mean 'recipe.toml'?" in message


class TestTrain:
    def test_trains_once(self, recipe: Path, run: Run) -> None:
        first = run("train", recipe, "--json")
        assert first.code == 0
        summary = json.loads(first.out)
        folder = recipe.parent / "run"
        assert summary["model"] == str(folder / "model")
        assert 0 <= summary["metrics"]["accuracy"] <= 1
        assert summary["best_step"] == 2
        assert {path.name for path in folder.iterdir()} == {
            "model",
            "metrics.jsonl",
            "metrics.json",
            "recipe.toml",
            "report.html",
            "run.json",
        }
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        second = run("train", recipe)
        assert second.code == 0
        assert "this run was already complete, so it was not trained again" in second.out
        assert f"model: {folder / 'model'}" in second.out
        assert "report:" not in second.out
        lines = second.out.splitlines()
        accuracy = f"{summary['metrics']['accuracy']:.4f}"
        assert lines[0] == f"accuracy {accuracy} (always predicting 'calm': 0.5000)"
        assert lines[-4:] == [
            "next:",
            f"  bert-tasks evaluate {folder} test.csv",
            f"  bert-tasks predict {folder} new.csv --output predictions.jsonl",
            f"  bert-tasks serve {folder}",
        ]
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
        assert "or --overwrite to replace the run" in failure(
            run("train", recipe, "--set", "optim.weight_decay=0.3"), 2
        )
        third = run("train", recipe, "--overwrite", "--quiet")
        assert third.code == 0
        assert not [line for line in third.err.splitlines() if not line.startswith("note: the best model predicts")]
        assert "already complete" not in third.out

    def test_next_commands_evaluate_the_test_rows_of_the_same_file(self, recipe: Path, run: Run) -> None:
        file = recipe.parent / "all.csv"
        with file.open("w", encoding="utf-8", newline="") as opened:
            writer = csv.writer(opened)
            writer.writerow(("text", "label", "part"))
            for number, line in enumerate(LINES):
                writer.writerow((line, LABELS[number % 2], "test" if number % 5 == 0 else "train"))
        text = re.sub(r"^(train|validation) = .*\n", "", recipe.read_text("utf-8"), flags=re.MULTILINE)
        recipe.write_text(text.replace("[data]", f'[data]\ntrain = "{file}"\nsplit_column = "part"'), encoding="utf-8")
        result = run("train", recipe, "--quiet")
        assert (
            result.out.splitlines()[-3] == f"  bert-tasks evaluate {recipe.parent / 'run'} {file} --split-column part"
        )

    def test_push_writes_the_card_again_with_what_is_stated(self, trained: Path, tmp_path: Path, run: Run) -> None:
        folder = shutil.copytree(trained / "run", tmp_path / "run")
        card = folder / "model" / "README.md"
        assert "license: mit" not in card.read_text("utf-8")
        assert run("push", folder, "me/x", "--dry-run", "--license", "mit").code == 0
        assert "license: mit" in card.read_text("utf-8")

    def test_dry_run_writes_nothing(self, recipe: Path, run: Run) -> None:
        before = sorted(recipe.parent.rglob("*"))
        result = run("train", recipe, "--dry-run", "--json")
        assert result.code == 0, result.err
        plan = json.loads(result.out)
        assert plan["steps"] == 2
        assert plan["parameters"] > 1000
        assert any(word in plan["example"] for word in ("the", "a"))
        assert sorted(recipe.parent.rglob("*")) == before
        text = run("train", recipe, "--dry-run").out
        assert "steps: 2" in text
        assert "the dry run wrote no files" in text

    def test_divergence(self, recipe: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = Classes.loss

        def broken(self: Classes, *arguments: Any) -> tuple[LossTerm]:
            (loss,) = whole(self, *arguments)
            return (replace(loss, total=loss.total * float("nan")),)

        monkeypatch.setattr(Classes, "loss", broken)
        message = failure(run("train", recipe, "--quiet"), 5)
        assert message.startswith("error: ")
        assert "step" in message


class TestSeeds:
    def test_one_run_for_each(self, recipe: Path, run: Run) -> None:
        result = run("train", recipe, "--seeds", "1,2", "--quiet")
        assert (result.code, result.err) == (0, "")
        lines = result.out.splitlines()
        assert lines[0].split() == ["seed", "accuracy", "best", "step"]
        assert [line.split()[0] for line in lines[1:3]] == ["1", "2"]
        assert f"runs: {recipe.parent / 'run'}" in lines
        output = run("train", recipe, "--set", "run.seeds=[1, 2]", "--json")
        summary = json.loads(output.out)
        assert summary.pop("report") == str(recipe.parent / "run" / "report.html")
        assert summary == json.loads((recipe.parent / "run" / "seeds.json").read_text())
        assert summary["seeds"] == [1, 2]
        assert summary["metrics"]["accuracy"]["runs"] == 2
        assert (recipe.parent / "run" / "seed-2" / "model").is_dir()

    def test_divergence_is_told_at_the_end(self, recipe: Path, run: Run) -> None:
        options = ("--set", "optim.learning_rate=1e30", "--set", "optim.epochs=3", "--quiet")
        result = run("train", recipe, "--seeds", "1,2", *options)
        assert result.code == 5
        assert result.err == ""
        assert "2 of 2 runs (seeds 1, 2) diverged" in result.out


class TestEvaluate:
    def test_prints_metrics(self, model: Path, data: Path, run: Run) -> None:
        result = run("evaluate", model, data, "--json")
        assert result.code == 0, result.err
        metrics = json.loads(result.out)
        assert metrics == inference.evaluate(model, data)
        lines = run("evaluate", model, data).out.splitlines()
        assert f"{metrics['accuracy']:.4f}" in next(line for line in lines if line.startswith("accuracy  "))

    def test_begins_with_the_interval_of_the_report(
        self, trained: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options = ("--data", trained / "dev.csv", "--output", tmp_path / "report.html", "--json")
        reported = json.loads(run("report", trained / "run", *options).out)
        accuracy = reported["data"]["results"]["estimates"]["accuracy"]
        interval = f"{accuracy['low']:.4f} to {accuracy['high']:.4f}"
        headline = f"accuracy {accuracy['value']:.4f} on 6 rows (95 % interval: {interval})"
        assert run("evaluate", trained / "run", trained / "dev.csv").out.splitlines()[0] == headline
        monkeypatch.setenv("FORCE_COLOR", "1")  # which makes a terminal of standard output
        monkeypatch.setenv("TERM", "xterm")
        shown = run("evaluate", trained / "run", trained / "dev.csv").out
        assert shown.startswith(f"\x1b[1m{headline}\x1b[0m\n")

    def test_digits_are_those_of_training(self, trained: Path, run: Run) -> None:
        evaluated = run("evaluate", trained / "run" / "model", trained / "dev.csv", "--json")
        recorded = json.loads((trained / "run" / "metrics.json").read_text("utf-8"))
        assert json.loads(evaluated.out) == recorded["metrics"]

    def test_what_is_not_a_number_is_null_in_json(self, base: Path, data: Path, tmp_path: Path, run: Run) -> None:
        task = SequenceClassification.of(problem_type="regression", max_length=32)
        TaskModel.from_pretrained(base, task=task).save_pretrained(tmp_path / "numbers")
        constant = write_csv(tmp_path / "constant.csv", [(line, "1.5") for line in LINES])
        result = run("evaluate", tmp_path / "numbers", constant, "--json")
        assert result.code == 0, result.err
        metrics = json.loads(result.out, parse_constant=pytest.fail)
        assert metrics["pearson"] is None
        assert metrics["loss"] > 0

    @pytest.mark.parametrize("option", ["text", "=review"])
    def test_a_column_that_is_no_pair(self, option: str, model: Path, data: Path, run: Run) -> None:
        message = failure(run("evaluate", model, data, "--column", option), 2)
        assert "expected NAME=COLUMN" in message


class TestPredict:
    def test_writes_every_row(self, model: Path, data: Path, tmp_path: Path, run: Run) -> None:
        result = run("predict", model, data, "--output", tmp_path / "answers.jsonl")
        assert result.code == 0, result.err
        answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
        labels = Counter(answer["label"] for answer in answers).most_common()
        counts = ", ".join(f"{label} {count} ({count / 20:.0%})" for label, count in labels)
        assert result.out == f"20 predictions: {tmp_path / 'answers.jsonl'}\nlabels: {counts}\n"
        assert run("predict", model, "--text", "x").err == "1 prediction\n"
        assert len(answers) == len(LINES)
        assert all(sum(answer["scores"].values()) == pytest.approx(1) for answer in answers)

    def test_dtype(self, model: Path, data: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []
        for module in (evaluation, predictor):  # None: the model itself
            monkeypatch.setattr(module, "logits_of", lambda model, dtype: asked.append(dtype))
        output = tmp_path / "answers.jsonl"
        assert run("predict", model, data, "--output", output, "--dtype", "int8").code == 0
        assert run("evaluate", model, data, "--dtype", "int8").code == 0
        assert run("evaluate", model, data).code == 0
        assert asked == ["int8", "int8", "float32"]
        assert "int4" in failure(run("predict", model, data, "--output", output, "--dtype", "int4"), 2)


ABOUT = ("--labels", "calm,glad,the weather", "--hypothesis", "This text is about {}.")
WRONG_LABELS: list[tuple[tuple[str, ...], int, str]] = [
    (("--hypothesis", "It is {}."), 2, "--hypothesis needs --labels"),
    (("--multi-label",), 2, "--multi-label needs --labels"),
    (("--labels", ""), 2, "--labels: there are no labels. Write them as 'sports,politics'."),
    (("--labels", "a\udcff"), 2, "--labels: "),
    ((*ABOUT, "--explain"), 2, "was not trained for has no explanations"),
    ((*ABOUT, "--text-pair", "b"), 2, "--labels and --text-pair exclude each other"),
]


class TestZeroShot:
    @pytest.mark.parametrize("options", [("--multi-label",), pytest.param((), marks=pytest.mark.slow)])
    def test_predicts_labels_of_the_command_line(
        self, pairs: Path, data: Path, options: tuple[str, ...], tmp_path: Path, run: Run
    ) -> None:
        names = ABOUT[1].split(",")
        model = TaskModel.from_pretrained(pairs).zero_shot(names, hypothesis=ABOUT[3], multi_label=bool(options))
        expected = [answer.to_json() for answer in model.predict(LINES)]
        result = run("predict", pairs, data, *ABOUT, *options, "--keep-columns", "none", "-o", tmp_path / "out.jsonl")
        assert result.code == 0, result.err
        answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert [list(answer) for answer in answers] == [list(answer) for answer in expected]
        assert [answer["label"] for answer in answers] == [answer["label"] for answer in expected]
        assert answers[3]["scores"] == pytest.approx(expected[3]["scores"], abs=1e-5)
        assert run("predict", pairs, "--text", LINES[3], *ABOUT, *options, "-o", tmp_path / "text.jsonl").code == 0
        answer = json.loads((tmp_path / "text.jsonl").read_text())
        assert answer["scores"] == pytest.approx(expected[3]["scores"], abs=1e-5)

    @pytest.mark.parametrize(("options", "code", "message"), WRONG_LABELS)
    def test_wrong_options(self, pairs: Path, options: tuple[str, ...], code: int, message: str, run: Run) -> None:
        assert message in failure(run("predict", pairs, "--text", "a", *options), code)

    def test_other_models(self, base: Path, model: Path, tmp_path: Path, run: Run) -> None:
        message = failure(run("predict", model, "--text", "a", *ABOUT), 4)
        assert "--labels: the model must be one of pair-classification, not of sequence-classification" in message
        TaskModel.from_pretrained(base, task=PairClassification.of(labels=("no", "yes"), max_length=9)).save_pretrained(
            tmp_path
        )
        message = failure(run("predict", tmp_path, "--text", "a", *ABOUT), 4)
        assert "--labels: the model needs a label that begins with 'entail'. Its labels are no, yes" in message


class TestCheckAndInspect:
    def test_check(self, recipe: Path, run: Run) -> None:
        result = run("check", recipe)
        assert result.code == 0, result.err
        assert result.out.endswith(f"{recipe}: OK, ready to train.\n")
        assert "calm" in result.out
        report = json.loads(run("check", recipe, "--json").out)
        assert isinstance(report, dict)
        assert not (recipe.parent / "run").exists()

    def test_inspect(self, model: Path, run: Run) -> None:
        result = run("inspect", model)
        assert result.code == 0, result.err
        assert "sequence-classification" in result.out
        assert len(result.out.splitlines()) < 25
        named = run("inspect", model, "--verbose").out
        loaded = json.loads(run("inspect", model, "--json").out)["report"]["loaded"]
        assert [key for key in loaded if f"  {key}\n" in result.out] == []
        assert [key for key in loaded if f"  {key}\n" not in named] == []
        inspection = json.loads(run("inspect", model, "--json").out)
        assert inspection["family"] == "albert"
        assert inspection["labels"] == list(LABELS)
        assert inspection["usable_length"] == 48


class TestInit:
    def test_writes_a_recipe_that_check_accepts(self, base: Path, data: Path, tmp_path: Path, run: Run) -> None:
        target = tmp_path / "made.toml"
        result = run("init", data, "--output", target, "--model", base)
        assert (result.code, result.err) == (0, "")
        assert "task: sequence-classification" in result.out
        assert result.out.splitlines()[-1] == f"  bert-tasks train {target}"
        assert run("check", target).code == 0
        assert "exists already" in failure(run("init", data, "--output", target), 2)

    def test_json_and_options(self, data: Path, tmp_path: Path, run: Run) -> None:
        rows = data.read_text().replace(",", ";")
        data.write_text(rows)
        options = ("--validation", data, "--format", "csv", "--delimiter", ";", "--encoding", "latin-1")
        result = run("init", data, *options, "--output", tmp_path / "made.toml", "--json")
        assert result.code == 0, result.err
        assert json.loads(result.out)["task"] == "sequence-classification"
        text = (tmp_path / "made.toml").read_text()
        for line in ('validation = "data.csv"', 'format = "csv"', 'delimiter = ";"', 'encoding = "latin-1"'):
            assert line in text.splitlines()


class TestTrainRows:
    @pytest.fixture
    def rows(self, base: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """reviews.csv in the current folder, with a small model as the default of init."""
        monkeypatch.chdir(data.parent)
        for name in ("EMBEDDED_MODEL", "USUAL_MODEL"):
            monkeypatch.setattr(init_recipe, name, str(base))
        return data.rename("reviews.csv")

    def test_writes_the_recipe_of_init_and_resumes(self, rows: Path, run: Run) -> None:
        command = ("train", rows, "--set", "optim.max_steps=2")
        result = run(*command)
        assert result.code == 0, result.err
        assert "task: sequence-classification" in result.err
        assert "model: runs/reviews/model" in result.out.splitlines()  # as a user would type it
        assert result.out.endswith("  bert-tasks serve runs/reviews\n")
        assert json.loads(run(*command, "--json").out)["model"] == str(Path("runs/reviews/model").absolute())
        assert Path("runs/reviews/model/config.json").is_file()
        assert run("init", rows, "--output", "runs/other.toml").code == 0
        lines = Path("runs/other.toml").read_text().replace("other.toml", "reviews.toml").splitlines()
        assert Path("runs/reviews.toml").read_text().splitlines() == [*lines[:-1], 'output_dir = "reviews"']
        again = run(*command)
        assert "already complete" in again.out
        assert again.err.startswith("note: runs/reviews.toml exists already and is used\n")

    def test_the_last_line_has_time_speed_best_epoch_and_the_most_frequent_label(self, rows: Path, run: Run) -> None:
        result = run("train", rows, "-o", "out/one", "--set", "optim.epochs=1")
        assert result.code == 0, result.err
        share = r"most frequent label '(calm|glad)' \([\d.]+%\)"
        assert re.fullmatch(rf"trained for \d+ s at [\d,]+ tokens/s, best epoch 1 of 1, {share}", last_line(result.err))
        assert Path("out/one.toml").is_file()

    def test_a_dry_run_writes_nothing(self, rows: Path, run: Run) -> None:
        before = sorted(Path().iterdir())
        result = run("train", rows, "--dry-run")
        assert (result.code, "runs/reviews, a new run" in result.out) == (0, True), result.err
        assert sorted(Path().iterdir()) == before

    def test_a_file_with_several_readings_is_not_trained(self, rows: Path, run: Run) -> None:
        lines = rows.read_text("utf-8").splitlines()
        more = [f"{line},{cell}" for line, cell in zip(lines, ["sentiment", *("ab" * len(lines))], strict=False)]
        rows.write_text("\n".join([more[0].replace("label", "topic"), *more[1:], ""]), "utf-8")
        message = failure(run("train", rows), 3)
        assert "there are several ways to read the columns, so nothing was trained. Most likely:" in message
        assert 'sequence-classification with text = "text", label = "sentiment"' in message
        assert '  label = "topic" (' in message
        assert "`bert-tasks init reviews.csv`, with options such as --label" in message
        assert not Path("runs").exists() or not list(Path("runs").iterdir())
        assert run("init", rows, "--text", "text", "--label", "topic", "-o", "runs/reviews.toml").code == 0
        assert run("train", rows, "--set", "optim.max_steps=1", "--quiet").code == 0

    def test_test_rows_are_evaluated_in_the_file_of_the_training_rows(self, rows: Path, run: Run) -> None:
        lines = rows.read_text("utf-8").splitlines()
        splits = ["split", *(["train", "train", "dev", "test"] * len(lines))]
        rows.write_text("".join(f"{line},{split}\n" for line, split in zip(lines, splits, strict=False)), "utf-8")
        result = run("train", rows, "--set", "optim.max_steps=1")
        assert result.code == 0, result.err
        assert f"{(len(lines) - 1) // 4} test rows (by the column 'split') left out of training" in result.err
        assert 'split_column = "split"' in Path("runs/reviews.toml").read_text("utf-8")
        counts = json.loads(run("check", "runs/reviews.toml", "--json").out)["splits"]
        assert sum(split["rows"] for split in counts) == len(lines) - 1 - (len(lines) - 1) // 4
        command = ("predict", "runs/reviews/model", rows, "--split-column", "split", "-o", "predicted.jsonl")
        assert run(*command).code == 0
        predicted = Path("predicted.jsonl").read_text("utf-8").splitlines()
        assert {json.loads(line)["split"] for line in predicted} == {"test"}
        assert run("evaluate", "runs/reviews/model", rows, "--split-column", "split").code == 0

    def test_wrong_files(self, rows: Path, run: Run) -> None:
        assert "did you mean 'reviews.csv'" in failure(run("train", "review.csv"), 3)
        write_csv(Path("numbers.csv"), [("1", "2"), ("3", "4")])
        assert "with `bert-tasks init`" in failure(run("train", "numbers.csv"), 3)
        assert run("train", rows, "--set", "optim.max_steps=1", "--quiet").code == 0
        message = failure(run("train", rows.rename("others.csv"), "-o", "runs/reviews", "--quiet"), 2)
        assert "reviews.csv, not on others.csv. Choose another --output-dir" in message


@pytest.mark.parametrize(
    ("command", "name", "hint"),
    [
        ("train", "per_device_train_batch_size", "Use optim.batch_size, which counts samples over all devices"),
        ("search", "optim.fp16", 'Use optim.mixed_precision="fp16"'),
        ("train", "run.load_best_model_at_end", "The model ends with the best weights"),
        ("train", "callbacks", "Known names are task"),
        ("predict", "max_seq_length", "Use the setting max_length"),
        ("evaluate", "num_train_epochs", "has no setting 'num_train_epochs'. Known names are "),
    ],
)
def test_names_of_transformers_are_answered_with_ours(
    command: str, name: str, hint: str, recipe: Path, model: Path, data: Path, run: Run
) -> None:
    arguments = (recipe,) if command in ("check", "train", "search") else (model, data)
    message = failure(run(command, *arguments, "--set", f"{name}=1"), 2)
    assert f"'{name.rpartition('.')[2]}'" in message
    assert hint in message


@pytest.mark.parametrize(
    ("command", "arguments", "hint"),
    [
        ("train", ("--epochs", "1"), "No such option: --epochs. Use --set optim.epochs=1."),
        ("train", ("--learning-rate=2e-5",), "No such option: --learning-rate. Use --set optim.learning_rate=2e-5."),
        ("train", ("--max-length",), "Use --set settings.max_length=VALUE."),
        ("train", ("--num_train_epochs", "1"), "Use --set optim.epochs."),
        ("train", ("--fp16",), 'Use --set optim.mixed_precision="fp16".'),
        ("check", ("--validation-share", "0.2"), "Use --set data.validation_share=0.2."),
        ("train", ("--overwrit",), "No such option: --overwrit (Possible options: --overwrite). See"),
        ("predict", ("--epochs", "1"), "No such option: --epochs (Possible options: --hypothesis). See"),
    ],
)
def test_keys_of_recipes_that_are_typed_as_options(
    command: str, arguments: tuple[str, ...], hint: str, recipe: Path, run: Run
) -> None:
    assert hint in failure(run(command, recipe, *arguments), 2)


class TestFailures:
    def test_recipe_typo(self, recipe: Path, run: Run) -> None:
        recipe.write_text(recipe.read_text().replace("learning_rate", "learning_rat"))
        line = recipe.read_text().splitlines().index("learning_rat = 1e-3") + 1
        message = failure(run("train", recipe), 2)
        assert f"{recipe}:{line}:" in message
        assert "learning_rate" in message

    def test_usage(self, run: Run, model: Path) -> None:
        # The program's name depends on how the tests are started.
        message = failure(run("trian"), 2)
        assert re.fullmatch(
            r"error: No such command 'trian'\. Did you mean 'train'\? See '.*bert-tasks --help'\.\n", message
        )
        assert "FILE" in failure(run("evaluate", model), 2)
        assert "--speed" in failure(run("evaluate", model, "--speed", "3"), 2)
        message = failure(run("evaluate", model, "--dtype", "fp8"), 2)
        assert message.startswith("error: Invalid value for '--dtype': 'fp8' is not one of 'float32', 'bf16', 'int8'. ")
        assert message.endswith("bert-tasks evaluate --help'.\n")

    def test_bad_rows(self, recipe: Path, model: Path, run: Run) -> None:
        source = recipe.parent / "train.csv"
        rows = source.read_text().splitlines()
        source.write_text("\n".join([*rows, "a line,glat", "another,"]) + "\n")
        for arguments in (("train", recipe), ("check", recipe), ("evaluate", model, source)):
            message = failure(run(*arguments), 3)
            assert f"train.csv:{len(rows) + 1}: unknown label in column 'label': 'glat'" in message
            assert "'glad'" in message
            assert f"train.csv:{len(rows) + 2}" in message

    def test_broken_models(self, model: Path, data: Path, tmp_path: Path, run: Run) -> None:
        assert "config.json" in failure(run("evaluate", tmp_path, data), 4)
        broken = tmp_path / "broken"
        broken.mkdir()
        for file in model.iterdir():
            (broken / file.name).write_bytes(file.read_bytes())
        weights = broken / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        output = tmp_path / "answers.csv"
        for arguments in (("evaluate", broken, data), ("inspect", broken)):
            assert "model.safetensors" in failure(run(*arguments), 4)
        assert "safetensors" in failure(run("predict", broken, data, "--output", output), 4)
        assert not output.exists()

    def test_internal_error(self, model: Path, data: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: Any, **__: Any) -> None:
            raise RuntimeError("wheel of https://ada:s3cret@host came off\nsecond line")

        monkeypatch.setattr(inference, "evaluate_data", broken)
        message = failure(run("evaluate", model, data), 1)
        assert message.startswith("error: internal error RuntimeError (wheel of https://***@host came off)\n")
        assert "--debug" in message
        for arguments in (
            ("--debug", "evaluate", model, data),
            ("evaluate", model, data, "--debug"),
        ):
            debugged = run(*arguments)
            assert debugged.code == 1
            assert "Traceback" in debugged.err
            assert "in broken" in debugged.err
            assert "s3cret" not in debugged.err

    def test_debug_keeps_the_exit_code(self, tmp_path: Path, run: Run) -> None:
        result = run("inspect", tmp_path, "--debug")
        assert result.code == 4
        assert "Traceback" in result.err
        assert result.err.splitlines()[-1].startswith("error: ")

    def test_offline_nothing_is_asked_of_the_network(
        self, recipe: Path, data: Path, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("a connection was opened")

        monkeypatch.setattr(socket.socket, "connect", refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        assert run("train", recipe, "--quiet").code == 0
        assert run("evaluate", recipe.parent / "run" / "model", data).code == 0
        message = failure(run("evaluate", "nobody/no-such-model", data), 4)
        assert "nobody/no-such-model" in message


class TestOutput:
    def test_version(self, run: Run) -> None:
        for arguments in (("--version",), ("--version", "env")):  # a command after it is not run
            assert run(*arguments).out == f"bert-tasks {version('bert-tasks')}\n"

    def test_help(self, run: Run) -> None:
        overview = run("--help")
        assert overview.code == 0
        for command in COMMANDS:
            assert f" {command} " in overview.out
            page = run(command, "--help")
            assert page.code == 0
            assert "Example: bert-tasks" in page.out
            assert run(command, "-h").out == page.out

    def test_the_package_has_a_version(self) -> None:
        assert bert_tasks.__version__ == version("bert-tasks")
        assert "__version__" in dir(bert_tasks)

    def test_other_processes_of_a_launch_are_silent(
        self, model: Path, data: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RANK", "1")
        output = tmp_path / "answers.csv"
        for arguments in (("--version",), ("inspect", model), ("predict", model, data, "--output", output)):
            result = run(*arguments)
            assert (result.code, result.out) == (0, "")


@pytest.mark.parametrize(
    ("text", "names"),
    [("all", "all"), ("none", "none"), ("a,b", ("a", "b")), ("a, b", ("a", "b")), (" a b ,c\t", ("a b", "c"))],
)
def test_names_of_columns_may_have_spaces_around_the_commas(text: str, names: object) -> None:
    assert write_options(keep_columns=text).keep_columns == names


@pytest.mark.parametrize("text", ["", " ", "a,", ",a", "a,,b"])
def test_an_empty_name_of_a_column_is_refused(text: str, run: Run) -> None:
    result = run("predict", "model", "--text", "x", "--keep-columns", text)
    assert result.code == 2
    assert "--keep-columns" in result.err


@pytest.mark.parametrize("timeout", ["nan", "inf", "1e10", "9" * 400])
def test_a_timeout_that_torch_cannot_represent_is_refused(timeout: str, run: Run) -> None:
    message = failure(run("predict", "model", "--text", "x", "--dist-timeout", timeout), 2)
    assert "--dist-timeout" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--abstain-below", "2"], "--abstain-below is 2.0, expected a number from 0 to 1"),
        (["--abstain-below", "much"], "--abstain-below"),
    ],
)
def test_wrong_limits_of_scores_are_refused(options: list[str], message: str, model: Path, run: Run) -> None:
    assert message in failure(run("predict", model, "--text", "x", *options), 2)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_predict_does_not_wait_for_rows_from_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("a fine film\n"))
    assert "nothing to predict. Pass a file" in failure(run("predict", "model"), 2)


def test_the_line_of_the_progress_is_cleared_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with rows_progress(quiet=False) as show:
        show(0, 12)
        show(12, 12)
    *_, shown, blank, last = terminal.getvalue().split("\r")
    assert shown.startswith("12 of 12 rows")
    assert (blank.strip(" "), last) == ("", "")
    assert len(blank) == len(shown)


@pytest.mark.parametrize(("total", "shown"), [(None, "1,010 rows"), (1010, "1,010 of 1,010 rows")])
def test_the_progress_of_prediction_shows_its_speed(
    total: int | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("time.monotonic", iter((1000.0, 1000.1, 1004.0)).__next__)
    with rows_progress(quiet=False) as show:
        for rows in (10, 20, 1010):
            show(rows, total)
    texts = [text.strip() for text in terminal.getvalue().split("\r") if text.strip()]
    assert texts == [shown.replace("1,010", "10", 1), f"{shown}, 250 rows/s"]
