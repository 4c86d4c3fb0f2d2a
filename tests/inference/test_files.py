"""Evaluation and prediction over files: metrics against scikit-learn, and output files that are whole or absent."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from scipy.stats import pearsonr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers import PreTrainedTokenizerBase

from bert_tasks import WriteOptions, predict_file
from bert_tasks.data.columns import Row
from bert_tasks.errors import DataError, UsageError
from bert_tasks.inference import evaluate, evaluation, predict
from bert_tasks.model.task_model import TaskModel
from bert_tasks.outputs.classes import Classes, ClassPrediction
from bert_tasks.outputs.files import FileFormat
from bert_tasks.outputs.prediction import Prediction
from bert_tasks.tasks import SequenceClassification, Task
from support.small_checkpoints import save_checkpoint
from support.small_tokenizers import LINES

LABELS = ("calm", "glad", "sad")
ODD_TEXTS = ('a "quoted", text', "two\nlines", " spaces ", "NA", "", "café ☕ 你好", "tab\there", "null", "a;b")
TEXTS = (*LINES, *ODD_TEXTS)
ROWS = tuple({"text": text, "label": LABELS[number % 3]} for number, text in enumerate(TEXTS))


@pytest.fixture(scope="module")
def base(unigram_tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("albert")
    save_checkpoint(folder, "albert", unigram_tokenizer, head="sequence", labels=LABELS, wide=True)
    return folder


def model_of(base: Path, **settings: Any) -> TaskModel:
    return TaskModel.from_pretrained(base, task=SequenceClassification.of(max_length=40, **settings))


@pytest.fixture(scope="module")
def single(base: Path) -> TaskModel:
    return model_of(base, labels=LABELS)


@pytest.fixture(scope="module")
def several(base: Path) -> TaskModel:
    return model_of(base, labels=LABELS, problem_type="multi_label_classification")


@pytest.fixture(scope="module")
def regression(base: Path) -> TaskModel:
    return model_of(base, problem_type="regression")


def write_csv(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def read_csv(path: Path, delimiter: str = ",") -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter=delimiter))


def contents(predictions: list[Prediction]) -> list[dict[str, Any]]:
    return [prediction.to_json() for prediction in predictions]


def cross_entropy(truth: list[str], answers: list[dict[str, Any]]) -> float:
    return -sum(math.log(answer["scores"][label]) for label, answer in zip(truth, answers, strict=True)) / len(truth)


class TestEvaluate:
    def test_metrics_are_those_of_sklearn(self, single: TaskModel, tmp_path: Path) -> None:
        metrics = evaluate(single, write_csv(tmp_path / "dev.csv", [dict(row) for row in ROWS]))
        answers = contents(single.predict(ROWS))
        truth, guesses = [row["label"] for row in ROWS], [answer["label"] for answer in answers]
        assert len(set(guesses)) > 1
        assert metrics["accuracy"] == pytest.approx(accuracy_score(truth, guesses))
        assert metrics["f1"] == pytest.approx(f1_score(truth, guesses, average="macro"))
        assert metrics["matthews_correlation"] == pytest.approx(matthews_corrcoef(truth, guesses))
        assert metrics["loss"] == pytest.approx(cross_entropy(truth, answers), rel=1e-5)

    def test_several_labels(self, several: TaskModel) -> None:
        truth = [[int(number >> bit & 1) for bit in range(3)] for number in range(len(TEXTS))]
        rows = [
            {"text": text, "labels": [label for label, is_set in zip(LABELS, row, strict=True) if is_set]}
            for text, row in zip(TEXTS, truth, strict=True)
        ]
        guesses = [
            [int(label in prediction["labels"]) for label in LABELS] for prediction in contents(several.predict(rows))
        ]
        metrics = evaluate(several, rows)
        assert metrics["f1"] == pytest.approx(f1_score(truth, guesses, average="macro", zero_division=0))
        assert metrics["accuracy"] == pytest.approx(accuracy_score(truth, guesses))

    def test_regression(self, regression: TaskModel) -> None:
        rows = [{"text": text, "label": float(len(text))} for text in TEXTS]
        scores = [prediction["score"] for prediction in contents(regression.predict(rows))]
        targets = [row["label"] for row in rows]
        metrics = evaluate(regression, rows)
        assert metrics["pearson"] == pytest.approx(pearsonr(targets, scores).statistic, rel=1e-5)
        squares = [(score - target) ** 2 for score, target in zip(scores, targets, strict=True)]
        assert metrics["loss"] == pytest.approx(sum(squares) / len(squares), rel=1e-5)

    def test_columns_folders_and_formats(self, single: TaskModel, tmp_path: Path) -> None:
        expected = evaluate(single, list(ROWS))
        renamed = write_csv(tmp_path / "dev.csv", [{"review": row["text"], "mood": row["label"]} for row in ROWS])
        single.save_pretrained(tmp_path / "model")
        columns = {"text": "review", "label": "mood"}
        assert evaluate(tmp_path / "model", renamed, columns=columns) == expected
        lines = tmp_path / "dev.data"
        lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        assert evaluate(str(tmp_path / "model"), lines, format="jsonl") == expected

    def test_windows_are_one_sample(self, base: Path) -> None:
        model = model_of(base, labels=LABELS, long_texts="windows", doc_stride=10)
        rows = [{"text": " ".join(LINES[:5]), "label": "sad"}, {"text": "a", "label": "calm"}]
        metrics = evaluate(model, rows)
        expected = cross_entropy(["sad", "calm"], contents(model.predict(rows)))
        assert metrics["loss"] == pytest.approx(expected, rel=1e-5)

    def test_rows_that_were_cut_are_counted(self, single: TaskModel, caplog: pytest.LogCaptureFixture) -> None:
        rows = [{"text": "sunny " * count, "label": "calm"} for count in (1, 90, 80)]
        evaluate(single, rows)
        assert "rows: 2 of 3 (66.7%) rows are longer than max_length = 40 tokens and were truncated" in caplog.text

    def test_data_that_cannot_be_evaluated(self, single: TaskModel, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="no rows"):
            evaluate(single, [])
        unlabelled = write_csv(tmp_path / "plain.csv", [{"text": "a"}])
        with pytest.raises(DataError, match="no column 'label'"):
            evaluate(single, unlabelled)
        wrong = write_csv(tmp_path / "wrong.csv", [{"text": "a", "label": "calm"}, {"text": "b", "label": "gladd"}])
        unknown = r"wrong\.csv:3: unknown label in column 'label': 'gladd'.*'glad'"
        with pytest.raises(DataError, match=unknown) as caught:
            evaluate(single, wrong)
        assert "skip" not in str(caught.value)  # it would not skip the row
        write_csv(wrong, [{"text": "a", "label": ""}, {"text": "b", "label": "gladd"}])
        both = r"2 problems in the data\..*, or pass on_error='skip' to leave such rows out"
        with pytest.raises(DataError, match=both):
            evaluate(single, wrong)


class TestPredict:
    def test_columns_of_other_problems(self, several: TaskModel, regression: TaskModel, tmp_path: Path) -> None:
        rows = [{"text": text} for text in TEXTS]
        predict_file(several, rows, tmp_path / "several.csv", writing=WriteOptions(keep_columns="none"))
        written = read_csv(tmp_path / "several.csv")
        assert list(written[0]) == ["label", "labels", "score", *(f"scores.{name}" for name in LABELS)]
        expected = [prediction["labels"] for prediction in contents(several.predict(rows))]
        assert [json.loads(row["labels"]) for row in written] == expected
        predict_file(regression, rows, tmp_path / "numbers.csv", writing=WriteOptions(keep_columns="none"))
        numbers = read_csv(tmp_path / "numbers.csv")
        assert [list(row) for row in numbers] == [["score"]] * len(rows)

    def test_targets_are_not_read(self, single: TaskModel, regression: TaskModel, tmp_path: Path) -> None:
        bare = [{"text": text} for text in TEXTS]
        odd = write_csv(tmp_path / "odd.csv", [{"text": text, "label": "unheard of"} for text in TEXTS])
        assert predict(single, odd) == predict(single, bare)
        assert predict(regression, odd, columns={"label": "label"}) == predict(regression, bare)
        assert predict(single, [{"text": text, "label": 1.5} for text in TEXTS]) == predict(single, bare)

    def test_a_failure_on_the_way_leaves_no_output(
        self, single: TaskModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("bert_tasks.model.prediction.BATCH_ROWS", 4)
        rows = [{"text": text} for text in TEXTS[:8]] + [{"text": None}]
        with pytest.raises(DataError, match=r"rows:9: .* in column 'text'"):
            predict_file(single, rows, tmp_path / "answers.csv")
        assert list(tmp_path.iterdir()) == []

    def test_an_output_of_ones_own_may_have_a_format_of_its_own(self, base: Path, tmp_path: Path) -> None:
        def lines(output: Classes, form: str, predictions: Sequence[ClassPrediction], rows: Sequence[Row]) -> Any:
            return {"": "".join(f"{prediction.label}\n" for prediction in predictions)}

        class ListedClasses(Classes):
            files: ClassVar[Mapping[str, FileFormat]] = {".labels": FileFormat(render=lines)}

        class Listed(SequenceClassification):
            outputs = (ListedClasses,)

        model = TaskModel.from_pretrained(base, task=Listed.of(labels=LABELS, max_length=40))
        result = predict_file(model, list(ROWS), tmp_path / "answers.labels")
        assert result.notes == ()
        assert (tmp_path / "answers.labels").read_text().split() == [answer.label for answer in model.predict(ROWS)]

    def test_no_rows(self, single: TaskModel, tmp_path: Path) -> None:
        for suffix in (".jsonl", ".csv", ".tsv"):
            output = tmp_path / f"none{suffix}"
            assert predict_file(single, [], output).rows == 0
            assert output.read_text() == ""

    def test_outputs_are_refused_before_any_work(self, tmp_path: Path) -> None:
        (tmp_path / "folder.csv").mkdir()
        extensions = ".jsonl, .csv, .tsv, .parquet, .conll, .conllu, .json or .txt"
        wrong = {
            "answers.xlsx": f"the output's extension must be {extensions}",
            "answers": "the output's extension must be",
            "missing/answers.csv": "the folder .*missing does not exist",
            "folder.csv": "is a folder, expected the name of a file",
        }
        for name, message in wrong.items():
            with pytest.raises(UsageError, match=message):
                predict_file(tmp_path / "no model", tmp_path / "no data.csv", tmp_path / name)


def test_small_batches_give_the_same_digits_to_the_last_places(
    single: TaskModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evaluate(single, list(ROWS))
    monkeypatch.setattr(evaluation, "batch_tokens", lambda model: 20)
    assert evaluate(single, list(ROWS)) == pytest.approx(whole, rel=1e-5)


def test_tokenizing_needs_a_tokenizer(single: TaskModel) -> None:
    task: Task = single.task
    bare = TaskModel(single.hf_config, task)
    with pytest.raises(UsageError, match="the model has no tokenizer"):
        evaluate(bare, list(ROWS))
