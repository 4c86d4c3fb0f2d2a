"""Scores of the rows with each value of a column, of the validation rows or of a file."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bert_tasks import evaluate
from bert_tasks.data.columns import RECORD
from bert_tasks.errors import UsageError
from bert_tasks.outputs.classes import ClassPrediction
from bert_tasks.report import make_report
from bert_tasks.report.collect import gather, with_file_columns
from bert_tasks.report.results import EMPTY, FEW_ROWS, MOST_VALUES, group_rows, slices_of
from bert_tasks.tasks import SequenceClassification
from support.report_runs import KINDS, trained, write_rows

TASK = SequenceClassification.of(labels=("a", "b"))


def classified(count):
    return [ClassPrediction(label="a", score=0.9, scores={"a": 0.9, "b": 0.1})] * count


def test_validation_rows_are_scored_as_evaluate_scores_them(run_of, tmp_path):
    report = make_report(run_of("classes"), tmp_path / "page.html", by=["label"])
    (results,) = report.results[0].values()
    (slices,) = results.slices
    assert sum(row.count for row in slices.slices) == len(KINDS["classes"].rows)
    assert slices.warning.startswith(f"fewer than {FEW_ROWS} rows for ")
    page = report.output.read_text("utf-8")
    assert "By label" in page
    assert "Fewer than 30 rows" in page
    for row in slices.slices:
        subset = [example for example in KINDS["classes"].rows if example["label"] == row.name]
        assert len(subset) == row.count
        expected = evaluate(run_of("classes") / "model", subset)
        for metric, score in row.scores.items():
            if metric in expected and score.value is not None:
                assert score.value == pytest.approx(expected[metric], abs=1e-4)  # other batches, other last digits


@settings(max_examples=25)
@example([str(number) for number in range(MOST_VALUES + 5)])
@given(st.lists(st.one_of(st.none(), st.text(max_size=3), st.integers(0, 60)), min_size=1, max_size=120))
def test_every_row_is_in_one_group(values):
    rows = [{RECORD: json.dumps({"c": value}), "text": "x", "line": n} for n, value in enumerate(values)]
    groups, others = group_rows("c", rows)
    assert sorted(index for indices in groups.values() for index in indices) == list(range(len(rows)))
    assert len(groups) <= MOST_VALUES
    distinct = len({EMPTY if value is None or value == "" else str(value) for value in values})
    assert len(groups) + (others - 1 if others else 0) == distinct
    assert (distinct > MOST_VALUES) == (others > 0)
    sizes = [len(indices) for indices in groups.values()][: MOST_VALUES - 1]
    assert sizes == sorted(sizes, reverse=True)


def test_rows_without_a_label_are_in_no_slice():
    rows = [{"text": "x", "label": None if index < 4 else "a", "line": index} for index in range(8)]
    (slices,) = slices_of(TASK, classified(8), rows, columns=["label"], names=["accuracy"])
    assert [(row.name, row.count, row.scores["accuracy"].value) for row in slices.slices] == [("a", 4, 1.0)]


def test_a_warning_names_small_slices_only():
    rows = [{"text": "x" if index < FEW_ROWS else "y", "label": "a"} for index in range(FEW_ROWS + 3)]

    def slices(count):
        (result,) = slices_of(TASK, classified(count), rows[:count], columns=["text"], names=["accuracy"])
        return result

    assert slices(FEW_ROWS + 3).warning.startswith(f"fewer than {FEW_ROWS} rows for y (3), so ")
    assert slices(FEW_ROWS + 3).lines()[-2] == f"text: {slices(FEW_ROWS + 3).warning}"
    assert slices(FEW_ROWS).warning == ""


def test_rows_that_change_while_the_report_is_made_are_not_mixed(checkpoint, tmp_path):
    case = KINDS["classes"]
    (run,) = gather([trained(tmp_path, checkpoint, case)])
    (again,) = with_file_columns(run).predicted
    assert [json.loads(row[RECORD])["text"] for row in again.rows] == [row["text"] for row in case.rows]
    first, *others = case.rows
    for rows in ([{**first, "text": "another"}, *others], [first | {"label": case.rows[-2]["label"]}, *others], others):
        write_rows(tmp_path / "dev.jsonl", rows)
        with pytest.raises(UsageError, match=r"dev\.jsonl has changed while the report was made"):
            with_file_columns(run)


def test_wrong_options(run_of, tmp_path):
    run, page = run_of("classes"), tmp_path / "page.html"
    with pytest.raises(UsageError, match="--by, --mistakes, --label-issues and --explain are for one run, not for 2"):
        make_report([run, run_of("labels")], page, by=["text"])
    (tmp_path / "run").mkdir()
    for name in ("run.json", "metrics.jsonl", "metrics.json"):
        (tmp_path / "run" / name).write_bytes((run / name).read_bytes())
    with pytest.raises(UsageError, match=r"--by needs the validation rows, or a file named with --data\. The run was"):
        make_report(tmp_path / "run", page, by=["text"])
    assert not page.exists()
