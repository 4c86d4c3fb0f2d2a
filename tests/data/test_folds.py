"""Folds: every row in exactly one, labels and numbers spread evenly, and groups never divided."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tasks.data.columns import FOLD_GROUP, Column
from bert_tasks.data.features import Samples
from bert_tasks.data.folds import fold_splits, group_column, make_folds
from bert_tasks.data.reading import read
from bert_tasks.data.rows import Rows
from bert_tasks.data.splits import DataSpec, Splits, load_tables
from bert_tasks.errors import DataError
from bert_tasks.model.features import tokenized
from bert_tasks.tasks import SequenceClassification
from support.training_runs import TASK, load_model, make_rows

TEXT = Column(name="text", kind="text")
LABELLED = (TEXT, Column(name="label", kind="label", required=False))
GROUPED = (*LABELLED, Column(name=FOLD_GROUP, kind="id"))
NUMBERED = (TEXT, Column(name="label", kind="number", required=False))
TAGGED = (
    Column(name="words", kind="words"),
    Column(name="tags", kind="tags", required=False),
    Column(name="document", kind="id", required=False),
)
ASKED = (
    Column(name="question", kind="text"),
    Column(name="context", kind="text"),
    Column(name="answers", kind="answers", required=False),
)


def table(columns: tuple[Column, ...], rows: list[dict[str, Any]]) -> Rows:
    return read(rows, columns, require_labels=False)


def loaded(path: Path, columns: tuple[Column, ...], group: str | None) -> Rows:
    """The rows of a file with the column that keeps them together."""
    column, name = group_column(columns, group)
    spec = DataSpec(train=str(path))
    return load_tables(spec, columns=columns, labels=(), cache_dir=path.parent, group=column, group_name=name).train


def test_rows_without_a_group_are_groups_of_their_own(tmp_path: Path) -> None:
    authors = [f"author {n % 3}" if n < 12 else "" for n in range(36)]
    lines = ["text,label,author", *(f"text {n},{'ab'[n % 2]},{author}" for n, author in enumerate(authors))]
    (tmp_path / "train.csv").write_text("\n".join(lines) + "\n", "utf-8")
    numbers = make_folds(loaded(tmp_path / "train.csv", LABELLED, "author"), LABELLED, count=3, seed=0).numbers.tolist()
    assert len(set(zip(authors[:12], numbers, strict=False))) == 3
    assert set(numbers[12:]) == {1, 2, 3}
    assert max(Counter(numbers).values()) <= 14


def test_questions_on_one_article_stay_together(tmp_path: Path) -> None:
    articles = []
    for article in range(6):
        paragraphs = []
        for number in range(3):
            asked = {"id": f"{article}-{number}", "question": f"What {article} {number}?", "answers": []}
            paragraphs.append({"context": f"Paris {article} {number} is old.", "qas": [asked]})
        articles.append({"title": f"article {article}", "paragraphs": paragraphs})
    (tmp_path / "train.json").write_text(json.dumps({"data": articles}), "utf-8")
    numbers = make_folds(loaded(tmp_path / "train.json", ASKED, None), ASKED, count=3, seed=0).numbers
    assert [len({*numbers[first : first + 3]}) for first in range(0, 18, 3)] == [1] * 6


@given(
    labels=st.lists(st.sampled_from("aaabbc"), min_size=12, max_size=60),
    count=st.integers(2, 6),
    seed=st.integers(0, 9),
)
@settings(max_examples=20, deadline=None)
def test_labels_are_spread_within_one_row(labels: list[str], count: int, seed: int) -> None:
    labels += ["a", "b", "c"] * count
    rows = table(LABELLED, [{"text": f"text {n}", "label": label} for n, label in enumerate(labels)])
    folds = make_folds(rows, LABELLED, count=count, seed=seed)
    assert make_folds(rows, LABELLED, count=count, seed=seed).numbers.tolist() == folds.numbers.tolist()
    assert set(folds.numbers) == set(range(1, count + 1))
    for label, total in Counter(labels).items():
        for fold in range(1, count + 1):
            label_count = sum(
                row_label == label for row_label, number in zip(labels, folds.numbers, strict=True) if number == fold
            )
            assert total // count <= label_count <= -(-total // count)


@given(groups=st.lists(st.integers(0, 11), min_size=40, max_size=60), texts=st.integers(30, 60), seed=st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_groups_and_texts_are_never_divided(groups: list[int], texts: int, seed: int) -> None:
    groups = [*range(12), *groups]
    rows = [
        {"text": f"text {n % texts}", "label": "ab"[n % 2], FOLD_GROUP: str(group)} for n, group in enumerate(groups)
    ]
    alone = make_folds(table(LABELLED, rows), LABELLED, count=3, seed=seed).numbers
    numbers = make_folds(table(GROUPED, rows), GROUPED, count=3, seed=seed).numbers
    assert len({(row["text"], number) for row, number in zip(rows, alone, strict=True)}) == min(texts, len(rows))
    assert len({(row[FOLD_GROUP], number) for row, number in zip(rows, numbers, strict=True)}) == 12
    assert set(numbers) == set(alone) == {1, 2, 3}


GROUPS = [str(group) for group in range(8) for _ in range(8 - group)]  # of 8, 7, ..., 1 rows


@pytest.mark.parametrize(
    ("columns", "rows"),
    [
        (LABELLED, [{"text": f"text {n}", "label": "ab"[n % 2]} for n in range(36)]),
        (NUMBERED, [{"text": f"text {n}", "label": float(n)} for n in range(36)]),
        (TAGGED, [{"words": ["w", str(n)], "tags": ["O", "O"], "document": group} for n, group in enumerate(GROUPS)]),
    ],
)
def test_the_seed_decides_which_rows_are_in_which_fold(columns: tuple[Column, ...], rows: list[dict[str, Any]]) -> None:
    divisions = set()
    for seed in range(6):
        numbers = make_folds(table(columns, rows), columns, count=3, seed=seed).numbers
        parts = (tuple(np.flatnonzero(numbers == fold).tolist()) for fold in (1, 2, 3))
        divisions.add(frozenset(parts))  # whatever the folds' numbers
    assert len(divisions) > 1


@given(sizes=st.lists(st.integers(1, 40), min_size=5, max_size=40), count=st.integers(2, 5), seed=st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_folds_of_groups_are_about_equally_large(sizes: list[int], count: int, seed: int) -> None:
    documents = [str(document) for document, size in enumerate(sizes) for _ in range(size)]
    rows = [{"words": ["w", str(n)], "tags": ["O", "O"], "document": document} for n, document in enumerate(documents)]
    numbers = make_folds(table(TAGGED, rows), TAGGED, count=count, seed=seed).numbers
    assert len(set(zip(documents, numbers.tolist(), strict=True))) == len(sizes)
    folds = Counter(numbers.tolist())
    assert len(folds) == count
    # A fold was the smallest when it got its last group, which is less than twice as large as its smallest one.
    for fold, total in folds.items():
        document_counts = Counter(
            document for document, number in zip(documents, numbers, strict=True) if number == fold
        )
        assert total - min(folds.values()) <= 2 * min(document_counts.values())


def test_texts_of_too_many_groups_are_counted() -> None:
    """Each author has a text that all of them have; to keep these together, all rows would be in one fold."""
    rows = [
        {"text": "the same" if n < 9 else f"text {n}", "label": "ab"[n % 2], FOLD_GROUP: str(n % 9)} for n in range(27)
    ]
    folds = make_folds(table(GROUPED, rows), GROUPED, count=3, seed=0)
    assert len({(row[FOLD_GROUP], number) for row, number in zip(rows, folds.numbers, strict=True)}) == 9
    assert folds.summary.endswith(
        "stay together. 9 rows have texts that are also in other folds, because too many groups share texts"
    )
    of_two = [{**row, "text": f"text {n // 2}" if n < 2 else f"text {n}"} for n, row in enumerate(rows)]
    folds = make_folds(table(GROUPED, of_two), GROUPED, count=3, seed=0)  # two groups of three rows become one
    assert folds.numbers[0] == folds.numbers[1]
    assert folds.summary.endswith("rows of one group stay together")


def test_numbers_are_spread_by_tenths() -> None:
    values = np.random.default_rng(0).permutation(100).astype(float)
    rows = table(NUMBERED, [{"text": f"text {n}", "label": value} for n, value in enumerate(values)])
    numbers = make_folds(rows, NUMBERED, count=5, seed=1).numbers
    tenths = Counter(zip(numbers.tolist(), (values // 10).tolist(), strict=True))
    assert set(tenths.values()) == {2}
    assert len(tenths) == 50


def test_sets_of_labels_are_spread_evenly() -> None:
    columns = (TEXT, Column(name="labels", kind="labels", required=False))
    draw = np.random.default_rng(0)
    sets = [
        [name for name, share in (("a", 0.5), ("b", 0.2), ("c", 0.06)) if draw.random() < share] for _ in range(300)
    ]
    numbers = make_folds(
        table(columns, [{"text": f"text {n}", "labels": names} for n, names in enumerate(sets)]),
        columns,
        count=5,
        seed=3,
    ).numbers
    assert {58 <= count <= 62 for count in Counter(numbers.tolist()).values()} == {True}
    for combination in (["a"], ["b"], ["c"], []):
        has = [set(combination) <= set(names) if combination else not names for names in sets]
        counts = [
            sum(is_match for is_match, number in zip(has, numbers, strict=True) if number == fold)
            for fold in range(1, 6)
        ]
        assert max(counts) - min(counts) <= 2


def test_a_column_names_the_groups(tmp_path: Path) -> None:
    lines = [f"text {n},{'ab'[n % 2]},author {n % 7}" for n in range(42)]
    (tmp_path / "train.csv").write_text("\n".join(["text,label,writer", *lines]), "utf-8")
    rows = loaded(tmp_path / "train.csv", LABELLED, "writer")
    folds = make_folds(rows, LABELLED, count=3, seed=0)
    assert folds.summary == "3 folds: labels are spread evenly, rows of one group stay together"
    assert len({(n % 7, number) for n, number in enumerate(folds.numbers.tolist())}) == 7
    splits = fold_splits(Splits(train=rows, validation={}), LABELLED, folds, 2, share=0.3, seed=0)
    assert splits.held_out is not None
    parts = [splits.train, splits.validation[""], splits.held_out]
    assert sorted(line for split_table in parts for line in split_table.rows.values("line")) == sorted(
        rows.rows.values("line")
    )
    writers = [set(split_table.rows.values(FOLD_GROUP)) for split_table in parts]
    assert sum(map(len, writers)) == len(set.union(*writers)) == 7
    with pytest.raises(
        DataError, match=r'(?s)no column .writr., did you mean .writer.*to read: folds\.group = "NAME"$'
    ):
        loaded(tmp_path / "train.csv", LABELLED, "writr")


@pytest.mark.parametrize(
    ("labels", "count", "message"),
    [
        ("abab", 5, "4 rows and 4 different texts are too few for 5 folds"),
        ("aaaabbbbc", 3, "one fold would have all rows with the label 'c', which its model could not learn"),
    ],
)
def test_folds_that_cannot_be(labels: str, count: int, message: str) -> None:
    rows = table(LABELLED, [{"text": f"text {n}", "label": label} for n, label in enumerate(labels)])
    with pytest.raises(DataError, match=message):
        make_folds(rows, LABELLED, count=count, seed=0)


@pytest.mark.parametrize("unit", ["row", "window"])
def test_a_part_has_the_features_of_the_whole(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, unit: str, tmp_path: Path
) -> None:
    """All parts are tokenised once, and give what each of them gives alone."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    task = SequenceClassification.of(labels=TASK.output.labels, max_length=8, long_texts="windows", doc_stride=1)
    model = load_model(checkpoint, task)
    whole = read(make_rows(30), task.columns, require_labels=False)
    indices = [3, 4, 9, 20, 29]
    selected, alone = whole.select_part(indices), whole.select(indices)
    nested = whole.select_part([1, *indices, 28]).select(range(1, 6))
    expected = tokenized(alone, model)
    if unit == "window":
        expected = Samples.of(expected.features, "window", count=5)
    for subset in (selected, nested):
        features = tokenized(subset, model)
        if unit == "window":
            assert subset.part is not None
            features = Samples.of(tokenized(whole, model).features, "window", count=30).of_rows(subset.part[1])
        for name in ("tokens", "starts", "lengths", "row_starts"):
            assert getattr(features, name).tolist() == getattr(expected, name).tolist()
        assert features.decoded_rows(0, 5) == expected.decoded_rows(0, 5)
        assert features.decoded_rows(2, 4) == expected.decoded_rows(2, 4)
        of_samples = range(len(expected))
        for mine, theirs in zip(features.features_of(of_samples), expected.features_of(of_samples), strict=True):
            assert {**mine, "row": 0} == {**theirs, "row": 0}
        assert features.rows(of_samples) == expected.rows(of_samples)
    assert len(list((tmp_path / "bert_tasks" / "features").glob("*.arrow"))) == 2  # the whole, and the part alone
