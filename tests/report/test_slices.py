"""Scores of parts of the rows: by a column, by length or by confidence, of the validation rows or of a file."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from bert_tasks import evaluate
from bert_tasks.cli.app import app
from bert_tasks.data.columns import PASSTHROUGH
from bert_tasks.errors import UsageError
from bert_tasks.report import make_report
from bert_tasks.report.collect import gather, with_file_columns
from bert_tasks.report.results import (
    CONFIDENCE,
    FEW_ROWS,
    NUMBER_GROUPS,
    WORDS,
    SliceOptions,
    row_length,
    slices_by_confidence,
    slices_by_length,
    slices_of,
)
from bert_tasks.report.statistics import Estimate
from bert_tasks.tasks import (
    MultipleChoice,
    PairClassification,
    SequenceClassification,
    SpanExtraction,
    TokenClassification,
)
from bert_tasks.tasks.multiple_choice import ChoicePrediction
from bert_tasks.tasks.sequence_classification.task import SequencePrediction
from bert_tasks.tasks.token_classification.task import TokenPrediction
from support.report_runs import KINDS, kinds, trained, write_rows

TEXT = SequenceClassification(labels=("a", "b")).columns


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("name", kinds("labels", "numbers", "pairs", "choices"))
def test_validation_rows_by_length_are_scored_as_evaluate_scores_them(run_of, tmp_path, name):
    report = make_report(run_of(name), tmp_path / "page.html", by_length=True)
    (results,) = report.results[0].values()
    (slices,) = results.slices
    assert slices.column == WORDS
    assert sum(one.count for one in slices.slices) == len(KINDS[name].rows)
    assert slices.warning.startswith(f"scores of fewer than {FEW_ROWS} rows")
    page = report.output.read_text("utf-8")
    assert "By words" in page
    assert "fewer than 30 rows" in page
    columns = report.runs[0].task.columns
    for one in slices.slices if name != "masks" else ():  # where a part of the rows has other masks
        low, _, high = one.name.partition(" to ")
        bounds = int(low), int(high if high else low)
        part = [row for row in KINDS[name].rows if bounds[0] <= row_length(row, columns) <= bounds[1]]
        assert len(part) == one.count
        expected = evaluate(run_of(name) / "model", part)
        for metric, score in one.scores.items():
            if metric in expected and score.value is not None:
                assert score.value == pytest.approx(expected[metric], abs=1e-4)  # other batches, other last digits


@given(st.lists(st.integers(0, 40), min_size=1, max_size=80))
def test_every_row_is_in_one_group_of_lengths(lengths):
    seen = []

    def score(places):
        seen.append([lengths[place] for place in places])
        return {"n": Estimate(value=float(len(places)))}

    rows = [{"text": "x " * length} for length in lengths]
    found = slices_by_length(rows, TEXT, score, ["n"])
    assert sorted(length for group in seen for length in group) == sorted(lengths)
    assert 1 <= len(found.slices) == len(seen) <= NUMBER_GROUPS
    assert all(max(first) < min(second) for first, second in pairwise(seen))
    assert [one.count for one in found.slices] == [one.scores["n"].value for one in found.slices]
    if len(set(lengths)) == len(lengths) >= NUMBER_GROUPS:  # the groups are equal, as far as they can be
        assert max(map(len, seen)) - min(map(len, seen)) <= 1
    assert [one.name for one in found.slices] == [
        f"{min(group)}" if min(group) == max(group) else f"{min(group)} to {max(group)}" for group in seen
    ]


def confidence_of(prediction):
    """The probability of what is predicted, from the JSON form of a prediction."""
    if "tags" in prediction:
        return min(prediction["scores"])
    if "labels" in prediction:
        chosen = prediction["labels"]
        return min(p if name in chosen else 1 - p for name, p in prediction["scores"].items())
    return prediction["score"]


@pytest.mark.parametrize(
    "name",
    [
        "classes",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("labels", "pairs", "tags", "spans", "choices")),
    ],
)
def test_validation_rows_by_confidence_are_scored_as_evaluate_scores_them(run_of, tmp_path, name):
    report = make_report(run_of(name), tmp_path / "page.html", by_confidence=True)
    ((results,),) = (each.values() for each in report.results)
    (slices,) = results.slices
    assert slices.column == CONFIDENCE
    assert sum(one.count for one in slices.slices) == len(KINDS[name].rows)
    assert "without" not in slices.note  # the model of a single run is not one of a fold
    assert slices.note in report.lines()
    assert "By confidence" in (page := report.output.read_text("utf-8"))
    assert f"C{slices.note[1:]}." in page.replace("&#39;", "'")
    known = [
        round(confidence_of(json.loads(json.dumps(one.to_json()))), 3)
        for one in report.runs[0].predicted[0].predictions
    ]
    for one in slices.slices:
        low, _, high = one.name.partition(" to ")
        bounds = float(low), float(high if high else low)
        part = [row for row, value in zip(KINDS[name].rows, known, strict=True) if bounds[0] <= value <= bounds[1]]
        assert len(part) == one.count
        expected = evaluate(run_of(name) / "model", part)
        for metric, score in one.scores.items():
            if metric in expected and score.value is not None:
                assert score.value == pytest.approx(expected[metric], abs=1e-4)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in ("numbers", "masks")])
def test_predictions_without_a_probability_have_no_confidence(run_of, tmp_path, name):
    with pytest.raises(
        UsageError, match=r"^--by-confidence: these predictions of .* have no probability of their own$"
    ):
        make_report(run_of(name), tmp_path / "page.html", by_confidence=True)
    assert not (tmp_path / "page.html").exists()


def classified(score):
    return SequencePrediction(label="a", score=score, scores={"a": score, "b": 1 - score})


@given(st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.5, 0.99951, 0.99949, 1.0])), min_size=1, max_size=80))
def test_every_row_is_in_one_group_of_confidences(scores):
    seen = []

    def score(places):
        seen.append([scores[place] for place in places])
        return {"n": Estimate(value=float(len(places)))}

    task = SequenceClassification(labels=("a", "b"))
    found = slices_by_confidence(task, [*map(classified, scores)], score, ["n"], out_of_fold=True)
    assert sorted(one for group in seen for one in group) == sorted(scores)
    assert 1 <= len(found.slices) == len(seen) <= NUMBER_GROUPS
    assert all(max(first) < min(second) for first, second in pairwise(seen))
    names = [one.name for one in found.slices]
    assert len({*names}) == len(names)
    assert names == [
        f"{min(group):.3f}" if f"{min(group):.3f}" == f"{max(group):.3f}" else f"{min(group):.3f} to {max(group):.3f}"
        for group in seen
    ]
    assert found.note.endswith("; the model of a row was trained without it")


def test_rows_without_a_label_are_in_no_slice():
    task = SequenceClassification(labels=("a", "b"))
    rows = [{"text": "x " * (1 + place), "label": None if place < 4 else "a", "line": place} for place in range(8)]
    predictions = [classified(0.1 * (1 + place)) for place in range(8)]
    options = SliceOptions(columns=("label",), length=True, confidence=True)
    found = slices_of(task, predictions, rows, options=options, names=["accuracy"])
    assert [[(one.name, one.count, one.scores["accuracy"].value) for one in each.slices] for each in found] == [
        [("a", 4, 1.0)],
        [("5", 1, 1.0), ("6", 1, 1.0), ("7", 1, 1.0), ("8", 1, 1.0)],
        [("0.500", 1, 1.0), ("0.600", 1, 1.0), ("0.700", 1, 1.0), ("0.800", 1, 1.0)],
    ]


def test_the_confidence_of_each_kind_of_prediction():
    several = SequenceClassification(labels=("a", "b", "c"), problem_type="multi_label_classification")
    sets = SequencePrediction(label="a", score=0.9, scores={"a": 0.9, "b": 0.35, "c": 0.2}, labels=("a", "b"))
    assert several.confidence(sets) == 0.35  # chosen, because its threshold is below
    assert several.confidence(replace(sets, labels=("a",))) == 0.65
    assert several.confidence(replace(sets, labels=())) == pytest.approx(0.1)
    words = TokenPrediction(words=("a", "b"), tags=("O", "O"), scores=(0.9, 0.6), entities=())
    tagger = TokenClassification(labels=("O", "B-X"))
    assert tagger.confidence(words) == 0.6
    assert tagger.confidence(replace(words, words=(), tags=(), scores=())) == 1.0
    choice = ChoicePrediction(label=1, answer="x", score=0.7, scores=(0.3, 0.7))
    assert MultipleChoice().confidence(choice) == 0.7
    number = SequencePrediction(label=None, score=3.5, scores={})
    assert SequenceClassification(problem_type="regression").confidence(number) is None


def test_the_length_is_that_of_what_the_task_reads():
    for task, row, length in (
        (SequenceClassification(labels=("a", "b")), {"text": "It's 3.5 o'clock.", "label": "a"}, 5),
        (SequenceClassification(labels=("a", "b")), {"text": "日本語"}, 3),
        (PairClassification(labels=("a", "b")), {"text": "one two", "text_pair": "three"}, 3),
        (TokenClassification(labels=("O", "B-X")), {"words": ["a.b", "c"], "text": "a.b c", "tags": ["O", "O"]}, 2),
        (SpanExtraction(), {"id": "a b c", "question": "who", "context": "he did", "answers": {"text": ["he"]}}, 3),
        (MultipleChoice(), {"context": "a b", "choices": ["c", "d e"], "label": 1}, 5),
    ):
        assert row_length(row, task.columns) == length


def test_a_warning_names_small_slices_only():
    rows = [{"text": "x " * (1 if place < FEW_ROWS else 9)} for place in range(FEW_ROWS + 3)]
    found = slices_by_length(rows, TEXT, lambda places: {"n": Estimate(value=1.0)}, ["n"])
    assert found.warning.endswith("too narrow: 9 (3)")
    assert found.lines()[-2] == f"words: {found.warning}"
    enough = slices_by_length(rows[:FEW_ROWS], TEXT, lambda places: {"n": Estimate(value=1.0)}, ["n"])
    assert enough.warning == ""
    assert len(enough.lines()) == len(found.lines()) - 2


def test_the_command_shows_slices_of_the_validation_rows(run_of, tmp_path):
    options = ["report", run_of("classes"), "--output", tmp_path / "page.html", "--by-length", "--by", "label"]
    options.append("--by-confidence")
    done = call(*options)
    assert done.exit_code == 0, done.stderr
    headers = [line.split() for line in done.stdout.splitlines() if line.startswith(("words", "label", "confidence"))]
    assert ["words", "accuracy", "macro_f1", "rows"] in headers
    assert ["label", "accuracy", "macro_f1", "rows"] in headers
    assert ["confidence", "accuracy", "macro_f1", "rows"] in headers
    (found,) = json.loads(call(*options, "--json").stdout)["runs"][0]["validation"].values()
    assert [one["column"] for one in found["by"]] == ["label", "words", "confidence"]


def test_rows_that_change_while_the_report_is_made_are_not_mixed(checkpoint, tmp_path):
    kind = KINDS["classes"]
    (run,) = gather([trained(tmp_path, checkpoint, kind)])
    (again,) = with_file_columns(run).predicted
    assert [json.loads(row[PASSTHROUGH])["text"] for row in again.rows] == [row["text"] for row in kind.rows]
    first, *others = kind.rows
    for rows in ([{**first, "text": "another"}, *others], [first | {"label": kind.rows[-2]["label"]}, *others], others):
        write_rows(tmp_path / "dev.jsonl", rows)
        with pytest.raises(UsageError, match=r"dev\.jsonl has changed while the report was made"):
            with_file_columns(run)


def test_wrong_options(run_of, tmp_path):
    run, page = run_of("classes"), tmp_path / "page.html"
    with pytest.raises(UsageError, match=r"--by txt: no row has this column, did you mean 'text'\?; the columns are"):
        make_report(run, page, by=["txt"])
    for option in ("by_length", "by_confidence"):
        with pytest.raises(
            UsageError, match="--by-confidence, --mistakes and --label-issues are for one run, not for 2"
        ):
            make_report([run, run_of("labels")], page, **{option: True})
    (tmp_path / "run").mkdir()
    for name in ("run.json", "metrics.jsonl", "metrics.json"):
        (tmp_path / "run" / name).write_bytes((run / name).read_bytes())
    with pytest.raises(
        UsageError, match=r"need the validation rows, or a file named with --data\. The run was started"
    ):
        make_report(tmp_path / "run", page, by_length=True)
    assert not page.exists()
