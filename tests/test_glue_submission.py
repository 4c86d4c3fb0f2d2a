"""GLUE submissions: names, header, words or numbers."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from bert_tasks.data.formats import named_format
from bert_tasks.errors import DataError, UsageError
from bert_tasks.glue_submission import TEST_SETS, glue_submission
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import TASKS
from support.small_checkpoints import save_checkpoint

TESTS = {
    "CoLA/test.tsv": "index\tsentence\n0\tA ferry left.\n1\tLeft a ferry the.\n",
    "STS-B/test.tsv": "index\tsentence1\tsentence2\n0\tOne cup.\tA cup.\n1\tRain.\tA loud sound.\n2\tx\ty\n",
    "MNLI/test_matched.tsv": "index\tsentence1\tsentence2\n0\tIt rains.\tIt is wet.\n",
    "MNLI/test_mismatched.tsv": "index\tsentence1\tsentence2\n0\tIt rains.\tIt is dry.\n1\tNo.\tYes.\n",
    "AX/diagnostic.tsv": "index\tsentence1\tsentence2\n0\tAll cats sleep.\tSome cats sleep.\n",
}
RUNS = {"CoLA": "glue/cola", "STS-B": "glue/stsb", "MNLI": "glue/mnli"}
Run = Callable[[str], Path]


@pytest.fixture(scope="module")
def make_run(tmp_path_factory: pytest.TempPathFactory, wordpiece_tokenizer: PreTrainedTokenizerBase) -> Run:
    """A finished run on one of the tasks, with untrained weights."""
    folder = tmp_path_factory.mktemp("glue")
    for name, text in TESTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    save_checkpoint(folder / "base", "bert", wordpiece_tokenizer, wide=True)

    def make(name: str) -> Path:
        run = folder / "runs" / name
        if run.exists():
            return run
        labels = tuple(named_format(RUNS[name]).label_names.values())
        task = "sequence-classification" if name == "CoLA" else "pair-classification"
        settings = {"labels": labels} if labels else {"problem_type": "regression"}
        model = TaskModel.from_pretrained(folder / "base", task=TASKS[task].of(max_length=32, **settings))
        run.mkdir(parents=True)
        model.save_pretrained(run / "model")
        (run / "metrics.json").write_text("{}")
        (run / "recipe.toml").write_text(
            f'task = "{task}"\n[model]\nname = "unused"\n[data]\ndir = "{folder / name}"\nformat = "{RUNS[name]}"\n'
        )
        return run

    return make


def lines(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text("utf-8").splitlines()]


def test_files_have_the_form_of_the_server(make_run: Run, tmp_path: Path) -> None:
    rows: dict[str, int] = {}
    for name in RUNS:
        rows |= glue_submission(make_run(name), tmp_path)
    assert rows == {"CoLA.tsv": 2, "STS-B.tsv": 3, "MNLI-m.tsv": 1, "MNLI-mm.tsv": 2, "AX.tsv": 1}
    assert {path.name for path in tmp_path.iterdir()} == set(rows)
    files = {name: lines(tmp_path / name) for name in rows}
    for name, content in files.items():
        assert content[0] == ["index", "prediction"]
        assert [line[0] for line in content[1:]] == [str(index) for index in range(rows[name])]
    words = {line[1] for name in ("MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv") for line in files[name][1:]}
    assert words <= {"entailment", "neutral", "contradiction"}
    assert all(0.0 <= float(line[1]) <= 5.0 for line in files["STS-B.tsv"][1:])
    answers = TaskModel.from_pretrained(make_run("CoLA") / "model").predict(
        [{"text": "A ferry left."}, {"text": "Left a ferry the."}]
    )
    numbers = {"unacceptable": "0", "acceptable": "1"}
    assert [line[1] for line in files["CoLA.tsv"][1:]] == [numbers[answer.to_json()["label"]] for answer in answers]


def test_runs_that_are_rejected(make_run: Run, tmp_path: Path) -> None:
    run = make_run("CoLA")
    with pytest.raises(UsageError, match="holds no finished run"):
        glue_submission(tmp_path, tmp_path / "x")
    other = tmp_path / "other"
    other.mkdir()
    (other / "metrics.json").write_text("{}")
    (other / "recipe.toml").write_text((run / "recipe.toml").read_text().replace("glue/cola", "tsv"))
    with pytest.raises(UsageError, match="its data has the format 'tsv'"):
        glue_submission(other, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_test_rows_that_cannot_be_read_are_no_rows_to_skip(make_run: Run, tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "QQP"
    shutil.copytree(make_run("MNLI"), run)
    folder.mkdir()
    (folder / "test.tsv").write_text("id\tquestion1\tquestion2\n0\ta\tb\n1\tshort\n2\tc\td\n")
    (run / "recipe.toml").write_text(
        f'task = "pair-classification"\n[model]\nname = "unused"\n[data]\ndir = "{folder}"\nformat = "glue/qqp"\n'
    )
    with pytest.raises(DataError, match=r"every test row needs a prediction, but 1 of 3 rows skipped: too few cells"):
        glue_submission(run, tmp_path / "x")


def test_every_glue_format_with_test_rows_can_be_submitted() -> None:
    assert {test_set.format for sets in TEST_SETS.values() for test_set in sets.values()} == {
        f"glue/{name}" for name in ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "ax", "qnli", "rte", "wnli")
    }
