"""What a model remembers of how its training data were read: stored and loaded unchanged, and applied where it fits."""

import gzip
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_tasks.data.columns import Column, renamed_row
from bert_tasks.data.formats import FORMATS
from bert_tasks.data.readers import (
    ReadOptions,
    loaded_options,
    reading_of_file,
    stored_options,
    training_reading,
    with_file_options,
)
from bert_tasks.data.records import is_utf8_beyond_ascii
from bert_tasks.data.splits import DataSpec, stored_reading

COLUMNS = (Column(name="text", kind="text"), Column(name="label", kind="label", required=False))
STORED = ReadOptions(columns={"text": "review", "label": "stars"}, format="csv", delimiter=";", encoding="latin-1")
NAMES = st.text(min_size=1, max_size=5)
READINGS = st.builds(
    ReadOptions,
    columns=st.none() | st.dictionaries(NAMES, NAMES, min_size=1),
    format=st.none() | st.sampled_from(sorted(FORMATS)),
    delimiter=st.none() | st.sampled_from([";", "|"]),
    encoding=st.none() | st.sampled_from(["latin-1", "utf-16"]),
)


def written(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_text(text, encoding)
    return path


@given(reading=READINGS)
def test_what_is_stored_is_loaded_again(reading: ReadOptions) -> None:
    stored = json.loads(json.dumps(stored_options(reading)))
    assert None not in stored.values()
    assert loaded_options(stored) == reading


@pytest.mark.parametrize(
    "stored",
    [3, [], {"colums": {}}, {"columns": {"text": 3}}, {"columns": "text"}, {"format": "cvs"}, {"delimiter": [";"]}],
)
def test_damaged_options_are_refused_by_name(stored: Any) -> None:
    with pytest.raises(ValueError, match=r"^reading"):
        loaded_options(stored)


def test_training_stores_the_files_format_and_all_names_that_are_not_the_tasks() -> None:
    plain = training_reading(ReadOptions(columns={"text": "review", "label": "label"}), "train.csv")
    assert plain == ReadOptions(columns={"text": "review"}, format="csv")
    glue = training_reading(ReadOptions(format="glue/mrpc", columns={"label": "gold"}), "train.tsv")
    assert glue.columns == {"text": "#1 String", "text_pair": "#2 String", "label": "gold"}
    hub = training_reading(ReadOptions(format="glue/mnli"), None)
    assert hub.columns == {"text": "premise", "text_pair": "hypothesis"}
    assert training_reading(ReadOptions(), None) == ReadOptions()


@pytest.mark.parametrize("encoding", ["utf-8", "UTF_8", "utf-8-sig", "utf-16", "UTF-32"])
def test_an_encoding_that_a_file_says_itself_is_not_stored(encoding: str) -> None:
    assert training_reading(ReadOptions(encoding=encoding), "train.csv").encoding is None
    assert training_reading(ReadOptions(encoding="utf-16-le"), "train.csv").encoding == "utf-16-le"


@pytest.mark.parametrize(
    ("name", "text", "encoding", "given_options", "expected"),
    [
        # The same kind of file: everything that is stored, but what is given.
        ("new.csv", "id;review\n1;é", "latin-1", {}, replace(STORED, columns={"text": "review"})),
        ("new.csv", "review;stars\na;b", "utf-8", {}, STORED),
        ("new.csv", "review,stars\na,b", "utf-8", {"delimiter": ","}, replace(STORED, delimiter=",")),
        ("new.csv", "review;stars\nö;b", "utf-8", {"encoding": "utf-8"}, replace(STORED, encoding="utf-8")),
        (
            "new.csv",
            "review;rating;stars\na;b;c",
            "utf-8",
            {"columns": {"label": "rating"}},
            replace(STORED, columns={"text": "review", "label": "rating"}),
        ),
        # The task's own names where the file has no others.
        ("new.csv", "text;label\na;b", "utf-8", {}, replace(STORED, columns=None)),
        # A delimiter that leaves one column, where the usual one gives several; but not where neither does.
        ("new.csv", "review,stars\na,b", "utf-8", {}, replace(STORED, delimiter=None)),
        ("new.csv", "text,label\na,b", "utf-8", {}, replace(STORED, delimiter=None, columns=None)),
        ("new.csv", "review\na,b", "utf-8", {}, replace(STORED, columns={"text": "review"})),
        ("new.csv", "review,more\na,b", "utf-8", {"delimiter": ";"}, replace(STORED, columns=None)),
        # An encoding that the file contradicts; but not where it is given.
        ("new.csv", "review;stars\né;b", "utf-8", {}, replace(STORED, encoding=None)),
        ("new.csv", "review;stars\né;b", "latin-1", {}, STORED),
        ("new.csv", "review;stars\né;b", "utf-8", {"encoding": "cp1252"}, replace(STORED, encoding="cp1252")),
        # Other kinds of files: the columns only.
        ("new.tsv", "review\tstars\na\tb", "utf-8", {}, ReadOptions(columns=STORED.columns)),
        ("new.jsonl", '{"review": "a"}', "utf-8", {}, ReadOptions(columns={"text": "review"})),
        ("new.jsonl", '{"text": "a"}', "utf-8", {}, ReadOptions()),
        ("new.dat", "review\na", "utf-8", {"format": "tsv"}, ReadOptions(format="tsv", columns={"text": "review"})),
        # An extension that says nothing.
        ("new.dat", "review;stars\na;b", "utf-8", {}, STORED),
        ("new.csv.gz", "review;stars\na;b", "utf-8", {}, STORED),
    ],
)
def test_options_count_one_by_one_given_before_stored_before_usual(
    name: str,
    text: str,
    encoding: str,
    given_options: Mapping[str, Any],
    expected: ReadOptions,
    tmp_path: Path,
) -> None:
    path = written(tmp_path / name, text, encoding)
    assert reading_of_file(ReadOptions(**given_options), STORED, path, COLUMNS) == expected


def test_squad_files_stay_squad_files(tmp_path: Path) -> None:
    path = written(tmp_path / "dev.json", '{"data": [{"title": "t", "paragraphs": []}]}')
    stored = ReadOptions(format="jsonl", encoding="latin-1")
    assert reading_of_file(ReadOptions(), stored, path, COLUMNS) == ReadOptions()


def test_names_of_columns_that_the_task_lacks_are_not_used(tmp_path: Path) -> None:
    path = written(tmp_path / "new.csv", "words,review\na,b")
    stored = ReadOptions(columns={"text": "review", "tokens": "words"}, format="csv")
    assert reading_of_file(ReadOptions(), stored, path, COLUMNS).columns == {"text": "review"}


@given(
    row=st.dictionaries(st.sampled_from("abcd"), st.integers()), names=st.dictionaries(*[st.sampled_from("abcd")] * 2)
)
def test_a_renamed_row_keeps_what_it_has_under_the_tasks_names(row: dict[str, int], names: dict[str, str]) -> None:
    renamed = renamed_row(row, names)
    assert {name: renamed[name] for name in row} == row
    for name, other in names.items():
        assert renamed.get(name) == row.get(name, row.get(other))


def test_a_renamed_row_keeps_the_text_that_its_words_are_from() -> None:
    columns = (Column(name="words", kind="words"), Column(name="text", kind="text", required=False))
    assert renamed_row({"text": "a  b"}, {"words": "text"}, columns) == {"words": "a  b", "text": "a  b"}
    pair = (Column(name="text", kind="text"), Column(name="group", kind="id", required=False))
    assert renamed_row({"group": "a"}, {"text": "group"}, pair) == {"text": "a"}


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz", "rows.CSV.GZ"])
def test_the_layout_of_training_applies_to_compressed_files_too(name: str) -> None:
    stored = ReadOptions(format="csv", delimiter=";", header=False, label_separator="|")
    assert with_file_options(ReadOptions(), stored, Path(name)) == stored
    assert with_file_options(ReadOptions(header=True), stored, Path(name)).header is True
    assert with_file_options(ReadOptions(), stored, Path("rows.jsonl.gz")) == ReadOptions()


def test_a_recipe_without_a_header_is_remembered(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,x|y\n")
    spec = DataSpec(train=str(tmp_path / "rows.csv"), header=False, label_separator="|", columns={"text": "0"})
    expected = ReadOptions(columns={"text": "0"}, format="csv", header=False, label_separator="|")
    assert stored_reading(spec, COLUMNS) == expected
    assert loaded_options(stored_options(expected)) == expected


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30))
def test_utf8_is_told_from_other_encodings(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any.txt"
    path.write_bytes(text.encode())
    assert is_utf8_beyond_ascii(path) == (not text.isascii())
    path.write_bytes(gzip.compress(text.encode() + b"\xff"))
    assert not is_utf8_beyond_ascii(path)
    path.write_bytes(text.encode() + "a\ua9c3".encode("utf-16-le"))  # its bytes are valid utf-8, one of them is zero
    assert not is_utf8_beyond_ascii(path)
