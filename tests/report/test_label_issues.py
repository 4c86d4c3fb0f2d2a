"""Labels that are probably wrong: by the rule of the paper, for cross-validations only, in the page and in a file."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tasks import load_recipe
from bert_tasks.data.columns import FOLD_GROUP
from bert_tasks.data.reading import read
from bert_tasks.data.rows import Rows
from bert_tasks.errors import UsageError
from bert_tasks.experiments.folds import train_folds
from bert_tasks.report import make_report
from bert_tasks.report.build import write_rows
from bert_tasks.report.label_issues import ISSUE_COLUMNS, LabelIssue, find_issues, issue_cells
from bert_tasks.report.results import file_cells
from bert_tasks.tasks import SequenceClassification
from support.documents import blocks
from support.runs import write_recipe

pytest.importorskip("cleanlab")


@given(classes=st.integers(2, 4), count=st.integers(8, 50), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_rows_are_those_of_the_rule(classes: int, count: int, seed: int) -> None:
    """Northcutt et al. 2021, section 3: thresholds are the mean self-confidence of each class."""
    draw = np.random.default_rng(seed)
    labels, scores = draw.integers(0, classes, count), draw.dirichlet(np.ones(classes), count)
    labels[:classes] = range(classes)
    names = tuple("abcd"[:classes])
    pairs = [
        ({"line": n, "label": names[label]}, dict(zip(names, row.tolist(), strict=True)))
        for n, (label, row) in enumerate(zip(labels, scores, strict=True))
    ]
    issues = find_issues(pairs, "label", names)
    thresholds = np.array([scores[labels == label, label].mean() for label in range(classes)])
    confident = scores >= thresholds  # [rows, classes]; of several such classes the most probable one counts
    counted_as = np.where(confident.sum(axis=1) > 1, scores.argmax(axis=1), confident.argmax(axis=1))
    wrong = confident.any(axis=1) & (counted_as != labels) & (scores.argmax(axis=1) != labels)
    assert {issue.row["line"] for issue in issues} == set(np.flatnonzero(wrong).tolist())
    assert [issue.probability for issue in issues] == sorted(issue.probability for issue in issues)
    for issue in issues:
        assert issue.suggested == names[scores[issue.row["line"]].argmax()]
        assert issue.probability == pytest.approx(scores[issue.row["line"], names.index(issue.label)])


@pytest.fixture(scope="module")
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-validation of models that have learnt little, so that they find many labels improbable."""
    home = tmp_path_factory.mktemp("labels")
    recipe = load_recipe(write_recipe(home, checkpoint, rows=24, epochs=1), overrides=["folds.count=3"])
    train_folds(recipe, progress=False)
    return home / "run"


def test_they_are_listed_with_a_file_to_correct(folder: Path, tmp_path: Path) -> None:
    report = make_report(folder, tmp_path / "page.html", label_issues=tmp_path / "labels.csv")
    with (tmp_path / "labels.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert report.to_json()["label_issues"] == {"file": str(tmp_path / "labels.csv"), "rows": len(rows)}
    assert list(rows[0]) == ["line", "text", "label", "suggested", "probability", "suggested_probability"]
    predictions = [json.loads(line) for line in (folder / "out_of_fold.jsonl").read_text("utf-8").splitlines()]
    pairs = [
        ({"line": prediction["line"], "label": prediction["input.label"]}, prediction["scores"])
        for prediction in predictions
    ]
    expected = find_issues(pairs, "label", ("negative", "positive"))
    assert {row["line"] for row in rows} == {str(issue.row["line"]) for issue in expected}
    assert all(row["label"] != row["suggested"] for row in rows)
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "Labels that are probably wrong" in page
    assert f"<span>line {rows[0]['line']}</span>" in page
    assert "probably wrong" not in make_report(folder, tmp_path / "page.html").output.read_text("utf-8")
    make_report(folder, tmp_path / "page.html", label_issues=tmp_path / "labels.jsonl")
    lines = (tmp_path / "labels.jsonl").read_text("utf-8").splitlines()
    assert [str(json.loads(line)["line"]) for line in lines] == [row["line"] for row in rows]


@pytest.mark.parametrize(("accuracies", "weak"), [((0.9, 0.4, 0.9), "1 of 3 folds (fold 2)"), ((0.9, 0.9, 0.9), None)])
def test_folds_no_better_than_the_most_frequent_label_carry_a_caution(
    accuracies: tuple[float, ...], weak: str | None, folder: Path, tmp_path: Path
) -> None:
    changed = shutil.copytree(folder, tmp_path / "run")
    content = json.loads((changed / "folds.json").read_text("utf-8"))
    for fold, accuracy in zip(content["runs"], accuracies, strict=True):
        fold["metrics"]["accuracy"] = accuracy
    (changed / "folds.json").write_text(json.dumps(content), "utf-8")
    report = make_report(changed, tmp_path / "page.html", label_issues=tmp_path / "labels.csv")
    cautions = [line for line in report.lines() if "no better than 'negative' for every row (66.7%" in line]
    page = (tmp_path / "page.html").read_text("utf-8")
    assert ("no better than" in page) == (weak is not None)
    assert [weak in line for line in cautions] == ([] if weak is None else [True])
    assert "no better than" not in make_report(changed, tmp_path / "page.html").output.read_text("utf-8")


def test_only_cross_validations_have_them(run_of: Callable[[str], Path], folder: Path, tmp_path: Path) -> None:
    run = run_of("classes")
    with pytest.raises(UsageError, match=r"Name the folder of `bert-tasks train RECIPE --folds 5`"):
        make_report(run, tmp_path / "x.html", label_issues=tmp_path / "labels.csv")
    with pytest.raises(UsageError, match=r"expected a name that ends in \.csv, \.tsv or \.jsonl for the labels"):
        make_report(folder, label_issues=tmp_path / "labels.txt")
    with pytest.raises(UsageError, match="are for one run, not for 2"):
        make_report([folder, run], tmp_path / "x.html", label_issues=tmp_path / "labels.csv")


def test_the_library_is_named_where_it_is_missing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bert_tasks.environment.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"^cleanlab not installed, .* Run `pip install '\.\[labels\]'`"):
        make_report(folder, label_issues=tmp_path / "labels.csv")


TEXTS = (
    "plain",
    'a "quoted", text\nof three\nlines',
    "",
    "two\r\nlines",
    "a mark \u2028 that ends no line",
    "the last",
)
COLUMNS = SequenceClassification.of(labels=("old", "new")).columns


def corrected(table: Rows, path: Path) -> list[tuple[str, str]]:
    """Writes a file of label issues with another label for every second row; the texts and labels that should be."""
    changed = [(row["text"], "new" if number % 2 else row["label"]) for number, row in enumerate(table)]
    numbers = {"probability": 0.1, "suggested_probability": 0.9}
    issues = [
        issue_cells(LabelIssue(row=row, label=label, suggested="new", **numbers), file_cells(row))
        for row, (_, label) in zip(table, changed, strict=True)
    ]
    write_rows(path, list(reversed(issues)), last=ISSUE_COLUMNS)
    return changed


def test_the_corrections_of_the_page_reach_their_rows(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of the page, on texts of several lines between blank lines."""
    page = (repository / "docs" / "how_to" / "folds.md").read_text("utf-8")
    (block,) = (block for block in blocks(page) if block.language == "python" and "corrected.csv" in block.text)
    source = tmp_path / "recipes" / "data" / "feedback" / "train.csv"
    source.parent.mkdir(parents=True)
    (tmp_path / "runs").mkdir()
    with source.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label", "id"])
        for number, text in enumerate(TEXTS):
            writer.writerow([text, "old", f"{number}"])
            file.write("\n" * (number % 3))
    monkeypatch.chdir(tmp_path)
    expected = corrected(read(source, COLUMNS), tmp_path / "runs" / "labels.csv")
    assert [text for text, _ in expected] == list(TEXTS)
    exec(compile(block.text, "folds.md", "exec"), {})
    after = read("runs/corrected.csv", COLUMNS, passthrough="all")
    assert [(row["text"], row["label"]) for row in after] == expected
    assert [file_cells(row)["id"] for row in after] == ["0", "1", "2", "3", "4", "5"]


def test_the_group_of_a_fold_is_no_column_and_a_label_may_have_no_row() -> None:
    row = {"text": "x", "label": "a", FOLD_GROUP: "7", "line": 3}
    issue = LabelIssue(row=row, label="a", suggested="b", probability=0.1, suggested_probability=0.9)
    names = ["line", "text", "label", "suggested", "probability", "suggested_probability"]
    assert list(issue_cells(issue, file_cells(row))) == names
    pairs = [({"label": "a"}, {"a": 0.8, "b": 0.1, "c": 0.1}), ({"label": "c"}, {"a": 0.1, "b": 0.4, "c": 0.5})] * 4
    assert find_issues(pairs, "label", ("a", "b", "c")) == []
