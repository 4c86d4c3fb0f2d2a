"""Label checks and the data report."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tasks.data.checks import TokenCounts, check_splits, data_report, has_rare_labels, imbalance_hint, infer_labels
from bert_tasks.data.columns import Column
from bert_tasks.data.features import Truncation
from bert_tasks.data.issues import RowIssues
from bert_tasks.data.reading import read
from bert_tasks.data.rows import Rows
from bert_tasks.data.splits import Splits
from bert_tasks.errors import DataError

TEXT = Column(name="text", kind="text")
COLUMNS = (TEXT, Column(name="label", kind="label", required=False))
SETS = (TEXT, Column(name="labels", kind="labels", required=False))


def labelled(*labels: str, source: str = "train.csv") -> Rows:
    rows = [{"text": f"text {number}", "label": label} for number, label in enumerate(labels)]
    return read(rows, COLUMNS, name=source, require_labels=False)


def test_labels_are_in_numeric_or_text_order() -> None:
    assert infer_labels(labelled("10", "2", "10", "-1"), COLUMNS) == ("-1", "2", "10")
    assert infer_labels(labelled("b", "a10", "a2", "b"), COLUMNS) == ("a10", "a2", "b")
    sets = read([{"text": "a", "labels": ["y", "x"]}, {"text": "b", "labels": []}], SETS, require_labels=False)
    assert infer_labels(sets, SETS) == ("x", "y")


INTEGERS = st.builds(
    lambda sign, zeros, value: f"{sign}{'0' * zeros}{value}",
    st.sampled_from(["", "+", "-"]),
    st.integers(0, 2),
    st.integers(0, 12),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(INTEGERS, min_size=2, max_size=12, unique=True), st.randoms())
def test_the_order_of_integer_labels_is_total(names: list[str], chance: Random) -> None:
    mixed = list(names)
    chance.shuffle(mixed)
    expected = tuple(sorted(names, key=lambda name: (int(name), name)))
    assert infer_labels(labelled(*names), COLUMNS) == infer_labels(labelled(*mixed), COLUMNS) == expected


def test_a_label_of_more_digits_than_python_converts_is_a_name() -> None:
    with pytest.raises(RowIssues, match="name among numbers in column 'label'"):
        infer_labels(labelled("1" * 5000, "2", "10"), COLUMNS)


def test_numbers_and_ids_are_not_taken_for_labels() -> None:
    for count, distinct, refused in [(100, 51, True), (100, 50, False), (99, 99, False), (3000, 1001, True)]:
        table = labelled(*(str(number % distinct) for number in range(count)))
        if refused:
            with pytest.raises(DataError, match="problem_type = 'regression'"):
                infer_labels(table, COLUMNS)
        else:
            assert len(infer_labels(table, COLUMNS)) == distinct


@pytest.mark.parametrize(
    ("train", "validation", "labels", "said"),
    [
        (("a", "b"), (), (), "dev.csv: no rows"),
        (("a", "a"), ("a",), (), "train.csv: only the label 'a' in 2 rows"),
        (("a", "a"), ("a",), ("a", "b"), "train.csv: only the label 'a' in 2 rows"),
        (("a", "b"), ("zebra", "zebra"), (), "dev.csv: only validation rows have 'zebra' (2 rows), which"),
        (("a", "b"), ("c",), ("a", "b", "c"), "dev.csv: only validation rows have 'c' (1 row), which"),
        (("good", "bad"), ("god",), (), "dev.csv:1: unknown label in column 'label': 'god'. Did you mean 'good'?"),
    ],
)
def test_splits_that_cannot(
    train: tuple[str, ...], validation: tuple[str, ...], labels: tuple[str, ...], said: str
) -> None:
    splits = Splits(train=labelled(*train), validation={"": labelled(*validation, source="dev.csv")})
    with pytest.raises(DataError) as error:
        check_splits(splits, columns=COLUMNS, labels=labels)
    assert said in str(error.value)


TAGGED = (Column(name="words", kind="words"), Column(name="tags", kind="tags", required=False))
ASKED = (
    Column(name="id", kind="id", required=False),
    Column(name="question", kind="text"),
    Column(name="context", kind="text"),
    Column(name="answers", kind="answers", required=False),
)


def tagged(*sentences: str, source: str = "train.conll") -> Rows:
    rows = [{"words": ["w"] * len(tags.split()), "tags": tags} for tags in sentences]
    return read(rows, TAGGED, name=source, require_labels=False)


def asked(*answers: str, source: str = "train.json") -> Rows:
    rows = [
        {"id": str(number), "question": f"{number % 3}?", "context": "To Paris.", "answers": answer}
        for number, answer in enumerate(answers)
    ]
    return read(rows, ASKED, name=source, require_labels=False)


@pytest.mark.parametrize(
    "sentences",
    [
        pytest.param(("B-PER I-PER O", "B-LOC"), id="IOB2"),
        pytest.param(("I-PER I-PER O", "I-LOC"), id="IOB1"),
        pytest.param(("B-PER E-PER O", "S-LOC"), id="BIOES"),
    ],
)
def test_tags_are_inferred_in_iob2(sentences: tuple[str, ...]) -> None:
    assert infer_labels(tagged(*sentences), TAGGED) == ("B-LOC", "B-PER", "I-PER", "O")


def test_many_tags_in_few_sentences_are_no_ids() -> None:
    parts = tagged(*(" ".join(f"X{number}" for number in range(40)) for _ in range(120)))
    assert len(infer_labels(parts, TAGGED)) == 40
    assert infer_labels(tagged("10 2 10"), TAGGED) == ("2", "10")
    cases = [(400, 201, True), (400, 200, False), (2002, 1001, True), (15_000, 1001, True), (21_000, 1001, False)]
    for words, distinct, refused in cases:
        lemmas = tagged(" ".join(f"{number % distinct}" for number in range(words)))
        if refused:
            with pytest.raises(DataError, match=f"{distinct} different values of 'tags' in {words} words look like"):
                infer_labels(lemmas, TAGGED)
        else:
            assert len(infer_labels(lemmas, TAGGED)) == distinct


def test_tags_that_only_validation_has_are_allowed() -> None:
    splits = Splits(train=tagged("B-PER O"), validation={"": tagged("B-NEW O", "B-NEW", source="dev.conll")})
    assert check_splits(splits, columns=TAGGED) == ("B-PER", "O")
    report = data_report(splits, columns=TAGGED, labels=("O", "B-PER"))
    assert report.lines() == [
        "train: 1 row, 2 words",
        "  labels: O 1 (50%), B-PER 1 (50%)",
        "validation: 2 rows, 3 words",
        "  labels: O 1 (33%), B-PER 0 (0%), B-NEW 2 (67%)",
        "  1 text also in train (line 1)",
        "  tags that no training row has: 'B-NEW' (2 words)",
    ]


@pytest.mark.parametrize("labels", [("O", "B-PER", "I-PER"), ("O", "I-PER"), ("O", "S-PER", "E-PER", "B-PER", "I-PER")])
@pytest.mark.parametrize("sentence", ["B-PER I-PER O", "I-PER O", "B-PER E-PER O", "S-PER"])
def test_any_scheme_fits_labels_of_any_scheme(labels: tuple[str, ...], sentence: str) -> None:
    splits = Splits(train=tagged(sentence, "O B-PER"), validation={})
    assert check_splits(splits, columns=TAGGED, labels=labels) == labels


@pytest.mark.parametrize(
    ("train", "labels", "said"),
    [
        (("O O", "O"), (), "train.conll: only the tag 'O' in 2 rows. Training needs at least 2 classes."),
        (("O O",), ("O", "B-PER"), "train.conll: only the tag 'O' in 1 row"),
        (("", ""), (), "train.conll: no tag in 2 rows"),
        (("O S-NEWS",), ("O", "B-PER"), "'B-NEWS'. Expected one of O, B-PER, I-PER"),
        (("NN VB",), ("NN", "ADJ"), "train.conll:1: unknown tag in column 'tags': 'VB'. Expected one of NN, ADJ"),
        (("B-PER B-per",), (), "the labels 'B-PER' and 'B-per' differ in letter case only"),
    ],
)
def test_tags_that_cannot_be_trained(train: tuple[str, ...], labels: tuple[str, ...], said: str) -> None:
    splits = Splits(train=tagged(*train), validation={"": tagged("O", source="dev.conll")})
    with pytest.raises(DataError) as error:
        check_splits(splits, columns=TAGGED, labels=labels)
    assert said in str(error.value)


def test_an_odd_tag_in_validation_is_found_before_training() -> None:
    splits = Splits(train=tagged("B-PER O"), validation={"": tagged("O", "X B-NEW", source="dev.conll")})
    with pytest.raises(
        DataError, match=r"dev.conll:2: unknown tag in column 'tags': 'X'. Expected O or a tag such as B-TYPE"
    ):
        check_splits(splits, columns=TAGGED)


def test_classes_of_words_count_as_they_are_written() -> None:
    splits = Splits(train=tagged("E-MAIL O", "NAME E-MAIL"), validation={"": tagged("NAME E-MAIL")})
    assert check_splits(splits, columns=TAGGED) == ("E-MAIL", "NAME", "O")
    assert check_splits(splits, columns=TAGGED, labels=("O", "NAME", "E-MAIL")) == ("O", "NAME", "E-MAIL")


def test_sentences_count_as_the_same_by_their_words() -> None:
    rows = [
        {"words": ["a", "B"], "tags": ["O", "O"]},
        {"words": ["A", "b"], "tags": ["O", "B-X"]},
        {"words": [], "tags": []},
    ]
    report = data_report(Splits(train=read(rows, TAGGED, require_labels=False), validation={}), columns=TAGGED)
    (split,) = report.splits
    assert (split.rows, split.words, split.duplicates, split.conflicts, split.empty_texts) == (3, 4, 1, 1, 1)
    assert split.label_counts == {"B-X": 1, "O": 3}


def test_questions_are_counted_by_whether_they_have_an_answer() -> None:
    splits = Splits(train=asked("Paris", "", "Paris", "Paris", "Paris"), validation={"": asked("")})
    assert check_splits(splits, columns=ASKED) == ()
    first, second = data_report(splits, columns=ASKED).splits
    assert first.label_counts == {"answerable": 4, "unanswerable": 1}
    assert (first.words, first.duplicates, first.conflicts, second.also_in_train) == (None, 2, 1, 1)
    assert second.label_counts == {"unanswerable": 1}
    with pytest.raises(DataError, match=r"train.json: no answerable row in 2 rows"):
        check_splits(Splits(train=asked("", ""), validation={}), columns=ASKED)


def table(*rows: tuple[str, str], source: str = "train.csv") -> Rows:
    return read([{"text": text, "label": label} for text, label in rows], COLUMNS, name=source, require_labels=False)


def test_the_data_report() -> None:
    train = table(("Good film", "x"), (" good film ", "x"), ("good FILM", "y"), ("", "y"), ("other", "x"))
    dev = table(("GOOD film", "y"), ("new", "x"), ("new", "x"), source="dev.csv")
    cuts = Truncation(rows=5, cut_rows=2)
    tokens = TokenCounts(lengths=np.array([4, 8, 8, 4, 2, 3]), cuts=cuts, notes=("2 rows were truncated",))
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
        "  tokens: min 2, median 4, p95 8, max 8",
        "  1 empty text (line 4)",
        "  2 duplicate texts (lines 2, 3)",
        "  1 duplicate has a conflicting label (line 3)",
        "  2 rows were truncated",
        "validation_hard: 3 rows",
        "  labels: y 1 (33%), x 2 (67%), z 0 (0%)",
        "  1 duplicate text (line 3)",
        "  1 text also in train (line 1)",
    ]


def test_pairs_count_as_the_same_only_together() -> None:
    columns = (TEXT, Column(name="text_pair", kind="text"))
    rows = [{"text": "a", "text_pair": "b"}, {"text": "a", "text_pair": "c"}, {"text": "a b", "text_pair": ""}]
    pairs = read(rows, columns, require_labels=False)
    report = data_report(Splits(train=pairs, validation={}), columns=columns).splits[0]
    assert (report.duplicates, report.empty_texts, report.label_counts) == (0, 1, {})


@pytest.mark.parametrize(
    ("counts", "are_tags", "parts"),
    [
        ({"O": 95, "B-X": 5}, True, ("'O' has 95 of 100 words", 'class_weights = "balanced" or', "without crf = true")),
        ({"O": 90, "B-X": 10}, True, None),
        ({"O": 100}, True, None),
        ({"y": 95, "n": 5}, False, ("'y' has 95 rows", "settings.focal_gamma = 2.0 and run.metric_for_best_model")),
        ({"y": 90, "n": 10}, False, ('settings.class_weights = "balanced" and run',)),
        ({"y": 50, "n": 50}, False, None),
    ],
)
def test_the_note_on_a_label_that_almost_all_have(
    counts: dict[str, int], are_tags: bool, parts: tuple[str, ...] | None
) -> None:
    hint = imbalance_hint(counts, are_tags=are_tags)
    assert (hint is None) == (parts is None)
    if hint is not None and parts is not None:
        assert all(phrase in hint for phrase in parts)
        assert ("focal_gamma" in hint) == (max(counts.values()) > 90)


def test_a_label_is_rare_if_another_one_has_three_times_as_many_rows() -> None:
    assert has_rare_labels(labelled(*"aaab"), COLUMNS)
    assert not has_rare_labels(labelled(*"aabcc"), COLUMNS)
    assert not has_rare_labels(labelled(*"ab"), (TEXT,))
    # A label among several is rare beside the rows without it.
    rows = [{"text": f"text {number}", "labels": ["y"]} for number in range(4)]
    once, twice = ([{**row, "labels": ["x", "y"]} for row in rows[:count]] + rows[count:] for count in (1, 2))
    assert has_rare_labels(read(once, SETS, require_labels=False), SETS)
    assert not has_rare_labels(read(twice, SETS, require_labels=False), SETS)


@pytest.mark.parametrize(
    ("rare", "frequent", "expected"),
    [
        ("prase", "praise", "the label 'prase' (1 row) is spelled almost like 'praise'"),
        ("complaimt", "complaint", "the label 'complaimt' (1 row) is spelled almost like 'complaint'"),
        ("negative", "positive", None),
        ("grade_1", "grade_2", None),
    ],
)
def test_a_rare_label_that_may_be_misspelt_has_a_note(rare: str, frequent: str, expected: str | None) -> None:
    table = labelled(rare, *[frequent] * 10, *["other"] * 10)
    notes = data_report(Splits(train=table, validation={}), columns=COLUMNS).splits[0].notes
    said = [note for note in notes if "spelled almost" in note]
    assert (said[0].startswith(expected) and len(said) == 1) if expected else said == []
    more_often = labelled(*[rare] * 2, *[frequent] * 10, *["other"] * 10)
    report = data_report(Splits(train=more_often, validation={}), columns=COLUMNS).splits[0]
    assert not any("spelled almost" in note for note in report.notes)
