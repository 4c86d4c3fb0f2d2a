"""The names of columns that a model remembers of its training data, and where they apply."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tasks.data.batch import Batch, Record
from bert_tasks.data.columns import Column
from bert_tasks.data.conversion import Conversion
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.splits import DataSpec, trained_names
from bert_tasks.data.trained_reading import options_for_file, training_names

COLUMNS = (Column(name="text", kind="text"), Column(name="label", kind="label", required=False))
NAMES = {"text": "review", "label": "stars", "tokens": "words"}  # the task has no column "tokens"


def test_a_model_remembers_all_names_that_are_not_the_tasks(tmp_path: Path) -> None:
    options = ReadOptions(columns={"text": "review", "label": "label"}, delimiter=";", encoding="latin-1")
    assert training_names(options, "train.csv") == {"text": "review"}
    glue = ReadOptions(format="glue/mrpc", columns={"label": "gold"})
    assert training_names(glue, "train.tsv") == {"text": "#1 String", "text_pair": "#2 String", "label": "gold"}
    mnli = ReadOptions(format="glue/mnli")
    assert training_names(mnli, None) == {"text": "premise", "text_pair": "hypothesis"}
    assert training_names(ReadOptions(), None) == {}
    (tmp_path / "rows.csv").write_text("a,x|y\n")
    spec = DataSpec(train=str(tmp_path / "rows.csv"), header=False, label_separator="|", columns={"text": "0"})
    assert trained_names(spec, COLUMNS) == {"text": "0"}


@pytest.mark.parametrize(
    ("name", "content", "options", "expected"),
    [
        ("new.csv", "id,review\n1,a", {}, {"text": "review"}),
        ("new.csv", "review,stars\na,b", {}, {"text": "review", "label": "stars"}),
        ("new.csv", "review;stars\na;b", {"delimiter": ";"}, {"text": "review", "label": "stars"}),
        ("new.csv", "review,rating\na,b", {"columns": {"label": "rating"}}, {"text": "review", "label": "rating"}),
        ("new.csv", "text,label\na,b", {}, None),
        ("new.csv", "words,review\na,b", {}, {"text": "review"}),
        ("new.jsonl", '{"review": "a"}', {}, {"text": "review"}),
        ("new.dat", "review\na", {"format": "tsv"}, {"text": "review"}),
        ("new.csv", "", {}, None),
    ],
)
def test_a_remembered_name_applies_if_the_file_has_it(
    name: str, content: str, options: Mapping[str, Any], expected: Mapping[str, str] | None, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    given_options = ReadOptions(**options)
    assert options_for_file(given_options, tmp_path / name, NAMES, COLUMNS).columns == expected


def converted(row: Mapping[str, Any], names: Mapping[str, str], columns: Sequence[Column]) -> dict[str, Any]:
    """Returns what is read of a row, which may have the remembered names."""
    return Conversion(columns, others=names).convert(Batch.of([Record(1, row)])).row(0)


@settings(max_examples=30, deadline=None)
@given(
    row=st.dictionaries(st.sampled_from("abcd"), st.text("xyz")), names=st.dictionaries(*[st.sampled_from("abcd")] * 2)
)
def test_a_row_keeps_what_it_has_under_the_tasks_names(row: dict[str, str], names: dict[str, str]) -> None:
    columns = [Column(name=name, kind="text") for name in "abcd"]
    found = converted(row, names, columns)
    assert {name: found[name] for name in row} == row
    for name, other in names.items():
        assert found.get(name) == row.get(name, row.get(other))


def test_a_row_keeps_the_text_that_its_words_are_from() -> None:
    columns = (Column(name="words", kind="words"), Column(name="text", kind="text", required=False))
    assert converted({"text": "a  b"}, {"words": "text"}, columns) == {"words": ["a", "b"], "text": "a  b"}
    pair = (Column(name="text", kind="text"), Column(name="group", kind="id", required=False))
    assert converted({"group": "a"}, {"text": "group"}, pair) == {"text": "a"}
