"""Files as annotation tools write them: each becomes the same texts with the same entities."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bert_tasks import TaskModel, fit
from bert_tasks.data.conll import entities
from bert_tasks.data.formats import FORMATS
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.reading import read as read_rows
from bert_tasks.data.rows import Rows
from bert_tasks.data.words import place_words
from bert_tasks.errors import DataError
from bert_tasks.init import init_recipe
from bert_tasks.tasks import Task, TokenClassification

Spans = list[tuple[int, int, str]]
TEXTS: tuple[tuple[str, Spans], ...] = (
    ("😀 Ada Lovelace met José in Tōkyō.", [(2, 14, "PER"), (19, 23, "PER"), (27, 32, "LOC")]),
    ("وصل محمد علي إلى القاهرة.", [(4, 12, "PER"), (17, 24, "LOC")]),
    ("叶老桂在北京工作。", [(0, 3, "PER"), (4, 6, "LOC")]),
    ("Nobody, nowhere.", []),
    ("𐐀live left Paris", [(0, 5, "PER"), (11, 16, "LOC")]),
)


def utf16(text: str, index: int) -> int:
    return len(text[:index].encode("utf-16-le")) // 2


def doccano(text: str, spans: Spans) -> dict[str, Any]:
    return {"id": 7, "text": text, "label": [list(span) for span in spans], "Comments": []}


def prodigy(text: str, spans: Spans, answer: str = "accept") -> dict[str, Any]:
    tokens = [{"text": text, "start": 0, "end": len(text), "id": 0, "ws": False}]
    marked = [{"start": s, "end": e, "token_start": 0, "token_end": 0, "label": label} for s, e, label in spans]
    hashes = {"_input_hash": -1, "_task_hash": 1, "_view_id": "ner_manual"}
    return {"text": text, "tokens": tokens, "spans": marked, **hashes, "answer": answer, "_timestamp": 1700000000}


def cluener(text: str, spans: Spans) -> dict[str, Any]:
    by_type: dict[str, dict[str, list[list[int]]]] = {}
    for start, end, label in spans:
        by_type.setdefault(label, {}).setdefault(text[start:end], []).append([start, end - 1])
    return {"text": text, "label": by_type}


def label_studio(text: str, spans: Spans, *, cancelled: bool = False) -> dict[str, Any]:
    places = [
        {"start": utf16(text, s), "end": utf16(text, e), "text": text[s:e], "labels": [label]} for s, e, label in spans
    ]
    names = {"from_name": "label", "to_name": "text", "type": "labels", "origin": "manual"}
    result = [{"value": value, "id": f"r{number}", **names} for number, value in enumerate(places)]
    annotation = {"id": 1, "completed_by": 1, "result": result, "was_cancelled": cancelled, "ground_truth": False}
    return {"id": 3, "annotations": [annotation], "predictions": [], "data": {"text": text}, "meta": {}}


def spacy_document(text: str, spans: Spans) -> dict[str, Any]:
    return {"text": text, "ents": [{"start": s, "end": e, "label": label} for s, e, label in spans], "tokens": []}


def write_brat(path: Path) -> None:
    lines, offset = [], 0
    for text, spans in TEXTS:
        lines += [f"T{len(lines)}\t{label} {offset + s} {offset + e}\t{text[s:e]}" for s, e, label in spans]
        offset += len(text) + 2
    path.with_suffix(".txt").write_text("\r\n".join(text for text, _ in TEXTS), newline="", encoding="utf-8")
    path.write_text("\n".join([*lines, "R1\tlives Arg1:T0 Arg2:T2", "#1\tAnnotatorNotes T0\tsure?", ""]), "utf-8")


def write_docbin(path: Path) -> None:
    import spacy
    from spacy.tokens import DocBin
    from spacy.training import biluo_tags_to_spans, offsets_to_biluo_tags
    from spacy.util import filter_spans

    nlp, documents = spacy.blank("zh", config={"nlp": {"tokenizer": {"segmenter": "char"}}}), DocBin()
    for text, spans in TEXTS:
        document = nlp(text)
        tags = offsets_to_biluo_tags(document, [list(span) for span in spans])
        document.set_ents(filter_spans(biluo_tags_to_spans(document, tags)))
        documents.add(document)
    documents.to_disk(path)


LINES = {f"{item.__name__}.jsonl": item for item in (doccano, prodigy, cluener)}
LISTS = {f"{item.__name__}.json": item for item in (label_studio, spacy_document)}
FILES = {"notes.ann": write_brat, "train.spacy": write_docbin}


def write(name: str, folder: Path) -> Path:
    """A file of ``TEXTS`` as a tool writes it."""
    path = folder / name
    if name in FILES:
        FILES[name](path)
    elif name in LINES:
        lines = (json.dumps(LINES[name](*text), ensure_ascii=False) for text in TEXTS)
        path.write_text("".join(f"{line}\r\n" for line in lines), "utf-8", newline="")
    else:
        path.write_text(json.dumps([LISTS[name](*text) for text in TEXTS], indent=2), "utf-8")
    return path


def read(path: Path, columns: Mapping[str, str] | None = None, *, task: type[Task] = TokenClassification) -> Rows:
    names = ReadOptions(columns=columns)
    return read_rows(path, task.columns, names, cache_dir=path.parent / "cache")


@pytest.mark.parametrize("name", [*LINES, *LISTS, *FILES])
def test_every_tool_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    """``init`` finds the task and the columns; what it writes reads the texts with their entities."""
    path = write(name, tmp_path)
    draft = init_recipe(path, validation=path, output=tmp_path / "recipe.toml")
    assert draft.task == "token-classification"
    rows = []
    for row in read(path, draft.columns):
        places = place_words(row["words"], row["text"])
        assert places is not None
        spans = [(places[entity.start][0], places[entity.end - 1][1], entity.type) for entity in entities(row["tags"])]
        rows.append((row["text"], spans))
    assert rows == list(TEXTS)


def test_formats_that_are_read_as_a_whole_are_no_streams() -> None:
    names = ("prodigy", "label-studio", "spacy", "docbin", "brat")
    assert [name for name in names if FORMATS[name].can_stream] == ["prodigy"]


@pytest.mark.parametrize("counted", [0, 1])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_byte_order_mark_moves_no_entity(mark: str, counted: int, tmp_path: Path) -> None:
    """brat counts the mark as a character, other programs do not."""
    path = tmp_path / "notes.ann"
    path.with_suffix(".txt").write_text(f"{mark}Rome is far\nAda left\n", "utf-8")
    shift = len(mark) * counted
    path.write_text(f"{mark}T1\tLOC {shift} {4 + shift}\tRome\nT2\tPER {12 + shift} {15 + shift}\tAda\n", "utf-8")
    assert [row["tags"] for row in read(path)] == [["B-LOC", "O", "O"], ["B-PER", "O"]]


def test_a_text_beside_its_annotations_is_needed_and_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "notes.ann"
    path.write_text("T1\tPER 0 3\tAda\n")
    with pytest.raises(DataError, match=r"no text beside it, notes\.txt"):
        read(path)
    path.with_suffix(".txt").write_text("Ada.\n")
    assert [row["text"] for row in read(path)] == ["Ada."]
    path.with_suffix(".txt").write_text("Ada!\n\nBob!")
    assert [(row["text"], row["document"]) for row in read(path)] == [("Ada!", "notes"), ("Bob!", "notes")]


@pytest.mark.slow
def test_a_model_that_has_learnt_the_spans_predicts_them(checkpoint: Path, tmp_path: Path) -> None:
    """From a file of an annotation tool to the characters of predictions, in any script."""
    path = write("cluener.jsonl", tmp_path)
    labels = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
    model = TaskModel.from_pretrained(checkpoint, task=TokenClassification.of(labels=labels, max_length=48))
    reading = {"columns": {"entities": "label"}, "epochs": 30, "eval_steps": 30, "learning_rate": 4e-3, "batch_size": 5}
    fit(model, path, path, output_dir=tmp_path / "run", progress=False, report=False, **reading)
    predictions = model.predict([text for text, _ in TEXTS])
    assert [
        [(entity.start, entity.end, entity.entity_group) for entity in prediction.entities]
        for prediction in predictions
    ] == [spans for _, spans in TEXTS]
