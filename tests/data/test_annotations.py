"""Files as annotation tools write them: each becomes the same texts with the same entities."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bert_tasks import TaskModel, fit
from bert_tasks.data.conll import entities
from bert_tasks.data.formats import FORMATS
from bert_tasks.data.issues import RowIssues
from bert_tasks.data.options import ReadOptions
from bert_tasks.data.reading import read as read_rows
from bert_tasks.data.rows import Rows
from bert_tasks.data.words import place_words
from bert_tasks.errors import DataError
from bert_tasks.init import init_recipe
from bert_tasks.tasks import SequenceClassification, Task, TokenClassification

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


def doccano_relations(text: str, spans: Spans) -> dict[str, Any]:
    items = [{"id": 1, "label": label, "start_offset": start, "end_offset": end} for start, end, label in spans]
    return {"id": 7, "text": text, "entities": items, "relations": [], "Comments": []}


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


def label_studio_min(text: str, spans: Spans) -> dict[str, Any]:
    regions = label_studio(text, spans)["annotations"][0]["result"]
    return {"text": text, "id": 3, "label": [region["value"] for region in regions], "annotator": 1}


def spacy_document(text: str, spans: Spans) -> dict[str, Any]:
    return {"text": text, "ents": [{"start": s, "end": e, "label": label} for s, e, label in spans], "tokens": []}


def spacy_pair(text: str, spans: Spans) -> list[Any]:
    return [text, {"entities": [list(span) for span in spans]}]


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


LINES = {f"{item.__name__}.jsonl": item for item in (doccano, doccano_relations, prodigy, cluener)}
LISTS = {f"{item.__name__}.json": item for item in (label_studio, label_studio_min, spacy_document, spacy_pair)}
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


def test_rows_that_nobody_accepted_are_skipped_and_counted(tmp_path: Path) -> None:
    text, spans = TEXTS[0]
    answers = [json.dumps(prodigy(text, spans, answer)) for answer in ("accept", "reject", "ignore")]
    path = tmp_path / "prodigy.jsonl"
    path.write_text("\n".join(answers))
    assert read(path).notes == (
        "1 of 3 rows skipped: the answer is 'reject' (line 2)",
        "1 of 3 rows skipped: the answer is 'ignore' (line 3)",
    )
    path = tmp_path / "studio.json"
    path.write_text(json.dumps([label_studio(text, spans), label_studio(text, spans, cancelled=True)]))
    assert read(path).notes == ("1 of 2 rows skipped: not annotated (line 2)",)


@pytest.mark.parametrize(
    ("name", "item"),
    [
        (
            "studio.json",
            {
                "id": 1,
                "data": {"text": "a"},
                "annotations": [{"result": [{"type": "choices", "value": {"choices": ["A"]}}]}],
            },
        ),
        ("documents.json", {"text": "a", "ents": [], "cats": {"A": 1.0, "B": 0.0}}),
        ("choice.jsonl", {"text": "a", "options": [], "accept": ["A"], "answer": "accept", "_task_hash": 1}),
    ],
)
def test_chosen_labels_are_labels_of_the_text(name: str, item: object, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(json.dumps([item] if name.endswith(".json") else item))
    columns = SequenceClassification.of(labels=("A", "B")).columns
    (row,) = read_rows(path, columns, cache_dir=tmp_path)
    assert (row["text"], row["label"]) == ("a", "A")


@pytest.mark.parametrize("name", ["label_studio.json", "spacy_pair.json"])
def test_an_item_that_the_tool_does_not_write_is_named(name: str, tmp_path: Path) -> None:
    path = write(name, tmp_path)
    path.write_text(json.dumps([*json.loads(path.read_text()), [1]]))
    with pytest.raises(RowIssues, match=rf"{name}:6: not an item as (label-studio|spacy) writes it"):
        read(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("T1\tPER 0 3;5 7\tAda", "notes.txt:1: an entity with gaps, or over several lines"),
        ("T1\tPER 0 8\tAda", "notes.txt:1: an entity with gaps, or over several lines"),
        ("T1 PER 0 3 Ada", "notes.ann:1: expected a line such as 'T1<tab>PER 0 5<tab>Alice'"),
    ],
)
def test_entities_that_no_line_of_a_text_has_are_named(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("Ada.\nBob.\n")
    path = tmp_path / "notes.ann"
    path.write_text(line)
    with pytest.raises(DataError, match=re.escape(message)):
        read(path)


@pytest.mark.parametrize(
    "item",
    [
        {"text": "Rome is far", "entities": [{"start": 8, "end": 11, "label": "LOC", "text": "Rome"}]},
        label_studio("Rome is far", [(8, 11, "LOC")]),
        prodigy("Rome is far", [(8, 11, "LOC")]),
        spacy_document("Rome is far", [(8, 11, "LOC")]),
        {"text": "Rome is far", "label": {"LOC": {"Rome": [[8, 10]]}}},
        "T1\tLOC 8 11\tRome\n",
    ],
    ids=["own", "label_studio", "prodigy", "spacy", "cluener", "brat"],
)
def test_the_text_that_a_span_repeats_must_be_in_the_document(item: Any, tmp_path: Path) -> None:
    path = tmp_path / "notes.ann"
    if isinstance(item, str):
        path.with_suffix(".txt").write_text("A line.\nRome is far\n")
        path.write_text("T1\tLOC 16 19\tRome\n")
    else:
        regions = [*(item["annotations"][0]["result"] if "annotations" in item else ()), *item.get("spans", ())]
        for span in [*(region.get("value", region) for region in regions), *item.get("ents", ())]:
            span["text"] = "Rome"
        path = path.with_suffix(".jsonl" if "_task_hash" in item else ".json")
        path.write_text(json.dumps([item]) if path.suffix == ".json" else json.dumps(item))
    names = {"entities": "label"} if "label" in item else None
    line = 2 if isinstance(item, str) else 1
    told = r"a misplaced span .* The text has 'far' there, but the span says 'Rome'"
    with pytest.raises(RowIssues, match=rf"{path.stem}\.\w+:{line}: {told}"):
        read(path, names)


@pytest.mark.parametrize("counted", [0, 1])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_byte_order_mark_moves_no_entity(mark: str, counted: int, tmp_path: Path) -> None:
    """brat counts the mark as a character, other programs do not."""
    path = tmp_path / "notes.ann"
    path.with_suffix(".txt").write_text(f"{mark}Rome is far\nAda left\n", "utf-8")
    shift = len(mark) * counted
    path.write_text(f"{mark}T1\tLOC {shift} {4 + shift}\tRome\nT2\tPER {12 + shift} {15 + shift}\tAda\n", "utf-8")
    assert [row["tags"] for row in read(path)] == [["B-LOC", "O", "O"], ["B-PER", "O"]]


def test_a_folder_of_brat_is_one_source(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"d{number}.txt").write_text(f"Text {number}\nAda left\n")
        (tmp_path / f"d{number}.ann").write_text("T1\tPER 7 10\tAda\n")
    rows = [(row["document"], row["tags"]) for row in read(tmp_path)]
    assert rows == [(f"d{number}", tags) for number in range(3) for tags in (["O", "O"], ["B-PER", "O"])]
    (tmp_path / "d1.ann").write_text("T1\tPER 7 10\tBob\n")
    with pytest.raises(RowIssues, match=r"d1\.txt:2: a misplaced span"):
        read(tmp_path)


def test_a_text_beside_its_annotations_is_needed_and_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "notes.ann"
    path.write_text("T1\tPER 0 3\tAda\n")
    with pytest.raises(DataError, match=r"no text beside it, notes\.txt"):
        read(path)
    path.with_suffix(".txt").write_text("Ada.\n")
    assert [row["text"] for row in read(path)] == ["Ada."]
    path.with_suffix(".txt").write_text("Ada!\n\nBob!")
    assert [(row["text"], row["document"]) for row in read(path)] == [("Ada!", "notes"), ("Bob!", "notes")]


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
