"""Rows that were read are kept, verified, and read again when their file, the options or the store changed."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from bert_tasks.data.arrow import ArrowRows, read_batches, store, write_batches
from bert_tasks.data.issues import RowIssues
from bert_tasks.data.rows import Rows
from bert_tasks.errors import DataError

Read = Callable[..., Rows]


def test_a_read_file_is_not_parsed_again(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read("text,label\na,x\n")
    monkeypatch.setattr("bert_tasks.data.reading._write", lambda *_: pytest.fail("the file is parsed again"))
    again = read("text,label\na,x\n")
    assert list(again) == list(first)
    assert again.fingerprint == first.fingerprint


def test_rows_in_order_come_from_the_file_in_batches(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    table = read("text,label\n" + "".join(f"row {number},x\n" for number in range(2500)))
    assert table.file is not None
    batches = [len(batch) for batch in read_batches(table.file, ["text"])]
    assert batches == [1000, 1000, 500]
    monkeypatch.setattr(ArrowRows, "tables", None)  # of the mapped file
    assert [row["text"] for row in table] == [f"row {number}" for number in range(2500)]
    assert list(table)[7] == table[7]


def test_contents_and_options_change_the_fingerprint(read: Read) -> None:
    content = "text,label,other\na,x,y\n"
    tables = [
        read(content),
        read(content, names={"label": "other"}),
        read(content, encoding="latin-1"),
        read(content, require_labels=False),
        read(content + "b,x,y\n"),
    ]
    assert len({table.fingerprint for table in tables}) == 5
    assert tables[1][0]["label"] == "y"


def test_what_is_assumed_and_what_is_stated_are_the_same(read: Read) -> None:
    """A file that may be read with and without a header: what the reading is decides, not how it is stated."""
    stated = {"encoding": "utf-8", "header": True, "label_separator": ";", "document": "line"}
    tables = [
        read("0,1\na,x\n", names={"text": "0", "label": "1"}, **options) for options in ({}, stated, {"header": False})
    ]
    assert [len(table) for table in tables] == [1, 1, 2]
    assert tables[0].fingerprint == tables[1].fingerprint != tables[2].fingerprint


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_cached_files_obey_the_umask(read: Read, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        read("text,label\na,x\n")
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}


def test_a_bad_file_leaves_nothing_in_the_cache(read: Read, tmp_path: Path) -> None:
    with pytest.raises(RowIssues):
        read("text,label\na,\n")
    assert not list((tmp_path / "cache/bert_tasks/tables").iterdir())


@pytest.mark.slow
def test_memory_stays_flat(tmp_path: Path) -> None:
    """200,000 rows (100 MB) are read in another process, whose peak memory is compared with a small file's."""
    program = (
        "import resource, sys; from bert_tasks.data.columns import Column;"
        "from bert_tasks.data.reading import read; from pathlib import Path;"
        "table = read(sys.argv[1], [Column(name='text', kind='text'),"
        " Column(name='label', kind='label', required=False)], cache_dir=Path(sys.argv[2]));"
        "print(len(table), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    figures = []
    for rows in (2000, 200_000):
        path = tmp_path / f"{rows}.csv"
        with path.open("w") as file:
            file.write("text,label\n")
            file.writelines(f"{'word ' * 100}{number},x\n" for number in range(rows))
        command = [sys.executable, "-c", program, str(path), str(tmp_path / "cache")]
        figures.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    (_, small), (count, large) = figures
    assert count == "200000"
    assert int(large) < 1.3 * int(small)


@pytest.mark.parametrize("key", [3, -1, slice(2, 5), slice(None), slice(1, 9, 3), slice(None, None, -1), [4, 0, 4], []])
def test_rows_are_selected_as_from_a_list(key: Any) -> None:
    batches = [pyarrow.record_batch({"number": [0, 1, 2]}), pyarrow.record_batch({"number": [3, None, 5, 6, 7, 8]})]
    table = pyarrow.Table.from_batches(batches)
    order = [8, 2, 2, 0, 5, 4, 7, 1, 3]
    expected = table.to_pylist()
    ordered = [expected[number] for number in order]
    reversed_rows = ArrowRows(table).select(order[::-1]).select(range(8, -1, -1))
    for rows, values in (
        (ArrowRows(table), expected),
        (ArrowRows(table).select(order), ordered),
        (reversed_rows, ordered),
    ):
        chosen = [values[number] for number in key] if isinstance(key, list) else values[key]
        assert rows[key] == chosen


POOL = pyarrow.proxy_memory_pool(pyarrow.default_memory_pool())  # buffers may outlive a test, and need their pool


@pytest.mark.parametrize("value", ["b" * 10_000, [7] * 2_000], ids=["text", "list"])
def test_a_few_rows_are_gathered_without_a_copy_of_the_others(value: Any, tmp_path: Path) -> None:
    """The batches of a column together may be larger than the memory, and than what an Arrow array can hold."""
    batch = {"value": [value] * 100}
    schema = pyarrow.table(batch).schema
    write_batches(tmp_path / "rows.arrow", [batch] * 30, schema)
    rows = ArrowRows.from_file(tmp_path / "rows.arrow")
    before = POOL.max_memory()
    usual = pyarrow.default_memory_pool()
    pyarrow.set_memory_pool(POOL)
    try:
        assert rows[[0, 2999, 1500]] == [{"value": value}] * 3
    finally:
        pyarrow.set_memory_pool(usual)
    assert 0 < POOL.max_memory() - before < 10 * pyarrow.array([value] * 3).nbytes


def arrow_file(text: str) -> Callable[[Path], None]:
    import pyarrow

    def write(path: Path) -> None:
        table = pyarrow.table({"text": [text]})
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)

    return write


def test_a_writer_that_was_overtaken_does_no_harm(tmp_path: Path) -> None:
    def overtaken(path: Path) -> None:
        store(tmp_path, "key", arrow_file("the other's"))
        arrow_file("mine")(path)

    rows = store(tmp_path, "key", overtaken).rows
    assert rows[0]["text"] == "mine"
    assert store(tmp_path, "key", arrow_file("a third")).rows[0]["text"] == "mine"


def test_a_note_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    outside = store(tmp_path, None, arrow_file("outside"))
    (path,) = tmp_path.glob("*.arrow")
    note = {"file": str(path), "rows": 1, "sha256": outside.sha256, "notes": []}
    (folder / "key.json").write_text(json.dumps(note))
    assert store(folder, "key", arrow_file("inside")).rows[0]["text"] == "inside"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match=r"the cache cannot be written .*no space left"):
        store(tmp_path, "key", full)
    assert list(tmp_path.iterdir()) == []
