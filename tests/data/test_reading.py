"""Reading of files: what must come through unchanged, and what must be reported."""

import codecs
import csv
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bert_tasks.data.columns import Column
from bert_tasks.data.formats import StreamFormat
from bert_tasks.data.formats.hub import HubSplit
from bert_tasks.data.reading import read as read_rows
from bert_tasks.data.rows import Rows
from bert_tasks.errors import DataError

TEXT = Column(name="text", kind="text")
LABELS = Column(name="labels", kind="labels", required=False)

Read = Callable[..., Rows]


def texts(table: Rows) -> list[str]:
    return [row["text"] for row in table]


def message(error: pytest.ExceptionInfo[DataError]) -> str:
    assert error.value.exit_code == 3
    return str(error.value)


def test_rows_carry_the_tasks_names_and_the_line(read: Read) -> None:
    table = read("id,rating,review\n1,good,fine film\n2,bad,dull\n", names={"text": "review", "label": "rating"})
    assert list(table) == [
        {"text": "fine film", "label": "good", "line": 2},
        {"text": "dull", "label": "bad", "line": 3},
    ]
    assert table.source == "rows.csv"
    assert table[1]["text"] == "dull"
    assert texts(table.select([1])) == ["dull"]
    assert table.select([1]).fingerprint != table.fingerprint


def test_a_large_cell_is_read_and_the_limit_of_the_process_is_put_back(read: Read) -> None:
    before = csv.field_size_limit()
    assert len(read("text,label\n" + "y" * 5_000_000 + ",x\n")[0]["text"]) == 5_000_000
    assert csv.field_size_limit() == before


MARKS = {
    "utf-8": codecs.BOM_UTF8,
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
    "utf-32-le": codecs.BOM_UTF32_LE,
    "utf-32-be": codecs.BOM_UTF32_BE,
}
CONTENTS = {
    "rows.csv": "text,label\r\ncafé ĉ 貓,x\r\n",
    "rows.tsv": "text\tlabel\r\ncafé ĉ 貓\tx\r\n",
    "rows.jsonl": '{"text": "café ĉ 貓", "label": "x"}\n',
    "rows.json": '[{"text": "café ĉ 貓", "label": "x"}]',
}


@pytest.mark.parametrize("encoding", MARKS)
@pytest.mark.parametrize("name", CONTENTS)
def test_a_byte_order_mark_decides_the_encoding(read: Read, name: str, encoding: str) -> None:
    content = MARKS[encoding] + CONTENTS[name].encode(encoding)
    assert texts(read(content, name, encoding="latin-1")) == ["café ĉ 貓"]


NAMES = st.lists(st.text("abc 'é", min_size=1, max_size=5).map(lambda name: f"x{name}x"), unique=True, max_size=4)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(NAMES, min_size=1, max_size=6), separator=st.sampled_from([";", "|", ",", "&&"]))
def test_several_labels_in_a_cell(read: Read, separator: str, rows: list[list[str]]) -> None:
    """Joined by the separator, or as JSON or Python print a list: the same labels."""
    for written in (separator.join, json.dumps, repr):
        file = io.StringIO()
        writer = csv.writer(file)
        writer.writerows([("text", "labels"), *(("a", written(names)) for names in rows)])
        table = read(file.getvalue(), columns=(TEXT, LABELS), label_separator=separator)
        assert [row["labels"] for row in table] == rows


def test_paths_that_are_no_file(read: Read, tmp_path: Path) -> None:
    read("text,label\na,x\n", "train.csv")
    os.mkfifo("pipe.csv")
    for path, said in [
        ("nowhere/train.csv", "no folder nowhere"),
        (str(tmp_path), "a folder where a file was expected. It holds train.csv"),
        ("train.csv/rows.csv", "no folder train.csv"),
        ("pipe.csv", "a pipe or a device where a file was expected"),
        ("/dev/zero", "a pipe or a device where a file was expected"),
    ]:
        with pytest.raises(DataError) as error:
            read_rows(path, (TEXT,))
        assert said in message(error)


def test_revision_of_a_data_set_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\na,x\nb,y\n")
    with pytest.raises(DataError, match="has no revision 'v1'"):
        read_rows(HubSplit(dataset=str(tmp_path), revision="v1"), (TEXT,))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a fine film", "text"),
        ("", "text"),
        ("[1] is a citation", "text"),
        ("[1, 2]", "text"),
        ("3", "text"),
        ('{"text": "a"}', "jsonl"),
        ('[{"text": "a"}]', "jsonl"),
        ('{"text": ', "jsonl"),
        ("{", "jsonl"),
        ("[", "jsonl"),
    ],
)
def test_the_first_line_shows_whether_lines_are_texts(line: str, expected: str) -> None:
    assert StreamFormat(name="rows", headers=("text",)).detect(f"{line}\n").name == expected
