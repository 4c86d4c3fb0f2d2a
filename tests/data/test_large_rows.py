"""Rows that would fill the memory, as a small compressed file can hold them: rejected in time; many rows are read."""

import gzip
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import srsly.msgpack
from pyarrow import parquet

from bert_tasks.data import limits
from bert_tasks.data.batch import Record, in_batches
from bert_tasks.data.columns import Column
from bert_tasks.data.formats import FORMATS, StreamFormat, annotations, workbooks
from bert_tasks.data.formats.parquet import ThriftReader
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.parsers import arrow_batches
from bert_tasks.data.reading import read as read_rows
from bert_tasks.data.rows import Rows
from bert_tasks.errors import DataError
from support import runs
from support.workbooks import SHEET, STRINGS, workbook

ROW, JSON = 1000, 4000  # characters
TEXT = (Column(name="text", kind="text"),)
WORDS = (Column(name="words", kind="words"),)
SPANS = (Column(name="context", kind="text"), Column(name="question", kind="text"))
Read = Callable[..., Rows]


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LARGEST_ROW", ROW)
    monkeypatch.setattr(limits, "LARGEST_WHOLE", JSON)


def squad(context: str) -> str:
    questions = [{"id": "1", "question": "Who?", "answers": []}]
    return json.dumps({"data": [{"title": "t", "paragraphs": [{"context": context, "qas": questions}]}]})


ROW_SAID = "the row that begins here has more than 1,000 characters. Close its quotes, split its texts"
JSON_SAID = "has more than 4,000 characters. Split it into rows, such as one JSON object per line"


@pytest.mark.parametrize(
    ("name", "content", "columns", "options", "said"),
    [
        ("rows.csv", "text\na\n" + "b" * 1001 + "\n", TEXT, {}, f"rows.csv:3: {ROW_SAID}"),
        ("rows.csv", 'text\na\n"' + "b\n" * 600, TEXT, {}, f"rows.csv:3: {ROW_SAID}"),
        ("rows.csv", "text\na\n" + '"\n",' * 600, TEXT, {}, f"rows.csv:3: {ROW_SAID}"),
        ("rows.csv", "b" * 1001, TEXT, {}, f"rows.csv:1: {ROW_SAID}"),
        ("rows.tsv", "text\na\n" + "b" * 1001, TEXT, {"format": "tsv/plain"}, f"rows.tsv:3: {ROW_SAID}"),
        ("rows.jsonl", '{"text": "a"}\n{"text": "' + "b" * 1001 + '"}', TEXT, {}, f"rows.jsonl:2: {ROW_SAID}"),
        ("rows.json", json.dumps([{"text": "b" * 400}] * 10), TEXT, {}, f"rows.json: the file {JSON_SAID}"),
        ("rows.json", json.dumps([{"text": "b"}] * 400, indent=1), TEXT, {}, f"rows.json: the file {JSON_SAID}"),
        ("rows.json", squad("b" * 4001), SPANS, {}, f"rows.json: the file {JSON_SAID}"),
        ("rows.txt", "a\n" + "b" * 1001, TEXT, {"document": "line"}, f"rows.txt:2: {ROW_SAID}"),
        ("rows.txt", "a\n\n" + "b b\n" * 300, TEXT, {}, "rows.txt:3: .*separate documents by blank lines"),
        ("rows.conll", "a O\n\n" + "b O\n" * 300, WORDS, {}, f"rows.conll:3: {ROW_SAID}"),
        ("rows.conll", "a O\n\n# b O\n" + "b" * 1001 + " O\n", WORDS, {}, f"rows.conll:.: {ROW_SAID}"),
        ("rows.conllu", "# " + "b" * 1001, WORDS, {}, f"rows.conllu:1: {ROW_SAID}"),
    ],
)
def test_a_row_that_is_too_large_is_named(
    read: Read, name: str, content: str, columns: tuple[Column, ...], options: dict[str, str], said: str
) -> None:
    with pytest.raises(DataError, match=said.replace(name, f"{name}.gz")):
        read(gzip.compress(content.encode()), f"{name}.gz", columns=columns, **options)


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize(
    ("name", "row", "columns", "limit"),
    [
        ("rows.csv", "{}", TEXT, ROW),
        ("rows.csv", '"a line of a quoted cell\n{}"', TEXT, ROW),
        ("rows.jsonl", '{{"text": "{}"}}', TEXT, ROW),
        ("rows.txt", "{}", TEXT, ROW),
        ("rows.conll", "a-word-and-its-tag O\n{} O", WORDS, ROW),
        ("rows.json", '[{{"text": "{}"}}]', TEXT, JSON),
        ("rows.json", '[{{"text": "a"}},\n{{"text": "{}"}}\n]', TEXT, JSON),
    ],
)
def test_a_row_of_exactly_the_largest_size_is_read(
    read: Read, name: str, row: str, columns: tuple[Column, ...], limit: int, end: str
) -> None:
    header = "text\nb\n" if name == "rows.csv" else ""
    text = "b" * (limit - len(row.format("")) - len(end))
    assert text in str(read(header + row.format(text) + end, name, columns=columns)[-1])
    with pytest.raises(DataError, match="characters"):
        read(header + row.format(f"{text}b") + end, name, columns=columns)


@pytest.mark.parametrize(
    ("name", "start", "line", "columns"),
    [
        ("rows.csv", 'text\n"', "b\n", TEXT),
        ("rows.jsonl", "", "\n", TEXT),
        ("rows.txt", "", "b\n", TEXT),
        ("rows.conll", "", "b\n", WORDS),
    ],
)
def test_a_row_of_too_many_short_lines(
    read: Read, name: str, start: str, line: str, columns: tuple[Column, ...]
) -> None:
    """A parser needs about 300 bytes for a word of CoNLL, whose line may have two characters."""
    last = {"rows.csv": '"\n', "rows.jsonl": '{"text": "b"}\n'}.get(name, "\n")
    assert len(read(start + line * 50 + last, name, columns=columns)) == 1
    with pytest.raises(DataError, match=ROW_SAID):
        read(start + line * 70 + last, name, columns=columns)


@pytest.mark.parametrize("extension", [".txt", ".ann"])
def test_a_text_of_a_folder_that_is_too_large_is_named(tmp_path: Path, extension: str) -> None:
    """A folder of texts, one folder for each label, and a folder of brat's annotations."""
    for name in ("pos", "neg"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.txt").write_text("b\n" * 600 if name == "pos" else "b", encoding="utf-8")
    if extension == ".ann":
        (tmp_path / "pos" / "1.ann").write_text("", encoding="utf-8")
    folder = tmp_path if extension == ".txt" else tmp_path / "pos"
    with pytest.raises(DataError, match=rf"pos/1\.txt:1: {ROW_SAID}"):
        read_rows(folder, TEXT, require_labels=False, cache_dir=tmp_path / "cache")


def test_a_json_array_in_a_stream_may_be_larger_than_a_row(tmp_path: Path) -> None:
    path = tmp_path / "stdin"
    path.write_text(json.dumps([{"text": "b" * 100}] * 30), encoding="utf-8")
    with StreamFormat(name="stdin").open(path, ReadOptions()) as opened:
        assert sum(map(len, opened.batches)) == 30
    path.write_text(json.dumps([{"text": "b" * 100}] * 50), encoding="utf-8")
    with (
        pytest.raises(DataError, match=f"stdin: the file {JSON_SAID}"),
        StreamFormat(name="stdin").open(path, ReadOptions()) as opened,
    ):
        list(opened.batches)


@pytest.mark.parametrize(
    ("name", "row", "first", "columns", "options"),
    [
        ("rows.csv", "b" * 90 + "\n", "text\n", TEXT, {}),
        ("rows.csv", f'"{"b" * 45}\n{"b" * 44}"\n', "text\n", TEXT, {}),
        ("rows.jsonl", json.dumps({"text": "b" * 90}) + "\n", "", TEXT, {}),
        ("rows.txt", "b" * 90 + "\n\n", "", TEXT, {}),
        ("rows.conll", "b O\n" * 20 + "\n", "# comment\n", WORDS, {}),
    ],
)
def test_a_file_of_many_rows_may_have_any_size(
    read: Read, name: str, row: str, first: str, columns: tuple[Column, ...], options: dict[str, str]
) -> None:
    content = gzip.compress((first + row * 300).encode())
    assert len(read(content, f"{name}.gz", columns=columns, **options)) == 300


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["b" * 3000], "a row of the parquet file has more than 1,000 characters"),
        (["b"] * 50 + ["c" * 1001] + ["b"] * 50, "rows.parquet: row 51 has more than 1,000 characters"),
    ],
)
def test_a_large_row_of_a_parquet_file(read: Read, tmp_path: Path, texts: list[str], said: str) -> None:
    path = tmp_path / "made.parquet"
    parquet.write_table(pyarrow.table({"text": texts}), path)
    with pytest.raises(DataError, match=said):
        read(path.read_bytes(), "rows.parquet", columns=TEXT)
    parquet.write_table(pyarrow.table({"text": ["b" * 500] * 300}), path)
    assert len(read(path.read_bytes(), "rows.parquet", columns=TEXT)) == 300


LONG = "b" * 2**20
POOL = pyarrow.proxy_memory_pool(pyarrow.default_memory_pool())  # buffers may outlive a test, and need their pool


def repeated(value: Any) -> pyarrow.Array:
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 300, pyarrow.int32()), pyarrow.array([value]))


@pytest.mark.parametrize(
    ("texts", "options"),
    [
        (lambda: repeated(LONG), {}),
        (lambda: repeated(LONG), {"compression": "none"}),
        pytest.param(lambda: [[LONG]] * 300, {}, marks=pytest.mark.slow),
        pytest.param(
            lambda: [f"{LONG}{number}" for number in range(300)],
            {"column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["compressed dictionary", "dictionary", "lists", "prefixes"],
)
def test_a_parquet_file_of_repeated_texts_is_read_in_small_batches(
    texts: Callable[[], Any], options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have 300 MB. Read at once, the rows had all of them in memory."""
    monkeypatch.undo()
    path = tmp_path / "rows.parquet"
    table, use_dictionary = pyarrow.table({"text": texts()}), "column_encoding" not in options
    parquet.write_table(table, path, use_dictionary=use_dictionary, dictionary_pagesize_limit=2**30, **options)
    del table
    usual = pyarrow.default_memory_pool()
    pyarrow.set_memory_pool(POOL)
    try:
        with FORMATS["parquet"].open(path, ReadOptions()) as opened:
            assert sum(map(len, opened.batches)) == 300
    finally:
        pyarrow.set_memory_pool(usual)
    assert path.stat().st_size < 2 * len(LONG)
    assert 0 < POOL.max_memory() < 200 * 2**20


def test_a_parquet_file_of_different_texts_is_read_in_large_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest text of its dictionary says how many rows fit into a batch. Small batches would take much longer."""
    monkeypatch.undo()
    path = tmp_path / "rows.parquet"
    table = pyarrow.table({"text": [f"{'b' * 300}{number}" for number in range(2500)]})
    parquet.write_table(table, path, compression="none")
    with FORMATS["parquet"].open(path, ReadOptions()) as opened:
        assert [len(batch) for batch in opened.batches] == [1000, 1000, 500]


def test_a_frame_of_repeated_texts_is_read_row_by_row() -> None:
    batches = arrow_batches(pyarrow.table({"text": repeated("b" * 100)})).batches
    assert [list(batch.lines) for batch in batches] == [[line] for line in range(1, 301)]


def test_large_rows_are_read_in_small_batches() -> None:
    rows = [Record(1, {"words": ["b" * 60, "c" * 60]})] * 5  # a batch ends at a quarter of the largest row
    assert list(map(len, in_batches(rows))) == [2, 2, 1]


@pytest.mark.parametrize("cells", [{"vector": [0.5] * 8}, {"a": {"b": [1, 2, 3, 4]}, "c": [None, True, False, 7]}])
def test_numbers_count_in_the_size_of_a_batch(cells: dict[str, Any]) -> None:
    assert list(map(len, in_batches([Record(1, cells)] * 5))) == [2, 2, 1]


FIRST = (Column(name="column 0", kind="text"),)
FILM = [("text", "label"), ("a film", "a")]
SHEET_END = "</sheetData>"
DOCTYPE = '<!DOCTYPE x [<!ENTITY a "bbbb">]>'


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (
            f"<row><c t='str'><v>{'b' * 2**19}</v></c></row>",
            r"a row, or a part, of '.*sheet1.xml' has more than 262,144",
        ),
        ("<row><c t='str'><v>" + "b" * 1001 + "</v></c></row>", "row 3 has more than 1,000 characters"),
        ("<row r='999999999'><c t='str'><v>b</v></c></row>", "has a row after row 5,000, which is the last"),
        ("<row>" + "<c/>" * 2**15 + "</row>", "of '.*sheet1.xml' has more than 15,000 cells and other elements"),
    ],
)
def test_a_bomb_in_a_workbook(end: str, said: str, read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LARGEST_WHOLE", 2**18)
    monkeypatch.setattr(workbooks, "_MOST_TAGS", 15_000)
    monkeypatch.setattr(workbooks, "_MOST_ROWS", 5_000)
    content = workbook(FILM, {SHEET: lambda sheet: sheet.replace(SHEET_END, end + SHEET_END)})
    with pytest.raises(DataError, match=rf"rows.xlsx: .*{said}"):
        read(content, "rows.xlsx", columns=TEXT)


def test_texts_and_parts_of_a_workbook_are_limited(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LARGEST_WHOLE", 2**16)
    long_text = workbook(FILM, {STRINGS: lambda xml: xml.replace("a film", "b" * 2**17)})
    with pytest.raises(DataError, match=rf"rows\.xlsx: a row, or a part, of '{STRINGS}' has more than 65,536 bytes"):
        read(long_text, "rows.xlsx")
    monkeypatch.setattr(workbooks, "_MOST_PART_BYTES", 2**10)
    with pytest.raises(DataError, match="has more than 1,024 bytes"):
        read(workbook(FILM), "rows.xlsx")


@pytest.mark.parametrize("part", [STRINGS, "xl/workbook.xml", SHEET])
def test_entities_of_a_workbook_are_refused(part: str, read: Read) -> None:
    content = workbook(FILM, {part: lambda xml: DOCTYPE + xml.removeprefix("<?xml version='1.0' encoding='UTF-8'?>")})
    with pytest.raises(DataError, match=rf"rows\.xlsx: '{part}' does not begin as the XML of a workbook does"):
        read(content, "rows.xlsx")


def test_a_shared_text_counts_in_each_cell_of_a_row(read: Read) -> None:
    """It is in memory once, until a row is stored."""
    names = [f"column {number}" for number in range(6)]
    assert len(read(workbook([names, ["b" * 160] * 6]), "rows.xlsx", columns=FIRST)) == 1
    with pytest.raises(DataError, match=rf"rows\.xlsx: row 2 {ROW_SAID.removeprefix('the row that begins here ')}"):
        read(workbook([names, ["b" * 170] * 6]), "rows.xlsx", columns=FIRST)


def test_a_large_workbook_is_read(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are more than the limit together, and its dimensions are wrong."""
    monkeypatch.setattr(limits, "LARGEST_WHOLE", 2**18)
    row = "<row><c t='str'><v>" + "b" * 900 + "</v></c></row>"
    more = row * 1000 + "<row r='5000'><c t='str'><v>end</v></c></row>"

    def with_rows(sheet: str) -> str:
        sheet = re.sub('<dimension ref="[^"]*"', '<dimension ref="A1:A2"', sheet)
        return sheet.replace(SHEET_END, more + SHEET_END)

    rows = read(workbook(FILM, {SHEET: with_rows}), "rows.xlsx", columns=TEXT)
    assert [row["line"] for row in rows][-2:] == [1002, 5000]


@pytest.mark.parametrize(
    ("lines", "said"), [("a,b,c\n", "rows.csv:1: 3 columns"), ('{"a": 1, "b": 2, "c": 3}\n', "rows.jsonl:1: 3 columns")]
)
def test_a_row_of_too_many_columns(lines: str, said: str, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_COLUMNS", 2)
    with pytest.raises(DataError, match=f"{said}, but at most 2 can be read"):
        read(lines, said.partition(":")[0])


def docbin(tmp_path: Path, **fields: Any) -> bytes:
    """A DocBin of one document, with some fields of its msgpack."""
    import spacy
    from spacy.tokens import DocBin

    content = DocBin(docs=[spacy.blank("xx")("b " * 10)]).to_bytes()
    return zlib.compress(srsly.msgpack.packb({**srsly.msgpack.unpackb(zlib.decompress(content)), **fields}))


def test_a_bomb_in_a_docbin(read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import spacy
    from spacy.tokens import Doc, DocBin, Span

    long_word = Doc(spacy.blank("xx").vocab, words=["b" * 300] * 4)
    with pytest.raises(DataError, match=r"rows\.spacy: a document has more than 1,000 characters"):
        read(DocBin(docs=[long_word]).to_bytes(), "rows.spacy", columns=TEXT)
    named = spacy.blank("xx")("b " * 4)
    named.ents = [Span(named, number, number + 1, label="c" * 300) for number in range(4)]
    with pytest.raises(DataError, match=r"rows\.spacy: row 1 has more than 1,000 characters"):
        read(DocBin(docs=[named]).to_bytes(), "rows.spacy", columns=TEXT)
    monkeypatch.setattr(annotations, "_MOST_VALUES", 100)
    with pytest.raises(DataError, match=r"rows\.spacy: the file has more than 100 values"):
        read(docbin(tmp_path, extra=[[]] * 99), "rows.spacy", columns=TEXT)
    monkeypatch.setattr(limits, "LARGEST_WHOLE", 2000)
    with pytest.raises(DataError, match=r"rows\.spacy: the decompressed file has more than 2,000 bytes"):
        read(docbin(tmp_path, extra=b"b" * 10**6), "rows.spacy", columns=TEXT)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "start"), [("rows.csv.gz", 'text\n"'), ("rows.json.gz", '[{"text": "')])
def test_a_bomb_ends_the_command_before_it_fills_the_memory(tmp_path: Path, name: str, start: str) -> None:
    """3 GB in 3 MB; the address space has room for the command and a row."""
    zeros = gzip.compress(b"0" * 2**26, 1)
    (tmp_path / name).write_bytes(gzip.compress(start.encode()) + zeros * 48)
    options = "--type bpe --vocab-size 300 --output made"
    script = f"ulimit -v 5000000; exec {runs.CONSOLE[0]} tokenizer {name} {options}"
    ended = runs.run(["sh", "-c", f"cd {tmp_path} && {script}"], folder=tmp_path, HF_DATASETS_CACHE=str(tmp_path / "c"))
    assert (ended.code, "characters. " in ended.err) == (3, True), ended.err


def test_a_number_in_the_metadata_of_parquet_has_64_bits() -> None:
    """A longer one would be summed up for minutes."""
    with pytest.raises(ValueError, match="more than 64 bits"):
        ThriftReader(b"\x15" + b"\xff" * 100 + b"\x01\x00").struct()
    assert ThriftReader(b"\x15" + b"\xfe" + b"\xff" * 8 + b"\x01\x00").struct() == {1: 2**63 - 1}
