"""Reading of files: what must come through unchanged, and what must be reported."""

import codecs
import csv
import gzip
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
from bert_tasks.data.issues import RowIssues
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.reading import read as read_rows
from bert_tasks.data.rows import Rows
from bert_tasks.errors import DataError

TEXT = Column(name="text", kind="text")
LABEL = Column(name="label", kind="label", required=False)
LABELS = Column(name="labels", kind="labels", required=False)
SCORE = Column(name="score", kind="number", required=False)

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


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(b"\xef\xbb\xbftext,label\na,x\n", ["a"], id="byte order mark"),
        pytest.param(b"text,label\r\na,x\r\nb,y\r\n", ["a", "b"], id="crlf"),
        pytest.param(b"text,label\ra,x\rb,y\r", ["a", "b"], id="cr only"),
        pytest.param(b'text,label\n"a\r\nb\nc",x\n', ["a\r\nb\nc"], id="quoted newlines"),
        pytest.param(b'text,label\n"say ""hi"", twice",x\n', ['say "hi", twice'], id="doubled quotes"),
        pytest.param(b'text,label\na "b" c,x\n', ['a "b" c'], id="quotes inside an unquoted cell"),
        pytest.param(b"text,label\na\x00b,x\n", ["a\x00b"], id="nul byte"),
        pytest.param("text,label\ne\u0301 \U0001f600\u2028,x\n".encode(), ["e\u0301 \U0001f600\u2028"], id="emoji"),
        pytest.param(b"text,label\n\na,x\n\n\n", ["a"], id="blank lines"),
        pytest.param(b"text,label\nNA,x\nnull,x\nNone,x\nnan,x\n", ["NA", "null", "None", "nan"], id="null words"),
        pytest.param(b"text,label\n a \t,x", [" a \t"], id="outer spaces, no last line end"),
        pytest.param(b"text,label\n" + b"y" * 5_000_000 + b",x\n", ["y" * 5_000_000], id="5 MB cell"),
    ],
)
def test_csv_texts_come_through_byte_for_byte(read: Read, content: bytes, expected: list[str]) -> None:
    assert texts(read(content)) == expected


def test_lines_are_those_an_editor_shows(read: Read) -> None:
    table = read('text,label\n\n"a\nb",x\nc,y\n')
    assert [row["line"] for row in table] == [3, 5]


def test_the_process_wide_cell_limit_is_put_back(read: Read) -> None:
    import csv

    before = csv.field_size_limit()
    read("text,label\na,x\n")
    assert csv.field_size_limit() == before


@pytest.mark.parametrize("header", ["text,label", "text,label,größe"])
def test_other_encodings_are_read_when_stated(read: Read, header: str) -> None:
    content = f"{header}\n“café”,x{',1' if 'größe' in header else ''}\n".encode("cp1252")
    with pytest.raises(DataError) as error:
        read(content)
    assert "such as 'cp1252' for Western European or 'gb18030' for Chinese text" in message(error)
    assert "latin" not in message(error)  # it reads the quotes as control characters, without an error
    assert str(error.value).encode()  # can be printed
    assert texts(read(content, encoding="cp1252")) == ["“café”"]


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


@pytest.mark.parametrize("user_encoding", ["utf-8", "latin-1", "same"])
@pytest.mark.parametrize("encoding", MARKS)
@pytest.mark.parametrize("name", CONTENTS)
def test_a_byte_order_mark_decides_the_encoding(read: Read, name: str, encoding: str, user_encoding: str) -> None:
    content = MARKS[encoding] + CONTENTS[name].encode(encoding)
    assert texts(read(content, name, encoding=encoding if user_encoding == "same" else user_encoding)) == ["café ĉ 貓"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("name", CONTENTS)
def test_compressed_files_are_read_whatever_their_name(read: Read, name: str, encoding: str) -> None:
    content = gzip.compress(CONTENTS[name].encode(encoding))
    assert texts(read(content, f"{name}.gz")) == texts(read(content, name)) == ["café ĉ 貓"]
    with pytest.raises(DataError, match="damaged gzip data"):
        read(content[:-12], f"cut-{name}.gz")
    with pytest.raises(DataError, match="damaged gzip data"):
        read(content[:12] + bytes([content[12] ^ 0xFF]) + content[13:], f"broken-{name}.gz")


@pytest.mark.parametrize(("name", "format"), [("rows.csv", None), ("rows.tsv", None), ("rows.tsv", "tsv/plain")])
def test_files_without_a_header(read: Read, name: str, format: str | None) -> None:
    mark = "," if name == "rows.csv" else "\t"
    lines = ["", f"good film{mark}1", f"dull{mark}0", "cut", f"fine{mark}1", f"a{mark}b{mark}c"]
    names = {"text": "0", "label": "1"}
    table = read("\n".join(lines[:3]) + "\n", name, names=names, header=False, format=format)
    assert [(row["text"], row["label"], row["line"]) for row in table] == [("good film", "1", 2), ("dull", "0", 3)]
    with pytest.raises(RowIssues, match=rf"{name}:4: 1 cell where the first line has 2\n .*:6: 3 cells"):
        read("\n".join(lines), name, names=names, header=False, format=format)
    with pytest.raises(DataError, match="the columns are: '0', '1'"):
        read("\n".join(lines[:3]), name, header=False, format=format)
    with pytest.raises(DataError, match="the file is empty"):
        read("\n", name, header=False, format=format)


def test_a_header_belongs_to_delimited_files(read: Read) -> None:
    with pytest.raises(DataError, match=r"header = false is for csv and tsv files, but jsonl has no header line"):
        read('{"text": "a", "label": "x"}\n', "rows.jsonl", header=False)


NAMES = st.lists(st.text("abc 'é", min_size=1, max_size=5).map(lambda name: f"x{name}x"), unique=True, max_size=4)


@pytest.mark.parametrize("separator", [";", "|", ",", "&&"])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(NAMES, min_size=1, max_size=6))
def test_several_labels_in_a_cell(read: Read, separator: str, rows: list[list[str]]) -> None:
    """Joined by the separator, or as JSON or Python print a list: the same labels."""
    for written in (separator.join, json.dumps, repr):
        file = io.StringIO()
        writer = csv.writer(file)
        writer.writerows([("text", "labels"), *(("a", written(names)) for names in rows)])
        table = read(file.getvalue(), columns=(TEXT, LABELS), label_separator=separator)
        assert [row["labels"] for row in table] == rows


def test_an_unknown_encoding_is_named(read: Read) -> None:
    for encoding, text in (("utf-99", "'utf-99'"), ("base64", "not a text encoding"), ("a\0", "not a text encoding")):
        with pytest.raises(DataError, match=text):
            read("text,label\na,x\n", encoding=encoding)
    with pytest.raises(DataError, match=r"rows.csv: not a text in 'utf-16'"):
        read("text,label\na,xy\n", encoding="utf-16")


def test_equal_problems_are_one_line_and_only_the_first_twenty_are_shown(read: Read) -> None:
    content = "text,label\n" + "a,\n" * 30 + "b,c,d\n" * 3 + "".join(f"x,{n}th\n" for n in range(25)) + "good,1\n"
    with pytest.raises(RowIssues) as error:
        read(content, columns=(TEXT, Column(name="label", kind="number")))
    lines = message(error).splitlines()
    assert lines[0].startswith("58 problems")
    assert len(lines) == 22
    assert lines[1] == "  rows.csv:2: missing number in column 'label': ''. (30 times, also in lines 3, 4, 5, 6, ...)"
    assert lines[2].startswith("  rows.csv:32: 3 cells where the header has 2. ")
    assert lines[2].endswith("(3 times, also in lines 33, 34)")
    assert lines[20].startswith("  rows.csv:52:")
    assert lines[21] == "  ... and 7 more"


def test_paths_that_are_no_file(read: Read, tmp_path: Path) -> None:
    read("text,label\na,x\n", "train.csv")
    os.mkfifo("pipe.csv")
    for path, said in [
        ("trian.csv", "no such file, did you mean 'train.csv'?"),
        ("nowhere/train.csv", "no folder nowhere"),
        (str(tmp_path), "a folder where a file was expected. It holds train.csv"),
        ("train.csv/rows.csv", "no folder train.csv"),
        ("pipe.csv", "a pipe or a device where a file was expected"),
        ("/dev/zero", "a pipe or a device where a file was expected"),
    ]:
        with pytest.raises(DataError) as error:
            read_rows(path, (TEXT,))
        assert said in message(error)
    (tmp_path / "train.xyz").touch()
    with pytest.raises(DataError, match=r"no format belongs to the extension '\.xyz'"):
        read_rows("train.xyz", (TEXT,))
    with pytest.raises(DataError, match="unknown format 'cvs', did you mean 'csv'"):
        read_rows("train.csv", (TEXT,), ReadOptions(format="cvs"))


def test_delimiters_and_tsv(read: Read) -> None:
    assert texts(read("text;label\na,b;x\n", delimiter=";")) == ["a,b"]
    assert texts(read('text\tlabel\n"a\tb"\tx\n', "rows.tsv")) == ["a\tb"]
    assert texts(read('text\tlabel\n"a\tx\n', "rows.tsv", format="tsv/plain")) == ['"a']
    with pytest.raises(DataError, match="Expected one character"):
        read("text;label\n", delimiter=";;")


def test_targets_may_be_missing_for_prediction(read: Read) -> None:
    columns = (TEXT, LABEL, LABELS, SCORE)
    assert list(read("text\na\n", columns=columns, require_labels=False)) == [{"text": "a", "line": 2}]
    table = read("text,label\na,\nb,x\n", require_labels=False, names={"label": "label"})
    assert [row["label"] for row in table] == [None, "x"]
    assert "label" not in read("text\na\n", require_labels=False, names={"label": "rating"})[0]


def test_an_optional_text_is_read_where_it_is(read: Read) -> None:
    columns = (TEXT, Column(name="text_pair", kind="text", required=False), LABEL)
    assert "text_pair" not in read("text,label\na,x\n", columns=columns)[0]
    assert read("text,label,text_pair\na,x,b\n", columns=columns)[0]["text_pair"] == "b"


def test_label_sets(read: Read) -> None:
    content = "text,labels\na,x;y\nb,\nc, y ; x\n"
    assert [row["labels"] for row in read(content, columns=(TEXT, LABELS))] == [["x", "y"], [], ["y", "x"]]
    cells = 'text,labels\na,"[""x"", ""y""]"\nb,[]\nc,"[ x; y"\n'
    assert [row["labels"] for row in read(cells, columns=(TEXT, LABELS))] == [["x", "y"], [], ["[ x", "y"]]
    lines = [{"text": "a", "labels": ["x", 3]}, {"text": "b", "labels": []}, {"text": "c", "labels": "x;y"}]
    table = read("".join(json.dumps(line) + "\n" for line in lines), "rows.jsonl", columns=(TEXT, LABELS))
    assert [row["labels"] for row in table] == [["x", "3"], [], ["x", "y"]]


def test_numbers(read: Read) -> None:
    table = read("text,score\na,1\nb,-2.5e-1\nc, 3.0\n", columns=(TEXT, SCORE))
    assert [row["score"] for row in table] == [1.0, -0.25, 3.0]


def test_json_lines(read: Read) -> None:
    lines = [
        '{"text": "a", "label": 1.0}',
        '{"label": true, "text": "b\\n"}',
        "",
        '{"text": "c", "label": "x", "more": [1]}',
    ]
    table = read("\r\n".join(lines), "rows.json")
    assert list(table) == [
        {"text": "a", "label": "1", "line": 1},
        {"text": "b\n", "label": "True", "line": 2},
        {"text": "c", "label": "x", "line": 4},
    ]


def test_json_files_of_another_shape(read: Read) -> None:
    rows = [{"text": f"row {number}", "label": "x"} for number in range(5)]
    for content in (json.dumps(rows), "\n " + json.dumps(rows, indent=2)):
        table = read(content, "rows.json")
        assert [(row["text"], row["line"]) for row in table] == [(f"row {n}", n + 1) for n in range(5)]
    with pytest.raises(RowIssues, match=r"rows.json:2: expected an object such as .*, not 'b'"):
        read('[{"text": "a", "label": "x"}, "b"]', "rows.json")
    for content in ('[{"text": "a"}, {"te', '["a", "b"]\n["c", "d"]\n', "[" * 100_000):
        with pytest.raises(DataError, match="a JSON array that"):
            read(content, "rows.json")
    with pytest.raises(DataError, match="no rows"):
        read("[]", "rows.json")
    with pytest.raises(DataError, match="no column 'text', did you mean 'texts'"):
        read('{"texts": "a", "label": "x"}\n', "rows.jsonl")


def test_parquet(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, Value

    columns = {"text": ["a", ""], "label": [1, 0], "id": [7, 8]}
    plain, named = tmp_path / "plain.parquet", tmp_path / "named.parquet"
    Dataset.from_dict(columns).to_parquet(plain)
    features = Features({"text": Value("string"), "label": ClassLabel(names=["bad", "good"]), "id": Value("int64")})
    Dataset.from_dict(columns, features=features).to_parquet(named)
    rows = list(read_rows(plain, (TEXT, LABEL), cache_dir=tmp_path))
    assert rows == [{"text": "a", "label": "1", "line": 1}, {"text": "", "label": "0", "line": 2}]
    named_rows = read_rows(named, (TEXT, LABEL), cache_dir=tmp_path)
    assert [row["label"] for row in named_rows] == ["good", "bad"]
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(plain.read_bytes()[:-20])
    with pytest.raises(DataError, match="cannot be read as parquet"):
        read_rows(damaged, (TEXT, LABEL), cache_dir=tmp_path)


def test_glue_files_are_read_without_quoting(read: Read) -> None:
    sst2 = 'sentence\tlabel\n"half a quote \t0\ngood\t1\n'
    table = read(sst2, "train.tsv", format="glue/sst2")
    assert table[0] == {"text": '"half a quote ', "label": "negative", "line": 2}
    assert table[1]["label"] == "positive"


def test_cola_has_a_header_in_its_test_file_only(read: Read) -> None:
    train = read("gj04\t1\t\tThe sailors rode.\r\nr-67\t0\t*\tRode sailors.\n", "train.tsv", format="glue/cola")
    assert [(row["text"], row["label"], row["line"]) for row in train] == [
        ("The sailors rode.", "acceptable", 1),
        ("Rode sailors.", "unacceptable", 2),
    ]
    test = read("index\tsentence\n0\tBill whistled.\n", "test.tsv", format="glue/cola", require_labels=False)
    assert list(test) == [{"text": "Bill whistled.", "line": 2}]


@pytest.mark.parametrize("format", ["csv", "tsv", "tsv/plain"])
def test_a_tab_may_be_typed_with_a_backslash(read: Read, format: str) -> None:
    table = read("text\tlabel\na, b\tx\n", format=format, delimiter="\\t")
    assert [(row["text"], row["label"]) for row in table.rows] == [("a, b", "x")]


@pytest.mark.parametrize("format", ["csv", "tsv", "tsv/plain"])
@pytest.mark.parametrize("delimiter", ["", "ab", "\n", "\r", '"'])
def test_a_delimiter_is_one_character_in_every_format(read: Read, format: str, delimiter: str) -> None:
    with pytest.raises(DataError, match="Expected one character"):
        read("text\tlabel\na, b\tx\n", format=format, delimiter=delimiter)


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
