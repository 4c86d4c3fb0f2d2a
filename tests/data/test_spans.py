"""Entities by their characters in a text: the forms that are read, the tags that they become, and their errors."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from bert_tasks.data.conll import entities
from bert_tasks.data.issues import RowIssues
from bert_tasks.data.rows import Rows
from bert_tasks.data.spans import parse_spans, word_tags
from bert_tasks.data.words import word_spans
from bert_tasks.errors import DataError
from bert_tasks.tasks import TokenClassification

Read = Callable[..., Rows]
COLUMNS = TokenClassification.columns
ALPHABET = "ab 'é中文日عربي𝒞😀\u0301\r\n.-1"


def read_rows(read: Read, *rows: dict[str, Any], **options: Any) -> Rows:
    return read("".join(json.dumps(row) + "\n" for row in rows), "rows.jsonl", columns=COLUMNS, **options)


@pytest.mark.parametrize(
    "spans",
    [
        [[0, 3, "PER"], [14, 16, "LOC"]],
        [{"start": 14, "end": 16, "entity_group": "LOC"}, {"start": 0, "end": 3, "label_name": "PER", "word": "ada"}],
        [{"start_offset": 0, "end_offset": 3, "label": "PER"}, {"start": 14, "end": 16, "labels": ["LOC"]}],
        {"PER": {"Ada": [[0, 2]]}, "LOC": {"北京": [[14, 15]]}},
        '[[0, 3, "PER"], [14, 16, "LOC"]]',
    ],
)
def test_every_form_is_read(read: Read, spans: object) -> None:
    (row,) = read_rows(read, {"text": "Ada's 😀 is in 北京.", "entities": spans})
    assert row["words"] == ["Ada", "'s", "😀", "is", "in", "北", "京", "."]
    assert row["tags"] == ["B-PER", "O", "O", "O", "O", "B-LOC", "I-LOC", "O"]


def test_offsets_of_a_browser_are_told_by_the_text_of_the_span() -> None:
    """JavaScript counts a character outside the basic plane as two."""
    spans = parse_spans([{"start": 5, "end": 8, "label": "PER", "text": "Ada"}])
    assert word_tags(spans, word_spans("😀😀 Ada"), "😀😀 Ada") == (["O", "O", "B-PER"], 0)


def test_spans_come_back_from_the_tags() -> None:
    """Any words of any text are an entity that its tags give back, with the same characters."""
    generator = random.Random(0)
    for _ in range(500):
        text = "".join(generator.choices(ALPHABET, k=generator.randrange(1, 40)))
        words = word_spans(text)
        bounds = sorted(generator.sample(range(len(words) + 1), k=min(len(words) + 1, generator.randrange(6))))
        ranges = list(zip(bounds[::2], bounds[1::2], strict=False))
        spans = [[words[first][0], words[end - 1][1], generator.choice("AB")] for first, end in ranges]
        tags, moved = word_tags(parse_spans(spans), words, text)
        read = [[words[entity.start][0], words[entity.end - 1][1], entity.type] for entity in entities(tags)]
        assert (read, moved) == (spans, 0)


def test_what_becomes_of_a_row_is_noted_by_its_line(read: Read) -> None:
    table = read_rows(
        read,
        {"text": "Frankfurter", "entities": [[0, 9, "LOC"]]},
        {"text": "Ada", "tags": ["O"], "entities": [[0, 3, "PER"]]},
        {"text": "Ada", "tags": ["S-PER"], "entities": [[0, 3, "PER"]]},
        {"text": " Ada ", "entities": [[0, 5, "PER"]]},
    )
    assert [row["tags"] for row in table] == [["B-LOC"], ["B-PER"], ["B-PER"], ["B-PER"]]
    assert table.notes == (
        "1 of 4 rows had spans that begin or end within a word, which were moved to its borders (line 1)",
        "1 of 4 rows had other tags, which the spans replaced (line 2)",
    )


def test_words_without_a_text_are_counted_with_a_space_between_them(read: Read) -> None:
    """As predictions of words count them, which may be corrected and read again."""
    (row,) = read_rows(read, {"words": ["Ada", "Love lace", "!"], "entities": [[4, 13, "PER"]]})
    assert row["tags"] == ["O", "B-PER", "O"]


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([[0, 7, "A"], [4, 7, "B"]], "the spans 'Ada Bob' (A) and 'Bob' (B) share a word"),
        ([[0, 2, "A"], [2, 3, "B"]], "the spans 'Ad' (A) and 'a' (B) share a word"),
        ([[3, 4, "A"]], "the span ' ' (A) has no word"),
        ([[0, 9, "A"]], "a span that ends at 9"),
        ([[3, 3, "A"]], "span 1 is from 3 to 3"),
        ([[0, 3, "A"], [4, "7", "A"]], "span 2 has no whole numbers as start and end"),
        ([[0, True, "A"]], "span 1 has no whole numbers as start and end"),
        ([[0, 3]], "span 1 is not [start, end, label]"),
        ([[0, 3, None]], "not a label name"),
        ([{"start": 0, "end": 3, "label": "A", "text": "Bob"}], "a misplaced span"),
        ({"A": {"Ada": [0]}}, "not spans by type and text"),
        ("Ada", "not JSON"),
        (3, "not a list of spans"),
    ],
)
def test_what_is_wrong_is_said_with_the_line_and_the_spans(read: Read, spans: object, message: str) -> None:
    with pytest.raises(RowIssues) as caught:
        read_rows(read, {"text": "Ada Bob", "entities": []}, {"text": "Ada Bob", "entities": spans})
    line = str(caught.value).splitlines()[1]
    assert line.startswith(f"  rows.jsonl:2: {message} in column 'entities': "), line


def test_a_file_needs_tags_or_entities_where_it_is_trained_on(read: Read) -> None:
    with pytest.raises(DataError, match="no column 'tags', nor 'entities'"):
        read_rows(read, {"text": "Ada", "label": []})
    (row,) = read_rows(read, {"text": "Ada", "label": []}, require_labels=False)
    assert row["words"] == ["Ada"]
