"""Corpora: documents of files of text, and rows whose sentences are given."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_tasks.data.columns import Column
from bert_tasks.data.formats import file_format
from bert_tasks.data.issues import RowIssues
from bert_tasks.data.options import Document, ReadOptions
from bert_tasks.data.parsers import text_rows
from bert_tasks.data.splits import DataSpec, load_splits
from bert_tasks.errors import DataError
from bert_tasks.model.inputs import load_table
from bert_tasks.tasks import TokenClassification

TEXT = Column(name="text", kind="text")
CORPUS = (TEXT, Column(name="sentences", kind="texts", required=False))
WORDS = (Column(name="words", kind="words"), Column(name="tags", kind="tags", required=False))


@given(
    st.lists(st.lists(st.text(st.characters(codec="utf-8"), max_size=8), max_size=4), max_size=4),
    st.sampled_from(["blank-line", "line", "file"]),
)
def test_no_sentence_is_lost_whatever_a_document_is(groups: Sequence[Sequence[str]], document: Document) -> None:
    lines = [line for group in groups for line in [*(sentence.replace("\n", " ") for sentence in group), ""]]
    rows = [record.cells for record in text_rows([f"{line}\n" for line in lines], document)]
    assert [line for row in rows for line in row["text"].split("\n")] == [s for line in lines if (s := line.strip())]
    if document != "line":
        assert ["\n".join(row["sentences"]) for row in rows] == [row["text"] for row in rows]
    if document == "blank-line":
        assert len(rows) <= len(groups) + sum(not sentence.strip() for group in groups for sentence in group)


@pytest.mark.parametrize(
    ("content", "columns", "expected"),
    [
        ("EU NNP\nsays VBZ\n", CORPUS, "text"),
        ("EU NNP\nsays\n", WORDS, "conll"),
        # Without a task, the lines decide.
        ("-DOCSTART- -X- O\n\nEU NNP B-ORG\nsays VBZ O\n", None, "conll"),
        ("It rained.\nThen it stopped.\n", None, "text"),
        ("word\nlist\n", None, "text"),
        ("", None, "text"),
    ],
)
def test_the_task_says_what_a_txt_file_is(content: str, columns: Any, expected: str, tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text(content)
    assert file_format(None, tmp_path / "rows.txt", columns).name == expected


def test_a_document_may_be_a_line(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("a b\nc d\n\ne f\n")
    spec = DataSpec(train=str(tmp_path / "rows.txt"), document="line")
    with pytest.raises(DataError, match=r"document = 'paragraph' is not one of 'blank-line', 'line', 'file'"):
        ReadOptions(document="paragraph")  # type: ignore[arg-type]
    splits = load_splits(spec, columns=CORPUS, seed=0, cache_dir=tmp_path / "cache")
    rows = [*splits.train, *splits.validation[""]]
    assert sorted(row["text"] for row in rows) == ["a b", "c d", "e f"]


@pytest.mark.parametrize("unlabelled", [False, True])
def test_training_rows_are_documents_also_with_a_teacher(tmp_path: Path, unlabelled: bool) -> None:
    """A teacher's rows may lack labels; those of a corpus have none in any case."""
    path = tmp_path / "rows.txt"
    path.write_text("a b\nc d\n\ne f\n")
    spec = DataSpec(train=str(path))
    splits = load_splits(spec, columns=CORPUS, seed=0, cache_dir=tmp_path / "cache", unlabelled=unlabelled)
    rows = [*splits.train, *splits.validation[""]]
    assert sorted(row["text"] for row in rows) == ["a b\nc d", "e f"]


def test_a_tagger_reads_a_text_on_each_line_whatever_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "rows.text"
    path.write_text("a b\nc d\n\ne f\n")
    task: Any = TokenClassification.of(labels=("O", "B-X", "I-X"))
    counts = [len(load_table(path, task.columns, labels=labels)) for labels in ("unread", "optional")]
    assert counts == [4, 4]


def test_the_rows_of_several_files_follow_each_other(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("Two.\nThree.\n\nFour.\n")
    (tmp_path / "a.txt").write_text("One.\n")
    (tmp_path / "c.jsonl").write_text('{"text": "Five."}\n{"text": "Six."}\n')
    (tmp_path / "d.txt").mkdir()
    names = [str(tmp_path / "*.txt"), str(tmp_path / "c.jsonl"), str(tmp_path / "a.txt")]
    spec = DataSpec(train=tuple(names), validation=str(tmp_path / "a.txt"))
    table = load_splits(spec, columns=CORPUS, seed=0).train
    texts = ["One.", "Two.\nThree.", "Four.", "Five.", "Six."]
    assert [row["text"] for row in table] == texts
    assert [row.get("sentences") for row in table] == [["One."], ["Two.", "Three."], ["Four."], None, None]
    assert table.source.endswith("a.txt and 2 other files")
    (tmp_path / "b.txt").write_text("Two.\nThree.\n\nVier.\n")
    assert load_splits(spec, columns=CORPUS, seed=0).train.fingerprint != table.fingerprint


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\*\.txt: no file matches this pattern"):
        load_splits(DataSpec(train=str(tmp_path / "none*.txt")), columns=CORPUS, seed=0)
    (tmp_path / "odd [1].txt").write_text("One.\n\nTwo.\n\nThree.\n")
    assert len(load_splits(DataSpec(train=str(tmp_path / "odd [1].txt")), columns=CORPUS, seed=0).train) == 2
    with pytest.raises(ValueError, match="train is empty"):
        DataSpec(train=("a.txt", ""))
    for name, line in (("x.jsonl", '{"text": 1}'), ("y.jsonl", '{"text": [2]}')):
        (tmp_path / name).write_text(line + "\n")
    with pytest.raises(RowIssues, match=r"(?s)x\.jsonl.*y\.jsonl"):
        load_splits(DataSpec(train=str(tmp_path / "?.jsonl")), columns=CORPUS, seed=0)
