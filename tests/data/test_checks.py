"""Label checks and the data report."""

import pytest

from bert_tasks.data.checks import TokenCounts, check_labels, check_splits, data_report, infer_labels
from bert_tasks.data.columns import Column
from bert_tasks.data.problems import BadRowsError
from bert_tasks.data.splits import Splits
from bert_tasks.data.table import RowTable
from bert_tasks.errors import DataError

TEXT = Column(name="text", kind="text")
COLUMNS = (TEXT, Column(name="label", kind="label", required=False))
SETS = (TEXT, Column(name="labels", kind="labels", required=False))


def labelled(*labels: str, source: str = "train.csv") -> RowTable:
    rows = [{"text": f"text {number}", "label": label} for number, label in enumerate(labels)]
    return RowTable.from_rows(rows, source, COLUMNS)


def test_labels_are_in_numeric_or_text_order() -> None:
    assert infer_labels(labelled("10", "2", "10", "-1"), COLUMNS) == ("-1", "2", "10")
    assert infer_labels(labelled("b", "a10", "a2", "b"), COLUMNS) == ("a10", "a2", "b")
    sets = RowTable.from_rows([{"text": "a", "labels": ["y", "x"]}, {"text": "b", "labels": []}], columns=SETS)
    assert infer_labels(sets, SETS) == ("x", "y")


def test_numbers_and_ids_are_not_taken_for_labels() -> None:
    for count, distinct, refused in [(100, 51, True), (100, 50, False), (99, 99, False), (3000, 1001, True)]:
        table = labelled(*(str(number % distinct) for number in range(count)))
        if refused:
            with pytest.raises(DataError, match="problem_type = 'regression'"):
                infer_labels(table, COLUMNS)
        else:
            assert len(infer_labels(table, COLUMNS)) == distinct


def test_labels_that_differ_in_letter_case_only() -> None:
    with pytest.raises(DataError, match="'Good' and 'good' differ in letter case only"):
        infer_labels(labelled("good", "bad", "Good"), COLUMNS)


def test_all_unknown_labels_of_all_tables_are_in_one_report() -> None:
    train = labelled("positive", "postive", "negative")
    validation = labelled("Positive", "neutral", source="dev.csv")
    with pytest.raises(BadRowsError) as error:
        check_labels([train, validation], COLUMNS, ("negative", "positive"))
    assert str(error.value).splitlines()[1:] == [
        "  train.csv:2: column 'label': 'postive': 'postive' -> 'positive'?",
        "  dev.csv:1: column 'label': 'Positive': 'Positive' -> 'positive'?",
        "  dev.csv:2: column 'label': 'neutral': expected one of negative, positive",
    ]
    check_labels([train, validation], COLUMNS, ("negative", "positive", "postive", "Positive", "neutral"))


def test_the_report_counts_what_it_does_not_show() -> None:
    table = labelled(*["good"] * 5, *["god"] * 50)
    with pytest.raises(BadRowsError) as error:
        check_labels([table], COLUMNS, ("good", "bad"))
    lines = str(error.value).splitlines()
    assert lines[0].startswith("50 problems")
    assert lines[-1] == "  ... and 30 more"


def test_splits_that_can_be_trained() -> None:
    splits = Splits(train=labelled("b", "a"), validation={"": labelled("a", source="dev.csv")})
    assert check_splits(splits, columns=COLUMNS) == ("a", "b")
    assert check_splits(splits, columns=COLUMNS, labels=("b", "a")) == ("b", "a")
    scores = (TEXT, Column(name="score", kind="number", required=False))
    rows = RowTable.from_rows([{"text": "a", "score": 1}], columns=scores)
    assert check_splits(Splits(train=rows, validation={"": rows}), columns=scores) == ()


@pytest.mark.parametrize(
    ("train", "validation", "labels", "said"),
    [
        (("a", "b"), (), (), "dev.csv: no rows"),
        (("a", "a"), ("a",), (), "train.csv: only the label 'a' in 2 rows"),
        (("a", "a"), ("a",), ("a", "b"), "train.csv: only the label 'a' in 2 rows"),
        (("a", "b"), ("zebra", "zebra"), (), "dev.csv: 'zebra' (2 rows) stand only in validation"),
        (("a", "b"), ("c",), ("a", "b", "c"), "dev.csv: 'c' (1 rows) stand only in validation"),
        (("good", "bad"), ("god",), (), "dev.csv:1: column 'label': 'god': 'god' -> 'good'?"),
        (("good", "worse"), ("good",), ("good", "bad"), "train.csv:2: column 'label': 'worse': expected one of"),
    ],
)
def test_splits_that_cannot(
    train: tuple[str, ...], validation: tuple[str, ...], labels: tuple[str, ...], said: str
) -> None:
    splits = Splits(train=labelled(*train), validation={"": labelled(*validation, source="dev.csv")})
    with pytest.raises(DataError) as error:
        check_splits(splits, columns=COLUMNS, labels=labels)
    assert said in str(error.value)


def table(*rows: tuple[str, str], source: str = "train.csv") -> RowTable:
    return RowTable.from_rows([{"text": text, "label": label} for text, label in rows], source, COLUMNS)


def test_the_data_report() -> None:
    train = table(("Good film", "x"), (" good film ", "x"), ("good FILM", "y"), ("", "y"), ("other", "x"))
    dev = table(("GOOD film", "y"), ("new", "x"), ("new", "x"), source="dev.csv")
    tokens = TokenCounts(rows=[0, 1, 1, 2, 3, 4], lengths=[4, 8, 8, 4, 2, 3], lost=[0, 5, 0, 0, 0, 2])
    report = data_report(
        Splits(train=train, validation={"hard": dev}), {"train": tokens}, columns=COLUMNS, labels=("y", "x", "z")
    )
    first, second = report.splits
    assert (first.name, second.name) == ("train", "validation_hard")
    assert list(first.label_counts.items()) == [("y", 2), ("x", 3), ("z", 0)]
    assert (first.duplicates, first.conflicts, first.empty_texts, first.also_in_train) == (2, 1, 1, 0)
    assert (second.duplicates, second.conflicts, second.empty_texts, second.also_in_train) == (1, 0, 0, 1)
    assert first.truncated_share == pytest.approx(2 / 5)
    assert first.token_lengths == {"min": 2, "median": 4, "p95": pytest.approx(8), "max": 8}
    assert second.token_lengths is None
    assert report.to_json()["splits"][1]["also_in_train"] == 1
    assert report.lines() == [
        "train: 5 rows",
        "  labels: y 2 (40%), x 3 (60%), z 0 (0%)",
        "  tokens: min 2, median 4, p95 8, max 8; 40.0% of the rows truncated",
        "  1 rows with an empty text",
        "  2 rows with a text that an earlier row has",
        "  1 rows with a text that an earlier row has with another target",
        "validation_hard: 3 rows",
        "  labels: y 1 (33%), x 2 (67%), z 0 (0%)",
        "  1 rows with a text that an earlier row has",
        "  1 rows with a text that also stands in train",
    ]


def test_overlap_is_with_training_rows_only() -> None:
    train, dev = table(("a", "x")), table(("b", "x"))
    report = data_report(Splits(train=train, validation={"one": dev, "two": dev}), columns=COLUMNS)
    assert [split.also_in_train for split in report.splits] == [0, 0, 0]


def test_pairs_count_as_the_same_only_together() -> None:
    columns = (TEXT, Column(name="text_pair", kind="text"))
    rows = [{"text": "a", "text_pair": "b"}, {"text": "a", "text_pair": "c"}, {"text": "a b", "text_pair": ""}]
    pairs = RowTable.from_rows(rows, columns=columns)
    report = data_report(Splits(train=pairs, validation={}), columns=columns).splits[0]
    assert (report.duplicates, report.empty_texts, report.label_counts) == (0, 1, {})
