"""GLUE submissions: names, header, words or numbers, and one zip over several runs."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from bert_tasks.data.formats import named_format
from bert_tasks.errors import DataError, UsageError
from bert_tasks.glue_submission import FILES, TEST_SETS, glue_submission
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
        kind = "sequence-classification" if name == "CoLA" else "pair-classification"
        settings = {"labels": labels} if labels else {"problem_type": "regression"}
        model = TaskModel.from_pretrained(folder / "base", task=TASKS[kind](max_length=32, **settings))
        run.mkdir(parents=True)
        model.save_pretrained(run / "model")
        (run / "metrics.json").write_text("{}")
        (run / "recipe.toml").write_text(
            f'task = "{kind}"\n[model]\nname = "unused"\n[data]\ndir = "{folder / name}"\nformat = "{RUNS[name]}"\n'
        )
        return run

    return make


def contents(path: Path) -> dict[str, list[list[str]]]:
    with zipfile.ZipFile(path) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    return {name: [line.split("\t") for line in text.splitlines()] for name, text in texts.items()}


def test_one_zip_holds_the_runs_in_the_form_of_the_server(make_run: Run, tmp_path: Path) -> None:
    done = glue_submission([make_run(name) for name in RUNS], tmp_path / "all.zip")
    found = contents(tmp_path / "all.zip")
    assert done.rows == {"CoLA.tsv": 2, "STS-B.tsv": 3, "MNLI-m.tsv": 1, "MNLI-mm.tsv": 2, "AX.tsv": 1}
    assert set(found) == set(done.rows)
    for name, lines in found.items():
        assert lines[0] == ["index", "prediction"]
        assert [line[0] for line in lines[1:]] == [str(index) for index in range(done.rows[name])]
    words = {line[1] for name in ("MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv") for line in found[name][1:]}
    assert words <= {"entailment", "neutral", "contradiction"}
    assert {line[1] for line in found["CoLA.tsv"][1:]} <= {"0", "1"}
    assert all(0.0 <= float(line[1]) <= 5.0 for line in found["STS-B.tsv"][1:])
    assert set(done.missing) == set(FILES) - set(found)
    assert len(FILES) == 11
    assert "missing: SST-2.tsv" in "\n".join(done.lines())


def test_predictions_are_the_models(make_run: Run, tmp_path: Path) -> None:
    run = make_run("CoLA")
    glue_submission([run], tmp_path / "one.zip")
    answers = TaskModel.from_pretrained(run / "model").predict(
        [{"text": "A ferry left."}, {"text": "Left a ferry the."}]
    )
    numbers = {"unacceptable": "0", "acceptable": "1"}
    expected = [numbers[json.loads(json.dumps(answer.to_json()))["label"]] for answer in answers]
    assert [line[1] for line in contents(tmp_path / "one.zip")["CoLA.tsv"][1:]] == expected


def test_the_same_runs_give_the_same_bytes(make_run: Run, tmp_path: Path) -> None:
    for name in ("a.zip", "b.zip"):
        glue_submission([make_run("STS-B")], tmp_path / name)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_what_cannot_be_submitted(make_run: Run, tmp_path: Path) -> None:
    run = make_run("CoLA")
    with pytest.raises(UsageError, match=r"CoLA already predicts CoLA.tsv; give one run per task"):
        glue_submission([run, run], tmp_path / "x.zip")
    with pytest.raises(UsageError, match="holds no finished run"):
        glue_submission([tmp_path], tmp_path / "x.zip")
    with pytest.raises(UsageError, match=r"ends in .zip"):
        glue_submission([run], tmp_path / "x.tsv")
    other = tmp_path / "other"
    other.mkdir()
    (other / "metrics.json").write_text("{}")
    (other / "recipe.toml").write_text((run / "recipe.toml").read_text().replace("glue/cola", "tsv"))
    with pytest.raises(UsageError, match="its data has the format 'tsv'"):
        glue_submission([other], tmp_path / "x.zip")
    assert not (tmp_path / "x.zip").exists()


def test_a_second_run_on_mnli_predicts_the_diagnostic_set_alone(make_run: Run, tmp_path: Path) -> None:
    """The recipes mnli.toml and ax.toml both train on MNLI; its folder may be called as the download script does."""
    first, second = make_run("MNLI"), tmp_path / "ax"
    shutil.copytree(first, second)
    shutil.copytree(first.parents[1] / "MNLI", tmp_path / "MNLI")
    (tmp_path / "diagnostic").mkdir()
    (tmp_path / "diagnostic" / "diagnostic.tsv").write_text(TESTS["AX/diagnostic.tsv"] + "1\tNo.\tYes.\n")
    recipe = second / "recipe.toml"
    recipe.write_text(recipe.read_text().replace(str(first.parents[1] / "MNLI"), str(tmp_path / "MNLI")))
    done = glue_submission([first, second], tmp_path / "x.zip")
    assert done.rows == {"MNLI-m.tsv": 1, "MNLI-mm.tsv": 2, "AX.tsv": 2}
    with pytest.raises(UsageError, match=r"MNLI already predicts MNLI-m.tsv"):
        glue_submission([first, second, second], tmp_path / "y.zip")


def test_test_rows_that_cannot_be_read_are_no_rows_to_skip(make_run: Run, tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "QQP"
    shutil.copytree(make_run("MNLI"), run)
    folder.mkdir()
    (folder / "test.tsv").write_text("id\tquestion1\tquestion2\n0\ta\tb\n1\tshort\n2\tc\td\n")
    (run / "recipe.toml").write_text(
        f'task = "pair-classification"\n[model]\nname = "unused"\n[data]\ndir = "{folder}"\nformat = "glue/qqp"\n'
    )
    with pytest.raises(DataError, match=r"every test row needs a prediction, but 1 of 3 rows has too few cells"):
        glue_submission([run], tmp_path / "x.zip")


def test_every_glue_format_with_test_rows_can_be_submitted() -> None:
    assert {test_set.format for sets in TEST_SETS.values() for test_set in sets.values()} == {
        f"glue/{name}" for name in ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "ax", "qnli", "rte", "wnli")
    }
