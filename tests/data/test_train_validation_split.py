"""Validation rows taken out of the training rows: fair, repeatable, and without leaks."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bert_tasks.data.checks import data_report
from bert_tasks.data.columns import Column
from bert_tasks.data.reading import read
from bert_tasks.data.rows import Rows
from bert_tasks.data.splits import Splits, divide, train_validation_split
from bert_tasks.errors import DataError

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


def split(strata: Sequence[str], groups: Iterable[Hashable], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Row numbers of training and validation, which are the same in every call."""
    calls = [
        divide([(stratum,) for stratum in strata], list(groups), (1 - share, share), seed).tolist() for _ in range(2)
    ]
    assert calls[0] == calls[1]
    first, second = ([row for row, row_side in enumerate(calls[0]) if row_side == side] for side in (0, 1))
    assert len(first) + len(second) == len(strata)
    return first, second


@given(labels=st.lists(st.sampled_from("aabbbc"), max_size=60), share=st.floats(0.01, 0.99), seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_a_split_keeps_the_shares_of_labels(labels: list[str], share: float, seed: int) -> None:
    train, validation = split(labels, range(len(labels)), share, seed)
    in_train, in_validation = (Counter(labels[index] for index in indices) for indices in (train, validation))
    for label, count in Counter(labels).items():
        assert in_train[label] >= 1
        assert in_validation[label] >= (1 if count >= 2 else 0)
        assert abs(in_validation[label] - share * count) <= 1


def test_seeds_split_differently() -> None:
    labels = ["a", "b"] * 50
    assert len({tuple(split(labels, range(100), 0.1, seed)[1]) for seed in range(5)}) == 5


@given(
    rows=st.lists(st.tuples(st.integers(0, 8), st.sampled_from("ab")), max_size=60),
    share=st.floats(0.01, 0.99),
    seed=st.integers(0, 9),
)
@settings(max_examples=40, deadline=None)
def test_a_split_divides_no_group(rows: list[tuple[int, str]], share: float, seed: int) -> None:
    groups, strata = [group for group, _ in rows], [stratum for _, stratum in rows]
    train, validation = split(strata, groups, share, seed)
    assert {groups[index] for index in train} & {groups[index] for index in validation} == set()
    assert len(train) > 0 or not rows
    _, alike = split(["a"] * len(rows), groups, share, seed)
    assert (len(alike) > 0) == (len(set(groups)) > 1)


@pytest.mark.parametrize(("share", "seed"), [(0.1, 0), (0.25, 1), (0.5, 2), (0.9, 0)])
def test_a_split_of_groups_keeps_the_shares(share: float, seed: int) -> None:
    groups = [number // 5 for number in range(1000)]
    strata = ["rare" if number % 50 == 0 else "often" for number in range(1000)]
    _, validation = split(strata, groups, share, seed)
    counts = Counter(strata[index] for index in validation)
    assert counts["rare"] == pytest.approx(20 * share, abs=1)
    assert counts["often"] == pytest.approx(980 * share, abs=20)


def test_no_share_is_too_small_for_a_group() -> None:
    for share, sizes in ((0.01, [9, 1]), (0.99, [1, 9])):
        assert [len(indices) for indices in split(["a"] * 10, [0] * 9 + [1], share, seed=1)] == sizes


def questions(*contexts: str) -> Rows:
    asked = [
        {"question": f"{number}?", "context": context, "answers": context[:3] if number % 40 < 30 else ""}
        for number, context in enumerate(contexts)
    ]
    return read(asked, ASKED, name="train.json", require_labels=False)


def test_questions_on_one_context_stay_together() -> None:
    table = questions(*(f"context {number % 20}" for number in range(200)))
    for seed in range(4):
        train, validation = train_validation_split(table, ASKED, 0.1, seed=seed)
        assert len(validation) == 20
        assert sum(row["answers"]["text"] == [] for row in validation) == 5
        assert {row["context"] for row in train} & {row["context"] for row in validation} == set()
    with pytest.raises(DataError, match=r"train.json: too few rows .*\(3 rows, no two on different contexts\)"):
        train_validation_split(questions("same", "same", "same"), ASKED, 0.1, seed=1)


def sentences(*documents: Any) -> Rows:
    tagged = [{"words": [str(n)], "tags": ["O"], "document": document} for n, document in enumerate(documents)]
    return read(tagged, TAGGED, name="train.conll", require_labels=False)


def test_rows_of_a_group_stay_together() -> None:
    columns = (
        Column(name="text", kind="text"),
        Column(name="label", kind="label", required=False),
        Column(name="group", kind="id", required=False),
    )
    ranked = [{"text": str(n), "label": "yes" if n % 4 == 0 else "no", "group": n // 4} for n in range(80)]
    train, validation = train_validation_split(read(ranked, columns, require_labels=False), columns, 0.2, 1)
    groups = [{row["group"] for row in rows} for rows in (train, validation)]
    assert not groups[0] & groups[1]
    assert len(groups[1]) == 4


def test_documents_stay_together_where_there_are_enough() -> None:
    def documents(table: Rows) -> tuple[set[str], set[str]]:
        train, validation = train_validation_split(table, TAGGED, 0.2, seed=1)
        assert len(validation) == pytest.approx(0.2 * len(table), abs=1)
        return {row.get("document") for row in train}, {row.get("document") for row in validation}

    many = documents(sentences(*(str(number // 4) for number in range(40))))
    assert many[0] & many[1] == set()
    few = documents(sentences(*(str(number // 20) for number in range(40))))
    assert few[0] & few[1] != set()
    assert documents(sentences(*[None] * 40)) == ({None}, {None})
    mixed = documents(sentences(*[None] * 30, *(str(number // 2) for number in range(10))))
    assert mixed[0] & mixed[1] <= {None}
    with pytest.raises(DataError, match=r"train.conll: too few rows .*\(1 row, no two with different words\)"):
        train_validation_split(sentences(None), TAGGED, 0.2, seed=1)


LABELLED = (Column(name="text", kind="text"), Column(name="label", kind="label", required=False))
SOME = st.lists(
    st.tuples(st.integers(0, 60), st.sampled_from(["{}", " {}", "{}\n"]), st.sampled_from("ab")), min_size=2
)


def spread(row_type: str, texts: list[tuple[int, str, str]]) -> tuple[Rows, tuple[Column, ...]]:
    """A table in which rows of one number have the same text, but for outer spaces; targets may differ."""
    if row_type == "words":
        data = [{"words": ["Nr", str(n)], "tags": ["O", f"B-{label.upper()}"]} for n, _, label in texts]
        return read(data, TAGGED, require_labels=False), TAGGED
    if row_type == "questions":
        asked = [{"question": f"q{n}", "context": f"c{n % 17}", "answers": ""} for n, _, _ in texts]
        return read(asked, ASKED, require_labels=False), ASKED
    rows = [{"text": form.format(f"Nr {n}"), "label": label} for n, form, label in texts]
    return read(rows, LABELLED, require_labels=False), LABELLED


@pytest.mark.parametrize("row_type", ["texts", "words", "questions"])
@given(texts=SOME, share=st.floats(0.05, 0.5), seed=st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_rows_with_the_same_texts_are_on_one_side(
    row_type: str, texts: list[tuple[int, str, str]], share: float, seed: int
) -> None:
    table, columns = spread(row_type, texts)
    held = {n % 17 if row_type == "questions" else n for n, _, _ in texts}
    assume(len(held) > 4)  # two of each label
    assume(row_type != "texts" or all(len({n for n, _, of in texts if of == label}) > 2 for label in "ab"))
    train, validation = train_validation_split(table, columns, share, seed)
    assert sorted([row["line"] for row in [*train, *validation]]) == list(range(1, len(texts) + 1))
    report = data_report(Splits(train=train, validation={"": validation}), columns=columns)
    assert report.splits[1].also_in_train == 0
    assert [row["line"] for row in train_validation_split(table, columns, share, seed)[1]] == [
        row["line"] for row in validation
    ]
    largest = max(Counter((n % 17 if row_type == "questions" else n) for n, _, _ in texts).values())
    assert abs(len(validation) - share * len(texts)) <= 2 * (largest + 1)  # two labels


def test_a_sentence_of_many_documents_does_not_link_them() -> None:
    """Nor does it tear a document apart; in few documents it does link them."""
    often = [{"words": ["SCORES"], "tags": ["O"], "document": str(n)} for n in range(40)]
    others = [{"words": [str(n)], "tags": ["O"], "document": str(n % 40)} for n in range(160)]
    train, validation = train_validation_split(read([*often, *others], TAGGED, require_labels=False), TAGGED, 0.2, 1)
    assert len(validation) == 40
    assert {row["document"] for row in train} & {row["document"] for row in validation} == set()
    train, validation = train_validation_split(
        read([*often[:2], *others], TAGGED, require_labels=False), TAGGED, 0.2, 1
    )
    assert len({row["document"] for row in validation} & {"0", "1"}) in (0, 2)
    assert len(validation) == pytest.approx(32, abs=6)


def test_documents_that_share_a_sentence_stay_together_beside_a_larger_document() -> None:
    """Only what links documents counts against their links, not the size of one document."""
    rows = [{"words": [str(n)], "tags": ["O"], "document": "large"} for n in range(30)]
    for document in range(10):
        words = [f"own {document} {n}" for n in range(6)] + [f"of two {document // 2}"]
        rows += [{"words": [word], "tags": ["O"], "document": str(document)} for word in words]
    sides = train_validation_split(read(rows, TAGGED, require_labels=False), TAGGED, 0.2, 1)
    train, validation = ({row["words"][0] for row in side} for side in sides)
    assert train & validation == set()
