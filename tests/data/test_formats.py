"""A file format is one object: registering it makes its files readable everywhere."""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from openpyxl import Workbook
from transformers import PreTrainedTokenizerBase

from bert_tasks.data.batch import Record, Records
from bert_tasks.data.checks import data_report
from bert_tasks.data.columns import Column
from bert_tasks.data.formats import (
    FORMATS,
    Format,
    base,
    expected_files,
    file_format,
    files_of_split,
    register_format,
)
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.rows import Rows
from bert_tasks.data.splits import Splits
from bert_tasks.errors import DataError
from bert_tasks.inference import predict
from bert_tasks.init.sample import read_sample
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks import SequenceClassification
from support.small_checkpoints import save_checkpoint

ROWS = "review=fine label=good\nreview=poor label=bad\n"


class KeyValues(Format):
    """Lines such as ``review=fine label=good``."""

    def records(self, lines: Iterator[str], path: Path, options: ReadOptions) -> Records:
        cells = (dict(pair.split("=") for pair in line.split()) for line in lines)
        return Records(None, (Record(number, row) for number, row in enumerate(cells, start=1)))


@pytest.fixture(autouse=True)
def key_values() -> Iterator[None]:
    register_format(KeyValues(name="kv", extensions=(".kv",), columns={"text": "review"}))
    yield
    del base._FORMATS["kv"]


@pytest.mark.parametrize("name", ["rows.kv", "rows.kv.gz", "rows.data"])
def test_rows_are_read_by_the_extension_or_the_name(name: str, read: Callable[..., Rows]) -> None:
    rows = read(ROWS, name, format="kv" if name == "rows.data" else None)
    assert [(row["text"], row["label"], row["line"]) for row in rows] == [("fine", "good", 1), ("poor", "bad", 2)]
    with pytest.raises(DataError, match="header = false is for csv and tsv files, but kv has no header line"):
        read(ROWS, name, format="kv", header=False)


def test_splits_init_and_predict_know_the_extension(tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "train.kv"
    path.write_text(ROWS)
    assert files_of_split(tmp_path, "train", None) == [path]
    assert expected_files("train", "kv") == "train.kv"
    assert read_sample(path, ReadOptions()).columns == ("review", "label")
    save_checkpoint(tmp_path / "base", "roberta", bpe_tokenizer)
    model = TaskModel.from_pretrained(
        tmp_path / "base", task=SequenceClassification.of(labels=("bad", "good"), max_length=16)
    )
    assert [row.label for row in predict(model, path)] == [row.label for row in model.predict(["fine", "poor"])]


class Failing(Format):
    """Fails as libraries do: while it opens a file, or at its second row."""

    at_once: ClassVar[Exception | None] = None
    later: ClassVar[Exception | None] = None

    def records(self, lines: Iterator[str], path: Path, options: ReadOptions) -> Records:
        if self.at_once is not None:
            raise self.at_once
        return Records(None, self.rows())

    def rows(self) -> Iterator[Record]:
        yield Record(1, {"text": "a"})
        if self.later is not None:
            raise self.later


@pytest.mark.parametrize("moment", ["at_once", "later"])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("bad block\nin the file"), "bad block"),
        (KeyError("xl/workbook.xml"), "KeyError 'xl/workbook.xml'"),
        (AssertionError(), "AssertionError"),
        (OSError("no such part"), "no such part"),
        (RecursionError("too deep"), "too deep"),
    ],
)
def test_what_a_parser_raises_names_the_file(
    moment: str, error: Exception, reason: str, read: Callable[..., Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Failing, moment, error)
    register_format(Failing(name="kv", extensions=(".kv",)))
    with pytest.raises(DataError) as raised:
        read("a", "rows.kv", format="kv")
    assert f"rows.kv: cannot be read as kv ({reason}). Check that" in str(raised.value)


def test_other_errors_are_not_taken_for_a_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.kv"
    path.write_text(ROWS)
    layout = Failing(name="kv", extensions=(".kv",))
    with pytest.raises(ZeroDivisionError), layout.open(path, ReadOptions()) as opened:
        raise ZeroDivisionError(next(opened.batches))  # of the reader of the rows
    for error in (MemoryError("no memory"), DataError("of the parser")):
        monkeypatch.setattr(Failing, "later", error)
        with pytest.raises(type(error), match=str(error)), layout.open(path, ReadOptions()) as opened:
            list(opened.batches)
    monkeypatch.setattr(Failing, "later", OSError(errno.EIO, "Input/output error"))
    with pytest.raises(OSError, match="Input/output error") as raised, layout.open(path, ReadOptions()) as opened:
        list(opened.batches)
    assert raised.value.filename == str(path)


def test_a_library_that_warns_is_heard_by_nobody(tmp_path: Path, read: Callable[..., Rows]) -> None:
    """openpyxl warns about a date that none is, which would be an error here."""
    book = Workbook()
    sheet = book.active
    sheet.append(["text", "day"])
    sheet.append(["a", 10**9])
    sheet["B2"].number_format = "yyyy-mm-dd"
    book.save(tmp_path / "rows.xlsx")
    columns = (Column(name="text", kind="text"), Column(name="day", kind="text"))
    rows = read((tmp_path / "rows.xlsx").read_bytes(), "book.xlsx", columns=columns)
    assert [row["day"] for row in rows] == ["#VALUE!"]


@pytest.mark.parametrize(
    ("task", "labels"),
    [
        ("mnli", ["entailment", "neutral", "contradiction"]),
        ("ax", ["entailment", "neutral", "contradiction"]),
        ("qnli", ["entailment", "not_entailment"]),
        ("rte", ["entailment", "not_entailment"]),
        ("wnli", ["not_entailment", "entailment"]),
        ("mrpc", ["not_equivalent", "equivalent"]),
        ("qqp", ["not_duplicate", "duplicate"]),
    ],
)
def test_labels_of_glue_are_in_the_order_of_the_hub(task: str, labels: list[str]) -> None:
    assert list(FORMATS[f"glue/{task}"].label_names.items()) == [(str(i), label) for i, label in enumerate(labels)]


def test_notes_on_skipped_rows_come_from_the_cache_and_are_reported(read: Callable[..., Rows]) -> None:
    columns = [Column(name=name, kind="text") for name in ("text", "text_pair")]
    columns.append(Column(name="label", kind="label", required=False))
    content = "question1\tquestion2\tis_duplicate\na\tb\t1\n" + "broken\n" * 6
    for _ in range(2):  # parsed, and from the cache
        table = read(content, "train.tsv", format="glue/qqp", columns=columns)
        note = "6 of 7 rows skipped: too few cells (line 3, 4, 5, 6, 7, ...)"
        assert table.notes == (note,)
    report = data_report(Splits(train=table, validation={}), columns=columns)
    assert f"  {note}" in report.lines()


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ('{"version": "v2.0", "data": [{"title": "Trips"', True),
        ('{\n "version": "v2.0",\n "data": [\n  {', True),
        ('\ufeff{"version": "1.1", "data": [{', True),
        ('{"name": "my \u00e9 set", "count": 3, "final": true, "data": [\n {', True),
        ('{"question": "?", "context": "c", "answers": []}', False),
        ('{"text": "a"}\n{"data": [{}]}', False),
        ('{"data": []}', False),
        ('[{"data": [{}]}]', False),
        ("", False),
    ],
)
def test_what_looks_like_squad(tmp_path: Path, start: str, expected: bool) -> None:
    path = tmp_path / "a.json"
    path.write_text(start, encoding="utf-8")
    assert (file_format(None, path).name == "squad") is expected


@pytest.mark.parametrize("format", ["squad", "jsonl"])
def test_json_of_any_depth_is_an_error_of_the_file(format: str, read: Callable[..., Rows]) -> None:
    with pytest.raises(DataError, match=r"a\.json: .*that cannot be read \(maximum recursion depth"):
        read("[" * 100_000, "a.json", format=format)
